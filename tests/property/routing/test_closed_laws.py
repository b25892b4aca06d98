"""Laws of closed clients and of iterations that do not all take equally long."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.fleet_instances import SECOND, Ask, a_fleet, a_sim, a_stream, play

from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.streams import StreamSource, synthetic_streams


def played(scenario: Scenario, num: int, seed: int, sends: int) -> BatchingSim:
    """Run one stream with requests sent at random."""
    sim = BatchingSim(scenario, 1, num)
    sim.load(0, StreamSource(scenario).sample(num, np.random.default_rng(seed)))
    rng = np.random.default_rng(sends)
    while sim.view().current() >= 0:
        sim.step(rng.integers(scenario.num_servers, size=1))
    sim.drain()
    return sim


@given(
    workload=st.sampled_from(["code_generation", "batch_synthetic_data", "agentic_trace_replay"]),
    seed=st.integers(0, 1000),
    sends=st.integers(0, 1000),
)
def test_a_session_has_one_request_in_flight_and_clients_bound_the_load(workload, seed, sends):
    scenario = load_scenario(f"{workload}@mixed")
    sim = played(scenario, 300, seed, sends)
    requests, turns = sim.arrays.requests[0], sim.arrays.turns[0]
    begin_s, end_s = requests[:, lay.ARRIVAL_S], sim.arrays.outcomes[0, :, lay.FINISH_S]
    assert not np.isnan(end_s).any()
    following = turns[:, lay.NEXT_TURN].astype(int)
    has_next = following >= 0
    waits_s = turns[has_next, lay.THINK_S]
    np.testing.assert_allclose(begin_s[following[has_next]] - end_s[has_next], waits_s, atol=1e-6)
    times = np.concatenate([begin_s, end_s])
    changes = np.repeat([1, -1], len(begin_s))
    in_flight = np.cumsum(changes[np.lexsort((changes, times))])
    assert in_flight.max() <= int(sim.arrays.pending[0, lay.PENDING_CLIENTS])


def test_requests_are_told_their_session_and_turn():
    scenario = load_scenario("code_generation@equal")
    sim = BatchingSim(scenario, 1, 200)
    sim.load(0, StreamSource(scenario).sample(200, np.random.default_rng(5)))
    last: dict[str, int] = {}
    while sim.view().current() >= 0:
        request = sim.view().request()
        assert request.turn == last.get(request.session_id, request.turn - 1) + 1
        last[request.session_id] = request.turn
        sim.step(np.zeros(1, dtype=np.int64))
    assert len(last) > 10


def test_a_copy_that_is_cleared_plays_the_same_again():
    scenario = load_scenario("batch_summarization_rag@mixed")
    sim = BatchingSim(scenario, 1, 200)
    sim.load(0, StreamSource(scenario).sample(200, np.random.default_rng(6)))
    weights = np.zeros(sim.num_weights)
    found = []
    for _ in range(2):
        sim.run_linear(weights, 1000.0)
        found.append(sim.view().outcomes().response_s)
    np.testing.assert_array_equal(*found)


def test_jitter_draws_factors_of_mean_one_and_leaves_all_else():
    steady = load_scenario("conversation_measured_gpus")
    jitter = load_scenario("conversation_drift@jitter").fleet.iteration_jitter
    fleet = steady.fleet.model_copy(update={"iteration_jitter": jitter})
    with_jitter = StreamSource(steady.model_copy(update={"fleet": fleet}))
    stream = with_jitter.sample(100, np.random.default_rng(1))
    plain = StreamSource(steady).sample(100, np.random.default_rng(1))
    np.testing.assert_array_equal(stream.requests, plain.requests)
    assert plain.factors.size == 0
    assert stream.factors.mean() == pytest.approx(1.0, abs=0.01)
    assert stream.factors.std() == pytest.approx(jitter, rel=0.03)


def test_every_iteration_takes_its_own_factor_in_the_look_ahead_too():
    """Iterations of a second: a request of n tokens takes the sum of the first n factors."""
    factors = np.array([[0.5, 2.0, 1.5, 0.25, 3.0]])
    reward = {"processing": 0, "queue": 0, "overload": 0, "balance": 0, "accept": 0, "response": -1}
    scenario = a_fleet([SECOND])
    scenario = Scenario.model_validate(scenario.model_dump() | {"reward": reward})
    sim = a_sim(scenario, [SECOND], 1)
    stream = a_stream([Ask(0.0, 1, 7)])
    sim.load(0, type(stream)(stream.requests, stream.chains, stream.events, factors=factors))
    earned = sim.step(np.zeros(1, dtype=np.int64))[0]
    sim.drain()
    expected = factors.sum() + factors[0, :2].sum()
    assert sim.view().outcomes().response_s[0] == pytest.approx(expected)
    assert earned == pytest.approx(-expected)


def test_factors_of_one_change_nothing():
    asks = [Ask(0.7 * i, 3 + i % 5, 2 + i % 7) for i in range(30)]
    found = []
    for factors in (np.zeros((1, 0)), np.ones((1, 3))):
        sim = a_sim(a_fleet([SECOND]), [SECOND], len(asks))
        stream = a_stream(asks)
        sim.load(0, type(stream)(stream.requests, stream.chains, stream.events, factors=factors))
        play(sim, [[0]] * len(asks))
        found.append(sim.view().outcomes().response_s)
    np.testing.assert_allclose(*found)


@pytest.mark.parametrize("bound", ["ahead_own", "ahead_marginal"])
def test_bounds_that_look_at_replicas_play_closed_streams_however_short(bound):
    scenario = load_scenario("code_generation@equal").model_copy(update={"requests_per_stream": 20})
    streams = synthetic_streams(StreamSource(scenario), 1, 3)
    assert streams.requests[0].num_clients == 20
    (run,) = PROBLEM.candidate(scenario, bound).run(scenario, streams, 1)
    assert not np.isnan(run.outcomes.response_s).any()
    assert (np.diff(run.outcomes.arrival_s) >= 0).all()
