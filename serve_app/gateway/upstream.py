"""An HTTP/1.1 client for endpoints: it keeps connections, and hands bytes on as they come.

It is for a data path that passes on hundreds of streams: one wake-up per read of the socket, one
parser per connection, and nothing between them (docs/decisions/0018-bytes-through.md has what
others cost).
"""

from __future__ import annotations

import asyncio
import math
import select
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit
from weakref import WeakSet

import httptools

_MOST_IDLE = 256
"""Connections of one endpoint that are kept."""
_IDLE_S = 55.0
"""Time for which one is kept: what stands between may forget it after a minute."""
_MAX_UNREAD_BYTES = 1 << 20
"""Unread part of an answer after which the endpoint has to wait."""
_MAX_HEAD_BYTES = 64 << 10
_ONE_WRITE_BYTES = 64 << 10
"""Longest body that is copied behind its head, to go out in one write."""
_BODILESS = (204, 304)
_GONE_AFTER_S = 10
"""Silence of the other host's kernel after which a connection is lost."""
_GONE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Seconds of silence before the first probe, seconds between probes, and their number."""


_STALE_S = 0.5
"""Within which an endpoint that closed a kept connection before it saw a request is known to."""
_CLOSED = "closed its connection"
_MAX_SIZE_DIGITS = 8
"""Digits of a chunk's length."""
_HEXADECIMAL = b"0123456789abcdefABCDEF"

Take = Callable[[bytes, bytes | None], bool]
"""Is given a piece of a body, and the chunk of HTTP/1.1 that it came as where it came as one. Says
whether it takes the piece."""


class UpstreamError(ConnectionError):
    """An endpoint broke its connection; the text says how, as part of a sentence."""


class ConnectFailed(UpstreamError):
    """An endpoint accepted no connection, or not in time."""


def url_of(address: str, port: int, scheme: str = "http") -> str:
    """Return the URL of a server."""
    return f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}"


@dataclass
class Origin:
    """The address of an endpoint."""

    url: str
    """The URL in the cluster file, without a slash at its end."""
    host: str
    port: int
    tls: bool
    path: bytes
    """Prefix of every path."""
    authority: bytes
    """Host and port as the URL has them, or the one that names it."""
    server_name: str
    """Name in its TLS certificate."""
    idle: list[Connection] = field(default_factory=list, repr=False, compare=False)
    """Its connections that wait for a request, the last used one last."""
    scraped_s: float = field(default=-math.inf, repr=False, compare=False)
    """When it last answered whoever asked for its metrics, by the loop's clock."""

    @classmethod
    def of(cls, url: str, named: str | None = None) -> Origin:
        """Read a URL; a host in `named` goes into requests and certificate checks."""
        parts, names = urlsplit(url), named or url
        tls = parts.scheme == "https"
        host = parts.hostname or ""
        port = parts.port or (443 if tls else 80)
        authority = names.split("://", 1)[1].split("/", 1)[0].encode()
        server_name = urlsplit(names).hostname or ""
        return cls(url, host, port, tls, parts.path.encode(), authority, server_name)

    def head(self, method: bytes, path: bytes, headers: bytes, num_bytes: int) -> bytes:
        """Return the head of a request, from path with query and complete header lines."""
        length = b"content-length: %d\r\n" % num_bytes if num_bytes or method == b"POST" else b""
        line = b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % (method, self.path, path, self.authority)
        return b"".join((line, headers, length, b"\r\n"))


