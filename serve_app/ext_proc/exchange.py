"""One HTTP request of a proxy: a stream of messages in, and the pick and the bodies out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from serve_app.ext_proc import messages
from serve_app.ext_proc.addresses import Addresses
from serve_app.ext_proc.delivery import Delivery
from serve_app.ext_proc.http2 import INTERNAL, Stream
from serve_app.ext_proc.protocol import (
    BUFFERED,
    FULL_DUPLEX_STREAMED,
    NONE,
    PART,
    ProcessingRequest,
)
from serve_app.gateway.exchange import Attempt
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.generation import Headers
from serve_app.http.data_path import SENDER

logger = logging.getLogger(__name__)

_KEYS = ("authorization", "x-api-key")
_OBSERVED_S = 0.25
"""Time for a filter that observes to begin, after the one that asks for picks has ended."""


@dataclass
class Site:
    """What all requests of proxies share."""

    app: ASGIApp
    """Reads, places and settles requests: the data path of a gateway."""
    addresses: Addresses
    max_body_bytes: int
    hides_keys: bool
    """Whether callers' keys are the gateway's, and endpoints do not get them."""
    deliveries: dict[bytes, Delivery] = field(default_factory=dict)
    """Requests under way, by the decision id that their headers get."""


class Exchange:
    """One stream of a filter: it asks for a pick, or (`Observer`) shows answers alone."""

    def __init__(self, site: Site, stream: Stream) -> None:
        self._site, self._stream = site, stream

    def take(self, message: bytes) -> None:
        """Handle the first message: it says what the filter is for."""
        request = ProcessingRequest.FromString(message)
        kind = Observer if request.observability_mode else Picking
        self._stream.call = call = kind(self._site, self._stream)
        call.handle(request)

    def close(self) -> None:
        """Do nothing: there was no message."""
        self._stream.end()


class Picking:
    """A stream that asks for a pick, and may show the answer."""

    def __init__(self, site: Site, stream: Stream) -> None:
        self._site, self._stream = site, stream
        self._delivery = Delivery(site.addresses, self._place)
        self._request_mode = self._response_mode = FULL_DUPLEX_STREAMED
        self._scope: Scope = {}
        self._body = bytearray()
        self._has_body = self._has_trailers = False
        self._status = 500
        self._headers: Headers = ()

    def take(self, message: bytes) -> None:
        """Handle a message of the proxy."""
        self.handle(ProcessingRequest.FromString(message))

    def handle(self, message: Any) -> None:
        """Handle a message of the proxy that has been read."""
        kind, delivery = message.WhichOneof(PART), self._delivery
        if kind == "request_headers":
            self._take_head(message)
        elif kind == "request_body":
            self._take_body(message)
        elif kind == "request_trailers" and not delivery.has_started:
            self._has_trailers = True
            self._ask()
        elif kind is not None:
            # First: the proxy may close the stream once it has what it waits for.
            show(delivery, kind, message)
            if kind == "response_body" and self._response_mode == FULL_DUPLEX_STREAMED:
                body = message.response_body
                self._stream.send(*messages.pieces(kind, body.body, body.end_of_stream))
            elif kind == "response_headers" and delivery.added:
                self._stream.send(messages.answered(delivery.added))
            else:
                self._stream.send(messages.GO_ON[kind])

    def close(self) -> None:
        """Take the end of the stream."""
        self._stream.end()
        delivery = self._delivery
        if self._response_mode == NONE and not delivery.is_observed:
            delivery.show_end(has_body=False)  # It is open for as long as the answer takes.
            if delivery.is_open and not delivery.begun:
                # Another filter may show the answer: this one has done its part.
                asyncio.get_running_loop().call_later(_OBSERVED_S, self._leave)
                return
        self._leave()

    def _leave(self) -> None:
        if not self._delivery.is_observed:
            self._delivery.leave()

    def _take_head(self, message: Any) -> None:
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        head = messages.headers_of(message.request_headers)
        named = dict(head)
        target = named.get(b":path", b"/")
        path, _, query = target.partition(b"?")
        # The proxy, which is trusted, has noted the caller's address last.
        noted = named.get(b"x-forwarded-for", b"").decode("latin-1").rpartition(",")[2].strip()
        self._scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1", "method": named.get(b":method", b"GET").decode("latin-1"),
            "scheme": "http", "path": path.decode("latin-1"), "raw_path": path,
            "query_string": query, "root_path": "", "server": None,
            "headers": [header for header in head if not header[0].startswith(b":")],
            "client": (noted or self._stream.peer, 0), "state": {},
            "extensions": {SENDER: self._delivery},
        }  # fmt: skip
        if (subset := messages.subset_of(message)) is not None:
            self._delivery.allowed = self._site.addresses.replicas_at(subset)
        self._has_body = not message.request_headers.end_of_stream
        if not self._has_body or self._request_mode not in (FULL_DUPLEX_STREAMED, BUFFERED):
            self._ask()
        elif self._request_mode == BUFFERED:
            # The body comes only after an answer: where the request goes is said with it.
            self._stream.send(messages.GO_ON["request_headers"])

    def _take_body(self, message: Any) -> None:
        if self._delivery.has_started:
            # It was placed by its head, or is too long.
            self._stream.send(messages.GO_ON["request_body"])
            return
        self._body += message.request_body.body
        is_too_long = len(self._body) > self._site.max_body_bytes
        if message.request_body.end_of_stream or is_too_long:
            self._ask()

    def _ask(self) -> None:
        deliveries, name = self._site.deliveries, self._delivery.id.encode()
        deliveries[name] = self._delivery
        self._delivery.start(self._serve(), lambda: deliveries.pop(name, None))

    async def _serve(self) -> None:
        try:
            await self._site.app(self._scope, self._receive, self._send)
        except Exception:
            logger.exception("a request of a proxy")
            self._stream.end(INTERNAL)

    async def _receive(self) -> Message:
        return {"type": "http.request", "body": bytes(self._body), "more_body": False}

    async def _send(self, message: Message) -> None:
        """Have the proxy answer where no replica does: what an ASGI application sends."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message["headers"]
        elif not self._delivery.is_placed:
            self._delivery.is_placed = True
            body = message.get("body", b"")
            self._stream.send(messages.refusal(self._status, self._headers, body))

    def _place(self, backend: ExternalBackend, attempt: Attempt, endpoints: Sequence[str]) -> None:
        """Say where the request goes, and hand its body back."""
        call = attempt.request.call
        lines, body = backend.prepare(attempt)
        sent = {*self._scope["headers"]}
        headers = [
            (name, value)
            for line in lines.splitlines()
            for name, _, value in [line.partition(b": ")]
            if (name, value) not in sent
        ]
        removed: Sequence[str] = ()
        if self._site.hides_keys:
            removed = [key for key in _KEYS if key.encode() not in dict(headers)]
        if len(body) != len(call.body):
            headers.append((b"content-length", b"%d" % len(body)))
        headers.append((messages.DECISION, self._delivery.id.encode()))
        if self._has_body and self._request_mode == BUFFERED:
            new_body = None if body == call.body else body
            self._stream.send(messages.place("request_body", endpoints, headers, removed, new_body))
            return
        placed = [messages.place("request_headers", endpoints, headers, removed)]
        if self._has_body and self._request_mode == FULL_DUPLEX_STREAMED:
            placed += messages.pieces("request_body", body, is_end=not self._has_trailers)
        if self._has_trailers:
            placed.append(messages.GO_ON["request_trailers"])
        self._stream.send(*placed)


