"""Laws of the regional simulator; docs/invariants.md lists them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled
from unit.region_builders import a_scenario, a_stream, an_oracle

from tokenyard.regions import telemetry
from tokenyard.regions.policies.dispatch import DISPATCH, by_live_cost
from tokenyard.regions.scenario import RegionFailure
from tokenyard.regions.simulator import RegionSim, world
from tokenyard.regions.simulator.reports import declare, report
from tokenyard.regions.simulator.servers import place
from tokenyard.regions.types import LiveCost, RegionDecision

few = settings(max_examples=scaled(25))

failures = st.builds(
    RegionFailure,
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
    w = sim.arrays
    while not sim.ended:
        sim.step(any_decision(rng, 4))
        status = np.bincount(w.labels[:, world.STATUS], minlength=4)
        assert status.sum() == len(stream.numbers)
        assert status[world.WAITING] == w.region[:, world.NUM_WAITING].sum()
        assert status[world.PLACED] == round(w.out[:, world.OUT_PLACED].sum())
        assert status[world.DROPPED] == round(w.out[:, world.OUT_DROPPED].sum())
        come = round(w.out[:, world.OUT_OFFERED].sum())
        assert come == stream.counts[: sim.slot].sum()
        assert status[world.TO_COME] == len(stream.numbers) - come
    sim.finish()
    status = w.labels[:, world.STATUS]
    assert set(status) <= {world.PLACED, world.DROPPED}
    sums = w.out.sum(axis=0)
    assert (status == world.PLACED).sum() == round(sums[world.OUT_PLACED])
    done = w.tasks[status == world.PLACED]
    response = done[:, world.FINISH_S] + done[:, world.BACK_S] - done[:, world.ARRIVAL_S]
    assert sums[world.OUT_RESPONSE_S] == pytest.approx(response.sum(), rel=1e-9, abs=1e-6)


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
    w = sim.arrays
    for server in range(len(w.servers)):
        mine = (w.labels[:, world.SERVER] == server) & (w.labels[:, world.STATUS] == world.PLACED)
        rows = w.tasks[mine][np.argsort(w.tasks[mine][:, world.BEGIN_S], kind="stable")]
        assert (rows[1:, world.BEGIN_S] >= rows[:-1, world.FINISH_S] - 1e-6).all()
        kind = w.seen.servers[server, telemetry.KIND]
        least = rows[:, world.WORK_S] * sim.cluster.service_factor[:, kind].min()
        assert (rows[:, world.FINISH_S] - rows[:, world.START_S] >= least - 1e-9).all()
        assert (rows[:, world.BEGIN_S] >= rows[:, world.ARRIVAL_S]).all()


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
        assert 0 < out[world.OUT_BALANCE] <= 1 + 1e-12
        assert -1e-9 <= out[world.OUT_ENERGY_KWH] <= most_kwh * (1 + 1e-9)
        assert out[world.OUT_ACTIVE] <= scenario.num_servers


def test_equal_streams_and_decisions_give_equal_bytes_though_another_simulator_runs_between():
    scenario = a_scenario(num_slots=10)
    stream, oracle = a_stream(scenario), an_oracle(scenario)
    first, second = (RegionSim(scenario, stream, oracle) for _ in range(2))
    decisions = [any_decision(np.random.default_rng(i), 4) for i in range(10)]
    for decision in decisions:
        first.step(decision)
        second.step(decision)
    for mine, theirs in zip(all_arrays(first), all_arrays(second), strict=True):
        assert mine.tobytes() == theirs.tobytes()


def all_arrays(sim):
    return [*sim.arrays.seen, *sim.arrays[1:]]


def test_a_region_that_fails_loses_no_task_without_it_being_counted():
    scenario = a_scenario(
        num_slots=30,
        failures=(RegionFailure(kind="region_down", start_slot=5, num_slots=10),),
    )
    stream = a_stream(scenario)
    sim = RegionSim(scenario, stream, an_oracle(scenario))
    while not sim.ended:
        sim.step(RegionDecision(np.full((4, 4), 0.25), np.full(4, 10)))
    sim.finish()
    total = sim.arrays.out.sum(axis=0)
    assert total[world.OUT_PLACED] + total[world.OUT_DROPPED] == len(stream.numbers)
    assert total[world.OUT_RESTARTED] > 0
    assert total[world.OUT_REROUTED] > 0
    assert total[world.OUT_LOST_S] > 0


def two_regions(busy=False, **live):
    """A world of two regions, each with one server of one kind on, which holds the model.

    Where `busy`, that of the first serves a task. Everything has been reported; task 0 has come to
    the first region.
    """
    scenario = a_scenario(
        num_slots=3, topology="synthetic/gabriel/2/1", mean_latency_ms=10.0,
        server_counts={"A100": 4}, demand={"load": 0.3, "model_shares": (1.0,)},
    )  # fmt: skip
    w = RegionSim(scenario, a_stream(scenario), an_oracle(scenario)).arrays
    on = np.arange(4) % 2 == 0
    w.seen.servers[:, telemetry.STATE] = np.where(on, telemetry.ON, telemetry.OFF)
    w.seen.servers[:, telemetry.HELD_MODEL] = 0
    w.seen.weights[:] = LiveCost(**live).weights
    w.seen.prices[:] = 0.2
    w.labels[:2, world.ORIGIN] = 0
    for task in (0, 1):
        declare(w, task)
    if busy:
        w.labels[1, world.TARGET] = 0
        place(w, 1, 0, 0.0)
    report(w, 0, 0.0)
    return w


def chosen(w):
    return by_live_cost(w.seen, 0, np.eye(2), 1.0)


def test_by_live_cost_a_task_goes_where_a_server_is_free_unless_debts_weigh_more():
    assert chosen(two_regions(debt_s=0.0)) == 0
    assert chosen(two_regions(busy=True, debt_s=0.0)) == 1
    assert chosen(two_regions(busy=True, debt_s=100.0)) == 0


def test_live_cost_prefers_cheap_energy_as_far_as_it_weighs():
    for usd_s, expected in ((0.0, 0), (2e4, 1)):
        w = two_regions(debt_s=0.0, usd_s=usd_s)
        w.seen.prices[:, 0] = 0.4
        assert chosen(w) == expected


def test_live_cost_sends_nothing_to_a_region_that_reports_to_be_down():
    w = two_regions(debt_s=0.0)
    w.region[0, world.IS_DOWN] = 1
    report(w, 1, 0.5)
    assert chosen(w) == 1


def test_what_was_sent_since_a_report_is_not_free_any_more():
    w = two_regions(busy=True, debt_s=0.0)
    w.seen.sent[0, 1] = 1.0
    w.seen.near[0] = [0, 1]
    assert chosen(w) == 0


def test_half_a_regions_capacity_lost_moves_what_runs_there_at_a_cost():
    scenario = a_scenario(
        num_slots=20,
        demand={"load": 0.9},
        failures=(RegionFailure(kind="capacity_lost", start_slot=5, num_slots=10),),
    )
    sim = RegionSim(scenario, a_stream(scenario), an_oracle(scenario))
    while not sim.ended:
        sim.step(RegionDecision(np.full((4, 4), 0.25), np.full(4, 10)))
    total = sim.arrays.out.sum(axis=0)
    assert total[world.OUT_MIGRATED] > 0
    assert total[world.OUT_MIGRATION_S] > 15 * total[world.OUT_MIGRATED]
    assert total[world.OUT_RESTARTED] == 0
