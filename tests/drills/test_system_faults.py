"""Six deaths under load, on a real Ray with two nodes: what each costs, and that it heals.

Clients ask without a pause. Whatever is killed, every request is answered or told why; where the
process that holds the connections dies, only those that were in flight may see theirs break.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster as FakeCluster
from unit.serve_builders import marginal_artifact

from serve_app.app import GatewayOptions, build_gateway
from serve_app.http.free_port import free_port
from tokenyard.routing.artifact import best_tuned_rule

pytestmark = [pytest.mark.drills, pytest.mark.integration]

HERE = Path(__file__).parent
INTEGRATION = HERE.parent / "integration"
NUM_CLIENTS = 4
BODY = {
    "model": "tiny", "prompt": "one two three four five six", "max_tokens": 12,
    "ignore_eos": True, "temperature": 0,
}  # fmt: skip
EMULATES = {"gpu": "h100_sxm", "llm": "llama3_8b", "time_scale": 2}
HEALS_S = 240.0


def a_pool(name, label, **fields):
    config = {
        "model": "emulated", "emulates": EMULATES, "max_batch": 8, "max_waiting": 64,
        "device": "cpu", "rank_cpus": 0.1,
    }  # fmt: skip
    return {
        "name": name, "kind": "own", "config": config, "replica_cpus": 0.1,
        "node_labels": {"drill": label}, **fields,
    }  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory, own_ray):
    """A gateway on the head; two pools on it, ranks and all, and one on a node of its own."""
    folder = tmp_path_factory.mktemp("drills")
    path = os.pathsep.join([str(INTEGRATION), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("RAY_worker_niceness", "0")
        patch.syspath_prepend(str(INTEGRATION))
        fake = FakeCluster(
            initialize_head=True,
            head_node_args={"num_cpus": 6, "labels": {"drill": "head"}},
        )
        fake.add_node(num_cpus=2, labels={"drill": "spare"})
        ray.init(address=fake.address, logging_level="WARNING")
        port = free_port()
        tiny = "tiny_engine:TinyEngine"
        cluster = {
            "name": "drills", "description": "Made to be broken.", "served_model": "tiny",
            "explore_fraction": 0.0, "circuit_breaker": {"budget_s": 0.25},
            "gateway": {"node_labels": {"drill": "head"}},
            "limits": {"max_in_flight": 64, "timeout_s": 60},
            "pools": [
                a_pool("sharded", "head"),
                a_pool("tiny", "head", engine=tiny, replicas=2),
                a_pool("away", "spare", engine=tiny),
            ],
        }  # fmt: skip
        file = folder / "drills.yaml"
        file.write_text(yaml.safe_dump(cluster))
        try:
            serve.start(proxy_location="Disabled")
            options = GatewayOptions(cluster=str(file), registry=None, local_admin=True, port=port)
            serve.run(build_gateway(options), name="drills", route_prefix=None)
            made = Site(f"http://127.0.0.1:{port}", fake, folder)
            made.wait_for({"sharded": 1, "tiny": 2, "away": 1})
            yield made
        finally:
            serve.shutdown()
            ray.shutdown()
            fake.shutdown()


class Site:
    def __init__(self, url, fake, folder):
        self.url, self.fake, self.folder = url, fake, folder

    def pools(self):
        """Replicas by pool that take requests and were heard of lately."""
        try:
            replicas = httpx.get(f"{self.url}/v1/pools", timeout=30).json()["replicas"]
        except (httpx.HTTPError, ValueError):
            return Counter()
        return Counter(
            one["pool"] for one in replicas if one["published"]["accepting"] and one["age_s"] < 3
        )

    def wait_for(self, wanted, seconds=HEALS_S):
        started_s = time.monotonic()
        while self.pools() != Counter(wanted):
            assert time.monotonic() - started_s < seconds, f"{self.pools()} is not {wanted}"
            time.sleep(0.1)
        return time.monotonic() - started_s

    def wait_for_answers(self, seconds=HEALS_S):
        started_s = time.monotonic()
        while True:
            try:
                if httpx.post(f"{self.url}/v1/completions", json=BODY, timeout=30).is_success:
                    return time.monotonic() - started_s
            except httpx.HTTPError:
                pass
            assert time.monotonic() - started_s < seconds, "it does not answer again"
            time.sleep(0.1)


class Load:
    """Clients in a thread of their own, and what they heard."""

    def __init__(self, url):
        self._url, self._going = url, True
        self.heard = Counter()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self):
        self._thread.start()
        time.sleep(2.0)
        return self

    def __exit__(self, *_):
        self._going = False
        self._thread.join()

    async def _run(self):
        async with httpx.AsyncClient(base_url=self._url, timeout=90) as http:
            await asyncio.gather(*(self._client(http) for _ in range(NUM_CLIENTS)))

    async def _client(self, http):
        while self._going:
            heard = await self._ask(http)
            self.heard[heard] += 1
            if heard != "answered":
                await asyncio.sleep(0.2)

    async def _ask(self, http):
        try:
            async with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as got:
                if got.status_code != 200:
                    return "told why" if await got.aread() else "lost"
                async for line in got.aiter_lines():
                    if line == "data: [DONE]":
                        return "answered"
                    if line.startswith("data: ") and "error" in json.loads(line[6:]):
                        return "told why"
        except httpx.ConnectError:
            return "nobody there"
        except httpx.HTTPError:
            return "connection broken"
        return "lost"


def processes(*starts):
    """Processes by the title that Ray gives them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ())
        if any(title.startswith(start) for start in starts) and _is_ours(process):
            found.append(process)
    return found


