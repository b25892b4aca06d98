"""Sessions that nobody holds, against the simulator of requests on the same sessions.

There a stream is given as closed clients, one for each session, who begin when it arrives.
"""

import numpy as np
import pytest

from tokenyard.routing import observation as ob
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.sessions.rules import SessionRule
from tokenyard.routing.sessions.scenario import load_session_scenario
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_streams import encode_for_fleet
from tokenyard.routing.simulator.sessions import SessionReplicas, run_sessions
from tokenyard.routing.simulator.sessions_kernel import layout as turns
from tokenyard.workload.trace import SessionTurns, Trace

BLOCK = 256


def one_a100(scenario):
    fleet = scenario.required_fleet
    changed = {
        "replicas": fleet.replicas[:1],
        "queue_limit": 100_000,
        "scrape_interval_s": 0.0,
    }
    return scenario.model_copy(update={"fleet": fleet.model_copy(update=changed)})


def as_requests(stream):
    context, answer = stream.context.astype(np.int64), stream.answer.astype(np.int64)
    num = len(context)
    turn = np.arange(num) - stream.first_turn[stream.session]
    following = np.arange(num) + 1
    following[stream.first_turn + stream.num_turns - 1] = -1
    arrival_s = stream.arrival_s[stream.session] + turn * 1e-3
    longest = int((context + answer).max()) // BLOCK + 1
    hashes = tuple(
        tuple(int(s) * longest + k + 1 for k in range(int(c + a) // BLOCK))
        for s, c, a in zip(stream.session, context, answer, strict=True)
    )
    sessions = SessionTurns(stream.session, turn, following, stream.tool_s, len(stream))
    return Trace(
        arrival_s, context, answer, prefix_hashes=hashes, prefix_block_tokens=BLOCK,
        sessions=sessions,
    )  # fmt: skip


@pytest.mark.parametrize(("rate", "seed"), [(30, 1), (30, 2), (42, 1), (42, 2)])
def test_sessions_agree_with_requests_where_nobody_is_held(rate, seed):
    scenario = load_session_scenario(f"agentic_sessions_equal@{rate}")
    all_four = scenario.replicas
    one = SessionReplicas(*(values[:1] for values in vars(all_four).values()))
    few = scenario.model_copy(update={"sessions_per_a100": 40})
    stream = few.draw(np.random.default_rng(seed))
    # What arrives at four A100 comes a quarter as often to one.
    stream = type(stream)(stream.arrival_s * few.a100s, *list(vars(stream).values())[1:])
    run = run_sessions(one, stream, SessionRule(knows_ends=0.0))

    routing = one_a100(load_scenario(scenario.traffic))
    trace = as_requests(stream)
    num = len(trace.context_tokens)
    features = np.zeros((num, ob.NUM_REQUEST_FEATURES))
    encoded = encode_for_fleet(
        routing.required_fleet, trace, stream.answer, features, 120.0, np.random.default_rng(0)
    )
    sim = BatchingSim(routing, 1, num)
    sim.load(0, encoded)
    while sim.view().current() >= 0:
        sim.step(np.zeros(1, dtype=np.int64))
    sim.drain()
    requests, outcomes = sim.arrays.requests[0], sim.arrays.outcomes[0]
    e2e_s = (outcomes[:, lay.FINISH_S] - requests[:, lay.ARRIVAL_S]).mean()
    hit, computed = outcomes[:, [lay.HIT_TOKENS, lay.PREFILLED_TOKENS]].sum(axis=0)
    turn_e2e_s = run.outcomes[:, turns.OUT_FINISH_S] - run.outcomes[:, turns.OUT_READY_S]
    assert turn_e2e_s.mean() == pytest.approx(e2e_s, rel=0.035)
    assert run.hit_fraction == pytest.approx(hit / (hit + computed), abs=0.01)
