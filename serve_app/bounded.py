"""Calls that may take too long: made in a thread of their own, waited for no longer than a budget.

docs/decisions/0009-a-policy-that-hangs.md says why a thread, and what it costs.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")


class TooSlow(RuntimeError):
    """The call did not return within its budget."""


class _Abandoned(BaseException):
    """Raised in a thread that nobody waits for any more; no policy catches it by accident."""


class BoundedCaller:
    """Makes one call at a time; used from one thread."""

    def __init__(self, budget_s: float) -> None:
        """Wait for `budget_s` at most."""
        self._budget_s = budget_s
        self._worker: _Worker | None = None

    def call(self, function: Callable[[], T]) -> T:
        """Return what `function` does, or raise what it raises.

        Raises:
            TooSlow: It took longer than the budget; its thread is left to itself and told to end.
        """
        if self._worker is None:
            self._worker = _Worker()
        worker = self._worker
        worker.calls.put(function)
        try:
            result, error = worker.answers.get(timeout=self._budget_s)
        except queue.Empty:
            self._worker = None
            worker.abandon()
            raise TooSlow(f"no answer within {1000 * self._budget_s:g} ms") from None
        if error is not None:
            raise error
        return cast(T, result)

    def stop(self) -> None:
        """End the thread."""
        if self._worker is not None:
            self._worker.calls.put(None)
            self._worker = None


class _Worker:
    """A thread, and what goes to it and comes back."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Let the thread end as soon as it runs Python again; one that sleeps is not in the way."""
        self.calls.put(None)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(_Abandoned)
        )

    def _run(self) -> None:
        with contextlib.suppress(_Abandoned):
            while (function := self.calls.get()) is not None:
                try:
                    answer: tuple[object, BaseException | None] = function(), None
                except Exception as error:
                    answer = None, error
                self.answers.put(answer)
