"""The policy `cache_aware` of three gateways: vLLM's router, SGLang's, and smg."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokenyard.routing.policies.cost import cheapest, cheapest_of
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
    """`SglangCacheAware` whose tree names the replica that was sent to last; same defaults.

    Of replicas with the longest match it takes the one that this rule chose last, else the first.

    Source: vllm-project/router, src/policies/cache_aware.rs (16917f4), a fork of SGLang's, and
    `router_args.py` of vllm-router 0.1.17.
    """

    def __init__(
        self,
        cache_threshold: float = 0.3,
        balance_abs_threshold: float = 64.0,
        balance_rel_threshold: float = 1.5,
    ) -> None:
        """Begin without a replica that was chosen last."""
        super().__init__(cache_threshold, balance_abs_threshold, balance_rel_threshold)
        self._num_routed = 0
        self._chosen_at: dict[str, int] = {}

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the choice, and remember it."""
        chosen = super().route(request, snapshots)
        self._num_routed += 1
        self._chosen_at[snapshots[chosen].replica_id] = self._num_routed
        return chosen

    def holder(self, longest: Sequence[int], snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the one of the replicas with the longest match that was chosen last."""
        return max(longest, key=lambda i: self._chosen_at.get(snapshots[i].replica_id, 0))


class SmgSpill(_Thresholds):
    """Follows the longest prefix, but spills from replicas that are far above the mean load.

    A replica is gated when its requests in flight are above the mean by more than
    `min(max(64, 0.5 x mean), max(4, 2 x sqrt(mean)))`. Of the replicas with the longest match, if
    that is above 0.3 of the prompt, those that are not gated are candidates; if all are gated, all
    that are not gated anywhere are, else all. Without a match all are. The candidate of least
    expected wait is taken, the first of equals.

    Ours: the expected wait is our snapshot's, where smg divides the queue that it polls by a rate;
    the swing that its margin is capped at, two standard deviations, is that of a Poisson count.

    Source: smg-project/smg, model_gateway/src/policies/cache_aware.rs (04def28), defaults and cap
    of smg 1.13.0.
    """

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the candidate of least expected wait."""
        waits = [s.wait_s for s in snapshots]
        candidates = self._candidates(request, snapshots)
        return cheapest_of(candidates, waits)[0]

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
        margin = max(self._balance_abs, (self._balance_rel - 1.0) * mean)
        return mean + min(margin, max(4.0, 2.0 * math.sqrt(mean)))
