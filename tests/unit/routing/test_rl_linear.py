"""The linear policy as an actor: where it begins, what it learns, and what it is exported as."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

import envs
from tokenyard.rl.columnar.columns import TriedActions
from tokenyard.rl.columnar.learners import TRIED
from tokenyard.rl.routing.export import export_policy
from tokenyard.rl.routing.linear import BranchingEnvRunner
from tokenyard.rl.routing.training import build_config, linear, linear_fleet
from tokenyard.rl.routing.trial import RoutingTrialConfig
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.observation import (
    NUM_MARGINAL_SLO_WEIGHTS,
    NUM_SLO_LIMITS,
)
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.search import PolicySearch, SearchConfig, started_at_best_rule
from tokenyard.routing.simulator.streams import StreamSource

NUM_LEARNED = NUM_MARGINAL_SLO_WEIGHTS - NUM_SLO_LIMITS
CASES = (
    ("poisson_085", linear),
    ("local_cpu", linear_fleet),
)


def a_learner(recipe, num_servers=3):
    """A learner whose weights are told apart, and they."""
    weights = np.linspace(-0.4, 0.5, NUM_MARGINAL_SLO_WEIGHTS)
    space = Box(-np.inf, np.inf, (num_servers, 1 + NUM_LEARNED), np.float32)
    config = build_config("ppo", recipe(), "unused", {}, rule_weights=weights.tolist())
    config = config.environment(observation_space=space, action_space=Discrete(num_servers))
    return config.build_learner(), weights


def drawn(num=200, num_actions=3):
    """Decisions at which the last of three actions was never tried, and the first is the best."""
    rng = np.random.default_rng(0)
    costs = np.tile(np.array([0.0, 2.0, 0.0], dtype=np.float32), (num, 1))
    return TriedActions(
        observations=rng.normal(0.0, 0.03, (num, num_actions, 1 + NUM_LEARNED)).astype(np.float32),
        tried=np.tile([True, True, False], (num, 1)),
        costs=costs + rng.normal(0.0, 0.1, costs.shape).astype(np.float32) * [1, 1, 0],
        num_steps=1000,
        weights_seq_no=0,
    )


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_what_is_exported_are_the_weights(name, recipe, tmp_path):
    learner, weights = a_learner(recipe)
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    export_policy(module, StreamSource(load_scenario(name)), "ppo").save(tmp_path / "policy.npz")
    found = PolicyArtifact.load(tmp_path / "policy.npz")
    assert found.metadata.kind == "marginal"
    assert found.arrays["weights"] == pytest.approx(weights, abs=1e-6)


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_an_update_lowers_the_expected_cost_and_moves_no_limit(name, recipe):
    learner, weights = a_learner(recipe)
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    sample = drawn()
    before = learner.batch_of([sample], module)[Columns.ACTION_PROB]
    learner.update(episodes=[sample], num_epochs=8)
    after = learner.batch_of([sample], module)[Columns.ACTION_PROB]
    costs = torch.from_numpy(sample.costs)
    assert (after * costs).sum() < (before * costs).sum()
    assert not after[:, 2].any()
    after, before = module.all_weights, weights.astype(np.float32)
    assert after[NUM_LEARNED:] == pytest.approx(before[NUM_LEARNED:], abs=1e-6)
    assert (after[:NUM_LEARNED] != before[:NUM_LEARNED]).all()


def test_the_surrogate_is_that_of_every_action_weighted_by_its_probability():
    learner, _ = a_learner(linear)
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    batch = learner.batch_of([drawn()], module)
    advantages, before = batch[Postprocessing.ADVANTAGES], batch[Columns.ACTION_PROB]
    assert (before * advantages).sum(-1).abs().max() < 1e-4
    assert not advantages[~batch[TRIED]].any()
    with torch.no_grad():
        module.weights.add_(torch.linspace(-0.5, 0.5, NUM_LEARNED))
        now = learner._probabilities(batch, module)
        expected = 0.0
        for action in range(2):
            ratio = now[:, action] / before[:, action]
            gain = advantages[:, action] * ratio
            clipped = advantages[:, action] * ratio.clamp(0.7, 1.3)
            expected -= (before[:, action] * torch.minimum(gain, clipped)).mean()
        loss, _ = learner.losses(batch, module, report=False)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("name", ["two_speeds", "azure_code_slo"])
def test_a_trial_begins_where_a_search_without_orders_does(name):
    recipe = "linear" if name == "two_speeds" else "linear_fleet"
    trial = RoutingTrialConfig(algorithm="ppo", scenario=name, recipe=recipe)
    scenario = load_scenario(name)
    search = PolicySearch(scenario, started_at_best_rule(scenario, SearchConfig(), orders=False))
    weights, order = trial._rule(scenario)
    assert weights == pytest.approx(search.weights)
    assert not any(order)


def test_a_restored_runner_does_not_play_the_streams_of_the_beginning_again():
    def costs(steps_before):
        envs.register()
        config = build_config(
            "ppo", replace(linear(), num_envs=1), "LoadBalancingEnv", {"scenario": "two_speeds"},
            rule_weights=(0.0,) * NUM_MARGINAL_SLO_WEIGHTS,
        )  # fmt: skip
        runner = BranchingEnvRunner(config=config, worker_index=1)
        runner.set_state({NUM_ENV_STEPS_SAMPLED_LIFETIME: steps_before})
        return [runner.sample()[0].costs.sum() for _ in range(2)]

    one = load_scenario("two_speeds").requests_per_stream
    first, second = costs(0)
    assert costs(one)[0] == second != first


def test_a_trial_of_the_linear_policy_trains(ray_cluster):
    scenario = load_scenario("two_speeds")
    trial = RoutingTrialConfig(
        algorithm="ppo", scenario="two_speeds", recipe="linear", num_envs=1,
        env_steps=10**6, iterations=10**6,
    )  # fmt: skip
    envs.register()
    training = trial.make_training(scenario)
    before = training.artifact({}, {}).arrays["weights"]
    found = training.step()
    assert training.env_steps > scenario.requests_per_stream
    assert found["entropy_nats"] > 0.0
    assert (training.artifact({}, {}).arrays["weights"] != before).any()
    training.stop()


def test_trials_that_a_recipe_is_not_for_are_refused():
    def trial(algorithm, scenario, name):
        return RoutingTrialConfig(algorithm=algorithm, scenario=scenario, recipe=name)

    with pytest.raises(ValueError, match="recipe 'paper' is not for a fleet"):
        trial("ppo", "local_cpu", "paper").make_training(load_scenario("local_cpu"))
    with pytest.raises(ValueError, match="recipe 'linear' has no 'dqn'"):
        trial("dqn", "poisson_085", "linear").make_training(load_scenario("poisson_085"))


def test_a_search_without_orders_begins_first_come_first_served_and_stays_so():
    scenario = load_scenario("two_speeds")
    assert any(started_at_best_rule(scenario, SearchConfig()).order)
    config = started_at_best_rule(scenario, SearchConfig(population=4, num_elites=2), orders=False)
    search = PolicySearch(scenario, config)
    assert search.weights.any(), "the best rule there has a weight"
    search.step()
    assert not search.order.any()
