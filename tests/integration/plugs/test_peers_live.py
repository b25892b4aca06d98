"""Gateways before the same endpoints: each knows what others have sent, and outlives them."""

import asyncio
import contextlib
import os
import subprocess
import sys

import httpx
import numpy as np
import pytest
import yaml
from integration.serve.test_sessions_live import an_endpoint as a_paced_endpoint
from sizes import is_thorough

from serve_app.http.free_port import free_port

pytestmark = pytest.mark.integration

LIMIT_S = 60.0
BODY = {"model": "m", "prompt": [1, 2, 3], "stream": True}


@contextlib.contextmanager
def a_gateway(folder, number, endpoints, addresses):
    port = free_port()
    pool = {"name": "p", "kind": "external", "model": "m", "endpoints": endpoints}
    peers = {"listen": addresses[number], "connect": addresses}
    cluster = {
        "name": "c", "description": "c", "served_model": "m", "pools": [pool],
        "gateway": {"peers": peers},
    }  # fmt: skip
    file = folder / f"cluster{number}.yaml"
    file.write_text(yaml.safe_dump(cluster))
    command = [sys.executable, "-m", "pipelines.deploy", "--cluster", file, "--policy", "sed"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*map(str, command), "--port", str(port)], env=env, stdout=subprocess.DEVNULL
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def stream(client, url, tokens):
    """Ask for a stream; return whether it came to its end."""
    num_lines = 0
    try:
        body = BODY | {"max_tokens": tokens}
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                num_lines += bool(line)
    except httpx.TransportError:
        return False
    return num_lines > tokens


async def until(is_so):
    async with asyncio.timeout(LIMIT_S):
        while not await is_so():
            await asyncio.sleep(0.1)


def test_each_counts_what_the_other_has_sent_until_the_other_dies(tmp_path):
    ports = [free_port() for _ in "12"]
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in "12"]
    endpoints = [f"http://127.0.0.1:{port}" for port in ports]

    async def drill(dying, dying_url, url):
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:

            async def answers(url):
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get(f"{url}/healthz")).status_code == 200

            async def in_flight(url):
                replicas = (await client.get(f"{url}/v1/pools")).json()["replicas"]
                return sum(replica["in_flight"] for replica in replicas)

            async def has_peer():
                text = (await client.get(f"{url}/metrics")).text
                return "\ntokenyard_peers 1.0" in text

            await until(lambda: answers(dying_url))
            await until(lambda: answers(url))
            await until(has_peer)
            theirs = [asyncio.create_task(stream(client, dying_url, 400)) for _ in range(6)]

            async def sees(number):
                return await in_flight(url) == number

            await until(lambda: sees(6))
            assert await stream(client, url, 5)
            await until(lambda: sees(6))
            ours = [asyncio.create_task(stream(client, url, 60)) for _ in range(4)]
            await until(lambda: sees(10))
            dying.kill()
            assert not any(await asyncio.gather(*theirs))
            assert all(await asyncio.gather(*ours))
            await until(lambda: sees(0))
            assert await stream(client, url, 5)

    with a_paced_endpoint(ports[0]), a_paced_endpoint(ports[1]):
        with (
            a_gateway(tmp_path, 0, endpoints, addresses) as (dying, dying_url),
            a_gateway(tmp_path, 1, endpoints, addresses) as (_, url),
        ):
            asyncio.run(drill(dying, dying_url, url))


def test_where_one_of_four_is_killed_under_load_only_what_it_carried_is_lost(tmp_path):
    num, rate_per_s, duration_s = 4, 20.0, 40.0 if is_thorough() else 8.0
    ports = [free_port() for _ in "123"]
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(num)]
    endpoints = [f"http://127.0.0.1:{port}" for port in ports]
    rng = np.random.default_rng(46)
    at_s = np.cumsum(rng.exponential(1 / rate_per_s, int(rate_per_s * duration_s))).tolist()
    asks = list(zip(at_s, rng.integers(num, size=len(at_s)).tolist(),
                    rng.integers(2, 40, len(at_s)).tolist(), strict=True))  # fmt: skip

    async def drill(made):
        urls, (dying, _) = [url for _, url in made], made[0]
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:

            async def is_up(url):
                with contextlib.suppress(httpx.TransportError):
                    return (
                        f"\ntokenyard_peers {num - 1}.0"
                        in (await client.get(f"{url}/metrics")).text
                    )

            for url in urls:
                await until(lambda url=url: is_up(url))

            async def ask(at_s, number, tokens):
                await asyncio.sleep(at_s)
                return await stream(client, urls[number], tokens)

            asyncio.get_running_loop().call_later(duration_s / 2, dying.kill)
            are_whole = await asyncio.gather(*(ask(*one) for one in asks))

            async def is_quiet():
                pools = [(await client.get(f"{url}/v1/pools")).json() for url in urls[1:]]
                return not any(one["in_flight"] for pool in pools for one in pool["replicas"])

            await until(is_quiet)
        lost = [one for one, is_whole in zip(asks, are_whole, strict=True) if not is_whole]
        assert {number for _, number, _ in lost} == {0}
        # What comes to it later finds nobody; before that all were answered.
        assert len(lost) < sum(number == 0 for _, number, _ in asks)

    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(a_paced_endpoint(port))
        made = [
            stack.enter_context(a_gateway(tmp_path, number, endpoints, addresses))
            for number in range(num)
        ]
        asyncio.run(drill(made))
