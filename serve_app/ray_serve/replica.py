"""One replica of a pool: an engine, where it listens, and what Ray Serve asks of it."""

# No `from __future__ import annotations` here: Serve reads the class's signatures.
import asyncio
import importlib
import secrets
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from serve_app.cluster import Cluster, EngineProfile, Limits, Pool
from serve_app.engine_config import EngineConfig
from serve_app.engines.base import Engine, EngineError, Sampling, longest_tokens
from serve_app.engines.sharded.engine import rank_bundles
from serve_app.engines.texts import TextEngine
from serve_app.engines.tokenizer import load_tokenizer
from serve_app.gateway import interpreter
from serve_app.gateway.engine_wire import BYTES_PER_TOKEN
from serve_app.gateway.host_metrics import HostMetrics
from serve_app.gateway.upstream import url_of
from serve_app.http.engine_api import create_engine_api
from serve_app.http.listener import Listener
from tokenyard.perf.online import GENERIC_ITERATION
from tokenyard.routing.fleet import IterationSpeed

ENGINES = {
    "sharded": "serve_app.engines.sharded.engine:ShardedEngine",
    "vllm": "serve_app.engines.vllm:VllmEngine",
}
_SHUTDOWN_S = 60.0
_KEEP_ALIVE_S = 75
"""Longer than the gateway keeps a connection that nobody uses."""


class EngineReplica:
    """Holds one engine, which listens itself; Ray Serve keeps it alive and tells where it is."""

    async def __init__(self, pool: Pool, limits: Limits) -> None:  # type: ignore[misc]
        """Start the engine, and listen."""
        self._pool = pool
        self._engine = engine_class(pool)(pool.config)
        # Both take seconds, in different processes.
        loading = asyncio.create_task(asyncio.to_thread(load_tokenizer, pool.config.model))
        await self._engine.start()
        tokenizer = await loading
        async for _ in self._engine.generate("first", [0] * 4, Sampling(1, ignore_eos=True)):
            pass  # What an engine does once for all is not for the first caller to wait for.
        self._profile = _profile_of(pool, self._engine.stats().kv_capacity_tokens)
        self._host = HostMetrics()
        config = pool.config
        self._texts = TextEngine(
            self._engine, tokenizer, config.max_batch, config.max_waiting, pool.max_ongoing_requests
        )
        # Known to this process, and through Serve's controller to those with a handle to it.
        self._secret = secrets.token_urlsafe(32)
        limits = _of_replica(limits)
        longest = longest_tokens(config, self._engine.stats())
        api = create_engine_api(self._texts, longest, limits, self._secret)
        self._listener = Listener(api, limits)
        address = ray.util.get_node_ip_address()
        self._url = url_of(address, await self._listener.start(address, 0))
        interpreter.settle()
        # Serve awaits it. One of the class would be called where the start fails, too.
        self.__del__ = self.end

    async def limit_batch(self, max_batch: int, replica_id: str) -> None:
        """Run so many sequences at once, at most those of the start; those that run go on.

        `replica_id` is read by the router of the caller.
        """
        self._texts.limit_batch(max_batch)

    async def check_health(self) -> None:
        """Raise where the engine is not well, so that Serve replaces the replica."""
        if not self._listener.is_up:
            raise EngineError("the replica does not listen any more")
        await self._engine.check_health()

    def record_routing_stats(self) -> dict[str, Any]:
        """Publish the state of the engine and the load of its machine."""
        stats, status = self._engine.stats(), self._texts.status()
        return {
            **asdict(status),
            "num_preemptions": stats.num_preemptions,
            **self._host.read(status.observed_at_s),
        }

    def record_replica_metadata(self) -> dict[str, Any]:
        """Publish what never changes: the pool, what is known of its speed, and how to ask."""
        return {
            "pool": self._pool.name,
            "profile": self._profile.model_dump(),
            "url": self._url,
            "secret": self._secret,
            "kv_events": getattr(self._engine, "kv_events", None),
        }

    async def end(self) -> None:
        """Answer what was accepted, then free the ranks."""
        await self._texts.drain()
        await self._listener.stop()
        await self._engine.stop()


def _profile_of(pool: Pool, kv_capacity_tokens: float) -> EngineProfile:
    """What is known of a replica before it has answered anything."""
    if pool.profile is not None:
        return pool.profile
    config, emulates = pool.config, pool.config.emulates
    iteration = GENERIC_ITERATION if emulates is None else emulates.iteration
    return EngineProfile(
        **dict(zip(IterationSpeed.model_fields, iteration.tolist(), strict=True)),
        max_batch=config.max_batch, token_budget=config.token_budget,
        kv_capacity_tokens=max(kv_capacity_tokens, 1.0),
        source="estimated" if emulates is None else "declared",
    )  # fmt: skip


def _of_replica(limits: Limits) -> Limits:
    """Limits for the gateway as the only client; limits per caller are enforced there."""
    most = max(limits.max_connections_per_address, 2 * limits.max_in_flight)
    changes = {
        "max_connections": max(limits.max_connections, most),
        "max_connections_per_address": most,
        "max_body_bytes": limits.max_body_bytes + BYTES_PER_TOKEN * limits.max_prompt_tokens,
        "keep_alive_s": _KEEP_ALIVE_S,
    }
    return limits.model_copy(update=changes)


def engine_class(pool: Pool) -> Callable[[EngineConfig], Engine]:
    """Find the engine that a pool names.

    Raises:
        ValueError: There is none of that name.
    """
    module, separator, name = ENGINES.get(pool.engine, pool.engine).partition(":")
    if not separator:
        raise ValueError(
            f"unknown engine {pool.engine!r}; choose one of {sorted(ENGINES)} or give module:Class"
        )
    try:
        engine: Callable[[EngineConfig], Engine] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"engine {pool.engine!r} cannot be imported: {error}") from None
    return engine


def bind_pool(pool: Pool, cluster: Cluster) -> Application:
    """Make the deployment of a pool of a cluster.

    Raises:
        ValueError: Its engine does not exist.
    """
    router = RequestRouterConfig(
        request_router_class="serve_app.router:ChosenReplicaRouter",
        request_routing_stats_period_s=cluster.routing_stats_period_s,
    )
    bundles = [{"CPU": pool.replica_cpus}, *rank_bundles(pool.config)]
    labels = [dict(pool.node_labels)] * len(bundles) if pool.node_labels else []
    deployment = serve.deployment(
        name=pool.name,
        num_replicas=pool.replicas,
        max_ongoing_requests=pool.max_ongoing_requests,
        ray_actor_options={"num_cpus": pool.replica_cpus},
        placement_group_bundles=bundles,
        placement_group_bundle_label_selector=labels or None,
        request_router_config=router,
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=_SHUTDOWN_S,
    )
    application: Application = deployment(EngineReplica).bind(pool, cluster.limits)
    return application