def _is_ours(process):
    """Whether it belongs to this test's Ray: others may run on the machine."""
    session = ray._private.worker._global_node.get_session_dir_path()
    try:
        return any(session in one for one in process.environ().values()) or any(
            session in part for parent in process.parents() for part in parent.cmdline()
        )
    except psutil.Error:
        return False


def under_load(site, break_it, heal):
    """Break something while clients ask; return what they heard."""
    with Load(site.url) as load:
        break_it()
        started_s = time.monotonic()
        heal()
        healed_s = time.monotonic() - started_s
        time.sleep(1.0)
    heard = load.heard
    sys.stdout.write(f"heard {dict(heard)}, healed after {healed_s:.1f} s\n")
    assert heard["lost"] == 0
    assert heard["answered"] > 0
    return heard


WHOLE = {"sharded": 1, "tiny": 2, "away": 1}


def kill(process):
    process.send_signal(signal.SIGKILL)


def heals_after_a_dip(site):
    def heal():
        deadline_s = time.monotonic() + 15
        while site.pools() == Counter(WHOLE) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        site.wait_for(WHOLE)

    return heal


def test_a_killed_rank_is_replaced_and_no_request_is_lost(site):
    (rank,) = processes("ray::Rank")
    heard = under_load(site, lambda: kill(rank), heals_after_a_dip(site))
    assert not set(heard) - {"answered", "told why"}
    assert heard["told why"] <= NUM_CLIENTS


def test_a_killed_engine_is_replaced_and_no_request_is_lost(site):
    engine = processes("ray::ServeReplica:drills:tiny")[0]
    heard = under_load(site, lambda: kill(engine), heals_after_a_dip(site))
    assert not set(heard) - {"answered", "told why"}
    assert heard["told why"] <= NUM_CLIENTS


def test_a_killed_gateway_comes_back_and_says_so_meanwhile(site):
    (gateway,) = processes("ray::ServeReplica:drills:gateway")

    def heal():
        site.wait_for_answers()
        site.wait_for(WHOLE)

    heard = under_load(site, lambda: kill(gateway), heal)
    assert heard["connection broken"] <= 2 * NUM_CLIENTS


def test_a_store_that_dies_refuses_a_promotion_and_nothing_else(site, tmp_path):
    port = free_port()
    store = subprocess.Popen(
        [
            sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db",
        ],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    uri = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + 180
        while True:
            try:
                httpx.get(f"{uri}/health", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                assert time.monotonic() < deadline_s, "the store does not start"
                time.sleep(0.5)
        policy = tmp_path / "mine.npz"
        marginal_artifact().save(policy)
        options = GatewayOptions(
            cluster=str(site.folder / "drills.yaml"), registry=uri, local_admin=True,
            port=int(site.url.rpartition(":")[2]),
        )  # fmt: skip
        serve.run(build_gateway(options), name="drills", route_prefix=None)
        site.wait_for(WHOLE)
        shadow = {"action": "shadow", "policy": str(policy)}
        started = httpx.post(f"{site.url}/v1/policies", json=shadow, timeout=60)
        assert started.status_code == 200, started.text
    finally:
        os.killpg(store.pid, signal.SIGKILL)
        store.wait()

    def promote():
        refused = httpx.post(f"{site.url}/v1/policies", json={"action": "promote"}, timeout=120)
        assert refused.status_code == 409, refused.text
        assert "not promoted" in refused.json()["detail"]

    heard = under_load(site, lambda: None, promote)
    assert set(heard) == {"answered"}
    state = httpx.get(f"{site.url}/v1/policies", timeout=30).json()
    assert state["experiment"]["why_ended"] is None
    assert state["champion"]["name"] == best_tuned_rule("conversation_mixed_gpus")


def test_a_node_that_dies_takes_its_pool_and_no_request(site):
    node = next(iter(site.fake.worker_nodes))
    left = {"sharded": 1, "tiny": 2}

    def heal():
        site.wait_for(left)
        site.fake.add_node(num_cpus=2, labels={"drill": "spare"})
        site.wait_for(WHOLE)

    heard = under_load(site, lambda: site.fake.remove_node(node, allow_graceful=False), heal)
    assert not set(heard) - {"answered", "told why"}
    assert heard["told why"] <= NUM_CLIENTS
