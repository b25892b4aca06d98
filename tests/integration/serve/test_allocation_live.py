"""A pool that is reshaped under load: Ray Serve, real HTTP, and a tiny engine."""

import threading
import time
from pathlib import Path

import httpx
import pytest
import ray
import yaml
from ray import serve
from unit.tiny_tokenizer import save_tiny_tokenizer

from serve_app.app import GatewayOptions, build_gateway
from serve_app.http.free_port import free_port

HERE = Path(__file__).parents[1]
PROFILE = {
    "iteration_s": 0.005, "prefill_token_s": 1e-5, "sequence_s": 0.0005, "max_batch": 8,
    "token_budget": 256, "kv_capacity_tokens": 20_000,
}  # fmt: skip
PROMPT = "The quick brown fox jumps over the lazy dog, and so on and on."
SCENARIO = {
    "name": "tested", "description": "Four GPUs, a decision every two seconds.",
    "pool": [{"gpu": "l4", "count": 4}], "llm": "llama2_7b", "context_tokens": 115,
    "generated_tokens": 21, "max_batches": [8], "slot_s": 2, "restart_s": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory, ray_cluster):
    """A gateway before nothing but an allocated pool."""
    folder = tmp_path_factory.mktemp("allocation")
    (folder / "scenario.yaml").write_text(yaml.safe_dump(SCENARIO))
    template = {
        "name": "l4", "engine": "tiny_engine:TinyEngine", "replica_cpus": 0.05, "profile": PROFILE,
        "config": {"model": save_tiny_tokenizer(folder / "model"), "device": "cpu",
                   "rank_cpus": 0.05, "max_waiting": 64},
    }  # fmt: skip
    allocation = {
        "scenario": str(folder / "scenario.yaml"), "policy": "autoscaler_70", "template": template,
        "start": {"parallelism": "data", "num_gpus": 1}, "shrink_after_s": 0,
    }  # fmt: skip
    cluster = {
        "name": "tested", "description": "A test.", "served_model": "tiny",
        "policy": "marginal_delay", "explore_fraction": 0, "allocation": allocation,
    }  # fmt: skip
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        port = free_port()
        try:
            serve.start(proxy_location="Disabled")
            options = GatewayOptions(
                cluster=str(folder / "cluster.yaml"), local_admin=True, port=port
            )
            serve.run(build_gateway(options), name="tested")
            address = f"http://127.0.0.1:{port}"
            wait_until(lambda: not look(address)["changing"], 60)
            yield address
        finally:
            serve.shutdown()


def wait_until(condition, timeout_s=30.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.1)


def look(url):
    answer = httpx.get(f"{url}/v1/allocation", timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tell(url, **body):
    return httpx.post(f"{url}/v1/allocation", json=body, timeout=30)


class Load:
    """Clients that ask without a pause, and what they were told."""

    def __init__(self, url, clients):
        self._url, self._stop, self.statuses = url, threading.Event(), []
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def _ask(self):
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}
        with httpx.Client(timeout=60) as client:
            while not self._stop.is_set():
                answer = client.post(f"{self._url}/v1/completions", json=body)
                self.statuses.append(answer.status_code)

    def __enter__(self):
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for one in self._threads:
            one.join()


def test_the_policy_follows_the_load(url):
    assert tell(url, policy="autoscaler_70").json()["by_hand"] is False
    wait_until(lambda: look(url)["plan"]["num_gpus"] == 1, 60)
    with Load(url, clients=12):
        wait_until(lambda: look(url)["plan"]["num_gpus"] >= 3, 60)
    state = look(url)
    grown = next(one for one in state["changes"] if one["by"] == "policy")
    assert "of what data on" in grown["reason"]
    assert max(state["demand_per_s"]) > 5


def test_a_dry_run_is_only_talk(url):
    wait_until(lambda: not look(url)["changing"])
    tell(url, dry_run=True)
    before = look(url)["plan"]
    wait_until(lambda: look(url)["changes"][0]["outcome"] == "dry run", 60)
    assert look(url)["plan"] == before or look(url)["plan"]["num_gpus"] == before["num_gpus"]
    assert tell(url, dry_run=False).json()["dry_run"] is False


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"plan": {"parallelism": "hybrid_tp4", "num_gpus": 3}}, "is not feasible"),
        ({"plan": {"parallelism": "model", "num_gpus": 4}}, "cannot be reached"),
        ({"plan": {"parallelism": "sideways", "num_gpus": 4}}, "parallelism"),
        ({"policy": "autoscaler_71"}, "did you mean 'autoscaler_70'"),
        ({"policy": "nowhere.npz"}, "nowhere.npz does not exist"),
        ({"dry_run": "perhaps"}, "dry_run"),
        ({"budget": 100}, "budget"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(url, body, reason):
    wait_until(lambda: not look(url)["changing"], 60)
    answer = tell(url, **body)
    assert answer.status_code == 422
    assert reason in answer.text


def test_a_gateway_that_dies_finds_its_replicas_again(url):
    wait_until(lambda: not look(url)["changing"], 60)
    tell(url, plan={"parallelism": "data", "num_gpus": 3})
    wait_until(lambda: not look(url)["changing"], 60)
    old = {one["replica_id"] for one in httpx.get(f"{url}/v1/pools").json()["replicas"]}
    gateway = next(
        actor for actor in ray.util.list_named_actors(all_namespaces=True)
        if "gateway" in actor["name"]
    )  # fmt: skip
    ray.kill(ray.get_actor(gateway["name"], namespace=gateway["namespace"]), no_restart=False)

    def is_back():
        try:
            return look(url)["plan"]["num_gpus"] == 3
        except (httpx.HTTPError, AssertionError):
            return False

    wait_until(is_back, 90)
    tell(url, plan={"parallelism": "data", "num_gpus": 3})
    wait_until(lambda: not look(url)["changing"], 60)
    now = {one["replica_id"] for one in httpx.get(f"{url}/v1/pools").json()["replicas"]}
    assert now == old
    assert look(url)["changes"][0]["outcome"] == "done"
