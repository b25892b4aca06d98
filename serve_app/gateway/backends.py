"""A pool whose replicas Ray Serve runs, and the pools of a cluster."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.cluster import Cluster, EngineProfile, Pool
from serve_app.endpoints import KvEvents
from serve_app.engines.base import EngineStatus
from serve_app.engines.tokenizer import Tokenizer, load_tokenizer
from serve_app.gateway.clocks import RemoteClocks
from serve_app.gateway.endpoint_speed import SHARE_EVERY_S, EndpointSpeed
from serve_app.gateway.engine_wire import PROGRESS, STATUS_HEADER, write_generation
from serve_app.gateway.exchange import Attempt, Backend
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.faults import EndpointError, Fault
from serve_app.gateway.forwarding import (
    EndpointAsRayReplica,
    Forwarder,
    ResponseTimer,
    hand_on_held,
)
from serve_app.gateway.generation import ReplicaFailed, ReplicaFull, ReplicaRefused, ReplicaTooSmall
from serve_app.gateway.host_metrics import HOST_PREFIXES
from serve_app.gateway.kv_events import EventSubscriber
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.replicas import ReplicaState, ReplicaTable, learn_speeds
from serve_app.gateway.router_registry import ROUTERS
from serve_app.gateway.sse import PEEK_BYTES, ErrorEvent, peek_whole
from serve_app.gateway.upstream import Connection, Origin
from tokenyard.perf.online import PoolEstimator

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from ray.serve.request_router import RunningReplica

logger = logging.getLogger(__name__)

_LIMIT_S = 5.0
_ERROR = b'{"error":'


class _EngineForwarder(Forwarder):
    """Asks our own engines, which report more than others: see `serve_app.gateway.engine_wire`."""

    status_header = STATUS_HEADER

    def _failure_of(self, error: ErrorEvent) -> ReplicaFailed:
        return ReplicaRefused(f"{self.which}: {EndpointError.of(error.event).message}")

    def _refusal(self, connection: Connection, text: bytes) -> ReplicaFailed:
        status, error = connection.status, EndpointError.of_answer(connection.status, text)
        reason = f"{self.which}: {error.message}"
        if status == 429:
            return ReplicaFull(reason)
        if status == 503:
            return ReplicaRefused(reason)
        if error.fault is Fault.ENDPOINT:
            return ReplicaFailed(f"{self.which} answered {status}")
        return ReplicaTooSmall(reason)

    async def _hand_on_whole(
        self, connection: Connection, attempt: Attempt, timer: ResponseTimer
    ) -> None:
        """Hand on an answer when it is complete, and count its tokens until then."""
        num_tokens, held = 0, bytearray()
        while piece := await connection.read():
            if not held:
                rest = piece.lstrip(PROGRESS)
                if num_tokens == 0 and len(rest) < len(piece):
                    timer.begin()
                num_tokens += len(piece) - len(rest)
                attempt.take(num_tokens)
                piece = rest
            held += piece
            timer.wait_again()
        if held.startswith(_ERROR):
            raise ErrorEvent(json.loads(held))
        num_tokens, reason, _ = peek_whole(bytes(held[-PEEK_BYTES:]))
        attempt.take(num_tokens, reason)
        await hand_on_held(connection, attempt, bytes(held))


class ServeBackend(Backend):
    """A pool of ours: one deployment, whose replicas listen themselves.

    Serve's handle says which there are and what they publish; requests do not go through it.
    """

    takes_any = False
    max_model_tokens: float = math.inf

    def __init__(self, pool: Pool, handle: DeploymentHandle[Any]) -> None:
        self.name = pool.name
        self.max_model_tokens = pool.config.max_model_tokens
        self._pool = pool
        self._limit = handle.options(method_name="limit_batch")
        self._app_name = handle.app_name
        self._seen_version = -1
        self._endpoints: dict[str, EndpointAsRayReplica] = {}
        self._states: dict[str, ReplicaState] = {}
        self._subscribers: dict[str, EventSubscriber] = {}
        """Of replicas that publish block events, by their ids."""
        declared = pool.profile or pool.config.emulates
        self._estimator = PoolEstimator(None if declared is None else declared.iteration)
        self._clocks, self._share_at_s = RemoteClocks(), 0.0
        self._forwarder = _EngineForwarder(f"a replica of pool {self.name!r}", pool.deadlines)

    def refresh(self, table: ReplicaTable, now_s: float) -> None:
        """Take over the changes that Serve's router has received."""
        router = ROUTERS.get((self._app_name, self.name))
        if router is None or router.version == self._seen_version:
            return
        self._seen_version = router.version
        live = {replica.replica_id.unique_id: replica for replica in router.live}
        for replica_id, replica in live.items():
            self._look_at(replica_id, replica, table, now_s)
        for replica_id in self._endpoints.keys() - live.keys():
            del self._endpoints[replica_id]
            self._states.pop(replica_id, None)
            self._estimator.drop(replica_id)
            if replica_id in self._subscribers:
                self._subscribers.pop(replica_id).stop()
        self._clocks.keep(live)
        table.keep(self.name, live)

    def _look_at(
        self, replica_id: str, replica: RunningReplica, table: ReplicaTable, now_s: float
    ) -> None:
        metadata = replica.replica_metadata
        if "profile" not in metadata:
            return  # It has published nothing yet.
        if replica_id not in self._endpoints:
            key = f"authorization: Bearer {metadata['secret']}\r\n".encode()
            self._endpoints[replica_id] = EndpointAsRayReplica(
                replica_id, Origin.of(metadata["url"]), self._pool.max_ongoing_requests, key
            )
        state = table.replicas.get(replica_id)
        if state is None:
            profile = EngineProfile(**metadata["profile"])
            speed = EndpointSpeed.of_replica(replica_id, self.name, profile, self._estimator)
            size = self._pool.prefix_block_tokens
            state = table.add(replica_id, self.name, speed.profile, size, now_s)
            state.estimate_with(speed)
            self._states[replica_id] = state
            if (published := metadata.get("kv_events")) is not None and state.block_tokens:
                subscriber = EventSubscriber(KvEvents(**published), "", state)
                self._subscribers[replica_id] = subscriber
        status = status_of(replica)
        if status is not None:
            ours = self._clocks.to_ours(replica_id, status, now_s)
            state.publish(ours)
            if state.speed is not None:
                num_own = state.in_flight.count_at(ours.observed_at_s)
                state.speed.compare(
                    status.num_waiting, status.num_running, status.kv_used_fraction, num_own
                )
            self._endpoints[replica_id].status = status

    def ray_replicas(self) -> tuple[Any, ...]:
        """Replicas as Ray's router expects them; Serve does not see the requests."""
        return tuple(self._endpoints.values())

    def host_loads(self) -> dict[str, dict[str, float]]:
        """The load that replicas published of their machines."""
        return {
            replica.replica_id.unique_id: {
                key: float(value)
                for key, value in (replica.routing_stats or {}).items()
                if key.startswith(HOST_PREFIXES)
            }
            for replica in getattr(ROUTERS.get((self._app_name, self.name)), "live", ())
        }

    def by_our_clock(self, replica_id: str, status: EngineStatus, now_s: float) -> EngineStatus:
        """Return a status that came with an answer, with its time by our clock."""
        return self._clocks.moved(replica_id, status, now_s)

    async def limit_batch(self, replica_id: str, max_batch: int) -> None:
        """Limit the batch of a replica; it publishes the limit once it holds."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            async with asyncio.timeout(_LIMIT_S):
                await self._limit.remote(max_batch, replica_id=replica_id)
        except (TimeoutError, ReplicaFailed, RayError, RayServeException) as error:
            # Whoever asked sees that it is not published, and asks again.
            logger.warning("replica %s took no batch limit: %s", replica_id, type(error).__name__)

    async def answer(self, replica_id: str, attempt: Attempt) -> None:
        """Have one replica answer a request: see `Backend.answer`."""
        endpoint, request = self._endpoints.get(replica_id), attempt.request
        if endpoint is None:
            raise ReplicaFailed(f"{self._forwarder.which} is gone")
        assert request.generation is not None
        headers = endpoint.key + b"content-type: application/octet-stream\r\n"
        body = write_generation(request.generation, request.request_id, attempt.order_key)
        try:
            await self._forwarder.forward(endpoint.origin, headers, body, attempt)
        finally:
            if (now_s := time.monotonic()) >= self._share_at_s:
                # Here, and not while a request waits to be placed.
                self._share_at_s = now_s + SHARE_EVERY_S
                learn_speeds(self._states.values(), self._estimator)

    async def stop(self) -> None:
        """Close the connections."""
        for subscriber in self._subscribers.values():
            subscriber.stop()
        await self._forwarder.client.close()


def make_backends(
    cluster: Cluster, handles: Mapping[str, DeploymentHandle[Any]], metrics: Metrics
) -> dict[str, ExternalBackend | ServeBackend]:
    """Connect to a cluster's pools, external ones first; those are not scraped yet."""
    owners: dict[str, str] = {}
    made: list[ExternalBackend | ServeBackend] = [
        ExternalBackend(pool, cluster.served_model, metrics, owners)
        for pool in cluster.external_pools
    ]
    made += [ServeBackend(pool, handles[pool.name]) for pool in cluster.own_pools]
    return {backend.name: backend for backend in made}


