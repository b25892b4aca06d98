"""The server as people meet it: pipelines/deploy.py over real HTTP, with a Ray and without."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from scripts import refusal
from unit.openai_endpoint import an_openai_endpoint
from unit.serve.test_keys import ENTRIES, bearer, write
from unit.serve.test_serve_regions import a_body as regions_body
from unit.serve.test_tls import make, trusting
from unit.serve_builders import a_body, a_snapshot
from unit.tiny_tokenizer import save_tiny_tokenizer

from pipelines import deploy
from serve_app.app import APP_NAME, GATEWAY
from serve_app.http.free_port import free_port
from tokenyard.routing.artifact import best_tuned_rule
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.types import ReplicaSnapshot, Request
from tokenyard.types import Slo

DEPLOY = Path(__file__).parents[3] / "pipelines" / "deploy.py"
DECIDE_ONLY = ("--cluster", "none")
TESTS = Path(__file__).parents[2]
PROFILE = {
    "iteration_s": 0.005, "prefill_token_s": 1e-5, "sequence_s": 0.0005, "max_batch": 8,
    "token_budget": 256, "kv_capacity_tokens": 20_000,
}  # fmt: skip


def rows_in(log, num_expected):
    """Rows of a decision log by id, once they are there: it lags by two seconds."""
    deadline_s = time.monotonic() + 20
    while len(rows := [row for one in log.glob("*.parquet") for row in read(one)]) < num_expected:
        assert time.monotonic() < deadline_s, f"{len(rows)} of {num_expected} rows"
        time.sleep(0.1)
    return {row["decision_id"]: row for row in rows}


def read(file):
    return pq.read_table(file).to_pylist()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The champion, which is a rule, with its decision log: (url, log)."""
    port = free_port()
    log = tmp_path_factory.mktemp("serve") / "log"
    with deployed("--port", port, "--decision-log", log):
        yield f"http://127.0.0.1:{port}", log


@pytest.mark.integration
def test_the_rule_of_a_scenario_answers_over_http_as_it_decides_in_evaluation(server):
    url, log = server
    body = a_body(predicted_total_tokens=2500.0, arrival_s=3.0)
    answer = httpx.post(f"{url}/v1/route", json=body, timeout=10).json()
    context = PolicyContext("poisson_085", Slo(2.0), np.random.default_rng(0), 3)
    policy = make_policy(best_tuned_rule("poisson_085"), context)
    snapshots = [ReplicaSnapshot(**fields) for fields in body["snapshots"]]
    decided = policy.place(Request(3.0, 2000, 2500.0), snapshots)
    assert answer["index"] == decided.replica
    assert answer["scores"] == pytest.approx(decided.scores, rel=1e-9)
    assert rows_in(log, 1)[answer["decision_id"]]["propensity"] == 1.0


@pytest.mark.integration
def test_a_refusal_is_one_sentence_over_http_too(server):
    url, _ = server
    bad = a_body([a_snapshot(tokens_per_s=-1.0)])
    refused = httpx.post(f"{url}/v1/route", json=bad, timeout=10)
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("snapshots[0].tokens_per_s should be greater")
    huge = httpx.post(f"{url}/v1/route", content=b" " * (2 << 20), timeout=10)
    assert huge.status_code == 413


@pytest.mark.integration
def test_regions_are_decided_over_http_and_what_is_stale_falls_back_and_is_counted(server):
    url, _ = server
    answer = httpx.post(f"{url}/v1/regions", json=regions_body(), timeout=10).json()
    assert (answer["policy"], answer["fallback_reason"]) == ("prox_ot_forecast_live_cost", None)
    assert [sum(row) for row in answer["shares"]] == pytest.approx([1.0, 1.0, 1.0])
    body = regions_body(forecast_age_slots=9.0)
    stale = httpx.post(f"{url}/v1/regions", json=body, timeout=10).json()
    assert (stale["policy"], stale["fallback_reason"]) == ("prox_ot", "stale_forecast")
    refused = httpx.post(f"{url}/v1/regions", json={"regions": []}, timeout=10)
    assert refused.status_code == 422
    counted = httpx.get(f"{url}/v1/regions", timeout=10).json()
    assert (counted["num_decisions"], counted["fallbacks"]) == (2, {"stale_forecast:prox_ot": 1})
    assert "tokenyard_region_fallbacks_total" in httpx.get(f"{url}/metrics", timeout=10).text


