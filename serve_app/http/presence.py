"""Whether whoever asked is still there: nobody generates for those who have left."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive


class Presence:
    """Cancels the task that answers as soon as its caller leaves, as a context.

    The context ends without an error then, and `is_gone` says that nobody reads any more.
    """

    def __init__(self, receive: Receive) -> None:
        """Watch a request whose body has been read."""
        self._receive = receive
        self.is_gone = False

    def __enter__(self) -> Presence:
        """Begin to watch."""
        task = asyncio.current_task()
        assert task is not None
        self._answering = task
        self._leaving = asyncio.create_task(self._wait_until_gone())
        self._leaving.add_done_callback(self._leave)
        return self

    def ignore(self) -> None:
        """Cancel nothing from now on."""
        self._leaving.remove_done_callback(self._leave)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        """End to watch."""
        self.ignore()
        self._leaving.cancel()
        if self.is_gone and isinstance(error, asyncio.CancelledError):
            self._answering.uncancel()
            return True
        return False

    def _leave(self, _: asyncio.Task[None]) -> None:
        self.is_gone = True
        self._answering.cancel()

    async def _wait_until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
