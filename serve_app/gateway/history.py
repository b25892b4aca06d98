"""The last minutes, second by second, for the dashboard."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serve_app.policy.runner import ReplicaChoice
from tokenyard.routing.snapshot_table import LIVE_NUM_RUNNING, LIVE_NUM_WAITING, SnapshotTable

BIN_S = 5.0
_NUM_BINS = 180
"""A quarter of an hour."""
_MAX_TIMES = 250
"""Times kept of one bin; more are thinned out."""
_NUM_DECISIONS = 30


@dataclass
class _Bin:
    """Requests that ended, and decisions, in `BIN_S` seconds."""

    start_s: float
    num_finished: int = 0
    num_kept: int = 0
    ttft_s: list[float] = field(default_factory=list)
    response_s: list[float] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    """Requests by pool."""
    over: bool = False
    _row: dict[str, Any] | None = None

    def row(self) -> dict[str, Any]:
        """Return it for JSON; percentiles are costly, so those of a past bin are kept."""
        if self._row is None or not self.over:
            self._row = {
                "time_s": self.start_s,
                "finished": self.num_finished,
                "kept": self.num_kept,
                "ttft_s": _percentiles(self.ttft_s),
                "response_s": _percentiles(self.response_s),
                "sent": dict(self.sent),
            }
        return self._row


class History:
    """Recent ends of requests, and recent decisions with their reasons, in bounded memory."""

    def __init__(self) -> None:
        self._bins: deque[_Bin] = deque(maxlen=_NUM_BINS)
        self._decisions: deque[tuple[Any, ...]] = deque(maxlen=_NUM_DECISIONS)

    def finish(self, now_s: float, ttft_s: float, response_s: float, kept: bool) -> None:
        """Record the end of a request; missing times are NaN."""
        latest = self._bin(now_s)
        latest.num_finished += 1
        latest.num_kept += kept
        for times, value in ((latest.ttft_s, ttft_s), (latest.response_s, response_s)):
            if math.isfinite(value):
                times.append(value)
                if len(times) > _MAX_TIMES:
                    del times[::2]

    def decide(self, now_s: float, snapshots: SnapshotTable, choice: ReplicaChoice) -> None:
        """Record a decision; it is formatted only when somebody looks."""
        self._bin(now_s).sent[snapshots.candidates.pools[choice.index]] += 1
        self._decisions.append((now_s, snapshots, choice))

    def rows(self) -> list[dict[str, Any]]:
        """Bins, oldest first."""
        return [each.row() for each in self._bins]

    def decisions(self) -> list[dict[str, Any]]:
        """The last decisions with the score of every candidate, newest first."""
        return [_decision(*decision) for decision in reversed(self._decisions)]

    def _bin(self, now_s: float) -> _Bin:
        start_s = math.floor(now_s / BIN_S) * BIN_S
        # A clock that was set back goes on in the newest bin.
        if not self._bins or start_s > self._bins[-1].start_s:
            if self._bins:
                # Laid out anew once more when it is next looked at, then no more.
                self._bins[-1].over, self._bins[-1]._row = True, None
            self._bins.append(_Bin(start_s))
            # Bins in which nothing happened are not kept.
            while self._bins[0].start_s <= start_s - _NUM_BINS * BIN_S:
                self._bins.popleft()
        return self._bins[-1]


def _decision(now_s: float, snapshots: SnapshotTable, choice: ReplicaChoice) -> dict[str, Any]:
    candidates, live = snapshots.candidates, snapshots.live
    scores = [None] * len(live) if choice.scores is None else choice.scores.tolist()
    waiting, running = live[:, [LIVE_NUM_WAITING, LIVE_NUM_RUNNING]].T.astype(int).tolist()
    keys = ("replica_id", "pool", "score", "waiting", "running")
    rows = zip(candidates.replica_ids, candidates.pools, scores, waiting, running, strict=True)
    return {
        "time_s": now_s,
        "policy": choice.policy,
        "chosen": choice.index,
        "explored": choice.explored,
        "fallback_reason": choice.fallback_reason,
        "decision_us": choice.decision_us,
        "candidates": [dict(zip(keys, row, strict=True)) for row in rows],
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p95, p99 = np.percentile(values, [50, 95, 99]).tolist()
    return {"p50": p50, "p95": p95, "p99": p99}