@pytest.mark.integration
def test_concurrent_callers_each_get_their_answer_and_their_row(server):
    url, log = server
    before = httpx.get(f"{url}/v1/policy", timeout=10).json()

    def ask(_):
        answer = httpx.post(f"{url}/v1/route", json=a_body(), timeout=30)
        return answer.status_code, answer.json()["decision_id"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(100)))
    after = httpx.get(f"{url}/v1/policy", timeout=10).json()
    assert {status for status, _ in answers} == {200}
    assert after["num_decisions"] - before["num_decisions"] == 100
    assert (after["num_fallbacks"], after["num_log_lines_lost"]) == (0, 0)
    assert {decision_id for _, decision_id in answers} <= set(rows_in(log, after["num_decisions"]))


@contextmanager
def deployed(*args, cluster="none", ends=True, start=(DEPLOY,), **options):
    """Run deploy.py until it serves; yield its line and it; press Ctrl-C, and see a clean end."""
    command = [sys.executable, *start, "--cluster", str(cluster), *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)

    def killed_if_it_takes_too_long(step):
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        try:
            return step()
        finally:
            watchdog.cancel()

    try:
        # A module's tests may take longer than any step.
        yield killed_if_it_takes_too_long(process.stdout.readline), process
        if ends:
            process.send_signal(signal.SIGINT)
        assert killed_if_it_takes_too_long(process.wait) == 0
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@pytest.mark.integration
def test_deploy_falls_back_to_sed_when_told_to_and_leaves_nothing_behind(tmp_path):
    port = free_port()
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"nothing")
    log = tmp_path / "log"
    options = ("--fallback", "sed", "--decision-log", log, "--explore", 0.05)
    options += ("--json", tmp_path / "served.json")
    with deployed("--policy", broken, "--port", port, *options) as (greeting, _):
        url = f"http://127.0.0.1:{port}"
        policy = httpx.get(f"{url}/v1/policy", timeout=10).json()
        assert policy["name"] == "sed"
        assert "broken.npz" in policy["startup_fallback"]
        headers = {f"x-{number}": "y" * 8000 for number in range(9)}
        too_large = httpx.get(f"{url}/healthz", headers=headers, timeout=10)
        assert (too_large.status_code, "larger than 65536" in too_large.text) == (431, True)
        # The line that it prints is a command that works as it stands.
        command = shlex.split(greeting.partition("ask with: ")[2])
        answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        assert answer["fallback"]
        (row,) = json.loads((tmp_path / "served.json").read_text())["rows"]
        assert (row["url"], row["sha256"]) == (url, policy["sha256"])
    (row,) = rows_in(log, 1).values()
    assert row["decision_id"] == answer["decision_id"]
    assert 0.05 / 3 <= row["propensity"] < 1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def a_cluster_file(folder, *pools, **fields):
    file = folder / "cluster.yaml"
    known = {"name": "front", "description": "d", "served_model": "m", "pools": list(pools)}
    file.write_text(yaml.safe_dump(known | fields))
    return file


def endpoints_at(*urls):
    return {
        "name": "theirs", "kind": "external", "model": "m", "profile": PROFILE,
        "endpoints": [{"url": url} for url in urls],
    }  # fmt: skip


def ask(port, **options):
    body = {"model": "m", "prompt": "a", "max_tokens": 2}
    scheme = "https" if "verify" in options else "http"
    return httpx.post(f"{scheme}://127.0.0.1:{port}/v1/completions", json=body, **options)


TELLS_WHAT_IT_IMPORTED = """
import sys
import tyro
from pipelines import deploy
deploy.main(tyro.cli(deploy.Args))
large = ("ray", "torch", "mlflow", "pandas", "pyarrow", "matplotlib", "scipy.linalg", "scipy.stats")
print(*(name for name in large if name in sys.modules))
"""


