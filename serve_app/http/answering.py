"""Between the gateway and ASGI: an answer is written to its caller, who may leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Receive, Send

from serve_app.cluster import SloClass
from serve_app.gateway.exchange import InferenceRequest
from serve_app.gateway.faults import EndpointError
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.generation import Headers, Refused, RequestRejected, Unanswerable, Unserved
from serve_app.http.answer_writer import EVENT_HEADERS
from serve_app.http.connection import CallerConnection
from serve_app.http.disconnect import CancelOnDisconnect
from serve_app.http.reasons import kind_of, openai_error

EVENTS = b"text/event-stream"
LIMITS = b"x-ratelimit-"
_COMMENT = b": keep-alive\n\n"


class AsgiDownstream:
    """A caller behind an ASGI server; the gateway adds a request id if the endpoint has none."""

    def __init__(
        self, send: Send, request: InferenceRequest, connection: CallerConnection | None = None,
        every_s: float | None = None,
    ) -> None:  # fmt: skip
        self.begun = False
        self.has_head = self.has_events = False
        """Whether the head has been sent, and whether it is that of a stream of events."""
        self._send, self._request, self._connection = send, request, connection
        self._ends_line = True
        self._added: Headers = ()
        self._every_s = every_s
        self.comments: asyncio.Task[None] | None = None

    def add_headers(self, headers: Headers) -> None:
        """Add these to the head, in place of all of an endpoint's about limits."""
        self._added = headers

    def comment(self) -> None:
        """Send comments until a piece of the body is sent."""
        assert self._every_s is not None
        self.comments = asyncio.create_task(self._comment(self._every_s))

    def be_silent(self) -> None:
        """Send no more comments."""
        assert self.comments is not None
        self.comments.cancel()
        self.comments = None

    async def _comment(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            if not self.has_head:
                await self._send_head(200, EVENT_HEADERS)
            await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head; where comments already sent one, the answer has to be a stream, too."""
        self.begun = True
        if self.comments is not None:
            self.be_silent()
        if not self.has_head:
            await self._send_head(status, headers)
        elif not _are_events(headers):
            raise Unserved("the endpoint answered with something else than a stream of events")
        if self.has_events and self._every_s is not None:
            self.comment()

    async def _send_head(self, status: int, headers: Headers) -> None:
        named = list(headers)
        if self._added:
            named = [header for header in named if not header[0].startswith(LIMITS)]
            named += self._added
        if all(name != b"x-request-id" for name, _ in named):
            named.append((b"x-request-id", self._request.request_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": named})
        self.has_head, self.has_events = True, _are_events(headers)

    async def write(self, data: bytes) -> None:
        """Send a piece of the body; waits while the caller reads too slowly."""
        if self.comments is not None:
            self.be_silent()
        self._ends_line = data.endswith((b"\n\n", b"\r\n\r\n"))
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def write_now(self, data: bytes, chunk: bytes | None = None) -> bool:
        """Send a piece of the body; False: not sent, since the caller reads too slowly."""
        if self._connection is None or not self._connection.write(data, chunk):
            return False
        self._ends_line = data.endswith((b"\n\n", b"\r\n\r\n"))
        return True

    async def end(self) -> None:
        """Send the end of the body."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def end_with_error(self, error: Exception) -> None:
        """Send an event that says why the stream ends, in the form of the route's clients."""
        gap = b"" if self._ends_line else b"\n\n"
        await self.write(gap + _error_event(self._request.call.path, error))
        await self.end()


def _are_events(headers: Headers) -> bool:
    """Whether a body is a stream of events, to which an event can be added."""
    names = dict(headers)
    is_stream = names.get(b"content-type", EVENTS).lower().startswith(EVENTS)
    return is_stream and b"content-encoding" not in names


def _error_event(path: bytes, error: Exception) -> bytes:
    """Return the event that says why a stream ends, in the form of its route's clients."""
    status = error.status if isinstance(error, Refused | Unanswerable) else 503
    message, kind, code = str(error), kind_of(status), None
    if isinstance(error, RequestRejected):
        rejection = EndpointError.of_answer(error.status, error.body)
        message, code = rejection.message, rejection.code
        kind = str(rejection.type or kind_of(error.status))
    event: dict[str, Any] = {"type": "error", "message": message}
    if path.startswith(b"/v1/messages"):
        kind = "api_error" if kind == "server_error" else kind
        event = {"type": "error", "error": {"type": kind, "message": message}}
    elif path.startswith(b"/v1/responses"):
        event |= {"code": str(code or kind), "param": None, "sequence_number": 0}
    else:
        event = {"error": openai_error(message, kind, code=code)}
    name = "event: error\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()


async def answer(
    gateway: Gateway,
    request: InferenceRequest,
    service_class: SloClass,
    receive: Receive,
    send: Send,
    connection: CallerConnection | None = None,
) -> None:
    """Have a request answered, unless its caller leaves.

    `connection` is the caller's, and saves a task that waits for it to leave; None: the server is
    not ours.

    Raises:
        Exception: As `Gateway.serve`, where nothing has been sent.
    """
    every_s = gateway.cluster.gateway.sse_keep_alive_interval_s if request.call.stream else None
    downstream = AsgiDownstream(send, request, connection, every_s)
    if every_s is not None:
        downstream.comment()
    with CancelOnDisconnect(receive, connection) as caller:
        try:
            await gateway.serve(request, service_class, downstream)
        except (Refused, RequestRejected, Unserved) as error:
            caller.ignore()
            if not downstream.has_head:
                raise
            # What is no stream has no place for a reason: the connection breaks off.
            if downstream.has_events:
                await downstream.end_with_error(error)
            return
        finally:
            if downstream.comments is not None:
                downstream.be_silent()
    if not caller.is_gone:
        await downstream.end()
