"""The gateway as people meet it: Ray Serve, real HTTP, the official client, and a tiny engine."""

import asyncio
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pyarrow.parquet as pq
import pytest
import ray
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from ray import serve
from ray.serve.config import RequestRouterConfig
from schemathesis.checks import not_a_server_error
from scripts import refusal
from sizes import scaled
from unit.tiny_tokenizer import save_tiny_tokenizer

from pipelines import deploy, replay
from serve_app.app import GatewayOptions, build_gateway
from serve_app.http.free_port import free_port
from tokenyard.routing.artifact import best_tuned_rule

HERE = Path(__file__).parents[1]
PIPELINES = HERE.parents[1] / "pipelines"
PROFILE = {
    "iteration_s": 0.005, "prefill_token_s": 1e-5, "sequence_s": 0.0005, "max_batch": 8,
    "token_budget": 256, "kv_capacity_tokens": 20_000,
}  # fmt: skip
PROMPT = "The quick brown fox jumps over the lazy dog, and so on and on."


def a_pool(name, model, **fields):
    config = {
        "model": model, "max_batch": 8, "max_waiting": 64, "device": "cpu", "rank_cpus": 0.1,
        **fields.pop("config", {}),
    }  # fmt: skip
    return {
        "name": name, "kind": "own", "engine": "tiny_engine:TinyEngine", "config": config,
        "replica_cpus": 0.1, **fields,
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("gateway")
    (made / "started").mkdir()
    (made / "aborted").mkdir()
    return made


@pytest.fixture(scope="module")
def cluster(folder, ray_cluster):
    """Serve on the Ray of all tests, whose workers find the tiny engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        try:
            serve.start(proxy_location="Disabled")
            yield
        finally:
            serve.shutdown()


def run(cluster_fields, folder, name, **options):
    """Serve a gateway; return its base URL."""
    file = folder / f"{name}.yaml"
    known = {"name": name, "description": "A test.", "served_model": "tiny", "explore_fraction": 0}
    file.write_text(yaml.safe_dump(known | cluster_fields))
    port = free_port()
    options = GatewayOptions(cluster=str(file), host="0.0.0.0", port=port, **options)
    serve.run(build_gateway(options), name=name, route_prefix=None)
    return f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def url(cluster, folder):
    """A gateway before a pool of two replicas and a slower one, with a decision log."""
    model = save_tiny_tokenizer(folder / "model")
    fields = {
        "limits": {"max_in_flight": 24, "max_output_tokens": 1024, "timeout_s": 60},
        "circuit_breaker": {"budget_s": 0.25},
        "pools": [
            a_pool("fast", model, replicas=2),
            a_pool("slow", model, config={"max_batch": 2}, profile=PROFILE | {"max_batch": 2}),
        ],
    }
    found = run(fields, folder, "main", decision_log=folder / "log", local_admin=True)
    wait_until(lambda: health(found)["replicas"] == 3)
    return found


def health(url):
    return httpx.get(f"{url}/healthz", timeout=30).json()


def profiles(url):
    """Speed of the replicas, by pool."""
    return {one["pool"]: one["profile"] for one in replicas_of(url)}


def replicas_of(url):
    return httpx.get(f"{url}/v1/pools", timeout=30).json()["replicas"]


def wait_until(condition, timeout_s=30.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.05)


def a_client(url, **options):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, **options)


def change_policy(url, policy):
    answer = httpx.post(f"{url}/v1/policy", json={"policy": policy}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.smoke
def test_the_official_client_gets_the_same_answer_whole_and_in_pieces(url):
    client = a_client(url)
    assert [one.id for one in client.models.list()] == ["tiny"]
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=200)
    assert whole.choices[0].text == PROMPT
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == len(PROMPT)
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=20, stream=True, stop=["fox"],
        stream_options={"include_usage": True},
    )  # fmt: skip
    events = list(stream)
    assert "".join(one.choices[0].text for one in events[:-1]) == "The quick brown "
    assert events[-1].usage.completion_tokens == 19
    messages = [{"role": "user", "content": "hé"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=200)
    assert chat.choices[0].message.content == "<user>hé\n<assistant>"
    pieces = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=9, stream=True
    )
    assert "".join(one.choices[0].delta.content or "" for one in pieces) == "<user>hé"


def test_the_official_client_recognises_every_refusal(url):
    client = a_client(url)
    with pytest.raises(openai.NotFoundError, match="'other' is not served"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="longer than the model's 2048"):
        client.completions.create(model="tiny", prompt="a" * 3000, max_tokens=10)
    huge = httpx.post(f"{url}/v1/completions", content=b" " * (17 << 20), timeout=30)
    assert huge.status_code == 413


def test_speeds_are_estimated_where_none_are_declared(url):
    assert change_policy(url, "round_robin")["active"] == "round_robin"
    with ThreadPoolExecutor(4) as pool:
        assert {status for status, _ in pool.map(lambda _: ask(url, 30), range(24))} == {200}
    told = {}

    def known():
        ask(url, 2)
        told.update(profiles(url))
        return told["fast"]["source"] == "estimated" and told["fast"]["iteration_s"] < 0.019

    wait_until(known)
    assert 0.002 < told["fast"]["iteration_s"] + told["fast"]["sequence_s"] < 0.1


def test_a_client_that_leaves_frees_its_place_in_the_engine(url, folder):
    client = a_client(url)
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(3):
        next(stream)
    for mark in (folder / "aborted").iterdir():
        mark.unlink()  # Of streams that others left.
    stream.close()
    wait_until(lambda: any((folder / "aborted").iterdir()))
    wait_until(lambda: not sum(one["in_flight"] for one in replicas_of(url)))
    wait_until(lambda: not sum(one["published"]["num_running"] for one in replicas_of(url)))


@pytest.mark.parametrize("policy", ["ray_default", "sed", "champion"])
def test_the_policy_is_changed_while_requests_are_served(url, policy):
    before = httpx.get(f"{url}/v1/policy", timeout=30).json()
    assert change_policy(url, policy)["active"] == policy
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: ask(url, 8), range(12)))
    assert {status for status, _ in answers} == {200}
    after = httpx.get(f"{url}/v1/policy", timeout=30).json()
    assert after["num_decisions"] - before["num_decisions"] == 12
    assert after["num_fallbacks"] == before["num_fallbacks"]


def ask(url, max_tokens, timeout_s=60):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=timeout_s)
    return answer.status_code, answer


def test_too_many_at_once_are_told_when_to_come_back(url):
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda _: ask(url, 200), range(40)))
    statuses = [status for status, _ in answers]
    assert set(statuses) == {200, 429}
    refused = next(answer for status, answer in answers if status == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert "in flight" in refused.json()["error"]["message"]


def test_changes_are_refused_to_other_machines(url):
    address = ray.util.get_node_ip_address()
    if address.startswith("127."):
        pytest.skip("this machine has no other address")
    elsewhere = url.replace("127.0.0.1", address)
    answer = httpx.post(f"{elsewhere}/v1/policy", json={"policy": "sed"}, timeout=30)
    assert answer.status_code == 403
    assert httpx.get(f"{elsewhere}/v1/models", timeout=30).status_code == 200


def test_no_input_that_the_schema_allows_or_forbids_breaks_the_server(url):
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 10

    for operation in operations:

        @settings(
            max_examples=scaled(12), deadline=None, derandomize=True, database=None,
            phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def no_failure(case):
            case.call_and_validate(base_url=url, checks=[not_a_server_error], timeout=60)

        no_failure()
    change_policy(url, "champion")


def test_a_replica_killed_under_load_costs_no_answer_without_a_reason(url, folder):
    alive = [p for p in (folder / "started").iterdir() if Path(f"/proc/{p.name}").exists()]
    assert len(alive) == 3
    stop = threading.Event()
    found = []

    def keep_asking():
        while not stop.is_set():
            started_s = time.monotonic()
            status, answer = ask(url, 20)
            reason = "" if status == 200 else answer.json()["error"]["message"]
            found.append((status, reason, time.monotonic() - started_s))

    with ThreadPoolExecutor(6) as pool:
        for _ in range(6):
            pool.submit(keep_asking)
        try:
            wait_until(lambda: len(found) > 20)
            killed_s = time.monotonic()
            os.kill(int(alive[0].name), signal.SIGKILL)
            time.sleep(1.0)
            wait_until(lambda: len(list((folder / "started").iterdir())) == 4, 60.0)
            wait_until(lambda: health(url)["replicas"] == 3, 30.0)
            back_s = time.monotonic() - killed_s
        finally:
            stop.set()  # Else the pool waits for those who ask for ever.
    # A replica that takes another's place is believed to be as fast as those of its pool.
    assert all(one["profile"]["iteration_s"] < 0.019 for one in replicas_of(url))
    failed = [one for one in found if one[0] != 200]
    # Unary answers are whole or not there; those that had begun at the dead replica say so.
    assert all(status == 503 and "tokens" in reason for status, reason, _ in failed)
    assert len(failed) <= 6
    assert back_s < 15.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def test_decisions_are_on_disk_with_what_became_of_them(url, folder):
    def rows():
        files = sorted((folder / "log").glob("*.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]

    ask(url, 5)
    wait_until(lambda: sum(row["outcome"] in ("stop", "length") for row in rows()) > 30)
    found = rows()
    done = [row for row in found if row["outcome"] in ("stop", "length")]
    assert all(row["response_s"] >= row["ttft_s"] > 0 for row in done)
    rule = best_tuned_rule("conversation_mixed_gpus")  # What `champion` is there.
    assert {row["policy"].partition("@")[0] for row in found} >= {"ray_default", "sed", rule}
    assert any(row["outcome"] == "abort" for row in found)


class FakeVllm(http.server.BaseHTTPRequestHandler):
    """Speaks as much of OpenAI's API, and publishes as much of vLLM's metrics, as is needed."""

    protocol_version = "HTTP/1.1"
    asked: list[str] = []  # noqa: RUF012

    def log_message(self, *args):
        pass

    def do_GET(self):
        text = "".join(
            f"# TYPE vllm:{name} gauge\nvllm:{name}{{engine=\"0\"}} {value}\n"
            for name, value in (
                ("num_requests_waiting", self.server.waiting), ("num_requests_running", 1),
                ("kv_cache_usage_perc", 0.25),
            )
        ).encode()  # fmt: skip
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        self.send_response(self.server.status)
        kind = "text/event-stream" if body.get("stream") else "application/json"
        self.send_header("content-type", kind)
        self.send_header("connection", "close")
        self.end_headers()
        if self.server.status != 200:
            self.wfile.write(b'{"error": "no"}')
            return
        if not body.get("stream"):
            words = body["prompt"].split()
            usage = {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 0}
            choice = {"index": 0, "text": f" {body['prompt']}", "finish_reason": "stop"}
            whole = {"choices": [choice], "usage": usage}
            self.wfile.write(json.dumps(whole).encode())
            return
        for number, word in enumerate(body["prompt"].split(), 1):
            usage = {"prompt_tokens": 1, "completion_tokens": number, "total_tokens": number + 1}
            choice = {"index": 0, "text": f" {word}", "finish_reason": None}
            self._event({"choices": [choice], "usage": usage})
        self._event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event):
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


@contextmanager
def a_fake_vllm(waiting):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeVllm)
    server.waiting, server.status, server.asked = waiting, 200, []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_fleet_that_runs_already_is_fronted_as_it_is_behind_a_token(cluster, folder):
    with a_fake_vllm(0) as (idle, idle_url), a_fake_vllm(50) as (busy, busy_url):
        pool = {
            "name": "theirs", "kind": "external", "model": "their-name", "profile": PROFILE,
            "endpoints": [{"url": idle_url}, {"url": busy_url}],
        }  # fmt: skip
        tokens = {"token": "secret", "admin_token": "more secret"}
        url = run({"pools": [pool]}, folder, "front", **tokens)
        assert httpx.get(f"{url}/v1/models", timeout=30).status_code == 401
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        headers = {"authorization": "Bearer secret"}

        def busy_is_known():
            found = httpx.get(f"{url}/v1/pools", headers=headers, timeout=30).json()["replicas"]
            return sorted(one["published"]["num_waiting"] for one in found) == [0, 50]

        wait_until(busy_is_known)
        answer = client.completions.create(model="tiny", prompt="one two three")
        assert answer.choices[0].text == " one two three"
        assert answer.usage.completion_tokens == 3
        assert (len(idle.asked), len(busy.asked)) == (1, 0)
        assert idle.asked[0]["model"] == "their-name"
        idle.status = 500
        again = client.completions.create(model="tiny", prompt="four five", stream=True)
        assert "".join(one.choices[0].text for one in again) == " four five"
        assert len(busy.asked) == 1
        change = {"url": f"{url}/v1/policy", "json": {"policy": "ray_default"}, "timeout": 30}
        assert httpx.post(headers=headers, **change).status_code == 403
        headers = {"authorization": "Bearer more secret"}
        assert httpx.post(headers=headers, **change).status_code == 200
        idle.status = 200
        assert client.completions.create(model="tiny", prompt="six").choices[0].text == " six"
        serve.delete("front")


def test_any_deployment_can_name_the_policy_as_its_router(cluster):
    config = RequestRouterConfig(
        request_router_class="serve_app.router:PolicyRequestRouter",
        request_router_kwargs={"policy": "marginal_delay", "profile": PROFILE},
    )

    @serve.deployment(
        num_replicas=2, ray_actor_options={"num_cpus": 0}, request_router_config=config
    )
    class Sleeper:
        async def __call__(self, request):
            await asyncio.sleep(0.3)
            return os.getpid()

    # A handle that was used leaves threads of gRPC, which can crash an interpreter that ends; in a
    # worker Ray sees to them.
    @ray.remote(num_cpus=0)
    def answers():
        handle = serve.get_app_handle("sleepers")
        responses = [handle.remote({"prompt": PROMPT}) for _ in range(8)]
        return [response.result(timeout_s=30) for response in responses]

    serve.run(Sleeper.bind(), name="sleepers", route_prefix=None)
    pids = ray.get(answers.remote())
    # Of equal replicas each gets half, since the router counts what it has sent; Serve takes the
    # second choice where the first does not tell its queue in time.
    assert min(pids.count(pid) for pid in set(pids)) >= 3
    assert len(set(pids)) == 2
    serve.delete("sleepers")


def test_a_replay_compares_policies_on_the_same_requests_and_puts_back_what_was(url, tmp_path):
    trace = tmp_path / "trace.csv"
    lines = ["arrival_s,context_tokens,generated_tokens"]
    lines += [f"{0.2 * i:.1f},{20 + i},{3 + i % 5}" for i in range(12)]
    trace.write_text("\n".join(lines))
    before = httpx.get(f"{url}/v1/policy", timeout=30).json()["active"]
    command = [
        sys.executable, PIPELINES / "replay.py", "--url", url, "--trace", trace,
        "--compare", "sed,ray_default", "--repeats", "2", "--rate-scale", "2",
        "--json", tmp_path / "rows.json",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["sed", "ray_default"]
    for row in rows:
        assert (row["requests"], row["completed"], row["failed"]) == (24, 24, 0)
        assert row["mean_response_s"] >= row["mean_ttft_s"] > 0
        assert row["mean_output_tokens"] == pytest.approx(4.75, abs=0.3)
    assert rows[0]["delta_mean_fraction"] == 0.0
    assert isinstance(rows[1]["delta_mean_fraction"], float)
    assert rows[1]["delta_mean_ci_low"] is None, "two repeats give no interval"
    assert httpx.get(f"{url}/v1/policy", timeout=30).json()["active"] == before


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--compare", "seed"], "policy 'seed': unknown policy 'seed'"),
        (["--trace", "gone.csv"], "trace gone.csv is not there"),
    ],
)
def test_a_replay_that_cannot_be_is_refused_in_one_sentence(url, args, reason):
    sentence = refusal(replay, "--url", url, "--duration-s", 2, *args)
    assert sentence.startswith("replay: ")
    assert reason in sentence


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--cluster", "gone.yaml"], "cluster file gone.yaml: No such file"),
        (["--cluster", "local_cup"], "unknown cluster 'local_cup'"),
        (["--cluster", "BAD", "--policy", "seed"], "unknown policy 'seed'"),
        (
            ["--cluster", "BAD", "--explore", "0.5"],
            "explore fraction 0.5 must lie between 0 and 0.05",
        ),
        (["--cluster", "BAD"], "unknown engine 'bogus'"),
    ],
)
def test_a_cluster_that_cannot_be_served_is_refused_in_one_sentence(tmp_path, args, reason):
    file = tmp_path / "bad.yaml"
    pool = a_pool("p", "none") | {"engine": "bogus"}
    fields = {"name": "bad", "description": "d", "served_model": "m", "pools": [pool]}
    file.write_text(yaml.safe_dump(fields))
    args = [str(file) if one == "BAD" else one for one in args]
    sentence = refusal(deploy, "--port", free_port(), *args)
    assert sentence.startswith("error: ")
    assert reason in sentence
