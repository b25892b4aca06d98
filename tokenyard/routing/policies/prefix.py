"""Rules of public routers for replicas that batch and cache prefixes.

These routers take replicas for equal. Here a load counts relative to the replica's full speed:
among equals that changes nothing, and where GPUs differ the rules stay sensible. What their
sources leave to the operator is tuned. Replicas without `engine` have no prefixes: there the load
alone decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenyard.routing import observation as ob
from tokenyard.routing.policies.backlog import relative_queues
from tokenyard.routing.policies.cost import LeastCost
from tokenyard.routing.types import ReplicaSnapshot, Request
from tokenyard.types import FloatArray

STICKY_MATCH_FRACTION = 0.8
"""Share of a prompt that has to be cached for its replica to be worth sticking to (llm-d)."""


def full_tokens_per_s(columns: FloatArray) -> FloatArray:
    """Rate of every replica with every slot at work, tokens per second."""
    return columns[:, ob.TOKENS_PER_S] * columns[:, ob.NUM_SLOTS]


def token_loads(request: Request, columns: FloatArray) -> FloatArray:
    """Tokens in flight with those that the request would add, over the replica's full speed."""
    added = request.predicted_total_tokens - columns[:, ob.MATCH_TOKENS]
    return (columns[:, ob.TOKENS_IN_FLIGHT] + added) / full_tokens_per_s(columns)


def tokens_to_prefill(request: Request, columns: FloatArray) -> FloatArray:
    """Prompt tokens that would be to compute at every replica, the request's own among them."""
    in_flight = columns[:, ob.PREFILL_IN_FLIGHT]
    return in_flight + request.context_tokens - columns[:, ob.MATCH_TOKENS]


class PrefixAffinity:
    """Joins the replica with the longest prefix, unless it has much more to do than the least.

    Source: the `cache_aware` policy of the vLLM router and of the SGLang gateway, whose ratio is
    1.5 unless set; Ray Serve's PrefixCacheAffinityRouter guards against imbalance likewise.
    """

    def __init__(self, load_ratio: float) -> None:
        """Leave the prefix where `token_load` is above `load_ratio` times the least."""
        self._load_ratio = load_ratio

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the least loaded of those with the longest prefix, or of all."""
        columns = ob.unranked_columns(snapshots)
        loads, matches = token_loads(request, columns), columns[:, ob.MATCH_TOKENS]
        least = int(loads.argmin())
        kept = int(np.where(matches == matches.max(), loads, np.inf).argmin())
        return kept if loads[kept] <= self._load_ratio * loads[least] else least


class StickyUntilSaturated:
    """Stays with replicas that have most of the prompt until their prefill is saturated.

    Source: llm-d, "Sticky until saturated: token-aware routing", 2026. It is saturated when the
    uncached prompt tokens in flight take longer than the one penalty on the time to the first
    token that is tuned; llm-d writes the same as peak prefill throughput times penalty.
    """

    def __init__(self, saturated_s: float) -> None:
        """Leave replicas with more than `saturated_s` seconds of prefill in flight."""
        self._saturated_s = saturated_s

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the least loaded of the replicas to stick to, or of all where there is none."""
        columns = ob.unranked_columns(snapshots)
        loads, sticky = token_loads(request, columns), self._sticks(request, columns)
        return int((np.where(sticky, loads, np.inf) if sticky.any() else loads).argmin())

    def _sticks(self, request: Request, columns: FloatArray) -> npt.NDArray[np.bool_]:
        prefill_s = tokens_to_prefill(request, columns) * columns[:, ob.PREFILL_TOKEN_S]
        enough = STICKY_MATCH_FRACTION * request.context_tokens
        sticks = (columns[:, ob.MATCH_TOKENS] >= enough) & (prefill_s <= self._saturated_s)
        return sticks & (columns[:, ob.ITERATION_S] > 0.0)


class KvCost(LeastCost):
    """Weighs the prompt tokens left to compute against the KV memory in use.

    Source: the cost of NVIDIA Dynamo's KV router, overlap weight (1 unless set) x potential
    prefill blocks + potential decode blocks; tokens in place of blocks order replicas alike.
    """

    def __init__(self, overlap_weight: float) -> None:
        """Count a prompt token that is to be computed `overlap_weight` times."""
        self._overlap_weight = overlap_weight

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return weighted prefill plus KV tokens over full speed of every replica."""
        columns = ob.unranked_columns(snapshots)
        kv_tokens = columns[:, ob.KV_USED_FRACTION] * columns[:, ob.KV_CAPACITY_TOKENS]
        weighted = self._overlap_weight * tokens_to_prefill(request, columns)
        costs = (weighted + (kv_tokens + request.context_tokens)) / full_tokens_per_s(columns)
        batches = columns[:, ob.ITERATION_S] > 0.0
        return costs if batches.all() else np.where(batches, costs, token_loads(request, columns))


class WeightedScorers(LeastCost):
    """Adds up scores between 0 and 1 for a short queue, free KV memory and a cached prefix.

    Source: llm-d's scheduler, with weights 2, 2, 3 unless set. The queue is what is in flight
    (its active-request scorer), scaled from 0 at the longest to 1 at the shortest.
    """

    def __init__(self, queue_weight: float, kv_weight: float, prefix_weight: float) -> None:
        """Weigh the three scores; only their proportions matter."""
        self._queue_weight = queue_weight
        self._kv_weight = kv_weight
        self._prefix_weight = prefix_weight

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return minus the weighted sum of the scores of every replica."""
        columns = ob.unranked_columns(snapshots)
        queues = relative_queues(columns)
        shortest, longest = queues.min(), queues.max()
        spread = (longest - shortest) or 1.0
        scores: FloatArray = (
            self._queue_weight * (longest - queues) / spread
            + self._kv_weight * (1.0 - columns[:, ob.KV_USED_FRACTION])
            + self._prefix_weight * columns[:, ob.MATCH_TOKENS] / request.context_tokens
        )
        return -scores
