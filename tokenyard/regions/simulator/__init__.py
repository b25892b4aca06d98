"""Episodes of the regional simulator: any policy by its public method."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass

import numpy as np

from tokenyard.regions.activation import ActivationRule, targets_for
from tokenyard.regions.demand import RegionStream
from tokenyard.regions.forecast import DemandForecaster
from tokenyard.regions.scenario import TASK_TYPES, Failure, RegionScenario
from tokenyard.regions.servers import Cluster, likeness, make_cluster
from tokenyard.regions.simulator import kernel
from tokenyard.regions.simulator.kernel import RegionArrays
from tokenyard.regions.types import (
    Dispatch,
    RegionDecision,
    RegionPolicy,
    RegionState,
    check_decision,
)
from tokenyard.types import FloatArray, IntArray

DISPATCH: dict[Dispatch, int] = {
    "shares": kernel.BY_SHARES,
    "live_shares": kernel.LIVE_SHARES,
    "spill": kernel.SPILL,
    "least_loaded": kernel.LEAST_LOADED,
    "balance": kernel.BALANCE,
    "live_cost": kernel.LIVE_COST,
}
HISTORY_SLOTS = 8
"""Slots of past arrivals that a state holds."""
_NEEDED_SPEED = {"compute": 1.3, "memory": 0.7, "lightweight": 0.35}
"""`GPU compute / task compute` of Eq 8 is speed over this."""


@dataclass(frozen=True, eq=False)
class RegionOutcomes:
    """What one episode measured."""

    outs: FloatArray
    """Shape (slots, NUM_OUT) of `tokenyard.regions.simulator.kernel`."""
    tasks: FloatArray
    """Shape (tasks, NUM_TASK_FLOATS)."""
    labels: IntArray
    """Shape (tasks, NUM_TASK_INTS)."""
    shares: FloatArray
    """Shares in force, shape (slots, regions, regions)."""
    decision_s: FloatArray
    """Wall time of each decision, shape (slots,)."""

    def total(self, column: int) -> float:
        """Sum of a column over all slots."""
        return float(self.outs[:, column].sum())

    @property
    def response_s(self) -> FloatArray:
        """Response time of every task that was served, return path included."""
        done = self.labels[:, kernel.STATUS] == kernel.PLACED
        rows = self.tasks[done]
        return np.asarray(
            rows[:, kernel.FINISH_S] + rows[:, kernel.BACK_S] - rows[:, kernel.ARRIVAL_S]
        )


class RegionSim:
    """One copy: a stream's world, stepped slot by slot."""

    def __init__(
        self, scenario: RegionScenario, stream: RegionStream, forecaster: DemandForecaster
    ) -> None:
        """Start with the servers on that the first forecast asks for, if all stay local."""
        self.scenario, self.stream = scenario, stream
        self.cluster = make_cluster(scenario)
        self.forecasts = forecaster.forecast_all(stream)
        self.num_failures = 0
        self._plain_latency = self.cluster.latency_s
        self._server_tasks, self._server_kwh = _server_tables(scenario, self.cluster)
        self._slots_of = _padded_index(self.cluster)
        self.world = _make_world(scenario, self.cluster, stream)
        num = self.cluster.num_regions
        self.shares = np.eye(num)
        state = self.state()
        self._start(targets_for(state, state.forecast[0], ActivationRule.from_scenario(scenario)))

    @property
    def slot(self) -> int:
        """The slot that comes next."""
        return int(self.world.clock[kernel.SLOT])

    @property
    def ended(self) -> bool:
        """Whether all slots are over."""
        return self.slot >= self.stream.num_slots

    def _start(self, active: IntArray) -> None:
        w = self.world
        for region, count in enumerate(active.tolist()):
            lo = int(w.first[region])
            w.servers[lo : lo + count, kernel.STATE] = kernel.ON
            # Models in proportion to what is asked for.
            shares = np.cumsum(self.scenario.demand.model_shares)
            spots = (np.arange(count) + 0.5) / max(count, 1)
            held = np.minimum(np.searchsorted(shares, spots), len(shares) - 1)
            # Kinds follow each other in the order of servers: models are dealt out across them.
            w.servers[lo : lo + count, kernel.HELD_MODEL] = held[_dealt(count)]

    def state(self) -> RegionState:
        """What a policy may know now."""
        w, slot = self.world, self.slot
        down = w.servers[:, kernel.STATE] == kernel.DOWN
        tasks = np.where(self._slots_of >= 0, self._server_tasks, 0.0)
        if down.any():
            tasks = np.where(down[self._slots_of], 0.0, tasks)
        running = (w.servers[:, kernel.STATE] == kernel.ON) | (
            w.servers[:, kernel.STATE] == kernel.WARMING
        )
        past: FloatArray = self.stream.counts[max(0, slot - HISTORY_SLOTS) : slot].astype(float)
        if not len(past):
            past = self.forecasts[0, :1]
        return RegionState(
            slot_s=self.scenario.slot_s,
            latency_s=w.latency,
            arrivals=past,
            forecast=self.forecasts[slot],
            waiting=w.region[:, kernel.NUM_WAITING].astype(np.float64),
            used=w.used[max(slot - 1, 0)],
            num_active=np.add.reduceat(running, w.first[:-1], dtype=np.int64),
            usd_per_kwh=w.prices[slot],
            previous=self.shares,
            server_tasks=tasks,
            server_kwh=self._server_kwh,
        )

    def step(self, decision: RegionDecision) -> FloatArray:
        """Run one slot; return what it measured, shape (NUM_OUT,), to be read only.

        Raises:
            ValueError: The decision is of another shape, not finite, or no shares.
        """
        check_decision(decision, self.cluster.num_regions)
        slot = self.slot
        self._break(slot)
        self.shares = np.ascontiguousarray(decision.shares, dtype=np.float64)
        active = np.ascontiguousarray(decision.active, dtype=np.int64)
        self.world.weights[:] = decision.live.weights
        kernel.run_slot(self.world, self.shares, active, DISPATCH[decision.dispatch])
        return np.asarray(self.world.out[slot])

    def finish(self) -> None:
        """Serve what waits after the last slot, so that every task has an end."""
        kernel.drain(self.world)

    def _break(self, slot: int) -> None:
        """Let failures begin and end."""
        now = slot * self.scenario.slot_s
        for failure in self.stream.failures:
            if slot == failure.start_slot:
                self.num_failures += 1
                self._begin(failure, now)
            if slot == failure.end_slot:
                if failure.kind == "links_slow":
                    self.world.latency[:] = self._plain_latency
                else:
                    kernel.recover(self.world, self._region_of(failure))

    def _begin(self, failure: Failure, now: float) -> None:
        if failure.kind == "links_slow":
            rows = slice(None) if failure.region is None else failure.region
            self.world.latency[rows] *= failure.factor
            if failure.region is not None:
                self.world.latency[:, failure.region] = self.world.latency[failure.region]
            return
        region = self._region_of(failure)
        size = int(self.world.first[region + 1] - self.world.first[region])
        is_lost = failure.kind == "region_down"
        count = size if is_lost else round(failure.fraction * size)
        kernel.fail(self.world, region, count, is_lost, now)

    def _region_of(self, failure: Failure) -> int:
        if failure.region is not None:
            return failure.region
        return int(self._server_tasks.sum(axis=1).argmax())


