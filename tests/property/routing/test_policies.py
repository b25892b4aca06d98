from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from tokenyard.routing.observation import (
    NUM_MARGINAL_WEIGHTS,
    snapshot_columns,
)
from tokenyard.routing.policies import BASELINES, PolicyContext, make_policy
from tokenyard.routing.policies.delay import MarginalDelay, SedDump, finish_times_s
from tokenyard.routing.policies.public import is_tuned, public_factories
from tokenyard.routing.policies.tuned import FleetRules, TunedRules
from tokenyard.routing.scores.linear import marginal_scores
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, Request, ScoringPolicy
from tokenyard.types import Slo

OBLIVIOUS = {"round_robin", "random", "weighted_random", "sita"}
GIVES_UP_A_REPLICA = {"sed_reserve", "sed_dump"}
OWN = sorted(set(BASELINES) - public_factories().keys())
"""Those that are not of public routers, which have tests of their own."""
EVERY_CLASS = sorted(name for name in BASELINES if not is_tuned(name) or name == "sed_linear")
LOAD_AWARE = sorted(set(OWN) - OBLIVIOUS - GIVES_UP_A_REPLICA)
LOOKS_AT_ALL = sorted(set(LOAD_AWARE) - {"power_of_two"})
SLO = Slo(2.0)
few = settings(max_examples=scaled(40))


@st.composite
def drawn_requests(draw) -> Request:
    context = draw(st.integers(1, 30_000))
    return Request(draw(st.floats(0, 1e6)), context, context + draw(st.floats(0, 10_000)))


requests = drawn_requests()
engines = st.builds(
    EngineSnapshot,
    iteration_s=st.floats(1e-3, 0.05),
    prefill_token_s=st.floats(1e-6, 1e-3),
    sequence_s=st.floats(0, 1e-3),
    kv_token_s=st.floats(0, 1e-6),
    token_budget=st.integers(65, 8192),
    kv_capacity_tokens=st.floats(1e3, 1e6),
    kv_used_fraction=st.floats(0, 1),
    prefill_in_flight_tokens=st.floats(0, 1e6),
    output_in_flight_tokens=st.floats(0, 1e6),
    match_tokens=st.integers(0, 30_000),
)


def snapshots_with(engine: st.SearchStrategy) -> st.SearchStrategy[ReplicaSnapshot]:
    return st.builds(
        ReplicaSnapshot,
        replica_id=st.just("replica"),
        tokens_per_s=st.floats(1, 1e5),
        num_slots=st.integers(1, 64),
        max_concurrency=st.integers(1, 64),
        num_waiting=st.integers(0, 2000),
        num_running=st.integers(0, 64),
        tokens_in_flight=st.floats(0, 1e7),
        predicted_wait_s=st.one_of(st.just(float("nan")), st.floats(0, 1e4)),
        engine=engine,
    )


snapshots = snapshots_with(st.none() | engines)
clusters = st.lists(snapshots, min_size=1, max_size=16)
token_level_clusters = st.lists(snapshots_with(st.none()), min_size=1, max_size=16)
fleets = st.lists(snapshots_with(engines), min_size=1, max_size=8)


def tuned_for(num_replicas: int) -> TunedRules:
    return TunedRules(
        scenario="test",
        reserve_above_tokens=2000.0,
        dump_replica=num_replicas - 1,
        sita_cuts_tokens=tuple(500.0 * (i + 1) for i in range(num_replicas - 1)),
        sita_replicas=tuple(reversed(range(num_replicas))),
        fleet=FleetRules(wait_weight=0.5, others_weight=2.0),
    )


