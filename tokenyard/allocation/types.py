"""What an allocator sees and decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import Field

Parallelism = Annotated[str, Field(pattern=r"^(data|model|(hybrid_tp|pipeline_)[1-9]\d*)$")]
"""How GPUs share the work: `data`: a copy of the model on each; `model`: one copy over all of them
(tensor parallelism); `hybrid_tp2`, `hybrid_tp4`, ..: several copies on so many GPUs each;
`pipeline_2`, ..: copies of so many pipeline stages, each on a GPU."""


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
        if self.parallelism == "model":
            return self.num_gpus
        return _degree(self.parallelism, "hybrid_tp")

    @property
    def pipeline_parallel(self) -> int:
        """Stages that the layers of a replica are divided into, each on a GPU of its own."""
        return _degree(self.parallelism, "pipeline_")

    @property
    def replica_gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return self.num_gpus // self.replica_gpus


def _degree(parallelism: str, prefix: str) -> int:
    return int(parallelism.removeprefix(prefix)) if parallelism.startswith(prefix) else 1


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
