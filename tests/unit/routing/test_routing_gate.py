"""The promotion gate: what loses to a rule at half load or on recorded training data."""

import numpy as np
import pytest

from tokenyard.routing import gate
from tokenyard.routing.choice import CHANGE, LOSSES, WINS, Judge, choose
from tokenyard.routing.policies.tuned import load_tuned
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Arrivals, load_scenario
from tokenyard.routing.search import PolicySearch, SearchConfig, started_at_best_rule
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, stream_rng

FLEET = "azure_code_mixed_gpus_085"


def row(mean=(0.0, 0.0), p99_high=0.0, slo_high=0.0, p99=0.0, slo=0.0):
    estimate, low = mean
    return {
        "delta_mean_fraction": estimate, "delta_mean_ci_low": low,
        "delta_p99_fraction": p99, "delta_p99_ci_high": p99_high,
        "delta_slo_violation": slo, "delta_slo_ci_high": slo_high,
    }  # fmt: skip


NONE = np.nan


@pytest.mark.parametrize(
    ("found", "lost"),
    [
        (row((0.05, 0.04)), True),
        (row((0.009, 0.008)), False),  # within the margin
        (row((0.05, -0.001)), False),  # may be chance
        (row((-0.05, -0.06)), False),
        (row((0.05, 0.04), p99_high=-0.01), False),  # pays with the mean for the tail
        (row((0.05, 0.04), slo_high=-0.01), False),  # or for violations
        (row((np.nan, np.nan)), False),
        # Without an interval the differences decide.
        (row((0.05, NONE), NONE, NONE), True),
        (row((0.05, NONE), NONE, NONE, p99=-0.02), False),
        (row((0.05, NONE), NONE, NONE, slo=-0.02), False),
        (row((0.009, NONE), NONE, NONE), False),
    ],
)
def test_a_policy_loses_where_a_longer_mean_buys_nothing(found, lost):
    assert gate.loses(found) == lost


@pytest.mark.parametrize(
    ("found", "won"),
    [
        ({"mean_ci_high": -0.01}, True),
        ({"mean_ci_high": 0.01}, False),
        ({"mean_ci_high": -0.01, "p99_ci_low": 0.001}, False),
        ({"mean_ci_high": -0.01, "p99_ci_high": 0.03}, False),  # beyond the margin
        ({"mean_ci_high": -0.01, "slo_ci_low": 0.001}, False),
    ],
)
def test_a_win_is_a_lower_mean_that_nothing_was_paid_for(found, won):
    ends = {"mean_ci_high": 0.0, "p99_ci_low": -0.1, "p99_ci_high": 0.01, "slo_ci_low": -0.1}
    assert gate.wins({f"delta_{key}": end for key, end in (ends | found).items()}) == won


def test_what_loses_to_a_rule_is_not_chosen_however_good_it_is():
    def found(change, lost, won=1.0):
        return {CHANGE: change, LOSSES: lost, WINS: won}

    rows = [found(-0.1, 0.0), found(-0.5, 2.0), found(-0.2, 0.0), found(-0.3, 0.0, 0.0)]
    assert choose(rows) == 2
    assert choose(rows, must_win=False) == 3
    assert choose(rows[1:2]) is None


def few_streams(scenario, count=3, length=400):
    source = StreamSource(scenario)
    drawn = [source.sample(length, stream_rng(5, "validation", i)) for i in range(count)]
    return source, StreamSet(drawn, "test")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("bursty_serial", "sed_reserve"),
        ("bursty_serial", "sed_dump"),
        (FLEET, "marginal_delay"),
        (FLEET, "tuned_marginal_delay"),
        ("bursty_serial", "sed_reserve+sjf"),
        ("bursty_serial", "marginal_in_order+sjf"),
        ("slotted", "marginal_delay+sjf@60"),
        (FLEET, "tuned_marginal_delay+wspt"),
    ],
)
def test_a_compiled_rule_places_requests_as_its_policy_does(name, rule):
    scenario = load_scenario(name)
    _, streams = few_streams(scenario)
    servers = server_model(scenario)
    assert servers.compiled(rule)
    found = gate.rule_runs(PROBLEM, rule, scenario, streams)
    expected = PROBLEM.candidate(scenario, rule).run(scenario, streams, 0)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.outcomes.response_s, theirs.outcomes.response_s)


