"""A sweep is killed in the middle, moved, resumed to its end, and looked at in the browser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from scripts import call, refusal

from pipelines import sweep
from tokenyard import registry
from tokenyard.routing.artifact import PolicyArtifact, best_tuned_rule
from tune_configs import mlflow_log
from tune_configs.sweep import open_chain

REPOSITORY = Path(__file__).parents[3]
NUM_TRIALS = 4
BUDGET = 30_000


def sweep_process(storage, *arguments, step_s="0.01", start=subprocess.run, **options):
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")
    }
    path = os.pathsep.join(map(str, (Path(__file__).parents[1], REPOSITORY)))
    environment |= {"PYTHONPATH": path, "TOY_STEP_S": step_s}
    command = [sys.executable, "pipelines/sweep.py", *arguments, "--storage", str(storage)]
    return start(command, cwd=REPOSITORY, env=environment, text=True, **options)


@pytest.fixture
def run_sweep(monkeypatch, own_ray):
    """A sweep in this process, from its command line; it must end well."""
    path = os.pathsep.join(map(str, (Path(__file__).parents[1], REPOSITORY)))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def run(storage, *arguments):
        with pytest.raises(SystemExit) as ended:
            call(sweep, *arguments, "--storage", storage)
        assert ended.value.code == 0

    return run


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "moved here"


@pytest.fixture(scope="module")
def client(killed_and_resumed, storage):
    del killed_and_resumed
    return MlflowClient(f"sqlite:///{storage}/mlflow.db")


def runs_with_a_curve(client):
    experiment = client.get_experiment_by_name("tokenyard-routing")
    if experiment is None:
        return []
    runs = client.search_runs([experiment.experiment_id])
    return [run for run in runs if "eval/score" in run.data.metrics]


def wait_for(condition, seconds, process=None):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing after {seconds} s"
        assert process is None or process.poll() is None, "the process ended too early"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def killed_and_resumed(storage, own_ray):
    """Results of a sweep that got a kill -9 when trials had made progress, and was resumed.

    Between the two it is moved, with its MLflow store in it.
    """
    begun = storage.with_name("run one")
    client = MlflowClient(f"sqlite:///{begun}/mlflow.db")
    process = sweep_process(
        begun, "toy_sweeps:long", "--name", "long",
        step_s="0.5", start=subprocess.Popen,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for((begun / "mlflow.db").exists, 120, process)
        wait_for(lambda: len(runs_with_a_curve(client)) >= 2, 120, process)
        time.sleep(3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = {run.data.tags["tokenyard.trial_id"] for run in runs_with_a_curve(client)}
    begun.rename(storage)
    done = sweep_process(
        storage, "toy_sweeps:long", "--name", "long", "--resume",
        "--json", str(storage / "long.json"), capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert not begun.exists(), "nothing is written to where it was"
    return before, done.stdout, json.loads((storage / "long.json").read_text())


def test_a_killed_sweep_resumes_and_completes_every_trial(killed_and_resumed):
    before, _, result = killed_and_resumed
    rows = result["rows"]
    assert len(before) >= 2
    assert len(rows) == NUM_TRIALS
    assert all(row["env_steps"] == BUDGET for row in rows)


def test_a_resumed_sweep_has_one_run_per_trial_under_one_parent(killed_and_resumed, client):
    before, _, _ = killed_and_resumed
    experiment = client.get_experiment_by_name("tokenyard-routing")
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if mlflow_log.SWEEP_TAG in run.data.tags]
    assert len(parents) == 1
    children = mlflow_log.trial_runs(client, parents[0].info.run_id)
    assert len(runs) == 1 + NUM_TRIALS
    assert len(children) == NUM_TRIALS
    assert before <= set(children)
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_curves_of_a_resumed_sweep_pass_every_step_once(killed_and_resumed, client):
    del killed_and_resumed
    runs = [run for run in runs_with_a_curve(client) if mlflow_log.TRIAL_TAG in run.data.tags]
    for run in runs:
        curve = mlflow_log.learning_curve(client, run.info.run_id, "eval/score")
        assert [step for step, _ in curve] == list(range(1_000, BUDGET + 1, 1_000))
        assert set(run.data.metrics) == {"eval/score", "system/wall_s"}


def test_the_result_gives_the_verdict_and_keeps_the_agreed_keys(killed_and_resumed):
    _, stdout, result = killed_and_resumed
    # It is shortest expected delay, and what ships is better.
    assert f"candidate: it does not beat {best_tuned_rule('poisson_085')}" in stdout
    assert "--scenario poisson_085 --registry sqlite:" in stdout
    assert "--policy candidate" in stdout
    assert result["verdict"][0]["rival"] == best_tuned_rule("poisson_085")
    assert {"command", "versions", "seed", "git_sha", "rows"} <= set(result)
    agreed = {
        "problem", "algorithm", "trial", "seed", "reward_weights", "score", "env_steps", "wall_s",
        "mean_response_s", "p99_response_s", "slo_violation_fraction", "goodput_per_s",
        "delta_mean_fraction", "delta_mean_ci_low", "delta_mean_ci_high", "sha256", "registered",
    }  # fmt: skip
    for row in result["rows"]:
        assert agreed <= set(row)
        assert row["score"] == pytest.approx(result["rows"][0]["score"])
    assert {row["policy"] for row in result["baselines"]} == {"sed", "round_robin"}
    assert len(result["evaluation"]) == 2


def test_the_parent_run_tells_the_story(killed_and_resumed, client):
    _, _, result = killed_and_resumed
    experiment = client.get_experiment_by_name("tokenyard-routing")
    parent = mlflow_log.find_sweep_run(
        client, experiment.experiment_id, mlflow_path(client, experiment)
    )
    note = parent.data.tags["mlflow.note.content"]
    for text in (
        "4 trials (2 fast, 2 slow) learned routing on `poisson_085`",
        f"is a candidate and not champion**: it does not beat {best_tuned_rule('poisson_085')}",
        "| `fast none seed 0` | 30,000 |",
        "| the rule |",
        "Next: `python pipelines/deploy.py --cluster none --scenario poisson_085",
    ):
        assert text in note
    metrics = parent.data.metrics
    assert metrics["eval/best_score"] == pytest.approx(result["rows"][0]["score"])
    gain = metrics["eval/best_score"] - metrics["eval/rule_score"]
    assert metrics["eval/gain"] == pytest.approx(gain, abs=1e-9)
    assert metrics["eval/gain_ci_low"] <= metrics["eval/gain"] <= metrics["eval/gain_ci_high"]
    assert {"eval/trials_above_rule", "system/wall_s", "system/cpu_s"} <= set(metrics)
    paths = {
        item.path
        for folder in (None, "tables", "figures")
        for item in client.list_artifacts(parent.info.run_id, folder)
    }
    assert {
        "experiment.json", "provenance.json", "tables/ranking.json", "tables/evaluation.json",
        "tables/verdict.json",
    } <= paths  # fmt: skip
    figures = {path for path in paths if path.endswith(".png")}
    assert figures == {
        f"figures/{name}.png" for name in ("comparison", "learning_curves", "pareto")
    }
    assert all(f"path={path}&run_uuid={parent.info.run_id}" in note for path in figures)


def mlflow_path(client, experiment):
    runs = client.search_runs([experiment.experiment_id])
    return next(
        run.data.tags[mlflow_log.SWEEP_TAG] for run in runs if mlflow_log.SWEEP_TAG in run.data.tags
    )


@pytest.mark.parametrize(
    ("reference", "name", "resume", "reason"),
    [
        ("toy_sweeps:long", "long", False, "exists already"),
        ("toy_sweeps:tiny", "long", True, "runs toy_sweeps:long"),
        ("toy_sweeps:tiny", "none", True, "no sweep to resume"),
    ],
)
def test_a_sweep_that_cannot_be_opened_says_why(
    killed_and_resumed, storage, monkeypatch, reference, name, resume, reason
):
    del killed_and_resumed
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ValueError, match=reason):
        open_chain(reference, str(storage), name, resume=resume)


def test_a_moved_sweep_whose_store_is_another_says_what_to_do(
    killed_and_resumed, storage, monkeypatch, tmp_path
):
    del killed_and_resumed
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    reason = "no run of sqlite:.*other.db is of the sweep at .*: name the store .*tokenyard.sweep"
    with pytest.raises(ValueError, match=reason):
        open_chain("toy_sweeps:long", str(storage), "long", resume=True)


def test_the_smallest_sweep_registers_a_network_for_any_number_of_replicas(run_sweep, tmp_path):
    result_file = tmp_path / "smoke.json"
    run_sweep(tmp_path, "routing:smoke", "--name", "smoke", "--json", result_file)
    result = json.loads(result_file.read_text())
    rows = {row["algorithm"]: row for row in result["rows"]}
    assert rows.keys() == {"ppo", "policy_search"}
    assert rows["ppo"]["env_steps"] >= 8_000
    rules = {rule["policy"]: rule for rule in result["baselines"]}
    # What has hardly learned is still about the rule that it corrects.
    assert all(row["score"] > rules["round_robin"]["score"] for row in rows.values())
    assert rules[best_tuned_rule("local_cpu")]["delta_mean_fraction"] == 0.0
    lookup = registry.mlflow_lookup(f"sqlite:///{tmp_path}/mlflow.db", registry.CANDIDATE)
    swept = PolicyArtifact.load(lookup(result["registrations"][0]["model"]).path)
    assert swept.metadata.num_replicas is None
    assert swept.metadata.kind in ("corrected", "marginal")


def test_networks_of_random_weights_are_trained_beside_a_rule(run_sweep, tmp_path):
    result_file = tmp_path / "scratch.json"
    short = ["--budget", "0.002", "--json", result_file]
    run_sweep(tmp_path, "routing:from_scratch", *short)
    result = json.loads(result_file.read_text())
    assert {row["algorithm"] for row in result["rows"]} == {"ppo", "a2c", "dqn"}
    assert {"sed", "marginal_delay"} <= {rule["policy"] for rule in result["baselines"]}


@pytest.mark.parametrize("resumed", [pytest.param(False, marks=pytest.mark.smoke), True])
def test_a_sweep_on_an_fsspec_store_is_found_there_again(resumed, run_sweep, monkeypatch, tmp_path):
    # pyarrow does not know `local://`, so this takes the way of az:// or sftp://.
    store, result_file = f"local://{tmp_path}/runs", tmp_path / "tiny.json"
    arguments = ("toy_sweeps:tiny", "--name", "tiny", "--json", result_file)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run_sweep(store, *arguments)
    first = json.loads(result_file.read_text())["rows"]
    assert len(first) == NUM_TRIALS
    assert list((tmp_path / "runs/tiny").glob("*/checkpoint_*/artifact.npz"))
    if resumed:
        run_sweep(store, *arguments, "--resume")
        assert json.loads(result_file.read_text())["rows"] == first


def test_a_wrong_command_ends_with_one_sentence(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    sentence = refusal(sweep, "toy_sweeps:missing", "--storage", tmp_path)
    assert sentence.startswith("error: module 'toy_sweeps' has no")