def make(name: str, num_replicas: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return make_policy(name, PolicyContext("test", SLO, rng, num_replicas, tuned_for(num_replicas)))


def loaded(level: float, speed: float = 5000.0, batches: bool = False) -> ReplicaSnapshot:
    """A replica on which every measure of load grows with `level`, up to 64."""
    return ReplicaSnapshot(
        replica_id="replica",
        tokens_per_s=speed,
        num_slots=1,
        max_concurrency=5,
        num_waiting=int(level),
        num_running=1 if level else 0,
        tokens_in_flight=1000.0 * level,
        predicted_wait_s=0.3 * level,
        engine=engine_of(level) if batches else None,
    )


def engine_of(level: float, match_tokens: int = 0) -> EngineSnapshot:
    return EngineSnapshot(
        iteration_s=0.01,
        prefill_token_s=1e-4,
        sequence_s=1e-4,
        kv_token_s=1e-7,
        token_budget=512,
        kv_capacity_tokens=64_000.0,
        kv_used_fraction=level / 64,
        prefill_in_flight_tokens=400.0 * level,
        output_in_flight_tokens=600.0 * level,
        match_tokens=match_tokens,
    )


@pytest.mark.parametrize("name", EVERY_CLASS)
@few
@given(request_=requests, cluster=clusters, seed=st.integers(0, 9))
def test_every_choice_is_a_replica_that_was_offered(name, request_, cluster, seed):
    policy = make(name, len(cluster), seed)
    assert all(policy.route(request_, cluster) in range(len(cluster)) for _ in range(3))


@pytest.mark.parametrize("name", EVERY_CLASS)
@few
@given(request_=requests, only=snapshots)
def test_a_single_replica_takes_everything(name, request_, only):
    assert make(name, 1).route(request_, [only]) == 0


@pytest.mark.parametrize("name", LOAD_AWARE)
@few
@given(
    levels=st.lists(st.integers(0, 40), min_size=2, max_size=16),
    request_=requests,
    seed=st.integers(0, 9),
    batches=st.booleans(),
)
def test_of_equal_replicas_the_strictly_most_loaded_is_never_picked(
    name, levels, request_, seed, batches
):
    cluster = [loaded(level, batches=batches) for level in levels]
    chosen = make(name, len(levels), seed).route(request_, cluster)
    assert levels[chosen] <= max(levels[:chosen] + levels[chosen + 1 :])


@pytest.mark.parametrize("name", LOOKS_AT_ALL)
@few
@given(
    levels=st.lists(st.integers(0, 40), min_size=2, max_size=8, unique=True),
    request_=requests,
    batches=st.booleans(),
    data=st.data(),
)
def test_permuting_the_replicas_permutes_the_choice(name, levels, request_, batches, data):
    order = data.draw(st.permutations(range(len(levels))))
    cluster = [loaded(level, batches=batches) for level in levels]
    policy = make(name, len(levels))
    straight = policy.route(request_, cluster)
    assert order[policy.route(request_, [cluster[i] for i in order])] == straight


@pytest.mark.parametrize("name", LOOKS_AT_ALL)
@few
@given(
    request_=requests,
    level=st.integers(0, 40),
    num_replicas=st.integers(2, 8),
    batches=st.booleans(),
)
def test_ties_go_to_the_first_replica(name, request_, level, num_replicas, batches):
    cluster = [loaded(level, batches=batches)] * num_replicas
    assert make(name, num_replicas).route(request_, cluster) == 0


@pytest.mark.parametrize("name", LOOKS_AT_ALL)
@few
@given(request_=requests, cluster=clusters)
def test_a_policy_that_scores_takes_the_cheapest_candidate(name, request_, cluster):
    policy = make(name, len(cluster))
    assert isinstance(policy, ScoringPolicy)
    decision = policy.decide(request_, cluster)
    assert decision.replica == policy.route(request_, cluster)
    assert decision.scores is not None
    assert decision.scores[decision.replica] == min(decision.scores)


@pytest.mark.parametrize("name", EVERY_CLASS)
@few
@given(request_=requests, cluster=clusters, num_down=st.integers(1, 4))
def test_replicas_that_are_down_are_missed_by_nobody(name, request_, cluster, num_down):
    policy = make(name, len(cluster) + num_down)
    assert policy.route(request_, cluster) in range(len(cluster))


@few
@given(request_=requests, cluster=clusters, num_down=st.integers(1, 4), data=st.data())
def test_rules_that_name_a_replica_are_sed_while_one_is_down(request_, cluster, num_down, data):
    num_replicas = len(cluster) + num_down
    dump = SedDump(SLO, data.draw(st.integers(0, num_replicas - 1)), num_replicas)
    sed = make("sed", len(cluster)).route(request_, cluster)
    assert dump.route(request_, cluster) == sed
    assert make("sita", num_replicas).route(request_, cluster) == sed


@few
@given(request_=requests, cluster=clusters)
def test_dump_is_sed_as_long_as_some_replica_meets_the_slo(request_, cluster):
    num_replicas = len(cluster)
    sed = make("sed", num_replicas).route(request_, cluster)
    attained = finish_times_s(request_, [cluster[sed]])[0] <= SLO.response_s
    expected = sed if attained else num_replicas - 1
    assert make("sed_dump", num_replicas).route(request_, cluster) == expected


@few
@given(request_=requests, cluster=st.lists(snapshots, min_size=2, max_size=8))
def test_reserve_keeps_long_requests_off_the_slowest_replica(request_, cluster):
    speeds = [s.tokens_per_s for s in cluster]
    slowest = speeds.index(min(speeds))
    chosen = make("sed_reserve", len(cluster)).route(request_, cluster)
    if request_.predicted_total_tokens > 2000:
        assert chosen != slowest
    else:
        assert chosen == make("sed", len(cluster)).route(request_, cluster)


@few
@given(smaller=requests, larger=requests, cluster=clusters)
def test_size_intervals_keep_sizes_in_order_and_look_at_nothing_else(smaller, larger, cluster):
    if smaller.predicted_total_tokens > larger.predicted_total_tokens:
        smaller, larger = larger, smaller
    policy = make("sita", len(cluster))
    # The test's intervals are served in reversed order of the replicas.
    assert policy.route(smaller, cluster) >= policy.route(larger, cluster)


@few
@given(
    request_=requests,
    cluster=fleets,
    wait_weight=st.floats(0, 5),
    others_weight=st.floats(0, 5),
    slo_s=st.floats(0.1, 60),
)
def test_tuned_marginal_delay_is_the_marginal_policy_with_two_of_its_weights(
    request_, cluster, wait_weight, others_weight, slo_s
):
    weights = np.zeros(NUM_MARGINAL_WEIGHTS)
    weights[1], weights[4] = wait_weight - 1.0, others_weight - 1.0
    costs = np.empty(len(cluster))
    marginal_scores(
        weights, request_.context_tokens,
        request_.predicted_total_tokens - request_.context_tokens, 1000.0, slo_s,
        snapshot_columns(cluster), costs,
    )  # fmt: skip
    expected = MarginalDelay(wait_weight, others_weight).costs(request_, cluster)
    assert costs * slo_s == pytest.approx(expected, rel=1e-9, abs=1e-6)


@few
@given(request_=requests, cluster=token_level_clusters, slo_s=st.floats(0.1, 60))
def test_sed_is_the_linear_policy_with_no_correction(request_, cluster, slo_s):
    costs = np.empty(len(cluster))
    marginal_scores(
        np.zeros(NUM_MARGINAL_WEIGHTS), request_.context_tokens,
        request_.predicted_total_tokens - request_.context_tokens, 1000.0, slo_s,
        snapshot_columns(cluster), costs,
    )  # fmt: skip
    expected = make("sed", len(cluster)).decide(request_, cluster).scores
    assert costs * slo_s == pytest.approx(expected)


@few
@given(request_=requests, cluster=clusters)
def test_marginal_delay_without_weight_on_the_others_is_sed(request_, cluster):
    sed = make("sed", len(cluster)).decide(request_, cluster).scores
    assert MarginalDelay(others_weight=0.0).costs(request_, cluster) == pytest.approx(sed)


@few
@given(request_=requests, cluster=token_level_clusters)
def test_weighted_least_loaded_takes_the_fewest_tokens_for_the_speed(request_, cluster):
    total = request_.predicted_total_tokens
    loads = [(s.tokens_in_flight + total) / s.full_tokens_per_s for s in cluster]
    assert loads[make("weighted_least_loaded", len(cluster)).route(request_, cluster)] == min(loads)


@pytest.mark.parametrize("name", ["weighted_random", "weighted_least_connections"])
def test_weights_are_full_speeds_so_slots_count(name):
    one_slot = loaded(0, speed=1000.0)
    eight_slots = replace(one_slot, num_slots=8)
    policy = make(name, 2)
    request_ = Request(0.0, 100, 100.0)
    picks = [policy.route(request_, [one_slot, eight_slots]) for _ in range(4000)]
    assert np.mean(picks) == pytest.approx(8 / 9 if name == "weighted_random" else 1.0, abs=0.02)


def test_round_robin_gives_everyone_the_same_share():
    policy = make("round_robin", 3)
    cluster = [loaded(9), loaded(0), loaded(0)]
    picks = [policy.route(Request(0.0, 1, 1.0), cluster) for _ in range(9)]
    assert np.bincount(picks).tolist() == [3, 3, 3]