class Connection(asyncio.Protocol):
    """One connection to an endpoint: one request at a time, with one reader."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.idle_since_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.hang_up: select.poll | None = None
        self._lost = False
        self._begin()

    def _begin(self) -> None:
        """Prepare for an answer."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.heard = False
        """Whether a byte of the answer has come."""
        self._head_done = self._done = self._keeps = self._paused = False
        self.ends_by_close = False
        """Whether nothing but the connection's end says that the answer is whole."""
        self._error: Exception | None = None
        self._pieces: list[bytes] = []
        self._num_unread = self._num_head = 0
        self._take: Take | None = None
        self._between_chunks = False
        """Whether the parser expects the head of a chunk next."""

    @property
    def is_waiting(self) -> bool:
        """Whether the reader waits for the endpoint, rather than for a client."""
        return self._waiter is not None

    @property
    def is_reusable(self) -> bool:
        """Whether another request may follow."""
        transport = self._transport
        return (
            self._done
            and self._keeps
            and not self._lost
            and not self._paused  # The end of an answer that nobody has read came all the same.
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    def send(self, head: bytes, body: bytes) -> bool:
        """Send a request, whose answer is read next. False: the connection was lost."""
        assert self._transport is not None
        self._begin()
        if self._lost:
            self._error = UpstreamError(_CLOSED)
            return False
        if len(body) <= _ONE_WRITE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return True

    async def wait_for_head(self) -> None:
        """Wait until `status` and `headers` are there; raises the error given to `fail`."""
        while not self._head_done:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self, take: Take | None = None) -> bytes:
        """Return what has come of the body since the last call; empty: it is complete.

        `take` is given what comes while this waits, as it comes. The first piece that it does not
        take, where it returns False, is what is returned. Errors are raised once all that came is
        read.
        """
        self._take = take
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._done:
                return b""
            await self._wait()
        self._take = None
        pieces, self._pieces, self._num_unread = self._pieces, [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def fail(self, error: Exception) -> None:
        """Give the answer up: its reader gets the error."""
        if not self._done and self._error is None:
            self._error = error
        self.close()
        self._wake()

    def close(self) -> None:
        """Close at once, and drop what is unsent."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        _notice_lost_host(sock)
        if hasattr(select, "POLLRDHUP"):  # Linux has it.
            self.hang_up = select.poll()
            self.hang_up.register(sock.fileno(), select.POLLRDHUP)

    def data_received(self, data: bytes) -> None:
        """Parse, and wake the reader."""
        if self._done:
            # Nobody asked for it.
            self.close()
            return
        self.heard = True
        take, waiter = self._take, self._waiter
        if take is not None and self._between_chunks and not self._pieces:
            # What is one whole chunk the parser need not see.
            is_awaited = waiter is not None and not waiter.done() and self._error is None
            if is_awaited and (body := _body_of_chunk(data)) and take(body, data):
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.fail(UpstreamError("sent what is not HTTP"))
        waiter, pieces = self._waiter, self._pieces
        is_awaited = waiter is not None and not waiter.done() and self._error is None
        if self._take is not None and is_awaited and not self._done:
            if not pieces:
                return
            if self._take(pieces[0] if len(pieces) == 1 else b"".join(pieces), None):
                self._num_unread = 0
                pieces.clear()
                return
            self._take = None  # What follows has to come after it.
        if not self._head_done:
            self._num_head += len(data)
            if self._num_head > _MAX_HEAD_BYTES:
                self.fail(UpstreamError("sent headers that are too long"))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer, complete or not."""
        self._lost = True
        if self in self.origin.idle:
            self.origin.idle.remove(self)
        if self.ends_by_close and exc is None:
            self._done = True
        elif not self._done and self._error is None:
            is_gone = isinstance(exc, TimeoutError)
            how = f"is on a host that was silent for {_GONE_AFTER_S} s" if is_gone else _CLOSED
            self._error = UpstreamError(how)
        self._wake()

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        if not self._done:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Note the status; 100 to 199 announce another one."""
        status = self._parser.get_status_code()
        if status < 200:
            return
        if self._done:
            # A second answer that nobody asked for.
            self.close()
            return
        self.status, self._head_done = status, True
        names = [name for name, _ in self.headers]
        sized = b"content-length" in names or b"transfer-encoding" in names
        self.ends_by_close = not sized and status not in _BODILESS
        self._between_chunks = b"transfer-encoding" in names

    def on_chunk_header(self) -> None:
        """Begin a chunk."""
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        """End a chunk."""
        self._between_chunks = True

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body; pause the endpoint while too much is unread."""
        if self._done:
            return
        self._pieces.append(body)
        self._num_unread += len(body)
        if self._num_unread > _MAX_UNREAD_BYTES and self._transport and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """Note the end of the answer."""
        self._between_chunks = False
        if not self._head_done:
            self.headers = []
            return
        self._done = True
        self._keeps = bool(self._parser.should_keep_alive()) and not self.ends_by_close


class UpstreamClient:
    """Sends requests to endpoints, over idle connections where there are any."""

    def __init__(self, connect_s: float, tls: ssl.SSLContext | None = None) -> None:
        """Allow each connection `connect_s` to come about, TLS included.

        `tls` says whom to trust; None: whom the system does.
        """
        self.connect_s = connect_s
        self._tls = tls or ssl.create_default_context()
        self._made: WeakSet[Connection] = WeakSet()

    async def send(
        self,
        origin: Origin,
        head: bytes,
        body: bytes = b"",
        watch: Callable[[Connection], None] = lambda _: None,
    ) -> Connection:
        """Send a request, and wait for the head of its answer.

        It is sent once. It is sent once more, over a new connection, where an endpoint closed one
        that was kept idle before it could see the request. `watch` is given the connection each
        time, so that it can be made to `fail`.

        Raises:
            UpstreamError: There is no connection, or it broke.
            Exception: What the connection was made to fail with.
        """
        kept, clock_s = self._idle(origin), asyncio.get_running_loop().time
        while True:
            connection, sent_s = kept or await self._connect(origin), clock_s()
            if connection.send(head, body):
                watch(connection)
            try:
                await connection.wait_for_head()
                return connection
            except BaseException as error:
                self.release(connection)
                is_new = kept is None or connection.heard or clock_s() - sent_s > _STALE_S
                if is_new or not isinstance(error, UpstreamError):
                    raise
                kept = None

    async def get(self, origin: Origin, head: bytes, max_bytes: int) -> tuple[int, bytes]:
        """Return status and body, of at most `max_bytes`, of a whole answer; errors as `send`."""
        connection = await self.send(origin, head)
        try:
            body = bytearray()
            while piece := await connection.read():
                body += piece
                if len(body) > max_bytes:
                    raise UpstreamError(f"sent more than {max_bytes} bytes")
            return connection.status, bytes(body)
        finally:
            self.release(connection)

    def release(self, connection: Connection) -> None:
        """Keep a connection for another request, or close it."""
        idle = connection.origin.idle
        if connection.is_reusable and len(idle) < _MOST_IDLE:
            connection.idle_since_s = asyncio.get_running_loop().time()
            idle.append(connection)
        else:
            connection.close()

    async def close(self) -> None:
        """Close every connection."""
        for connection in list(self._made):
            connection.close()
        self._made.clear()
        await asyncio.sleep(0)

    def _idle(self, origin: Origin) -> Connection | None:
        oldest_s = asyncio.get_running_loop().time() - _IDLE_S
        while origin.idle:
            connection = origin.idle.pop()
            is_fresh = connection.idle_since_s > oldest_s and connection.is_reusable
            # The event loop may not have told yet that the endpoint has closed it.
            if is_fresh and not (connection.hang_up and connection.hang_up.poll(0)):
                return connection
            connection.close()
        return None

    async def _connect(self, origin: Origin) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_s) as limit:
                _, connection = await loop.create_connection(
                    lambda: Connection(origin), origin.host, origin.port,
                    ssl=self._tls if origin.tls else None,
                    server_hostname=origin.server_name if origin.tls else None,
                )  # fmt: skip
        except TimeoutError as error:
            if limit.expired():
                text = f"took no connection in {self.connect_s:g} s"
                raise ConnectFailed(text) from None
            raise ConnectFailed(f"takes no connection: {error.strerror}") from None
        except OSError as error:
            raise ConnectFailed(f"takes no connection: {error.strerror or error}") from None
        self._made.add(connection)
        return connection


def _body_of_chunk(data: bytes) -> bytes | None:
    """The content of a chunk, if the bytes are exactly one chunk that is not the last."""
    end = data.find(b"\r\n", 1, _MAX_SIZE_DIGITS + 2)
    # `int` also takes signs, blanks, underscores and a prefix.
    if end < 0 or data[:end].strip(_HEXADECIMAL):
        return None
    size = int(data[:end], 16)
    is_whole = size > 0 and len(data) == end + size + 4 and data.endswith(b"\r\n")
    return data[end + 2 : -2] if is_whole else None


def _notice_lost_host(sock: socket.socket) -> None:
    """Have the kernel end connections to a host that is silently gone.

    A host that lost its power or its network closes nothing: without this the requests there wait
    for their deadlines. What is sent and not acknowledged has a time limit of its own (RFC 5482).
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limits = {**_GONE, "TCP_USER_TIMEOUT": 1000 * _GONE_AFTER_S}
    for name, value in limits.items():
        if hasattr(socket, name):  # Linux has them all.
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
