"""The linear policy as an actor: its costs, where it begins, and what it is exported as."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns

from tokenyard.rl.routing.export import export_linear
from tokenyard.rl.routing.linear import linear_costs, linear_features
from tokenyard.rl.routing.training import build_config, linear
from tokenyard.rl.routing.trial import RoutingTrialConfig
from tokenyard.routing.artifact import PolicyArtifact, learned_policy
from tokenyard.routing.observation import (
    NUM_SCORE_WEIGHTS,
    linear_scores,
    observation_size,
    snapshot_columns,
)
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.search import PolicySearch, SearchConfig, started_at_best_rule
from tokenyard.routing.simulator import make_simulator
from tokenyard.routing.simulator.streams import StreamSource, stream_rng

WEIGHTS = np.linspace(-0.4, 0.5, NUM_SCORE_WEIGHTS)
SCENARIOS = ("poisson_085", "two_speeds", "three_speeds")


def driven_at_random(scenario, num_requests=300):
    """The source, the simulator and observation after observation, the request still to place."""
    source = StreamSource(load_scenario(scenario))
    sim = make_simulator(source.scenario, 1, num_requests, expected_finish=True)
    sim.load(0, source.sample(num_requests, stream_rng(5, "validation")))
    rng = np.random.default_rng(0)
    observations = sim.observe()
    while sim.undecided():
        yield source, sim, torch.from_numpy(observations.copy())
        action = rng.integers(source.scenario.num_servers)
        observations, _ = sim.step_and_observe(np.array([action]))


def a_module(source, weights=WEIGHTS):
    """The learner's module, built without starting anything."""
    num = source.scenario.num_servers
    units = source.scenario.slo_response_s, source.mean_total_tokens
    config = build_config("ppo", linear(), "unused", {}, rule_weights=weights.tolist(), units=units)
    box = Box(-20, 20, (observation_size(num, expected_finish=True),), np.float32)
    return config.get_rl_module_spec(spaces={DEFAULT_MODULE_ID: (box, Discrete(num))}).build()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_costs_read_back_from_observations_are_those_of_the_linear_policy(scenario):
    weights = torch.from_numpy(WEIGHTS).float()
    for source, sim, observations in driven_at_random(scenario):
        slo_s, mean = source.scenario.slo_response_s, source.mean_total_tokens
        expected = np.empty(source.scenario.num_servers)
        predicted = sim.request().predicted_total_tokens
        linear_scores(WEIGHTS, predicted, mean, slo_s, snapshot_columns(sim.snapshots()), expected)
        costs = linear_costs(linear_features(observations, slo_s, mean), weights)[0]
        # A wait of just the SLO is a violation in one and not in the other.
        assert costs.numpy() == pytest.approx(expected, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_is_exported_decides_as_the_module(scenario, tmp_path):
    module = policy = None
    agreed = []
    for source, sim, observations in driven_at_random(scenario):
        if module is None:
            module = a_module(source)
            export_linear(module, source, "ppo").save(tmp_path / "policy.npz")
            policy = learned_policy(PolicyArtifact.load(tmp_path / "policy.npz"))
        with torch.no_grad():
            output = module.forward_inference({Columns.OBS: observations})
        preferred = int(output[Columns.ACTION_DIST_INPUTS][0].argmax())
        agreed.append(preferred == policy.route(sim.request(), sim.snapshots()))
    # Nearly equal costs may be told apart by the last digit of a float32.
    assert np.mean(agreed) > 0.98


def test_only_the_weights_decide_and_learn_beside_the_critic():
    source = StreamSource(load_scenario("poisson_085"))
    module = a_module(source)
    names = {name.partition(".")[0] for name, _ in module.named_parameters()}
    assert names == {"weights", "critic"}
    assert module.weights.detach().numpy() == pytest.approx(WEIGHTS)


def test_an_observation_of_other_servers_is_refused():
    config = build_config("ppo", linear(), "unused", {})
    spaces = {DEFAULT_MODULE_ID: (Box(-20, 20, (7,), np.float32), Discrete(3))}
    with pytest.raises(ValueError, match="7 numbers are not the 40"):
        config.get_rl_module_spec(spaces=spaces).build()


def test_trials_that_the_linear_recipe_is_not_for_are_refused():
    def trial(algorithm, scenario):
        return RoutingTrialConfig(algorithm=algorithm, scenario=scenario, recipe="linear")

    with pytest.raises(ValueError, match="recipe 'linear' is not for a fleet"):
        trial("ppo", "local_cpu").make_training(load_scenario("local_cpu"))
    with pytest.raises(ValueError, match="recipe 'linear' has no 'dqn'"):
        trial("dqn", "poisson_085").make_training(load_scenario("poisson_085"))


def test_a_search_without_orders_begins_first_come_first_served_and_stays_so():
    scenario = load_scenario("two_speeds")
    assert any(started_at_best_rule(scenario, SearchConfig()).order)
    config = started_at_best_rule(scenario, SearchConfig(population=4, num_elites=2), orders=False)
    search = PolicySearch(scenario, config)
    assert search.weights.any(), "the best rule there has a weight"
    search.step()
    assert not search.order.any()
