"""The decision log: one JSON line per decision, for off-policy evaluation.

The event loop only puts a record into a queue; a thread turns it into text and writes. The
format is described in docs/serving.md.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenyard.types import ReplicaSnapshot, Request

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_MAX_QUEUED = 10_000


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """Everything that is known about a decision when it is made."""

    decision_id: str
    time_s: float
    """Unix time, seconds."""
    policy: str
    """Name and version of the policy, `name@version`."""
    request: Request
    snapshots: list[ReplicaSnapshot]
    scores: tuple[float, ...] | None
    index: int
    propensity: float | None
    """Probability with which this replica was chosen; None: the policy itself draws."""
    explored: bool
    fallback: bool
    decision_us: float

    def to_line(self) -> str:
        """Write the record as one line of JSON; NaN becomes null."""
        fields = {"format_version": FORMAT_VERSION, **asdict(self)}
        fields["replica_id"] = self.snapshots[self.index].replica_id
        fields["snapshots"] = [_without_nan(snapshot) for snapshot in fields["snapshots"]]
        return json.dumps(fields, allow_nan=False, separators=(",", ":")) + "\n"


class DecisionLog:
    """Appends records to a file from a thread of its own.

    A line reaches the file as soon as the thread gets to it, within milliseconds. What cannot be
    written (a full disk, a queue of _MAX_QUEUED records) is counted and left out: the log must
    never stop the routing.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` for appending.

        Raises:
            ValueError: It cannot be opened.
        """
        try:
            # Unbuffered: what a full disk refuses must not be tried again with the next line.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ValueError(f"cannot write the decision log {path}: {error.strerror}") from None
        self.num_lost = 0
        self._queue: queue.Queue[DecisionRecord | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    def write(self, record: DecisionRecord) -> None:
        """Hand over a record; returns at once."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._lose("the writer is too slow")

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._file.write(record.to_line().encode())
            except OSError as error:
                self._lose(str(error))

    def _lose(self, reason: str) -> None:
        self.num_lost += 1
        if self.num_lost == 1:
            logger.error("decision log %s loses lines: %s", self._file.name, reason)


def _without_nan(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in fields.items()
    }
