import numpy as np
import pytest
from unit.region_builders import a_scenario

from pipelines.tune_baselines import Args, main, tune_regions
from tokenyard.regions.policies import REGION_BASELINES
from tokenyard.regions.policies.rules import Knobs
from tokenyard.regions.search import KnobSearch, RegionSearchConfig, cost

SMALL = RegionSearchConfig(population=4, num_elites=2, slots=10, num_generations=2)
TINY = a_scenario(num_slots=12)


def test_a_search_goes_where_it_went_before_and_ends_in_validation():
    once, again = (KnobSearch("skylb", [TINY], SMALL, seed=3) for _ in range(2))
    for _ in range(2):
        found = once.step()
        assert again.step() == found
    assert np.array_equal(once.mean, again.mean)
    assert np.isfinite(once.validate(num_layouts=1))


def test_cost_and_response_count_alike_each_over_the_start():
    start = {"total_cost": 100.0, "mean_response_s": 20.0}
    assert cost(start, start) == 1.0
    assert cost({"total_cost": 80.0, "mean_response_s": 20.0}, start) == pytest.approx(0.9)
    assert cost({"total_cost": 100.0, "mean_response_s": 24.0}, start) == pytest.approx(1.1)


def test_knobs_begin_as_they_are_and_only_those_that_a_rule_reads_are_searched():
    search = KnobSearch("prox_ot_forecast_live_cost", [TINY], SMALL)
    assert search.knobs(search.mean) == REGION_BASELINES["prox_ot_forecast_live_cost"].knobs
    cap = KnobSearch("skylb", [TINY], SMALL)
    assert cap.knobs(np.array([0.1])) == Knobs(cap=REGION_BASELINES["skylb"].knobs.cap + 0.1)
    assert np.isfinite(list(cap.step().values())).all()
    with pytest.raises(ValueError, match="least_loaded has no knobs"):
        KnobSearch("least_loaded", [TINY], SMALL)


def test_rules_are_tuned_over_all_scenarios_and_have_a_row_each():
    rules = ("skylb", "prox_ot_forecast_live_cost")
    rows = tune_regions([TINY, TINY], rules, 3, SMALL)
    assert [row["policy"] for row in rows] == [*rules]
    for row in rows:
        assert np.isfinite(row["validation_cost_over_start"])
        assert {"cap", "smoothing"} <= row.keys()


def test_a_rule_that_is_not_there_ends_with_one_sentence():
    for only, reason in (("skylbb", "unknown regional rule 'skylbb'; .*'skylb'"),
                         ("least_loaded", "least_loaded has no knobs")):  # fmt: skip
        with pytest.raises(SystemExit, match=f"^tune_baselines: {reason}"):
            main(Args(suite="regions", only=only))
    with pytest.raises(SystemExit, match="of routing it is one of"):
        main(Args(scenario="poisson_085", only="skylb"))
