"""What an allocator sees and decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Parallelism = Literal["data", "model", "hybrid_tp2", "hybrid_tp4"]
"""How GPUs share the work: `data`: a copy of the model on each; `model`: one copy over all of them
(tensor parallelism); `hybrid_tp2`, `hybrid_tp4`: several copies on two or on four GPUs each."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a pool of GPUs serves one model."""

    parallelism: Parallelism
    num_gpus: int
    memory_fraction: float
    """Share of each GPU's memory that the engine may fill, in (0, 1]."""
    max_batch: int = 256
    """Sequences that a replica decodes at once at most."""

    @property
    def tensor_parallel(self) -> int:
        """GPUs that share every layer of a replica."""
        by_name = {"data": 1, "model": self.num_gpus, "hybrid_tp2": 2, "hybrid_tp4": 4}
        return by_name[self.parallelism]

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return self.num_gpus // self.tensor_parallel


@dataclass(frozen=True, slots=True)
class SlotMeasurements:
    """What was measured over the last slot; all 0 before the first.

    The first four, with the plan's memory, are the state of the allocation paper (Dadizadeh
    Dargiry 2026).
    """

    load: float = 0.0
    """Share of the plan's highest rate of requests that was served."""
    batch_share: float = 0.0
    """Sequences that decoded at once over the limit on them."""
    latency_s: float = 0.0
    """Mean end-to-end time of a request."""
    network_share: float = 0.0
    """Share of the time spent in collective operations."""
    paused_s: float = 0.0
    """Time without service."""
    violation_fraction: float = 0.0
    """Share of the slot's requests that were dropped or violated the SLO."""


@dataclass(frozen=True, slots=True)
class AllocationState:
    """What an allocator may know when it decides the plan of the next slot.

    The demand of that slot is not among the fields: it is only known once the slot is over.
    """

    time_s: float
    """Seconds since a midnight."""
    plan: Plan
    """The plan in force."""
    demand_per_s: tuple[float, ...]
    """Requests per second that were offered in past slots, the latest last; never empty."""
    backlog_requests: float = 0.0
    """Requests that wait."""
    slots_since_switch: int = 1_000_000
    """Slots for which the plan has been in force."""
    switches_left: int | None = None
    """Changes of plan that the budget still allows in this period; None: any number."""
    may_switch: bool = True
    """Whether budget and hysteresis allow another plan now."""
    budget_left: float = 1.0
    """Share of the budget's changes that is left; 1 where there is no budget."""
    measured: SlotMeasurements = SlotMeasurements()


class AllocationPolicy(Protocol):
    """Chooses the plan of the next slot.

    The same object decides in simulation and in production: it sees states, and nothing else.
    """

    def allocate(self, state: AllocationState) -> Plan:
        """Return the plan to be in force in the next slot."""
        ...
