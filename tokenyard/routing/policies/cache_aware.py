"""The policy `cache_aware` of three gateways: vLLM's router, SGLang's, and smg."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tokenyard.routing.policies.cost import cheapest, cheapest_of, drawn_of
from tokenyard.routing.policies.signals import longest_match, match_fraction
from tokenyard.routing.types import ReplicaSnapshot, Request


class _Thresholds:
    """What rules named `cache_aware` compare matches and loads with."""

    def __init__(
        self,
        cache_threshold: float = 0.3,
        balance_abs_threshold: float = 64.0,
        balance_rel_threshold: float = 1.5,
    ) -> None:
        """Follow a match above `cache_threshold`; leave it at both thresholds of balance."""
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs_threshold
        self._balance_rel = balance_rel_threshold


class SglangCacheAware(_Thresholds):
    """Follows the longest prefix while load is balanced and it is long enough, else least requests.

    Imbalanced: `max - min > 64 and max > 1.5 x min` requests in flight; then the least. Balanced: a
    replica with the longest match if it is above 0.3 of the prompt, else the least. Ties go to the
    first. Matches are our snapshot's, in place of a tree of characters, which keeps any one of the
    replicas of a prefix: here the first.

    Source: sgl-project/sglang, sgl-model-gateway/src/policies/cache_aware.rs (053b63f), defaults of
    sglang-router 0.3.2. Below the threshold it takes the least requests, not the smallest tree.
    """

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return a replica with the longest match, or the one with the fewest requests."""
        loads = [float(s.num_outstanding) for s in snapshots]
        apart = max(loads) - min(loads) > self._balance_abs
        if apart and max(loads) > self._balance_rel * min(loads):
            return cheapest(loads)
        longest = longest_match(request, snapshots)
        if match_fraction(request, snapshots[longest[0]]) > self._cache_threshold:
            return self.holder(longest, snapshots)
        return cheapest(loads)

    def holder(self, longest: Sequence[int], snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the one of the replicas with the longest match that the tree names."""
        return longest[0]


class VllmCacheAware(SglangCacheAware):
    """`SglangCacheAware`, but of the replicas with the longest match it takes the least requests.

    Ties go to the first; same defaults.

    Source: picks of vllm-router 0.1.17, whose tree names all replicas of a prefix where the stored
    src/policies/cache_aware.rs (16917f4) still named one: docs/results/fidelity.md.
    """

    def holder(self, longest: Sequence[int], snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the one of the replicas with the longest match that has the fewest requests."""
        return cheapest_of(longest, [s.num_outstanding for s in snapshots])[0]


class SmgSpill(_Thresholds):
    """Follows the longest prefix, but spills from replicas that are far above the mean load.

    A replica is gated when its requests in flight are above 1.5 x mean and above the mean by more
    than `min(64, max(4, ceil(2 x sqrt(mean))))`. Of the replicas with the longest match, if
    that is above 0.3 of the prompt, those that are not gated are candidates; if all are gated, all
    that are not gated anywhere are, else all. Without a match all are. The candidate of least
    expected wait is taken; of equals one is drawn.

    Ours: the expected wait is our snapshot's, where smg divides the queue that it polls by a rate.

    Source: smg-project/smg, model_gateway/src/policies/{cache_aware,least_load}.rs (04def28),
    defaults of smg 1.13.0; the cap, two standard deviations of a Poisson count, is newer than the
    stored source and comes from picks of the binary: docs/results/fidelity.md.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        cache_threshold: float = 0.3,
        balance_abs_threshold: float = 64.0,
        balance_rel_threshold: float = 1.5,
    ) -> None:
        super().__init__(cache_threshold, balance_abs_threshold, balance_rel_threshold)
        self._rng = rng

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return a candidate of least expected wait."""
        waits = [s.wait_s for s in snapshots]
        candidates = self._candidates(request, snapshots)
        return drawn_of(cheapest_of(candidates, waits), self._rng)

    def _candidates(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Sequence[int]:
        everyone = range(len(snapshots))
        longest = longest_match(request, snapshots)
        if match_fraction(request, snapshots[longest[0]]) <= self._cache_threshold:
            return everyone
        most = self._most_requests(snapshots)
        calm = [i for i in everyone if snapshots[i].num_outstanding <= most]
        return [i for i in longest if i in calm] or calm or everyone

    def _most_requests(self, snapshots: Sequence[ReplicaSnapshot]) -> float:
        mean = sum(s.num_outstanding for s in snapshots) / len(snapshots)
        swing = max(4.0, math.ceil(2.0 * math.sqrt(mean)))
        return max(self._balance_rel * mean, mean + min(self._balance_abs, swing))
