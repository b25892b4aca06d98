from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tokenyard.evaluation import compare, difference, level, margins
from tokenyard.problem import Measure
from tokenyard.routing.evaluation import mean_summary, summarise
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.constant_rate import Outcomes
from tokenyard.routing.simulator.run import Run, repeating, run_each, run_policy
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, stream_rng
from tokenyard.statistics.intervals import holm
from tokenyard.types import FloatArray

SCENARIO = load_scenario("nominal")
NO_STREAMS = StreamSet([], "made up")


def streams(*lengths: int, scenario=SCENARIO) -> StreamSet:
    source = StreamSource(scenario)
    drawn = [
        source.sample(length, stream_rng(7, "evaluation", i)) for i, length in enumerate(lengths)
    ]
    return StreamSet(drawn, "test")


def baseline(name: str, scenario=SCENARIO):
    return lambda rng: make_policy(
        name, PolicyContext(scenario.name, scenario.slo, rng, scenario.num_servers)
    )


def made_up(response_s: list[float]) -> Run:
    n = len(response_s)
    return Run(
        Outcomes(
            arrival_s=np.arange(n, dtype=np.float64),
            context_tokens=np.full(n, 80.0),
            total_tokens=np.full(n, 100.0),
            server=np.zeros(n, dtype=np.int64),
            response_s=np.array(response_s),
            waiting_seen=np.zeros(n),
        ),
        rewards=np.ones(n),
    )


def numbers(run: Run) -> list[FloatArray]:
    return [run.outcomes.server, run.outcomes.response_s, run.rewards]


@pytest.mark.parametrize("name", ["sed", "sed_reserve", "sed_dump"])
def test_a_compiled_rule_gives_the_runs_of_its_policy(name):
    scenario = load_scenario("poisson_085")
    some = streams(400, 300, scenario=scenario)
    found = PROBLEM.candidate(scenario, name).run(scenario, some, 0)
    expected = run_policy(scenario, some, baseline(name, scenario), seed=0)
    for left, right in zip(found, expected, strict=True):
        for a, b in zip(numbers(left), numbers(right), strict=True):
            np.testing.assert_array_equal(a, b)


def test_equal_seeds_give_equal_runs_and_other_seeds_other_choices():
    some = streams(300, 300)
    first = run_policy(SCENARIO, some, baseline("random"), seed=1)
    again = run_policy(SCENARIO, some, baseline("random"), seed=1)
    other = run_policy(SCENARIO, some, baseline("random"), seed=2)
    for left, right in zip(first, again, strict=True):
        for a, b in zip(numbers(left), numbers(right), strict=True):
            np.testing.assert_array_equal(a, b)
    assert (first[0].outcomes.server != other[0].outcomes.server).any()
    assert (first[0].outcomes.server != first[1].outcomes.server).any()


def test_streams_do_not_disturb_each_other_and_may_differ_in_length():
    lengths = (200, 350, 200)
    together = run_policy(SCENARIO, streams(*lengths), baseline("sed"), seed=0)
    for index, run in enumerate(together):
        alone = StreamSet([streams(*lengths).requests[index]], "test")
        (expected,) = run_policy(SCENARIO, alone, baseline("sed"), seed=0)
        for a, b in zip(numbers(run), numbers(expected), strict=True):
            np.testing.assert_array_equal(a, b)


def test_replayed_decisions_earn_and_take_the_same():
    some = streams(400, 400)
    runs = run_policy(SCENARIO, some, baseline("power_of_two"), seed=3)
    replayed = run_each(SCENARIO, some, [repeating(run.outcomes.server) for run in runs])
    for run, again in zip(runs, replayed, strict=True):
        for a, b in zip(numbers(run), numbers(again), strict=True):
            np.testing.assert_array_equal(a, b)


def test_every_completion_is_paid_even_of_requests_that_end_after_the_last_arrival():
    weights = {
        "processing": 0.0, "queue": 0.0, "overload": 0.0, "balance": 0.0, "accept": 0.0,
        "complete": 1.0, "slo_at_completion": -5.0, "drop": 0.0,
    }  # fmt: skip
    paid = SCENARIO.model_copy(update={"reward": SCENARIO.reward.model_copy(update=weights)})
    (run,) = run_policy(paid, streams(500), baseline("round_robin"), seed=0)
    num_violations = int((run.outcomes.response_s > 2.0).sum())
    assert run.rewards.sum() == pytest.approx(500 - 5 * num_violations)


