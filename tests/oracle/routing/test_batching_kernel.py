"""The batching kernel against the slow engine, on random work; and the laws of looking ahead."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.engine_instances import engines, jobs
from oracle.fleet_instances import NO_REWARD, Ask, a_fleet, a_sim, a_stream, step
from oracle.slow_engine import Change, Engine, Job, simulate, simulate_cluster
from sizes import scaled

from tokenyard.routing.fleet import TrafficClass
from tokenyard.routing.scenario import RewardWeights
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_kernel import layout as lay

ITERATION_J = 2.0
LOOK_AHEAD = NO_REWARD.model_copy(update={"response": -1.0, "tail": -4.0, "tail_after_s": 1.0})
CLASSES = (TrafficClass(name="a"), TrafficClass(name="b", priority=4))
ENERGY = NO_REWARD.model_copy(update={"energy": -1.0})


def run_kernel(
    given_engines: list[Engine],
    some: list[Job],
    routes: list[int],
    changes: tuple[Change, ...] = (),
    reward: RewardWeights = NO_REWARD,
    max_retries: int = 0,
    retry_delay_s: float = 0.0,
    max_overtaking_s: float = 4.0,
) -> tuple[BatchingSim, float]:
    """Run jobs through the kernel; returns the simulator and the sum of all rewards.

    Every attempt of a request goes to its replica in `routes`.
    """
    scenario = a_fleet(
        given_engines, reward, classes=CLASSES, max_retries=max_retries,
        retry_delay_s=retry_delay_s,
    )  # fmt: skip
    scenario = scenario.model_copy(update={"max_overtaking_s": max_overtaking_s})
    sim = a_sim(scenario, given_engines, len(some), iteration_j=ITERATION_J)
    sim.load(0, a_stream([Ask(**vars(job)) for job in some], changes))
    for state, engine in zip(sim.arrays.state[0], given_engines, strict=True):
        state[lay.WARM_UNTIL_S] = engine.warm_until_s
    total = 0.0
    while sim.view().current() >= 0:
        total += step(sim, some[sim.view().current()], routes[sim.view().current()])
    return sim, total + float(sim.drain()[0])


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or abs(a - b) < 1e-6


@settings(max_examples=scaled(300))
@given(engine=engines(), some=jobs(ordered=True), max_overtaking_s=st.sampled_from([0.0, 4.0]))
def test_every_completion_agrees_with_the_slow_engine(engine, some, max_overtaking_s):
    check_completions(engine, some, max_overtaking_s)


@settings(max_examples=scaled(300))
@given(
    engine=engines(),
    some=jobs(ordered=True, late=True),
    max_overtaking_s=st.sampled_from([0.0, 1000.0]),
)
def test_those_who_are_late_go_back_as_in_the_slow_engine(engine, some, max_overtaking_s):
    check_completions(engine, some, max_overtaking_s)


def check_completions(engine, some, max_overtaking_s):
    engine = dataclasses.replace(engine, queue_limit=max(engine.queue_limit, 1))
    fates, totals = simulate(engine, some, max_overtaking_s)
    sim, _ = run_kernel([engine], some, [0] * len(some), max_overtaking_s=max_overtaking_s)
    outcomes = sim.arrays.outcomes[0]
    for fate, found in zip(fates, outcomes, strict=True):
        assert fate.refused == (found[lay.SERVER] < 0)
        assert same(fate.first_token_s, found[lay.FIRST_TOKEN_S])
        assert same(fate.finish_s, found[lay.FINISH_S])
        assert fate.preemptions == found[lay.PREEMPTIONS]
        assert fate.hit_tokens == found[lay.HIT_TOKENS]
    state = sim.arrays.state[0, 0]
    assert state[lay.ITERATIONS] == totals.iterations
    assert state[lay.BUSY_S] == pytest.approx(totals.busy_s, abs=1e-6)
    # What is free or evictable at the end is everything, and nothing is in flight.
    assert state[lay.FREE] + state[lay.EVICTABLE] == engine.num_pages
    in_flight = sim.arrays.routers[0, 0, 0]
    assert in_flight[[lay.OWN_COUNT, lay.OWN_PREFILL, lay.OWN_OUTPUT]] == (
        pytest.approx(np.zeros(3), abs=1e-6)
    )


@settings(max_examples=scaled(150))
@given(engine=engines(), some=jobs(patient=True, ordered=True))
def test_what_placements_add_by_looking_ahead_sums_up_to_all_responses_and_tails(engine, some):
    engine = dataclasses.replace(engine, queue_limit=100, block_tokens=0)
    sim, rewards = run_kernel([engine], some, [0] * len(some), reward=LOOK_AHEAD)
    response_s = sim.view().outcomes().response_s
    owed = np.nansum(response_s + 4.0 * np.maximum(response_s - 1.0, 0.0))
    assert -rewards == pytest.approx(owed, rel=1e-9, abs=1e-6)


@settings(max_examples=scaled(100))
@given(engine=engines(), some=jobs(patient=True, ordered=True))
def test_what_placements_add_to_the_energy_sums_up_to_all_of_it(engine, some):
    engine = dataclasses.replace(engine, queue_limit=100, block_tokens=0)
    sim, rewards = run_kernel([engine], some, [0] * len(some), reward=ENERGY)
    state = sim.arrays.state[0, 0]
    assert state[lay.BUSY_J] == pytest.approx(ITERATION_J * state[lay.ITERATIONS])
    assert -rewards == pytest.approx(state[lay.BUSY_J])


@settings(max_examples=scaled(100))
@given(
    engine=engines(),
    some=jobs(ordered=True),
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
    some = [dataclasses.replace(job, abandon_s=math.inf) for job in some]
    changes = [Change(fails_s, 0, "fail"), Change(fails_s + down_s, 0, "join")]
    if drains:
        changes.insert(0, Change(fails_s / 2, 0, "drain"))
    routes = routes[: len(some)]
    attempts = [(route,) * 3 for route in routes]
    fates, _ = simulate_cluster([engine, engine], some, attempts, 0.777, changes, 4.0)
    sim, _ = run_kernel(
        [engine, engine], some, routes, tuple(changes), max_retries=2, retry_delay_s=0.777
    )
    for fate, found in zip(fates, sim.arrays.outcomes[0], strict=True):
        assert fate.refused == (found[lay.SERVER] < 0)
        assert same(fate.finish_s, found[lay.FINISH_S])
        assert fate.preemptions == found[lay.PREEMPTIONS]


@settings(max_examples=scaled(60))
@given(
    engine=engines(),
    some=jobs(patient=True, max_size=8),
    seed=st.integers(0, 2**32 - 1),
    others_weight=st.sampled_from([0.0, 1.0, 2.0]),
)
def test_looking_ahead_takes_the_replica_where_the_slow_engine_finds_least_delay(
    engine, some, seed, others_weight
):
    engine = dataclasses.replace(engine, queue_limit=100, block_tokens=0, warm_until_s=0.0)
    slower = dataclasses.replace(engine, a=1.5 * engine.a, d=2.0 * engine.d)
    both = [engine, slower]
    sim = a_sim(a_fleet(both, classes=CLASSES, max_retries=0), both, len(some))
    sim.load(0, a_stream([Ask(**vars(job)) for job in some]))
    rng = np.random.default_rng(seed)
    placed: list[list[Job]] = [[], []]

    def finishes(which: int, held: list[Job]) -> np.ndarray:
        return np.array([fate.finish_s for fate in simulate(both[which], held)[0]])

    while sim.view().current() >= 0:
        job = some[sim.view().current()]
        costs = []
        for which, held in enumerate(placed):
            after = finishes(which, [*held, job])
            delay = after[:-1].sum() - finishes(which, held).sum()
            costs.append(after[-1] + others_weight * delay)
        costs = [math.inf if math.isnan(cost) else cost for cost in costs]
        chosen = sim.view().best_ahead(others_weight)
        # Infinite where none takes it.
        assert costs[chosen] == min(costs) or costs[chosen] < min(costs) + 1e-6
        # Wherever it goes, the next must be looked at from there.
        which = int(rng.integers(2))
        if math.isfinite(costs[which]):
            placed[which].append(job)
        sim.step(np.array([which]))
