"""Engines of ours on real sockets, and a gateway before them; only Ray is left out."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import numpy as np
from unit.serve.test_serve_gateway import OWN, PROFILE, Letters, cluster_of

from serve_app.engines.admission import check_request
from serve_app.engines.base import Chunk, EngineError, EngineStats, longest_tokens
from serve_app.engines.texts import TextEngine
from serve_app.gateway.backends import ServeBackend
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.router_registry import ROUTERS
from serve_app.gateway.upstream import url_of
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.http.engine_api import create_engine_api
from serve_app.http.listener import Listener
from serve_app.policy.manager import PolicyManager

SECRET = "the secret of the replica"


class Repeater:
    """An engine that repeats its prompt, token by token, as long as it may go on."""

    longest = 1000
    """Prompt and output that its memory holds, tokens."""

    def __init__(self):
        self.running = {}
        """Tokens that were generated, by request."""
        self.asked = []
        self.order_keys = []
        self.fails_at = None
        """How many tokens come before it fails."""
        self.stops_at = None
        """How many come before it waits for `may_go_on`."""
        self.may_go_on = asyncio.Event()
        self.every_s = 0.0

    async def generate(self, request_id, token_ids, sampling, order_key=None):
        self.asked.append((request_id, tuple(token_ids), sampling))
        self.order_keys.append(order_key)
        check_request(token_ids, sampling, self.longest, Letters.vocab_size)
        self.running[request_id] = 0
        try:
            for number in range(sampling.max_tokens):
                if number == self.fails_at:
                    raise EngineError("rank 1 of 2: its process has died")
                if number == self.stops_at:
                    await self.may_go_on.wait()
                await asyncio.sleep(self.every_s)
                self.running[request_id] = number + 1
                is_last = number + 1 == sampling.max_tokens
                yield Chunk((token_ids[number % len(token_ids)],), "length" if is_last else None)
        finally:
            self.running.pop(request_id, None)

    async def abort(self, request_id):
        self.running.pop(request_id, None)

    def stats(self):
        return EngineStats(0, len(self.running), 0.25, self.longest, 0)

    async def drain(self):
        while self.running:
            await asyncio.sleep(0.001)


class Site:
    """One engine that listens."""

    def __init__(self, number, cluster, pool):
        self.replica_id = f"replica-{number}"
        self.engine = Repeater()
        config = pool.config
        self.texts = TextEngine(
            self.engine, Letters(), config.max_batch, config.max_waiting, pool.max_ongoing_requests
        )
        limits = cluster.limits.model_copy(update={"max_body_bytes": 1 << 20})
        longest = longest_tokens(config, self.engine.stats())
        self.listener = Listener(
            create_engine_api(self.texts, longest, limits, SECRET), cluster.limits
        )

    async def start(self):
        self.port = await self.listener.start("127.0.0.1", 0)
        self.url = url_of("127.0.0.1", self.port)

    @property
    def as_ray_tells(self):
        told = {"profile": PROFILE.model_dump(), "url": self.url, "secret": SECRET}
        name = SimpleNamespace(unique_id=self.replica_id)
        return SimpleNamespace(replica_id=name, replica_metadata=told, routing_stats={})


@asynccontextmanager
async def a_fleet(number=1, log=None, pools_config=None, **fields):
    """Yield a gateway's port, the gateway and its engines, all on real sockets."""
    config = OWN | {"max_model_tokens": 500} | (pools_config or {})
    pool = {"name": "ours", "kind": "own", "config": config}
    cluster = cluster_of(pools=[pool], **fields)
    (pool,) = cluster.own_pools
    manager = PolicyManager(
        cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
    )
    manager.switch("round_robin")
    async with AsyncExitStack() as stack:
        sites = [Site(one, cluster, pool) for one in range(number)]
        for site in sites:
            await site.start()
            stack.push_async_callback(site.listener.stop)
        live = tuple(one.as_ray_tells for one in sites)
        ROUTERS["app", pool.name] = SimpleNamespace(live=live, version=1)
        stack.callback(ROUTERS.pop, ("app", pool.name))
        handle = SimpleNamespace(app_name="app", options=lambda **_: None)
        backend = ServeBackend(pool, handle)
        stack.push_async_callback(backend.stop)
        gateway = Gateway(cluster, manager, {pool.name: backend}, log=log)
        stack.callback(manager.stop)
        api = create_gateway_api(gateway, Letters(), Access(None, local_admin=True))
        listener = Listener(api, cluster.limits)
        port = await listener.start("127.0.0.1", 0)
        stack.push_async_callback(listener.stop)
        yield port, gateway, sites


def run(test, *args, **options):
    async def inside():
        async with asyncio.timeout(60), a_fleet(*args, **options) as fleet:
            await test(*fleet)

    asyncio.run(inside())
