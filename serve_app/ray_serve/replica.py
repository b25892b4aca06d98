"""One replica of a pool: an engine, its tokenizer, and what Ray Serve asks of them."""

# No `from __future__ import annotations` here: Serve reads the class's signatures.
import asyncio
import importlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from serve_app.cluster import Pool
from serve_app.engines.admission import BatchLimit
from serve_app.engines.base import Engine, EngineConfig, EngineError
from serve_app.engines.models import find_model
from serve_app.engines.profiling import start_and_measure
from serve_app.engines.sharded.engine import rank_bundles
from serve_app.engines.tokenizer import Detokenizer, HuggingFaceTokenizer, StopFinder, Tokenizer
from serve_app.gateway.generation import GenerationChunk, GenerationRequest, ReplicaFull
from serve_app.gateway.replicas import EngineStatus, HostMetrics
from tokenyard import former_names

logger = logging.getLogger(__name__)

ENGINES = {
    "sharded": "serve_app.engines.sharded.engine:ShardedEngine",
    "vllm": "serve_app.engines.vllm:VllmEngine",
}
PUBLISH_EVERY_S = 0.05
"""Time between two states that ride on answers."""
_SHUTDOWN_S = 60.0


class EngineReplica:
    """Holds one engine, and streams texts out of it."""

    async def __init__(self, pool: Pool) -> None:  # type: ignore[misc]
        """Start the engine and learn how fast it is."""
        self._pool = pool
        self._engine = engine_class(pool)(pool.config)
        # Both take seconds, in different processes.
        loading = asyncio.create_task(asyncio.to_thread(load_tokenizer, pool.config.model))
        self._profile = await start_and_measure(self._engine, pool, loading)
        self._tokenizer: Tokenizer = await loading
        self._host = HostMetrics()
        self._published_s = 0.0
        self._slots = BatchLimit(pool.config.max_batch)
        self._draining = False

    async def generate(
        self, request: GenerationRequest, replica_id: str
    ) -> AsyncIterator[GenerationChunk]:
        """Stream the answer to a request; leaving the stream early aborts it.

        Args:
            request: What to generate.
            replica_id: Chosen by the caller; read by its router.

        Raises:
            ReplicaFull: As many requests wait as may.
            EngineError: The engine refuses the request, or failed.
        """
        num_waiting = self._engine.stats().num_waiting + self._slots.num_waiting
        if num_waiting >= max(self._pool.config.max_waiting, 1):
            raise ReplicaFull(f"{num_waiting} requests wait already")
        done = False
        await self._slots.enter()
        chunks = self._engine.generate(request.request_id, request.token_ids, request.sampling)
        try:
            async for chunk in read_texts(chunks, self._tokenizer, request.stop):
                done = chunk.finish_reason is not None
                yield GenerationChunk(
                    chunk.text, chunk.num_tokens, chunk.finish_reason, self._publish_maybe(done)
                )
        finally:
            self._slots.leave()
            if not done:
                await self._engine.abort(request.request_id)

    async def limit_batch(self, max_batch: int, replica_id: str) -> None:
        """Run so many sequences at once from now on; those that run go on.

        Args:
            max_batch: At least 1; above what the engine was started with it changes nothing.
            replica_id: Chosen by the caller; read by its router.
        """
        self._slots.resize(max_batch)

    async def check_health(self) -> None:
        """Raise where the engine is not well, so that Serve replaces the replica."""
        await self._engine.check_health()

    def record_routing_stats(self) -> dict[str, Any]:
        """Publish the state of the engine and the load of its machine."""
        stats, status = self._engine.stats(), self._publish()
        return {
            **asdict(status),
            "num_preemptions": stats.num_preemptions,
            "last_batch_s": stats.last_batch_s,
            "last_batch_size": stats.last_batch_size,
            **self._host.read(status.observed_at_s),
        }

    def record_replica_metadata(self) -> dict[str, Any]:
        """Publish what never changes: the pool and the speed."""
        return {"pool": self._pool.name, "profile": self._profile.model_dump()}

    async def __del__(self) -> None:
        """Answer what was accepted, then free the ranks; Serve awaits this."""
        self._draining = True
        await self._slots.emptied()
        await self._engine.drain()
        await self._engine.stop()

    def _publish_maybe(self, now: bool) -> EngineStatus | None:
        time_s = time.time()
        if not now and time_s - self._published_s < PUBLISH_EVERY_S:
            return None
        self._published_s = time_s
        return self._publish()

    def _publish(self) -> EngineStatus:
        stats = self._engine.stats()
        return EngineStatus(
            num_waiting=stats.num_waiting + self._slots.num_waiting,
            num_running=stats.num_running,
            kv_used_fraction=stats.kv_used_fraction,
            observed_at_s=time.time(),
            accepting=stats.accepting and not self._draining,
            max_batch=self._slots.limit,
        )


async def read_texts(
    chunks: AsyncIterator[Any], tokenizer: Tokenizer, stop: tuple[str, ...]
) -> AsyncGenerator[GenerationChunk, None]:
    """Turn an engine's tokens into text, up to the first stop string.

    Raises:
        EngineError: The engine's stream ended without a reason.
    """
    texts, stops = Detokenizer(tokenizer), StopFinder(stop)
    num_tokens = 0
    async for chunk in chunks:
        num_tokens += len(chunk.token_ids)
        text = stops.push(texts.push(chunk.token_ids))
        reason = chunk.finish_reason
        if reason is not None and not stops.found:
            text += stops.push(texts.finish())
            text += stops.finish()
        if stops.found:
            reason = "stop"
        yield GenerationChunk(text, num_tokens, reason)
        if reason is not None:
            return
    raise EngineError("the engine's answer ended without a reason")


def engine_class(pool: Pool) -> Callable[[EngineConfig], Engine]:
    """Find the engine that a pool names.

    Raises:
        ValueError: There is none of that name.
    """
    module, separator, name = ENGINES.get(pool.engine, pool.engine).partition(":")
    if not separator:
        raise ValueError(
            f"unknown engine {pool.engine!r}; choose one of {sorted(ENGINES)} or give module:Class"
            f"{former_names.hint(pool.engine, former_names.ENGINES)}"
        )
    try:
        found: Callable[[EngineConfig], Engine] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"engine {pool.engine!r} cannot be imported: {error}") from None
    return found


def load_tokenizer(model: str) -> Tokenizer:
    """Load the tokenizer of a model: a folder, a hub id or `default`."""
    if not Path(model).is_dir():
        model = str(find_model(model))
    return HuggingFaceTokenizer(model)


def _placed(pool: Pool, num_bundles: int) -> dict[str, Any]:
    labels = dict(pool.node_labels)
    return {"placement_group_bundle_label_selector": [labels] * num_bundles} if labels else {}


def bind_pool(pool: Pool, routing_stats_period_s: float) -> Application:
    """Make the deployment of a pool.

    Raises:
        ValueError: Its engine does not exist.
    """
    router = RequestRouterConfig(
        request_router_class="serve_app.router:ChosenReplicaRouter",
        request_routing_stats_period_s=routing_stats_period_s,
    )
    bundles = [{"CPU": pool.replica_cpus}, *rank_bundles(pool.config)]
    deployment = serve.deployment(
        name=pool.name,
        num_replicas=pool.replicas,
        max_ongoing_requests=pool.max_ongoing_requests,
        ray_actor_options={"num_cpus": pool.replica_cpus},
        placement_group_bundles=bundles,
        **_placed(pool, len(bundles)),
        request_router_config=router,
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=_SHUTDOWN_S,
    )
    application: Application = deployment(EngineReplica).bind(pool)
    return application
