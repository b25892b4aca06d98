"""How gateways and engines listen: uvicorn, with limits on idle and slow connections.

A head must come in time and must not be long, answers must be read, and nobody holds all
connections. Bodies are limited by `serve_app.http.intake`, once their heads are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
import socket
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_app.cluster import Limits, TlsFiles
from serve_app.http.connection import CONNECTION, CallerConnection
from serve_app.http.intake import MAX_HEADER_BYTES
from serve_app.http.log_limits import limit_log
from serve_app.http.tls import Certificate

_BACKLOG = 2048
_HANDSHAKE_S = 0.1
"""Time for connections that are half open."""
_UPGRADE = b"upgrade"
_SO_ATTACH_FILTER = 26
# Of a segment whose SYN flag is set nothing is kept, of all others everything.
_NO_SYN = struct.pack(
    "HBBI" * 4, 0x30, 0, 0, 13, 0x45, 0, 1, 2, 0x06, 0, 0, 0, 0x06, 0, 0, 2**32 - 1
)
_MOST_MS = 2**31 - 1
_HAND_OVER_S = 0.5
"""Grace period for connected clients to send a request during a hand-over, seconds."""
_END_S = 2.0
"""Time for connections to close once their answers are sent, seconds."""


class _Config(uvicorn.Config):
    """uvicorn's settings, and our limits of connections."""

    def __init__(self, app: ASGIApp, limits: Limits, certificate: Certificate | None) -> None:
        super().__init__(
            cast(Any, app), http=GuardedProtocol, ws="none", lifespan="off", log_config=None,
            access_log=False, proxy_headers=False, server_header=False,
            timeout_keep_alive=limits.keep_alive_s, backlog=_BACKLOG,
        )  # fmt: skip
        self.limits, self.certificate = limits, certificate
        self.num_by_address: Counter[str] = Counter()
        self.open: set[GuardedProtocol] = set()
        self.hands_over = False
        """Whether each connection ends with its next answer."""

    @property
    def secured(self) -> dict[str, Any]:
        """Arguments of asyncio for TLS; empty without a certificate."""
        if self.certificate is None:
            return {}
        limit_s = self.limits.head_timeout_s
        return {"ssl": self.certificate.context, "ssl_handshake_timeout": limit_s}


class _RequestParser(httptools.HttpRequestParser):
    """Reads a request for an upgrade as an ordinary one: no upgrade is supported.

    The original takes what follows such a head for another protocol, but it is the request's body:
    clients that would rather speak HTTP/2 (Java's own does) ask for that with their first request,
    and send it in HTTP/1.1 all the same.
    """

    def __init__(self, protocol: GuardedProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        # As uvicorn has its own.
        with contextlib.suppress(AttributeError):
            self.set_dangerous_leniencies(lenient_data_after_close=True)

    @property
    def asks_for_upgrade(self) -> bool:
        """Whether the present head asks for an upgrade."""
        return any(name == _UPGRADE for name, _ in self._protocol.headers)

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        """Parse; a head that asks for an upgrade is parsed again without it."""
        rest = memoryview(data)
        while rest:
            try:
                super().feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self.asks_for_upgrade:
                    raise
                rest = rest[upgrade.args[0] :]
            super().feed_data(self._head_without_upgrade())

    def _head_without_upgrade(self) -> bytes:
        protocol, version = self._protocol, self.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.get_method(), protocol.url, version)]
        lines += [b"%b: %b" % header for header in protocol.headers if header[0] != _UPGRADE]
        return b"\r\n".join((*lines, b"", b""))


