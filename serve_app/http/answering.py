"""Between the gateway and ASGI: one answer written to a caller, who may leave."""

from __future__ import annotations

import asyncio
import json

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.cluster import SloClass
from serve_app.gateway.exchange import Headers, InferenceRequest
from serve_app.gateway.gateway import Gateway, Unserved
from serve_app.http.errors import openai_error

EVENTS = b"text/event-stream"


class AsgiDownstream:
    """A caller behind an ASGI server; where the endpoint names no request, the gateway does."""

    def __init__(self, send: Send, request_id: str) -> None:
        """Send nothing yet."""
        self.begun = False
        self.has_events = False
        """Whether what has begun is a stream of events."""
        self._send, self._request_id = send, request_id.encode()
        self._ends_line = True

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head."""
        self.begun = True
        named = list(headers)
        names = {name: value for name, value in named}
        self.has_events = names.get(b"content-type", EVENTS).startswith(EVENTS)
        if b"x-request-id" not in names:
            named.append((b"x-request-id", self._request_id))
        await self._send({"type": "http.response.start", "status": status, "headers": named})

    async def write(self, data: bytes) -> None:
        """Send a piece of the body; waits while the caller reads too slowly."""
        self._ends_line = data.endswith((b"\n\n", b"\r\n\r\n"))
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

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
    gateway: Gateway,
    request: InferenceRequest,
    service_class: SloClass,
    receive: Receive,
    send: Send,
) -> None:
    """Have a request answered, unless its caller leaves.

    Raises:
        Exception: As `Gateway.serve`, where nothing has been sent.
    """
    downstream = AsgiDownstream(send, request.request_id)
    serving = asyncio.current_task()
    assert serving is not None
    leaving = asyncio.create_task(_wait_until_gone(receive))

    def leave(_: asyncio.Task[None]) -> None:
        serving.cancel()

    leaving.add_done_callback(leave)
    try:
        await gateway.serve(request, service_class, downstream)
    except asyncio.CancelledError:
        if not leaving.done():
            raise
        # Nobody reads what would be sent.
        serving.uncancel()
        return
    except Unserved as error:
        leaving.remove_done_callback(leave)
        if not downstream.begun:
            raise
        # What is no stream has no place for a reason: the connection breaks off.
        if downstream.has_events:
            await downstream.end_with_error(str(error))
        return
    finally:
        leaving.remove_done_callback(leave)
        leaving.cancel()
    await downstream.end()


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Answering(Response):
    """A response that a FastAPI route returns: what the gateway will answer."""

    def __init__(
        self, gateway: Gateway, request: InferenceRequest, service_class: SloClass
    ) -> None:
        """Ask nothing yet."""
        super().__init__()
        self._ask = gateway, request, service_class

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        await answer(*self._ask, receive, send)
