"""Twelve ways in which a policy, or what it is told, may be broken: no request may notice.

Eight clients ask without a pause while the fault happens; every request must be answered.
"""

import asyncio
import math
import time
from dataclasses import replace

import httpx
import numpy as np
import pytest
from unit.serve.test_serve_gateway import PROFILE, FakePool, Letters, a_body, a_cluster
from unit.serve_builders import a_faulty_policy, marginal_artifact, network_artifact

from serve_app.engines.base import EngineStatus
from serve_app.engines.texts import TextChunk
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.generation import ReplicaFull
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.policy import manager as manager_module
from serve_app.policy.manager import PolicyManager
from tokenyard.routing.observation import NUM_MARGINAL_FEATURES, NUM_MARGINAL_WEIGHTS
from tokenyard.routing.types import Decision

pytestmark = pytest.mark.drills

NUM_CLIENTS = 8
NUM_REQUESTS = 120
SETTINGS = {"budget_s": 0.05, "cool_down_s": 0.3, "stale_after_s": 0.5}


class BusyPool(FakePool):
    """Answers after a moment, and takes no more than four requests at once."""

    def __init__(self, name):
        super().__init__(name)
        self.num_held = 0
        self.tells = True

    def refresh(self, table, now_s):
        if self.there:
            replica = table.add(self.replica_id, self.name, PROFILE, 0, now_s)
            if self.tells:
                replica.publish(EngineStatus(0, self.num_held, 0.1, now_s))
        table.keep(self.name, [self.replica_id] if self.there else [])

    async def stream(self, generation):
        if self.num_held >= 4:
            raise ReplicaFull("its four places are taken")
        self.requests.append(generation)
        self.num_held += 1
        try:
            await asyncio.sleep(0.005)
            yield TextChunk("ok", 2, "stop")
        finally:
            self.num_held -= 1


class Drill:
    """A gateway under load."""

    def __init__(self, client, gateway, pools):
        self.client, self.gateway, self.pools = client, gateway, pools
        self.statuses = []

    async def switch(self, policy):
        return await self.client.post("/v1/policy", json={"policy": policy})

    async def load(self, num_requests=NUM_REQUESTS):
        """Ask, and return the statuses of answers."""
        before = len(self.statuses)

        async def ask():
            while len(self.statuses) < before + num_requests:
                answer = await self.client.post("/v1/completions", json=a_body())
                self.statuses.append(answer.status_code)

        await asyncio.gather(*(ask() for _ in range(NUM_CLIENTS)))

    async def reasons(self):
        answer = await self.client.get("/v1/policy")
        return answer.json()["fallbacks_by_reason"]


