"""Who changed what, and when: a JSON lines file of limited size."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

logger = logging.getLogger(__name__)

GATEWAY = "gateway"
"""The actor of changes that nobody asked for."""
ACTOR: ContextVar[str] = ContextVar("actor", default=GATEWAY)
"""Who asked for the present change: the name of a key, and an address."""
_MAX_BYTES = 16 << 20
_NUM_OLD = 4


@dataclass(frozen=True, slots=True)
class Event:
    """A change: of who decides, of a plan, or of keys."""

    time_s: float
    """Unix time, seconds."""
    what: str
    policy: str
    """`name@sha256`; of other changes what was changed."""
    why: str
    by: str = GATEWAY
    """Who asked for it."""


class AuditLog:
    """Writes events to a file; when it is full it becomes `FILE.1`, and so on up to `FILE.4`.

    Lines are written in a thread, in their order: no decision waits for a disk.
    """

    def __init__(self, path: Path, max_bytes: int = _MAX_BYTES) -> None:
        """Append to a file for its user alone, of at most that many bytes, as are its old ones."""
        self._path, self._max_bytes = path, max_bytes
        self._thread = ThreadPoolExecutor(1, "audit-log")

    def write(self, event: Event) -> None:
        """Write an event."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(event.time_s))
        line = json.dumps({"time": when, **asdict(event)}, separators=(",", ":")) + "\n"
        self._thread.submit(self._append, line.encode())

    def close(self) -> None:
        """Wait until everything is written."""
        self._thread.shutdown()

    def _append(self, line: bytes) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            handle = os.open(self._path, flags, 0o600)
            try:
                written = os.write(handle, line)
                if written < len(line):
                    # Of a disk that is almost full: the next line must not go on from there.
                    os.ftruncate(handle, os.fstat(handle).st_size - written)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                is_full = os.fstat(handle).st_size >= self._max_bytes
            finally:
                os.close(handle)
            if is_full:
                self._rotate()
        except OSError as error:
            logger.error("audit log %s: %s; it lacks %s", self._path, error.strerror, line.decode())

    def _rotate(self) -> None:
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{number}")
                               for number in range(1, _NUM_OLD + 1))]  # fmt: skip
        for newer, older in reversed([*pairwise(names)]):
            if newer.exists():
                newer.replace(older)
