"""The caller's connection, where more is needed of it than ASGI has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

CONNECTION = "caller_connection"
"""Its name in a scope's `state`."""


class Leavable(Protocol):
    """A server's connection whose loss can be observed."""

    leave: Callable[[], None] | None
    """Is called when the caller leaves."""


@dataclass(slots=True)
class CallerConnection:
    """What connections of this listener can do that ASGI, whose calls may wait, cannot.

    Only a task can wait, and to make or to wake one takes longer than to write a token.
    """

    _protocol: Leavable
    cycle: RequestResponseCycle

    def on_leave(self, leave: Callable[[], None] | None) -> bool:
        """Set a function to call when the caller leaves; None: none.

        False: the caller has left already, and nothing is called.
        """
        if self.cycle.disconnected:
            return False
        if leave is not None:
            # Who does not read hears of no end.
            self.cycle.flow.resume_reading()
        self._protocol.leave = leave
        return True

    def write(self, data: bytes, chunk: bytes | None = None) -> bool:
        """Write a piece, if the body has begun, is chunked, and its reader keeps up.

        `chunk` is the same piece with the length before it, where it came as one.
        """
        cycle = self.cycle
        if not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected:
            return False
        cycle.transport.write(chunk or b"%x\r\n%b\r\n" % (len(data), data))
        return True


def connection_of(scope: Scope) -> CallerConnection | None:
    """Return the connection of a request; None: another server's."""
    connection: CallerConnection | None = scope.get("state", {}).get(CONNECTION)
    return connection