def drill(test, clock_s=time.time):
    """Run a drill; whatever it does, every request must have been answered."""

    async def run():
        cluster = a_cluster(
            pools=("a", "b", "c"),
            circuit_breaker=SETTINGS,
            limits={"max_in_flight": 64},
            policy="champion",
        )
        manager = PolicyManager(
            cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
        )
        manager.switch(cluster.policy)
        pools = {pool.name: BusyPool(pool.name) for pool in cluster.pools}
        gateway = Gateway(cluster, manager, pools, clock_s=clock_s)
        api = create_gateway_api(gateway, Letters(), Access(None, local_admin=True))
        transport = httpx.ASGITransport(api, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            made = Drill(client, gateway, pools)
            try:
                await made.load(20)
                await test(made)
                await made.load(20)
            finally:
                manager.stop()
        assert set(made.statuses) == {200}
        assert len(made.statuses) >= 40 + NUM_REQUESTS
        assert gateway.in_flight == 0

    asyncio.run(run())


@pytest.fixture
def install(monkeypatch):
    """Let the name `broken` stand for a policy that got through its warm-up."""

    def put(loaded):
        known = manager_module.resolve_policy
        monkeypatch.setattr(
            manager_module,
            "resolve_policy",
            lambda name, *rest: loaded if name == "broken" else known(name, *rest),
        )
        warm_up = manager_module.warm_up
        monkeypatch.setattr(
            manager_module, "warm_up", lambda one: None if one is loaded else warm_up(one)
        )

    return put


def raising():
    raise RuntimeError("broken")


class Scores:
    """A policy whose costs are whatever it is told."""

    def __init__(self, scores):
        self._scores = scores

    def route(self, request, snapshots):
        return 0

    def decide(self, request, snapshots):
        return Decision(0, self._scores)


def hang():
    until_s = time.monotonic() + 30.0
    while time.monotonic() < until_s:
        pass
    return 0


RUNTIME_FAULTS = {
    "nan": (lambda: replace(a_faulty_policy(raising), make=lambda _: Scores((math.nan,))), "error"),
    "wrong_shape": (lambda: a_faulty_policy(lambda: np.zeros((2, 2))), "error"),
    "hang": (lambda: a_faulty_policy(hang), "too_slow"),
    "exception": (lambda: a_faulty_policy(raising), "error"),
    "slow": (lambda: a_faulty_policy(lambda: time.sleep(0.3) or 0), "too_slow"),
    "unknown_replicas": (lambda: a_faulty_policy(lambda: 17), "error"),
}


@pytest.mark.parametrize("fault", RUNTIME_FAULTS)
def test_the_baseline_decides_where_the_policy_is_broken(fault, install):
    make, reason = RUNTIME_FAULTS[fault]

    async def test(drill):
        assert (await drill.switch("broken")).status_code == 200
        await drill.load()
        reasons = await drill.reasons()
        assert reasons[reason] >= 1
        assert reasons["breaker_open"] > reasons[reason]  # The breaker keeps it from every request.
        assert (await drill.switch("champion")).status_code == 200

    install(make())
    drill(test)


def test_a_stale_artifact_for_other_replicas_is_left_aside(tmp_path):
    path = tmp_path / "stale.npz"
    network_artifact().save(path)

    async def test(drill):
        assert (await drill.switch(str(path))).status_code == 200
        await drill.load()
        assert (await drill.reasons())["incompatible"] >= NUM_REQUESTS

    drill(test)


def test_a_truncated_file_is_refused_and_what_decided_goes_on(tmp_path):
    path = tmp_path / "truncated.npz"
    marginal_artifact().save(path)
    path.write_bytes(path.read_bytes()[:-100])

    async def test(drill):
        load = asyncio.create_task(drill.load())
        refused = await drill.switch(str(path))
        assert refused.status_code == 422
        assert "it is no npz file" in refused.json()["detail"]
        canary = await drill.client.post(
            "/v1/policies", json={"action": "canary", "policy": str(path)}
        )
        assert canary.status_code == 422
        await load
        assert drill.gateway.manager.policy.name == "champion"

    drill(test)


def test_poisoned_weights_that_send_everything_to_one_replica_fill_it_and_the_rest_spills(tmp_path):
    path = tmp_path / "poisoned.npz"
    weights = np.zeros(NUM_MARGINAL_WEIGHTS)
    weights[NUM_MARGINAL_FEATURES] = -100.0  # A constant times the rank: always the same one.
    marginal_artifact(weights).save(path)

    async def test(drill):
        assert (await drill.switch(str(path))).status_code == 200
        await drill.load()
        picks = [one for one in drill.gateway.history.decisions(30) if one["num_candidates"] == 3]
        assert len({one["candidates"][0]["replica_id"] for one in picks}) == 1
        text = (await drill.client.get("/metrics")).text
        assert "tokenyard_retries_total{" in text  # It was full, and the rest went elsewhere.
        back = await drill.client.post("/v1/policies", json={"action": "rollback"})
        assert back.status_code == 200
        assert drill.gateway.manager.policy.name == "champion"

    drill(test)


def test_an_empty_replica_set_is_waited_out():
    async def test(drill):
        load = asyncio.create_task(drill.load(NUM_REQUESTS))
        await asyncio.sleep(0.02)
        for pool in drill.pools.values():
            pool.there = False
        await asyncio.sleep(0.5)
        assert not load.done()
        for pool in drill.pools.values():
            pool.there = True
        await load

    drill(test)


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_changes_no_answer(jump_s):
    offset_s = 0.0

    async def test(drill):
        nonlocal offset_s
        load = asyncio.create_task(drill.load())
        await asyncio.sleep(0.05)
        offset_s = jump_s
        await load
        await drill.load(40)
        offset_s = 0.0

    drill(test, clock_s=lambda: time.time() + offset_s)


def test_without_telemetry_the_baseline_decides_and_the_policy_comes_back_with_it():
    async def test(drill):
        for pool in drill.pools.values():
            pool.tells = False
        await asyncio.sleep(SETTINGS["stale_after_s"] + 0.1)
        await drill.load()
        stale = (await drill.reasons())["stale"]
        assert stale >= NUM_REQUESTS
        for pool in drill.pools.values():
            pool.tells = True
        await drill.load(40)
        assert (await drill.reasons())["stale"] == stale

    drill(test)
