"""One HTTP request of a proxy: a stream of messages in, and the pick and the bodies out.

A request is read, let in, placed, logged and settled as any other of the gateway's. Only its bytes
go another way: the proxy sends them to the replica that is picked, and shows the answer here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from starlette.types import ASGIApp, Message, Scope

from serve_app.ext_proc import messages
from serve_app.ext_proc.addresses import Addresses
from serve_app.ext_proc.http2 import INTERNAL, Stream
from serve_app.gateway.answer_reader import AnswerReader
from serve_app.gateway.exchange import Attempt, Backend
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.generation import (
    Headers,
    ReplicaFailed,
    ReplicaUnreachable,
    RequestRejected,
)
from serve_app.http.data_path import SENDER

logger = logging.getLogger(__name__)

_MOST_ENDPOINTS = 3
"""The picked one, and those that stand in for it where the proxy does not reach it."""
_NONE, _BUFFERED = ProcessingMode.NONE, ProcessingMode.BUFFERED
_FULL_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
_KEYS = ("authorization", "x-api-key")


class Exchange:
    """A request of a proxy, which stands in for its caller and for the backend of its pool.

    It is a `Downstream` and a `Sender` of `serve_app.gateway.exchange`, and handles one call
    (`serve_app.ext_proc.http2.Call`).
    """

    def __init__(
        self, stream: Stream, app: ASGIApp, addresses: Addresses, max_body_bytes: int,
        hides_keys: bool,
    ) -> None:  # fmt: skip
        """Have `app` read, place and settle what comes over a stream.

        `hides_keys`: callers' keys are the gateway's, and endpoints do not get them.
        """
        self.begun = False
        self.allowed: frozenset[str] | None = None
        self._stream, self._app, self._addresses = stream, app, addresses
        self._max_body_bytes, self._hides_keys = max_body_bytes, hides_keys
        self._request_mode = self._response_mode = _FULL_DUPLEX
        self._scope: Scope = {}
        self._body = bytearray()
        self._has_body = self._has_trailers = False
        self._task: asyncio.Task[None] | None = None
        """Serves the request, once all of it is here that there will be."""
        self._is_told = False
        """Whether the proxy has been told where the request goes, or what its answer is."""
        self._attempt: Attempt | None = None
        self._replica_id = ""
        self._end_of_attempt: asyncio.Future[None] | None = None
        self._later: list[ProcessingRequest] | None = None
        """Messages that wait for another attempt to begin; None: none have to."""
        self._reader: AnswerReader | None = None
        self._status = 500
        self._headers: Headers = ()
        self._added: Headers = ()

    def take(self, message: bytes) -> None:
        """Handle a message of the proxy."""
        request = ProcessingRequest.FromString(message)
        if self._later is None:
            self._handle(request)
        else:
            self._later.append(request)

    def close(self) -> None:
        """Take the end of the stream: the answer has ended, or the caller or the proxy is gone."""
        if self._response_mode == _NONE:
            self._end(is_shown=False)  # The stream is open for as long as the answer takes.
        if self._task is not None and (self._attempt is None or not self._has_ended):
            self._task.cancel()
        self._stream.end()

    def _handle(self, message: ProcessingRequest) -> None:
        kind = message.WhichOneof("request")
        if kind == "response_body":
            body = message.response_body
            self._follow(body.body, body.end_of_stream)
        elif kind == "request_headers":
            self._take_head(message)
        elif kind == "request_body":
            self._take_body(message)
        elif kind == "response_headers":
            self._begin(message)
        elif kind == "request_trailers" and self._task is None:
            self._has_trailers = True
            self._ask()
        elif kind is not None:
            if kind == "response_trailers":
                self._end()
            self._stream.send(messages.GO_ON[kind])

    def _take_head(self, message: ProcessingRequest) -> None:
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
            "extensions": {SENDER: self},
        }  # fmt: skip
        if (subset := messages.subset_of(message)) is not None:
            self.allowed = self._addresses.replicas_at(subset)
        self._has_body = not message.request_headers.end_of_stream
        if not self._has_body or self._request_mode not in (_FULL_DUPLEX, _BUFFERED):
            self._ask()
        elif self._request_mode == _BUFFERED:
            # The body comes only after an answer: where the request goes is said with it.
            self._stream.send(messages.GO_ON["request_headers"])

    def _take_body(self, message: ProcessingRequest) -> None:
        if self._task is not None:
            # It was placed by its head, or is too long.
            self._stream.send(messages.GO_ON["request_body"])
            return
        self._body += message.request_body.body
        if message.request_body.end_of_stream or len(self._body) > self._max_body_bytes:
            self._ask()

    def _ask(self) -> None:
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        except Exception:
            logger.exception("a request of a proxy")
            self._stream.end(INTERNAL)
        finally:
            self._go_on()

    async def _receive(self) -> Message:
        return {"type": "http.request", "body": bytes(self._body), "more_body": False}

    async def _send(self, message: Message) -> None:
        """Have the proxy answer where no replica does: what an ASGI application sends."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message["headers"]
        elif not self._is_told:
            self._is_told = True
            body = message.get("body", b"")
            self._stream.send(messages.refusal(self._status, self._headers, body))

    async def answer(self, backend: Backend, attempt: Attempt, replica_ids: Sequence[str]) -> None:
        """Have the proxy send the request: see `serve_app.gateway.exchange.Sender`."""
        assert isinstance(backend, ExternalBackend)
        endpoints = [self._addresses.of(name) for name in replica_ids[:_MOST_ENDPOINTS]]
        if endpoints[0] is None:
            raise ReplicaUnreachable("the name of an endpoint has no address")
        self._attempt, self._replica_id = attempt, replica_ids[0]
        self._end_of_attempt = asyncio.get_running_loop().create_future()
        attempt.note_send()
        if self._is_told:
            self._go_on()
        else:
            self._is_told = True
            reached = [endpoint for endpoint in endpoints if endpoint is not None]
            self._stream.send(*self._placed(backend, attempt, reached))
        await self._end_of_attempt

    def _placed(
        self, backend: ExternalBackend, attempt: Attempt, endpoints: list[str]
    ) -> list[bytes]:
        """Messages that say where the request goes, and hand its body back."""
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
        if self._hides_keys:
            removed = [key for key in _KEYS if key.encode() not in dict(headers)]
        if len(body) != len(call.body):
            headers.append((b"content-length", b"%d" % len(body)))
        if self._has_body and self._request_mode == _BUFFERED:
            new_body = None if body == call.body else body
            return [messages.place("request_body", endpoints, headers, removed, new_body)]
        placed = [messages.place("request_headers", endpoints, headers, removed)]
        if self._has_body and self._request_mode == _FULL_DUPLEX:
            placed += messages.pieces("request_body", body, is_end=not self._has_trailers)
        if self._has_trailers:
            placed.append(messages.GO_ON["request_trailers"])
        return placed

    def add_headers(self, headers: Headers) -> None:
        """Add these to the head of the answer."""
        self._added = headers

    async def begin(self, status: int, headers: Headers) -> None:
        """Do nothing: the proxy sends the head."""

    async def write(self, data: bytes) -> None:
        """Do nothing: the proxy sends the body."""

    def write_now(self, data: bytes, chunk: bytes | None = None) -> bool:
        """Do nothing: the proxy sends the body."""
        return True

    def _begin(self, message: ProcessingRequest) -> None:
        """Take the head of the answer."""
        if self._is_another(messages.served_by(message)):
            self._later = [message]
            return
        headers = messages.headers_of(message.response_headers)
        if self._attempt is not None and not self._has_ended:
            self.begun = True
            status = int(dict(headers).get(b":status", b"0"))
            self._reader = AnswerReader(self._attempt, self._replica_id, status, headers)
        # First: the proxy may close the stream once it has what it waits for.
        if message.response_headers.end_of_stream:
            self._end()
        response = messages.GO_ON["response_headers"]
        self._stream.send(messages.answered(self._added) if self._added else response)

    @property
    def _has_ended(self) -> bool:
        return self._end_of_attempt is None or self._end_of_attempt.done()

    def _is_another(self, served: str) -> bool:
        """Whether another endpoint answers than the picked one; it then counts as picked."""
        if not served or self._has_ended or served == self._addresses.of(self._replica_id):
            return False
        replica_id = min(self._addresses.replicas_at([served]), default=None)
        if replica_id is None or self._attempt is None:
            return False
        self._attempt.request.sticks_to = replica_id
        self._settle(ReplicaUnreachable("the proxy did not reach an endpoint"))
        return True

    def _go_on(self) -> None:
        """Handle what has waited for an attempt."""
        later, self._later = self._later, None
        for message in later or ():
            self._handle(message)

    def _follow(self, piece: bytes, is_end: bool) -> None:
        """Take a piece of the answer's body; in full duplex the proxy waits to have it back."""
        if self._reader is not None:
            try:
                self._reader.feed(piece)
            except (ReplicaFailed, RequestRejected) as error:
                self._settle(error)
        if is_end:
            self._end()  # First, as above.
        if self._response_mode == _FULL_DUPLEX:
            self._stream.send(*messages.pieces("response_body", piece, is_end))
        else:
            self._stream.send(messages.GO_ON["response_body"])

    def _end(self, is_shown: bool = True) -> None:
        """Take the end of the answer, whose body was shown or not."""
        if self._reader is None:
            return
        try:
            (self._reader.end if is_shown else self._reader.end_unseen)()
        except (ReplicaFailed, RequestRejected) as error:
            self._settle(error)
        else:
            self._settle(None)

    def _settle(self, error: Exception | None) -> None:
        """End the attempt."""
        self._reader = None
        assert self._end_of_attempt is not None
        if self._end_of_attempt.done():
            return
        if error is None:
            self._end_of_attempt.set_result(None)
        else:
            self._end_of_attempt.set_exception(error)
