"""Between the gateway and ASGI: one answer written to a caller, who may leave."""

from __future__ import annotations

import json

from starlette.types import Receive, Send

from serve_app.cluster import SloClass
from serve_app.gateway.exchange import Headers, InferenceRequest, RequestServer
from serve_app.gateway.gateway import Unserved
from serve_app.http.connection import CallerConnection
from serve_app.http.presence import Presence
from serve_app.http.reasons import openai_error

EVENTS = b"text/event-stream"
LIMITS = b"x-ratelimit-"


class AsgiDownstream:
    """A caller behind an ASGI server; where the endpoint names no request, the gateway does."""

    def __init__(
        self, send: Send, request_id: str, connection: CallerConnection | None = None
    ) -> None:
        """Send nothing yet; `connection` writes pieces of a body without a wait."""
        self.begun = False
        self.has_events = False
        """Whether what has begun is a stream of events."""
        self._send, self._request_id, self._connection = send, request_id.encode(), connection
        self._ends_line = True
        self._added: Headers = ()

    def add_headers(self, headers: Headers) -> None:
        """Have these in the head, in place of all of an endpoint's about limits."""
        self._added = headers

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head."""
        self.begun = True
        named = list(headers)
        if self._added:
            named = [one for one in named if not one[0].startswith(LIMITS)]
            named += self._added
        names = {name: value for name, value in named}
        self.has_events = names.get(b"content-type", EVENTS).startswith(EVENTS)
        if b"x-request-id" not in names:
            named.append((b"x-request-id", self._request_id))
        await self._send({"type": "http.response.start", "status": status, "headers": named})

    async def write(self, data: bytes) -> None:
        """Send a piece of the body; waits while the caller reads too slowly."""
        self._ends_line = data.endswith((b"\n\n", b"\r\n\r\n"))
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def write_now(self, data: bytes, chunk: bytes | None = None) -> bool:
        """Send a piece of the body; False: it was not sent, since the caller reads too slowly."""
        if self._connection is None or not self._connection.write(data, chunk):
            return False
        self._ends_line = data.endswith((b"\n\n", b"\r\n\r\n"))
        return True

    async def end(self) -> None:
        """Send the end of the body."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def end_with_error(self, reason: str) -> None:
        """Send an event that says why the stream ends."""
        event = json.dumps({"error": openai_error(reason, "server_error")}, separators=(",", ":"))
        gap = "" if self._ends_line else "\n\n"
        await self.write(f"{gap}data: {event}\n\n".encode())
        await self.end()


async def answer(
    gateway: RequestServer,
    request: InferenceRequest,
    service_class: SloClass,
    receive: Receive,
    send: Send,
    connection: CallerConnection | None = None,
) -> None:
    """Have a request answered, unless its caller leaves.

    Args:
        gateway: Has it answered.
        request: What is asked.
        service_class: Its class.
        receive: Tells when its caller leaves.
        send: Takes the answer.
        connection: Its caller's, which needs no task; None: it is another server's.

    Raises:
        Exception: As `Gateway.serve`, where nothing has been sent.
    """
    downstream = AsgiDownstream(send, request.request_id, connection)
    with Presence(receive, connection) as caller:
        try:
            await gateway.serve(request, service_class, downstream)
        except Unserved as error:
            caller.ignore()
            if not downstream.begun:
                raise
            # What is no stream has no place for a reason: the connection breaks off.
            if downstream.has_events:
                await downstream.end_with_error(str(error))
            return
    if not caller.is_gone:
        await downstream.end()
