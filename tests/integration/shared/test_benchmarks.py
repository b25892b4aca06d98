"""The benchmarks run as documented and write the rows that others script against."""

import json
import subprocess
import sys

import pytest
from scripts import ROOT, call, load_script


def check_rows(path, keys):
    result = json.loads(path.read_text(encoding="utf-8"))
    assert {"command", "versions", "seed", "git_sha"} <= set(result)
    assert all(keys <= set(row) for row in result["rows"])
    numbers = [value for row in result["rows"] for value in row.values()]
    # None: the goal was not reached within the budget.
    assert all(number > 0 for number in numbers if not isinstance(number, str | None))


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (
            ["env_throughput.py", "--episode-requests", "20", "--repetitions", "1"],
            {"env", "implementation", "num_envs", "env_steps_per_cpu_s"},
        ),
        (
            ["decision_latency.py", "--num-replicas", "3", "8", "--decisions", "20"],
            {"policy", "num_replicas", "p50_us", "p99_us"},
        ),
    ],
)
def test_a_benchmark_writes_rows_with_the_documented_keys(command, keys, tmp_path):
    script, *arguments = command
    call(load_script(f"benchmarks/{script}"), *arguments, "--json", tmp_path / "rows.json")
    check_rows(tmp_path / "rows.json", keys)


@pytest.mark.parametrize(
    ("command", "keys"),
    [
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
    ],
)
def test_a_benchmark_with_a_ray_of_its_own_writes_them_too(
    command, keys, own_ray, monkeypatch, tmp_path
):
    script, *arguments = command
    # They set it, for what they start.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    call(load_script(f"benchmarks/{script}"), *arguments, "--json", tmp_path / "rows.json")
    check_rows(tmp_path / "rows.json", keys)


def test_ppo_and_search_are_compared_run_by_run(own_ray, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RAY_worker_niceness", "0")
    script, path = load_script("benchmarks/ppo_and_search.py"), tmp_path / "rows.json"
    small = ["--scenario", "poisson_085", "local_cpu", "--budget-cpu-s", "0.3", "--seeds", "1"]
    small += ["--checkpoints", "2", "--validation-streams", "1", "--streams", "5", "--json", path]
    call(script, *small, "--trainers", "policy_search")
    call(script, *small, "--trainers", "policy_search", "ppo", "ppo_after_search")
    result = json.loads(path.read_text(encoding="utf-8"))
    keys = {"cpu_s", "env_steps", "score", "mean_response_s", "p99_response_s"}
    keys |= {"slo_violation_fraction", "delta_score_to_rule", "delta_p99_fraction_to_rule"}
    assert all(keys <= set(row) for row in result["rows"])
    assert all(row["cpu_s"] >= 0.3 for row in result["rows"])
    # What the file had already was not run again.
    runs = [(row["cell"], row["trainer"]) for row in result["rows"]]
    assert len(runs) == len(set(runs)) == 6
    summary = {(row["cell"], row["trainer"]): row for row in result["cells"]}
    for cell in ("poisson_085", "local_cpu"):
        less = summary[cell, "ppo"]["score"] - summary[cell, "policy_search"]["score"]
        assert summary[cell, "ppo"]["delta_score_to_search"] == pytest.approx(less)


@pytest.mark.integration
def test_the_start_of_a_gateway_is_measured_without_anything_else(tmp_path):
    path = tmp_path / "rows.json"
    command = [sys.executable, ROOT / "benchmarks/gateway_throughput.py", "--starts", "1"]
    subprocess.run([*command, "--json", path], check=True, capture_output=True)
    check_rows(path, {"cpu_s", "start_s", "rss_mb", "pss_mb", "processes", "stop_s"})
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert row["processes"] == 1
    assert row["rss_mb"] < 400, "something large is imported"


@pytest.mark.integration
def test_a_benchmark_is_a_command(tmp_path):
    path = tmp_path / "rows.json"
    command = [sys.executable, ROOT / "benchmarks/decision_latency.py", "--num-replicas", "3"]
    command += ["--decisions", "1", "--json", path]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    assert json.loads(path.read_text(encoding="utf-8"))["rows"]