def run_regions(
    scenario: RegionScenario,
    stream: RegionStream,
    policy: RegionPolicy,
    forecaster: DemandForecaster,
) -> RegionOutcomes:
    """Let a policy decide every slot of a stream, shown states and nothing else."""
    sim = RegionSim(scenario, stream, forecaster)
    num, slots = sim.cluster.num_regions, stream.num_slots
    shares, decision_s = np.zeros((slots, num, num)), np.zeros(slots)
    for slot in range(slots):
        state = sim.state()
        started = time.perf_counter()
        decision = policy.decide(state)
        decision_s[slot] = time.perf_counter() - started
        sim.step(decision)
        shares[slot] = sim.shares
    sim.finish()
    w = sim.world
    return RegionOutcomes(w.out, w.tasks, w.labels, shares, decision_s)


def _dealt(count: int) -> IntArray:
    """A fixed order that spreads neighbours: fractional parts of multiples of the golden mean."""
    return np.argsort((np.arange(count) * 0.618033988749895) % 1.0)


def _server_tables(scenario: RegionScenario, cluster: Cluster) -> tuple[FloatArray, FloatArray]:
    kinds = list(scenario.kinds.values())
    tasks = scenario.slot_s / cluster.mean_service_s
    tdp = np.array([k.tdp_w for k in kinds])
    kwh = tdp * cluster.mean_service_s / 3.6e6 * scenario.prices.pue
    index = _padded_index(cluster)
    there = index >= 0
    kind = cluster.kind[index]
    return np.where(there, tasks[kind], 0.0), np.where(there, kwh[kind], 0.0)


@functools.lru_cache(maxsize=64)
def _padded_index(cluster: Cluster) -> IntArray:
    """Servers by region, shape (regions, most servers of one); -1 where there is none."""
    sizes = np.diff(cluster.first_server)
    columns = np.arange(sizes.max())
    return np.where(columns < sizes[:, None], cluster.first_server[:-1, None] + columns, -1)


