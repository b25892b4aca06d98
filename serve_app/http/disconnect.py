"""Cancels the task of an answer when its caller disconnects."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

from serve_app.http.connection import CallerConnection


class CancelOnDisconnect:
    """Cancels the task of an answer when its caller disconnects.

    The context ends without an error then, and `is_gone` says that nobody reads any more.
    """

    def __init__(self, receive: Receive, connection: CallerConnection | None = None) -> None:
        """Watch a request whose body has been read; our own connections need no task for that."""
        self._receive, self._connection = receive, connection
        self._leaving: asyncio.Task[None] | None = None
        self.is_gone = False

    def __enter__(self) -> CancelOnDisconnect:
        """Begin to watch."""
        task = asyncio.current_task()
        assert task is not None
        self._answering = task
        if self._connection is None or not self._connection.on_leave(self._leave):
            self._leaving = asyncio.create_task(self._wait_until_gone())
            self._leaving.add_done_callback(self._left)
        return self

    def ignore(self) -> None:
        """Cancel nothing from now on."""
        if self._leaving is not None:
            self._leaving.remove_done_callback(self._left)
        elif self._connection is not None:
            self._connection.on_leave(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        """Stop watching."""
        self.ignore()
        if self._leaving is not None:
            self._leaving.cancel()
        if self.is_gone and isinstance(error, asyncio.CancelledError):
            self._answering.uncancel()
            return True
        return False

    def _left(self, _: asyncio.Task[None]) -> None:
        self._leave()

    def _leave(self) -> None:
        self.is_gone = True
        self._answering.cancel()

    async def _wait_until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
