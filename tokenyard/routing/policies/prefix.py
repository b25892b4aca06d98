"""Rules of public routers for replicas that batch and cache prefixes.

These routers take replicas for equal. Here a load counts relative to the replica's full speed:
among equals that changes nothing, and where GPUs differ the rules stay sensible. What their
sources leave to the operator is tuned. Replicas without `engine` have no prefixes: there the load
alone decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenyard.routing.policies.cost import LeastCost, cheapest
from tokenyard.routing.types import ReplicaSnapshot, Request

STICKY_MATCH_FRACTION = 0.8
"""Share of a prompt that has to be cached for its replica to be worth sticking to (llm-d)."""


def match_tokens(snapshot: ReplicaSnapshot) -> int:
    """Leading tokens of the request that are believed to be cached; 0 without `engine`."""
    return 0 if snapshot.engine is None else snapshot.engine.match_tokens


def token_load(request: Request, snapshot: ReplicaSnapshot) -> float:
    """Tokens in flight with those that the request would add, over the replica's full speed."""
    added = request.predicted_total_tokens - match_tokens(snapshot)
    return (snapshot.tokens_in_flight + added) / snapshot.full_tokens_per_s


def prefill_tokens(request: Request, snapshot: ReplicaSnapshot) -> float:
    """Prompt tokens that would be to compute at a replica, the request's own among them."""
    in_flight = 0.0 if snapshot.engine is None else snapshot.engine.prefill_in_flight_tokens
    return in_flight + request.context_tokens - match_tokens(snapshot)


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
        loads = [token_load(request, s) for s in snapshots]
        longest = max(match_tokens(s) for s in snapshots)
        matching = [i for i, s in enumerate(snapshots) if match_tokens(s) == longest]
        least, kept = cheapest(loads), min(matching, key=loads.__getitem__)
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
        sticky = [i for i, s in enumerate(snapshots) if self._sticks(request, s)]
        candidates = sticky or range(len(snapshots))
        return min(candidates, key=lambda i: token_load(request, snapshots[i]))

    def _sticks(self, request: Request, snapshot: ReplicaSnapshot) -> bool:
        if snapshot.engine is None:
            return False
        prefill_s = prefill_tokens(request, snapshot) * snapshot.engine.prefill_token_s
        enough = STICKY_MATCH_FRACTION * request.context_tokens
        return match_tokens(snapshot) >= enough and prefill_s <= self._saturated_s


class KvCost(LeastCost):
    """Weighs the prompt tokens left to compute against the KV memory in use.

    Source: the cost of NVIDIA Dynamo's KV router, overlap weight (1 unless set) x potential
    prefill blocks + potential decode blocks; tokens in place of blocks order replicas alike.
    """

    def __init__(self, overlap_weight: float) -> None:
        """Count a prompt token that is to be computed `overlap_weight` times."""
        self._overlap_weight = overlap_weight

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> list[float]:
        """Return weighted prefill plus KV tokens over full speed of every replica."""
        return [self._cost(request, s) for s in snapshots]

    def _cost(self, request: Request, snapshot: ReplicaSnapshot) -> float:
        engine = snapshot.engine
        if engine is None:
            return token_load(request, snapshot)
        kv_tokens = engine.kv_used_fraction * engine.kv_capacity_tokens + request.context_tokens
        weighted = self._overlap_weight * prefill_tokens(request, snapshot)
        return (weighted + kv_tokens) / snapshot.full_tokens_per_s


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

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> list[float]:
        """Return minus the weighted sum of the scores of every replica."""
        queues = [(s.num_outstanding + 1) / s.full_tokens_per_s for s in snapshots]
        shortest, longest = min(queues), max(queues)
        spread = (longest - shortest) or 1.0
        return [
            -(
                self._queue_weight * (longest - queue) / spread
                + self._kv_weight * _kv_free_fraction(snapshot)
                + self._prefix_weight * match_tokens(snapshot) / request.context_tokens
            )
            for queue, snapshot in zip(queues, snapshots, strict=True)
        ]


def _kv_free_fraction(snapshot: ReplicaSnapshot) -> float:
    return 1.0 if snapshot.engine is None else 1.0 - snapshot.engine.kv_used_fraction
