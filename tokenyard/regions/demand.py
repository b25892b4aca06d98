"""Demand of an episode: Poisson arrivals with a daily wave and bursts, and what every task is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tokenyard.regions.scenario import RegionFailure, RegionScenario
from tokenyard.regions.servers import RegionServers, make_cluster
from tokenyard.types import FloatArray, IntArray

_PEAK = 15 / 24
"""Local time of the wave's height, as a share of a day."""
_PRICE_PEAK = 19 / 24
_SPARE_SLOTS = 64
"""Prices are known for some time beyond an episode."""

# Columns of `RegionStream.numbers`.
ARRIVAL_S, WORK_S, MEMORY_GB, DEADLINE_S = range(4)
# Columns of `RegionStream.labels`.
ORIGIN, TYPE, MODEL = range(3)


@dataclass(frozen=True, eq=False)
class RegionStream:
    """One episode's tasks in order of arrival, with prices and what fails."""

    numbers: FloatArray
    """Shape (tasks, 4): arrival and deadline in seconds since the episode's start, work in seconds
    on the reference server, memory in 1e9 bytes."""
    labels: IntArray
    """Shape (tasks, 3): region of origin, type, model."""
    counts: IntArray
    """Tasks that arrive, shape (slots, regions)."""
    usd_per_kwh: FloatArray
    """Shape (slots and some more, regions)."""
    start_slot: int
    """Slot of the day, UTC, in which the episode begins."""
    failures: tuple[RegionFailure, ...] = field(default=())

    @property
    def num_slots(self) -> int:
        """Slots of the episode."""
        return len(self.counts)


def stream_rng(seed: int, part: str, index: int) -> np.random.Generator:
    """Generator of one stream; parts never share a stream, whatever the seed.

    Raises:
        ValueError: The part is none of training, validation and test.
    """
    parts = ("training", "validation", "test")
    if part not in parts:
        raise ValueError(f"unknown part {part!r}; choose one of {parts}")
    return np.random.default_rng([seed, 8, parts.index(part), index])


def draw_layout(scenario: RegionScenario, seed: int, part: str, index: int) -> RegionScenario:
    """Draw the scenario's servers, prices and mean demands anew; parts never share a layout.

    Where each server stands is a Dirichlet draw, of concentration 2, of the regions' shares; its
    warm-up, prices, waves and demands are drawn as `tokenyard.regions.servers` says. What stays is
    the topology and how many servers of each kind there are.

    Raises:
        ValueError: The part is none of training, validation and test.
    """
    layout_seed = int(stream_rng(seed, part, index).integers(2**31))
    return scenario.model_copy(update={"layout_seed": layout_seed})


def sample_stream(scenario: RegionScenario, rng: np.random.Generator) -> RegionStream:
    """Draw an episode that begins at any time of the day."""
    cluster = make_cluster(scenario)
    start = int(rng.integers(scenario.slots_per_day))
    rates = sample_rates(scenario, cluster, start, scenario.num_slots, rng)
    counts = rng.poisson(rates)
    numbers, labels = _tasks(scenario, counts, rng)
    prices = _prices(scenario, cluster, start, scenario.num_slots + _SPARE_SLOTS)
    return RegionStream(numbers, labels, counts, prices, start, scenario.failures)


def sample_rates(
    scenario: RegionScenario,
    cluster: RegionServers,
    start_slot: int,
    num_slots: int,
    rng: np.random.Generator,
) -> FloatArray:
    """Expected tasks per slot, bursts included, shape (slots, regions).

    The mean over all slots is the scenario's load.
    """
    demand = scenario.demand
    slots = start_slot + np.arange(num_slots)
    local = slots[:, None] / scenario.slots_per_day + cluster.topology.day_phase
    wave = 1 + cluster.amplitude * np.cos(2 * np.pi * (local - _PEAK))
    rates = cluster.mean_demand * wave
    hours = num_slots * scenario.slot_s / 3600
    for region in range(cluster.num_regions):
        for _ in range(rng.poisson(demand.bursts_per_hour * hours)):
            begin = int(rng.integers(num_slots))
            length = round(rng.uniform(*demand.burst_s) / scenario.slot_s)
            rates[begin : begin + max(1, length), region] *= rng.uniform(*demand.burst_factor)
    return np.asarray(rates * (cluster.mean_demand.sum() / rates.sum(axis=1).mean()))


def _tasks(
    scenario: RegionScenario, counts: IntArray, rng: np.random.Generator
) -> tuple[FloatArray, IntArray]:
    demand = scenario.demand
    slots, regions = np.indices(counts.shape)
    slot = np.repeat(slots.ravel(), counts.ravel())
    origin = np.repeat(regions.ravel(), counts.ravel())
    n = len(slot)
    arrival = (slot + rng.random(n)) * scenario.slot_s
    order = np.argsort(arrival, kind="stable")
    arrival, origin = arrival[order], origin[order]
    work = rng.uniform(*demand.work_s, n)
    kind = rng.choice(len(demand.type_shares), n, p=demand.type_shares)
    model = rng.choice(len(demand.model_shares), n, p=demand.model_shares)
    low, high = np.array(demand.memory_gb).T
    memory = low[kind] + (high - low)[kind] * rng.random(n)
    tight = rng.random(n) < demand.tight_fraction
    factor = np.where(
        tight, rng.uniform(*demand.tight_factor, n), rng.uniform(*demand.deadline_factor, n)
    )
    numbers = np.column_stack([arrival, work, memory, arrival + factor * work])
    return numbers, np.column_stack([origin, kind, model]).astype(np.int64)


def _prices(
    scenario: RegionScenario, cluster: RegionServers, start_slot: int, num_slots: int
) -> FloatArray:
    slots = start_slot + np.arange(num_slots)
    local = slots[:, None] / scenario.slots_per_day + cluster.topology.day_phase
    wave = 1 + scenario.prices.daily_amplitude * np.cos(2 * np.pi * (local - _PRICE_PEAK))
    return np.asarray(cluster.usd_per_kwh * wave)
