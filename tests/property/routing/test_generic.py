"""Laws of the policy for any cluster, and that simulator and server decide alike."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.instances import DISCIPLINES, a_scenario, loaded, one, random_stream
from sizes import scaled

from tokenyard.routing import observation
from tokenyard.routing.artifact import KINDS, learned_policy
from tokenyard.routing.drawn_clusters import draw_cluster
from tokenyard.routing.policies.delay import (
    MarginalDelay,
    SedDump,
    SedReserve,
    ShortestExpectedDelay,
)
from tokenyard.routing.scores import any_cluster as generic
from tokenyard.routing.search_any_cluster import any_cluster_artifact
from tokenyard.routing.simulator import make_simulator
from tokenyard.routing.simulator.run import run_policy
from tokenyard.routing.simulator.streams import StreamSet, StreamSource
from tokenyard.routing.types import EngineSnapshot, OrderingPolicy, ReplicaSnapshot, Request
from tokenyard.types import Slo

ORDER = np.array([8.0, 5.0])
SERVERS = [(3000.0, 3), (5000.0, 5), (5000.0, 5), (7000.0, 7)]
seeds = st.integers(0, 2**32 - 1)
some_cases = settings(max_examples=scaled(60))


def a_policy(rng, spread=0.3, slo=None):
    arrays = [
        rng.normal(0.0, spread, num)
        for num in (generic.NUM_SERVER_WEIGHTS, generic.NUM_ENGINE_WEIGHTS)
    ]
    return learned_policy(any_cluster_artifact(*arrays), slo=slo)


def a_replica(rng, number, batches):
    engine = EngineSnapshot(
        iteration_s=rng.uniform(0.005, 0.05),
        prefill_token_s=rng.uniform(1e-5, 1e-3),
        sequence_s=rng.uniform(1e-5, 1e-3),
        kv_token_s=1e-7,
        token_budget=512,
        kv_capacity_tokens=50_000.0,
        kv_used_fraction=rng.random(),
        prefill_in_flight_tokens=rng.uniform(0, 5000),
        output_in_flight_tokens=rng.uniform(0, 2000),
        match_tokens=0,
    )
    return ReplicaSnapshot(
        replica_id=f"replica-{number}",
        tokens_per_s=rng.uniform(1000, 9000),
        num_slots=int(rng.integers(1, 9)),
        max_concurrency=8,
        num_waiting=int(rng.integers(0, 5)),
        num_running=int(rng.integers(0, 5)),
        tokens_in_flight=rng.uniform(0, 9000),
        observed_at_s=-rng.uniform(0, 2),
        engine=engine if batches else None,
    )


def a_request(rng):
    context = int(rng.integers(1, 6000))
    return Request(0.0, context, context + rng.uniform(0, 800))


@some_cases
@given(seed=seeds, num=st.integers(1, 40), batches=st.booleans())
def test_permuting_replicas_permutes_their_costs(seed, num, batches):
    rng = np.random.default_rng(seed)
    policy, request = a_policy(rng), a_request(rng)
    some = [a_replica(rng, number, batches) for number in range(num)]
    order = rng.permutation(num)
    costs = np.array(policy.decide(request, some).scores)
    permuted = policy.decide(request, [some[i] for i in order])
    assert np.array(permuted.scores) == pytest.approx(costs[order], rel=1e-9, abs=1e-9)
    assert policy.route(request, some) == np.argmin(costs)


@some_cases
@given(seed=seeds, batches=st.booleans())
def test_without_weights_it_is_the_rule_that_it_corrects(seed, batches):
    rng = np.random.default_rng(seed)
    request, some = a_request(rng), [a_replica(rng, number, batches) for number in range(5)]
    rule = MarginalDelay() if batches else ShortestExpectedDelay()
    costs = np.array(a_policy(rng, spread=0.0).decide(request, some).scores)
    assert costs / costs[0] == pytest.approx(
        np.array(rule.costs(request, some)) / rule.costs(request, some)[0], rel=1e-9
    )


@some_cases
@given(seed=seeds, factor=st.floats(0.1, 10.0))
def test_a_cluster_that_is_faster_throughout_is_decided_on_alike(seed, factor):
    """Time is counted in units of the cluster, so only the SLO says what a second is."""
    rng = np.random.default_rng(seed)
    weights, request = rng.normal(size=generic.NUM_SERVER_WEIGHTS), a_request(rng)
    columns = observation.snapshot_columns([a_replica(rng, i, False) for i in range(6)])
    faster = columns.copy()
    faster[:, observation.TOKENS_PER_S] *= factor
    faster[:, observation.WAIT_S] /= factor
    found = []
    for table, slo_s in ((columns, 2.0), (faster, 2.0 / factor)):
        costs = np.empty(6)
        size = request.predicted_total_tokens
        generic.server_scores(weights, size, 2000.0, slo_s, table, costs)
        found.append(costs)
    assert found[0] == pytest.approx(found[1], rel=1e-6, abs=1e-9)


@some_cases
@given(seed=seeds)
def test_compiled_and_plain_scores_are_equal_and_replicas_that_are_down_are_not_chosen(seed):
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=generic.NUM_ENGINE_WEIGHTS)
    columns = observation.snapshot_columns([a_replica(rng, i, True) for i in range(6)])
    columns[rng.random(6) < 0.5, observation.ROUTABLE] = 0.0
    found = []
    for function in (generic.engine_scores, generic.engine_scores.py_func):
        costs = np.empty(6)
        found.append((function(weights, 900.0, 50.0, 2000.0, 2.0, columns, costs), costs))
    (choice, costs), (plain_choice, plain) = found
    assert choice == plain_choice
    assert plain == pytest.approx(costs, rel=1e-9)
    up = columns[:, observation.ROUTABLE] != 0.0
    np.testing.assert_array_equal(np.isinf(costs), ~up)
    assert up[choice] or not up.any()


@pytest.mark.parametrize("discipline", DISCIPLINES)
@settings(max_examples=scaled(10))
@given(seed=seeds)
def test_the_simulator_runs_it_as_the_server_would(discipline, seed):
    rng = np.random.default_rng(seed)
    scenario = a_scenario(SERVERS, discipline)
    stream = random_stream(scenario, rng, 60, load=1.1)
    weights = rng.normal(0.0, 0.3, generic.NUM_SERVER_WEIGHTS)
    compiled, stepped = loaded(scenario, stream), loaded(scenario, stream)
    compiled.run_any_cluster(weights, 2000.0)
    policy = learned_policy(
        any_cluster_artifact(weights, np.zeros(generic.NUM_ENGINE_WEIGHTS)), slo=scenario.slo
    )
    for _ in range(len(stream)):
        stepped.step(one(policy.route(stepped.request(), stepped.snapshots())))
    stepped.drain()
    assert compiled.outcome_table.tobytes() == stepped.outcome_table.tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_the_simulator_of_fleets_runs_it_as_the_server_would(seed):
    rng = np.random.default_rng(seed)
    scenario = draw_cluster(rng, "engines")
    stream = StreamSource(scenario).sample(80, rng)
    weights = rng.normal(0.0, 0.3, generic.NUM_ENGINE_WEIGHTS)
    sim = make_simulator(scenario, 1, 80)
    sim.load(0, stream)
    sim.run_any_cluster(weights, 2000.0, ORDER)
    artifact = any_cluster_artifact(
        np.zeros(generic.NUM_SERVER_WEIGHTS), weights, orders={"engine_order": ORDER}
    )
    (run,) = run_policy(
        scenario,
        StreamSet([stream], "test"),
        lambda rng: learned_policy(artifact, slo=scenario.slo),
        seed=0,
    )
    np.testing.assert_array_equal(sim.outcomes(0).server, run.outcomes.server)
    np.testing.assert_allclose(sim.outcomes(0).response_s, run.outcomes.response_s)


@settings(max_examples=scaled(10))
@given(seed=seeds)
def test_the_simulator_of_servers_orders_as_the_server_would(seed):
    rng = np.random.default_rng(seed)
    scenario = a_scenario(SERVERS)
    stream = random_stream(scenario, rng, 80, load=1.2)
    weights = rng.normal(0.0, 0.3, generic.NUM_SERVER_WEIGHTS)
    artifact = any_cluster_artifact(
        weights, np.zeros(generic.NUM_ENGINE_WEIGHTS), orders={"server_order": ORDER}
    )
    sim = loaded(scenario, stream)
    KINDS["generic"].run(artifact, sim)
    policy = learned_policy(artifact, slo=scenario.slo)
    assert isinstance(policy, OrderingPolicy)
    (run,) = run_policy(scenario, StreamSet([stream], "test"), lambda rng: policy, seed=0)
    np.testing.assert_array_equal(sim.outcomes(0).server, run.outcomes.server)
    np.testing.assert_array_equal(sim.outcomes(0).response_s, run.outcomes.response_s)


@some_cases
@given(seed=seeds, batches=st.booleans())
def test_the_order_key_grows_with_the_request(seed, batches):
    rng = np.random.default_rng(seed)
    zeros = [np.zeros(num) for num in (generic.NUM_SERVER_WEIGHTS, generic.NUM_ENGINE_WEIGHTS)]
    orders = {"server_order": ORDER, "engine_order": ORDER}
    policy = learned_policy(any_cluster_artifact(*zeros, orders=orders))
    replica = a_replica(rng, 0, batches)
    short, long = Request(3.0, 100, 150.0), Request(3.0, 2000, 2500.0)
    keys = [policy.place(one, [replica]).order_key_s for one in (short, long)]
    assert 3.0 < keys[0] < keys[1]


def test_without_an_order_it_orders_nothing_and_a_weight_below_zero_is_refused():
    assert not isinstance(a_policy(np.random.default_rng(0)), OrderingPolicy)
    zeros = [np.zeros(num) for num in (generic.NUM_SERVER_WEIGHTS, generic.NUM_ENGINE_WEIGHTS)]
    with pytest.raises(ValueError, match="below 0"):
        any_cluster_artifact(*zeros, orders={"engine_order": -ORDER})


@settings(max_examples=scaled(20))
@given(seed=seeds, above=st.floats(0, 6000), dump=st.integers(0, 3))
def test_compiled_delay_rules_are_the_policies(seed, above, dump):
    rng = np.random.default_rng(seed)
    scenario = a_scenario(SERVERS)
    stream = random_stream(scenario, rng, 60, load=1.2)
    slo = Slo(scenario.slo_response_s)
    for reserve_above, dump_server, policy in (
        (np.inf, -1, ShortestExpectedDelay()),
        (above, -1, SedReserve(above)),
        (np.inf, dump, SedDump(slo, dump, len(SERVERS))),
    ):
        compiled, stepped = loaded(scenario, stream), loaded(scenario, stream)
        compiled.run_delay_rule(reserve_above, dump_server)
        for _ in range(len(stream)):
            stepped.step(one(policy.route(stepped.request(), stepped.snapshots())))
        stepped.drain()
        assert compiled.outcome_table.tobytes() == stepped.outcome_table.tobytes()


@some_cases
@given(seed=seeds, num=st.integers(1, 9), slots=st.integers(1, 9))
def test_weights_of_given_up_servers_do_nothing_between_equal_ones_or_in_time(seed, num, slots):
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=generic.NUM_SERVER_WEIGHTS)
    without = weights.copy()
    without.reshape(-1, generic.NUM_SERVER_FEATURES)[:, generic.HOPELESS_FEATURES] = 0.0
    for equal, slo_s in ((True, 0.01), (False, 1e6)):
        columns = observation.snapshot_columns([a_replica(rng, i, False) for i in range(num)])
        if equal:
            columns[:, observation.TOKENS_PER_S] = rng.uniform(1000, 9000)
            columns[:, observation.NUM_SLOTS] = slots
        found = []
        for some in (weights, without):
            costs = np.empty(num)
            generic.server_scores(some, 1500.0, 2000.0, slo_s, columns, costs)
            found.append(costs)
        np.testing.assert_array_equal(*found)


@some_cases
@given(seed=seeds)
def test_modulators_of_slots_do_nothing_where_servers_take_one_request_at_a_time(seed):
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=generic.NUM_SERVER_WEIGHTS)
    without = weights.copy()
    without.reshape(-1, generic.NUM_SERVER_FEATURES)[generic.SLOT_MODULATORS] = 0.0
    columns = observation.snapshot_columns([a_replica(rng, i, False) for i in range(4)])
    for slots in (1.0, 3.0):
        columns[:, observation.NUM_SLOTS] = slots
        found = []
        for some in (weights, without):
            costs = np.empty(4)
            generic.server_scores(some, 1500.0, 2000.0, 2.0, columns, costs)
            found.append(costs)
        assert np.array_equal(*found) == (slots == 1.0)


def test_how_old_signals_are_counts_where_replicas_batch():
    rng = np.random.default_rng(2)
    policy, request = a_policy(rng), a_request(rng)
    some = [a_replica(rng, number, True) for number in range(4)]
    older = [replace(one, observed_at_s=one.observed_at_s - 10.0) for one in some]
    unborn = [replace(one, observed_at_s=one.observed_at_s + 10.0) for one in some]
    fresh = [replace(one, observed_at_s=request.arrival_s) for one in some]
    given = (some, older, unborn, fresh)
    scores = [policy.decide(request, one).scores.tolist() for one in given]
    assert scores[0] != scores[1]
    assert scores[2] == scores[3]


def test_where_only_some_replicas_batch_all_are_taken_for_servers():
    rng = np.random.default_rng(0)
    some = [a_replica(rng, number, batches=number == 0) for number in range(3)]
    assert 0 <= a_policy(rng).route(a_request(rng), some) < 3


def test_the_slo_it_is_given_counts():
    rng = np.random.default_rng(1)
    weights = np.zeros(generic.NUM_SERVER_WEIGHTS)
    weights[generic.VIOLATION_FEATURES] = 5.0
    artifact = any_cluster_artifact(weights, np.zeros(generic.NUM_ENGINE_WEIGHTS))
    request, some = a_request(rng), [a_replica(rng, number, False) for number in range(4)]
    strict, lax = (learned_policy(artifact, slo=Slo(slo_s)) for slo_s in (0.01, 1000.0))
    strict_scores, lax_scores = (one.decide(request, some).scores for one in (strict, lax))
    assert strict_scores.tolist() > lax_scores.tolist()
