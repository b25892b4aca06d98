"""What is fixed in a regional experiment, as data: topology, servers, demand, prices, failures.

Scenarios are YAML files in `tokenyard/scenarios/regions`, read only through these models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from tokenyard.config import FrozenModel, fitted, read_fields, shipped_names

_FOLDER = "scenarios/regions"

TASK_TYPES = ("compute", "memory", "lightweight")
"""What a task is heavy in."""
TaskType = Literal["compute", "memory", "lightweight"]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class ServerKind(FrozenModel):
    """One kind of server: one GPU that serves one task after another."""

    speed: Positive
    """Work done per second; the reference kind has 1."""
    memory_gb: Positive
    best_at: TaskType
    """Type of task that it is matched to."""
    tdp_w: Positive
    """Power at work, warming up and changing models included, watts."""
    switch_s: Positive
    """Time to unload one model and load another, seconds."""
    migration_s: Positive
    """Time for which a task stands still that moves here, seconds."""
    usd_per_hour: Positive
    """Rent; prices the time in which a server does not serve."""


# Speeds are picks. Model switch and migration: 30.0 and 30.7 s on a V100 (arXiv 2507.10259v2,
# figure 3a), for other kinds in the proportion of its figure 3b, read off by eye.
_KINDS = {
    "H100": ServerKind(
        speed=2.0, memory_gb=80, best_at="compute", tdp_w=700, switch_s=19.3,
        migration_s=21.2, usd_per_hour=2.99,
    ),
    "A100": ServerKind(
        speed=1.3, memory_gb=80, best_at="compute", tdp_w=400, switch_s=22.8,
        migration_s=23.5, usd_per_hour=1.79,
    ),
    "RTX4090": ServerKind(
        speed=1.0, memory_gb=24, best_at="lightweight", tdp_w=450, switch_s=22.3,
        migration_s=24.7, usd_per_hour=0.44,
    ),
    "V100": ServerKind(
        speed=0.7, memory_gb=32, best_at="memory", tdp_w=300, switch_s=30.0,
        migration_s=30.7, usd_per_hour=0.39,
    ),
    "T4": ServerKind(
        speed=0.35, memory_gb=16, best_at="lightweight", tdp_w=70, switch_s=33.0,
        migration_s=34.0, usd_per_hour=0.35,
    ),
}  # fmt: skip


class RegionDemand(FrozenModel):
    """How many tasks come where, and what they are."""

    load: Annotated[float, Field(gt=0, le=1.5)] = 0.6
    """Mean work of an episode over what all servers together can do."""
    amplitude: tuple[Share, Share] = (0.3, 0.6)
    """Least and greatest height of a region's daily wave, as a share of its mean."""
    bursts_per_hour: Annotated[float, Field(ge=0)] = 0.5
    """Mean rate of bursts of one region."""
    burst_factor: tuple[Positive, Positive] = (2.0, 3.0)
    burst_s: tuple[Positive, Positive] = (300.0, 600.0)
    follows_capacity: Share = 0.5
    """Exponent of a region's capacity in its demand: 0 is independent of it, 1 in proportion."""
    unevenness: Annotated[float, Field(ge=0)] = 0.4
    """Standard deviation of the logarithm of what else multiplies a region's demand."""
    work_s: tuple[Positive, Positive] = (10.0, 22.0)
    """Least and greatest work of a task, seconds on the reference server; uniform between."""
    type_shares: tuple[Share, Share, Share] = (0.4, 0.3, 0.3)
    """Of compute, memory and lightweight tasks."""
    memory_gb: tuple[tuple[Positive, Positive], ...] = ((10.0, 24.0), (14.0, 30.0), (4.0, 12.0))
    """Least and greatest memory of a task by type; uniform between."""
    model_shares: Annotated[tuple[Share, ...], Field(min_length=1, max_length=8)] = (0.5, 0.3, 0.2)
    """How often each model is asked for."""
    deadline_factor: tuple[Positive, Positive] = (2.0, 4.0)
    """Deadline after arrival over the work of a task; uniform between."""
    tight_fraction: Share = 0.2
    tight_factor: tuple[Positive, Positive] = (1.2, 2.0)
    """The same for the share of tasks whose deadline is tight."""

    @field_validator("amplitude", "burst_factor", "burst_s", "work_s", "deadline_factor")
    @classmethod
    def _is_a_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] > value[1]:
            raise ValueError(f"{value} must be the least and the greatest, in this order")
        return value

    @model_validator(mode="after")
    def _shares_sum_to_one(self) -> Self:
        for shares in (self.type_shares, self.model_shares):
            if abs(sum(shares) - 1) > 1e-9:
                raise ValueError(f"shares {shares} must sum to 1")
        return self


