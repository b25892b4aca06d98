"""The last minutes, in bins of a few seconds, for the console."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from serve_app.policy.runner import ReplicaChoice
from tokenyard.routing.observation import WAIT_S
from tokenyard.routing.snapshot_table import LIVE_MATCH_TOKENS, SnapshotTable

BIN_S = 5.0
_NUM_BINS = 180
"""A quarter of an hour."""
_MAX_TIMES = 250
"""Times kept of one bin; more are thinned out."""
_NUM_DECISIONS = 30
_BEST_SHOWN = 4
"""Candidates that are shown of a decision, beside the chosen one."""
_COUNTED = ("finished", "kept", "failed", "refused", "output_tokens")

ChoiceOfRule = Callable[[ReplicaChoice], int | None]
"""Index of the candidate that the baseline would have chosen; None: it does not tell."""


@dataclass
class _Bin:
    """Requests that ended, and decisions, in `BIN_S` seconds."""

    start_s: float
    num_queued: int
    """Requests that waited, at replicas and at the gateway, when it began."""
    counts: Counter[str] = field(default_factory=Counter)
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
                "queued": self.num_queued,
                **{key: int(self.counts[key]) for key in _COUNTED},
                "ttft_s": _percentiles(self.ttft_s),
                "response_s": _percentiles(self.response_s),
                "sent": dict(self.sent),
            }
        return self._row


class History:
    """Recent ends of requests, and recent decisions with their reasons, in bounded memory."""

    def __init__(self, num_queued: Callable[[], int] = lambda: 0) -> None:
        """Ask `num_queued` at the beginning of each bin how many requests wait."""
        self._num_queued = num_queued
        self._bins: deque[_Bin] = deque(maxlen=_NUM_BINS)
        self._decisions: deque[tuple[float, SnapshotTable, ReplicaChoice]] = deque(
            maxlen=_NUM_DECISIONS
        )

    def finish(
        self, now_s: float, ttft_s: float, response_s: float, kept: bool, num_tokens: int = 0
    ) -> None:
        """Record the end of a request; a missing time is NaN, and without a response it failed."""
        latest = self._bin(now_s)
        failed = not math.isfinite(response_s)
        latest.counts.update(finished=1, kept=kept, failed=failed, output_tokens=num_tokens)
        for times, value in ((latest.ttft_s, ttft_s), (latest.response_s, response_s)):
            if math.isfinite(value):
                times.append(value)
                if len(times) > _MAX_TIMES:
                    del times[::2]

    def refuse(self, now_s: float) -> None:
        """Record a request that was not accepted."""
        self._bin(now_s).counts["refused"] += 1

    def decide(self, now_s: float, snapshots: SnapshotTable, choice: ReplicaChoice) -> None:
        """Record a decision; it is formatted only when somebody looks."""
        self._bin(now_s).sent[snapshots.candidates.pools[choice.index]] += 1
        self._decisions.append((now_s, snapshots, choice))

    def look(self, now_s: float, since_s: float = -math.inf) -> list[dict[str, Any]]:
        """Bins from a time on, oldest first; the newest one is now's, and not over yet."""
        self._bin(now_s)
        return [bin_.row() for bin_ in self._bins if bin_.start_s >= since_s]

    def decisions(self, num: int, rule: ChoiceOfRule = lambda _: None) -> list[dict[str, Any]]:
        """The last decisions, newest first, each with its best candidates."""
        return [_decision(*decision, rule) for decision in islice(reversed(self._decisions), num)]

    def _bin(self, now_s: float) -> _Bin:
        start_s = math.floor(now_s / BIN_S) * BIN_S
        # A clock that was set back goes on in the newest bin.
        if not self._bins or start_s > self._bins[-1].start_s:
            if self._bins:
                # Laid out anew once more when it is next looked at, then no more.
                self._bins[-1].over, self._bins[-1]._row = True, None
            self._bins.append(_Bin(start_s, self._num_queued()))
            # Bins in which nothing happened are not kept.
            while self._bins[0].start_s <= start_s - _NUM_BINS * BIN_S:
                self._bins.popleft()
        return self._bins[-1]


def _decision(
    time_s: float, snapshots: SnapshotTable, choice: ReplicaChoice, rule: ChoiceOfRule
) -> dict[str, Any]:
    """Return it for JSON: the chosen candidate first, then the best of the others."""
    names, wait_s, by_rule = snapshots.candidates, snapshots.columns[:, WAIT_S], rule(choice)
    costs = wait_s if choice.scores is None else choice.scores
    others = [i for i in np.argsort(costs, kind="stable").tolist() if i != choice.index]
    snapshots.release()
    return {
        "time_s": time_s,
        "policy": choice.policy,
        "prompt_tokens": choice.request.context_tokens,
        "cached_tokens": int(snapshots.live[choice.index, LIVE_MATCH_TOKENS]),
        "explored": choice.explored,
        "fallback_reason": choice.fallback_reason,
        "decision_us": round(choice.decision_us),
        "num_candidates": len(costs),
        "num_better": int((costs < costs[choice.index]).sum()),
        "num_equal": int((costs == costs[choice.index]).sum()) - 1,
        "by_rule": None if by_rule is None else names.replica_ids[by_rule],
        "has_costs": choice.scores is not None,
        "candidates": [
            {"replica_id": names.replica_ids[i], "pool": names.pools[i], "cost": finite(costs[i])}
            for i in (choice.index, *others[:_BEST_SHOWN])
        ],
    }


def finite(value: float) -> float | None:
    """Round a number for JSON, to four digits; None: it is none."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p95, p99 = (float(f"{value:.4g}") for value in np.percentile(values, [50, 95, 99]))
    return {"p50": p50, "p95": p95, "p99": p99}
