"""What was sent to every replica in a sliding window of time."""

from __future__ import annotations

from collections import defaultdict, deque


class RecentCost:
    """Count and summed cost of what was sent to replicas in the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._sent: deque[tuple[float, str, float]] = deque()
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._totals: defaultdict[str, float] = defaultdict(float)

    def add(self, now_s: float, replica_id: str, cost: float) -> None:
        """Remember one request."""
        self._sent.append((now_s, replica_id, cost))
        self._counts[replica_id] += 1
        self._totals[replica_id] += cost

    def forget_until(self, now_s: float) -> None:
        """Drop what was sent a window or more before `now_s`."""
        while self._sent and self._sent[0][0] <= now_s - self._window_s:
            _, replica_id, cost = self._sent.popleft()
            self._counts[replica_id] -= 1
            # Sums of floats drift: an empty window is 0.
            left = self._totals[replica_id] - cost if self._counts[replica_id] else 0.0
            self._totals[replica_id] = left

    def count(self, replica_id: str) -> int:
        """Return the requests in the window."""
        return self._counts[replica_id]

    def total(self, replica_id: str) -> float:
        """Return the summed cost in the window."""
        return self._totals[replica_id]
