"""Networks that allocate: they begin as the planner, and leave training as they were trained."""

import numpy as np
import pytest
import torch

import envs
from tokenyard.allocation.artifact import AllocationArtifact, learned_allocation
from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.forecast import scenario_forecaster
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.policies.learned import NetworkPlan
from tokenyard.allocation.simulator import AllocationSim
from tokenyard.allocation.simulator.run import StreamRunner, run_allocation
from tokenyard.rl.allocation.training import AllocationTrialConfig

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
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_the_exported_network_sees_and_decides_as_the_module_does(algorithm, tmp_path):
    scenario = SCENARIO
    learner = training(algorithm, scenario)
    try:
        module = learner.module
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            # A fresh network decides nothing.
            module.policy_layers[-1].weight.normal_(0.0, 5.0, generator=rng)
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
        sim = AllocationSim(scenario, 1, 20, scenario_forecaster(scenario), shows_planner=True)
        sim.load(0, stream)
        shapes = sim.shapes
        for plan, row in zip(outcomes.plans, seen, strict=True):
            shown = sim.observe()[0]
            assert shown == pytest.approx(row, abs=1e-6)
            batch = {"obs": torch.from_numpy(shown[None].copy())}
            with torch.no_grad():
                if algorithm == "dqn":
                    preferences = module.compute_q_values(batch)["qf_preds"][0]
                else:
                    preferences = module.forward_inference(batch)["action_dist_inputs"][0]
            assert int(preferences.argmax()) == shapes[plan]
            sim.step(np.array([plan]))
    finally:
        learner.stop()


@needs_rllib
@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "dqn"])
def test_a_fresh_network_is_the_planner(algorithm, tmp_path):
    stream = demand_source(SCENARIO).train(20_000)
    learner = training(algorithm)
    try:
        fresh = learned_allocation(learner.artifact({}, {}))
    finally:
        learner.stop()
    planned = StreamRunner(SCENARIO, stream).run_planner()
    np.testing.assert_array_equal(run_allocation(SCENARIO, stream, fresh).plans, planned.plans)


def test_trials_that_cannot_be_are_refused_in_words():
    with pytest.raises(ValueError, match="should be 'ppo'"):
        training("cloned_ppo")
