"""A gateway with HTTP on a port of this machine, under load, for browsers and for Prometheus."""

import asyncio
import threading
import time
from functools import partial

import httpx
import numpy as np
import uvicorn
from unit.engine_answers import relay
from unit.serve.test_serve_gateway import PROFILE, FakePool, Letters, a_body, a_cluster

from serve_app.engines.base import EngineStatus
from serve_app.gateway.gateway import Gateway
from serve_app.http import allocation as allocation_api
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.policy.manager import PolicyManager


class ManyReplicas(FakePool):
    """A pool with equal replicas, of which every tenth is idle and some have a queue."""

    def __init__(self, name, num):
        super().__init__(name)
        self.ids = [f"http://{name}-{i}.gpus:8000" for i in range(num)]
        self.replica_id = self.ids[0]

    def refresh(self, table, now_s):
        for i, name in enumerate(self.ids):
            running = 0 if i % 10 == 0 else 1 + i % 4
            status = EngineStatus(i % 3 if running == 4 else 0, running, running / 4.5, now_s)
            table.add(name, self.name, PROFILE, 0, now_s).publish(status)
        table.keep(self.name, self.ids)

    async def answer(self, replica_id, attempt):
        await relay(self.stream, attempt)


class Site:
    """A gateway behind uvicorn in a thread, with a client that asks without a pause."""

    def __init__(self, token=None, allocator=None, num_replicas=1):
        cluster = a_cluster(pools=("large", "small", "spare"))
        manager = PolicyManager(
            cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
        )
        manager.switch("champion")
        make = FakePool if num_replicas == 1 else partial(ManyReplicas, num=num_replicas)
        self.gateway = Gateway(cluster, manager, {p.name: make(p.name) for p in cluster.pools})
        api = create_gateway_api(self.gateway, Letters(), Access(token, local_admin=True))
        if allocator is not None:
            api.include_router(
                allocation_api.make_router(
                    allocator, Access(token, local_admin=True), lambda _: None
                )
            )
        config = uvicorn.Config(api, host="127.0.0.1", port=0, log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.02)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._going = True
        self._load = threading.Thread(target=lambda: asyncio.run(self._ask()), daemon=True)
        self._load.start()

    def post(self, path, body):
        return httpx.post(self.url + path, json=body, headers=self._headers, timeout=60)

    def stop_asking(self):
        self._going = False
        self._load.join()

    def stop(self):
        self.stop_asking()
        self._server.should_exit = True
        self._thread.join()
        self.gateway.manager.stop()

    async def _ask(self):
        async with httpx.AsyncClient(base_url=self.url, headers=self._headers) as http:
            while self._going:
                await http.post("/v1/completions", json=a_body())
                await asyncio.sleep(0.05)
