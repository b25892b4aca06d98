"""Every benchmark runs, on little work, and writes the rows that others script against.

`benchmarks/gpu` and `rival_parity` have files of their own.
"""

import json
import os
import subprocess
import sys

import pytest
import yaml
from scripts import ROOT, call, load_script
from unit.tiny_tokenizer import save_tiny_tokenizer

BENCHMARKS = ROOT / "benchmarks"
FLEET = "azure_code_slo"
HERE = [
    (
        ["env_throughput.py", "--episode-requests", "20", "--repetitions", "1"],
        {"env", "implementation", "num_envs", "env_steps_per_cpu_s"},
    ),
    (
        ["decision_latency.py", "--num-replicas", "3", "8", "--decisions", "20"],
        {"policy", "num_replicas", "p50_us", "p99_us"},
    ),
    (
        [
            *("gateway_decision.py", "--scenario", FLEET, "--policies", "champion"),
            *("--num-replicas", "4", "--waiting", "2", "--decisions", "20", "--estimated"),
        ],
        {"policy", "num_replicas", "pick_cpu_p50_us", "pick_p99_us", "close_cpu_p50_us"},
    ),
    (
        ["never_worse.py", "--draws", "1", "--policies", "marginal_delay", "--workers", "1"],
        {"draw", "policy"},
    ),
]
"""Arguments, and keys of every row."""
WITH_A_RAY = [
    (
        [
            *("training_throughput.py", "--algorithms", "a2c", "--slice-fraction", "0.05"),
            *("--budget-cpu-s", "0.1", "--least-slices", "2", "--validation-streams", "1"),
        ],
        {"trainer", "algorithm", "env_steps_per_cpu_s", "seconds_to_baseline"},
    ),
    (
        [
            *("training_throughput.py", "--problem", "allocation", "--algorithms", "a2c"),
            *("--slice-fraction", "0.05", "--budget-cpu-s", "0", "--least-slices", "2"),
        ],
        {"trainer", "algorithm", "env_steps_per_cpu_s", "cost_per_hour"},
    ),
]
OTHERS = {
    "gateway_throughput.py",
    "live_sessions.py",
    "rival_parity.py",
    "soak.py",
}
"""What has a test of its own."""


def rows_of(path, keys):
    """The rows of a file, each of which has the keys, and what is a number there above zero."""
    result = json.loads(path.read_text(encoding="utf-8"))
    assert {"command", "versions", "seed", "git_sha"} <= set(result)
    assert result["rows"]
    assert all(keys <= set(row) for row in result["rows"])
    values = [row[key] for row in result["rows"] for key in keys - {"draw"}]
    # None: the goal was not reached within the budget.
    assert all(value > 0 for value in values if not isinstance(value, str | bool | None))
    return result["rows"]


def named(case):
    return "-".join(word.removesuffix(".py") for word in case[0][:3] if not word.startswith("--"))


def run(command, keys, path):
    script, *arguments = command
    call(load_script(f"benchmarks/{script}"), *arguments, "--json", path)
    return rows_of(path, keys)


def test_every_benchmark_has_a_short_form_here():
    scripts = {
        path.name for path in BENCHMARKS.glob("*.py") if "\nif __name__" in path.read_text("utf-8")
    }
    assert scripts == {command[0] for command, _ in HERE + WITH_A_RAY} | OTHERS


@pytest.fixture
def beside(monkeypatch):
    """As for a script, which finds the modules that lie beside it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize(("command", "keys"), HERE, ids=map(named, HERE))
def test_a_benchmark_writes_rows_with_the_documented_keys(command, keys, beside, tmp_path):
    run(command, keys, tmp_path / "rows.json")


@pytest.mark.parametrize(("command", "keys"), WITH_A_RAY, ids=map(named, WITH_A_RAY))
def test_a_benchmark_with_a_ray_of_its_own_writes_them_too(
    command, keys, own_ray, beside, monkeypatch, tmp_path
):
    # They set it, for what they start.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    run(command, keys, tmp_path / "rows.json")


@pytest.mark.integration
def test_the_start_of_a_gateway_is_measured_without_anything_else(tmp_path):
    path = tmp_path / "rows.json"
    command = [sys.executable, ROOT / "benchmarks/gateway_throughput.py", "--starts", "1"]
    subprocess.run([*command, "--json", path], check=True, capture_output=True)
    keys = {"cpu_s", "start_s", "rss_mb", "pss_mb", "processes", "stop_s"}
    (row,) = rows_of(path, keys)
    assert row["processes"] == 1
    assert row["rss_mb"] < 400, "something large is imported"


@pytest.mark.integration
def test_the_data_path_is_measured_beside_the_stub(tmp_path):
    path = tmp_path / "rows.json"
    short = ["--servers", "endpoints", "--repeats", "1", "--block-s", "1", "--clients", "2"]
    command = [sys.executable, BENCHMARKS / "gateway_throughput.py", *short, "--streams", "2"]
    subprocess.run([*command, "--json", path], check=True, capture_output=True)
    rows = rows_of(path, {"gateway", "clients", "stream"})
    found = [(row["gateway"], row["stream"]) for row in rows]
    assert found == [(name, kind) for kind in (False, True) for name in ("stub", "tokenyard")]
    keys = {"requests_per_s", "added_p50_ms", "added_p99_ms", "cpu_ms_per_request"}
    assert all(keys | {"cpu_ms_per_token"} <= set(row) for row in rows)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """URL of a gateway that `soak` has started, before two replicas of a tiny engine."""
    folder = tmp_path_factory.mktemp("served")
    model = save_tiny_tokenizer(folder / "model")
    config = {"model": model, "device": "cpu", "rank_cpus": 0.1}
    pool = {
        "name": "tiny", "kind": "own", "engine": "tiny_engine:TinyEngine", "config": config,
        "replicas": 2, "replica_cpus": 0.1,
    }  # fmt: skip
    cluster = {"name": "b", "description": "b", "served_model": "m", "pools": [pool]}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster))
    tests = ROOT / "tests"
    path = [str(tests / "integration"), str(tests), os.environ.get("PYTHONPATH", "")]
    soak = load_script("benchmarks/soak.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        with soak.served(soak.Args(cluster=str(file))) as args:
            yield args.url


@pytest.mark.integration
def test_a_soak_counts_what_was_asked_broken_and_lost(served, tmp_path):
    path = tmp_path / "rows.json"
    short = ["--minutes", "0.1", "--warm-up-minutes", "0", "--bin-s", "1", "--rate-per-s", "10"]
    faults = ["--fault-every-s", "2", "--change-every-s", "0.5", "--json", path]
    call(load_script("benchmarks/soak.py"), "--url", served, *short, *faults)
    (row,) = rows_of(path, {"minutes", "memory_first_mb", "threads_last", "p99_first_half_s"})
    assert row["requests"] == 60
    assert row["answered"] + row["told_why"] + row["lost"] == 60
    assert row["faults_kill"] >= 1
    assert row["changes"] > 0


@pytest.mark.integration
def test_a_benchmark_is_a_command(tmp_path):
    path = tmp_path / "rows.json"
    command = [sys.executable, ROOT / "benchmarks/decision_latency.py", "--num-replicas", "3"]
    command += ["--decisions", "1", "--json", path]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    assert json.loads(path.read_text(encoding="utf-8"))["rows"]