@pytest.mark.integration
@pytest.mark.smoke
def test_a_gateway_before_endpoints_is_one_process_and_imports_no_ray(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    port = free_port()
    with an_openai_endpoint("m") as (one, url), an_openai_endpoint("m") as (other, other_url):
        cluster = a_cluster_file(tmp_path, endpoints_at(url, other_url))
        start, row = ("-c", TELLS_WHAT_IT_IMPORTED), tmp_path / "row.json"
        with deployed("--port", port, "--json", row, cluster=cluster, start=start) as (line, it):
            assert line.startswith("serving champion")
            assert ask(port, timeout=30).json()["choices"][0]["text"] == "word word "
            assert len(one.asked) + len(other.asked) == 1
            assert psutil.Process(it.pid).children(recursive=True) == []
            it.send_signal(signal.SIGTERM)
            assert it.stdout.read().split() == []
            assert json.loads(row.read_text())["rows"][0]["url"] == f"http://127.0.0.1:{port}"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


@pytest.mark.integration
def test_rays_own_router_decides_in_a_process_without_a_cluster_of_ray(tmp_path):
    port = free_port()
    with an_openai_endpoint("m") as (_, url), an_openai_endpoint("m") as (_, other_url):
        cluster = a_cluster_file(tmp_path, endpoints_at(url, other_url))
        with deployed("--port", port, "--policy", "ray_default", cluster=cluster):
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda _: ask(port, timeout=60), range(8)))
            assert {one.status_code for one in answers} == {200}
            policy = httpx.get(f"http://127.0.0.1:{port}/v1/policy", timeout=30).json()
            assert policy["active"] == "ray_default"
            assert (policy["num_decisions"], policy["num_fallbacks"]) == (8, 0)


@pytest.mark.integration
def test_keys_tls_and_what_was_used_outlive_a_process_without_ray(tmp_path):
    port, limits = free_port(), {"requests_per_day": 3}
    write(tmp_path / "keys.yaml", [ENTRIES[0] | {"limits": limits}, ENTRIES[2]])
    files = make(tmp_path, 1)
    gateway = {
        "keys": str(tmp_path / "keys.yaml"), "audit_log": str(tmp_path / "audit.jsonl"),
        "tls": files.model_dump(mode="json"),
    }  # fmt: skip
    ann = {"headers": bearer("sk-ann"), "verify": trusting(files), "timeout": 30}
    ops = ann | {"headers": bearer("sk-ops")}
    with an_openai_endpoint("m") as (_, url):
        cluster = a_cluster_file(tmp_path, endpoints_at(url), gateway=gateway)
        given = ("--port", port, "--decision-log", tmp_path / "log")
        with deployed(*given, cluster=cluster):
            assert [ask(port, **ann).status_code for _ in range(2)] == [200, 200]
            assert ask(port, **ann | {"headers": {}}).status_code == 401
            change = {"policy": "round_robin"}
            changed = httpx.post(f"https://127.0.0.1:{port}/v1/policy", json=change, **ops)
            assert changed.status_code == 200
        with deployed(*given, cluster=cluster):
            assert [ask(port, **ann).status_code for _ in range(2)] == [200, 429]
            active = httpx.get(f"https://127.0.0.1:{port}/v1/policy", **ops).json()["active"]
            assert active == "round_robin"
    assert "ops at 127.0.0.1" in (tmp_path / "audit.jsonl").read_text()
    assert len(rows_in(tmp_path / "log", 3)) == 3


def offspring(process, name):
    """Processes that deploy.py has started, directly or not."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [one for one in children if name in " ".join(one.cmdline()[:2])]


def a_pool_of_ours(folder):
    """A pool that needs a Ray, and the environment in which its replicas find the engine."""
    model = save_tiny_tokenizer(folder / "model")
    config = {"model": model, "device": "cpu", "rank_cpus": 0.1, "max_model_tokens": 18_000}
    path = [str(TESTS / "integration"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {
        "name": "ours", "engine": "tiny_engine:TinyEngine", "config": config, "replica_cpus": 0.1,
        "profile": PROFILE, "kind": "own",
    }, os.environ | {"PYTHONPATH": os.pathsep.join(path)}  # fmt: skip


@pytest.mark.integration
def test_a_local_ray_ends_with_its_gateway_at_once_at_a_second_signal(tmp_path):
    port, errors = free_port(), tmp_path / "stderr"
    pool, env = a_pool_of_ours(tmp_path)
    limits = {"drain_s": 120, "max_output_tokens": 16_000}
    with errors.open("w") as stderr:
        cluster = a_cluster_file(tmp_path, pool, limits=limits)
        options = {"cluster": cluster, "env": env, "stderr": stderr, "ends": False}
        with deployed("--port", port, **options) as (_, process):
            started = offspring(process, "")
            cut_short(process, port, max_tokens=16_000, ignore_eos=True)
            assert process.wait() == 0
    wait_until(lambda: not any(is_there(one) for one in started))
    assert "1 answers are cut" in errors.read_text()
    for noise in ("_ask_to_drain", "retries remaining", "ray.kill", "Traceback", "not drained"):
        assert noise not in errors.read_text()


def cut_short(process, port, **fields):
    """Begin a stream, and press Ctrl-C twice."""
    body = {"model": "m", "prompt": "abc", "stream": True} | fields
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: health(port) == "draining")
        process.send_signal(signal.SIGINT)
        assert "the gateway ended before the answer did" in "".join(lines)


def is_there(process):
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.integration
def test_a_gateway_that_is_killed_is_back_and_without_its_ray_deploy_ends_with_an_error(tmp_path):
    port = free_port()
    pool, env = a_pool_of_ours(tmp_path)
    cluster = a_cluster_file(tmp_path, pool)
    command = [sys.executable, DEPLOY, "--cluster", str(cluster), "--port", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        watchdog, left = threading.Timer(180, process.kill), []
        watchdog.start()
        try:
            assert process.stdout.readline().startswith("serving")
            left = offspring(process, "")
            assert not offspring(process, "ProxyActor")
            (gateway,) = offspring(process, f"ray::ServeReplica:{APP_NAME}:{GATEWAY}")
            gateway.kill()
            wait_until(lambda: not gateway.is_running())
            wait_until(lambda: answers(port), 30.0)
            for raylet in offspring(process, "/raylet"):
                raylet.kill()
            assert process.wait() == 1
            assert "nothing is served any more" in process.stderr.read()
        finally:
            watchdog.cancel()
            process.kill()
            for one in left:
                with suppress(psutil.NoSuchProcess):
                    one.kill()


def answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def a_slow_endpoint(num_tokens, every_s):
    """An endpoint in a process of its own; yield its URL."""
    code = """
