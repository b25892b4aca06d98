import numpy as np
import pytest
from unit.region_builders import a_scenario

from tokenyard.regions import judge
from tokenyard.regions.demand import draw_layout
from tokenyard.regions.servers import make_cluster

TINY = a_scenario(num_slots=8)
NAMES = ("round_robin", "least_loaded", "champion")


def test_layouts_are_drawn_anew_by_seed_part_and_number_with_the_servers_of_the_scenario():
    drawn = [
        draw_layout(TINY, seed, part, index)
        for seed, part, index in (
            (1, "test", 0),
            (1, "test", 1),
            (2, "test", 0),
            (1, "training", 0),
        )
    ]
    assert len({one.layout_seed for one in drawn}) == len(drawn)
    assert draw_layout(TINY, 1, "test", 0) == drawn[0]
    counts = [np.bincount(make_cluster(one).kind) for one in (TINY, *drawn)]
    assert all(np.array_equal(counts[0], one) for one in counts)
    assert not np.array_equal(*(make_cluster(one).region for one in drawn[:2]))


def test_each_unit_is_compared_to_the_rule_that_is_best_on_the_other_half():
    costs = {"round_robin": [1.0, 9.0, 1.0, 9.0], "least_loaded": [9.0, 1.0, 9.0, 1.0]}
    runs = {name: [{"total_cost": one} for one in some] for name, some in costs.items()}
    runs["champion"] = [{"total_cost": 0.0}] * 4
    assert judge.best_rules(runs) == ["least_loaded", "round_robin"] * 2


def test_the_judge_compares_all_to_the_best_rule():
    runs = judge.run_layouts(TINY, NAMES, 5, seed=5)
    rows = judge.judge(TINY, runs)
    assert [row["policy"] for row in rows[1:]] == [*NAMES]
    assert {row["baseline"] for row in rows} == {judge.BEST}
    assert all(row["stream_count"] == 5 for row in rows)
    assert all(0 <= row["total_cost_p_holm"] <= 1 for row in rows[1:])
    alone = judge.run_layouts(TINY, ["champion"], 5, seed=5)["champion"]
    mean = np.mean([one["total_cost"] for one in alone])
    assert rows[3]["total_cost"] == pytest.approx(mean)
    rows = judge.judge(TINY, runs, "round_robin")
    assert rows[0]["policy"] == "round_robin"
    assert rows[1]["delta_cost_fraction"] == 0.0
    with pytest.raises(ValueError, match="'skylb' was not run"):
        judge.judge(TINY, runs, "skylb")


def test_few_layouts_have_no_p_value_and_none_are_refused():
    few = judge.judge(TINY, judge.run_layouts(TINY, ["round_robin", "skylb"], 2, seed=5))
    assert all(np.isnan(row[f"{key}_p_holm"]) for row in few[1:] for key in judge.CLAIMS)
    with pytest.raises(ValueError, match="0 layouts must be at least 1"):
        judge.run_layouts(TINY, ["skylb"], 0, seed=5)
    with pytest.raises(ValueError, match="one layout has no other half"):
        judge.judge(TINY, {"skylb": [{"total_cost": 1.0}]})
    learned = judge.run_layouts(TINY, ["champion"], 2, seed=5)
    with pytest.raises(ValueError, match="no rule was run: name a baseline"):
        judge.judge(TINY, learned)
    assert judge.judge(TINY, learned, "champion")[0]["policy"] == "champion"
