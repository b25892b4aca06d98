"""What policies have in common that send each request to the candidate of least cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tokenyard.routing.types import Decision, ReplicaSnapshot, Request
from tokenyard.types import FloatArray


class LeastCost(ABC):
    """Sends each request to the replica of least `costs`."""

    @abstractmethod
    def costs(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> FloatArray:
        """Return the cost of every candidate, lower is better, shape (num_replicas,)."""

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the index of the cheapest candidate."""
        return int(self.costs(request, snapshots).argmin())

    def decide(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the cheapest candidate together with the cost of each."""
        costs = self.costs(request, snapshots)
        return Decision(int(costs.argmin()), costs)
