"""The observation and the linear score: same numbers compiled, plain and from the server."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.instances import DISCIPLINES, a_scenario, loaded, one, random_stream
from sizes import scaled

from tokenyard.routing import observation as ob
from tokenyard.routing.policies.delay import MarginalDelay
from tokenyard.routing.scores import linear
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, Request

seeds = st.integers(0, 2**32 - 1)
marginal_sizes = st.sampled_from([ob.NUM_MARGINAL_WEIGHTS, ob.NUM_MARGINAL_SLO_WEIGHTS])
amounts = st.floats(0, 1e6)

snapshots = st.builds(
    ReplicaSnapshot,
    replica_id=st.just("replica"),
    tokens_per_s=st.floats(1.0, 1e6),
    num_slots=st.integers(1, 512),
    max_concurrency=st.integers(1, 512),
    num_waiting=st.integers(0, 10**6),
    num_running=st.integers(0, 512),
    tokens_in_flight=st.floats(0, 1e15),
    predicted_wait_s=st.floats(0, 1e15) | st.just(math.nan),
    mean_response_s=st.floats(0, 1e15) | st.just(math.nan),
)
engine_snapshots = st.builds(
    EngineSnapshot,
    iteration_s=st.floats(1e-4, 1.0),
    prefill_token_s=st.floats(0, 1e-2),
    sequence_s=st.floats(0, 1e-2),
    kv_token_s=st.floats(0, 1e-4),
    token_budget=st.integers(1, 10**5),
    kv_capacity_tokens=st.floats(1, 1e7),
    kv_used_fraction=st.floats(0, 1),
    prefill_in_flight_tokens=st.floats(0, 1e9),
    output_in_flight_tokens=st.floats(0, 1e9),
    match_tokens=st.just(0),
)
batching = st.builds(
    lambda snapshot, engine: replace(snapshot, engine=engine, predicted_wait_s=1.5),
    snapshots, engine_snapshots,
)  # fmt: skip
batching_replicas = st.lists(batching, min_size=1, max_size=6)
replicas = st.lists(snapshots, min_size=1, max_size=9)
any_replicas = replicas | batching_replicas
request_features = st.lists(
    st.floats(-1e8, 1e8), min_size=ob.NUM_REQUEST_FEATURES, max_size=ob.NUM_REQUEST_FEATURES
).map(lambda values: ob.squash(np.array(values)))


def an_observation(function, features, tokens, columns, whole):
    out = np.full(ob.observation_size(len(columns), whole), np.nan, dtype=np.float32)
    context = max(0.75 * tokens, 1.0)
    return function(features, context, max(tokens, 2.0), columns, whole, out), out


@settings(max_examples=scaled(200))
@given(request_features, amounts, replicas | batching_replicas, st.booleans())
def test_compiled_and_plain_observations_are_equal_and_within_the_documented_bounds(
    features, tokens, some, whole
):
    columns = ob.snapshot_columns(some)
    saturated, out = an_observation(ob.encode, features, tokens, columns, whole)
    plain_saturated, plain = an_observation(ob.encode.py_func, features, tokens, columns, whole)
    assert out.tobytes() == plain.tobytes()
    assert saturated == plain_saturated
    assert np.isfinite(out).all()
    assert (np.abs(out) <= ob.OBSERVATION_LIMIT).all()
    assert (saturated > 0) == bool((out[ob.NUM_REQUEST_FEATURES :] == ob.OBSERVATION_LIMIT).any())


@settings(max_examples=scaled(100))
@given(seeds, amounts, st.permutations(range(4)))
def test_permuting_replicas_of_unequal_speed_permutes_their_scores(seed, tokens, order):
    rng = np.random.default_rng(seed)
    some = [
        ReplicaSnapshot("replica", speed, 1, 4, 2, 1, 3000.0, predicted_wait_s=rng.exponential())
        for speed in (1000.0, 2000.0, 3000.0, 4000.0)
    ]
    weights = rng.normal(size=ob.NUM_MARGINAL_WEIGHTS)
    scores, permuted = np.empty(4), np.empty(4)
    for table, out in ((some, scores), ([some[i] for i in order], permuted)):
        columns = ob.snapshot_columns(table)
        linear.marginal_scores(weights, tokens / 2, tokens / 2, 2000.0, 2.0, columns, out)
    assert permuted.tobytes() == scores[order].tobytes()


@pytest.mark.parametrize("discipline", DISCIPLINES)
@settings(max_examples=scaled(30))
@given(seed=seeds)
def test_the_server_computes_from_snapshots_what_the_simulator_shows_in_training(discipline, seed):
    rng = np.random.default_rng(seed)
    scenario = a_scenario([(3000.0, 3), (5000.0, 5), (5000.0, 7)], discipline)
    stream = random_stream(scenario, rng, 50, load=1.2)
    stream[:, -ob.NUM_REQUEST_FEATURES :] = ob.squash(rng.normal(size=(50, 16)))
    sim = loaded(scenario, stream)
    whole = bool(rng.integers(2))
    if whole:
        sim.show_rule(2000.0)
    for index, action in enumerate(rng.integers(0, 3, 49)):
        columns = ob.snapshot_columns(list(sim.view().snapshots()))
        assert ob.snapshot_columns(sim.view().snapshots()).tobytes() == columns.tobytes()
        features = stream[index, -ob.NUM_REQUEST_FEATURES :]
        request = sim.view().request()
        out = np.empty(ob.observation_size(3, whole=whole), dtype=np.float32)
        sizes = request.context_tokens, request.predicted_total_tokens
        ob.encode(features, *sizes, columns, whole, out)
        assert out.tobytes() == sim.observe()[0, : len(out)].tobytes()
        sim.step(one(action))


def test_numbers_beyond_the_bound_are_counted_by_the_simulator():
    stream = random_stream(a_scenario([(1e-12, 1)]), np.random.default_rng(0), 3)
    sim = loaded(a_scenario([(1e-12, 1)]), stream)
    sim.show_rule(2000.0)
    sim.observe()
    # The finish time, e^35 seconds away. In SLOs the service, that by the size of the request, and
    # how far it is beyond the SLO.
    assert sim.num_saturated == 4


def test_three_replicas_make_58_numbers_or_the_papers_34():
    assert ob.observation_size(3, whole=True) == 58
    assert ob.observation_size(3, whole=False) == 34


@pytest.mark.parametrize(
    ("speeds", "ranks"),
    [([5.0], [0.0]), ([1.0, 9.0, 4.0], [-1.0, 1.0, 0.0]), ([2.0, 2.0], [-1.0, 1.0])],
)
def test_speed_ranks_run_from_slowest_to_fastest_and_tell_equals_apart(speeds, ranks):
    assert ob.speed_ranks(np.array(speeds)).tolist() == ranks


@settings(max_examples=scaled(100))
@given(
    seeds, marginal_sizes, st.integers(1, 10**5), st.floats(1, 1e5), replicas | batching_replicas
)
def test_compiled_and_plain_marginal_scores_are_equal(seed, size, context, output, some):
    columns = ob.snapshot_columns(some)
    weights = np.random.default_rng(seed).normal(size=size)
    scores, plain = np.empty(len(some)), np.empty(len(some))
    choice = linear.marginal_scores(weights, context, output, 2000.0, 2.0, columns, scores)
    linear.marginal_scores.py_func(weights, context, output, 2000.0, 2.0, columns, plain)
    assert scores == pytest.approx(plain, rel=1e-9)
    assert choice == np.argmin(scores)


@settings(max_examples=scaled(100))
@given(marginal_sizes, st.integers(1, 10**5), st.floats(1, 1e5), any_replicas)
def test_zero_marginal_weights_score_what_the_rule_of_least_marginal_delay_does(
    size, context, output, some
):
    scores = np.empty(len(some))
    weights = np.zeros(size)
    linear.marginal_scores(weights, context, output, 2000.0, 2.0, ob.snapshot_columns(some), scores)
    rule = MarginalDelay().costs(Request(0.0, context, context + output), some)
    assert 2.0 * scores == pytest.approx(np.array(rule), rel=1e-9)


@settings(max_examples=scaled(100))
@given(seeds, st.integers(1, 10**5), st.floats(1, 1e5), batching_replicas)
def test_prices_are_added_where_an_slo_violation_is_likely(seed, context, output, some):
    """Against the formula of the docstring, by names and not by places."""
    rng = np.random.default_rng(seed)
    plain, risky_prices, lateness_prices, logs = (
        rng.normal(size=n) for n in (ob.NUM_MARGINAL_WEIGHTS, 3, 3, 5)
    )
    columns, slo_s = ob.snapshot_columns(some), 2.0
    without, priced = np.empty(len(some)), np.empty(len(some))
    linear.marginal_scores(plain, context, output, 2000.0, slo_s, columns, without)
    weights = np.concatenate([plain, risky_prices, lateness_prices, logs])
    linear.marginal_scores(weights, context, output, 2000.0, slo_s, columns, priced)
    first, token, response, size, lateness = linear._TYPICAL_LIMITS * np.exp(logs)
    for row, before, after in zip(columns, without, priced, strict=True):
        to_first_s, decode_s, _ = ob.batching_delays(row, context, output)
        seen = np.array([to_first_s, decode_s / max(output - 1, 1), to_first_s + decode_s]) / slo_s
        limits = np.array([first, token, response])
        if np.isclose(seen, limits, rtol=1e-9).any():
            continue
        risky = (seen > limits).any() or (context + output) / 2000.0 > size
        powers = row[ob.SPEED_RANK] ** np.arange(3)
        added = risky * risky_prices @ powers
        added += max(seen[0] / lateness - 1.0, 0.0) * lateness_prices @ powers
        assert after == pytest.approx(before + added, rel=1e-9, abs=1e-9)


def test_a_replica_that_is_not_routable_costs_infinity():
    columns = np.ones((2, ob.NUM_COLUMNS))
    columns[0, ob.ROUTABLE] = 0.0
    scores = np.empty(2)
    weights = np.zeros(ob.NUM_MARGINAL_WEIGHTS)
    assert linear.marginal_scores(weights, 10.0, 10.0, 2000.0, 2.0, columns, scores) == 1
    assert scores[0] == math.inf
