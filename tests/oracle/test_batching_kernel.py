"""The batching kernel against the slow engine, on random work; and the laws of looking ahead."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.engine_instances import engines, jobs
from oracle.slow_engine import Change, Engine, Job, simulate, simulate_cluster

from tokenyard.fleet import Fleet, ReplicaConfig, TrafficClass
from tokenyard.scenario import Arrivals, RewardWeights, Scenario
from tokenyard.sim import batching
from tokenyard.sim.batching_streams import BatchingStream
from tokenyard.sim.engines import BatchingSim

LOOK_AHEAD = RewardWeights(
    processing=0, queue=0, overload=0, balance=0, accept=0, drop=0, response=-1
)
STATUS = {"fail": batching.DOWN, "drain": batching.DRAINING, "join": batching.UP}


def run_kernel(
    given_engines: list[Engine],
    some: list[Job],
    routes: list[int],
    changes: tuple[Change, ...] = (),
    max_retries: int = 0,
    retry_delay_s: float = 0.0,
) -> tuple[BatchingSim, float]:
    """Run jobs through the kernel; returns the simulator and the sum of all rewards."""
    first = given_engines[0]
    replica = {"gpu": "h100_sxm", "model": "llama3_8b", "max_batch": first.max_batch}
    fleet = Fleet(
        replicas=tuple(
            ReplicaConfig(name=f"r{i}", token_budget=first.token_budget, **replica)
            for i in range(len(given_engines))
        ),
        page_tokens=first.page_tokens,
        prefix_block_tokens=first.block_tokens,
        queue_limit=max(first.queue_limit, 1),
        classes=(TrafficClass(name="a"), TrafficClass(name="b", priority=4)),
        max_retries=max_retries,
        retry_delay_s=retry_delay_s,
    )
    scenario = Scenario(
        name="oracle", description="", fleet=fleet, arrivals=Arrivals(rate_per_s=1.0),
        reward=LOOK_AHEAD,
    )  # fmt: skip
    sim = BatchingSim(scenario, 1, len(some))
    for row, engine in zip(sim.arrays.plant[0], given_engines, strict=True):
        row[: batching.KV_TOKEN_S + 1] = engine.a, engine.b, engine.c, engine.d
        row[batching.NUM_PAGES] = engine.num_pages
        row[batching.WARM_UP_FACTOR] = engine.warm_up_factor
    sim.load(0, stream_of(some, changes))
    for replica_state, engine in zip(sim.arrays.state[0], given_engines, strict=True):
        replica_state[batching.WARM_UNTIL_S] = engine.warm_until_s
    total = 0.0
    while sim.current() >= 0:
        total += float(sim.step(np.array([routes[sim.current()]]))[0])
    return sim, total + float(sim.drain()[0])


def stream_of(some: list[Job], changes: tuple[Change, ...] = ()) -> BatchingStream:
    numbers = {block: 1 + i for i, block in enumerate({b for job in some for b in job.chain})}
    rows = np.zeros((len(some), batching.NUM_REQUEST))
    chains: list[int] = []
    for row, job in zip(rows, some, strict=True):
        row[[batching.DISPATCH_S, batching.ARRIVAL_S]] = job.submit_s
        row[batching.CONTEXT], row[batching.OUTPUT] = job.context, job.output
        row[batching.PREDICTED_OUTPUT] = 3.0
        row[batching.PRIORITY], row[batching.GIVE_UP_S] = job.priority, job.give_up_s
        row[batching.CHAIN_AT], row[batching.CHAIN_LENGTH] = len(chains), len(job.chain)
        row[batching.SLO_RESPONSE_S : batching.SLO_TPOT_S + 1] = 1e9
        chains += [numbers[block] for block in job.chain]
    events = [(c.at_s, c.replica, STATUS[c.kind]) for c in changes]
    return BatchingStream(
        rows,
        np.array(chains, dtype=np.int64),
        np.array(events, dtype=np.float64).reshape(-1, batching.NUM_EVENT),
    )


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or abs(a - b) < 1e-6


@settings(max_examples=300)
@given(engine=engines(), some=jobs())
def test_every_completion_agrees_with_the_slow_engine(engine, some):
    engine = dataclasses.replace(engine, queue_limit=max(engine.queue_limit, 1))
    fates, totals = simulate(engine, some)
    sim, _ = run_kernel([engine], some, [0] * len(some))
    outcomes = sim.arrays.outcomes[0]
    for fate, found in zip(fates, outcomes, strict=True):
        assert fate.refused == (found[batching.SERVER] < 0)
        assert same(fate.first_token_s, found[batching.FIRST_TOKEN_S])
        assert same(fate.finish_s, found[batching.FINISH_S])
        assert fate.preemptions == found[batching.PREEMPTIONS]
        assert fate.hit_tokens == found[batching.HIT_TOKENS]
    state = sim.arrays.state[0, 0]
    assert state[batching.ITERATIONS] == totals.iterations
    assert state[batching.BUSY_S] == pytest.approx(totals.busy_s, abs=1e-6)
    # What is free or evictable at the end is everything, and nobody's books are open.
    assert state[batching.FREE] + state[batching.EVICTABLE] == engine.num_pages
    books = sim.arrays.routers[0, 0, 0]
    assert books[[batching.OWN_COUNT, batching.OWN_PREFILL, batching.OWN_OUTPUT]] == (
        pytest.approx(np.zeros(3), abs=1e-6)
    )


@settings(max_examples=150)
@given(engine=engines(), some=jobs(patient=True))
def test_what_placements_add_by_looking_ahead_sums_up_to_all_response_times(engine, some):
    engine = dataclasses.replace(engine, queue_limit=100, block_tokens=0)
    sim, rewards = run_kernel([engine], some, [0] * len(some))
    assert -rewards == pytest.approx(np.nansum(sim.outcomes().response_s), rel=1e-9, abs=1e-6)


@settings(max_examples=100)
@given(
    engine=engines(),
    some=jobs(),
    routes=st.lists(st.integers(0, 1), min_size=12, max_size=12),
    fails_s=st.floats(0.0, 20.0),
    down_s=st.floats(0.1, 20.0),
    drains=st.booleans(),
)
def test_failing_draining_and_joining_agree_with_the_slow_cluster(
    engine, some, routes, fails_s, down_s, drains
):
    engine = dataclasses.replace(
        engine, queue_limit=max(engine.queue_limit, 1), warm_until_s=0.0, warm_up_factor=1.0
    )
    # Every attempt goes to the same replica; retries at odd times, so that none ties.
    some = [dataclasses.replace(job, give_up_s=math.inf) for job in some]
    changes = [Change(fails_s, 0, "fail"), Change(fails_s + down_s, 0, "join")]
    if drains:
        changes.insert(0, Change(fails_s / 2, 0, "drain"))
    routes = routes[: len(some)]
    attempts = [(route,) * 3 for route in routes]
    fates, _ = simulate_cluster([engine, engine], some, attempts, 0.777, changes)
    sim, _ = run_kernel([engine, engine], some, routes, tuple(changes), 2, 0.777)
    for fate, found in zip(fates, sim.arrays.outcomes[0], strict=True):
        assert fate.refused == (found[batching.SERVER] < 0)
        assert same(fate.finish_s, found[batching.FINISH_S])
        assert fate.preemptions == found[batching.PREEMPTIONS]
