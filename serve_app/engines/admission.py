"""Which requests an engine accepts: what all engines check alike, before their own code runs."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from serve_app.engines.base import EngineError, EngineFull, InvalidRequest, Sampling
from serve_app.engines.waiting import ArrivalKeys, WaitingLine
from tokenyard.routing.types import OrderKey


class Admission:
    """Counts the requests that are not answered yet, and refuses those too many or too long."""

    def __init__(self, max_batch: int, max_waiting: int) -> None:
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._max_request_tokens = 0
        self._vocab_size = 0
        self._names: set[str] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.closed: str | None = "the engine has not been started"
        """Why nothing is accepted; None: it is."""

    def open(self, max_request_tokens: int, vocab_size: int) -> None:
        """Accept requests of so many tokens, prompt and output together."""
        self._max_request_tokens = max_request_tokens
        self._vocab_size = vocab_size
        self.closed = None

    def close(self, reason: str) -> None:
        """Accept no more; the first reason counts."""
        self.closed = self.closed or reason

    def check(
        self, name: str, token_ids: Sequence[int], sampling: Sampling, num_running: int | None
    ) -> None:
        """Check one more request.

        `num_running` is how many run while others wait for them, since memory may hold fewer than a
        full batch; None: nobody waits.

        Raises:
            InvalidRequest: It is too long, or makes no sense.
            EngineFull: As many wait as may.
            EngineError: It cannot be accepted now.
        """
        if self.closed is not None:
            raise EngineError(self.closed)
        check_request(token_ids, sampling, self._max_request_tokens, self._vocab_size)
        if name in self._names:
            raise EngineError(f"a request {name!r} is already being answered")
        num_slots = min(self._max_batch, num_running or self._max_batch)
        if len(self._names) >= num_slots + self._max_waiting:
            raise EngineFull(f"the queue is full: {self._max_waiting} requests wait")

    def enter(self, name: str) -> None:
        """Count a request that was checked."""
        self._names.add(name)
        self._empty.clear()

    def leave(self, name: str) -> None:
        """Count it no longer."""
        self._names.discard(name)
        if not self._names:
            self._empty.set()

    async def emptied(self) -> None:
        """Return once none is left."""
        await self._empty.wait()

    def __len__(self) -> int:
        """Return how many are not answered yet."""
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        """Tell whether one of that name is not answered yet."""
        return name in self._names


class BatchLimit:
    """Lets so many requests into an engine at once; the others wait by their order keys.

    The engine's own limit is the highest, and as long as it holds the engine queues by itself.
    """

    def __init__(self, highest: int, clock_s: Callable[[], float] = time.time) -> None:
        self._highest = self.limit = highest
        self._num_inside = 0
        self._waiting: WaitingLine[asyncio.Future[None]] = WaitingLine()
        self._clock_s, self._arrivals = clock_s, ArrivalKeys(clock_s)
        self._changed = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Requests that are held back."""
        return len(self._waiting)

    def resize(self, limit: int) -> None:
        """Let so many in from now on, at most the engine's own limit; those inside stay."""
        self.limit = min(max(limit, 1), self._highest)
        self._let_in()

    async def enter(self, order_key: OrderKey | None = None) -> None:
        """Return once there is room; every call that returned is followed by a `leave`.

        Those that wait go in by their order keys; None: the time now.
        """
        if not self._waiting and self._has_room():
            self._num_inside += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(turn, self._arrivals.key(order_key))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(turn)
            else:
                self.leave()
            raise

    def leave(self) -> None:
        """Make room."""
        self._num_inside -= 1
        self._let_in()
        self._changed.set()

    async def emptied(self) -> None:
        """Return once nobody is inside and nobody waits."""
        while self._num_inside or self._waiting:
            self._changed.clear()
            await self._changed.wait()

    def _has_room(self) -> bool:
        return self.limit == self._highest or self._num_inside < self.limit

    def _let_in(self) -> None:
        while self._waiting and self._has_room():
            turn = self._waiting.pop(self._clock_s())
            # A task that was cancelled and has not run since is still in the queue.
            if not turn.done():
                self._num_inside += 1
                turn.set_result(None)


def check_request(
    token_ids: Sequence[int], sampling: Sampling, max_tokens: int, vocab_size: int
) -> None:
    """Check what is asked of an engine whose prompt and output may have `max_tokens` together.

    Raises:
        InvalidRequest: It is too long, or out of range.
    """
    if not token_ids:
        raise InvalidRequest("the prompt is empty")
    wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(f"token {wrong} is not in the vocabulary of {vocab_size}")
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {sampling.max_tokens}; it must be at least 1")
    if len(token_ids) + sampling.max_tokens > max_tokens:
        raise InvalidRequest(
            f"a prompt of {len(token_ids)} tokens and {sampling.max_tokens} to generate are more "
            f"than the {max_tokens} that this engine can hold"
        )
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequest(f"temperature is {sampling.temperature}; it must be 0 or more")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p is {sampling.top_p}; it must be above 0 and at most 1")


def reason_line(error: BaseException) -> str:
    """Say in one line what an exception says, with its type unless it is an EngineError."""
    text = (str(error).strip() or "no reason given").splitlines()[0]
    return text if isinstance(error, EngineError) else f"{type(error).__name__}: {text}"
