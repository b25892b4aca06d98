"""Ejects replicas that fail, for a while, and lets them come back.

As Envoy's outlier detection: a replica that fails several requests in a row is ejected, for twice
as long each time. It is then readmitted slowly: one request at a time, and twice as many with every
answer that begins; meanwhile one failure is enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.cluster import OutlierEjection


@dataclass(slots=True)
class _Record:
    """A replica that has failed."""

    level: int
    """Ejections that are not forgiven yet, at least one."""
    ejected_s: float
    until_s: float
    num_begun: int = 0
    """Answers that have begun since it was readmitted."""


class OutlierDetector:
    """Remembers failures of replicas; a replica that never failed costs one dict look-up."""

    def __init__(
        self, settings: OutlierEjection, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self.clock_s = clock_s
        self.records: dict[str, _Record] = {}
        """Replicas that failed lately, by id; where it is empty, all are admitted."""
        self.in_a_row: dict[str, int] = {}
        """Failures of replicas since an answer of theirs last began."""

    def fail(self, replica_id: str, sent_s: float) -> bool:
        """Record a failure; return whether it ejects the replica.

        Requests that were sent before it was ejected, by the detector's clock, say nothing new.
        """
        now_s, record = self.clock_s(), self.records.get(replica_id)
        if record is not None and sent_s < record.until_s:
            return False
        in_a_row = self.in_a_row.pop(replica_id, 0) + 1
        is_on_trial = record is not None and not self._readmitted(record)
        if in_a_row < self._settings.consecutive_failures and not is_on_trial:
            self.in_a_row[replica_id] = in_a_row
            return False
        level = 1 if record is None else self._level(record, now_s) + 1
        most_s, base_s = self._settings.max_s, self._settings.base_s
        ejected_for_s = min(base_s * 2.0 ** min(level - 1, 30), most_s)
        self.records[replica_id] = _Record(level, now_s, now_s + ejected_for_s)
        return True

    def begin(self, replica_id: str, sent_s: float) -> None:
        """Note that an answer has begun, so the replica works."""
        self.in_a_row.pop(replica_id, None)
        record = self.records.get(replica_id)
        if record is None or sent_s < record.until_s:
            return
        record.num_begun += 1
        if self._readmitted(record) and not self._level(record, self.clock_s()):
            del self.records[replica_id]

    def admits(self, replica_id: str, num_in_flight: int) -> bool:
        """Whether a replica with that many requests in flight may be sent another."""
        record = self.records.get(replica_id)
        if record is None or self._readmitted(record):
            return True
        return self.clock_s() >= record.until_s and num_in_flight < 2**record.num_begun

    def ejected_s(self, replica_id: str) -> float:
        """Time until a replica is readmitted, seconds; 0: it is not ejected."""
        record = self.records.get(replica_id)
        return 0.0 if record is None else max(record.until_s - self.clock_s(), 0.0)

    def keep(self, replica_ids: Iterable[str]) -> None:
        """Forget replicas that are gone, once they would have been readmitted."""
        if self.in_a_row:
            self.in_a_row = {r: n for r, n in self.in_a_row.items() if r in set(replica_ids)}
        if self.records:
            kept, now_s = set(replica_ids), self.clock_s()
            # Until then they may come back, or have not been found yet since a restart.
            self.records = {
                name: record
                for name, record in self.records.items()
                if name in kept or now_s < record.until_s
            }

    def saved(self) -> dict[str, Any]:
        """Failures that still count, with times relative to now, seconds."""
        now_s = self.clock_s()
        return {
            name: [record.level, record.ejected_s - now_s, record.until_s - now_s, record.num_begun]
            for name, record in self.records.items()
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what was saved, as if no time had passed; a ValueError: it is malformed."""
        now_s, most_s = self.clock_s(), self._settings.max_s
        records = {}
        for replica_id, (level, ejected_s, until_s, num_begun) in saved.items():
            ends_s = now_s + min(float(until_s), most_s)
            records[replica_id] = _Record(
                int(level), now_s + float(ejected_s), ends_s, int(num_begun)
            )
        self.records = records

    def _readmitted(self, record: _Record) -> bool:
        return record.num_begun >= self._settings.readmit_after

    def _level(self, record: _Record, now_s: float) -> int:
        """Ejections that still count; time without a failure removes one after another."""
        quiet_s = max(now_s - record.until_s, 0.0)
        return max(record.level - int(quiet_s / self._settings.max_s), 0)


class BackOff(dict[tuple[Any, ...], tuple[float, float]]):
    """What is left alone for a while after it refused, twice as long each time.

    Maps what is left alone to the end and the length of that time. Pop what works again.
    """

    def __init__(
        self, base_s: float, max_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._base_s, self._max_s, self._clock_s = base_s, max_s, clock_s

    def refuse(self, what: tuple[Any, ...], retry_after_s: float | None = None) -> None:
        """Record a refusal; `retry_after_s` is when it says to come back, seconds."""
        now_s = self._clock_s()
        until_s, rest_s = self.get(what, (-math.inf, 0.0))
        # Those that were on their way when it refused say nothing new.
        if now_s >= until_s:
            rest_s = min(max(2.0 * rest_s, self._base_s), self._max_s)
            until_s = now_s + rest_s
        retry_s = now_s + min(retry_after_s or 0.0, self._max_s)
        self[what] = (max(until_s, retry_s), rest_s)

    def left_s(self, what: tuple[Any, ...]) -> float:
        """Time for which it is still left alone, seconds; 0: it may be asked."""
        until_s, _ = self.get(what, (0.0, 0.0))
        return max(until_s - self._clock_s(), 0.0)
