"""Rules that weigh the prompt tokens to compute: LMetric, Llumnix's pending prefill, SMetric."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenyard.routing.policies import signals
from tokenyard.routing.policies.cost import LeastCost
from tokenyard.routing.types import ReplicaSnapshot, Request
from tokenyard.types import FloatArray, Slo


class LMetric(LeastCost):
    """Least `new prefill tokens x (requests in flight + 1)`; no parameter.

    Ties go to the fewest requests in flight, then the fewest new tokens, then the first. The prefix
    is that of our snapshot, where the gateway's comes from a tree of its own, in characters.

    Source: Blitz Router, arXiv:2603.15202 (OSDI 2026); sgl-project/sglang,
    sgl-model-gateway/src/policies/lmetric.rs (acaa759).
    """

    def __init__(self, by_speed: float = 0.0) -> None:
        """Take replicas for equal, as the source does, or count load `by_speed`."""
        self._by_speed = by_speed

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return the product at every replica, token-requests."""
        return np.array(
            [
                signals.miss_tokens(request, s)
                * (s.num_outstanding + 1)
                * signals.unit_of_load(s, self._by_speed)
                for s in snapshots
            ]
        )

    def pick(
        self, costs: FloatArray, request: Request, snapshots: Sequence[ReplicaSnapshot]
    ) -> int:
        """Return the first of least cost, requests in flight and new tokens, in this order."""
        return min(
            range(len(costs)),
            key=lambda i: (
                costs[i], snapshots[i].num_outstanding, signals.miss_tokens(request, snapshots[i]),
            ),
        )  # fmt: skip


class PendingPrefill(LeastCost):
    """Least `pending prefill tokens + prompt tokens that miss the cache`; no parameter.

    Ties go to the fewest requests in flight, then the first. Pending tokens are our snapshot's,
    where Llumnix asks its engines.

    Source: llumnix-project/llumnix, docs/source/design/scheduler/cache_aware_scheduling.md
    (`cache_aware_all_prefills_tokens_num`, the default); gahow/agentic-kvc calls it LPWL.
    """

    def __init__(self, by_speed: float = 0.0) -> None:
        """Take replicas for equal, as the source does, or count load `by_speed`."""
        self._by_speed = by_speed

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return the prompt tokens to compute at every replica, the request's own included."""
        return np.array(
            [
                (signals.prefill_in_flight_tokens(s) + signals.miss_tokens(request, s))
                * signals.unit_of_load(s, self._by_speed)
                for s in snapshots
            ]
        )

    def pick(
        self, costs: FloatArray, request: Request, snapshots: Sequence[ReplicaSnapshot]
    ) -> int:
        """Return the first of least cost and requests in flight."""
        return min(range(len(costs)), key=lambda i: (costs[i], snapshots[i].num_outstanding))


class SMetric:
    """Stays with the longest prefix while its first token is in time, else least queued work.

    A request that misses n of L tokens is n x (1 + c_att x (L - n / 2)) tokens of work. It stays
    if its longest hit is above `hit_ratio` of the expected hit, and the work queued there is done
    within `slack` x the SLO, or is so nowhere. Else it goes to the least
    `queued work x requests in flight` (colocated prefill and decode). Candidates are tried in a
    circle whose start moves on by one for each request; the first of equals is taken.

    Ours: the expected hit of a turn is the longest hit anywhere, as not all requests name their
    session; the work queued is the prefill in flight; the rate is the replica's own, which the
    source learns as p90 of its last 64 samples; the SLO of the first token is that of the response.
    The source ships no defaults: these are those of its tests.

    Source: vllm-project/router, src/policies/smetric.rs (8bef731).
    """

    def __init__(
        self,
        slo: Slo,
        hit_ratio: float = 0.5,
        slack: float = 1.0,
        c_att: float = 0.0,
    ) -> None:
        """Ask for `hit_ratio` of the expected hit, and for the first token in `slack` x `slo`."""
        self._limit_s = slack * slo.response_s
        self._hit_ratio = hit_ratio
        self._c_att = c_att
        self._start = 0

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the replica of the longest prefix, or that of least queued work."""
        num = len(snapshots)
        circle = [(self._start + i) % num for i in range(num)]
        self._start = (self._start + 1) % num
        queued = [self._queued(request, s) for s in snapshots]
        in_time = [
            work * signals.prefill_token_s(s) <= self._limit_s
            for work, s in zip(queued, snapshots, strict=True)
        ]
        hits = [signals.match_tokens(request, s) for s in snapshots]
        kept = max(circle, key=hits.__getitem__)
        if hits[kept] > self._hit_ratio * max(hits) and (in_time[kept] or not any(in_time)):
            return kept
        return min(circle, key=lambda i: queued[i] * snapshots[i].num_outstanding)

    def _queued(self, request: Request, snapshot: ReplicaSnapshot) -> float:
        num_new = signals.miss_tokens(request, snapshot)
        work = num_new * (1.0 + self._c_att * (request.context_tokens - num_new / 2))
        return signals.prefill_in_flight_tokens(snapshot) + work