class _UntilClose(int):
    """Length of a body that ends with its connection, as uvicorn's count of remaining bytes."""

    def __sub__(self, _: int) -> _UntilClose:
        return self

    def __lt__(self, _: int) -> bool:
        return False


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's connection, with a limited head, in a limited number."""

    _head_done = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    leave: Callable[[], None] | None = None
    """Is called when the caller leaves."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser: _RequestParser = _RequestParser(self)
        assert isinstance(self.config, _Config)
        self._guard = self.config

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection, or close it where there are too many."""
        super().connection_made(cast(asyncio.Transport, transport))
        guard = self._guard
        num_here, num_all = guard.num_by_address[self._address], len(guard.open)
        limits = guard.limits
        if num_all >= limits.max_connections or num_here >= limits.max_connections_per_address:
            self._refuse(503, "too many connections")
            return
        guard.num_by_address[self._address] += 1
        guard.open.add(self)
        _end_unread(transport.get_extra_info("socket"), limits.timeout_s)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Free its place."""
        self._stop_timer()
        guard = self._guard
        if self in guard.open:
            guard.open.discard(self)
            counts = guard.num_by_address
            counts[self._address] -= 1
            if not counts[self._address]:
                del counts[self._address]
        super().connection_lost(exc)
        leave, self.leave = self.leave, None
        if leave is not None:
            leave()

    def data_received(self, data: bytes) -> None:
        """Read on; give up a head that is too long."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_done:
            # An empty line after an answer begins no head, but has ended uvicorn's own timer.
            if self.cycle is not None and self.cycle.response_complete and not self._head_timer:
                self._expect_head()
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEADER_BYTES:
            self._refuse(431, f"headers are larger than {MAX_HEADER_BYTES} bytes")
        elif self._head_timer is None:
            self._expect_head()

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._head_done, self._head_bytes = False, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End a head, unless it is parsed again."""
        if self.parser.should_upgrade() and self.parser.asks_for_upgrade:
            return
        self._head_done = True
        if self._head_timer is not None:
            self._stop_timer()
        super().on_headers_complete()
        if len(self.pipeline) == 1:
            # uvicorn reads no more while a request waits, and who does not read hears of no end.
            self.flow.resume_reading()
        if self.cycle is not None and self.scope["http_version"] == "1.0":
            # It knows no chunks.
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _UntilClose()
        if self.cycle is not None:
            self.scope["state"][CONNECTION] = CallerConnection(self, self.cycle)
            if self._guard.hands_over:
                self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """End a request."""
        if not (self.parser.should_upgrade() and self.parser.asks_for_upgrade):
            super().on_message_complete()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._guard.limits.head_timeout_s, self._head_late)

    def _head_late(self) -> None:
        self._head_timer = None
        limit_s = self._guard.limits.head_timeout_s
        self._refuse(408, f"the head did not come within {limit_s:g} s")

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, reason: str) -> None:
        """Say why, and close."""
        phrase = HTTPStatus(status).phrase
        # No route has seen the request, so nobody knows in which form the caller expects errors.
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: text/plain\r\nconnection: close\r\n"
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(f"{head}content-length: {len(reason)}\r\n\r\n{reason}".encode())
        self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, since the process belongs to Ray."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, with our TLS: a handshake has a deadline, as a head has."""
        config, loop = self.config, asyncio.get_running_loop()
        assert isinstance(config, _Config)
        self.servers = [
            await loop.create_server(self.connect, sock=sock, backlog=_BACKLOG, **config.secured)
            for sock in sockets or ()
        ]
        self.started = True

    def connect(self) -> GuardedProtocol:
        """Make the protocol of one connection."""
        return GuardedProtocol(self.config, self.server_state, {})


