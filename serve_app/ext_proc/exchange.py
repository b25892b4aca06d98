"""One HTTP request of a proxy: a stream of messages in, and the pick and the bodies out.

A request is read, let in, placed, logged and settled as any other of the gateway's. Only its bytes
go another way: the proxy sends them to the replica that is picked, and shows the answer here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import grpc
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from starlette.types import ASGIApp, Message, Scope

from serve_app.ext_proc import messages
from serve_app.ext_proc.addresses import Addresses
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

_MOST_ENDPOINTS = 3
"""The picked one, and those that stand in for it where the proxy does not reach it."""
_NONE, _BUFFERED = ProcessingMode.NONE, ProcessingMode.BUFFERED
_FULL_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
_KEYS = ("authorization", "x-api-key")

Context = grpc.aio.ServicerContext[ProcessingRequest, ProcessingResponse]


class Exchange:
    """A request of a proxy, which stands in for its caller and for the backend of its pool.

    It is a `Downstream` and a `Sender` of `serve_app.gateway.exchange`.
    """

    def __init__(
        self, app: ASGIApp, addresses: Addresses, max_body_bytes: int, hides_keys: bool,
        context: Context,
    ) -> None:  # fmt: skip
        """Have `app` read, place and settle what comes over `context`.

        `hides_keys`: callers' keys are the gateway's, and endpoints do not get them.
        """
        self.begun = False
        self.allowed: frozenset[str] | None = None
        self._app, self._addresses, self._context = app, addresses, context
        self._max_body_bytes, self._hides_keys = max_body_bytes, hides_keys
        self._writing = asyncio.Lock()
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
        self._begins = asyncio.Event()
        """Whether an attempt waits for its answer, or no other will."""
        self._reader: AnswerReader | None = None
        self._status, self._headers, self._added = 500, (), ()
        self._headers: Headers
        self._added: Headers

    async def run(self) -> None:
        """Handle all messages of the stream."""
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:
                await self._take(message)
        finally:
            if self._response_mode == _NONE:
                self._end(is_shown=False)  # The stream is open for as long as the answer takes.
            if self._task is not None:
                if self._end_of_attempt is None or not self._end_of_attempt.done():
                    self._task.cancel()  # The caller has left, or the proxy is gone.
                with contextlib.suppress(asyncio.CancelledError):
                    await self._task

    async def _take(self, message: ProcessingRequest) -> None:
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            await self._take_head(message)
        elif kind == "request_body":
            await self._take_body(message)
        elif kind == "response_headers":
            await self._begin(message)
        elif kind == "response_body":
            await self._follow(message.response_body.body, message.response_body.end_of_stream)
        elif kind == "request_trailers" and self._task is None:
            self._has_trailers = True
            self._ask()
        elif kind is not None:
            await self._write(messages.GO_ON[kind])
            if kind == "response_trailers":
                self._end()

    async def _write(self, *responses: ProcessingResponse) -> None:
        async with self._writing:
            for response in responses:
                await self._context.write(response)

    async def _take_head(self, message: ProcessingRequest) -> None:
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        head = messages.headers_of(message.request_headers)
        named = dict(head)
        headers = [header for header in head if not header[0].startswith(b":")]
        target = named.get(b":path", b"/")
        path, _, query = target.partition(b"?")
        self._scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1", "method": named.get(b":method", b"GET").decode("latin-1"),
            "scheme": "http", "path": path.decode("latin-1"), "raw_path": path,
            "query_string": query, "root_path": "", "headers": headers, "server": None,
            "client": (_client_of(named, self._context), 0), "state": {},
            "extensions": {SENDER: self},
        }  # fmt: skip
        if (subset := messages.subset_of(message)) is not None:
            self.allowed = self._addresses.replicas_at(subset)
        self._has_body = not message.request_headers.end_of_stream
        if not self._has_body or self._request_mode not in (_FULL_DUPLEX, _BUFFERED):
            self._ask()
        elif self._request_mode == _BUFFERED:
            # The body comes only after an answer: where the request goes is said with it.
            await self._write(messages.GO_ON["request_headers"])

    async def _take_body(self, message: ProcessingRequest) -> None:
        if self._task is not None:
            # It was placed by its head, or is too long.
            await self._write(messages.GO_ON["request_body"])
            return
        self._body += message.request_body.body
        if message.request_body.end_of_stream or len(self._body) > self._max_body_bytes:
            self._ask()

    def _ask(self) -> None:
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            self._begins.set()

    async def _receive(self) -> Message:
        return {"type": "http.request", "body": bytes(self._body), "more_body": False}

    async def _send(self, message: Message) -> None:
        """Have the proxy answer where no replica does: what an ASGI application sends."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message["headers"]
        elif not self._is_told:
            self._is_told = True
            await self._write(
                messages.refusal(self._status, self._headers, message.get("body", b""))
            )

    async def answer(self, backend: Backend, attempt: Attempt, replica_ids: Sequence[str]) -> None:
        """Have the proxy send the request: see `serve_app.gateway.exchange.Sender`."""
        assert isinstance(backend, ExternalBackend)
        endpoints = [self._addresses.of(name) for name in replica_ids[:_MOST_ENDPOINTS]]
        if endpoints[0] is None:
            raise ReplicaUnreachable("the name of an endpoint has no address")
        self._attempt, self._replica_id = attempt, replica_ids[0]
        self._end_of_attempt = asyncio.get_running_loop().create_future()
        attempt.note_send()
        if not self._is_told:
            self._is_told = True
            reached = [endpoint for endpoint in endpoints if endpoint is not None]
            await self._write(*self._placed(backend, attempt, reached))
        self._begins.set()
        await self._end_of_attempt

    def _placed(
        self, backend: ExternalBackend, attempt: Attempt, endpoints: list[str]
    ) -> list[ProcessingResponse]:
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
        removed = ()
        if self._hides_keys:
            removed = tuple(key for key in _KEYS if key.encode() not in dict(headers))
        if len(body) != len(call.body):
            headers.append((b"content-length", b"%d" % len(body)))
        if self._has_body and self._request_mode == _BUFFERED:
            response = messages.destination("request_body", endpoints, headers, removed)
            if body != call.body:
                response.request_body.response.body_mutation.body = body
            return [response]
        responses = [messages.destination("request_headers", endpoints, headers, removed)]
        if self._has_body and self._request_mode == _FULL_DUPLEX:
            ends = not self._has_trailers
            responses += messages.streamed("request_body", body, ends)
        if self._has_trailers:
            responses.append(messages.GO_ON["request_trailers"])
        return responses

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

    async def _begin(self, message: ProcessingRequest) -> None:
        """Take the head of the answer."""
        await self._go_with(messages.served_by(message))
        headers = messages.headers_of(message.response_headers)
        if self._attempt is not None and not self._has_ended:
            self.begun = True
            status = int(dict(headers).get(b":status", b"0"))
            self._reader = AnswerReader(self._attempt, self._replica_id, status, headers)
        response = messages.GO_ON["response_headers"]
        if self._added:
            response = messages.answered(self._added)
        await self._write(response)
        if message.response_headers.end_of_stream:
            self._end()

    @property
    def _has_ended(self) -> bool:
        return self._end_of_attempt is None or self._end_of_attempt.done()

    async def _go_with(self, served: str) -> None:
        """Count the request at the endpoint that answers, where that is not the picked one."""
        if not served or self._has_ended or served == self._addresses.of(self._replica_id):
            return
        replica_id = min(self._addresses.replicas_at([served]), default=None)
        if replica_id is not None and self._attempt is not None:
            self._attempt.request.sticks_to = replica_id
            self._begins.clear()
            self._settle(ReplicaUnreachable("the proxy did not reach an endpoint"))
            await self._begins.wait()

    async def _follow(self, piece: bytes, is_end: bool) -> None:
        """Take a piece of the answer's body; in full duplex the proxy waits to have it back."""
        if self._response_mode == _FULL_DUPLEX:
            await self._write(*messages.streamed("response_body", piece, is_end))
        else:
            await self._write(messages.GO_ON["response_body"])
        if self._reader is not None:
            try:
                self._reader.feed(piece)
            except (ReplicaFailed, RequestRejected) as error:
                self._settle(error)
        if is_end:
            self._end()

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
        if error is None:
            self._end_of_attempt.set_result(None)
        else:
            self._end_of_attempt.set_exception(error)


def _client_of(headers: dict[bytes, bytes], context: Context) -> str:
    """The caller's address as the proxy has noted it last; else the proxy's own."""
    noted = headers.get(b"x-forwarded-for", b"").decode("latin-1").rpartition(",")[2].strip()
    return noted or context.peer()
