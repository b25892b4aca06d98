"""Two carriers and their decider as Serve runs them, and what `kill -9` of each takes with it."""

import asyncio
import json
import os
import signal
import time
from collections import Counter

import httpx
import psutil
import pytest
import yaml
from integration.serve.test_gateway import HERE, a_pool, save_tiny_tokenizer
from ray import serve

from serve_app.app import GatewayOptions, build_gateway
from serve_app.http.free_port import free_port

NAME = "carried"
BODY = {"model": "tiny", "prompt": "one two three four", "max_tokens": 16, "ignore_eos": True}
LONG = BODY | {"max_tokens": 900, "stream": True}


@pytest.fixture(scope="module")
def url(tmp_path_factory, ray_cluster):
    """Two carriers before a pool of two replicas, with a decision log."""
    folder = tmp_path_factory.mktemp("carriers")
    cluster = {
        "name": NAME, "description": "A test.", "served_model": "tiny", "explore_fraction": 0,
        "limits": {"max_output_tokens": 1024, "timeout_s": 60}, "gateway": {"carriers": 2},
        "pools": [a_pool("tiny", save_tiny_tokenizer(folder / "model"), replicas=2)],
    }  # fmt: skip
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster))
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        try:
            serve.start(proxy_location="Disabled")
            options = GatewayOptions(cluster=str(file), port=port)
            serve.run(build_gateway(options), name=NAME, route_prefix=None)
            found = f"http://127.0.0.1:{port}"
            until(lambda: metric(found, "tokenyard_carriers") == 2 and health(found) == 2)
            yield found
        finally:
            serve.shutdown()


def until(condition, timeout_s=90.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.1)
    return timeout_s - (deadline_s - time.monotonic())


def get(url, path):
    try:
        return httpx.get(f"{url}{path}", timeout=10)
    except httpx.HTTPError:
        return None


def health(url):
    answer = get(url, "/healthz")
    return None if answer is None else answer.json().get("replicas")


def metric(url, name):
    """A metric without labels, or the sum over its labels; None: nobody tells."""
    page = get(url, "/metrics")
    if page is None or page.status_code != 200:
        return None
    lines = [one for one in page.text.splitlines() if one.split("{")[0].split(" ")[0] == name]
    return sum(float(one.rpartition(" ")[2]) for one in lines)


def in_flight(url):
    return sum(one["in_flight"] for one in httpx.get(f"{url}/v1/pools").json()["replicas"])


def pids(deployment):
    title = f"ray::ServeReplica:{NAME}:{deployment}"
    return {
        one.pid
        for one in psutil.process_iter(["cmdline"])
        if " ".join(one.info["cmdline"] or ()).startswith(title)
    }


class Streams:
    """Callers who each have a connection of their own and read a long answer."""

    def __init__(self, url, num):
        self._url, self._num = url, num
        self.heard = Counter()
        self.begun = 0

    async def run(self, then):
        tasks = [asyncio.create_task(self._one()) for _ in range(self._num)]
        while self.begun < self._num:
            await asyncio.sleep(0.01)
        killed = await asyncio.to_thread(then)
        await asyncio.gather(*tasks)
        return killed

    async def _one(self):
        try:
            async with httpx.AsyncClient(base_url=self._url, timeout=60) as http:
                async with http.stream("POST", "/v1/completions", json=LONG) as answer:
                    async for line in answer.aiter_lines():
                        self.begun += line.startswith("data: ") and not self.is_counted()
                        if line == "data: [DONE]":
                            self.heard["answered"] += 1
                        elif line.startswith("data: ") and "error" in json.loads(line[6:]):
                            self.heard["told why"] += 1
        except httpx.HTTPError:
            self.heard["broken"] += 1

    def is_counted(self):
        task = asyncio.current_task()
        known = getattr(task, "counted", False)
        task.counted = True
        return known


def refused_for(url, timeout_s=30.0):
    """Time until ten requests in a row, each on a connection of its own, were answered."""
    started_s = time.monotonic()
    since_s, num = started_s, 0
    while num < 10:
        assert time.monotonic() - started_s < timeout_s, "it does not answer again"
        try:
            answered = httpx.post(f"{url}/v1/completions", json=BODY, timeout=10).is_success
        except httpx.HTTPError:
            answered = False
        num = num + 1 if answered else 0
        since_s = since_s if answered else time.monotonic()
    return since_s - started_s


def kill(deployment):
    pid = min(pids(deployment))
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.smoke
def test_requests_of_all_carriers_are_on_one_page(url):
    before = metric(url, "tokenyard_requests_total")
    for _ in range(12):
        answer = httpx.post(f"{url}/v1/completions", json=BODY)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 16
    until(lambda: metric(url, "tokenyard_requests_total") == before + 12)
    assert in_flight(url) == 0


def test_a_killed_carrier_takes_only_its_own_streams_and_comes_back(url):
    streams = Streams(url, 16)

    def kill_one():
        killed = kill("carrier")
        assert refused_for(url) < 5.0
        return killed

    killed = asyncio.run(streams.run(kill_one))
    # Which carrier has which connection is chance: with 16 both have some, all but always.
    assert streams.heard["broken"] + streams.heard["answered"] == 16
    assert streams.heard["answered"] > 0
    until(lambda: in_flight(url) == 0)
    until(lambda: len(pids("carrier") - {killed}) == 2)
    until(lambda: metric(url, "tokenyard_carriers") == 2)


def test_a_killed_decider_costs_no_request_and_comes_back(url):
    streams = Streams(url, 8)

    def kill_it():
        killed = kill("gateway")
        assert refused_for(url) < 5.0
        return killed

    killed = asyncio.run(streams.run(kill_it))
    assert streams.heard == {"answered": 8}
    until(lambda: pids("gateway") - {killed})
    until(lambda: metric(url, "tokenyard_carriers") == 2)
    assert metric(url, "tokenyard_carried_alone_total") > 0
    assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
    until(lambda: (metric(url, "tokenyard_requests_total") or 0) > 0)
