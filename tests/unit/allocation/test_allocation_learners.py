"""Networks that allocate: what leaves training is what was trained, and cloning clones."""

import numpy as np
import pytest
import torch

import envs
from tokenyard.allocation.artifact import AllocationArtifact, learned_allocation
from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.observation import ALLOWED
from tokenyard.allocation.plans import load_allocation, plan_table
from tokenyard.allocation.policies.learned import NetworkPlan
from tokenyard.allocation.scenario import SwitchBudget
from tokenyard.allocation.simulator.run import StreamRunner, run_allocation
from tokenyard.rl.allocation.training import AllocationTrialConfig, demonstrations

needs_rllib = pytest.mark.usefixtures("ray_cluster")

SCENARIO = load_allocation("a100x8_13b")
SCENARIO = SCENARIO.model_copy(
    update={"demand": SCENARIO.demand.model_copy(update={"source": "generator"})}
)


def training(algorithm, scenario=SCENARIO, **fields):
    envs.register()
    config = AllocationTrialConfig(algorithm=algorithm, scenario="a100x8_13b", **fields)
    return config.make_training(scenario)


@needs_rllib
@pytest.mark.parametrize(
    ("algorithm", "max_batches"), [("ppo", (256,)), ("ppo", (32, 128, 256)), ("dqn", (256,))]
)
def test_the_exported_network_sees_and_decides_as_the_module_does(algorithm, max_batches, tmp_path):
    scenario = SCENARIO.model_copy(update={"max_batches": max_batches})
    learner = training(algorithm, scenario)
    try:
        module = learner.module
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            # A fresh network hardly decides anything.
            module.policy_layers[-1].weight.normal_(0.0, 0.5, generator=rng)
        learner.artifact({}, {}).save(tmp_path / "p.npz")
        stream = demand_source(scenario).episode(20, np.random.default_rng(0))
        policy = learned_allocation(AllocationArtifact.load(tmp_path / "p.npz"))
        assert isinstance(policy, NetworkPlan)
        seen = []

        class Spy:
            def allocate(self, state):
                seen.append(policy.observe(state).copy())
                return policy.allocate(state)

        outcomes = run_allocation(scenario, stream, Spy())
        runner = StreamRunner(scenario, stream)
        shapes = runner.sim.shapes
        for plan, row in zip(outcomes.plans, seen, strict=True):
            shown = runner.sim.observe()[0]
            assert shown == pytest.approx(row, abs=1e-6)
            batch = {"obs": torch.from_numpy(shown[None].copy())}
            with torch.no_grad():
                if algorithm == "dqn":
                    preferences = module.compute_q_values(batch)["qf_preds"][0]
                else:
                    inputs = module.forward_inference(batch)["action_dist_inputs"][0]
                    limits, _, preferences = inputs.split(module.output_sizes)
                    if len(limits):
                        limit = max_batches[int(limits.argmax())]
                        assert runner.sim.table.plans[plan].max_batch == limit
            assert int(preferences.argmax()) == shapes[plan]
            runner.sim.step(np.array([plan]))
    finally:
        learner.stop()


@needs_rllib
def test_a_cloned_actor_agrees_with_what_it_was_shown():
    learner = training("ppo")
    try:
        assert learner.clone(seed=0) > 0.8
        assert learner.artifact({}, {}).metadata.trainer == "ppo_cloned"
    finally:
        learner.stop()


@needs_rllib
def test_what_is_demonstrated_where_no_change_is_allowed_is_to_stay():
    budget = SwitchBudget(switches=1, period_slots=288)
    scenario = SCENARIO.model_copy(update={"switch_budget": budget})
    observations, shapes = demonstrations(scenario, seed=0)
    fixed = observations[:, ALLOWED] == 0
    in_force = observations[:, -int(plan_table(scenario).shape_mask.sum()) :].argmax(axis=1)
    assert fixed.mean() > 0.1
    assert (shapes == in_force)[fixed].all()
    learner = training("ppo", scenario)
    try:
        assert learner.clone(seed=0) > 0.8
    finally:
        learner.stop()


def test_demonstrations_are_the_planners_and_leave_its_plans_now_and_then():
    _, shapes = demonstrations(SCENARIO, seed=0)
    runner = StreamRunner(SCENARIO, demand_source(SCENARIO).train(20_000))
    planned = runner.sim.shapes[runner.run_planner().plans]
    alike = (shapes[: len(planned)] == planned).mean()
    assert 0.5 < alike < 1.0


def test_trials_that_cannot_be_are_refused_in_words():
    with pytest.raises(ValueError, match="should be 'ppo'"):
        training("cloned_sarsa")
