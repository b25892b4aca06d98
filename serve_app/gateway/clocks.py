"""Converts times of other machines to our clock, whatever theirs show.

A replica says when it looked at itself, by its own clock. What a policy sees is an age, so a clock
that is 5 s behind would make a replica look stale for ever, and one that is ahead would make a dead
one look fresh. Here each time is moved by what the replica's messages tell of its clock, as NTP
does: the message that came quickest shows how far the clocks are apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container
from dataclasses import replace

from serve_app.engines.base import EngineStatus

DELIVERY_S = 0.25
"""Delay of a message that is put down to its way, not to the clock of who sent it."""
_WINDOW_S = 300.0
"""How long the quickest message counts, once or twice: clocks that drift apart by 1e-4, which is
much, are wrong by 60 ms after that."""

# Counts while the machine sleeps, too, and is never stepped.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_STARTED_S = time.time() - time.clock_gettime(_STEADY)


def steady_unix_s() -> float:
    """Unix time at this process's start plus the time since; seconds.

    It does not follow a clock that is set while the process runs, so no age and no response time
    jumps with it.
    """
    return _STARTED_S + time.clock_gettime(_STEADY)


class RemoteClock:
    """How far the clock of one machine is from ours."""

    def __init__(self) -> None:
        self._told_s = -math.inf
        self._offset_s = self._offset_before_s = math.inf
        """Least of received minus told, seconds, in this window and in the one before."""
        self._window_ends_s = -math.inf

    def to_ours(self, told_s: float, received_s: float) -> float:
        """Convert a remote Unix time, seconds, to ours; never later than its receipt.

        The same time again changes nothing.
        """
        if told_s != self._told_s:
            self._take(told_s, received_s)
        return self.moved(told_s)

    def moved(self, told_s: float) -> float:
        """Convert a remote time by the present estimate of the offset."""
        offset_s = min(self._offset_s, self._offset_before_s)
        return told_s + offset_s - min(max(offset_s, 0.0), DELIVERY_S)

    def _take(self, told_s: float, received_s: float) -> None:
        if told_s < self._told_s:
            # Their clock was set back: what it said before counts no more.
            self._offset_s = self._offset_before_s = math.inf
        elif received_s >= self._window_ends_s:
            self._offset_before_s, self._offset_s = self._offset_s, math.inf
            self._window_ends_s = received_s + _WINDOW_S
        self._told_s = told_s
        self._offset_s = min(self._offset_s, received_s - told_s)


class RemoteClocks:
    """The clocks of all replicas of a pool."""

    def __init__(self) -> None:
        self._clocks: dict[str, RemoteClock] = {}

    def to_ours(self, replica_id: str, status: EngineStatus, received_s: float) -> EngineStatus:
        """Return a replica's status with its time by our clock."""
        clock = self._clocks.setdefault(replica_id, RemoteClock())
        observed_at_s = clock.to_ours(status.observed_at_s, received_s)
        return replace(status, observed_at_s=observed_at_s)

    def moved(self, replica_id: str, status: EngineStatus, received_s: float) -> EngineStatus:
        """Likewise for a status that may overtake others; the offset is not estimated from it."""
        clock = self._clocks.get(replica_id)
        told_s = math.inf if clock is None else clock.moved(status.observed_at_s)
        return replace(status, observed_at_s=min(told_s, received_s))

    def keep(self, replica_ids: Container[str]) -> None:
        """Forget the replicas that are gone."""
        for replica_id in [name for name in self._clocks if name not in replica_ids]:
            del self._clocks[replica_id]
