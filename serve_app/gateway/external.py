"""Endpoints that run already: they speak OpenAI's API and publish vLLM's metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from serve_app.cluster import Deadlines, EngineProfile, ExternalPool, max_model_tokens
from serve_app.gateway.generation import (
    GenerationChunk,
    GenerationRequest,
    ReplicaFailed,
    ReplicaFull,
    ReplicaTimeout,
    RequestRejected,
)
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.replicas import EngineStatus, ReplicaTable
from serve_app.gateway.scraping import Scraper
from serve_app.gateway.sse import BadEvent, read_chunks

_T = TypeVar("_T")
_MAX_ERROR_BYTES = 64 << 10
_OURS = (401, 403, 407, 408, 409, 425)
"""Client errors that are not the caller's: the key is the pool's, or another endpoint may do."""


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

    def publish(self, status: EngineStatus) -> None:
        self.status = status


class ExternalBackend:
    """A pool of endpoints; each has its deadlines, and a scraper of its metrics."""

    def __init__(self, pool: ExternalPool, metrics: Metrics) -> None:
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
        # Only the connection is httpx's to time: what it calls a read is one piece of an answer.
        timeout = httpx.Timeout(None, connect=pool.deadlines.connect_s)
        self._client = httpx.AsyncClient(
            headers=headers, timeout=timeout, limits=limits, trust_env=False
        )
        failures = metrics.scrape_failures.labels(pool.name)
        self._scrapers = [
            Scraper(self._client, url, one.publish, failures.inc)
            for url, one in self._endpoints.items()
        ]

    def start(self) -> None:
        """Begin to scrape; must be called on the event loop."""
        for one in self._scrapers:
            one.start()

    async def stop(self) -> None:
        """End scraping and close the connections."""
        for one in self._scrapers:
            one.stop()
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
            ReplicaFailed: It does not answer, not in time, or not as it should. The text does not
                say where it is, since callers read it.
            RequestRejected: It has something against the request.
        """
        path, body = self._body(request)
        asked = self._client.build_request("POST", f"{replica_id}{path}", json=body)
        patience = _Patience(self._pool.deadlines)
        with self._as_failures():
            response = await patience.head(self._client.send(asked, stream=True))
            try:
                await self._check_status(response, patience)
                async with (
                    aclosing(read_chunks(response.aiter_bytes())) as events,
                    aclosing(patience.tokens(events)) as chunks,
                ):
                    async for chunk in chunks:
                        yield chunk
                        if chunk.finish_reason is not None:
                            return
            finally:
                await response.aclose()
        raise ReplicaFailed(f"{self._which} ended its answer without a reason")

    @property
    def _which(self) -> str:
        """An endpoint, as callers may know it."""
        return f"an endpoint of pool {self.name!r}"

    @contextlib.contextmanager
    def _as_failures(self) -> Iterator[None]:
        """Turn what goes wrong with an endpoint into ReplicaFailed."""
        try:
            yield
        except _TooLate as error:
            raise ReplicaTimeout(f"{self._which} {error}") from None
        except httpx.ConnectTimeout:
            limit_s = self._pool.deadlines.connect_s
            raise ReplicaTimeout(f"{self._which} took no connection in {limit_s:g} s") from None
        except httpx.HTTPError as error:
            raise ReplicaFailed(f"{self._which} failed: {type(error).__name__}") from None
        except BadEvent as error:
            raise ReplicaFailed(f"{self._which} failed: {error}") from None

    async def _check_status(self, response: httpx.Response, patience: _Patience) -> None:
        status = response.status_code
        if status == 200:
            return
        if status in (429, 503):
            raise ReplicaFull(f"{self._which} answered {status}")
        if not 400 <= status < 500 or status in _OURS:
            raise ReplicaFailed(f"{self._which} answered {status}")
        text = await patience.error(_read_some(response))
        content_type = response.headers.get("content-type", "application/json")
        raise RequestRejected(status, content_type, text)

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


async def _read_some(response: httpx.Response) -> bytes:
    """Read the text of an error, as far as it may be long."""
    text = b""
    async for piece in response.aiter_bytes():
        text += piece
        if len(text) > _MAX_ERROR_BYTES:
            break
    return text[:_MAX_ERROR_BYTES]


class _TooLate(Exception):
    """A deadline that has passed; the text says which."""


_LATE = {
    "first_byte_s": "did not begin to answer in {:g} s",
    "first_token_s": "sent no token in {:g} s",
    "between_tokens_s": "sent no other token in {:g} s",
    "total_s": "was not done in {:g} s",
}


class _Patience:
    """The deadlines of one request; each wait is timed by itself.

    Between two waits the caller may go on in another task, which a deadline must not cancel, and
    may take its time, which is not the endpoint's.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._limits_s: dict[str, float | None] = deadlines.model_dump()
        self._started_s = asyncio.get_running_loop().time()

    async def head(self, sending: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
        """Wait for the head of the answer."""
        return await self._wait(sending, "first_byte_s", "first_token_s", "total_s")

    async def error(self, reading: Coroutine[Any, Any, bytes]) -> bytes:
        """Wait for the text of an error."""
        return await self._wait(reading, "first_token_s", "total_s")

    async def tokens(
        self, chunks: AsyncGenerator[GenerationChunk, None]
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Hand on what comes, in time."""
        limit = "first_token_s"
        while True:
            chunk = await self._wait(_next_of(chunks), limit, "total_s")
            if chunk is None:
                return
            limit = "between_tokens_s"
            yield chunk

    async def _wait(self, work: Coroutine[Any, Any, _T], *names: str) -> _T:
        """Wait until the first of some deadlines.

        Raises:
            _TooLate: It has passed.
        """
        limits_s = {name: self._limits_s[name] for name in names}
        at_s, name = min(
            (self._from_s(name) + limit_s, name)
            for name, limit_s in limits_s.items()
            if limit_s is not None
        )
        try:
            async with asyncio.timeout_at(at_s) as deadline:
                return await work
        except TimeoutError:
            if not deadline.expired():
                raise
            raise _TooLate(_LATE[name].format(limits_s[name])) from None

    def _from_s(self, name: str) -> float:
        now_s = asyncio.get_running_loop().time()
        return now_s if name == "between_tokens_s" else self._started_s


async def _next_of(chunks: AsyncGenerator[GenerationChunk, None]) -> GenerationChunk | None:
    return await anext(chunks, None)
