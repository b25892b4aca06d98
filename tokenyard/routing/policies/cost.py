"""What policies have in common that send each request to the candidate of least cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from tokenyard.routing.types import Decision, ReplicaSnapshot, Request
from tokenyard.types import FloatArray


def cheapest(costs: Sequence[float] | FloatArray) -> int:
    """Index of the least cost, the first of equals: replicas keep the order they are offered in."""
    return int(np.argmin(costs))


def cheapest_of(candidates: Iterable[int], costs: Sequence[float] | FloatArray) -> list[int]:
    """All of the candidates that have the least cost among them, in their order."""
    listed = list(candidates)
    least = min(costs[i] for i in listed)
    return [i for i in listed if costs[i] == least]


def drawn_of(candidates: Sequence[int], rng: np.random.Generator) -> int:
    """One of the candidates, each with equal probability."""
    return candidates[int(rng.integers(len(candidates)))] if len(candidates) > 1 else candidates[0]


def drawn_by(candidates: Sequence[int], weights: Iterable[float], rng: np.random.Generator) -> int:
    """One of the candidates, in proportion to its weight, at least one of which is above 0."""
    # The draw of `rng.choice(candidates, p=...)`; its checks take five times as long.
    sums = list(accumulate(weights))
    return candidates[bisect_right(sums, rng.random() * sums[-1], hi=len(sums) - 1)]


def pair_of(num: int, rng: np.random.Generator) -> list[int]:
    """Two distinct indices below `num`, drawn uniformly; the only one of one."""
    first = int(rng.integers(num))
    if num == 1:
        return [first]
    second = int(rng.integers(num - 1))
    return [first, second + (second >= first)]


class RoundRobinTies:
    """Breaks ties in turn: of equals, the one after the one that the last tie was broken for."""

    def __init__(self) -> None:
        self._num_ties = 0

    def one_of(self, equals: Sequence[int]) -> int:
        """One of the equals; a single one takes no turn."""
        if len(equals) == 1:
            return equals[0]
        chosen = equals[self._num_ties % len(equals)]
        self._num_ties += 1
        return chosen


class LeastCost(ABC):
    """Sends each request to the replica of least `costs`."""

    @abstractmethod
    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return the cost of every candidate, lower is better, shape (num_replicas,)."""

    def pick(
        self, costs: FloatArray, request: Request, snapshots: Sequence[ReplicaSnapshot]
    ) -> int:
        """Return one of the cheapest; of equals the first, unless the rule breaks ties its way."""
        return cheapest(costs)

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the index of the cheapest candidate."""
        return self.pick(self.costs(request, snapshots), request, snapshots)

    def decide(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the cheapest candidate together with the cost of each."""
        costs = self.costs(request, snapshots)
        return Decision(self.pick(costs, request, snapshots), costs)
