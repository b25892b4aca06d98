"""What happens to a request before any route sees it: token, sizes, and a deadline for its body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.http.auth import Access, Denied, note_caller
from serve_app.http.connection import connection_of
from serve_app.http.decide_schema import MAX_BODY_BYTES

MAX_HEADER_BYTES = 64 << 10
"""Of all headers together."""
OPENAI_PATHS = frozenset(
    (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score",
        "/score", "/v1/rerank", "/rerank", "/tokenize", "/detokenize",
    )
)  # fmt: skip
"""Routes of OpenAI and vLLM that replicas answer."""
_NEEDS_TOKEN = "/v1"
_BODILESS = ("GET", "HEAD", "OPTIONS")

Answer = Callable[[Request, Exception], Awaitable[Response]]


def route_path(scope: Scope) -> str:
    """Path of a request below where the application is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    is_below = path == root or path.startswith(f"{root}/")
    return path[len(root) :] if root and is_below else path


class TooMuch(Exception):
    """A request that is not read to its end; the text says why."""

    def __init__(self, reason: str, status: int) -> None:
        """Say why, with the HTTP status."""
        super().__init__(reason)
        self.status = status


def are_too_large(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether headers are longer together than `MAX_HEADER_BYTES`."""
    num_bytes = 0
    for name, value in headers:
        num_bytes += len(name) + len(value)
    return num_bytes > MAX_HEADER_BYTES


class PendingBodies:
    """Bodies that are on their way: each has a deadline, and of too many the oldest is given up.

    Bodies of callers who mean it are there in milliseconds. Those that are held open to take the
    places of others are the oldest.
    """

    def __init__(self, timeout_s: float, most: int, max_openai_bytes: int = MAX_BODY_BYTES) -> None:
        """Wait so long for a body, and for so many at once.

        Args:
            timeout_s: For one.
            most: At once.
            max_openai_bytes: Longest body on OpenAI's routes.
        """
        self._timeout_s, self._most, self._max_openai_bytes = timeout_s, most, max_openai_bytes
        self._waiting: dict[asyncio.Timeout, None] = {}

    def max_bytes(self, path: str) -> int:
        """Longest body on a route."""
        return self._max_openai_bytes if path in OPENAI_PATHS else MAX_BODY_BYTES

    async def read(
        self, receive: Receive, max_bytes: int = MAX_BODY_BYTES, is_there: bool = False
    ) -> bytes | None:
        """Read a body; None: the caller has left.

        Args:
            receive: Gives pieces of it.
            max_bytes: Longest that is read.
            is_there: Whether all of it has come, so that it needs no deadline.

        Raises:
            TooMuch: It is too large, late, or the oldest of too many.
        """
        if is_there:
            return await _read(receive, max_bytes)
        if len(self._waiting) >= self._most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                self._waiting[deadline] = None
                return await _read(receive, max_bytes)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TooMuch(f"the body did not come within {self._timeout_s:g} s", 408) from None
        finally:
            self._waiting.pop(deadline, None)


async def _read(receive: Receive, max_bytes: int) -> bytes | None:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        _check_size(len(body), max_bytes)
        if not message.get("more_body"):
            return bytes(body)


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise TooMuch(f"body is larger than {max_bytes} bytes", 413)


class Intake:
    """ASGI middleware: refuses by headers alone what can be, then reads the body in time."""

    def __init__(self, app: ASGIApp, access: Access, bodies: PendingBodies, answer: Answer) -> None:
        """Stand before an application.

        Args:
            app: Sees requests whose bodies are there.
            access: Who may ask.
            bodies: Reads bodies.
            answer: Writes a refusal.
        """
        self._app, self._access, self._bodies, self._answer = app, access, bodies, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            max_bytes = self._bodies.max_bytes(route_path(scope))
            self._check_head(scope, max_bytes)
            body = await self._read_body(scope, receive, max_bytes)
        except (Denied, TooMuch) as error:
            answer = await self._answer(Request(scope), error)
            # What is left of the body is not waited for.
            answer.headers["connection"] = "close"
            await answer(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read_body(self, scope: Scope, receive: Receive, max_bytes: int) -> bytes | None:
        if not _has_body(scope):
            return b""
        connection = connection_of(scope)
        is_there = connection is not None and connection.has_body
        return await self._bodies.read(receive, max_bytes, is_there)

    def _check_head(self, scope: Scope, max_bytes: int) -> None:
        if are_too_large(scope["headers"]):
            raise TooMuch(f"headers are larger than {MAX_HEADER_BYTES} bytes", 431)
        path = route_path(scope)
        if path.startswith(_NEEDS_TOKEN) or path in OPENAI_PATHS:
            caller = self._access.check_use(HTTPConnection(scope), path in OPENAI_PATHS)
            note_caller(scope, caller)
        length = _header(scope, b"content-length") or b"0"
        _check_size(int(length) if length.isdigit() else 0, max_bytes)


def _has_body(scope: Scope) -> bool:
    if scope["method"] not in _BODILESS:
        return True
    return any(_header(scope, name) for name in (b"content-length", b"transfer-encoding"))


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:  # Servers write names in small letters, as ASGI asks.
            return bytes(value)
    return None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the application a body that is there, then what else the server tells."""
    left = [body]

    async def replayed() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return replayed
