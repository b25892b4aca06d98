"""Where replicas live: what the gateway asks of a pool, and a pool that Serve runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import RunningReplica

from serve_app.cluster import Pool, max_model_tokens
from serve_app.engines.base import EngineError
from serve_app.gateway.exchange import Attempt, relay
from serve_app.gateway.generation import (
    GenerationChunk,
    GenerationRequest,
    ReplicaFailed,
    ReplicaFull,
    ReplicaRefused,
)
from serve_app.gateway.replicas import ReplicaTable
from serve_app.ray_serve.router_registry import ROUTERS
from serve_app.router import profile_of, status_of


class Backend(Protocol):
    """A pool, as the gateway uses it."""

    name: str
    max_model_tokens: int
    takes_calls: bool
    """Whether its replicas are sent what the caller wrote, and not a generation."""

    def refresh(self, table: ReplicaTable, now_s: float) -> None:
        """Tell the collector which replicas there are and what they published; cheap."""
        ...

    def ray_replicas(self) -> tuple[Any, ...]:
        """Replicas as Ray's own router takes them."""
        ...

    async def answer(self, replica_id: str, attempt: Attempt) -> None:
        """Have one replica answer a request; being cancelled cancels it there.

        Raises:
            ReplicaFailed: It is gone, full or broken.
            RequestRejected: It has something against the request.
        """
        ...

    def host_loads(self) -> dict[str, dict[str, float]]:
        """Load of every replica's machine, by replica."""
        ...


logger = logging.getLogger(__name__)

_LIMIT_S = 5.0
_HOST_SUFFIXES = ("_used_fraction", "_power_w", "_bytes_per_s")


class ServeBackend:
    """A pool of ours: one deployment, asked through its handle."""

    takes_calls = False

    def __init__(self, pool: Pool, handle: DeploymentHandle[Any]) -> None:
        """Connect to the deployment."""
        self.name = pool.name
        self.max_model_tokens = max_model_tokens(pool)
        self._pool = pool
        self._handle = handle.options(stream=True, method_name="generate")
        self._limit = handle.options(method_name="limit_batch")
        self._app_name = handle.app_name
        self._seen_version = -1

    @property
    def _live(self) -> tuple[RunningReplica, ...]:
        router = ROUTERS.get((self._app_name, self.name))
        return () if router is None else router.live

    def refresh(self, table: ReplicaTable, now_s: float) -> None:
        """Take over what Serve's router was told since the last time."""
        router = ROUTERS.get((self._app_name, self.name))
        if router is None or router.version == self._seen_version:
            return
        self._seen_version = router.version
        live = router.live
        for replica in live:
            replica_id = replica.replica_id.unique_id
            state = table.replicas.get(replica_id)
            if state is None:
                profile = profile_of(replica)
                if profile is None:
                    continue
                state = table.add(
                    replica_id, self.name, profile, self._pool.prefix_block_tokens, now_s
                )
            status = status_of(replica)
            if status is not None:
                state.publish(status)
        table.keep(self.name, (replica.replica_id.unique_id for replica in live))

    def ray_replicas(self) -> tuple[Any, ...]:
        """The deployment's replicas."""
        return self._live

    def host_loads(self) -> dict[str, dict[str, float]]:
        """What replicas published of their machines."""
        return {
            replica.replica_id.unique_id: {
                key: float(value)
                for key, value in (replica.routing_stats or {}).items()
                if key.endswith(_HOST_SUFFIXES) and key != "kv_used_fraction"
            }
            for replica in self._live
        }

    async def limit_batch(self, replica_id: str, max_batch: int) -> None:
        """Let a replica run so many sequences at once; it publishes when it does."""
        try:
            async with asyncio.timeout(_LIMIT_S):
                await self._limit.remote(max_batch, replica_id=replica_id)
        except (TimeoutError, ReplicaFailed, RayError, RayServeException) as error:
            # Whoever asked sees that it is not published, and asks again.
            logger.warning("replica %s took no batch limit: %s", replica_id, type(error).__name__)

    async def answer(self, replica_id: str, attempt: Attempt) -> None:
        """Have one replica answer a request; being cancelled cancels it there.

        Raises:
            ReplicaFailed: It is gone, full or broken.
        """
        assert attempt.request.generation is not None
        await relay(self._stream(replica_id, attempt.request.generation.request), attempt)

    async def _stream(
        self, replica_id: str, request: GenerationRequest
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Send a request to one replica; closing the stream cancels it there.

        Raises:
            ReplicaFailed: It is gone, full or broken.
        """
        response = self._handle.remote(request, replica_id=replica_id)
        done = False
        try:
            async for chunk in response:
                done = chunk.finish_reason is not None
                yield chunk
                if done:
                    return
        except RayTaskError as error:
            # Raised in the replica; it is an instance of its cause's class, too.
            cause = error.cause
            failure: type[ReplicaFailed]
            failure = ReplicaFull if isinstance(cause, ReplicaFull) else ReplicaFailed
            if isinstance(cause, EngineError):
                failure = ReplicaRefused
            raise failure(f"replica {replica_id}: {cause}") from None
        except (ReplicaFailed, asyncio.CancelledError, GeneratorExit):
            raise
        except BackPressureError as error:
            raise ReplicaFull(str(error)) from None
        except (RayActorError, RayServeException) as error:
            first = str(error).strip().splitlines()[0]
            raise ReplicaFailed(f"replica {replica_id} died: {first}") from None
        finally:
            if not done:
                response.cancel()