def test_dropped_requests_are_counted_against_the_policy():
    few_places = SCENARIO.model_copy(update={"overflow": "drop"})
    crowded = streams(500)
    crowded.requests[0][:, :2] /= 4  # four times the load
    (run,) = run_policy(few_places, crowded, baseline("round_robin"), seed=0)
    row = summarise(few_places, run)
    num_dropped = int((run.outcomes.server == -1).sum())
    assert num_dropped > 0
    assert row["dropped_fraction"] == num_dropped / 500
    assert row["slo_violation_fraction"] >= row["dropped_fraction"]
    shares = [row[f"share_server_{i}_fraction"] for i in range(3)]
    assert sum(shares) == pytest.approx(1 - row["dropped_fraction"])


def test_the_summary_of_several_streams_is_the_mean_of_their_summaries():
    runs = [made_up([1.0, 3.0]), made_up([2.0, 2.0])]
    summary = mean_summary(SCENARIO, runs)
    assert summary["slo_violation_fraction"] == 0.25
    assert summary["p99_response_s"] == pytest.approx((2.98 + 2.0) / 2)


def test_deltas_are_paired_by_stream_and_relative_to_the_mean_of_the_baseline():
    runs = {
        "sed": [made_up([x, x]) for x in (1.0, 3.0, 2.0, 2.0, 2.0)],
        "ours": [made_up([x, x]) for x in (0.5, 2.0, 1.25, 1.25, 1.25)],
    }
    sed, ours = compare(PROBLEM, SCENARIO, NO_STREAMS, runs, "sed")
    assert sed["delta_mean_fraction"] == sed["delta_mean_ci_low"] == sed["delta_mean_ci_high"] == 0
    # Differences are -0.5, -1 and thrice -0.75: their mean is -0.75, over the baseline's 2.
    assert ours["delta_mean_fraction"] == pytest.approx(-0.375)
    # Student's quantile for four degrees of freedom is 2.776.
    half = 2.776445 * math.sqrt(2 * 0.25**2 / 4) / math.sqrt(5) / 2
    assert ours["delta_mean_ci_high"] == pytest.approx(-0.375 + half, rel=1e-4)
    assert ours["delta_p99_fraction"] == pytest.approx(-0.375)
    assert ours["delta_slo_violation"] == -0.2
    assert ours["stream_count"] == 5


def test_one_recorded_stream_gets_its_intervals_from_its_requests():
    some = replace(streams(2000), bootstrap=True)
    runs = {
        name: run_policy(SCENARIO, some, baseline(name), seed=0) for name in ("sed", "round_robin")
    }
    sed, robin = compare(PROBLEM, SCENARIO, some, runs, "sed")
    assert sed["delta_mean_ci_low"] == sed["delta_mean_ci_high"] == 0
    assert robin["delta_mean_ci_low"] < robin["delta_mean_fraction"] < robin["delta_mean_ci_high"]
    assert robin["delta_mean_ci_low"] > 0
    assert robin["reward_ci_low"] < robin["reward"] < robin["reward_ci_high"]
    assert compare(PROBLEM, SCENARIO, some, runs, "sed") == [sed, robin]


def test_a_baseline_that_was_not_run_is_refused():
    with pytest.raises(ValueError, match=r"'sed' was not run; choose one of \['ours'\]"):
        compare(PROBLEM, SCENARIO, NO_STREAMS, {"ours": [made_up([1.0])]}, "sed")


def test_bounds_stand_beside_policies_in_the_same_rows():
    some = streams(400)
    runs = {
        name: PROBLEM.candidate(SCENARIO, name).run(SCENARIO, some, 0)
        for name in ("sed", "clairvoyant")
    }
    _, bound = compare(PROBLEM, SCENARIO, some, runs, "sed")
    assert float(bound["delta_mean_fraction"]) < 0
    assert math.isfinite(float(bound["reward"]))


