"""Tasks of many regions on their servers, slot by slot."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from tokenyard.regions import telemetry
from tokenyard.regions.activation import ActivationRule, targets_for
from tokenyard.regions.demand import RegionStream
from tokenyard.regions.forecast import DemandForecaster
from tokenyard.regions.policies.dispatch import DISPATCH
from tokenyard.regions.scenario import TASK_TYPES, RegionFailure, RegionScenario
from tokenyard.regions.servers import RegionServers, likeness, make_cluster
from tokenyard.regions.simulator import slot as kernel
from tokenyard.regions.simulator import world
from tokenyard.regions.simulator.reports import report
from tokenyard.regions.simulator.servers import fail, recover
from tokenyard.regions.simulator.world import RegionArrays
from tokenyard.regions.telemetry import Telemetry, num_columns
from tokenyard.regions.types import RegionDecision, RegionState, check_decision
from tokenyard.types import FloatArray, IntArray

HISTORY_SLOTS = 8
"""Slots of past arrivals that a state holds."""
_NEEDED_SPEED = {"compute": 1.3, "memory": 0.7, "lightweight": 0.35}
"""`GPU compute / task compute` of Eq 8 is speed over this."""


class RegionSim:
    """One copy: a stream's arrays, stepped slot by slot."""

    def __init__(
        self, scenario: RegionScenario, stream: RegionStream, forecaster: DemandForecaster
    ) -> None:
        """Start with the servers on that the first forecast asks for, if all stay local."""
        self.scenario, self.stream = scenario, stream
        self.cluster = make_cluster(scenario)
        self.forecasts = forecaster.forecast_all(stream)
        self._plain_latency = self.cluster.latency_s
        self._server_tasks = _server_tasks(scenario, self.cluster)
        self._slots_of = _padded_index(self.cluster)
        self.arrays = _make_arrays(scenario, self.cluster, stream)
        num = self.cluster.num_regions
        self.shares = np.eye(num)
        state = self.state()
        self._start(targets_for(state, state.forecast[0], ActivationRule.from_scenario(scenario)))
        report(self.arrays, 0, 0.0)

    @property
    def slot(self) -> int:
        """The slot that comes next."""
        return int(self.arrays.seen.clock[telemetry.SLOT])

    @property
    def ended(self) -> bool:
        """Whether all slots are over."""
        return self.slot >= self.stream.num_slots

    def _start(self, active: IntArray) -> None:
        t = self.arrays.seen
        for region, count in enumerate(active.tolist()):
            lo = int(t.first[region])
            t.servers[lo : lo + count, telemetry.STATE] = telemetry.ON
            # Models in proportion to what is asked for.
            shares = np.cumsum(self.scenario.demand.model_shares)
            spots = (np.arange(count) + 0.5) / max(count, 1)
            held = np.minimum(np.searchsorted(shares, spots), len(shares) - 1)
            # Kinds follow each other in the order of servers: models are dealt out across them.
            t.servers[lo : lo + count, telemetry.HELD_MODEL] = held[_dealt(count)]

    def state(self) -> RegionState:
        """What a policy may know now: telemetry, as old as the last reports."""
        t, slot = self.arrays.seen, self.slot
        states = t.servers[:, telemetry.STATE]
        down = states == telemetry.DOWN
        tasks = np.where(self._slots_of >= 0, self._server_tasks, 0.0)
        if down.any():
            tasks = np.where(down[self._slots_of], 0.0, tasks)
        running = (states == telemetry.ON) | (states == telemetry.WARMING)
        past: FloatArray = self.stream.counts[max(0, slot - HISTORY_SLOTS) : slot].astype(float)
        if not len(past):
            past = self.forecasts[0, :1]
        return RegionState(
            slot_s=self.scenario.slot_s,
            latency_s=t.latency,
            arrivals=past,
            forecast=self.forecasts[slot],
            waiting=t.rows[t.clock[telemetry.NEWEST], :, telemetry.WAITING].copy(),
            used=t.used[max(slot - 1, 0)],
            num_active=np.add.reduceat(running, t.first[:-1], dtype=np.int64),
            usd_per_kwh=t.prices[slot],
            previous=self.shares,
            server_tasks=tasks,
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
        self.arrays.seen.weights[:] = decision.live.weights
        kernel.run_slot(self.arrays, self.shares, active, DISPATCH[decision.dispatch])
        return np.asarray(self.arrays.out[slot])

    def finish(self) -> None:
        """Serve what waits after the last slot, so that every task has an end."""
        kernel.drain(self.arrays)

    def _break(self, slot: int) -> None:
        """Let failures end and begin; those that overlap with what ends go on."""
        now = slot * self.scenario.slot_s
        of_links = [failure for failure in self.stream.failures if failure.kind == "links_slow"]
        of_servers = [failure for failure in self.stream.failures if failure.kind != "links_slow"]
        for ended in (failure for failure in of_servers if failure.end_slot == slot):
            recover(self.arrays, self._region_of(ended))
            for other in of_servers:
                lasts = other.start_slot < slot < other.end_slot
                if lasts and self._region_of(other) == self._region_of(ended):
                    self._take_down(other, now)
        for begun in (failure for failure in of_servers if failure.start_slot == slot):
            self._take_down(begun, now)
        if any(slot in (failure.start_slot, failure.end_slot) for failure in of_links):
            self._slow_down([e for e in of_links if e.start_slot <= slot < e.end_slot])

    def _take_down(self, failure: RegionFailure, now: float) -> None:
        region = self._region_of(failure)
        size = int(self.arrays.seen.first[region + 1] - self.arrays.seen.first[region])
        is_lost = failure.kind == "region_down"
        count = size if is_lost else round(failure.fraction * size)
        fail(self.arrays, region, count, is_lost, now)

    def _slow_down(self, failures: Sequence[RegionFailure]) -> None:
        """Set latencies to what they are under some failures of links."""
        latency = self.arrays.seen.latency
        latency[:] = self._plain_latency
        for failure in failures:
            latency[slice(None) if failure.region is None else failure.region] *= failure.factor
            if failure.region is not None:
                latency[:, failure.region] = latency[failure.region]

    def _region_of(self, failure: RegionFailure) -> int:
        if failure.region is not None:
            return failure.region
        return int(self._server_tasks.sum(axis=1).argmax())


def _dealt(count: int) -> IntArray:
    """A fixed order that spreads neighbours: fractional parts of multiples of the golden mean."""
    return np.argsort((np.arange(count) * 0.618033988749895) % 1.0)


def _server_tasks(scenario: RegionScenario, cluster: RegionServers) -> FloatArray:
    tasks = scenario.slot_s / cluster.mean_service_s
    index = _padded_index(cluster)
    return np.where(index >= 0, tasks[cluster.kind[index]], 0.0)


@functools.lru_cache(maxsize=64)
def _padded_index(cluster: RegionServers) -> IntArray:
    """Servers by region, shape (regions, most servers of one); -1 where there is none."""
    sizes = np.diff(cluster.first_server)
    columns = np.arange(sizes.max())
    return np.where(columns < sizes[:, None], cluster.first_server[:-1, None] + columns, -1)


def _make_arrays(
    scenario: RegionScenario, cluster: RegionServers, stream: RegionStream
) -> RegionArrays:
    num, servers = cluster.num_regions, len(cluster.region)
    times = np.zeros((servers, world.NUM_SERVER_FLOATS))
    times[:, world.WARMUP_S] = cluster.warmup_s
    tasks = np.zeros((len(stream.numbers), world.NUM_TASK_FLOATS))
    tasks[:, : stream.numbers.shape[1]] = stream.numbers
    labels = np.full((len(tasks), world.NUM_TASK_INTS), -1, dtype=np.int64)
    labels[:, : stream.labels.shape[1]] = stream.labels
    labels[:, world.STATUS] = world.TO_COME
    return RegionArrays(
        seen=_make_telemetry(scenario, cluster, stream),
        servers=np.full((servers, world.NUM_SERVER_INTS), -1, dtype=np.int64),
        times=times,
        tasks=tasks,
        labels=labels,
        buffer=np.zeros((num, scenario.micro.buffer_size), dtype=np.int64),
        region=np.zeros((num, world.NUM_REGION_INTS), dtype=np.int64),
        clock=np.zeros(world.NUM_CLOCK, dtype=np.int64),
        out=np.zeros((stream.num_slots, world.NUM_OUT)),
    )


def _make_telemetry(
    scenario: RegionScenario, cluster: RegionServers, stream: RegionStream
) -> Telemetry:
    num, servers, num_tasks = cluster.num_regions, len(cluster.region), len(stream.numbers)
    models = len(scenario.demand.model_shares)
    states = np.zeros((servers, telemetry.NUM_SERVER_INTS), dtype=np.int64)
    states[:, telemetry.KIND] = cluster.kind
    states[:, telemetry.STATE] = telemetry.OFF
    states[:, telemetry.HELD_MODEL] = -1
    clock = np.zeros(telemetry.NUM_CLOCK, dtype=np.int64)
    clock[telemetry.NEWEST] = telemetry.FIRST
    columns = num_columns(len(scenario.kinds), models)
    return Telemetry(
        rules=_rules(scenario),
        weights=np.zeros(telemetry.NUM_WEIGHTS),
        kinds=_kinds(scenario, cluster),
        factor=cluster.service_factor,
        fit=_fit(scenario),
        likeness=likeness(scenario),
        first=cluster.first_server.astype(np.int64),
        latency=cluster.latency_s.copy(),
        near=np.argsort(cluster.latency_s, axis=1, kind="stable"),
        prices=stream.usd_per_kwh,
        tasks=np.zeros((num_tasks, telemetry.NUM_TASK_FLOATS)),
        labels=np.zeros((num_tasks, telemetry.NUM_LABELS), dtype=np.int64),
        servers=states,
        times=np.zeros((servers, telemetry.NUM_SERVER_FLOATS)),
        recent=np.zeros((servers, models)),
        asked=np.zeros((num, models)),
        rows=np.zeros((telemetry.NUM_ROWS, num, columns)),
        reported_s=np.full(telemetry.NUM_ROWS, -math.inf),
        sent=np.zeros((num, num)),
        used=np.zeros((stream.num_slots, num)),
        credit=np.zeros((num, num)),
        backlog=np.zeros(num),
        clock=clock,
    )


def _rules(scenario: RegionScenario) -> FloatArray:
    micro = scenario.micro
    rules = np.zeros(telemetry.NUM_RULES)
    rules[telemetry.SLOT_S] = scenario.slot_s
    rules[telemetry.ROOM_S] = micro.room_s
    rules[telemetry.ROUND_S] = micro.round_s
    rules[telemetry.PATIENCE_S] = micro.patience_s
    rules[telemetry.HARDWARE] = micro.hardware_weight
    rules[telemetry.LOAD] = micro.load_weight
    rules[telemetry.LOCALITY] = micro.locality_weight
    rules[telemetry.DECAY] = math.log(2) / micro.locality_half_life_s
    rules[telemetry.RAMP] = micro.ramp_fraction
    rules[telemetry.SURPLUS_SLOTS] = micro.surplus_slots
    rules[telemetry.EARLIEST] = micro.rule == "earliest"
    rules[telemetry.SEARCH] = micro.local_search
    rules[telemetry.PUE] = scenario.prices.pue
    rules[telemetry.LATE_USD] = scenario.prices.late_usd_per_s
    rules[telemetry.TASK_S] = float(np.mean(scenario.demand.work_s))
    return rules


def _kinds(scenario: RegionScenario, cluster: RegionServers) -> FloatArray:
    table = np.zeros((len(scenario.kinds), telemetry.NUM_KIND))
    for row, kind in zip(table, scenario.kinds.values(), strict=True):
        row[telemetry.KIND_MEMORY] = kind.memory_gb
        row[telemetry.KIND_IDLE_W] = kind.tdp_w * scenario.idle_power_fraction
        row[telemetry.KIND_PEAK_W] = kind.tdp_w
        row[telemetry.KIND_SWITCH_S] = kind.switch_s
        row[telemetry.KIND_MIGRATION_S] = kind.migration_s
        row[telemetry.KIND_USD] = kind.usd_per_hour / 3600
    table[:, telemetry.KIND_TASK_S] = cluster.mean_service_s
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
