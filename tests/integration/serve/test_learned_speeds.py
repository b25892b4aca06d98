"""Endpoints of which nothing but the URL is declared: the gateway finds how fast they are."""

import asyncio
import contextlib

import httpx
import numpy as np
import pytest
from integration.serve.test_serve_app import a_cluster_file, deployed, endpoints_at
from unit.paced_endpoint import PacedEndpoint
from unit.stub_endpoint import served

from serve_app.http.free_port import free_port

ITERATION = np.array([0.015, 1e-4, 2e-3, 1e-6])
FACTORS = (1.0, 1.4, 2.0, 3.0)
CLIENTS = 20
SECONDS, MOST_S, ENOUGH = 12.0, 60.0, 5
"""How long to ask at least and at most, and how many equations of each endpoint are enough."""
TERMS = ("iteration_s", "prefill_token_s", "sequence_s", "kv_token_s")


async def stream(client, rng):
    prompt = rng.integers(1000, size=int(rng.integers(20, 300))).tolist()
    body = {"model": "m", "prompt": prompt, "max_tokens": int(rng.integers(10, 50)), "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_bytes():
            pass


async def load(url):
    """Ask for streams until enough was seen; return what the gateway shows of its endpoints."""
    rng, loop, is_over = np.random.default_rng(0), asyncio.get_running_loop(), asyncio.Event()
    begun_s = loop.time()

    async def one_after_the_other(client):
        while not is_over.is_set():
            await stream(client, rng)
            await asyncio.sleep(rng.exponential(0.3))

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def shown():
            return (await client.get("/v1/pools")).json()["replicas"]

        asking = asyncio.gather(*(one_after_the_other(client) for _ in range(CLIENTS)))
        while (asked_s := loop.time() - begun_s) < MOST_S:
            await asyncio.sleep(1.0)
            counts = [one["estimate"]["num_observations"] for one in await shown()]
            if asked_s > SECONDS and min(counts) >= ENOUGH:
                break
        is_over.set()
        await asking
        await asyncio.sleep(1.5)
        return await shown()


@pytest.mark.integration
def test_a_gateway_that_has_only_urls_finds_how_fast_its_endpoints_are(tmp_path):
    async def test():
        endpoints = [PacedEndpoint(factor * ITERATION) for factor in FACTORS]
        async with served(endpoints):
            engines = [asyncio.create_task(one.run()) for one in endpoints]
            pool = endpoints_at(*(one.url for one in endpoints))
            del pool["profile"]
            cluster, port = a_cluster_file(tmp_path, pool), free_port()
            with contextlib.ExitStack() as stack:
                await asyncio.to_thread(
                    stack.enter_context, deployed("--port", port, cluster=cluster)
                )
                shown = await load(f"http://127.0.0.1:{port}")
                await asyncio.to_thread(stack.close)
            for engine in engines:
                engine.cancel()
        return endpoints, {one["replica_id"]: one for one in shown}

    endpoints, shown = asyncio.run(asyncio.wait_for(test(), 170))
    for endpoint in endpoints:
        found = shown[endpoint.url]
        assert found["profile"]["source"] == "estimated"
        decodes = [at for at, batch in enumerate(endpoint.batches) if batch[1] == 0]
        # The mean iteration that only decodes.
        batch = np.array(endpoint.batches)[decodes].mean(axis=0)
        truth = np.array(endpoint.took_s)[decodes].mean()
        estimate = np.array([found["estimate"][term] for term in TERMS])
        assert found["estimate"]["num_observations"] >= ENOUGH
        assert estimate @ batch == pytest.approx(truth, rel=0.15)
        told = np.array([found["profile"][term] for term in TERMS])
        assert told @ batch == pytest.approx(truth, rel=0.25)
    counts = [endpoint.num_asked for endpoint in endpoints]
    assert counts[0] > 1.5 * counts[-1]
