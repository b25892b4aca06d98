"""What stands in every region: servers, prices, mean demand; drawn once from a scenario's seed."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from tokenyard.regions.scenario import TASK_TYPES, RegionScenario
from tokenyard.regions.topology import Topology, load_topology
from tokenyard.types import FloatArray, IntArray

MIN_SERVERS = 2
"""A region has at least so many."""
_LIKENESS = 0.5
"""Likeness of two models that are not the same: their embeddings' cosine, a pick."""


@dataclass(frozen=True, eq=False)
class RegionServers:
    """Everything about a scenario that a clock does not change.

    Servers are sorted by region and, within one, in the order in which they are turned on: those
    first that serve the mix of tasks fastest, of equals the one that warms up sooner.
    """

    topology: Topology
    latency_s: FloatArray
    """One way, transfer of the payload included, shape (regions, regions)."""
    region: IntArray
    """Of every server, shape (servers,)."""
    kind: IntArray
    """Of every server, index of the scenario's kinds, shape (servers,)."""
    warmup_s: FloatArray
    """Of every server, shape (servers,)."""
    service_factor: FloatArray
    """Service time over work by type and kind where memory suffices, shape (types, kinds)."""
    mean_service_s: FloatArray
    """Over the mix of tasks by kind, shape (kinds,)."""
    usd_per_kwh: FloatArray
    """Mean over a day, shape (regions,)."""
    mean_demand: FloatArray
    """Tasks per slot at the scenario's load, mean over a day, shape (regions,)."""
    amplitude: FloatArray
    """Of the daily wave, shape (regions,)."""

    @property
    def num_regions(self) -> int:
        """How many regions there are."""
        return len(self.usd_per_kwh)

    @functools.cached_property
    def first_server(self) -> IntArray:
        """First server of every region, and the number of servers; shape (regions + 1,)."""
        return np.searchsorted(self.region, np.arange(self.num_regions + 1))


@functools.lru_cache(maxsize=32)
def _cluster(text: str) -> RegionServers:
    scenario = RegionScenario.model_validate_json(text)
    topology = load_topology(scenario.topology)
    unknown = [
        failure.region
        for failure in scenario.failures
        if (failure.region or 0) >= topology.num_regions
    ]
    if unknown:
        raise ValueError(
            f"no region {unknown[0]} can fail: topology {scenario.topology!r} has regions 0 to "
            f"{topology.num_regions - 1}"
        )
    rng = np.random.default_rng(scenario.layout_seed)
    mean_s = None if scenario.mean_latency_ms is None else scenario.mean_latency_ms / 1e3
    latency = topology.latency_s(mean_s)
    transfer_s = scenario.payload_mb * 8 / 1000 / scenario.bandwidth_gbps
    latency = latency + transfer_s * ~np.eye(topology.num_regions, dtype=bool)
    factor, mean_service = service_times(scenario)
    region, kind = _place(scenario, topology.num_regions, rng)
    warmup = rng.uniform(*scenario.micro.warmup_s, len(region))
    order = np.lexsort((warmup, mean_service[kind], region))
    region, kind, warmup = region[order], kind[order], warmup[order]
    capacity = np.bincount(region, scenario.slot_s / mean_service[kind], topology.num_regions)
    noise = rng.normal(0, scenario.demand.unevenness, topology.num_regions)
    weight = capacity**scenario.demand.follows_capacity * np.exp(noise)
    return RegionServers(
        topology=topology,
        latency_s=latency,
        region=region,
        kind=kind,
        warmup_s=warmup,
        service_factor=factor,
        mean_service_s=mean_service,
        usd_per_kwh=rng.uniform(*scenario.prices.usd_per_kwh, topology.num_regions),
        mean_demand=scenario.demand.load * capacity.sum() * weight / weight.sum(),
        amplitude=rng.uniform(*scenario.demand.amplitude, topology.num_regions),
    )


def make_cluster(scenario: RegionScenario) -> RegionServers:
    """Draw the cluster of a scenario; equal scenarios give the same one.

    Raises:
        ValueError: The topology is not known, there are too few servers for its regions, or one
            is to fail that it does not have.
    """
    return _cluster(scenario.model_dump_json())


def service_times(scenario: RegionScenario) -> tuple[FloatArray, FloatArray]:
    """Return service time over work, shape (types, kinds), and the mean by kind, seconds.

    A task that needs more memory than there is takes longer in that proportion.
    """
    kinds = list(scenario.kinds.values())
    demand = scenario.demand
    factor = np.array(
        [
            [(1.0 if k.best_at == kind else scenario.mismatch_slowdown) / k.speed for k in kinds]
            for kind in TASK_TYPES
        ]
    )
    share = np.linspace(0, 1, 101)
    crowding = np.array(
        [
            [np.maximum(1.0, (low + share * (high - low)) / k.memory_gb).mean() for k in kinds]
            for low, high in demand.memory_gb
        ]
    )
    shares = np.array(demand.type_shares)[:, None]
    mean = (shares * factor * crowding).sum(axis=0) * np.mean(demand.work_s)
    return factor, np.asarray(mean)


def likeness(scenario: RegionScenario) -> FloatArray:
    """Sim of Eq 10 between models, shape (models, models); 1 on the diagonal."""
    weight = scenario.micro.same_model_weight
    models = len(scenario.demand.model_shares)
    return np.where(np.eye(models, dtype=bool), 1.0, (1 - weight) * _LIKENESS)


def _place(
    scenario: RegionScenario, num_regions: int, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Divide the servers of each kind over regions; a region that is too small takes from others.

    Raises:
        ValueError: There are not enough for all regions.
    """
    if scenario.num_servers < MIN_SERVERS * num_regions:
        raise ValueError(
            f"{scenario.num_servers} servers are too few for {num_regions} regions with at least "
            f"{MIN_SERVERS} each"
        )
    names = list(scenario.kinds)
    shares = rng.dirichlet(np.full(num_regions, 2.0))
    region = [rng.choice(num_regions, count, p=shares) for count in scenario.server_counts.values()]
    where = np.concatenate(region)
    kind = np.repeat([names.index(n) for n in scenario.server_counts],
                     list(scenario.server_counts.values()))  # fmt: skip
    counts = np.bincount(where, minlength=num_regions)
    while counts.min() < MIN_SERVERS:
        taken = rng.choice(np.flatnonzero(where == counts.argmax()))
        where[taken] = counts.argmin()
        counts = np.bincount(where, minlength=num_regions)
    return where.astype(np.int64), kind.astype(np.int64)
