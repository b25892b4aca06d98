"""Endpoints that run already: they speak OpenAI's API and publish vLLM's metrics.

What a caller wrote goes to an endpoint as it is, and so does the answer come back. The gateway
knows no more of either than it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from serve_app.cluster import Deadlines, EngineProfile, ExternalPool, max_model_tokens
from serve_app.gateway.exchange import Attempt, Call, Headers, InferenceRequest
from serve_app.gateway.generation import (
    ReplicaFailed,
    ReplicaFull,
    ReplicaTimeout,
    RequestRejected,
)
from serve_app.gateway.json_fields import replace_field
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.replicas import EngineStatus, ReplicaTable
from serve_app.gateway.scraping import Scraper
from serve_app.gateway.sse import BadEvent, EventPeek, last_part, peek_whole
from serve_app.gateway.upstream import (
    Connection,
    ConnectTimeout,
    Origin,
    UpstreamClient,
    UpstreamError,
)

_MAX_HELD_BYTES = 1 << 20
"""Of an answer that has not begun: from then on another endpoint cannot give it."""
_OURS = (401, 403, 407, 408, 409, 425)
"""Client errors that are not the caller's: the key is the pool's, or another endpoint may do."""
_EVENTS = b"text/event-stream"
_HANDED_BACK = frozenset(
    (
        b"cache-control", b"content-encoding", b"content-length", b"content-type", b"retry-after",
        b"traceparent", b"x-accel-buffering", b"x-request-id",
    )
)  # fmt: skip
_HANDED_BACK_PREFIXES = (b"openai-", b"x-ratelimit-")


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
        self.origin = Origin.of(url)
        self.max_ongoing_requests = pool.max_ongoing
        self.url = url
        self.status = EngineStatus(0, 0, 0.0, 0.0)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.status.num_waiting + self.status.num_running


class ExternalBackend:
    """A pool of endpoints; each has its deadlines, and a scraper of its metrics."""

    takes_calls = True

    def __init__(self, pool: ExternalPool, served_model: str, metrics: Metrics) -> None:
        """Name the endpoints; nothing is asked before `start`.

        Args:
            pool: Of them.
            served_model: Name by which callers know what the pool calls `model`.
            metrics: Counts scrapes that fail.
        """
        self.name = pool.name
        self.max_model_tokens = max_model_tokens(pool)
        self._pool, self._renames = pool, pool.model != served_model
        self._endpoints = {
            url: _EndpointAsRayReplica(url, pool)
            for url in (str(one.url).rstrip("/") for one in pool.endpoints)
        }
        key = os.environ.get(pool.api_key_env) if pool.api_key_env else None
        self._key = b"" if key is None else f"authorization: Bearer {key}\r\n".encode()
        self._client = UpstreamClient(pool.deadlines.connect_s)
        failures = metrics.scrape_failures.labels(pool.name)
        self._scrapers = [
            Scraper(self._client, one.origin, self._key, partial(self._hear, one), failures.inc)
            for one in self._endpoints.values()
        ]
        self._news = dict.fromkeys(self._endpoints)
        """Endpoints of which the table has not been told what was heard last, in order."""

    def start(self) -> None:
        """Begin to scrape; must be called on the event loop."""
        for one in self._scrapers:
            one.start()

    async def stop(self) -> None:
        """End scraping and close the connections."""
        for one in self._scrapers:
            one.stop()
        await self._client.close()

    def refresh(self, table: ReplicaTable, now_s: float) -> None:
        """Pass on what was scraped since the last time."""
        profile: EngineProfile = self._pool.profile
        for url in self._news:
            state = table.add(url, self.name, profile, self._pool.prefix_block_tokens, now_s)
            state.publish(self._endpoints[url].status)
        self._news.clear()

    def _hear(self, endpoint: _EndpointAsRayReplica, status: EngineStatus) -> None:
        endpoint.status = status
        self._news[endpoint.url] = None

    def ray_replicas(self) -> tuple[Any, ...]:
        """The endpoints, dressed up."""
        return tuple(self._endpoints.values())

    def host_loads(self) -> dict[str, dict[str, float]]:
        """Nothing is known of them."""
        return {}

    async def answer(self, replica_id: str, attempt: Attempt) -> None:
        """Have one endpoint answer; being cancelled closes its connection.

        Raises:
            ReplicaFailed: It does not answer, not in time, or not as it should. The text does not
                say where it is, since callers read it.
            RequestRejected: It has something against the request.
        """
        call = attempt.request.call
        assert call is not None
        origin, body = self._endpoints[replica_id].origin, self._body(call)
        head = origin.head(b"POST", call.path, self._key + call.headers, len(body))
        patience = _Patience(self._pool.deadlines, attempt.request)
        connection = None
        with self._as_failures():
            try:
                connection = await self._client.send(origin, head, body, patience.watch)
                patience.has_head = True
                await self._check_status(connection)
                if _sends_events(connection, call):
                    await _hand_on_events(connection, attempt, patience)
                else:
                    await _hand_on_whole(connection, attempt, patience)
            finally:
                patience.stop()
                if connection is not None:
                    self._client.release(connection)

    def _body(self, call: Call) -> bytes:
        return replace_field(call.body, "model", self._pool.model) if self._renames else call.body

    @property
    def _which(self) -> str:
        """An endpoint, as callers may know it."""
        return f"an endpoint of pool {self.name!r}"

    @contextlib.contextmanager
    def _as_failures(self) -> Iterator[None]:
        """Turn what goes wrong with an endpoint into ReplicaFailed."""
        try:
            yield
        except (_TooLate, ConnectTimeout) as error:
            raise ReplicaTimeout(f"{self._which} {error}") from None
        except UpstreamError as error:
            raise ReplicaFailed(f"{self._which} {error}") from None
        except BadEvent as error:
            raise ReplicaFailed(f"{self._which} failed: {error}") from None

    async def _check_status(self, connection: Connection) -> None:
        status = connection.status
        if 200 <= status < 300:
            return
        if status in (429, 503):
            raise ReplicaFull(f"{self._which} answered {status}")
        if not 400 <= status < 500 or status in _OURS:
            raise ReplicaFailed(f"{self._which} answered {status}")
        text = bytearray()
        while len(text) <= _MAX_HELD_BYTES and (piece := await connection.read()):
            text += piece
        raise RequestRejected(status, _handed_back(connection), bytes(text))


def _sends_events(connection: Connection, call: Call) -> bool:
    """Whether an answer comes as events; where it does not say, whether they were asked for."""
    kind = next((value for name, value in connection.headers if name == b"content-type"), None)
    return call.stream if kind is None else kind.lower().startswith(_EVENTS)


def _handed_back(connection: Connection) -> Headers:
    return [
        (name, value)
        for name, value in connection.headers
        if name in _HANDED_BACK or name.startswith(_HANDED_BACK_PREFIXES)
    ]


async def _hand_on_events(connection: Connection, attempt: Attempt, patience: _Patience) -> None:
    """Hand on a stream, from its first token on: until then another endpoint can still answer."""
    peek, downstream, held = EventPeek(), attempt.downstream, bytearray()
    while piece := await connection.read():
        lines = peek.feed(piece)
        if not downstream.begun:
            held += lines
            if not (peek.num_tokens or len(held) > _MAX_HELD_BYTES):
                continue
            lines = bytes(held)
            patience.begin()
            attempt.take(peek.num_tokens)
            await downstream.begin(connection.status, _handed_back(connection))
        else:
            attempt.take(peek.num_tokens)
        if lines:
            await downstream.write(lines)
        patience.wait_again()
    rest = peek.rest()
    if not peek.has_ended:
        raise UpstreamError("ended its answer without a reason")
    attempt.take(peek.num_tokens, peek.finish_reason or "stop")
    if not downstream.begun:
        await downstream.begin(connection.status, _handed_back(connection))
        rest = bytes(held) + rest
    if rest:
        await downstream.write(rest)


async def _hand_on_whole(connection: Connection, attempt: Attempt, patience: _Patience) -> None:
    """Hand on an answer that comes at once, when it is there, or is too long to be kept."""
    downstream, held, tail = attempt.downstream, bytearray(), b""
    while piece := await connection.read():
        tail = last_part(tail, piece)
        if downstream.begun:
            await downstream.write(piece)
        else:
            held += piece
            if len(held) > _MAX_HELD_BYTES:
                patience.begin()
                await downstream.begin(connection.status, _handed_back(connection))
                await downstream.write(bytes(held))
        patience.wait_again()
    num_tokens, reason = peek_whole(tail)
    attempt.take(num_tokens, reason, is_whole=True)
    if not downstream.begun:
        await downstream.begin(connection.status, _handed_back(connection))
        await downstream.write(bytes(held))


class _TooLate(Exception):
    """A deadline that has passed; the text says which."""


_LATE = {
    "first_byte_s": "did not begin to answer in {:g} s",
    "first_token_s": "sent no token in {:g} s",
    "whole_s": "sent no answer in {:g} s",
    "between_tokens_s": "sent no other token in {:g} s",
    "total_s": "was not done in {:g} s",
}


def _whole_s(deadlines: Deadlines, request: InferenceRequest) -> float | None:
    """Time for an answer that comes at once; None: it is a stream."""
    call = request.call
    if call is None or call.stream:
        return None
    if call.generates and not request.max_tokens:
        # It may be as long as the model goes on.
        return deadlines.total_s
    return deadlines.first_token_s + deadlines.whole_per_token_s * request.max_tokens


class _Patience:
    """The deadlines of one request. A timer looks now and then what is due: a token costs nothing.

    Time that the caller takes is not the endpoint's.
    """

    def __init__(self, deadlines: Deadlines, request: InferenceRequest) -> None:
        self._loop = asyncio.get_running_loop()
        self._started_s = self._since_s = self._loop.time()
        self._limits_s = deadlines
        self._whole_s = _whole_s(deadlines, request)
        self.has_head = self._has_begun = False
        self._connection: Connection | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, connection: Connection) -> None:
        """Time what comes over a connection."""
        self._connection = connection
        if self._timer is None:
            self._timer = self._loop.call_at(self._due()[0], self._look)

    def begin(self) -> None:
        """Note that there is a first token."""
        self._has_begun = True
        self.wait_again()
        self.stop()
        self._timer = self._loop.call_at(self._due()[0], self._look)

    def wait_again(self) -> None:
        """Note that the endpoint is waited for from now on."""
        self._since_s = self._loop.time()

    def stop(self) -> None:
        """Time nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> tuple[float, str, float]:
        """Return the next deadline by the loop's clock, its name and its length, seconds."""
        limits, started_s = self._limits_s, self._started_s
        due = [(started_s + limits.total_s, "total_s", limits.total_s)]
        if self._has_begun:
            between_s = limits.between_tokens_s
            return min(*due, (self._since_s + between_s, "between_tokens_s", between_s))
        if limits.first_byte_s is not None and not self.has_head:
            due.append((started_s + limits.first_byte_s, "first_byte_s", limits.first_byte_s))
        if self._whole_s is None:
            due.append((started_s + limits.first_token_s, "first_token_s", limits.first_token_s))
        else:
            due.append((started_s + self._whole_s, "whole_s", self._whole_s))
        return min(due)

    def _look(self) -> None:
        at_s, name, limit_s = self._due()
        now_s, connection = self._loop.time(), self._connection
        assert connection is not None
        if now_s < at_s:
            self._timer = self._loop.call_at(at_s, self._look)
        elif not connection.is_waiting:
            self._timer = self._loop.call_later(min(limit_s, 1.0), self._look)
        else:
            connection.fail(_TooLate(_LATE[name].format(limit_s)))
