"""A request that somebody else delivers, as the gateway sees it: a proxy, or Ray Serve.

It is let in, placed, logged and settled as any other of the gateway's. Only its bytes go another
way: the proxy, or Serve, sends them to the replica that is picked, and shows the answer here.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from serve_app.gateway.answer_reader import AnswerReader
from serve_app.gateway.exchange import Attempt, Backend, Sender
from serve_app.gateway.generation import Headers, ReplicaFailed, RequestRejected, new_id


class Delivery(Sender, ABC):
    """Stands in for a caller, and for the backend of a pool."""

    def __init__(self) -> None:
        self.id = new_id()
        self.is_placed = False
        """Whether it is known where the request goes."""
        self._task: asyncio.Task[None] | None = None
        self._attempt: Attempt | None = None
        self._replica_id = ""
        self._end: asyncio.Future[None] | None = None
        """Of the present attempt."""
        self._reader: AnswerReader | None = None
        self._later: list[Callable[[], None]] | None = None
        """What is shown while the gateway notes that another endpoint answers."""

    def start(self, serving: Coroutine[Any, Any, None], on_end: Callable[[], object]) -> None:
        """Have the gateway serve it; `on_end` is called at the end of all."""

        def end(_: object) -> None:
            self._go_on()
            on_end()

        self._task = asyncio.create_task(serving)
        # A task that is cancelled before it begins runs no `finally`.
        self._task.add_done_callback(end)

    @property
    def has_started(self) -> bool:
        """Whether the gateway serves it, or has."""
        return self._task is not None

    @property
    def is_open(self) -> bool:
        """Whether an attempt waits for the end of its answer."""
        return self._end is not None and not self._end.done()

    @property
    def is_over(self) -> bool:
        """Whether nothing more of the answer counts."""
        return self._later is None and not self.is_open

    async def answer(self, backend: Backend, attempt: Attempt, replica_ids: Sequence[str]) -> None:
        """Say where the request goes: see `serve_app.gateway.exchange.Sender`."""
        self._attempt, self._replica_id = attempt, replica_ids[0]
        self._end = asyncio.get_running_loop().create_future()
        attempt.note_send()
        if self.is_placed:
            self._go_on()
        else:
            self.is_placed = True
            self.place(backend, attempt, replica_ids)
        await self._end

    @abstractmethod
    def place(self, backend: Backend, attempt: Attempt, replica_ids: Sequence[str]) -> None:
        """Tell the proxy, or Serve, where it goes: the replica that is picked, and stand-ins."""

    def show_head(self, headers: Headers) -> None:
        """Take the head of the answer, pseudo headers included."""
        if self._later is not None:
            self._later.append(partial(self.show_head, headers))
        elif self._attempt is not None and self.is_open:
            self.begun = True
            status = dict(headers).get(b":status", b"")[:3]
            number = int(status) if status.isdigit() else 0
            self._reader = AnswerReader(self._attempt, self._replica_id, number, headers)

    def show_body(self, piece: bytes) -> None:
        """Take a piece of the answer's body."""
        if self._later is not None:
            self._later.append(partial(self.show_body, piece))
        elif self._reader is not None and self.is_open:
            try:
                self._reader.feed(piece)
            except (ReplicaFailed, RequestRejected) as error:
                self._settle(error)

    def show_end(self, has_body: bool = True) -> None:
        """Take the end of the answer; `has_body`: its body was shown."""
        if self._later is not None:
            self._later.append(partial(self.show_end, has_body))
        elif self._reader is not None and self.is_open:
            try:
                (self._reader.end if has_body else self._reader.end_unseen)()
            except (ReplicaFailed, RequestRejected) as error:
                self._settle(error)
            else:
                self._settle(None)

    def leave(self) -> None:
        """Note that nothing more is shown: all was, or somebody is gone."""
        if self._later is not None:
            self._later.append(self.leave)
        elif self._task is not None and (self._end is None or self.is_open):
            self._task.cancel()

    def show_failure(self, error: Exception) -> None:
        """Take the end of an answer that failed on its way."""
        if self._later is not None:
            self._later.append(partial(self.show_failure, error))
        elif self.is_open:
            self.begun = True  # The proxy, or Serve, tells its caller: it is not tried again.
            self._settle(error)

    def note_other(self, replica_id: str, error: ReplicaFailed) -> None:
        """Count another replica as picked, which answers in place of the one that was.

        `error` says what is wrong with the latter.
        """
        if self._later is None and self.is_open and replica_id != self._replica_id:
            self.serves, self._later = replica_id, []
            self._settle(error)

    def _go_on(self) -> None:
        """Take what was shown meanwhile."""
        later, self._later = self._later, None
        for show in later or ():
            show()

    def _settle(self, error: Exception | None) -> None:
        """End the attempt."""
        assert self._end is not None
        self._reader = None
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)