def test_a_slow_rule_loses_to_the_tuned_one_and_the_tuned_one_does_not_lose_to_itself():
    scenario = load_scenario(FLEET)
    source, streams = few_streams(scenario, 6)
    bar = gate.Gate(PROBLEM, source, parts={"some": streams})
    rows = bar(lambda streams: gate.rule_runs(PROBLEM, "sed", scenario, streams))
    assert {found["baseline"] for found in rows} == set(gate.rivals(scenario))
    assert "+" in gate.rivals(scenario)[0], "the best rule orders"
    assert all(found["loses"] for found in rows)
    rows = bar(lambda streams: gate.rule_runs(PROBLEM, "tuned_marginal_delay", scenario, streams))
    assert [found["loses"] for found in rows if found["baseline"] == "tuned_marginal_delay"] == [0]


def test_three_loads_and_recorded_training_requests_are_looked_at_and_no_test_part(monkeypatch):
    source = StreamSource(load_scenario("conversation"))
    monkeypatch.setattr(gate, "recorded_training_streams", lambda source: "recorded")
    parts = gate.gate_streams(source, 2)
    assert list(parts) == [gate.HALF_LOAD, gate.FULL_LOAD, gate.ABOVE_LOAD, gate.RECORDED]
    whole = gate.synthetic_streams(source, 2, 0, "validation").requests
    for half, full in zip(parts[gate.HALF_LOAD].requests, whole, strict=True):
        np.testing.assert_allclose(half[:, 0], 2 * full[:, 0])


def test_nobody_is_compared_where_the_queue_only_grows():
    full = load_scenario("poisson_095").model_copy(update={"arrivals": Arrivals(load=0.99)})
    assert gate.ABOVE_LOAD not in gate.load_factors(StreamSource(full))


def test_a_judge_sets_a_policy_beside_what_decides_without_one():
    scenario = load_scenario("poisson_050")
    judge = Judge(StreamSource(scenario), 2)
    assert judge.bar == "sed_linear+boost"
    found = judge(PolicySearch(scenario, started_at_best_rule(scenario, SearchConfig())).artifact())
    assert found["delta_mean_fraction"] == pytest.approx(0.0, abs=1e-9), "it begins at the rule"
    assert found[WINS] == found[CHANGE] == 0.0


def test_the_placement_that_knows_the_order_is_a_rival_wherever_it_was_tuned():
    assert "marginal_in_order+boost" in gate.rivals(load_scenario("poisson_085"))
    # There another rule has the better score.
    first, *others = gate.rivals(load_scenario("poisson_050"))
    assert (first, others[0]) == ("sed_linear+boost", "marginal_in_order+sjf")
    own = load_scenario("conversation_mixed_gpus").model_copy(update={"name": "mine"})
    assert not any("in_order" in name for name in gate.rivals(own))


def test_rules_without_parameters_are_left_out():
    own = load_scenario(FLEET).model_copy(update={"name": "mine"})
    assert "tuned_marginal_delay" not in gate.known(
        PROBLEM, server_model(own).rules, StreamSource(own)
    )
    assert load_tuned(FLEET).fleet.marginal_weights


def test_the_problem_puts_an_artifact_before_the_gate():
    artifact = PolicySearch(load_scenario("bursty_serial")).artifact()
    rows = PROBLEM.gate(load_scenario("bursty_serial"), 2)(artifact)
    assert {found["part"] for found in rows} >= {gate.HALF_LOAD, gate.FULL_LOAD}
    assert {found["baseline"] for found in rows} >= {"sed", "sed_reserve", "marginal_in_order+sjf"}
    assert {found["loses"] for found in rows} <= {0, 1}
