"""Laws of the regional simulator; docs/invariants.md lists them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled
from unit.region_builders import a_scenario, a_stream, an_oracle

from tokenyard.regions.scenario import Failure
from tokenyard.regions.simulator import DISPATCH, RegionSim, kernel
from tokenyard.regions.types import LiveCost, RegionDecision

few = settings(max_examples=scaled(25))

failures = st.builds(
    Failure,
    kind=st.sampled_from(["region_down", "capacity_lost", "links_slow"]),
    start_slot=st.integers(0, 8),
    num_slots=st.integers(1, 6),
    region=st.integers(0, 3),
)


@st.composite
def episodes(draw):
    """A scenario with failures, its stream, and a generator of decisions."""
    scenario = a_scenario(
        num_slots=15,
        layout_seed=draw(st.integers(0, 5)),
        demand={"load": draw(st.sampled_from([0.3, 0.9, 1.4]))},
        micro={
            "buffer_size": draw(st.sampled_from([3, 500])),
            "patience_s": draw(st.sampled_from([60.0, 900.0])),
            "rule": draw(st.sampled_from(["score", "earliest"])),
        },
        failures=tuple(draw(st.lists(failures, max_size=2))),
    )
    seed = draw(st.integers(0, 2**31))
    return scenario, a_stream(scenario, seed), np.random.default_rng(seed)


def any_decision(rng, num_regions):
    shares = rng.dirichlet(np.full(num_regions, 0.5), num_regions)
    dispatch = rng.choice(list(DISPATCH))
    live = LiveCost(*rng.exponential([2.0, 1.0, 1.0, 1e4, 3.0]))
    return RegionDecision(shares, rng.integers(0, 12, num_regions), dispatch, live)


@few
@given(episodes())
def test_every_task_is_to_come_waiting_placed_or_dropped_at_any_time_whatever_fails(episode):
    scenario, stream, rng = episode
    sim = RegionSim(scenario, stream, an_oracle(scenario))
    w = sim.world
    while not sim.ended:
        sim.step(any_decision(rng, 4))
        status = np.bincount(w.labels[:, kernel.STATUS], minlength=4)
        assert status.sum() == len(stream.numbers)
        assert status[kernel.WAITING] == w.region[:, kernel.NUM_WAITING].sum()
        assert status[kernel.PLACED] == round(w.out[:, kernel.OUT_PLACED].sum())
        assert status[kernel.DROPPED] == round(w.out[:, kernel.OUT_DROPPED].sum())
        come = round(w.out[:, kernel.OUT_OFFERED].sum())
        assert come == stream.counts[: sim.slot].sum()
        assert status[kernel.TO_COME] == len(stream.numbers) - come
    sim.finish()
    status = w.labels[:, kernel.STATUS]
    assert set(status) <= {kernel.PLACED, kernel.DROPPED}
    sums = w.out.sum(axis=0)
    assert (status == kernel.PLACED).sum() == round(sums[kernel.OUT_PLACED])
    done = w.tasks[status == kernel.PLACED]
    response = done[:, kernel.FINISH_S] + done[:, kernel.BACK_S] - done[:, kernel.ARRIVAL_S]
    assert sums[kernel.OUT_RESPONSE_S] == pytest.approx(response.sum(), rel=1e-9, abs=1e-6)


@few
@given(episodes())
def test_no_server_serves_two_tasks_at_once_nor_faster_than_it_can(episode):
    scenario, stream, rng = episode
    scenario = scenario.model_copy(update={"failures": ()})
    stream = a_stream(scenario, 1)
    sim = RegionSim(scenario, stream, an_oracle(scenario))
    while not sim.ended:
        sim.step(any_decision(rng, 4))
    sim.finish()
    w = sim.world
    for server in range(len(w.servers)):
        mine = (w.labels[:, kernel.SERVER] == server) & (
            w.labels[:, kernel.STATUS] == kernel.PLACED
        )
        rows = w.tasks[mine][np.argsort(w.tasks[mine][:, kernel.BEGIN_S], kind="stable")]
        assert (rows[1:, kernel.BEGIN_S] >= rows[:-1, kernel.FINISH_S] - 1e-6).all()
        kind = w.servers[server, kernel.KIND]
        least = rows[:, kernel.WORK_S] * sim.cluster.service_factor[:, kind].min()
        assert (rows[:, kernel.FINISH_S] - rows[:, kernel.START_S] >= least - 1e-9).all()
        assert (rows[:, kernel.BEGIN_S] >= rows[:, kernel.ARRIVAL_S]).all()


@few
@given(episodes())
def test_nothing_measured_of_a_slot_leaves_its_bounds(episode):
    scenario, stream, rng = episode
    sim = RegionSim(scenario, stream, an_oracle(scenario))
    most_kwh = sum(
        kind.tdp_w * count
        for kind, count in (
            (scenario.kinds[name], count) for name, count in scenario.server_counts.items()
        )
    ) * scenario.prices.pue * scenario.slot_s / 3.6e6  # fmt: skip
    while not sim.ended:
        out = sim.step(any_decision(rng, 4))
        assert np.isfinite(out).all()
        assert 0 < out[kernel.OUT_BALANCE] <= 1 + 1e-12
        assert -1e-9 <= out[kernel.OUT_ENERGY_KWH] <= most_kwh * (1 + 1e-9)
        assert out[kernel.OUT_ACTIVE] <= scenario.num_servers


def test_equal_streams_and_decisions_give_equal_bytes_though_another_simulator_runs_between():
    scenario = a_scenario(num_slots=10)
    stream, oracle = a_stream(scenario), an_oracle(scenario)
    first, second = (RegionSim(scenario, stream, oracle) for _ in range(2))
    decisions = [any_decision(np.random.default_rng(i), 4) for i in range(10)]
    for decision in decisions:
        first.step(decision)
        second.step(decision)
    for mine, theirs in zip(first.world, second.world, strict=True):
        assert mine.tobytes() == theirs.tobytes()


def test_a_region_that_fails_loses_no_task_without_it_being_counted():
    scenario = a_scenario(
        num_slots=30,
        failures=(Failure(kind="region_down", start_slot=5, num_slots=10),),
    )
    stream = a_stream(scenario)
    sim = RegionSim(scenario, stream, an_oracle(scenario))
    while not sim.ended:
        sim.step(RegionDecision(np.full((4, 4), 0.25), np.full(4, 10)))
    sim.finish()
    total = sim.world.out.sum(axis=0)
    assert total[kernel.OUT_PLACED] + total[kernel.OUT_DROPPED] == len(stream.numbers)
    assert total[kernel.OUT_RESTARTED] > 0
    assert total[kernel.OUT_REROUTED] > 0
    assert total[kernel.OUT_LOST_S] > 0


def two_regions(**live):
    """A world of two regions, each with one free server of one kind that holds the model."""
    scenario = a_scenario(
        num_slots=3, topology="synthetic/gabriel/2/1", mean_latency_ms=10.0,
        server_counts={"A100": 4}, demand={"load": 0.3, "model_shares": (1.0,)},
    )  # fmt: skip
    w = RegionSim(scenario, a_stream(scenario), an_oracle(scenario)).world
    w.servers[:, kernel.STATE] = np.where(np.arange(4) % 2 == 0, kernel.ON, kernel.OFF)
    w.servers[:, kernel.HELD_MODEL] = 0
    w.weights[:] = LiveCost(**live).weights
    w.prices[:] = 0.2
    return w


def test_by_live_cost_a_task_goes_where_a_server_is_ready_soonest_unless_debts_weigh_more():
    local = np.eye(2)
    w = two_regions(debt_s=0.0)
    assert kernel.by_live_cost(w, 0, 0, local, 0.0) == 0
    w.times[0, kernel.FREE_S] = 5.0
    assert kernel.by_live_cost(w, 0, 0, local, 0.0) == 1
    w = two_regions(debt_s=10.0)
    w.times[0, kernel.FREE_S] = 5.0
    assert kernel.by_live_cost(w, 0, 0, local, 0.0) == 0


def test_live_cost_levels_use_and_prefers_cheap_energy_as_far_as_they_weigh():
    w = two_regions(debt_s=0.0, use=0.5)
    w.times[0, kernel.BUSY_S] = 20.0
    assert kernel.by_live_cost(w, 0, 0, np.eye(2), 0.0) == 1
    for usd_s, expected in ((0.0, 0), (2e4, 1)):
        w = two_regions(debt_s=0.0, usd_s=usd_s)
        w.prices[:, 0] = 0.4
        assert kernel.by_live_cost(w, 0, 0, np.eye(2), 0.0) == expected


def test_live_cost_sends_nothing_to_a_region_that_is_down():
    w = two_regions(debt_s=0.0)
    w.region[0, kernel.IS_DOWN] = 1
    assert kernel.by_live_cost(w, 0, 0, np.eye(2), 0.0) == 1


def test_half_a_regions_capacity_lost_moves_what_runs_there_at_a_cost():
    scenario = a_scenario(
        num_slots=20,
        demand={"load": 0.9},
        failures=(Failure(kind="capacity_lost", start_slot=5, num_slots=10),),
    )
    sim = RegionSim(scenario, a_stream(scenario), an_oracle(scenario))
    while not sim.ended:
        sim.step(RegionDecision(np.full((4, 4), 0.25), np.full(4, 10)))
    total = sim.world.out.sum(axis=0)
    assert total[kernel.OUT_MIGRATED] > 0
    assert total[kernel.OUT_MIGRATION_S] > 15 * total[kernel.OUT_MIGRATED]
    assert total[kernel.OUT_RESTARTED] == 0