class Prices(FrozenModel):
    """Electricity: synthetic, in the range of European non-household prices of late 2023."""

    usd_per_kwh: tuple[Positive, Positive] = (0.09, 0.28)
    """Least and greatest mean price of a region; uniform between."""
    daily_amplitude: Share = 0.2
    """Height of the daily wave, which peaks at 19 h local time, as a share of the mean."""
    pue: Annotated[float, Field(ge=1)] = 1.3
    """Power of the site over that of its servers."""
    late_usd_per_s: Annotated[float, Field(ge=0)] = 1e-4
    """What a second after the deadline costs; about the rent of a reference server and its power.
    A task that is dropped counts as late by the patience."""


class Micro(FrozenModel):
    """The allocator inside every region: which servers are on, and which takes a task."""

    rule: Literal["score", "earliest"] = "score"
    """`score`: hardware, load and locality; `earliest`: the server that is free first."""
    hardware_weight: Annotated[float, Field(ge=0)] = 0.4
    load_weight: Annotated[float, Field(ge=0)] = 0.5
    locality_weight: Annotated[float, Field(ge=0)] = 0.4
    same_model_weight: Share = 0.8
    """Of locality; the rest is the likeness of models that are not the same."""
    locality_half_life_s: Positive = 300.0
    room_s: Annotated[float, Field(ge=0)] = 60.0
    """A server takes a task ahead of time when it is free within this, seconds."""
    round_s: Positive = 5.0
    """Time between two looks at what waits, seconds."""
    local_search: bool = True
    """Move tasks that have not begun to servers of the region where they end earlier."""
    buffer_size: Annotated[int, Field(ge=1, le=20_000)] = 4000
    """Tasks that may wait in one region; what comes beyond is dropped."""
    patience_s: Positive = 900.0
    """Tasks that wait longer are dropped, seconds."""
    sigma: Annotated[float, Field(ge=0)] = 1.65
    """Standard deviations of a Poisson count that are kept in reserve (Eq 6)."""
    utilisation: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of a server's time that is planned to be filled."""
    ramp_fraction: Share = 0.1
    """Servers of a region that may go on or off in one slot, as a share; one always may."""
    surplus_slots: Annotated[int, Field(ge=0)] = 4
    """Slots for which there must be too many servers before some go off."""
    warmup_s: tuple[Positive, Positive] = (60.0, 180.0)
    """Least and greatest time from off to ready, seconds; uniform over servers."""


class RegionFailure(FrozenModel):
    """Something that breaks for a while."""

    kind: Literal["region_down", "capacity_lost", "links_slow"]
    start_slot: Annotated[int, Field(ge=0)]
    num_slots: Annotated[int, Field(ge=1)]
    region: Annotated[int, Field(ge=0)] | None = None
    """Which region; None: the one of most capacity, or for links all."""
    fraction: Share = 0.5
    """Share of the servers that are lost."""
    factor: Annotated[float, Field(ge=1)] = 5.0
    """By how much latencies grow."""

    @property
    def end_slot(self) -> int:
        """First slot after it."""
        return self.start_slot + self.num_slots


