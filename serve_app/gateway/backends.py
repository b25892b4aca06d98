"""Where replicas live: a pool that Serve runs, or endpoints that run already."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import RunningReplica

from serve_app.cluster import EngineProfile, ExternalPool, Pool, max_model_tokens
from serve_app.engines.base import EngineError, FinishReason
from serve_app.gateway.generation import (
    GenerationChunk,
    GenerationRequest,
    ReplicaFailed,
    ReplicaFull,
    ReplicaRefused,
)
from serve_app.gateway.replicas import EngineStatus, ReplicaTable, parse_vllm
from serve_app.ray_serve.router_registry import ROUTERS
from serve_app.router import profile_of, status_of

logger = logging.getLogger(__name__)

_SCRAPE_EVERY_S = 0.25
_SCRAPE_TIMEOUT_S = 2.0


class Backend(Protocol):
    """A pool, as the gateway uses it."""

    name: str
    max_model_tokens: int

    def refresh(self, table: ReplicaTable, now_s: float) -> None:
        """Tell the collector which replicas there are and what they published; cheap."""
        ...

    def ray_replicas(self) -> tuple[Any, ...]:
        """Replicas as Ray's own router takes them."""
        ...

    def stream(
        self, replica_id: str, request: GenerationRequest
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Send a request to one replica; closing the stream cancels it there.

        Raises:
            ReplicaFailed: It is gone, full or broken.
        """
        ...

    def host_loads(self) -> dict[str, dict[str, float]]:
        """Load of every replica's machine, by replica."""
        ...


_HOST_SUFFIXES = ("_used_fraction", "_power_w", "_bytes_per_s")


class ServeBackend:
    """A pool of ours: one deployment, asked through its handle."""

    def __init__(self, pool: Pool, handle: DeploymentHandle[Any]) -> None:
        """Connect to the deployment."""
        self.name = pool.name
        self.max_model_tokens = max_model_tokens(pool)
        self._pool = pool
        self._handle = handle.options(stream=True, method_name="generate")
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

    async def stream(
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


@dataclass(frozen=True, slots=True)
class _Id:
    unique_id: str


class _EndpointAsRayReplica:
    """An endpoint in the shape that Ray's router asks for."""

    availability_zone = None
    node_id = ""
    multiplexed_model_ids: frozenset[str] = frozenset()

    def __init__(self, url: str, pool: ExternalPool) -> None:
        self.replica_id = _Id(url)
        self.max_ongoing_requests = pool.max_ongoing
        self.status = EngineStatus(0, 0, 0.0, 0.0)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.status.num_waiting + self.status.num_running


class ExternalBackend:
    """Endpoints that speak OpenAI's API; their metrics are scraped in the background."""

    def __init__(self, pool: ExternalPool) -> None:
        """Name the endpoints; nothing is asked before `start`."""
        self.name = pool.name
        self.max_model_tokens = max_model_tokens(pool)
        self._pool = pool
        self._endpoints = {
            url: _EndpointAsRayReplica(url, pool)
            for url in (str(one.url).rstrip("/") for one in pool.endpoints)
        }
        key = os.environ.get(pool.api_key_env) if pool.api_key_env else None
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(headers=headers, timeout=None, limits=limits)
        self._scraper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to scrape; must be called on the event loop."""
        if self._scraper is None:
            self._scraper = asyncio.create_task(self._scrape_forever())

    async def stop(self) -> None:
        """End scraping and close the connections."""
        if self._scraper is not None:
            self._scraper.cancel()
        await self._client.aclose()

    def refresh(self, table: ReplicaTable, now_s: float) -> None:
        """Pass on what was scraped."""
        profile: EngineProfile = self._pool.profile
        for url, endpoint in self._endpoints.items():
            state = table.add(url, self.name, profile, self._pool.prefix_block_tokens, now_s)
            state.publish(endpoint.status)

    def ray_replicas(self) -> tuple[Any, ...]:
        """The endpoints, dressed up."""
        return tuple(self._endpoints.values())

    def host_loads(self) -> dict[str, dict[str, float]]:
        """Nothing is known of them."""
        return {}

    async def stream(
        self, replica_id: str, request: GenerationRequest
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Send a request to one endpoint; closing the stream closes its connection.

        Raises:
            ReplicaFailed: It does not answer, or not as it should.
        """
        path, body = self._body(request)
        done = False
        try:
            asked = self._client.stream("POST", f"{replica_id}{path}", json=body)
            async with asked as response:
                await _check_status(replica_id, response)
                async with aclosing(_chunks(response.aiter_lines())) as chunks:
                    async for chunk in chunks:
                        done = chunk.finish_reason is not None
                        yield chunk
                        if done:
                            return
        except (httpx.HTTPError, json.JSONDecodeError, KeyError, IndexError) as error:
            raise ReplicaFailed(f"endpoint {replica_id} failed: {error!r}") from None
        if not done:
            raise ReplicaFailed(f"endpoint {replica_id} ended its answer without a reason")

    def _body(self, request: GenerationRequest) -> tuple[str, dict[str, Any]]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._pool.model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if request.stop:
            body["stop"] = list(request.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        if request.messages is not None:
            return "/v1/chat/completions", {**body, "messages": list(request.messages)}
        prompt = request.prompt if request.prompt is not None else list(request.token_ids)
        return "/v1/completions", {**body, "prompt": prompt}

    async def _scrape_forever(self) -> None:
        while True:
            await asyncio.gather(*(self._scrape(url) for url in self._endpoints))
            await asyncio.sleep(_SCRAPE_EVERY_S)

    async def _scrape(self, url: str) -> None:
        asked_s = time.time()
        try:
            answer = await self._client.get(f"{url}/metrics", timeout=_SCRAPE_TIMEOUT_S)
            answer.raise_for_status()
            self._endpoints[url].status = parse_vllm(answer.text, asked_s)
        except (httpx.HTTPError, ValueError) as error:
            # What is not heard of grows stale, and is offered only where all others are too.
            logger.debug("endpoint %s cannot be scraped: %r", url, error)


async def _check_status(url: str, response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    text = (await response.aread()).decode(errors="replace")[:200]
    failure = ReplicaFull if response.status_code in (429, 503) else ReplicaFailed
    raise failure(f"endpoint {url} answered {response.status_code}: {text}")


async def _chunks(lines: AsyncIterator[str]) -> AsyncGenerator[GenerationChunk, None]:
    """Read OpenAI's server-sent events; without usage in them every event counts as a token."""
    num_tokens = 0
    finish_reason: FinishReason | None = None
    async for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:"):
            continue
        if data == "[DONE]":
            if finish_reason is not None:
                yield GenerationChunk("", num_tokens, finish_reason)
            return
        event = json.loads(data)
        usage, choices = event.get("usage"), event.get("choices")
        text = ""
        if choices:
            choice = choices[0]
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if choice.get("finish_reason"):
                finish_reason = "length" if choice["finish_reason"] == "length" else "stop"
        num_tokens = usage["completion_tokens"] if usage else num_tokens + bool(text)
        if text:
            yield GenerationChunk(text, num_tokens)
    if finish_reason is not None:
        yield GenerationChunk("", num_tokens, finish_reason)
