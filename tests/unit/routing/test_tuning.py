from __future__ import annotations

import numpy as np
import pytest

from tokenyard.routing.evaluation import mean_summary
from tokenyard.routing.gate import load_factors
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.policies.public import PUBLIC_RULES, TUNED_PREFIX, Needs, grid_of
from tokenyard.routing.policies.tuned import FLEET_GRIDS, load_tuned
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator.run import run_policy
from tokenyard.routing.simulator.streams import StreamSource, synthetic_streams
from tokenyard.routing.tuning import (
    coordinate_descent,
    not_beaten,
    tune_loads,
    tune_orders,
    tune_public_rules,
    tune_rules,
    with_other_weights,
)

FLEET = {
    "name": "small",
    "description": "Two kinds of GPU that fail, with prefix caches.",
    "fleet": {
        "replicas": [
            {"name": "a10g", "gpu": "a10g", "model": "llama3_8b"},
            {"name": "a100", "gpu": "a100_80g_sxm", "model": "llama3_8b"},
        ],
        "prefix_block_tokens": 128,
        "churn": {"mean_up_s": 4, "mean_down_s": 4},
    },
    "workload": "azure_conv",
    "arrivals": {"load": 0.8},
    "sessions": {"mean_turns": 4, "num_system_prompts": 2, "system_prompt_tokens": 512},
    "requests_per_stream": 60,
    "slo_response_s": 15.0,
    "reward": {"processing": 0, "queue": 0, "overload": 0, "balance": 0, "response": -1},
}


def test_descent_finds_the_best_of_values_that_do_not_interact():
    def score_of(values):
        return -((values[0] - 3.0) ** 2) - (values[1] + 1.0) ** 2

    grids = [(0.0, 2.0, 3.5, 9.0), (-4.0, -1.0, 5.0)]
    assert coordinate_descent((0.0, 0.0), grids, score_of) == (-0.25, (3.5, -1.0))


def test_descent_keeps_the_start_where_nothing_is_better():
    assert coordinate_descent((7.0,), [(1.0, 2.0)], lambda values: values[0]) == (7.0, (7.0,))


def test_descent_asks_once_for_equal_values_and_never_for_those_that_are_not_allowed():
    asked = []

    def score_of(values):
        asked.append(values)
        return sum(values)

    grid = (0.0, 1.0, 2.0, 3.0)
    best = coordinate_descent((0.0, 0.0), [grid, grid], score_of, lambda v: v[0] <= v[1])
    assert best == (6.0, (3.0, 3.0))
    assert len(asked) == len(set(asked))
    assert all(first <= second for first, second in asked)


def test_descent_stops_when_its_trials_are_spent():
    asked = []

    def score_of(values):
        asked.append(values)
        return sum(values)

    best = coordinate_descent((0.0,), [(1.0, 2.0, 3.0, 4.0)], score_of, most_trials=3)
    assert best == (2.0, (2.0,))
    assert len(asked) == 3


@pytest.fixture(scope="module")
def tuned():
    scenario = Scenario.model_validate(FLEET)
    return scenario, tune_rules(scenario, num_streams=2, seed=0)


def score_of(name, scenario, streams, rules):
    def factory(rng):
        context = PolicyContext("small", scenario.slo, rng, scenario.num_servers, rules)
        return make_policy(name, context)

    return mean_summary(scenario, run_policy(scenario, streams, factory, seed=0))["score"]


def test_every_score_is_what_the_rule_earns_on_the_same_streams(tuned):
    scenario, rules = tuned
    streams = synthetic_streams(StreamSource(scenario), 2, 0, "training")
    assert set(rules.scores) > set(FLEET_GRIDS)
    assert "marginal_in_order+wspt" in rules.order_scores
    for name, score in (rules.scores | rules.order_scores).items():
        assert score_of(name, scenario, streams, rules) == score, name


def test_parameters_come_from_the_grids_or_from_their_sources(tuned):
    _, rules = tuned
    untuned = type(rules.fleet)()
    for fields in FLEET_GRIDS.values():
        for field, grid in fields.items():
            assert getattr(rules.fleet, field) in {*grid, getattr(untuned, field)}


def test_every_parameter_of_fleet_rules_is_searched(tuned):
    _, rules = tuned
    searched = {field for fields in FLEET_GRIDS.values() for field in fields}
    assert searched == set(type(rules.fleet).model_fields)


def test_knobs_come_from_the_grids_and_differ_from_their_makers(tuned):
    _, rules = tuned
    assert rules.knobs.keys() == {name for name, rule in PUBLIC_RULES.items() if rule.grid}
    for name, knobs in rules.knobs.items():
        for knob, value in knobs.items():
            assert value in PUBLIC_RULES[name].grid[knob]
            assert value != PUBLIC_RULES[name].defaults[knob]


def test_a_rule_was_never_tuned_to_be_worse_than_its_makers(tuned):
    _, rules = tuned
    for name in rules.knobs:
        before = "sed" if name == "sed_linear" else name
        after = name if name == "sed_linear" else TUNED_PREFIX + name
        assert rules.scores[after] >= rules.scores[before] - 1e-9


