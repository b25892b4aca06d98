"""Listens for proxies: Envoy's external processing service, and gRPC's health service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import DESCRIPTOR, ProcessingRequest
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from starlette.types import ASGIApp

from serve_app.cluster import TlsFiles
from serve_app.ext_proc.addresses import Addresses
from serve_app.ext_proc.exchange import Context, Exchange
from serve_app.gateway.gateway import Gateway

logger = logging.getLogger(__name__)

_SERVICE = DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
_READINESS = ("readiness", _SERVICE, "")
_LOOK_EVERY_S = 0.5
_SLACK_BYTES = 1 << 20
"""Of a message, beyond the longest body."""
_GRACE_S = 1.0


class ExtProcServer(ExternalProcessorServicer):
    """Picks endpoints for the requests of proxies."""

    def __init__(self, app: ASGIApp, gateway: Gateway, hides_keys: bool) -> None:
        """Have `app`, the data path of a gateway, read and place requests.

        `hides_keys`: callers' keys are the gateway's, and endpoints do not get them.
        """
        self._app, self._gateway, self._hides_keys = app, gateway, hides_keys
        self._addresses = Addresses(gateway.table.replicas.keys())
        self._health = health.HealthServicer()
        self._tasks: list[asyncio.Task[None]] = []
        self._server: grpc.aio.Server | None = None

    async def Process(  # noqa: N802
        self, request_iterator: AsyncIterator[ProcessingRequest], context: Context
    ) -> None:
        """Handle one request of a proxy."""
        max_bytes = self._gateway.cluster.limits.max_body_bytes
        exchange = Exchange(self._app, self._addresses, max_bytes, self._hides_keys, context)
        try:
            await exchange.run()
        except Exception:
            logger.exception("a request of a proxy")
            raise

    async def start(self, host: str, port: int, tls: TlsFiles | None) -> None:
        """Begin to listen; OSError: the address cannot be used."""
        limits = self._gateway.cluster.limits
        self._server = server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_concurrent_streams", max(2 * limits.max_in_flight, 4096)),
                ("grpc.max_receive_message_length", limits.max_body_bytes + _SLACK_BYTES),
            ]
        )
        add_ExternalProcessorServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                server.add_insecure_port(address)
            else:
                pair = tls.key.read_bytes(), tls.certificate.read_bytes()
                server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from None
        await self._health.set("liveness", HealthCheckResponse.SERVING)
        await server.start()
        self._tasks = [
            asyncio.create_task(self._addresses.resolve()),
            asyncio.create_task(self._watch()),
        ]

    async def _watch(self) -> None:
        """Say whether there is anything to pick from."""
        while True:
            is_ready = not self._gateway.draining and "ready" in self._gateway.states().values()
            state = HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING
            for name in _READINESS:
                await self._health.set(name, state)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def stop(self) -> None:
        """Close all streams."""
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            await self._server.stop(_GRACE_S)
