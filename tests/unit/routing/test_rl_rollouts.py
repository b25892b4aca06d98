"""Policy improvement by rollouts: what a round learns, and that it can be stopped anywhere."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tokenyard.rl.routing.rollouts import RolloutConfig, RolloutImprovement
from tokenyard.rl.routing.trial import RoutingTrialConfig
from tokenyard.routing.observation import observation_size
from tokenyard.routing.policies.tuned import load_tuned
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.streams import StreamSource
from tokenyard.routing.validation import Validation

NAME = "azure_code_mixed_gpus_085"
SMALL = RolloutConfig(horizon=100, streams_per_round=2, requests_per_stream=400, hidden=8, epochs=3)


@pytest.mark.slow
def test_a_round_attains_more_slos_than_the_tuned_rule():
    scenario = load_scenario(NAME)
    config = RolloutConfig(
        start=load_tuned(NAME).fleet.marginal_weights, violation_s=5.0, horizon=100,
        decide_anew=True,
        streams_per_round=10, requests_per_stream=3000,
    )  # fmt: skip
    improvement = RolloutImprovement(scenario, config)
    validate = Validation(StreamSource(scenario), 8)
    before = validate(improvement.artifact())["slo_violation_fraction"]
    found = improvement.step()
    assert found["expected_gain_s"] > 0.0
    assert 0.0 < found["changed_fraction"] < 1.0
    assert validate(improvement.artifact())["slo_violation_fraction"] < before - 0.02


def test_a_restored_improvement_goes_on_as_if_nothing_had_happened():
    scenario = load_scenario(NAME)
    straight, stopped = (RolloutImprovement(scenario, SMALL, seed=4) for _ in range(2))
    straight.step(), straight.step()
    stopped.step()
    resumed = RolloutImprovement(scenario, SMALL, seed=99)
    resumed.restore(stopped.state())
    resumed.step()
    for name, array in straight.artifact().arrays.items():
        np.testing.assert_array_equal(resumed.artifact().arrays[name], array)
    assert resumed.env_steps == straight.env_steps == 2 * 2 * (400 + 50 * 4 * 101)


def test_an_exported_policy_can_be_improved_further():
    scenario = load_scenario(NAME)
    first, second = (RolloutImprovement(scenario, SMALL, seed=seed) for seed in (1, 2))
    first.step()
    second.go_on_from(first.artifact())
    assert second.artifact().sha256 == first.artifact().sha256
    second.step()
    for name in ("replica_mean", "replica_std"):  # its units stay those of what it has learned
        expected = first.artifact().arrays[name]
        np.testing.assert_array_equal(second.artifact().arrays[name], expected)
    with pytest.raises(ValueError, match="cannot go on"):
        RolloutImprovement(scenario, replace(SMALL, hidden=4)).go_on_from(first.artifact())


@pytest.mark.integration
def test_processes_play_the_same_streams():
    scenario = load_scenario(NAME)
    alone, together = (
        RolloutImprovement(scenario, replace(SMALL, jobs=jobs)).play() for jobs in (1, 2)
    )
    np.testing.assert_array_equal(alone.costs, together.costs)
    np.testing.assert_array_equal(alone.observations, together.observations)


def test_torch_and_the_kernel_prefer_the_same_replicas():
    improvement = RolloutImprovement(load_scenario(NAME), SMALL)
    improvement.step()
    samples = improvement.play()
    preferences = improvement._average(
        torch.as_tensor(samples.observations),
        torch.as_tensor(samples.rule_scores, dtype=torch.float32),
    )
    assert (preferences.argmax(1).numpy() == samples.chosen).mean() > 0.999


def test_replicas_that_are_down_are_never_preferred():
    scenario = load_scenario("churn")
    improvement = RolloutImprovement(scenario, SMALL)
    improvement.step()
    found = Validation(StreamSource(scenario), 1)(improvement.artifact())
    assert np.isfinite(found["score"])


def test_where_no_replica_takes_requests_preferences_are_numbers():
    improvement = RolloutImprovement(load_scenario(NAME), SMALL)
    observations = torch.zeros(2, observation_size(4, True, True))
    scores = torch.full((2, 4), torch.inf)
    assert torch.isfinite(improvement._average(observations, scores)).all()


def test_a_sweep_trains_it_like_the_others(tmp_path):
    scenario = load_scenario(NAME)
    config = RoutingTrialConfig(algorithm="rollouts", scenario=NAME, recipe="fleet")
    training, other = config.make_training(scenario), config.make_training(scenario)
    assert training.env_steps == 0
    assert training.artifact({}, {}).metadata.kind == "corrected"
    training.save(tmp_path)
    other.restore(tmp_path)
    assert other.artifact({}, {}).sha256 == training.artifact({}, {}).sha256


def test_servers_that_do_not_batch_are_refused():
    with pytest.raises(ValueError, match="has no fleet"):
        RolloutImprovement(load_scenario("poisson_085"))
