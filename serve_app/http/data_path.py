"""The way of requests to endpoints that speak OpenAI's API: as the bytes that they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.cluster import SloClass
from serve_app.engines.tokenizer import EstimatedTokens, EstimatingTokenizer, Tokenizer
from serve_app.gateway.exchange import Call, Generation, InferenceRequest
from serve_app.gateway.gateway import Gateway, Refused, Unserved
from serve_app.gateway.generation import RequestRejected, new_id
from serve_app.http.answering import answer
from serve_app.http.errors import BadRequest
from serve_app.http.openai import Generator, check_model, find_class
from serve_app.http.peek import Peek, peek

_HANDED_ON = frozenset(
    (
        b"accept", b"baggage", b"content-type", b"idempotency-key", b"openai-beta",
        b"openai-organization", b"openai-project", b"traceparent", b"tracestate", b"user-agent",
        b"x-request-id",
    )
)  # fmt: skip
_CLASS = b"x-service-tier"

Refusal = Callable[[Request, Exception], Awaitable[Response]]


class DataPath:
    """ASGI application of `OPENAI_PATHS`, whose bodies have been read."""

    def __init__(self, gateway: Gateway, tokenizer: Tokenizer, refuse: Refusal) -> None:
        """Answer by a gateway.

        Args:
            gateway: Has requests answered.
            tokenizer: Says how long prompts are.
            refuse: Writes a refusal.
        """
        self._gateway, self._tokenizer, self._refuse = gateway, tokenizer, refuse
        has_engines = any(not one.takes_calls for one in gateway.backends.values())
        self._generator = Generator(gateway, tokenizer) if has_engines else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        try:
            body = (await receive())["body"]
            known = peek(body)
            service_class = self._class(scope, known)
            request = await self._request(scope, body, known)
            await answer(self._gateway, request, service_class, receive, send)
        except (BadRequest, Refused, Unserved, RequestRejected) as error:
            response = await self._refuse(Request(scope), error)
            await response(scope, receive, send)

    def _class(self, scope: Scope, known: Peek) -> SloClass:
        if known.model is not None:
            check_model(self._gateway, known.model)
        return find_class(self._gateway, known.class_name or _class_header(scope))

    async def _request(self, scope: Scope, body: bytes, known: Peek) -> InferenceRequest:
        generation = await self._generation(scope["path"], known)
        call = Call(_path(scope), _headers(scope), body, known.stream)
        if generation is not None:
            wanted = generation.request
            return InferenceRequest(
                wanted.request_id, wanted.token_ids, wanted.sampling.max_tokens, call, generation
            )
        ids = known.token_ids or self._count(known.text) or [0]
        return InferenceRequest(f"req-{new_id()}", ids, known.max_tokens, call)

    def _count(self, text: str) -> Sequence[int]:
        is_estimate = isinstance(self._tokenizer, EstimatingTokenizer)
        return EstimatedTokens(text) if is_estimate else self._tokenizer.encode(text)

    async def _generation(self, path: str, known: Peek) -> Generation | None:
        """The request as engines of ours take it; None: there are none, or they do not."""
        if self._generator is None:
            return None
        try:
            return await self._generator.read(path, known.fields)
        except ValueError:
            # Endpoints may know more, and say what is wrong where they do not.
            return None


def _class_header(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == _CLASS:
            return bytes(value).decode("latin-1")
    return None


def _path(scope: Scope) -> bytes:
    query = scope["query_string"]
    path = str(scope["path"]).encode()
    return path + b"?" + query if query else path


def _headers(scope: Scope) -> bytes:
    lines = [
        b"%b: %b\r\n" % (name, value) for name, value in scope["headers"] if name in _HANDED_ON
    ]
    return b"".join(lines)
