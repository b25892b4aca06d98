"""A moment in which a thread goes before all others of the machine.

A decision takes a tenth of a millisecond and more. On a few cores that also run proxies,
controllers and engines, many are interrupted by one of them, and then take as long as that turn.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext

logger = logging.getLogger(__name__)

_LOWEST_REALTIME = 1


class RealtimePriority:
    """Runs blocks at real-time priority where the system allows it (CAP_SYS_NICE), else as usual.

    For blocks that neither wait nor take long: nothing else runs on their core meanwhile.
    """

    def __init__(self) -> None:
        self.allowed = hasattr(os, "sched_setscheduler")
        if not self.allowed:
            return
        self._section = _Section()
        try:
            with self._section:
                pass
        except PermissionError:
            self.allowed = False
            logger.info("other processes may interrupt decisions: this one has no CAP_SYS_NICE")

    def section(self) -> AbstractContextManager[None]:
        """Keep the calling thread from being interrupted until the block ends.

        A block within another costs nothing. All of them are of one thread.
        """
        return self._section if self.allowed else nullcontext()


class _Section:
    """Raises the priority of the calling thread, and puts it back."""

    def __init__(self) -> None:
        # A thread that is born in a block is an ordinary one.
        self._raised = os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(_LOWEST_REALTIME)
        self._usual = os.sched_getscheduler(0), os.sched_getparam(0)
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            os.sched_setscheduler(0, *self._raised)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            os.sched_setscheduler(0, *self._usual)
