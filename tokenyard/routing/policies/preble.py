"""Preble's E2, and production-stack's loadaware: cached prefixes against load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenyard.routing.policies import signals
from tokenyard.routing.policies.cost import LeastCost, cheapest_of
from tokenyard.routing.policies.recent import RecentCost
from tokenyard.routing.types import ReplicaSnapshot, Request
from tokenyard.types import FloatArray


class PrebleE2:
    """Exploits the longest prefix if it is longer than the rest of the prompt, else explores.

    Cost of a replica: load L, prefill seconds of what was missed and decode seconds of the requests
    sent there in the last 3 minutes; eviction M, prefill seconds of the tokens that do not fit in
    its KV memory; own prefill P, of what would be missed. Exploiting, the least cost among the
    replicas with the longest match; exploring, the least of all. Ties go to the first.

    Ours: L takes predicted outputs at the replica's speed, M has no hit rates of what is evicted;
    Preble's moves of hot prefixes after the choice, and its autoscaling of them, are left out.

    Source: Preble, arXiv:2407.00023 (ICLR 2025), section 4; github WukLab/preble.
    """

    def __init__(self, window_s: float = 180.0) -> None:
        self._recent = RecentCost(window_s)

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the choice, and add its work to the load."""
        self._recent.forget_until(request.arrival_s)
        costs = [self._cost_s(request, s) for s in snapshots]
        longest = signals.longest_match(request, snapshots)
        cached = signals.match_tokens(request, snapshots[longest[0]])
        exploits = cached > request.context_tokens - cached
        chosen = cheapest_of(longest if exploits else range(len(costs)), costs)[0]
        work_s = _own_s(request, snapshots[chosen])
        self._recent.add(request.arrival_s, snapshots[chosen].replica_id, work_s)
        return chosen

    def _cost_s(self, request: Request, snapshot: ReplicaSnapshot) -> float:
        token_s, missed = signals.prefill_token_s(snapshot), signals.miss_tokens(request, snapshot)
        engine = snapshot.engine
        evicted = 0.0
        if engine is not None:
            free = (1.0 - engine.kv_used_fraction) * engine.kv_capacity_tokens
            evicted = max(0.0, missed - free)
        return self._recent.total(snapshot.replica_id) + (evicted + missed) * token_s


def _own_s(request: Request, snapshot: ReplicaSnapshot) -> float:
    """Seconds that the request takes of a replica: what it misses, and its output."""
    outputs = request.predicted_total_tokens - request.context_tokens
    prefill_s = signals.miss_tokens(request, snapshot) * signals.prefill_token_s(snapshot)
    return prefill_s + outputs / snapshot.full_tokens_per_s


class LoadAware(LeastCost):
    """Most `share of the prompt cached - beta x (requests - mean) / max(1, mean)`, beta = 1.

    Ties go to the first. Where no replica has any of the prompt, the source takes the fewest
    requests per second: the least of the same cost here.

    Source: vllm-project/production-stack, src/vllm_router/routers/routing_logic.py, PR 1035.
    """

    def __init__(self, beta: float = 1.0) -> None:
        self._beta = beta

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return minus the score of every replica."""
        mean = sum(s.num_outstanding for s in snapshots) / len(snapshots)
        return np.array(
            [
                self._beta * (s.num_outstanding - mean) / max(1.0, mean)
                - signals.match_fraction(request, s)
                for s in snapshots
            ]
        )