def load_tokenizers(
    cluster: Cluster, backends: Mapping[str, ExternalBackend | ServeBackend]
) -> dict[str, Tokenizer]:
    """Load tokenizers of models that pools of ours serve, or whose endpoints publish block events.

    They are by names in requests. Where endpoints' tokens cannot be known, nobody asks for events.
    """
    own = (*cluster.own_pools, *cluster.templates)
    models = {cluster.model_of(pool): pool.config.model for pool in own}
    tokenizers = {name: load_tokenizer(model) for name, model in models.items()}
    for pool in cluster.external_pools:
        if pool.kv_events is None:
            continue
        name, folder = cluster.model_of(pool), pool.kv_events.tokenizer
        try:
            if name not in tokenizers:
                if folder is None and not Path(pool.model).is_dir():
                    raise ValueError("kv_events names no tokenizer")
                tokenizers[name] = load_tokenizer(folder or pool.model)
            tokenizers |= dict.fromkeys(pool.loras, tokenizers[name])
        except ValueError as error:
            backend = backends[pool.name]
            assert isinstance(backend, ExternalBackend)
            backend.kv_events = None
            logger.warning("pool %s does without block events: %s", pool.name, error)
    return tokenizers


def status_of(replica: RunningReplica) -> EngineStatus | None:
    """Return the state that a replica has published; None: it has published none."""
    stats = replica.routing_stats
    if not stats or "observed_at_s" not in stats:
        return None
    names = (field.name for field in fields(EngineStatus))
    return EngineStatus(**{name: stats[name] for name in names if name in stats})
