"""What a router sees and decides."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload, runtime_checkable

from tokenyard.routing.sent_queues import SentQueues
from tokenyard.types import FloatArray


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
    due_s: float = math.inf
    """Longest acceptable time to the response, or to the first token where that has an SLO of its
    own, seconds from the arrival; infinity: none is known."""
    tenant: str = ""
    tenant_share: float = 1.0
    """Share of the service that the tenant is entitled to, in (0, 1]."""
    session_id: str = ""
    """Conversation or agent that it belongs to; empty: none is known."""
    turn: int = 0
    """Its place in the session, from 0 on."""
    held_s: float = 0.0
    """Wait at the gateway that is to be expected before a replica has room, seconds."""


# Snapshots are values, but not frozen: one is made of every replica at every decision, and a frozen
# one takes four times as long to make.
@dataclass(slots=True)
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


@dataclass(frozen=True, slots=True, eq=False)
class WaitingQueue:
    """Requests that this router sent to a replica and that have not started there."""

    order_keys_s: FloatArray
    """Keys that they wait by, seconds on the clock of arrivals, shape (num,); infinity, or minus
    infinity, for those of a priority after, or before, that of the request to be placed."""
    tokens: FloatArray
    """Predicted tokens of each, shape (num,); of replicas that batch those of the prompt."""


@dataclass(slots=True)
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
    queue: WaitingQueue | None = None
    """Set for policies that look at it (`OrderingPolicy.sees_queues`)."""

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


class SnapshotColumns(Sequence[ReplicaSnapshot]):
    """Snapshots of replicas of one kind, kept as columns of numbers.

    To index it makes a snapshot of one replica; to take a column costs nothing.
    """

    @abstractmethod
    def _snapshot(self, at: int) -> ReplicaSnapshot:
        """Make the snapshot of one replica."""

    @overload
    def __getitem__(self, at: int) -> ReplicaSnapshot: ...
    @overload
    def __getitem__(self, at: slice) -> list[ReplicaSnapshot]: ...
    def __getitem__(self, at: int | slice) -> ReplicaSnapshot | list[ReplicaSnapshot]:
        """A snapshot, or a list of some."""
        if isinstance(at, slice):
            return [self._snapshot(i) for i in range(*at.indices(len(self)))]
        return self._snapshot(range(len(self))[at])

    batches: bool = True
    """Whether the replicas batch continuously, all of them, or none."""
    sent: SentQueues | None = None
    """What the gateway that shows them has sent to replicas and may wait there; None: the policy
    remembers."""

    @property
    @abstractmethod
    def replica_ids(self) -> Sequence[str]:
        """Names of the replicas."""

    @property
    @abstractmethod
    def columns(self) -> FloatArray:
        """The table of `observation`, shape (num, NUM_COLUMNS); ranks and ages are not filled."""

    @property
    @abstractmethod
    def speed_ranks(self) -> FloatArray:
        """Rank of each replica by speed (`observation.speed_ranks`), shape (num,)."""

    @property
    @abstractmethod
    def observed_at_s(self) -> FloatArray:
        """Clock time of each observation, seconds, shape (num,)."""

    @abstractmethod
    def prompt_blocks(self, block_tokens: int) -> FloatArray:
        """Different blocks of this router's prompts in flight, with the one to be placed.

        A request is in flight from the decision to its last token. Prompts share the blocks of a
        common prefix, as far as the prefix cache's own blocks tell. A simulator counts them only
        for policies that say in which blocks (`counted_in`).

        Args:
            block_tokens: Tokens of a block.

        Returns:
            Blocks by replica, shape (num,); NaN where nobody counts prompts.
        """


class OrderKey(NamedTuple):
    """Place among the requests that wait at a replica: the lower key goes first.

    All times are in seconds on the clock of arrivals.
    """

    key_s: float
    late_at_s: float = math.inf
    """Where it has not begun by then, it waits by `late_key_s`; infinity: its place is for good."""
    late_key_s: float = math.inf
    """Never below `key_s`."""


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Where a request goes, and why."""

    replica: int
    """Index into the snapshots that were offered."""
    scores: FloatArray | None
    """Cost of every candidate, lower is better, shape (num,); None for policies that do not
    score."""
    order_key: OrderKey | None = None
    """Place among the requests that wait at the replica; None: behind them all."""


class RoutingPolicy(Protocol):
    """Chooses the replica that serves the next request.

    The same object decides in simulation and in production: it sees the request, the snapshots
    and what it remembers of its own earlier decisions, and nothing else. One object serves one
    stream of requests.
    """

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the index into `snapshots` of the replica that should serve `request`."""


@runtime_checkable
class ScoringPolicy(RoutingPolicy, Protocol):
    """A policy that picks the candidate of least cost, and can say what each would cost."""

    def decide(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the choice together with the cost of every candidate."""

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the index of the choice."""
        return self.decide(request, snapshots).replica


@runtime_checkable
class OrderingPolicy(RoutingPolicy, Protocol):
    """A policy that also says in which order its requests wait at the replica."""

    sees_queues: bool
    """Whether it looks at what waits, request by request."""

    def place(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the choice with its order key."""


def counted_in(policy: RoutingPolicy) -> int:
    """Return the size of a policy's prompt blocks, tokens; 0 if it does not count blocks.

    It is the attribute `prompt_block_tokens` of the policy, or of its placement.
    """
    placement = getattr(policy, "placement", policy)
    tokens: int = getattr(placement, "prompt_block_tokens", 0)
    return tokens