@pytest.mark.parametrize(
    ("name", "scenario", "reason"),
    [
        ("sedd", "nominal", r"unknown policy 'sedd'; give a policy file \(.npz or .py\) or one of"),
        ("nowhere.npz", "nominal", "nowhere.npz does not exist"),
        ("clairvoyant", "high_load", "bounds exist for serial servers"),
        ("ahead_marginal", "nominal", "'nominal' has no fleet"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(name, scenario, reason):
    with pytest.raises(ValueError, match=reason):
        PROBLEM.candidate(load_scenario(scenario), name)


def test_a_measure_is_printed_with_its_interval_and_its_difference_in_its_unit():
    mean = Measure("mean_response_s", "mean s", ".3f", interval=True, delta="delta_mean_fraction")
    violation = Measure("slo_violation_fraction", "violation %", ".1f", 100, delta="delta_slo_x")
    row = {
        "mean_response_s": 1.25, "mean_response_s_ci_low": 1.0, "mean_response_s_ci_high": 1.5,
        "delta_mean_fraction": -0.1, "delta_mean_ci_low": -0.2, "delta_mean_ci_high": 0.05,
        "slo_violation_fraction": 0.125,
        "delta_slo_x": 0.01, "delta_slo_ci_low": math.nan, "delta_slo_ci_high": math.nan,
    }  # fmt: skip
    assert level(row, mean) == "1.250 ±0.250"
    assert difference(row, mean) == "-10.0% \\[-20.0, +5.0]"
    assert level(row, violation) == "12.5"
    assert difference(row, violation) == "+1.0"


def test_all_differences_of_a_table_are_one_family():
    rng = np.random.default_rng(11)
    base = [made_up(rng.normal(2.0, 0.3, 4).tolist()) for _ in range(6)]
    runs = {"sed": base}
    for i in range(4):
        runs[f"chance{i}"] = [made_up(rng.normal(2.0, 0.3, 4).tolist()) for _ in range(6)]
    runs["better"] = [
        made_up((one.outcomes.response_s - rng.uniform(0.9, 1.1)).tolist()) for one in base
    ]
    rows = compare(PROBLEM, SCENARIO, NO_STREAMS, runs, "sed")
    samples = PROBLEM.samples(SCENARIO, NO_STREAMS, runs, "sed")
    compared = [one for one in PROBLEM.measures(SCENARIO) if one.delta]
    tests = [(row, one) for row in rows[1:] for one in compared]
    plain = [samples[row["policy"]].p_value(samples["sed"], one.key) for row, one in tests]
    assert len(plain) == 15
    assert [row[one.p_key] for row, one in tests] == holm(plain)
    assert min(row[one.p_key] for row, one in tests) == pytest.approx(15 * min(plain))
    assert rows[0]["delta_mean_p_holm"] == 1.0
    mean = next(one for one in compared if one.delta == "delta_mean_fraction")
    assert difference(rows[-1], mean).endswith("*")
    assert not difference(rows[1], mean).endswith("*")


def test_too_few_streams_have_no_p_value():
    runs = {name: [made_up([1.0]), made_up([x])] for name, x in (("sed", 1.0), ("ours", 2.0))}
    assert math.isnan(compare(PROBLEM, SCENARIO, NO_STREAMS, runs, "sed")[1]["delta_mean_p_holm"])


def test_a_policy_beside_its_rivals_is_one_family_too():
    class WithRivals(type(PROBLEM)):
        learned, rivals = "ours", ("sed", "random", "not run")

    rng = np.random.default_rng(12)
    runs = {
        name: [made_up(rng.normal(mean, 0.3, 4).tolist()) for _ in range(6)]
        for name, mean in {"sed": 2.0, "random": 2.2, "ours": 1.8}.items()
    }
    rows = margins(WithRivals(), SCENARIO, NO_STREAMS, runs)
    assert [row["baseline"] for row in rows] == ["sed", "random"]
    compared = [one for one in PROBLEM.measures(SCENARIO) if one.delta]
    samples = PROBLEM.samples(SCENARIO, NO_STREAMS, runs, "sed")
    plain = [
        samples["ours"].p_value(samples[str(row["baseline"])], one.key)
        for row in rows
        for one in compared
    ]
    assert [row[one.p_key] for row in rows for one in compared] == holm(plain)
