"""What policies have in common that send each request to the candidate of least cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tokenyard.routing.types import Decision, ReplicaSnapshot, Request


def cheapest(costs: Sequence[float]) -> int:
    """Index of the least cost, the first of equals: replicas keep the order they are offered in."""
    return min(range(len(costs)), key=costs.__getitem__)


class LeastCost(ABC):
    """Sends each request to the replica of least `costs`."""

    @abstractmethod
    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> list[float]:
        """Return the cost of every candidate, lower is better."""

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the index of the cheapest candidate."""
        return cheapest(self.costs(request, snapshots))

    def decide(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the cheapest candidate together with the cost of each."""
        costs = self.costs(request, snapshots)
        return Decision(cheapest(costs), tuple(costs))