def test_rules_of_prefixes_are_not_tuned_where_there_is_no_cache():
    without = {**FLEET, "fleet": {**FLEET["fleet"], "prefix_block_tokens": 0}, "sessions": None}
    rules = tune_rules(Scenario.model_validate(without), num_streams=1, seed=0)
    assert np.isfinite(list(rules.scores.values())).all()
    for name, rule in PUBLIC_RULES.items():
        assert (name in rules.scores) == (rule.needs <= Needs.BATCHING)
        assert rules.knobs.get(name, {}).keys() <= grid_of(name, Needs.BATCHING).keys()
    assert "prefix_weight" not in grid_of("llmd_blend", Needs.BATCHING)


@pytest.mark.parametrize(
    ("tune", "what"), [(tune_public_rules, "public rules"), (tune_orders, "orders")]
)
def test_rules_that_are_kept_are_scored_on_the_streams_of_those_that_are_tuned_anew(
    tuned, tune, what
):
    scenario, rules = tuned
    anew = tune(scenario, rules, num_streams=1, seed=7)
    assert anew.scores.keys() == rules.scores.keys()
    assert anew.order_scores.keys() >= {"tuned_marginal_delay+wspt", "marginal_in_order+wspt"}
    streams = synthetic_streams(StreamSource(scenario), 1, 7, "training")
    kept = ("sed", "tuned_marginal_delay", "tuned_lmetric")
    for name, score in [(name, anew.scores[name]) for name in kept] + [*anew.order_scores.items()]:
        assert score == score_of(name, scenario, streams, anew), name
    assert (anew.fleet, anew.sita_cuts_tokens) == (rules.fleet, rules.sita_cuts_tokens)
    assert anew.tuned_on == f"{rules.tuned_on}; {what}, and all scores: " + (
        "1 training streams of 60 requests, seed 7"
    )


def test_rules_are_left_out_that_the_best_is_certainly_better_than():
    rng = np.random.default_rng(0)
    best = -rng.exponential(10.0, 12)
    noise = rng.normal(0.0, 1.0, 12)
    noise -= noise.mean()
    scores = {"worse": best - 1.0 + 0.1 * noise, "level": best - 0.1 + noise, "best": best}
    assert not_beaten(scores) == ["best", "level"]
    few = {name: values[:2] for name, values in scores.items() if name != "worse"}
    assert len(not_beaten(few)) == 1, "no interval, so that the difference decides"


def test_one_weight_of_a_placement_is_moved_and_its_order_stays(tuned):
    _, rules = tuned
    fleet = rules.fleet.model_copy(update={"wait_weight": 2.0, "others_weight": 1.0})
    orders = {
        "tuned_marginal_delay+boost": {"boost_s": 4.0, "set_back_waits": 8.0},
        "marginal_in_order+late_last": {"set_back_waits": 4.0, "wait_weight": 3.0},
    }
    rules = rules.model_copy(update={"fleet": fleet, "orders": orders})
    found = with_other_weights("tuned_marginal_delay+boost", rules)
    assert "marginal_delay@2:0.75+boost@4:8" in found
    assert "marginal_delay@3:1+boost@4:8" in found
    assert (
        len(found)
        == len(set(found))
        == sum(map(len, FLEET_GRIDS["tuned_marginal_delay"].values())) - 2
    )
    assert "marginal_in_order@3:0.5+late_last@4" in with_other_weights(
        "marginal_in_order+late_last", rules
    )
    assert "marginal_delay@1:0.5" in with_other_weights("marginal_delay", rules)
    assert with_other_weights("tuned_lmetric", rules) == []


def test_what_may_ship_is_scored_at_the_loads_of_the_gate(tuned):
    scenario, rules = tuned
    found = tune_loads(scenario, rules, num_streams=6, seed=3)
    assert (
        found.model_copy(
            update={"load_scores": rules.load_scores, "load_scores_on": rules.load_scores_on}
        )
        == rules
    ), "nothing else is tuned"
    source = StreamSource(scenario)
    factors = load_factors(source)
    assert len(found.load_scores) > 1
    for name, scores in found.load_scores.items():
        assert scores.keys() == factors.keys()
        for part, factor in factors.items():
            streams = synthetic_streams(source, 6, 3, "training", factor)
            assert score_of(name, scenario, streams, found) == pytest.approx(scores[part]), name
    first, *others = [scores["full_load"] for scores in found.load_scores.values()]
    assert first >= max(others)
    assert found.best_over_loads() in found.load_scores


def test_the_rule_with_the_smallest_worst_regret_ships():
    def chosen(**scores):
        loads = {name: {"half": half, "full": full} for name, (half, full) in scores.items()}
        return load_tuned("poisson_085").model_copy(update={"load_scores": loads}).best_over_loads()

    assert chosen() is None
    assert chosen(a=(-1.3, -10.0), b=(-1.1, -10.2), c=(-1.0, -13.0)) == "b"
    assert chosen(a=(-1.0, -10.0), b=(-1.0, -10.0)) == "a"
