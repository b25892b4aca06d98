"""One HTTP request of a proxy: a stream of messages in, and the pick and the bodies out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

from serve_app.ext_proc import messages
from serve_app.ext_proc.addresses import Addresses
from serve_app.ext_proc.delivery import ProxyDelivery
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
from serve_app.http.intake import SENDER

logger = logging.getLogger(__name__)

_KEYS = ("authorization", "x-api-key")
_ENCODING, _LENGTH = b"content-encoding", b"content-length"
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
    deliveries: dict[bytes, ProxyDelivery] = field(default_factory=dict)
    """Requests under way, by the decision id that their headers get."""


class Exchange:
    """One stream of a filter: `Picking`, or one that shows answers alone (`Observer`)."""

    def __init__(self, site: Site, stream: Stream) -> None:
        self._site, self._stream = site, stream

    def take(self, message: bytes) -> None:
        """Handle a message of the proxy."""
        self.handle(ProcessingRequest.FromString(message))

    def handle(self, message: Any) -> None:
        """Handle the first message, once it is read: it says what the filter is for."""
        kind = Observer if message.observability_mode else Picking
        self._stream.call = call = kind(self._site, self._stream)
        call.handle(message)

    def close(self) -> None:
        """Do nothing: there was no message."""
        self._stream.end()


class Picking(Exchange):
    """A stream that asks for a pick, and may show the answer."""

    def __init__(self, site: Site, stream: Stream) -> None:
        super().__init__(site, stream)
        self._delivery = ProxyDelivery(site.addresses, self._place)
        self._request_mode = self._response_mode = FULL_DUPLEX_STREAMED
        self._scope: Scope = {}
        """Of the request; empty: its head has not come."""
        self._body = bytearray()
        self._shows_body = self._has_length = self._has_trailers = False
        self._status = 500
        self._headers: Headers = ()

    def handle(self, message: Any) -> None:
        """Handle a message of the proxy that has been read."""
        kind, delivery = message.WhichOneof(PART), self._delivery
        if kind == "request_headers":
            if not self._scope:
                self._take_head(message)
        elif kind is None or not self._scope:
            return  # It is none of those that are known, or there is no request yet.
        elif kind == "request_body":
            self._take_body(message)
        elif kind == "request_trailers":
            self._take_trailers()
        else:
            # First: the proxy may close the stream once it has what it waits for.
            show(delivery, kind, message, has_body=self._response_mode != NONE)
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
        headers = [header for header in head if not header[0].startswith(b":")]
        # The proxy, which is trusted, has noted the caller's address last.
        noted = named.get(b"x-forwarded-for", b"").decode("latin-1").rpartition(",")[2].strip()
        self._scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1", "method": named.get(b":method", b"GET").decode("latin-1"),
            "scheme": "http", "path": unquote(path.decode("latin-1")), "raw_path": path,
            "query_string": query, "root_path": "", "server": None,
            "headers": headers,
            "client": (noted or self._stream.peer, 0), "state": {},
            "extensions": {SENDER: self._delivery},
        }  # fmt: skip
        self._has_length = _LENGTH in named
        if (subset := messages.subset_of(message)) is not None:
            self._delivery.allowed = self._site.addresses.replicas_at(subset)
        has_body = not message.request_headers.end_of_stream
        self._shows_body = has_body and self._request_mode in (FULL_DUPLEX_STREAMED, BUFFERED)
        if not self._shows_body:
            if has_body:
                self._scope["headers"] = [header for header in headers if header[0] != _ENCODING]
                self._body += b"{}"  # As if it named nothing.
            self._ask()
        elif self._request_mode == BUFFERED:
            # The body comes only after an answer: where the request goes is said with it.
            self._stream.send(messages.GO_ON["request_headers"])

    def _take_body(self, message: Any) -> None:
        if not self._delivery.has_started:
            self._body += message.request_body.body
            is_too_long = len(self._body) > self._site.max_body_bytes
            # A body that was buffered is whole: where trailers follow, it is not the end.
            is_whole = message.request_body.end_of_stream or self._request_mode == BUFFERED
            if is_whole or is_too_long:
                self._ask()
        elif self._request_mode != FULL_DUPLEX_STREAMED:
            # Else it is too long, and the refusal is the next that the proxy is told.
            self._stream.send(messages.GO_ON["request_body"])

    def _take_trailers(self) -> None:
        if not self._delivery.has_started:
            self._has_trailers = True
            self._ask()
        elif self._request_mode != FULL_DUPLEX_STREAMED:
            self._stream.send(messages.GO_ON["request_trailers"])

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
        lines, body = backend.prepare(attempt)
        wanted = [(name, value) for name, _, value in map(_parted, lines.splitlines())]
        sent, names = {*self._scope["headers"]}, dict(wanted)
        headers = [header for header in wanted if header not in sent]
        removed: list[str] = []
        if self._site.hides_keys:
            removed += [key for key in _KEYS if key.encode() not in names]
        new_body = body if self._shows_body and body != attempt.request.call.body else None
        if new_body is not None:
            # The proxy has the body as it came, which may have been encoded.
            removed.append(_ENCODING.decode())
            if self._has_length:
                headers.append((_LENGTH, b"%d" % len(body)))
        headers.append((messages.DECISION, self._delivery.id.encode()))
        if self._shows_body and self._request_mode == BUFFERED:
            self._stream.send(messages.place("request_body", endpoints, headers, removed, new_body))
            return
        placed = [messages.place("request_headers", endpoints, headers, removed)]
        if self._shows_body:
            handed_back = bytes(self._body) if new_body is None else new_body
            placed += messages.pieces("request_body", handed_back, is_end=not self._has_trailers)
        if self._has_trailers:
            placed.append(messages.GO_ON["request_trailers"])
        self._body.clear()  # It may be long, and so may be the answer.
        self._stream.send(*placed)


class Observer(Exchange):
    """A stream that shows an answer which another stream has asked a pick for."""

    _delivery: ProxyDelivery | None = None

    def handle(self, message: Any) -> None:
        """Handle a message of the proxy that has been read; nothing is answered."""
        kind = message.WhichOneof(PART)
        if kind == "request_headers" and self._delivery is None:
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


def show(delivery: ProxyDelivery, kind: str, message: Any, has_body: bool = True) -> None:
    """Show a part of the answer; `has_body`: its body is shown, too."""
    is_end = kind == "response_trailers"
    if kind == "response_headers":
        headers = messages.headers_of(message.response_headers)
        delivery.show_head(headers, messages.served_by(message))
        is_end = message.response_headers.end_of_stream
        has_body = has_body or is_end
    elif kind == "response_body":
        delivery.show_body(message.response_body.body)
        is_end = message.response_body.end_of_stream
    if is_end:
        delivery.show_end(has_body)


def _parted(line: bytes) -> tuple[bytes, bytes, bytes]:
    return line.partition(b": ")
