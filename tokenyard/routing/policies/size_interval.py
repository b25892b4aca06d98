"""Task assignment by size: every replica serves its own range of request sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tokenyard.routing.policies.delay import ShortestExpectedDelay
from tokenyard.routing.types import ReplicaSnapshot, Request


class SizeIntervals:
    """SITA: separates short from long requests by fixed cut points.

    Source: Harchol-Balter, Crovella and Murta 1999, "On Choosing a Task Assignment Policy for a
    Distributed Server System". Cuts and the order of the replicas are tuned, not derived.
    While a replica is down, its interval has no server and the others stand at other positions:
    requests then go where they are done first.
    """

    def __init__(self, cuts_tokens: Sequence[float], replicas: Sequence[int]) -> None:
        """Serve requests up to the first cut at the first of `replicas`, and so on.

        Args:
            cuts_tokens: Upper ends, inclusive, of all intervals but the last; increasing.
            replicas: The replica of each interval, one more than there are cuts.
        """
        self._cuts_tokens = tuple(cuts_tokens)
        self._replicas = tuple(replicas)
        self._while_down = ShortestExpectedDelay()

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the replica whose interval holds the size of the request."""
        if len(snapshots) != len(self._replicas):
            return self._while_down.route(request, snapshots)
        return self.replica_of(request.predicted_total_tokens)

    def replica_of(self, total_tokens: float) -> int:
        """Return the replica that serves requests of this size while all are there."""
        return self._replicas[bisect_left(self._cuts_tokens, total_tokens)]
