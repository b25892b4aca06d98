"""Rules that look neither at the request nor at the load of the replicas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenyard.routing.types import ReplicaSnapshot, Request


class RoundRobin:
    """Takes the replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the replica after the one that was chosen last."""
        chosen = self._next % len(snapshots)
        self._next = chosen + 1
        return chosen


class Random:
    """Takes every replica with equal probability."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return a replica drawn uniformly."""
        return int(self._rng.integers(len(snapshots)))


class WeightedRandom:
    """Takes a replica with probability proportional to its full speed, over all its slots."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return a replica drawn by full speed."""
        left = self._rng.random() * sum(s.full_tokens_per_s for s in snapshots)
        for index, snapshot in enumerate(snapshots):
            left -= snapshot.full_tokens_per_s
            if left < 0:
                return index
        # Rounding may leave a hair's breadth at the end of the last replica's share.
        return len(snapshots) - 1
