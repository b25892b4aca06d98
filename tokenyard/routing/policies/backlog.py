"""Rules that join the replica with the least work, each with its own measure of work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenyard.routing import observation as ob
from tokenyard.routing.policies.cost import LeastCost, pair_of
from tokenyard.routing.policies.signals import match_tokens
from tokenyard.routing.types import ReplicaSnapshot, Request
from tokenyard.types import FloatArray


def relative_queues(columns: FloatArray) -> FloatArray:
    """Outstanding requests, the one to be placed included, per token per second of full speed."""
    outstanding = columns[:, ob.NUM_WAITING] + columns[:, ob.NUM_RUNNING]
    return (outstanding + 1.0) / (columns[:, ob.TOKENS_PER_S] * columns[:, ob.NUM_SLOTS])


class LeastConnections(LeastCost):
    """Joins the replica with the fewest outstanding requests."""

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return the outstanding requests of every replica."""
        columns = ob.unranked_columns(snapshots)
        return columns[:, ob.NUM_WAITING] + columns[:, ob.NUM_RUNNING]


class WeightedLeastConnections(LeastCost):
    """Joins the replica with the fewest outstanding requests for its full speed.

    The request itself is counted in, so that of idle replicas the fastest is taken.
    """

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return outstanding requests, this one included, per token per second."""
        return relative_queues(ob.unranked_columns(snapshots))


class LeastLoaded(LeastCost):
    """Joins the replica with the fewest tokens in flight (Abbaraju, section V)."""

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return the tokens in flight of every replica."""
        return ob.unranked_columns(snapshots)[:, ob.TOKENS_IN_FLIGHT].copy()


class WeightedLeastLoaded(LeastCost):
    """Joins the replica with the fewest tokens in flight for its full speed.

    The request's own tokens are counted in, but for those that are cached there.
    """

    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return the seconds that the tokens in flight take at full speed, at every replica."""
        total = request.predicted_total_tokens
        return np.array(
            [
                (s.tokens_in_flight + total - match_tokens(request, s)) / s.full_tokens_per_s
                for s in snapshots
            ]
        )


class PowerOfTwoChoices:
    """Samples two replicas and joins the shorter queue (Mitzenmacher 2001, d = 2)."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the shorter queue of two distinct replicas drawn uniformly."""
        if len(snapshots) == 1:
            return 0
        pair = sorted(pair_of(len(snapshots), self._rng))
        return min(pair, key=lambda i: snapshots[i].num_outstanding)
