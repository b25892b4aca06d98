"""Endpoints that somebody else runs, and that come and go: they speak OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from pydantic import HttpUrl

from serve_app.cluster import ExternalPool
from serve_app.endpoints import Endpoint, Found, is_allowed
from serve_app.engines.base import EngineStatus
from serve_app.engines.waiting import ArrivalKeys, priority_of
from serve_app.gateway.discovery import OBJECTIVES, sources_of
from serve_app.gateway.endpoint_speed import SHARE_EVERY_S, EndpointSpeed
from serve_app.gateway.engine_metrics import StuckMetrics
from serve_app.gateway.exchange import Attempt, Backend, Downstream
from serve_app.gateway.forwarding import EndpointAsRayReplica, Forwarder
from serve_app.gateway.generation import Headers, ReplicaFailed, ReplicaLacks
from serve_app.gateway.json_fields import replace_field, set_field
from serve_app.gateway.kv_events import EventSubscriber
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.replicas import ReplicaState, ReplicaTable, learn_speeds
from serve_app.gateway.scraping import Scraper
from serve_app.gateway.upstream import Origin
from tokenyard.perf.online import PoolEstimator

logger = logging.getLogger(__name__)

Note = Callable[[str, str, str], None]
"""Writes down what has changed, of what, and why."""


class _Endpoint(EndpointAsRayReplica):
    """An endpoint of a pool, and its latest status."""

    def __init__(self, origin: Origin, pool: ExternalBackend) -> None:
        super().__init__(origin.url, origin, pool.settings.max_ongoing)
        self.draining = False
        self.state: ReplicaState | None = None
        self.scraper = Scraper(
            pool.client, origin, pool.key, pool.settings.metrics,
            lambda: pool.hear(self), pool.failures.inc,
        )  # fmt: skip
        self._stuck = StuckMetrics()
        self._num_downs = 0
        self._pool = pool
        self._subscriber: EventSubscriber | None = None

    def start(self) -> None:
        """Begin to ask for its status, and once it has a row, for its block events."""
        self.scraper.start()
        settings = self._pool.kv_events
        if settings is not None and self.state is not None and self._subscriber is None:
            self._subscriber = EventSubscriber(settings, self.origin.host, self.state)

    def stop(self) -> None:
        """Ask for nothing any more."""
        self.scraper.stop()
        if self._subscriber is not None:
            self._subscriber.stop()
            self._subscriber = None

    def tell(self, state: ReplicaState) -> None:
        """Write its status to a row; our requests in flight stand in for what is missing."""
        said, heard_s, info = self.scraper.reading, self.scraper.heard_s, self.scraper.info
        if self.scraper.num_downs != self._num_downs:
            self._num_downs = self.scraper.num_downs
            state.forget_cache()
        capacity = said.kv_capacity_tokens or info.kv_capacity_tokens
        assert state.speed is not None
        state.learn(state.speed.publish(info.max_batch, capacity))
        num, num_uses = state.in_flight.count_at(heard_s), state.in_flight.num_changes
        said = self._stuck.left_out(said, heard_s, num, num_uses)
        engine, missing = said.engine or info.engine, said.missing
        state.info = replace(info, engine=engine, kv_capacity_tokens=capacity, missing=missing)
        waiting, running, kv_used = said.waiting, said.running, said.kv_used_fraction
        if waiting is not None and running is not None:
            state.speed.compare(waiting, running, kv_used, num)
        if waiting is None:
            waiting = 0 if running is None else max(num - running, 0)
        running = max(num - waiting, 0) if running is None else running
        if kv_used is None:
            held_tokens = state.in_flight.held_tokens
            kv_used = min(held_tokens / state.profile.kv_capacity_tokens, 1.0)
        self.status = EngineStatus(waiting, running, kv_used, heard_s)
        state.publish(self.status)


class _Renaming:
    """A caller to whom an endpoint's name for the model is replaced in answers."""

    def __init__(self, downstream: Downstream, rename: Callable[[bytes], bytes]) -> None:
        self._downstream, self._rename = downstream, rename
        self.begun, self.add_headers = downstream.begun, downstream.add_headers

    async def begin(self, status: int, headers: Headers) -> None:
        self.begun = True
        kept = [header for header in headers if header[0] != b"content-length"]
        await self._downstream.begin(status, kept)

    async def write(self, data: bytes) -> None:
        await self._downstream.write(self._rename(data))

    def write_now(self, data: bytes, chunk: bytes | None = None) -> bool:
        return self._downstream.write_now(self._rename(data))


