"""The connection that a request came by, as far as those who answer it need more than ASGI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

CONNECTION = "caller_connection"
"""Its name in a scope's `state`."""


class Leavable(Protocol):
    """A connection of a server."""

    leave: Callable[[], None] | None
    """Is called when the caller leaves."""


@dataclass(slots=True)
class CallerConnection:
    """What a request of this listener can do beside ASGI, whose calls may wait.

    Only a task can wait, and to make or to wake one takes longer than to write a token.
    """

    _protocol: Leavable
    cycle: RequestResponseCycle

    def on_leave(self, leave: Callable[[], None] | None) -> bool:
        """Have a function called when the caller leaves; None: none any more.

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
        """Write a piece, if the body has begun, is chunked and its reader keeps up.

        `chunk` is the same piece with the length before it, where it came as one.
        """
        cycle = self.cycle
        if not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected:
            return False
        cycle.transport.write(chunk or b"%x\r\n%b\r\n" % (len(data), data))
        return True


def connection_of(scope: Scope) -> CallerConnection | None:
    """Return the connection that a request came by; None: it is another server's."""
    connection: CallerConnection | None = scope.get("state", {}).get(CONNECTION)
    return connection
