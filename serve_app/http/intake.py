"""The steps before any route: token, sizes, and a deadline for the body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.cluster import Cluster, Cors
from serve_app.gateway.callers import ANYBODY, Caller
from serve_app.http.auth import Access, Denied
from serve_app.http.connection import connection_of
from serve_app.http.decide_schema import MAX_BODY_BYTES

MAX_HEADER_BYTES = 64 << 10
"""Size of all headers together."""
OPENAI_PATHS = frozenset(
    (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score",
        "/score", "/v1/rerank", "/rerank", "/tokenize", "/detokenize", "/v1/messages",
        "/v1/messages/count_tokens", "/v1/audio/transcriptions", "/v1/audio/translations",
        "/v1/audio/speech", "/v1/images/generations", "/v1/images/edits", "/v1/moderations",
        "/pooling", "/classify", "/v2/rerank", "/v2/embed", "/generate",
    )
)  # fmt: skip
"""Routes of OpenAI, Anthropic and vLLM that replicas answer, to POST alone."""
_OTHER_PATHS = frozenset(("/version", "/ping"))
PICKS = "/v1/picks"
"""Its bodies are those of routes that replicas answer."""
_NEEDS_TOKEN = "/v1"
_BODILESS = ("GET", "HEAD", "OPTIONS")
_CODECS = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "gzip", "zstd": "zstd", "br": "brotli"}
"""Encodings of bodies, and what decodes them: that of gzip takes zlib's form, too."""
_MOST_CODINGS = 2
_OF_BODY = (b"content-length", b"transfer-encoding")
_OF_CODED = (b"content-encoding", b"content-length")
SENDER = "tokenyard.sender"
"""Name in a scope's `extensions` of the `Sender` that sends the request to its replica, and is told
of its answer; without one, the answer goes to the caller."""
_MIN_BYTES_PER_S = 16 << 10
"""Lowest mean rate of a body after `body_timeout_s`; a slower one would hold its place for ever."""

Refusal = Callable[[Request, Exception], Awaitable[Response]]


def route_path(scope: Scope) -> str:
    """Path of a request below where the application is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    is_below = path == root or path.startswith(f"{root}/")
    return path[len(root) :] if root and is_below else path


class TooMuch(Exception):
    """A request is not read to its end; the text says why."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