class ExternalBackend(Backend):
    """A pool of endpoints; each has deadlines, and its metrics are scraped."""

    takes_any = True
    max_model_tokens: float = math.inf
    recommended_replicas: int | None = None
    """Where the pool has `autoscaling`: see `serve_app.allocation.recommendation`."""

    def __init__(
        self, pool: ExternalPool, served_model: str, metrics: Metrics,
        owners: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Name the endpoints; nothing is asked before `start`.

        Callers know what the pool calls `model` as `served_model`, unless the pool says. `owners`
        are names of pools by the URLs that they have, shared by all pools.
        """
        self.name, self.settings = pool.name, pool
        self._renames = pool.model != (pool.served_model or served_model)
        self._own_name = None
        if pool.rewrite_model and self._renames:
            pattern = rb'("model"\s*:\s*)%b' % re.escape(json.dumps(pool.model).encode())
            self._own_name = re.compile(pattern)
        self._arrivals, self.key = ArrivalKeys(), _key_line(pool)
        self._forwarder = Forwarder(
            f"an endpoint of pool {self.name!r}", pool.deadlines, pool.prior.prefill_token_s,
            at_once=pool.commit == "first_byte",
        )  # fmt: skip
        self.client = self._forwarder.client
        self.failures = metrics.scrape_failures.labels(pool.name)
        self.kv_events = pool.kv_events
        """Where endpoints publish what they have cached; None: nobody asks."""
        is_known = pool.profile is not None or pool.hardware is not None
        self.estimator = PoolEstimator(pool.prior.iteration if is_known else None)
        self._share_at_s = 0.0
        self._owners = {} if owners is None else owners
        self._in_file: Found = dict.fromkeys(endpoint.address for endpoint in pool.endpoints)
        self._discovered: dict[str, Found] = {}
        """Endpoints that service discovery has found, by source."""
        self._added: dict[str, None] = {}
        self._removed: set[str] = set()
        """Endpoints that were removed by hand."""
        self._problems: dict[str, str] = {}
        """Errors of sources."""
        self._taken: dict[str, str] = {}
        """Endpoints that are wanted and another pool has."""
        self._endpoints: dict[str, _Endpoint] = {}
        self._news: dict[str, _Endpoint] = {}
        """Endpoints of which the table has not been told what they said last, in order."""
        self.max_model_tokens = pool.max_model_tokens or math.inf
        self._lengths: dict[str, int] = {}
        """Longest prompt plus output that each says it takes; 0: it does not say."""
        self._tasks: list[asyncio.Task[None]] | None = None
        self._note: Note = lambda *_: None
        self._settle()

    def start(self, note: Note | None = None) -> None:
        """Begin to scrape and to look for endpoints, on the event loop; `note` hears of changes."""
        self._note, self._tasks = note or self._note, []
        for endpoint in self._endpoints.values():
            endpoint.start()
        if self.settings.service_discovery is not None:
            discovery = self.settings.service_discovery
            sources = sources_of(discovery, self._use, self._prioritise, self._fail)
            self._tasks += map(asyncio.create_task, sources)

    async def stop(self) -> None:
        """End scraping and close the connections."""
        for task in self._tasks or ():
            task.cancel()
        for endpoint in self._endpoints.values():
            endpoint.stop()
        await self.client.close()

    def change(self, urls: Collection[str], adds: bool) -> None:
        """Add endpoints by hand, or remove some for good, even if they are named elsewhere.

        Raises:
            ValueError: The cluster file does not allow one, or it is another pool's.
            LookupError: There is no such endpoint to let go.
        """
        named, allowed = self._named(), self.settings.allowed
        for url in urls:
            is_known = url in named or url in self._added
            if (owner := self._owners.get(url, self.name)) != self.name:
                raise ValueError(f"endpoint {url} is in pool {owner!r}")
            if adds and not is_known and not (allowed and self._allows(url)):
                which = url if allowed else "any"
                raise ValueError(
                    f"pool {self.name!r} does not allow {which}: see its key `allowed`"
                )
            if not adds and not is_known:
                raise LookupError(f"pool {self.name!r} has no endpoint {url}")
        others = {url: None for url in self._added if url not in urls}
        self._added = others | {url: None for url in urls if adds and url not in named}
        self._removed.difference_update(urls)
        self._removed.update(() if adds else named.keys() & set(urls))
        self._settle()

    def hear(self, endpoint: _Endpoint) -> None:
        """Note that an endpoint has published something."""
        self._news[endpoint.origin.url] = endpoint
        if (now_s := time.monotonic()) >= self._share_at_s:
            # Here, and not while a request waits.
            self._share_at_s = now_s + SHARE_EVERY_S
            self.learn()

    def refresh(self, table: ReplicaTable, now_s: float) -> None:
        """Pass on what endpoints published since the last time, and forget drained ones."""
        if not self._news:
            return
        news, self._news = self._news, {}
        for url, endpoint in news.items():
            if endpoint.state is None:
                speed = EndpointSpeed.of_endpoint(url, self.settings, self.estimator)
                size = self.settings.prefix_block_tokens
                endpoint.state = table.add(url, self.name, speed.profile, size, now_s)
                endpoint.state.estimate_with(speed)
                if self.kv_events is not None and not endpoint.draining:
                    endpoint.start()
            endpoint.tell(endpoint.state)
            table.drain(endpoint.state, endpoint.draining)
            self._lengths[url] = endpoint.scraper.info.max_model_len or 0
            if endpoint.draining and endpoint.state.in_flight.count:
                self._news[url] = endpoint  # Until it has none.
            elif endpoint.draining:
                del self._endpoints[url], self._owners[url], self._lengths[url]
                table.keep(self.name, self._endpoints)
                self.estimator.drop(url)
                for connection in [*endpoint.origin.idle]:
                    connection.close()
        # Here, and not where it is read: every request reads it several times.
        longest = max(self._lengths.values(), default=0)
        self.max_model_tokens = self.settings.max_model_tokens or longest or math.inf

    def learn(self) -> None:
        """Let endpoints learn from each other, and policies from them."""
        states = [endpoint.state for endpoint in self._endpoints.values()]
        learn_speeds(filter(None, states), self.estimator)

    def describe(self) -> dict[str, Any]:
        """Return the sources of endpoints, and their errors."""
        return {
            "name": self.name, "cluster_file": [*self._in_file],
            "service_discovery": {name: sorted(urls) for name, urls in self._discovered.items()},
            "added": [*self._added], "removed": sorted(self._removed),
            "problems": self._problems | self._taken,
            "recommended_replicas": self.recommended_replicas,
        }  # fmt: skip

    def ray_replicas(self) -> tuple[Any, ...]:
        """The endpoints, wrapped for Ray's router."""
        return tuple(endpoint for endpoint in self._endpoints.values() if not endpoint.draining)

    def _allows(self, url: str) -> bool:
        return is_allowed(urlsplit(url).hostname or "", self.settings.allowed)

    def _named(self) -> dict[str, str | None]:
        """Endpoints that the cluster file or service discovery names."""
        named: dict[str, str | None] = {}
        for urls in (*self._discovered.values(), self._in_file):
            named |= urls
        return named

    def _settle(self) -> None:
        """Add the endpoints that are wanted, and remove all others."""
        wanted = {**self._added, **self._named()}
        for url in self._removed:
            wanted.pop(url, None)
        owners = {url: self._owners.setdefault(url, self.name) for url in wanted}
        taken = {url: f"is in pool {pool!r}" for url, pool in owners.items() if pool != self.name}
        for url in taken.keys() - self._taken.keys():
            logger.error("pool %s: endpoint %s %s", self.name, url, taken[url])
        self._taken = taken
        for url, named in wanted.items():
            endpoint = self._endpoints.get(url) or _Endpoint(Origin.of(url, named), self)
            if url not in taken and (endpoint.draining or url not in self._endpoints):
                self._go(endpoint, draining=False)
        for url, endpoint in self._endpoints.items():
            if url not in wanted and not endpoint.draining:
                self._go(endpoint, draining=True)

    def _go(self, endpoint: _Endpoint, draining: bool) -> None:
        """Add or remove an endpoint."""
        url = endpoint.origin.url
        endpoint.draining = draining
        self._endpoints[url] = self._news[url] = endpoint
        if self._tasks is None:
            return
        logger.info("pool %s: endpoint %s %s", self.name, url, "drains" if draining else "comes")
        (endpoint.stop if draining else endpoint.start)()

    def _use(self, source: str, urls: Found) -> None:
        """Take the endpoints that a source names."""
        urls = {Endpoint(url=HttpUrl(url)).address: named for url, named in urls.items()}
        kept = {url: named for url, named in urls.items() if self._allows(url)}
        if denied := urls.keys() - kept:
            self._fail(source, f"pool {self.name!r} does not allow {min(denied)}")
        else:
            self._problems.pop(source, None)
        if source == "file" and kept != self._discovered.get(source):
            self._note("endpoints read", self.name, f"{len(kept)} are in its file")
        self._discovered[source] = kept
        self._settle()

    def _prioritise(self, objectives: dict[str, int]) -> None:
        self.objectives = objectives
        self._problems.pop(OBJECTIVES, None)

    def _fail(self, source: str, why: str) -> None:
        """Note that a source cannot be used; its last endpoints stay."""
        if self._problems.get(source) != why:
            self._problems[source] = why
            if source == "file":
                self._note("endpoints not read", self.name, why)
            logger.error("pool %s: %s", self.name, why)

    async def answer(self, replica_id: str, attempt: Attempt) -> None:
        """Have one endpoint answer: see `Backend.answer`."""
        endpoint = self._endpoints.get(replica_id)
        if endpoint is None:
            raise ReplicaFailed(f"{self._forwarder.which} is gone")
        headers, body = self.prepare(attempt)
        model = attempt.request.model
        if self._own_name is not None and model not in self.settings.loras:
            # Whole lines come here, and in texts quotation marks are escaped.
            public = json.dumps(model).encode()
            rename = partial(self._own_name.sub, lambda match: match[1] + public)
            attempt.downstream = _Renaming(attempt.downstream, rename)
        try:
            await self._forwarder.forward(endpoint.origin, headers, body, attempt)
        except ReplicaLacks as error:
            if error.model is not None:
                error.model = model if model in self.settings.loras else self.settings.model
            raise

    def prepare(self, attempt: Attempt) -> tuple[bytes, bytes]:
        """Return what an endpoint is sent: header lines, each with its end, and the body."""
        call = attempt.request.call
        headers = self.key + call.headers
        for name, value in call.others:
            if name.decode() in self.settings.pass_headers:
                headers += b"%b: %b\r\n" % (name, value)
        body = call.body
        if body and self._renames and attempt.request.model not in self.settings.loras:
            own_name = self.settings.model
            if call.model_at is None:
                body = replace_field(body, "model", own_name)
            else:
                body = own_name.encode().join((body[: call.model_at[0]], body[call.model_at[1] :]))
        # A form holds no fields of JSON.
        if body and call.model_at is None and call.generates and self.settings.order == "priority":
            # One without a key would have priority 0, before all others. An endpoint is told once,
            # so who is late stays where it is.
            priority = priority_of(self._arrivals.key(attempt.order_key).key_s)
            body = set_field(body, "priority", priority)
        return headers, body


def _key_line(pool: ExternalPool) -> bytes:
    """The header's line with the token of a pool's endpoints; nothing where it has none."""
    key = os.environ.get(pool.api_key_env) if pool.api_key_env else None
    key = (key or "").strip()  # Files of secrets end with an end of line.
    if not key:
        return b""
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"pool {pool.name!r}: {pool.api_key_env} holds no token")
    return f"authorization: Bearer {key}\r\n".encode()
