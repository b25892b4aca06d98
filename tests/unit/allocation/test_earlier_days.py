import numpy as np
import pytest

from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.earlier_days import LEVELS, NUM_AHEAD, NUM_CASES, fit_earlier_days
from tokenyard.allocation.forecast import scenario_forecaster
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.policies import best_rule
from tokenyard.allocation.policies.rules import load_tuned_allocation
from tokenyard.allocation.problem import PROBLEM
from tokenyard.allocation.recurring import RECURRING_KINDS, recurring_demand
from tokenyard.allocation.tuning import best_on_further_days

SCENARIO = load_allocation("h100x8_13b_schedule_300")
SOURCE = demand_source(SCENARIO)
DAY = SCENARIO.slots_per_day


@pytest.mark.parametrize("kind", RECURRING_KINDS)
def test_no_day_repeats_another_and_draws_do_not_either(kind):
    days = recurring_demand(kind, 3, 288, np.random.default_rng(0)).reshape(3, 288)
    assert days.min() >= 0.0
    assert days.max() <= 1.2
    if kind != "flat":
        assert not np.allclose(days[0], days[1])
    drawn = [SOURCE.train(seed).per_s for seed in (0, 1)]
    assert not np.allclose(*drawn)


def test_plans_are_made_on_earlier_days_where_demand_jumps_and_on_the_regression_elsewhere():
    assert scenario_forecaster(load_allocation("a100x8_13b")).earlier_days is None
    assert scenario_forecaster(load_allocation("local_cpu_ranks")).earlier_days is None
    assert scenario_forecaster(SCENARIO).earlier_days is not None
    assert scenario_forecaster(load_allocation("a100x8_13b_flat_120")).earlier_days is None


def test_what_is_told_live_is_what_is_told_of_the_whole_stream():
    forecaster, stream = scenario_forecaster(SCENARIO), SOURCE.test(3, num_days=1)
    whole = forecaster.cases_all(stream)
    assert whole.per_s.shape == (stream.num_slots, NUM_AHEAD, NUM_CASES)
    assert (np.diff(whole.per_s, axis=2) >= 0).all()
    for slot in (stream.first, stream.first + 100):
        live = forecaster.cases(stream.per_s[:slot], stream.start_slot + slot)
        np.testing.assert_allclose(live.per_s, whole.per_s[slot - stream.first])


def test_a_job_is_told_before_it_begins_and_cases_are_as_likely_as_they_say():
    stream = SOURCE.test(4)
    days = fit_earlier_days(SOURCE.train(0), DAY)
    cases = days.cases_all(stream)
    before, truth = cases[:-1, 1], stream.per_s[1:]
    below = (truth[:, None] < before[:, [0, -1]]).mean(axis=0)
    assert below == pytest.approx(LEVELS[[0, -1]], abs=0.06)
    median, recent = np.log(before[2:, NUM_CASES // 2]), np.log(stream.per_s[1:-2])
    told = np.corrcoef(median[:-1], np.log(truth[2:-1]))[0, 1]
    assert told > 1.2 * np.corrcoef(recent[:-1], np.log(truth[2:-1]))[0, 1]


def test_episodes_begin_at_any_time_of_the_day():
    rng = np.random.default_rng(0)
    starts = [SOURCE.episode(10, rng).start_slot for _ in range(40)]
    assert min(starts) < DAY / 4
    assert max(starts) > 3 * DAY / 4
    assert all(0 <= start < DAY for start in starts)


def test_too_few_days_are_none():
    assert fit_earlier_days(SOURCE.train(0, num_days=3), DAY) is None


@pytest.mark.parametrize(
    ("scenario", "rule"),
    [
        ("a100x8_13b_bursts_30", "autoscaler_tuned"),
        ("h100x8_13b_schedule_300", "planner"),
        ("a100x8_13b", "planner"),
        ("nothing_of_that_name", "planner"),
    ],
)
def test_what_costs_least_on_further_days_decides_where_nothing_was_trained(scenario, rule):
    assert best_rule(scenario) == rule


def test_the_champion_of_a_scenario_without_a_policy_is_its_best_rule():
    bursts = load_allocation("a100x8_13b_bursts_30")
    assert PROBLEM.best_tuned_rule(bursts) == "autoscaler_tuned"
    assert PROBLEM.candidate(bursts, "champion").source == "the rule autoscaler_tuned"


def test_the_rule_is_chosen_on_days_of_the_same_kind():
    tuned = load_tuned_allocation(SCENARIO.name)
    rules = {
        "autoscaler_tuned": tuned.autoscaler, "autoscaler_forecast": tuned.forecast_autoscaler
    }  # fmt: skip
    assert best_on_further_days(SCENARIO, rules) == tuned.best_rule
    assert best_on_further_days(load_allocation("a100x8_13b"), rules) == "planner"