import asyncio, sys
from unit.stub_endpoint import Stub, an_event, DONE
async def main():
    stub = Stub()
    async def answer(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\n\\r\\n")
        for number in range(int(sys.argv[1])):
            writer.write(an_event("a"))
            await writer.drain()
            await asyncio.sleep(float(sys.argv[2]))
        writer.write(an_event("", "stop") + DONE)
        await writer.drain()
        raise ConnectionError
    stub._answer = answer
    server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
    command = [sys.executable, "-c", code, str(num_tokens), str(every_s)]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.mark.integration
def test_sigterm_cuts_no_stream_and_lets_nothing_in_meanwhile(tmp_path):
    num, port = 40, free_port()
    with a_slow_endpoint(num, 0.25) as endpoint:
        file = a_cluster_file(tmp_path, endpoints_at(endpoint), limits={"drain_s": 120})
        body = {"model": "m", "prompt": "a", "stream": True, "max_tokens": num}
        lines = []

        def stream():
            url = f"http://127.0.0.1:{port}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=60) as answer:
                lines.extend(line for line in answer.iter_lines() if line)

        with deployed("--port", port, cluster=file, ends=False) as (_, process):
            asking = [threading.Thread(target=stream) for _ in range(8)]
            for one in asking:
                one.start()
            in_flight = 'tokenyard_requests_in_flight{pool="theirs"}'
            wait_until(lambda: shown(port).get(in_flight) == "8.0")
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: health(port) == "draining")
            refused = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30)
            assert refused.status_code == 503
            for one in asking:
                one.join()
            assert process.wait() == 0
        assert lines.count("data: [DONE]") == 8
        assert sum('"text": "a"' in line for line in lines) == 8 * num


@pytest.mark.integration
def test_a_second_signal_cuts_what_is_not_answered_and_says_so(tmp_path):
    port, errors = free_port(), tmp_path / "stderr"
    with a_slow_endpoint(1000, 0.25) as endpoint, errors.open("w") as stderr:
        file = a_cluster_file(tmp_path, endpoints_at(endpoint), limits={"drain_s": 120})
        options = {"cluster": file, "ends": False, "stderr": stderr}
        with deployed("--port", port, **options) as (_, process):
            cut_short(process, port, max_tokens=1000)
            assert process.wait() == 0
    assert "1 answers are cut" in errors.read_text()


def shown(port):
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def health(port):
    return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=30).json()["status"]


def wait_until(condition, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--policy", "gone.npz"], "policy file gone.npz does not exist"),
        (["--policy", "seed"], "unknown policy 'seed'"),
        (["--policy", "sed", "--explore", "0.5"], "explore fraction 0.5"),
        (
            ["--policy", "sed", "--decision-log", "/dev/null/log"],
            "log /dev/null/log: Not a directory",
        ),
    ],
)
def test_deploy_refuses_to_start_with_one_sentence(args, reason):
    sentence = refusal(deploy, *DECIDE_ONLY, "--port", free_port(), *args)
    assert reason in sentence
    assert sentence.startswith("error: ")


def test_deploy_refuses_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sentence = refusal(deploy, *DECIDE_ONLY, "--policy", "sed", "--port", port)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in sentence