class Listener:
    """A server on the running event loop, from `start` to `stop`."""

    def __init__(self, app: ASGIApp, limits: Limits, tls: TlsFiles | None = None) -> None:
        """Prepare; a ValueError says that the certificate cannot be used."""
        limit_log()
        # A request in flight has two: many systems begin with 1,024, and allow far more.
        with contextlib.suppress(ValueError, OSError):
            _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        self._certificate = None if tls is None else Certificate(tls)
        self._config = _Config(app, limits, self._certificate)
        self._watching: asyncio.Task[None] | None = None
        self._server = _Server(self._config)
        self._serving: asyncio.Task[None] | None = None
        self._listening: socket.socket | None = None

    async def start(self, host: str, port: int, held: socket.socket | None = None) -> int:
        """Listen, and return the port; 0: any that is free.

        Another process of this user that listens there too gets a share of connections. `held` is
        what `hold_port` returned.

        Raises:
            OSError: The address cannot be listened on.
        """
        listening = self._listening = held or _listening_socket(host, port)
        if self._certificate is not None:
            self._watching = asyncio.create_task(self._certificate.watch())
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done():
            await self._serving
        return int(listening.getsockname()[1])

    @property
    def is_up(self) -> bool:
        """Whether it takes connections."""
        is_serving = self._serving is not None and not self._serving.done()
        return is_serving and not self._server.should_exit

    async def hand_over(self) -> None:
        """Leave the port to another process that listens there; answer present callers.

        The kernel resets connections that nobody has accepted when their listener closes, and
        callers who have connected may be about to ask. So all are accepted, and have a moment.
        """
        if self._listening is None:
            return
        self._config.hands_over = True
        _drop_syns(self._listening)
        await asyncio.sleep(_HANDSHAKE_S)
        left, loop = _accept_all(self._listening), asyncio.get_running_loop()
        for server in self._server.servers:
            server.close()
        connect, secured = self._server.connect, self._config.secured
        connected = (loop.connect_accepted_socket(connect, sock, **secured) for sock in left)
        await asyncio.gather(*connected, return_exceptions=True)
        await asyncio.sleep(_HAND_OVER_S)

    def refuse(self) -> None:
        """Accept no more connections, and close idle ones."""
        self._server.should_exit = True

    async def stop(self) -> None:
        """Refuse, and wait a moment for answers on their way."""
        self.refuse()
        if self._watching is not None:
            self._watching.cancel()
        if self._serving is None:
            return
        done, _ = await asyncio.wait([self._serving], timeout=_END_S)
        if not done:
            self._server.force_exit = True
            for protocol in list(self._config.open):
                protocol.transport.abort()
            await self._serving


def _end_unread(sock: socket.socket, after_s: float) -> None:
    """Have the kernel end a connection whose caller reads nothing for that long.

    What is closed, too, waits for its last bytes to be read: without this its place is held as
    long as the caller likes. Linux alone does so; elsewhere the caller's end is waited for.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        after_ms = min(max(int(1000 * after_s), 1), _MOST_MS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, after_ms)


def _drop_syns(listening: socket.socket) -> None:
    """Accept no new connections: callers try again after 1 s, and reach another listener.

    Between the last accept and the close there is always a moment in which the kernel lets one in
    and then resets it. Linux alone can close it; elsewhere a caller may be lost there.
    """
    if sys.platform == "linux":
        program = ctypes.create_string_buffer(_NO_SYN, len(_NO_SYN))
        pointer = struct.pack("HP", len(_NO_SYN) // 8, ctypes.addressof(program))
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)


def _accept_all(listening: socket.socket) -> list[socket.socket]:
    """Accept every waiting connection."""
    accepted = []
    with contextlib.suppress(OSError):
        while True:
            accepted.append(listening.accept()[0])
    return accepted


def hold_port(host: str, port: int) -> socket.socket | None:
    """Let connections wait for a server that is about to start, instead of refusing them.

    Returns what `Listener.start` takes; None: somebody takes connections there, or it cannot be
    listened on, which `Listener.start` says.
    """
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        if probe.connect_ex((host, port)) == 0:
            return None
    try:
        made = _listening_socket(host, port)
    except OSError:
        return None
    made.listen(_BACKLOG)
    return made


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _listening_socket(host: str, port: int) -> socket.socket:
    """Bind; a gateway listens beside the one that it replaces while that drains."""
    made = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return made
