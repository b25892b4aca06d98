"""What holds for all rules of public routers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

import tokenyard
from tokenyard.routing.policies import BASELINES, PolicyContext, make_policy, rows_for
from tokenyard.routing.policies.cost import LeastCost
from tokenyard.routing.policies.delay import ADDED_WAIT_S, FilterDump, SedLinear, added_delays
from tokenyard.routing.policies.llmd import LlmdPredictedLatency
from tokenyard.routing.policies.public import PUBLIC_RULES, TUNED_PREFIX, Needs, is_tuned, needs_of
from tokenyard.routing.policies.ray_serve import has_room
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, Request
from tokenyard.types import Slo

FROZEN = (
    "lmetric", "pending_prefill", "smetric", "llmd_sticky", "llmd_blend", "dynamo_cost",
    "dynamo_lmetric", "smg_spill", "aibrix_prefix_cache", "aibrix_preble", "aibrix_load_balance",
    "preble_e2", "llmd_predicted_latency", "vllm_cache_aware", "sglang_cache_aware", "ray_p2c",
    "ray_prefix_affinity", "loadaware", "sed_linear", "filter_dump",
)  # fmt: skip
DOC = Path(tokenyard.__file__).parents[1] / "docs" / "rules.md"
SLO = Slo(2.0)
SPEEDS = (500.0, 1000.0, 4000.0, 9000.0)
few = settings(max_examples=scaled(40))


def fleet_of(levels: list[int], batches: bool) -> list[ReplicaSnapshot]:
    """Replicas that differ in every signal, each by its level."""
    return [replica(level, batches) for level in levels]


def replica(level: int, batches: bool) -> ReplicaSnapshot:
    engine = EngineSnapshot(
        iteration_s=0.01,
        prefill_token_s=1e-4,
        sequence_s=1e-4,
        kv_token_s=1e-7,
        token_budget=2048,
        kv_capacity_tokens=1e5,
        kv_used_fraction=level / 41,
        prefill_in_flight_tokens=701.0 * level,
        output_in_flight_tokens=97.0 * level,
        match_tokens=31 * level,
    )
    return ReplicaSnapshot(
        replica_id=f"r{level}",
        tokens_per_s=SPEEDS[level % 4] + level,
        num_slots=1 + level % 3,
        max_concurrency=24,
        num_waiting=level,
        num_running=3 * level,
        tokens_in_flight=1009.0 * level,
        predicted_wait_s=0.13 * level,
        engine=engine if batches else None,
    )


def make(name: str, seed: int = 0):
    context = PolicyContext("nominal", SLO, np.random.default_rng(seed), 3)
    return make_policy(name, context)


levels = st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True)
requests = st.builds(
    lambda context, output: Request(1.0, context, float(context + output)),
    st.integers(1, 2000),
    st.integers(0, 500),
)


def test_every_frozen_name_is_there_and_no_other():
    assert set(FROZEN) == PUBLIC_RULES.keys() <= BASELINES.keys()


@pytest.mark.parametrize("name", FROZEN)
def test_every_rule_names_its_source_and_has_a_row_in_the_docs(name):
    assert "Source: " in PUBLIC_RULES[name].rule.__doc__
    assert f"\n| `{name}` |" in DOC.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FROZEN)
def test_makers_values_can_be_searched_from(name):
    rule = PUBLIC_RULES[name]
    assert rule.defaults.keys() == rule.grid.keys()
    for knob, values in rule.grid.items():
        assert list(values) == sorted(set(values))
        assert rule.defaults[knob] in values or math.isinf(rule.defaults[knob])
        for value in values:
            rule.make(PolicyContext("test", SLO, np.random.default_rng(0), 3), {knob: value})


@pytest.mark.parametrize("name", FROZEN)
def test_a_rule_that_has_knobs_has_a_tuned_twin(name):
    twin = TUNED_PREFIX + name
    assert (twin in BASELINES) == (bool(PUBLIC_RULES[name].grid) and name != "sed_linear")
    assert needs_of(twin) == needs_of(name)


def test_rows_are_the_rules_whose_signals_are_there_and_that_were_tuned():
    none, batching, caching = (rows_for("nominal", has) for has in Needs)
    assert {"sed", "ray_p2c", "filter_dump"} <= set(none)
    assert not {"lmetric", "llmd_sticky"} & set(none)
    assert set(batching) - set(none) >= {"lmetric", "dynamo_cost", "llmd_blend"}
    assert set(caching) - set(batching) >= {"llmd_sticky", "vllm_cache_aware", "loadaware"}


def test_every_row_of_a_scenario_without_tuned_rules_can_be_made():
    rows = rows_for("never_tuned", Needs.PREFIX_CACHE)
    assert {"sed", "marginal_delay", "llmd_sticky"} <= set(rows)
    assert not [name for name in rows if is_tuned(name)]
    for name in rows:
        make_policy(name, PolicyContext("never_tuned", SLO, np.random.default_rng(0), 3))


@pytest.mark.parametrize("name", FROZEN)
@few
@given(drawn=levels, request_=requests, batches=st.booleans(), seed=st.integers(0, 9))
def test_choices_are_offered_and_costs_are_finite(name, drawn, request_, batches, seed):
    policy, fleet = make(name, seed), fleet_of(drawn, batches)
    assert all(policy.route(request_, fleet) in range(len(fleet)) for _ in range(3))
    if isinstance(policy, LeastCost):
        assert np.isfinite(policy.costs(request_, fleet)).all()


@pytest.mark.parametrize("name", sorted(set(FROZEN) - {"ray_p2c", "llmd_predicted_latency"}))
@few
@given(drawn=levels, request_=requests, batches=st.booleans(), data=st.data())
def test_permuting_the_replicas_permutes_the_choice(name, drawn, request_, batches, data):
    order = data.draw(st.permutations(range(len(drawn))))
    fleet = fleet_of(drawn, batches)
    moved = [fleet[i] for i in order]
    policy = make(name)
    if isinstance(policy, LeastCost):
        costs = make(name).costs(request_, fleet)
        assert make(name).costs(request_, moved).tolist() == [costs[i] for i in order]
    if not tied(name, request_, fleet):
        assert order[make(name).route(request_, moved)] == make(name).route(request_, fleet)


def tied(name: str, request: Request, fleet: list[ReplicaSnapshot]) -> bool:
    """Whether a fresh rule has nothing to tell two of these replicas apart by."""
    matches = sorted(min(s.engine.match_tokens if s.engine else 0, request.context_tokens)
                     for s in fleet)  # fmt: skip
    if len(fleet) > 1 and name in ("sglang_cache_aware", "smetric"):
        # Of equal prefixes they name any one.
        return matches[-1] == matches[-2]
    if name == "preble_e2":
        return len(set(matches)) < len(matches)
    if name == "ray_prefix_affinity":
        # Where those with the longest prefix are full, it draws.
        return not all(map(has_room, fleet))
    # Without a past, all replicas cost AIBrix's preble the same.
    return name == "aibrix_preble"


@pytest.mark.parametrize("name", ["ray_p2c", "ray_prefix_affinity"])
@few
@given(drawn=levels, request_=requests, batches=st.booleans(), seed=st.integers(0, 9))
def test_a_replica_at_capacity_is_passed_over_while_another_has_room(
    name, drawn, request_, batches, seed
):
    fleet = fleet_of(drawn, batches)
    chosen = make(name, seed).route(request_, fleet)
    assert has_room(fleet[chosen]) or not any(map(has_room, fleet))


@few
@given(drawn=levels, request_=requests, batches=st.booleans(), weight=st.floats(0, 20))
def test_sed_linear_is_the_wait_and_the_weighted_rest(drawn, request_, batches, weight):
    fleet = fleet_of(drawn, batches)
    sed = make("sed").costs(request_, fleet)
    expected = [
        delay[ADDED_WAIT_S] + weight * (done - delay[ADDED_WAIT_S])
        for delay, done in zip(added_delays(request_, fleet), sed, strict=True)
    ]
    assert SedLinear(weight).costs(request_, fleet) == pytest.approx(expected)
    assert SedLinear(1.0).costs(request_, fleet) == pytest.approx(sed)


@few
@given(drawn=levels, request_=requests, batches=st.booleans(), slo_s=st.floats(0.01, 60))
def test_filter_dump_keeps_the_slo_or_gives_up_the_slowest(drawn, request_, batches, slo_s):
    fleet = fleet_of(drawn, batches)
    done = make("sed").costs(request_, fleet)
    chosen = FilterDump(Slo(slo_s)).route(request_, fleet)
    if min(done) <= slo_s:
        marginal = make("marginal_delay").costs(request_, fleet)
        kept = [cost for cost, s in zip(marginal, done, strict=True) if s <= slo_s]
        assert done[chosen] <= slo_s
        assert marginal[chosen] == pytest.approx(min(kept))
    else:
        speeds = [s.full_tokens_per_s for s in fleet]
        assert speeds[chosen] == min(speeds)


@pytest.mark.parametrize(
    ("headrooms", "most", "scores"),
    [
        # Scaled: 0.8 x (0, 0.51, 1) + 0.2 x (0.565, 0, 1) = 0.113, 0.408, 1; best fit first.
        ([(1.0, 0.213), (2.02, 0.1), (3.0, 0.3)], 0.0, [0.89, 0.60, 0.01]),
        ([(1.0, 0.213), (2.02, 0.1), (3.0, 0.3)], 1.0, [0.12, 0.41, 1.01]),
        # Later tokens alike: the first token alone counts.
        ([(1.0, 0.1), (3.0, 0.1)], 0.0, [1.01, 0.01]),
        # All are late: the least late first, whatever the strategy.
        ([(-1.0, -0.1), (-3.0, -0.1)], 1.0, [1.01, 0.01]),
        ([(1.0, 0.1), (1.0, 0.1)], 0.0, [0.51, 0.51]),
    ],
)
def test_predicted_headrooms_are_scaled_to_their_range(headrooms, most, scores):
    rule = LlmdPredictedLatency(np.random.default_rng(0), SLO, most_headroom=most)
    assert rule.scores(headrooms) == pytest.approx(scores)


def test_predicted_latency_draws_by_score_among_those_that_keep_the_slo():
    idle = replace(replica(0, False), tokens_per_s=1000.0, predicted_wait_s=0.0)
    waits = [0.0, 1.0, 1.5, 9.0]
    fleet = [replace(idle, replica_id=str(w), predicted_wait_s=w, num_waiting=1) for w in waits]
    rule = LlmdPredictedLatency(np.random.default_rng(0), SLO, epsilon=0.0)
    picks = Counter(rule.route(Request(0.0, 100, 200.0), fleet) for _ in range(4000))
    # Headrooms of 1.8, 0.8 and 0.3 s score 0.01, 0.67 and 1.01.
    expected = np.array([0.01, 0.67, 1.01]) / 1.69
    assert [picks[i] / 4000 for i in range(3)] == pytest.approx(expected, abs=0.03)
    assert picks[3] == 0


def test_ties_of_llmd_go_round_and_those_of_dynamo_are_drawn():
    fleet = [replica(5, True)] * 4
    request = Request(0.0, 1000, 1100.0)
    for name in ("llmd_sticky", "llmd_blend"):
        rule = make(name)
        assert [rule.route(request, fleet) for _ in range(6)] == [0, 1, 2, 3, 0, 1]
    rule = make("dynamo_cost")
    picks = Counter(rule.route(request, fleet) for _ in range(4000))
    assert [picks[i] / 4000 for i in range(4)] == pytest.approx([0.25] * 4, abs=0.04)