class PendingBodies:
    """Bodies on their way: each must progress, and of too many the oldest is given up.

    Bodies of callers who mean it are there in milliseconds. Those that are held open to take the
    places of others are the oldest.
    """

    def __init__(
        self, timeout_s: float, most: int, max_openai_bytes: int = MAX_BODY_BYTES,
        routes: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """Wait that long for the next piece of a body, and for that many bodies at once.

        `max_openai_bytes` is of routes that replicas answer; `routes` are more of these, and one
        that ends with a slash stands for all that begin with it.
        """
        self._timeout_s, self._most, self.max_openai_bytes = timeout_s, most, max_openai_bytes
        self._paths = OPENAI_PATHS | _OTHER_PATHS | {*routes}
        self._prefixes = ("/v1/responses/", *(route for route in routes if route.endswith("/")))
        self._waiting: dict[asyncio.Timeout, None] = {}

    @classmethod
    def of(cls, cluster: Cluster) -> PendingBodies:
        """Use half of the connections that are not for requests in flight."""
        limits = cluster.limits
        most, routes = 2 * limits.max_in_flight, cluster.gateway.routes
        return cls(limits.body_timeout_s, most, limits.max_body_bytes, routes)

    def are_handed_on(self, path: str) -> bool:
        """Whether replicas answer a route."""
        # Who stands before an endpoint may go up where a path says so.
        return path in self._paths or (path.startswith(self._prefixes) and "/." not in path)

    async def read(self, receive: Receive, max_bytes: int = MAX_BODY_BYTES) -> bytes | None:
        """Read a body; None: the caller left. TooMuch: it is too large, late, or the oldest."""
        if len(self._waiting) >= self._most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
        deadline, clock_s = asyncio.timeout(self._timeout_s), asyncio.get_running_loop().time
        latest_s = clock_s() + self._timeout_s

        def go_on(num_bytes: int) -> None:
            if deadline in self._waiting and not deadline.expired():
                limit_s = latest_s + num_bytes / _MIN_BYTES_PER_S
                deadline.reschedule(min(clock_s() + self._timeout_s, limit_s))

        try:
            async with deadline:
                self._waiting[deadline] = None
                return await _read(receive, max_bytes, go_on)
        except TimeoutError:
            if not deadline.expired():
                raise
            limit = f"nothing for {self._timeout_s:g} s, or less than {_MIN_BYTES_PER_S} bytes/s"
            raise TooMuch(f"the body came too slowly: {limit}", 408) from None
        finally:
            self._waiting.pop(deadline, None)


async def _read(
    receive: Receive, max_bytes: int, go_on: Callable[[int], None] | None = None
) -> bytes | None:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        _check_size(len(body), max_bytes)
        if go_on is not None:
            go_on(len(body))
        if not message.get("more_body"):
            return bytes(body)


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise TooMuch(f"body is larger than {max_bytes} bytes", 413)


def with_cors(app: ASGIApp, cors: Cors | None) -> ASGIApp:
    """Let pages of other sites use an application; their preflights need no key."""
    if cors is None:
        return app
    return CORSMiddleware(
        app, allow_origins=cors.origins, allow_methods=("*",), allow_headers=("*",),
        expose_headers=("*",),
    )  # fmt: skip


class Intake:
    """Refuses by headers alone where it can, then reads the body in time."""

    def __init__(self, access: Access, bodies: PendingBodies, refuse: Refusal) -> None:
        self._access, self._bodies, self._refuse = access, bodies, refuse

    async def take(self, scope: Scope, receive: Receive, send: Send) -> tuple[Caller, bytes] | None:
        """Return the caller and the body; None: the request was refused, or its caller left."""
        try:
            caller, max_bytes, codings = self._check_head(scope)
            if scope["method"] in _BODILESS and not any(
                value for name, value in scope["headers"] if name in _OF_BODY
            ):
                return caller, b""
            connection = connection_of(scope)
            if connection is not None and not connection.cycle.more_body:
                body = await _read(receive, max_bytes)  # All of it is there.
            else:
                body = await self._bodies.read(receive, max_bytes)
            if body and codings:
                # As it is from now on.
                headers = scope["headers"]
                scope["headers"] = [header for header in headers if header[0] not in _OF_CODED]
                for coding in reversed(codings):
                    body = _decoded(body, coding, max_bytes)
        except (Denied, TooMuch) as error:
            refusal = await self._refuse(Request(scope), error)
            # What is left of the body is not waited for.
            refusal.headers["connection"] = "close"
            await refusal(scope, receive, send)
            return None
        return None if body is None else (caller, body)

    def _check_head(self, scope: Scope) -> tuple[Caller, int, list[str]]:
        """Refuse by the head; return the caller, the body's limit, and its encodings in order."""
        if sum(map(len, chain.from_iterable(scope["headers"]))) > MAX_HEADER_BYTES:
            raise TooMuch(f"headers are larger than {MAX_HEADER_BYTES} bytes", 431)
        path, headers, caller = route_path(scope), dict(scope["headers"]), ANYBODY
        # A proxy sends any route to the replicas.
        generates = SENDER in scope.get("extensions", ()) or self._bodies.are_handed_on(path)
        if generates or path.startswith(_NEEDS_TOKEN):
            caller = self._access.check_use(HTTPConnection(scope), generates)
        length = headers.get(b"content-length", b"")
        takes_prompts = generates or path == PICKS
        max_bytes = self._bodies.max_openai_bytes if takes_prompts else MAX_BODY_BYTES
        _check_size(int(length) if length.isdigit() else 0, max_bytes)
        if b"content-encoding" not in headers:
            return caller, max_bytes, []
        text = headers[b"content-encoding"].decode("latin-1").lower()
        named = [part.strip() for part in text.split(",")]
        codings = [coding for coding in named if coding not in ("", "identity")]
        odd = text if len(codings) > _MOST_CODINGS else {*codings} - {*_CODECS}
        if odd:
            reason = f"content-encoding {text!r} is not known; send one of {', '.join(_CODECS)}"
            raise TooMuch(reason, 415)
        return caller, max_bytes, codings


class IntakeMiddleware:
    """ASGI middleware that passes on the requests which an intake takes, with their bodies."""

    def __init__(
        self, app: ASGIApp, access: Access, bodies: PendingBodies, refuse: Refusal
    ) -> None:
        self._app, self._intake = app, Intake(access, bodies, refuse)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif (taken := await self._intake.take(scope, receive, send)) is not None:
            await self._app(scope, _replay(taken[1], receive), send)


def _decoded(body: bytes, coding: str, max_bytes: int) -> bytes:
    """Decode a body, up to its limit."""
    import pyarrow as pa  # Large, and few callers encode bodies.

    try:
        stream = pa.CompressedInputStream(pa.BufferReader(body), _CODECS[coding])
        decoded: bytes = stream.read(max_bytes + 1)
    except OSError:
        raise TooMuch(f"body is not whole as content-encoding {coding!r}", 400) from None
    _check_size(len(decoded), max_bytes)
    return decoded


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the application a body that was read, then the events of the server."""
    left = [body]

    async def replayed() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return replayed
