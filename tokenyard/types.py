"""The few types that the simulator, the policies and the server all speak."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objective (SLO) of a request."""

    response_s: float = 2.0
    """Longest acceptable end-to-end response time, seconds."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a router may know about the request it must place.

    The true output length is not among the fields: it is only known once the request is done.
    """

    arrival_s: float
    """Clock time of arrival, seconds."""
    context_tokens: int
    """Prompt length, tokens."""
    predicted_total_tokens: float
    """Context plus predicted output, tokens; the context alone where nothing is predicted."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What a router may know of a replica that batches continuously, beyond its queue.

    An iteration of the engine takes `iteration_s + prefill_token_s x prompt tokens computed +
    sequence_s x sequences decoding + kv_token_s x tokens of KV read`.
    """

    iteration_s: float
    prefill_token_s: float
    sequence_s: float
    kv_token_s: float
    token_budget: int
    """Most tokens computed in one iteration (vLLM: max_num_batched_tokens)."""
    kv_capacity_tokens: float
    kv_used_fraction: float
    """Share of the KV memory that requests hold (vLLM: gpu_cache_usage_perc)."""
    prefill_in_flight_tokens: float
    """Prompt tokens, of requests in flight, that are believed to be still to compute."""
    output_in_flight_tokens: float
    """Predicted tokens that the requests in flight have still to generate."""
    match_tokens: int
    """Leading tokens of the request to be placed that are believed to be in the prefix cache."""


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """What a router may know about one replica, as of `observed_at_s`."""

    replica_id: str
    tokens_per_s: float
    """Rate at which the replica works through one request, tokens per second."""
    num_slots: int
    """Requests that the replica works on at the same time, each at `tokens_per_s`."""
    max_concurrency: int
    """Waiting plus running requests from which on the replica counts as at capacity."""
    num_waiting: int
    """Requests queued and not yet started (vLLM: num_requests_waiting)."""
    num_running: int
    """Requests being worked on (vLLM: num_requests_running)."""
    tokens_in_flight: float
    """Predicted tokens of all requests that are waiting or running."""
    predicted_wait_s: float = math.nan
    """Time until a request sent now would start, seconds; NaN: derived from tokens in flight."""
    mean_response_s: float = math.nan
    """Mean response time of recent completions, seconds; NaN before the first."""
    observed_at_s: float = 0.0
    """Clock time of the observation, seconds; older than now when metrics are scraped."""
    engine: EngineSnapshot | None = None
    """Set for replicas that batch continuously."""

    @property
    def num_outstanding(self) -> int:
        """Requests accepted and not finished: waiting plus running."""
        return self.num_waiting + self.num_running

    @property
    def full_tokens_per_s(self) -> float:
        """Rate with every slot at work, tokens per second."""
        return self.tokens_per_s * self.num_slots

    @property
    def wait_s(self) -> float:
        """`predicted_wait_s`, or the backlog over the replica's full speed where that is NaN."""
        if not math.isnan(self.predicted_wait_s):
            return self.predicted_wait_s
        if self.num_outstanding < self.num_slots:
            return 0.0
        return self.tokens_in_flight / self.full_tokens_per_s


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why."""

    replica: int
    """Index into the snapshots that were offered."""
    scores: tuple[float, ...] | None
    """Cost of every candidate, lower is better; None for policies that do not score."""


class RoutingPolicy(Protocol):
    """Chooses the replica that serves the next request.

    The same object decides in simulation and in production: it sees the request, the snapshots
    and what it remembers of its own earlier decisions, and nothing else. One object serves one
    stream of requests.
    """

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the index into `snapshots` of the replica that should serve `request`."""
        ...


@runtime_checkable
class ScoringPolicy(RoutingPolicy, Protocol):
    """A policy that picks the candidate of least cost, and can say what each would cost."""

    def decide(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the choice together with the cost of every candidate."""
        ...


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
