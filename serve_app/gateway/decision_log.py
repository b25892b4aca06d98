"""The gateway's decision log: what was known, what was chosen, and what became of it, as Parquet.

A row is written when its request ends, or at once where nothing is sent (`POST /v1/route`). The
event loop only puts it into a queue; a thread makes files of it,
`decisions-<start>-<number>.parquet`, each of them complete. Columns: docs/serving.md.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenyard.routing.types import ReplicaSnapshot, Request

logger = logging.getLogger(__name__)

FORMAT_VERSION = 4
_MAX_QUEUED = 10_000
_ROWS_PER_FILE = 5_000


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision and its request's end."""

    decision_id: str
    request_id: str
    attempt: int
    """0 for the first time that the request was placed."""
    time_s: float
    """Unix time of the decision, seconds."""
    policy: str
    """`name@sha256`."""
    service_class: str
    request: Request
    snapshots: tuple[ReplicaSnapshot, ...]
    pools: tuple[str, ...]
    """Pool of every candidate."""
    scores: tuple[float, ...] | None
    index: int
    propensity: float | None
    explored: bool
    fallback_reason: str | None
    decision_us: float
    outcome: str
    """`stop`, `length`, `abort` (the client left), `timeout`, `cut_off` (the gateway ended),
    `failed`, `rejected` (the endpoint has something against the request); `unknown` where only the
    choice was asked for."""
    output_tokens: int
    ttft_s: float
    """Arrival to first token; NaN: there was none."""
    response_s: float
    """Arrival to the end; NaN: it was not completed."""
    arm: str = "champion"
    """Whose decision it was while a canary had its share: `champion` or `canary`."""
    mlflow_run: str | None = None
    """Run that trained the policy, where it comes from the registry."""

    def to_row(self) -> dict[str, Any]:
        """Lay it out as a row of the table; NaN becomes null."""
        candidates = []
        for number, snapshot in enumerate(self.snapshots):
            fields = asdict(snapshot)
            engine = fields.pop("engine") or {}
            score = None if self.scores is None else self.scores[number]
            fields |= engine | {"pool": self.pools[number], "score": score}
            candidates.append({key: _or_none(value) for key, value in fields.items()})
        row = {
            name: _or_none(getattr(self, name))
            for name in self.__slots__
            if name not in ("request", "snapshots", "pools", "scores")
        }
        chosen = self.snapshots[self.index].replica_id
        return {
            "format_version": FORMAT_VERSION, **row, **asdict(self.request),
            "replica_id": chosen, "candidates": candidates,
        }  # fmt: skip


class DecisionLog:
    """Writes rows to files in a folder, from a thread of its own.

    What cannot be written is counted and left out: the log must never stop the serving.
    """

    def __init__(self, folder: Path, flush_s: float = 2.0) -> None:
        """Write to `folder`, at least every `flush_s` seconds.

        Raises:
            ValueError: It cannot be made.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot write the decision log {folder}: {error.strerror}") from None
        self._folder = folder
        self._flush_s = flush_s
        self._started = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._num_files = 0
        self.num_lost = 0
        self._queue: queue.Queue[DecisionRecord | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    def write(self, record: DecisionRecord) -> None:
        """Hand over a row; returns at once."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._lose(1, "the writer is too slow")

    def close(self) -> None:
        """Write what is queued."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        rows: list[dict[str, Any]] = []
        due_s = time.monotonic() + self._flush_s
        more = True
        while more:
            try:
                record = self._queue.get(timeout=max(due_s - time.monotonic(), 0.01))
                more = record is not None
                if record is not None:
                    rows.append(record.to_row())
            except queue.Empty:
                pass
            if len(rows) >= _ROWS_PER_FILE or time.monotonic() >= due_s or not more:
                self._flush(rows)
                rows, due_s = [], time.monotonic() + self._flush_s

    def _flush(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        # Only this thread needs it, and it takes a while to import.
        import pyarrow as pa
        import pyarrow.parquet as pq

        name = f"decisions-{self._started}-{self._num_files:06d}.parquet"
        try:
            part = self._folder / f".{name}.part"
            pq.write_table(pa.Table.from_pylist(rows), part)
            part.rename(self._folder / name)
            self._num_files += 1
        except (OSError, pa.ArrowException) as error:
            self._lose(len(rows), str(error))

    def _lose(self, count: int, reason: str) -> None:
        if self.num_lost == 0:
            logger.error("decision log %s loses rows: %s", self._folder, reason)
        self.num_lost += count


def _or_none(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
