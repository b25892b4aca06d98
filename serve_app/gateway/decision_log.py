"""The decision log: what was known, what was chosen, and the result, as Parquet.

A row is written when its request ends, or at once where nothing is sent (`POST /v1/route`). The
event loop only hands over what it has; a thread lays it out and makes files of it,
`decisions-<start>-<random>-<number>.parquet`, each of them complete. Columns:
docs/serving/operations.md.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.gateway.decision_record import DecisionRecord

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_MAX_QUEUED = 10_000
_MAX_QUEUED_CANDIDATES = 1_000_000
"""Candidates of all queued rows together; each is a hundred bytes."""
_ROWS_PER_FILE = 5_000
_CANDIDATES_PER_FILE = 250_000
_CANDIDATES_PER_GROUP = 50_000
"""Laid out at once: meanwhile no other thread runs Python."""
_CLOSE_S = 30.0


class DecisionLog:
    """Writes rows to files in a folder, from a thread of its own.

    What cannot be written is counted and left out: the log must never stop the serving.
    """

    def __init__(self, folder: Path, flush_s: float = 2.0) -> None:
        """Write to `folder`, which a ValueError says cannot be made, at least every `flush_s`."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot write the decision log {folder}: {error.strerror}") from None
        self._folder = folder
        self._flush_s = flush_s
        # Two that begin in one second write beside each other.
        began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._started = f"{began}-{secrets.token_hex(4)}"
        self._num_files = 0
        self._num_refused = 0
        self._num_unwritten = 0
        self._queue: deque[DecisionRecord] = deque()
        # Each is written by one thread only: what is queued is their difference.
        self._num_put = 0
        self._num_taken = 0
        self._wakes = threading.Event()
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Rows that were left out."""
        return self._num_refused + self._num_unwritten

    def write(self, record: DecisionRecord) -> None:
        """Queue a row; called from one thread only."""
        queued = self._num_put - self._num_taken
        if len(self._queue) >= _MAX_QUEUED or queued >= _MAX_QUEUED_CANDIDATES:
            self._warn("the writer is too slow")
            self._num_refused += 1
            return
        self._num_put += len(record.choice.snapshots)
        self._queue.append(record)
        # Not for every row: a thread that wakes interrupts this one.
        if len(self._queue) >= _ROWS_PER_FILE or queued >= _CANDIDATES_PER_FILE:
            self._wakes.set()

    def close(self) -> None:
        """Write what is queued; give up after a while."""
        self._ends = True
        self._wakes.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.error("decision log %s: %d rows are not written", self._folder, len(self._queue))

    def _run(self) -> None:
        more = True
        while more:
            self._wakes.wait(self._flush_s)
            self._wakes.clear()
            more = not self._ends
            while self._queue:
                records = self._take()
                try:
                    self._write_file(records)
                except Exception as error:
                    # Whatever it is, this thread writes what comes after it.
                    self._lose(len(records), repr(error))

    def _take(self) -> list[DecisionRecord]:
        """Take the rows of one file from the queue."""
        records: list[DecisionRecord] = []
        num_candidates = 0
        while self._queue and len(records) < _ROWS_PER_FILE:
            if num_candidates >= _CANDIDATES_PER_FILE:
                break
            records.append(self._queue.popleft())
            num_candidates += len(records[-1].choice.snapshots)
        self._num_taken += num_candidates
        return records

    def _write_file(self, records: list[DecisionRecord]) -> None:
        # Only this thread needs it, and it takes a while to import.
        import pyarrow as pa
        import pyarrow.parquet as pq

        from serve_app.gateway.decision_rows import REPEATED, SCHEMA

        name = f"decisions-{self._started}-{self._num_files:06d}.parquet"
        part = self._folder / f".{name}.part"
        lost_before = self._num_unwritten
        try:
            with pq.ParquetWriter(part, SCHEMA, use_dictionary=REPEATED) as writer:
                for group in _groups(records):
                    writer.write_table(self._lay_out(group))
            with part.open("rb") as written:
                os.fsync(written.fileno())
            part.rename(self._folder / name)
            self._num_files += 1
        except (OSError, pa.ArrowException) as error:
            self._lose(len(records) - (self._num_unwritten - lost_before), str(error))

    def _lay_out(self, records: list[DecisionRecord]) -> pa.Table:
        """Make rows; a record that cannot be written is left out, alone."""
        import pyarrow as pa

        from serve_app.gateway.decision_rows import SCHEMA, lay_out

        try:
            return lay_out(records)
        except Exception as error:
            # Whatever is wrong with one row must not end the thread that writes all others.
            if len(records) == 1:
                self._lose(1, repr(error))
                return SCHEMA.empty_table()
        return pa.concat_tables([self._lay_out([record]) for record in records])

    def _lose(self, count: int, reason: str) -> None:
        self._warn(reason)
        self._num_unwritten += count

    def _warn(self, reason: str) -> None:
        if self.num_lost == 0:
            logger.error("decision log %s loses rows: %s", self._folder, reason)


def _groups(records: list[DecisionRecord]) -> Iterator[list[DecisionRecord]]:
    """Split records into groups that are written together."""
    group: list[DecisionRecord] = []
    num_candidates = 0
    for record in records:
        group.append(record)
        num_candidates += len(record.choice.snapshots)
        if num_candidates >= _CANDIDATES_PER_GROUP:
            yield group
            group, num_candidates = [], 0
    if group:
        yield group
