"""Tasks of many regions on their servers, slot by slot."""

from __future__ import annotations

import functools
import math

import numpy as np

from tokenyard.regions.activation import ActivationRule, targets_for
from tokenyard.regions.demand import RegionStream
from tokenyard.regions.forecast import DemandForecaster
from tokenyard.regions.scenario import TASK_TYPES, Failure, RegionScenario
from tokenyard.regions.servers import Cluster, likeness, make_cluster
from tokenyard.regions.simulator import slot as kernel
from tokenyard.regions.simulator import world
from tokenyard.regions.simulator.servers import fail, recover
from tokenyard.regions.simulator.world import RegionArrays
from tokenyard.regions.types import Dispatch, RegionDecision, RegionState, check_decision
from tokenyard.types import FloatArray, IntArray

DISPATCH: dict[Dispatch, int] = {
    "shares": world.BY_SHARES,
    "live_shares": world.LIVE_SHARES,
    "spill": world.SPILL,
    "least_loaded": world.LEAST_LOADED,
    "balance": world.BALANCE,
    "live_cost": world.LIVE_COST,
}
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
        self.num_failures = 0
        self._plain_latency = self.cluster.latency_s
        self._server_tasks, self._server_kwh = _server_tables(scenario, self.cluster)
        self._slots_of = _padded_index(self.cluster)
        self.arrays = _make_arrays(scenario, self.cluster, stream)
        num = self.cluster.num_regions
        self.shares = np.eye(num)
        state = self.state()
        self._start(targets_for(state, state.forecast[0], ActivationRule.from_scenario(scenario)))

    @property
    def slot(self) -> int:
        """The slot that comes next."""
        return int(self.arrays.clock[world.SLOT])

    @property
    def ended(self) -> bool:
        """Whether all slots are over."""
        return self.slot >= self.stream.num_slots

    def _start(self, active: IntArray) -> None:
        w = self.arrays
        for region, count in enumerate(active.tolist()):
            lo = int(w.first[region])
            w.servers[lo : lo + count, world.STATE] = world.ON
            # Models in proportion to what is asked for.
            shares = np.cumsum(self.scenario.demand.model_shares)
            spots = (np.arange(count) + 0.5) / max(count, 1)
            held = np.minimum(np.searchsorted(shares, spots), len(shares) - 1)
            # Kinds follow each other in the order of servers: models are dealt out across them.
            w.servers[lo : lo + count, world.HELD_MODEL] = held[_dealt(count)]

    def state(self) -> RegionState:
        """What a policy may know now."""
        w, slot = self.arrays, self.slot
        down = w.servers[:, world.STATE] == world.DOWN
        tasks = np.where(self._slots_of >= 0, self._server_tasks, 0.0)
        if down.any():
            tasks = np.where(down[self._slots_of], 0.0, tasks)
        running = (w.servers[:, world.STATE] == world.ON) | (
            w.servers[:, world.STATE] == world.WARMING
        )
        past: FloatArray = self.stream.counts[max(0, slot - HISTORY_SLOTS) : slot].astype(float)
        if not len(past):
            past = self.forecasts[0, :1]
        return RegionState(
            slot_s=self.scenario.slot_s,
            latency_s=w.latency,
            arrivals=past,
            forecast=self.forecasts[slot],
            waiting=w.region[:, world.NUM_WAITING].astype(np.float64),
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
        self.arrays.weights[:] = decision.live.weights
        kernel.run_slot(self.arrays, self.shares, active, DISPATCH[decision.dispatch])
        return np.asarray(self.arrays.out[slot])

    def finish(self) -> None:
        """Serve what waits after the last slot, so that every task has an end."""
        kernel.drain(self.arrays)

    def _break(self, slot: int) -> None:
        """Let failures begin and end."""
        now = slot * self.scenario.slot_s
        for failure in self.stream.failures:
            if slot == failure.start_slot:
                self.num_failures += 1
                self._begin(failure, now)
            if slot == failure.end_slot:
                if failure.kind == "links_slow":
                    self.arrays.latency[:] = self._plain_latency
                else:
                    recover(self.arrays, self._region_of(failure))

    def _begin(self, failure: Failure, now: float) -> None:
        if failure.kind == "links_slow":
            rows = slice(None) if failure.region is None else failure.region
            self.arrays.latency[rows] *= failure.factor
            if failure.region is not None:
                self.arrays.latency[:, failure.region] = self.arrays.latency[failure.region]
            return
        region = self._region_of(failure)
        size = int(self.arrays.first[region + 1] - self.arrays.first[region])
        is_lost = failure.kind == "region_down"
        count = size if is_lost else round(failure.fraction * size)
        fail(self.arrays, region, count, is_lost, now)

    def _region_of(self, failure: Failure) -> int:
        if failure.region is not None:
            return failure.region
        return int(self._server_tasks.sum(axis=1).argmax())


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


def _make_arrays(scenario: RegionScenario, cluster: Cluster, stream: RegionStream) -> RegionArrays:
    num, servers = cluster.num_regions, len(cluster.region)
    models, tasks = len(scenario.demand.model_shares), len(stream.numbers)
    server_ints = np.full((servers, world.NUM_SERVER_INTS), -1, dtype=np.int64)
    server_ints[:, world.REGION] = cluster.region
    server_ints[:, world.KIND] = cluster.kind
    server_ints[:, world.STATE] = world.OFF
    times = np.zeros((servers, world.NUM_SERVER_FLOATS))
    times[:, world.WARMUP_S] = cluster.warmup_s
    task_floats = np.zeros((tasks, world.NUM_TASK_FLOATS))
    task_floats[:, : stream.numbers.shape[1]] = stream.numbers
    labels = np.full((tasks, world.NUM_TASK_INTS), -1, dtype=np.int64)
    labels[:, : stream.labels.shape[1]] = stream.labels
    labels[:, world.STATUS] = world.TO_COME
    slots = stream.num_slots
    return RegionArrays(
        rules=_rules(scenario),
        weights=np.zeros(world.NUM_WEIGHTS),
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
        region=np.zeros((num, world.NUM_REGION_INTS), dtype=np.int64),
        credit=np.zeros((num, num)),
        asked=np.zeros((num, models)),
        backlog=np.zeros(num),
        prices=stream.usd_per_kwh,
        clock=np.zeros(world.NUM_CLOCK, dtype=np.int64),
        out=np.zeros((slots, world.NUM_OUT)),
        inflow=np.zeros((slots, num)),
        used=np.zeros((slots, num)),
    )


def _rules(scenario: RegionScenario) -> FloatArray:
    micro = scenario.micro
    rules = np.zeros(world.NUM_RULES)
    rules[world.SLOT_S] = scenario.slot_s
    rules[world.ROOM_S] = micro.room_s
    rules[world.ROUND_S] = micro.round_s
    rules[world.PATIENCE_S] = micro.patience_s
    rules[world.HARDWARE] = micro.hardware_weight
    rules[world.LOAD] = micro.load_weight
    rules[world.LOCALITY] = micro.locality_weight
    rules[world.DECAY] = math.log(2) / micro.locality_half_life_s
    rules[world.RAMP] = micro.ramp_fraction
    rules[world.SURPLUS_SLOTS] = micro.surplus_slots
    rules[world.EARLIEST] = micro.rule == "earliest"
    rules[world.SEARCH] = micro.local_search
    rules[world.PUE] = scenario.prices.pue
    rules[world.LATE_USD] = scenario.prices.late_usd_per_s
    rules[world.TASK_S] = float(np.mean(scenario.demand.work_s))
    return rules


def _kinds(scenario: RegionScenario, cluster: Cluster) -> FloatArray:
    table = np.zeros((len(scenario.kinds), world.NUM_KIND))
    for row, kind in zip(table, scenario.kinds.values(), strict=True):
        row[world.KIND_MEMORY] = kind.memory_gb
        row[world.KIND_IDLE_W] = kind.tdp_w * scenario.idle_power_fraction
        row[world.KIND_PEAK_W] = kind.tdp_w
        row[world.KIND_SWITCH_S] = kind.switch_s
        row[world.KIND_MIGRATION_S] = kind.migration_s
        row[world.KIND_USD] = kind.usd_per_hour / 3600
    table[:, world.KIND_TASK_S] = cluster.mean_service_s
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