class Observer:
    """A stream that shows an answer which another stream has asked a pick for."""

    def __init__(self, site: Site, stream: Stream) -> None:
        self._site, self._stream = site, stream
        self._delivery: Delivery | None = None

    def take(self, message: bytes) -> None:
        """Handle a message of the proxy."""
        self.handle(ProcessingRequest.FromString(message))

    def handle(self, message: Any) -> None:
        """Handle a message of the proxy that has been read; nothing is answered."""
        kind = message.WhichOneof(PART)
        if kind == "request_headers":
            name = dict(messages.headers_of(message.request_headers)).get(messages.DECISION, b"")
            self._delivery = self._site.deliveries.get(name)
            if self._delivery is not None:
                self._delivery.is_observed = True
        elif self._delivery is not None and kind is not None:
            show(self._delivery, kind, message)
            if self._delivery.is_over:
                self._stream.end()  # A filter that observes would keep it for seconds.

    def close(self) -> None:
        """Take the end of the stream."""
        self._stream.end()
        if self._delivery is not None:
            self._delivery.leave()


def show(delivery: Delivery, kind: str, message: Any) -> None:
    """Show a part of the answer."""
    is_end = kind == "response_trailers"
    if kind == "response_headers":
        headers = messages.headers_of(message.response_headers)
        delivery.show_head(headers, messages.served_by(message))
        is_end = message.response_headers.end_of_stream
    elif kind == "response_body":
        delivery.show_body(message.response_body.body)
        is_end = message.response_body.end_of_stream
    if is_end:
        delivery.show_end()
