"""Sessions while what serves them is killed: none is lost, and none held beyond its bound."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import yaml
from integration.serve.test_serve_app import endpoints_at
from scripts import load_script

from serve_app.http.free_port import free_port

KV_TOKENS, HOLD_S = 600, 3.0
RULE = f"index_las:lease_s=0.5:growth_tokens=0:full_at=1:hold_s={HOLD_S}"
ENDPOINT = """
import asyncio, sys
from unit.paced_endpoint import PacedEndpoint

async def main():
    endpoint = PacedEndpoint([0.01, 2e-4, 1e-3, 0.0])
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(server.serve_forever(), endpoint.run())

asyncio.run(main())
"""


@contextmanager
def killed_at_the_end(*command):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENYARD_LOCAL_ADMIN": "1"}
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def an_endpoint(port):
    return killed_at_the_end(sys.executable, "-c", ENDPOINT, port)


def a_gateway(file, port):
    command = "-m", "pipelines.deploy", "--cluster", file, "--policy", "sed", "--port", port
    return killed_at_the_end(sys.executable, *command)


async def turn(client, name, prompt):
    """Ask until the answer is whole, as agents do; return how long the last attempt took."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 20, "stream": True}
    while True:
        begun_s = time.perf_counter()
        try:
            answer = await client.post("/v1/completions", json=body, headers={"x-session-id": name})
            if answer.status_code == 200 and "[DONE]" in answer.text:
                return time.perf_counter() - begun_s
            assert answer.status_code in (200, 429, 500, 502, 503, 504), answer.text
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.3)


async def agent(url, name, took_s):
    rng = np.random.default_rng(abs(hash(name)) % 1000)
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        prompt = rng.integers(1000, size=150).tolist()
        for _ in range(6):
            took_s.append(await turn(client, name, prompt))
            prompt += rng.integers(1000, size=25).tolist()
            await asyncio.sleep(float(rng.exponential(0.2)))
    return name


async def until_held(url):
    async with httpx.AsyncClient(base_url=url, timeout=5) as client:
        while not (await client.get("/v1/sessions")).json()["held"]:
            await asyncio.sleep(0.05)


async def until_up(url):
    async with httpx.AsyncClient(base_url=url, timeout=5) as client:
        while True:
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


def a_cluster_file(folder, ports, rule):
    pool = endpoints_at(*(f"http://127.0.0.1:{each}" for each in ports))
    pool["profile"] = pool["profile"] | {"kv_capacity_tokens": KV_TOKENS}
    fields = {"name": "front", "description": "d", "served_model": "m", "pools": [pool]}
    fields |= {"sessions": {"rule": rule}, "outlier_ejection": {"max_s": 1.0}}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(fields))
    return file


@pytest.mark.integration
def test_the_benchmark_of_agents_compares_its_arms(tmp_path):
    ports, port = [free_port(), free_port()], free_port()
    file, url = a_cluster_file(tmp_path, ports, RULE), f"http://127.0.0.1:{port}"
    live_sessions = load_script("benchmarks/live_sessions.py")
    arms = (f"sed {RULE}", f"round_robin {live_sessions.PLACED_ALONE}")
    args = live_sessions.Args(
        url=url, arms=arms, agents=3, sessions=4, max_turns=2, length_scale=0.002, time_scale=0.0,
        repeats=1, json=tmp_path / "rows.json",
    )  # fmt: skip
    with an_endpoint(ports[0]), an_endpoint(ports[1]), a_gateway(file, port):
        asyncio.run(asyncio.wait_for(until_up(url), 60))
        first, second = live_sessions.main(args)
    assert (first["arm"], second["arm"]) == arms
    for row in (first, second):
        assert row["failed"] == 0
        assert row["completion_s"] > row["ttft_s"] > 0


@pytest.mark.integration
def test_killing_the_gateway_and_a_replica_loses_no_session(tmp_path):
    ports, port = [free_port(), free_port()], free_port()
    file, url = a_cluster_file(tmp_path, ports, RULE), f"http://127.0.0.1:{port}"

    async def test():
        took_s, names = [], [f"agent {number}" for number in range(12)]
        first, second = an_endpoint(ports[0]), an_endpoint(ports[1])
        first.__enter__()
        second.__enter__()
        try:
            with a_gateway(file, port):
                await until_up(url)
                agents = asyncio.gather(*(agent(url, name, took_s) for name in names))
                await until_held(url)
            # It was killed while it held turns.
            with a_gateway(file, port):
                await until_up(url)
                await until_held(url)
                second.__exit__(None, None, None)
                await asyncio.sleep(2.0)
                second = an_endpoint(ports[1])
                second.__enter__()
                done = await agents
                page = httpx.get(f"{url}/metrics").text
                left = httpx.get(f"{url}/v1/sessions").json()
        finally:
            first.__exit__(None, None, None)
            second.__exit__(None, None, None)
        return names, done, took_s, page, left

    names, done, took_s, page, left = asyncio.run(asyncio.wait_for(test(), 150))
    assert done == names
    assert len(took_s) == 6 * len(names)
    counts = dict(line.rsplit(" ", 1) for line in page.splitlines() if "tokenyard_held_sec" in line)
    # Buckets end at 2.5, 5, ... seconds: nobody was held for more than the one after the bound.
    assert float(counts['tokenyard_held_seconds_bucket{le="5.0"}']) == float(
        counts["tokenyard_held_seconds_count"]
    )
    assert (left["held"], left["running"]) == (0, 0)
