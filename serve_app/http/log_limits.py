"""Limits repeated log lines of the server: callers must not fill the disk with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PERIOD_S = 60.0
_MOST_KINDS = 64


class OncePerPeriod(logging.Filter):
    """Lets one line of each kind through per minute, with the number of suppressed ones.

    A kind is a text before its values are put in, with the class of the error that it tells of.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock_s = clock_s
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}
        """Time of the last line of each kind, and how many were left out since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is written."""
        kind = (record.msg, record.exc_info[0] if record.exc_info else None)
        now_s = self._clock_s()
        written_s, num_left_out = self._seen.get(kind, (-PERIOD_S, 0))
        if now_s - written_s < PERIOD_S:
            self._seen[kind] = written_s, num_left_out + 1
            return False
        if len(self._seen) >= _MOST_KINDS:
            self._seen.clear()
        self._seen[kind] = now_s, 0
        if num_left_out:
            record.msg = f"{record.msg} (and {num_left_out} more since the last such line)"
        return True


def limit_log() -> None:
    """Limit uvicorn's lines of this process to one of each kind per minute."""
    logger = logging.getLogger("uvicorn.error")
    if not any(isinstance(log_filter, OncePerPeriod) for log_filter in logger.filters):
        logger.addFilter(OncePerPeriod())