def _make_world(scenario: RegionScenario, cluster: Cluster, stream: RegionStream) -> RegionArrays:
    num, servers = cluster.num_regions, len(cluster.region)
    models, tasks = len(scenario.demand.model_shares), len(stream.numbers)
    server_ints = np.full((servers, kernel.NUM_SERVER_INTS), -1, dtype=np.int64)
    server_ints[:, kernel.REGION] = cluster.region
    server_ints[:, kernel.KIND] = cluster.kind
    server_ints[:, kernel.STATE] = kernel.OFF
    times = np.zeros((servers, kernel.NUM_SERVER_FLOATS))
    times[:, kernel.WARMUP_S] = cluster.warmup_s
    task_floats = np.zeros((tasks, kernel.NUM_TASK_FLOATS))
    task_floats[:, : stream.numbers.shape[1]] = stream.numbers
    labels = np.full((tasks, kernel.NUM_TASK_INTS), -1, dtype=np.int64)
    labels[:, : stream.labels.shape[1]] = stream.labels
    labels[:, kernel.STATUS] = kernel.TO_COME
    slots = stream.num_slots
    return RegionArrays(
        rules=_rules(scenario),
        weights=np.zeros(kernel.NUM_WEIGHTS),
        kinds=_kinds(scenario, cluster),
        factor=cluster.service_factor,
        fit=_fit(scenario),
        likeness=likeness(scenario),
        first=cluster.first_server.astype(np.int64),
        latency=cluster.latency_s.copy(),
        near=np.argsort(cluster.latency_s, axis=1, kind="stable"),
        servers=server_ints,
        times=times,
        recent=np.zeros((servers, models)),
        tasks=task_floats,
        labels=labels,
        buffer=np.zeros((num, scenario.micro.buffer_size), dtype=np.int64),
        region=np.zeros((num, kernel.NUM_REGION_INTS), dtype=np.int64),
        credit=np.zeros((num, num)),
        asked=np.zeros((num, models)),
        backlog=np.zeros(num),
        prices=stream.usd_per_kwh,
        clock=np.zeros(kernel.NUM_CLOCK, dtype=np.int64),
        out=np.zeros((slots, kernel.NUM_OUT)),
        inflow=np.zeros((slots, num)),
        used=np.zeros((slots, num)),
    )


def _rules(scenario: RegionScenario) -> FloatArray:
    micro = scenario.micro
    rules = np.zeros(kernel.NUM_RULES)
    rules[kernel.SLOT_S] = scenario.slot_s
    rules[kernel.ROOM_S] = micro.room_s
    rules[kernel.ROUND_S] = micro.round_s
    rules[kernel.PATIENCE_S] = micro.patience_s
    rules[kernel.HARDWARE] = micro.hardware_weight
    rules[kernel.LOAD] = micro.load_weight
    rules[kernel.LOCALITY] = micro.locality_weight
    rules[kernel.DECAY] = math.log(2) / micro.locality_half_life_s
    rules[kernel.RAMP] = micro.ramp_fraction
    rules[kernel.SURPLUS_SLOTS] = micro.surplus_slots
    rules[kernel.EARLIEST] = micro.rule == "earliest"
    rules[kernel.SEARCH] = micro.local_search
    rules[kernel.PUE] = scenario.prices.pue
    rules[kernel.LATE_USD] = scenario.prices.late_usd_per_s
    rules[kernel.TASK_S] = float(np.mean(scenario.demand.work_s))
    return rules


def _kinds(scenario: RegionScenario, cluster: Cluster) -> FloatArray:
    table = np.zeros((len(scenario.kinds), kernel.NUM_KIND))
    for row, kind in zip(table, scenario.kinds.values(), strict=True):
        row[kernel.KIND_MEMORY] = kind.memory_gb
        row[kernel.KIND_IDLE_W] = kind.tdp_w * scenario.idle_power_fraction
        row[kernel.KIND_PEAK_W] = kind.tdp_w
        row[kernel.KIND_SWITCH_S] = kind.switch_s
        row[kernel.KIND_MIGRATION_S] = kind.migration_s
        row[kernel.KIND_USD] = kind.usd_per_hour / 3600
    table[:, kernel.KIND_TASK_S] = cluster.mean_service_s
    return table


def _fit(scenario: RegionScenario) -> FloatArray:
    return np.array(
        [
            [
                min(1.0, kind.speed / _NEEDED_SPEED[task]) * (1.0 if kind.best_at == task else 0.5)
                for kind in scenario.kinds.values()
            ]
            for task in TASK_TYPES
        ]
    )
