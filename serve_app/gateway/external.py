"""Endpoints that run already: they speak OpenAI's API and publish vLLM's metrics."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from serve_app.cluster import EngineProfile, ExternalPool, max_model_tokens
from serve_app.engines.waiting import Arrivals, priority_of
from serve_app.gateway.exchange import Attempt, Call
from serve_app.gateway.forwarding import EndpointAsRayReplica, Forwarder
from serve_app.gateway.json_fields import replace_field, set_field
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.replicas import EngineStatus, ReplicaTable
from serve_app.gateway.scraping import Scraper
from serve_app.gateway.upstream import Origin
from tokenyard.routing.types import OrderKey


class ExternalBackend:
    """A pool of endpoints; each has its deadlines, and a scraper of its metrics."""

    takes_any = True

    def __init__(self, pool: ExternalPool, served_model: str, metrics: Metrics) -> None:
        """Name the endpoints; nothing is asked before `start`.

        Args:
            pool: Of them.
            served_model: Name by which callers know what the pool calls `model`, unless it says.
            metrics: Counts scrapes that fail.
        """
        self.name = pool.name
        self.max_model_tokens = max_model_tokens(pool)
        self._pool, self._renames = pool, pool.model != (pool.served_model or served_model)
        self._arrivals = Arrivals()
        self._endpoints = {
            url: EndpointAsRayReplica(url, Origin.of(url), pool.max_ongoing)
            for url in (str(one.url).rstrip("/") for one in pool.endpoints)
        }
        self._key = _key_line(pool)
        self._forwarder = Forwarder(
            f"an endpoint of pool {self.name!r}", pool.deadlines, pool.profile.prefill_token_s,
            at_once=pool.commit == "first_byte",
        )  # fmt: skip
        failures = metrics.scrape_failures.labels(pool.name)
        client = self._forwarder.client
        self._scrapers = [
            Scraper(client, one.origin, self._key, partial(self._hear, one), failures.inc)
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
        await self._forwarder.client.close()

    def refresh(self, table: ReplicaTable, now_s: float) -> None:
        """Pass on what was scraped since the last time."""
        profile: EngineProfile = self._pool.profile
        for url in self._news:
            state = table.add(url, self.name, profile, self._pool.prefix_block_tokens, now_s)
            state.publish(self._endpoints[url].status)
        self._news.clear()

    def _hear(self, endpoint: EndpointAsRayReplica, status: EngineStatus) -> None:
        endpoint.status = status
        self._news[endpoint.replica_id.unique_id] = None

    def ray_replicas(self) -> tuple[Any, ...]:
        """The endpoints, dressed up."""
        return tuple(self._endpoints.values())

    def host_loads(self) -> dict[str, dict[str, float]]:
        """Nothing is known of them."""
        return {}

    def by_our_clock(self, replica_id: str, status: EngineStatus, now_s: float) -> EngineStatus:
        """As it is: nothing is told with answers."""
        return status

    async def answer(self, replica_id: str, attempt: Attempt) -> None:
        """Have one endpoint answer; being cancelled closes its connection.

        Raises:
            ReplicaFailed: It does not answer, not in time, or not as it should.
            RequestRejected: It has something against the request.
        """
        call, origin = attempt.request.call, self._endpoints[replica_id].origin
        headers = self._key + call.headers
        body = self._body(call, attempt.request.model, attempt.order_key)
        await self._forwarder.forward(origin, headers, body, attempt)

    def _body(self, call: Call, model: str | None, order_key: OrderKey | None) -> bytes:
        body = call.body
        if self._renames and model not in self._pool.loras:
            body = replace_field(body, "model", self._pool.model)
        if self._pool.order == "priority" and call.generates:
            # One without a key would have priority 0, before all others. An endpoint is told once,
            # so who is late stays where it is.
            priority = priority_of(self._arrivals.key(order_key).key_s)
            body = set_field(body, "priority", priority)
        return body


def _key_line(pool: ExternalPool) -> bytes:
    """The header's line with the token of a pool's endpoints; nothing where it has none.

    Raises:
        ValueError: It is no token. The text does not show it.
    """
    key = os.environ.get(pool.api_key_env) if pool.api_key_env else None
    key = (key or "").strip()  # Files of secrets end with an end of line.
    if not key:
        return b""
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"pool {pool.name!r}: {pool.api_key_env} holds no token")
    return f"authorization: Bearer {key}\r\n".encode()
