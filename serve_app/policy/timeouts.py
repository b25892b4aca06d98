"""Calls that may take too long, and are given up after a budget.

`InlineTimeout` calls in place, which costs next to nothing, and interrupts what runs Python.
`ThreadTimeout` calls in a thread of its own and stops waiting, whatever the call does.
docs/decisions/0009-a-policy-that-hangs.md says when which of them is used, and what they cost.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

T = TypeVar("T")

_PATIENCE = 5.0
"""Budgets that may pass on a machine that is busy with other things."""
_ENOUGH_LOOPS = 100_000
"""Python looks for interruptions at every turn of a loop."""


class TooSlow(RuntimeError):
    """The call did not return within its budget."""


class _TimedOut(BaseException):
    """Raised in a thread that nobody waits for any more; no policy catches it by accident."""


class _Collections:
    """The time that this process has spent in collections of cyclic garbage.

    They run in the thread that happens to make an object, and hold up all others.
    """

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._began_s: float | None = None

    def note(self, phase: str, info: dict[str, int]) -> None:
        """Measure one; called by Python where it begins and where it ends."""
        if phase == "start":
            self._began_s = time.monotonic()
        elif self._began_s is not None:
            self._ended_s += time.monotonic() - self._began_s
            self._began_s = None

    def spent_s(self) -> float:
        """What all have taken, with what the present one has taken so far."""
        # In this order: one that ends in between, in another thread, is not missed.
        began_s = self._began_s
        return self._ended_s + (0.0 if began_s is None else time.monotonic() - began_s)


_collections = _Collections()
gc.callbacks.append(_collections.note)


class InlineTimeout:
    """Makes calls in the caller's thread; a thread of its own interrupts those that take too long.

    What counts is the time that the thread computes, which a busy machine does not lengthen; the
    time that passes counts from `patience` budgets on. Collections of garbage count as neither: one
    that looks through a large process takes a second, and is not the policy's doing. A call that
    runs Python is interrupted within a budget after that. One that sleeps or is in compiled code is
    only found out when it comes back.
    """

    def __init__(self, budget_s: float, patience: float) -> None:
        self._budget_s = budget_s
        self._limit_s = patience * budget_s
        self._lock = threading.Lock()
        self._running = False
        self._ident = 0
        self._clock = 0
        self._cpu_started_s = 0.0
        self._started_s = 0.0
        self._collected_s = 0.0
        self._fired = False
        self._ends = threading.Event()
        threading.Thread(target=self._watch, name="policy-watch", daemon=True).start()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Return what `function` does, or raise what it raises.

        Raises:
            TooSlow: It took longer than it may.
        """
        result: T | None = None
        error: Exception | None = None
        ident = threading.get_ident()
        if ident != self._ident:
            self._ident, self._clock = ident, time.pthread_getcpuclockid(ident)
        try:
            with self._lock:
                self._cpu_started_s, self._started_s = time.thread_time(), time.monotonic()
                self._collected_s = _collections.spent_s()
                self._fired, self._running = False, True
            try:
                result = function(*args)
            except Exception as raised:
                error = raised
            with self._lock:
                self._running = False
                overdue = self._fired
            if overdue:
                # The interruption is on its way to this thread, and is taken here at the latest.
                for _ in range(_ENOUGH_LOOPS):
                    pass
            overdue = overdue or self._is_overdue()
        except _TimedOut:
            with self._lock:
                self._running = False
            overdue = True
        if overdue:
            raise TooSlow(f"no answer within {1000 * self._budget_s:g} ms")
        if error is not None:
            raise error
        return cast(T, result)

    def stop(self) -> None:
        """End the thread."""
        self._ends.set()

    def _is_overdue(self) -> bool:
        collected_s = _collections.spent_s() - self._collected_s
        passed_s = time.monotonic() - self._started_s - collected_s
        if passed_s < self._budget_s:
            return False  # It cannot have computed for longer; to ask for that takes longest.
        computed_s = time.clock_gettime(self._clock) - self._cpu_started_s - collected_s
        return computed_s >= self._budget_s or passed_s >= self._limit_s

    def _watch(self) -> None:
        while not self._ends.wait(self._budget_s):
            with self._lock:
                if self._running and self._is_overdue():
                    self._running, self._fired = False, True
                    _interrupt(self._ident)


def _interrupt(thread_ident: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_ident), ctypes.py_object(_TimedOut)
    )


class ThreadTimeout:
    """Makes one call at a time; used from one thread."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._worker: _Worker | None = None

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Return what `function` does, or raise what it raises.

        Raises:
            TooSlow: It took longer than the budget; its thread is left to itself and told to end.
        """
        if self._worker is None:
            self._worker = _Worker()
        worker = self._worker
        worker.calls.put(partial(function, *args))
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


@dataclass(frozen=True)
class Timeouts:
    """Who makes the calls, one after another, for policies that take turns."""

    inline: InlineTimeout | ThreadTimeout
    """Calls of trusted policies."""
    thread: ThreadTimeout
    """Calls of policies that were too slow."""

    @classmethod
    def of(cls, budget_s: float) -> Timeouts:
        """Give up what computes for longer than `budget_s`, or takes a few times that."""
        return cls(InlineTimeout(budget_s, _PATIENCE), ThreadTimeout(budget_s * _PATIENCE))

    @classmethod
    def in_thread(cls, budget_s: float) -> Timeouts:
        """Likewise, for calls that nobody waits for."""
        thread = ThreadTimeout(budget_s * _PATIENCE)
        return cls(thread, thread)

    def stop(self) -> None:
        """End the threads."""
        self.inline.stop()
        self.thread.stop()


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
        _interrupt(self._thread.ident or 0)

    def _run(self) -> None:
        with contextlib.suppress(_TimedOut):
            while (function := self.calls.get()) is not None:
                try:
                    answer: tuple[object, BaseException | None] = function(), None
                except Exception as error:
                    answer = None, error
                self.answers.put(answer)
