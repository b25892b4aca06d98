"""The allocated pool of the default cluster, reshaped under load: real ranks, over HTTP."""

import threading
import time

import httpx
import pytest
import ray
import yaml
from ray import serve
from unit.engine_builders import a_tiny_llama
from unit.tiny_tokenizer import save_tiny_tokenizer

from serve_app.app import GatewayOptions, build_gateway
from serve_app.http.free_port import free_port

pytest.importorskip("torch")
pytest.importorskip("transformers")

PROFILE = {
    "iteration_s": 0.057, "prefill_token_s": 2.6e-3, "sequence_s": 7e-4, "kv_token_s": 1.6e-5,
    "max_batch": 8, "token_budget": 256, "kv_capacity_tokens": 5000,
}  # fmt: skip
BUDGET = 4
"""Ranks of the allocation scenario."""
CLIENTS = 4
PAUSE_S = 0.2
"""From an answer to the next request: without it, ranks that start wait for those that serve."""
PLANS = [
    {"parallelism": "data", "num_gpus": 1},
    {"parallelism": "model", "num_gpus": 3},
    {"parallelism": "pipeline_2", "num_gpus": 4},
    {"parallelism": "data", "num_gpus": 3},
]


def a_model(folder):
    """A tiny Llama that divides as SmolLM2 does: nine heads, three key-value heads."""
    a_tiny_llama(
        folder, vocab_size=264, hidden_size=72, intermediate_size=144, num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
    return save_tiny_tokenizer(folder)


def a_cluster(model):
    pool = {
        "replica_cpus": 0.05, "profile": PROFILE,
        "config": {"model": model, "device": "cpu", "rank_cpus": 0.5, "max_model_tokens": 512},
    }  # fmt: skip
    allocation = {
        "scenario": "local_cpu_ranks", "policy": "best_static",
        "template": {"name": "sharded", **pool},
        "start": PLANS[0], "min_replicas": 0,
    }  # fmt: skip
    return {
        "name": "tested", "description": "A test.", "served_model": "tested",
        "policy": "marginal_delay", "explore_fraction": 0, "allocation": allocation,
        "pools": [{"name": "stays", "kind": "own", **pool}],
    }  # fmt: skip


@pytest.fixture(scope="module", params=["tiny", pytest.param("default", marks=pytest.mark.slow)])
def url(request, tmp_path_factory, ray_cluster):
    """A gateway before a replica that stays and an allocated pool, all of real ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    model = a_model(folder / "model") if request.param == "tiny" else "default"
    (folder / "cluster.yaml").write_text(yaml.safe_dump(a_cluster(model)))
    port = free_port()
    try:
        serve.start(proxy_location="Disabled")
        options = GatewayOptions(cluster=str(folder / "cluster.yaml"), local_admin=True, port=port)
        serve.run(build_gateway(options), name="tested")
        address = f"http://127.0.0.1:{port}"
        settle(address)
        yield address
    finally:
        serve.shutdown()


def look(url):
    answer = httpx.get(f"{url}/v1/allocation", timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def settle(url, timeout_s=240):
    """Wait until no change is on its way; the most ranks that were reserved meanwhile."""
    most, deadline_s = 0, time.monotonic() + timeout_s
    while (state := look(url))["changing"]:
        most = max(most, ranks_reserved(), state["gpus_held"])
        assert time.monotonic() < deadline_s, state
        time.sleep(0.1)
    return max(most, ranks_reserved())


def ranks_reserved():
    """Ranks that Ray holds room for: a replica's bundles but its own process's, and the one that
    stays."""
    groups = ray.util.placement_group_table().values()
    return sum(len(one["bundles"]) - 1 for one in groups if one["state"] == "CREATED") - 1


def set_plan(url, **plan):
    answer = httpx.post(f"{url}/v1/allocation", json={"plan": plan}, timeout=60)
    assert answer.status_code == 200, answer.text


def replicas(url):
    found = httpx.get(f"{url}/v1/pools", timeout=60).json()["replicas"]
    return [one for one in found if one["pool"] != "stays"]


class Load:
    """Clients that ask again and again, and what they were told."""

    def __init__(self, url):
        self._url, self._stop, self.answers = url, threading.Event(), []
        self._threads = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]

    def _ask(self):
        body = {"model": "tested", "prompt": "x = 1\n" * 8, "max_tokens": 6, "ignore_eos": True}
        with httpx.Client(timeout=300) as client:
            while not self._stop.is_set():
                answer = client.post(f"{self._url}/v1/completions", json=body)
                self.answers.append((answer.status_code, answer.text))
                time.sleep(PAUSE_S)

    def goes_on(self):
        """Wait until every client has been answered once more."""
        enough, deadline_s = len(self.answers) + 2 * CLIENTS, time.monotonic() + 60
        while len(self.answers) < enough:
            assert time.monotonic() < deadline_s, "nobody answers"
            time.sleep(0.1)

    def __enter__(self):
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for one in self._threads:
            one.join()


def test_real_ranks_are_reshaped_under_load_within_the_budget_and_fail_no_request(url, request):
    # Of the default model, whose ranks take far longer to start, one change: the others are alike.
    is_tiny = "tiny" in request.node.callspec.id
    most = 0
    with Load(url) as load:
        for plan in PLANS[1:] if is_tiny else PLANS[2:3]:
            set_plan(url, **plan)
            most = max(most, settle(url))
            state = look(url)
            assert state["changes"][0]["outcome"] == "done"
            (here,) = (one for one in state["shapes"] if one["ready"])
            size = here["tensor_parallel"] * here["pipeline_parallel"]
            assert size * here["ready"] == plan["num_gpus"] == ranks_reserved()
            load.goes_on()
    assert {status for status, _ in load.answers} == {200}
    assert most <= BUDGET


def test_a_batch_limit_is_changed_under_load_without_a_restart(url):
    set_plan(url, parallelism="data", num_gpus=1)
    settle(url)
    (before,) = replicas(url)
    with Load(url) as load:
        for max_batch in (2, 8):
            set_plan(url, parallelism="data", num_gpus=1, max_batch=max_batch)
            settle(url)
            (after,) = replicas(url)
            assert after["replica_id"] == before["replica_id"]
            assert after["profile"]["max_batch"] == max_batch
            load.goes_on()
            (after,) = replicas(url)
            assert after["published"]["num_running"] <= max_batch
    assert {status for status, _ in load.answers} == {200}
