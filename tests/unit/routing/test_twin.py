import math

import numpy as np
import pytest

from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.twin import agreement, learned_sizes, simulate
from tokenyard.workload.trace import Trace

POLICIES = ["ray_default", "sed", "power_of_two"]


@pytest.fixture(scope="module")
def sent():
    rng = np.random.default_rng(0)
    num = 300
    return Trace(
        np.cumsum(rng.exponential(0.2, num)), rng.integers(50, 200, num), rng.integers(5, 40, num)
    )


def test_the_same_requests_run_through_the_simulator_by_policy(sent):
    scenario = load_scenario("emulated")
    found = simulate(scenario, scenario.name, sent, POLICIES, seed=1)
    assert list(found) == POLICIES
    assert found["ray_default"] == found["power_of_two"]
    assert found["sed"]["mean_response_s"] < found["ray_default"]["mean_response_s"]


def test_rules_are_those_of_the_scenario_that_is_served(sent):
    own = load_scenario("emulated").model_copy(update={"name": "mine"})
    with pytest.raises(ValueError, match="mine"):
        simulate(own, "mine", sent, ["tuned_marginal_delay"], seed=1)
    assert simulate(own, "emulated", sent, ["tuned_marginal_delay"], seed=1)


def test_policies_are_told_lengths_of_the_traffic_that_was_sent(sent):
    """A small model's answers have nothing to do with the scenario's conversations."""
    answers = learned_sizes(sent) - sent.context_tokens
    assert answers.mean() == pytest.approx(sent.generated_tokens.mean(), rel=0.1)
    scenario = load_scenario("emulated")
    # Told of 200 tokens each, the rule would leave slow replicas idle however long others wait.
    found = simulate(scenario, scenario.name, sent, ["marginal_delay", "least_loaded"], seed=1)
    assert found["marginal_delay"]["mean_response_s"] < found["least_loaded"]["mean_response_s"]


def test_agreement_tells_errors_and_orders():
    measured = {"a": 1.0, "b": 2.0, "c": 4.0}
    same = agreement(measured, {"a": 1.1, "b": 1.8, "c": 4.0})
    assert same.mean_error_fraction == pytest.approx(0.2 / 3)
    assert same.max_error_fraction == pytest.approx(0.1)
    assert same.kendall_tau == pytest.approx(1.0)
    assert agreement(measured, {"a": 4.0, "b": 2.0, "c": 1.0}).kendall_tau == pytest.approx(-1.0)
    assert math.isnan(agreement({"a": 1.0}, {"a": 2.0}).kendall_tau)
