"""The two request routers of Ray Serve."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tokenyard.routing.policies.cost import cheapest_of, drawn_of, pair_of
from tokenyard.routing.policies.signals import longest_match, match_fraction, miss_tokens
from tokenyard.routing.types import ReplicaSnapshot, Request


class RayP2C:
    """Of two random replicas the one with fewer requests; those at capacity are passed over.

    At capacity: as many requests in flight as `max_concurrency` (`max_ongoing_requests`). While
    both of a pair are, another pair is drawn; where all replicas are, the first pair decides, as
    our requests cannot wait in the router. Of equals the one that was drawn first.

    Source: Ray 2.60, ray/serve/_private/request_router/pow_2_router.py.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the shorter queue of a random pair."""
        anywhere = any(has_room(s) for s in snapshots)
        while True:
            pair = pair_of(len(snapshots), self._rng)
            open_ones = [i for i in pair if has_room(snapshots[i])]
            if open_ones or not anywhere:
                return min(open_ones or pair, key=lambda i: snapshots[i].num_outstanding)


class RayPrefixAffinity:
    """Longest prefix while load is balanced, below 10 % the smallest tree, else two random ones.

    Imbalanced: the longest queue exceeds the shortest by more than `imbalanced_threshold`, infinity
    unless set. Of the replicas with the longest match, or with the smallest tree, the one with
    fewest requests is taken that has room; of equals one is drawn, where Ray takes the one that
    answers first. A tree is what this rule sent to a replica, tokens that missed its cache, without
    eviction, as in the source's default.

    Source: Ray 2.60, ray/llm/_internal/serve/routing_policies/prefix_aware/prefix_aware_router.py.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        imbalanced_threshold: float = float("inf"),
        match_rate_threshold: float = 0.1,
    ) -> None:
        """Draw from `rng` where load is imbalanced; follow `match_rate_threshold` of a prompt."""
        self._rng = rng
        self._two_choices = RayP2C(rng)
        self._imbalanced_threshold = imbalanced_threshold
        self._match_rate_threshold = match_rate_threshold
        self._tree_tokens: defaultdict[str, float] = defaultdict(float)

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the choice, and add what it misses to its tree."""
        chosen = self._choice(request, snapshots)
        snapshot = snapshots[chosen]
        self._tree_tokens[snapshot.replica_id] += miss_tokens(request, snapshot)
        return chosen

    def _choice(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        queues = [s.num_outstanding for s in snapshots]
        if max(queues) - min(queues) > self._imbalanced_threshold:
            return self._two_choices.route(request, snapshots)
        candidates = longest_match(request, snapshots)
        if match_fraction(request, snapshots[candidates[0]]) < self._match_rate_threshold:
            trees = [self._tree_tokens[s.replica_id] for s in snapshots]
            candidates = cheapest_of(range(len(snapshots)), trees)
        open_ones = [i for i in candidates if has_room(snapshots[i])]
        if not open_ones and any(has_room(s) for s in snapshots):
            # Ray tries again until one of them has room; a request of ours is placed now.
            return self._two_choices.route(request, snapshots)
        return drawn_of(cheapest_of(open_ones or candidates, queues), self._rng)


def has_room(snapshot: ReplicaSnapshot) -> bool:
    """Whether a replica has fewer requests than it may have at the same time."""
    return snapshot.num_outstanding < snapshot.max_concurrency
