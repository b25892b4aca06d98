"""Listens for proxies: Envoy's external processing service, and gRPC's health service."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial

from starlette.types import ASGIApp

from serve_app.ext_proc.addresses import Addresses
from serve_app.ext_proc.exchange import Exchange, Site
from serve_app.ext_proc.health import Health
from serve_app.ext_proc.http2 import CallHandler, Http2Protocol, Stream
from serve_app.ext_proc.protocol import CHECK, EXT_PROC, PROCESS, WATCH
from serve_app.gateway.gateway import Gateway
from serve_app.http.tls import Certificate

_LOOK_EVERY_S = 0.5
_SLACK_BYTES = 1 << 20
"""Of a message, beyond the longest body."""
_MIN_STREAMS = 4096


class ExtProcServer:
    """Picks endpoints for the requests of proxies."""

    def __init__(self, app: ASGIApp, gateway: Gateway, hides_keys: bool) -> None:
        """Have `app`, the data path of a gateway, read and place requests.

        `hides_keys`: callers' keys are the gateway's, and endpoints do not get them.
        """
        self._gateway = gateway
        self._addresses = Addresses(gateway.table.replicas.keys())
        max_bytes = gateway.cluster.limits.max_body_bytes
        self._site = Site(app, self._addresses, max_bytes, hides_keys)
        self._health = Health(("readiness", EXT_PROC, ""), self._is_ready)
        self._connections: set[Http2Protocol] = set()
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def _is_ready(self) -> bool:
        return not self._gateway.draining and "ready" in self._gateway.states().values()

    async def start(self, host: str, port: int) -> None:
        """Begin to listen; OSError: the address cannot be used."""
        self._gateway.refresh()
        limits, tls = self._gateway.cluster.limits, self._gateway.cluster.gateway.tls
        methods: dict[bytes, Callable[[Stream], CallHandler]] = {
            PROCESS: partial(Exchange, self._site),
            CHECK: self._health.check, WATCH: self._health.watch,
        }  # fmt: skip
        max_streams = max(2 * limits.max_in_flight, _MIN_STREAMS)
        max_bytes = limits.max_body_bytes + _SLACK_BYTES
        context: ssl.SSLContext | None = None
        if tls is not None:
            certificate = Certificate(tls, ("h2",))
            context = certificate.context
            self._tasks.append(asyncio.create_task(certificate.watch()))
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Http2Protocol(methods, max_streams, max_bytes, self._connections),
            host, port, ssl=context,
        )  # fmt: skip
        self._tasks.append(asyncio.create_task(self._addresses.resolve()))
        self._tasks.append(asyncio.create_task(self._watch()))

    async def _watch(self) -> None:
        while True:
            self._gateway.refresh()  # Subsets may name endpoints that are new.
            self._health.tell()
            await asyncio.sleep(_LOOK_EVERY_S)

    def resign(self) -> None:
        """Take no new connections, and ask proxies for no more requests."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.go_away()

    def stop(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        for connection in (*self._connections,):
            connection.close()