class RegionReward(FrozenModel):
    """Weights of one slot's reward: a sum of weight x term, higher is better."""

    usd: Annotated[float, Field(ge=0)] = 1.0
    """Per dollar of energy, switching and lateness, over the energy bill of a slot with all servers
    at work at the mean price; negative in the reward."""
    response: Annotated[float, Field(ge=0)] = 0.0
    """Per mean response time over 20 s, negative in the reward."""
    transport: Annotated[float, Field(ge=0)] = 0.0
    """Per squared distance to the transport of the forecast, over 2 R; the paper's first term."""
    smoothness: Annotated[float, Field(ge=0)] = 0.0
    """Per squared step of the shares, over 2 R; lambda1 of the paper."""
    waiting: Annotated[float, Field(ge=0)] = 0.0
    """Per task that waits, over what all servers serve in a slot; lambda2 of the paper."""


PAPER_REWARD = RegionReward(usd=0.0, transport=1.0, smoothness=0.4, waiting=1.0)
"""Eq 3 of Du et al. 2025, arXiv 2507.10259v2. Distances are of row-normalised plans, over 2 R, so
that they mean the same for any R; the weights are picks."""


class RegionScenario(FrozenModel):
    """One regional experiment."""

    problem: Literal["regions"] = "regions"
    name: str
    description: str
    topology: str = "synthetic/continents"
    """A name of `tokenyard.regions.topology.load_topology`."""
    mean_latency_ms: Positive | None = None
    """Mean one-way latency between regions; None: geographic."""
    bandwidth_gbps: Positive = 10.0
    payload_mb: Annotated[float, Field(ge=0)] = 4.0
    """What moves with a task that is sent to another region, 1e6 bytes."""
    kinds: Mapping[str, ServerKind] = _KINDS
    server_counts: Mapping[str, Annotated[int, Field(ge=0)]] = {
        "H100": 30, "A100": 50, "RTX4090": 50, "V100": 70, "T4": 50,
    }  # fmt: skip
    """Servers of each kind in all regions together."""
    layout_seed: int = 1
    """Draws servers, prices and mean demands of regions; equal seeds are equal clusters."""
    mismatch_slowdown: Annotated[float, Field(ge=1)] = 1.25
    """Service time of a task on a server that is best at another type, over that of a match."""
    idle_power_fraction: Share = 0.15
    """Power of a server that is on and idle over its TDP."""
    slot_s: Positive = 45.0
    """Time between two decisions, seconds."""
    num_slots: Annotated[int, Field(ge=1)] = 480
    """Slots of an episode; by default six hours."""
    forecast_slots: Annotated[int, Field(ge=1, le=32)] = 8
    """Slots ahead for which demand is forecast."""
    demand: RegionDemand = RegionDemand()
    prices: Prices = Prices()
    micro: Micro = Micro()
    failures: tuple[RegionFailure, ...] = ()

    @model_validator(mode="after")
    def _kinds_are_known(self) -> Self:
        unknown = sorted(set(self.server_counts) - set(self.kinds))
        if unknown:
            raise ValueError(f"server kind {unknown[0]!r} is not one of {sorted(self.kinds)}")
        return self

    @property
    def slots_per_day(self) -> int:
        """Decisions of a day."""
        return max(1, round(86_400 / self.slot_s))

    @property
    def num_servers(self) -> int:
        """Servers in all regions."""
        return sum(self.server_counts.values())


def region_names() -> list[str]:
    """Names of the regional scenarios that ship with the package, sorted."""
    return shipped_names("tokenyard", _FOLDER)


def load_regions(name: str) -> RegionScenario:
    """Read a shipped regional scenario by name, or a YAML file by path.

    Raises:
        ValueError: Unknown name (with the closest one), or a file that does not fit the model.
    """
    fields = read_fields(name, "regional scenario", "tokenyard", _FOLDER)
    return fitted(RegionScenario, fields, f"regional scenario {name}")
