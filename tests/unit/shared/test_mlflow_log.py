from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from integration.toy_sweeps import toy_trial
from mlflow import MlflowClient
from mlflow.entities import Metric

from tokenyard import registry
from tokenyard.artifact import RegistryError, model_name
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.metadata import ArtifactMetadata
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tune_configs import mlflow_log

MODEL = "tokenyard-routing-poisson_085"
LOAD = PolicyArtifact.load


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    return MlflowClient(f"sqlite:///{folder}/mlflow.db")


@pytest.fixture
def experiment_id(client, tmp_path):
    return registry.open_experiment(client, tmp_path.name)


class FakeTrial:
    """The few attributes of a Tune trial that the log reads."""

    def __init__(self, trial_id, checkpoint_steps=None):
        self.trial_id = trial_id
        self.config = toy_trial("fast")
        self.latest_checkpoint_result = None
        if checkpoint_steps is not None:
            result = type("Result", (), {"metrics": {"timesteps_total": checkpoint_steps}})
            self.latest_checkpoint_result = result()

    def __str__(self):
        return "fast none seed 0"


def a_policy(weight, trainer="policy_search"):
    metadata = ArtifactMetadata(
        kind="marginal",
        scenario="poisson_085",
        trainer=trainer,
        num_replicas=3,
        slo_response_s=2.0,
        mean_total_tokens=2_000.0,
        output_length="by_context",
    )
    return PolicyArtifact(metadata, {"weights": np.full(NUM_MARGINAL_WEIGHTS, weight)})


def test_only_what_a_trial_reported_becomes_a_metric():
    result = {
        "eval/score": -1.5,
        "train/entropy_nats": np.float32(0.5),
        "no_data": math.nan,
        "timesteps_total": 4000,
        "time_total_s": 12.0,
        "pid": 17,
        "done": False,
        "trial_id": "29326_00003",
        "config": {"seed": 3},
    }
    kept = mlflow_log.metrics_of(result)
    assert kept == {"eval/score": -1.5, "train/entropy_nats": 0.5, "system/wall_s": 12.0}


def test_a_sweep_has_one_parent_run_however_often_it_is_opened(client, experiment_id):
    opened = {
        mlflow_log.open_sweep_run(client, experiment_id, "/store/one", "one", {"seed": "0"})
        for _ in range(3)
    }
    other = mlflow_log.open_sweep_run(client, experiment_id, "/store/two", "two", {})
    assert len(opened) == 1
    assert other not in opened


def test_a_sweep_is_found_in_a_folder_with_an_apostrophe(client, experiment_id):
    path = "/home/o'neil/runs/one"
    opened = mlflow_log.open_sweep_run(client, experiment_id, path, "one", {})
    assert mlflow_log.find_sweep_run(client, experiment_id, path).info.run_id == opened


def hyperparameters(config):
    return {"gamma": 0.5, "reward.slo": -2.0}


def report(log, trial, steps):
    log.on_trial_result(0, [], trial, {"timesteps_total": steps, "eval/score": float(steps)})


def test_a_trial_that_restarts_keeps_its_run_and_loses_what_came_after_its_checkpoint(
    client, experiment_id
):
    parent = mlflow_log.open_sweep_run(client, experiment_id, "/store/restart", "restart", {})
    log = mlflow_log.TrialLog(client.tracking_uri, parent, {}, hyperparameters)
    before = FakeTrial("abc_00001")
    log.on_trial_start(0, [], before)
    for steps in (1000, 2000, 3000):
        report(log, before, steps)
    resumed = pickle.loads(pickle.dumps(log))
    after = FakeTrial("abc_00001", checkpoint_steps=1000)
    resumed.on_trial_start(0, [], after)
    report(resumed, after, 2500)
    resumed.on_trial_complete(0, [], after)
    runs = client.search_runs([experiment_id], "tags.`tokenyard.trial_id` = 'abc_00001'")
    assert len(runs) == 1
    assert runs[0].info.status == "FINISHED"
    curve = mlflow_log.learning_curve(client, runs[0].info.run_id, "eval/score")
    assert curve == [(1000, 1000.0), (2500, 2500.0)]
    assert runs[0].data.params["algorithm"] == "fast"
    assert runs[0].data.params["reward.slo"] == "-2.0"
    assert list(mlflow_log.trial_runs(client, parent)) == ["abc_00001"]


@pytest.mark.parametrize("name", ["run two", "it's 100 % _new"])
def test_a_store_that_was_moved_finds_its_runs_and_artifacts_again(tmp_path, name):
    old, new = tmp_path / "run one", tmp_path / name
    beside = tmp_path / "run one more"
    old.mkdir()
    client = MlflowClient(f"sqlite:///{old}/mlflow.db")
    mlflow_log.follow_move(client, old)
    experiment_id = registry.open_experiment(client, "tokenyard-routing")
    parent = mlflow_log.open_sweep_run(client, experiment_id, f"{old}/s1", "s1", {})
    other = mlflow_log.open_sweep_run(client, experiment_id, f"{beside}/s1", "s1", {})
    registry.log_artifact(client, parent, a_policy(1.0))
    registry.register(client, MODEL, parent, a_policy(1.0), lambda: True)
    log = pickle.dumps(mlflow_log.TrialLog(client.tracking_uri, parent, {}, hyperparameters))
    old.rename(new)

    client = MlflowClient(f"sqlite:///{new}/mlflow.db")
    for _ in range(2):
        mlflow_log.follow_move(client, new)

    experiment = client.get_experiment_by_name("tokenyard-routing")
    assert experiment.artifact_location == (new / "mlartifacts").as_uri()
    found = mlflow_log.find_sweep_run(client, experiment_id, f"{new}/s1")
    assert found.info.run_id == parent
    assert found.info.artifact_uri.startswith((new / "mlartifacts").as_uri())
    assert mlflow_log.find_sweep_run(client, experiment_id, f"{beside}/s1").info.run_id == other
    champion = registry.mlflow_lookup(client.tracking_uri)(MODEL)
    assert LOAD(champion.path).arrays["weights"][0] == 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow_log.TrialLog, "resumed_uri", client.tracking_uri)
        resumed = pickle.loads(log)
    resumed.on_trial_start(0, [], FakeTrial("abc_00009"))
    assert list(mlflow_log.trial_runs(client, parent)) == ["abc_00009"]
    assert not old.exists()


def test_nothing_is_replaced_where_nothing_has_to_go(client, experiment_id):
    run = client.create_run(experiment_id)
    client.log_batch(run.info.run_id, metrics=[Metric("eval/score", 1.0, 0, 1000)])
    run = client.get_run(run.info.run_id)
    assert mlflow_log.truncate(client, run, 1000).info.run_id == run.info.run_id


def test_a_failed_trial_ends_as_failed(client, experiment_id):
    parent = mlflow_log.open_sweep_run(client, experiment_id, "/store/failed", "failed", {})
    log = mlflow_log.TrialLog(client.tracking_uri, parent, {}, hyperparameters)
    trial = FakeTrial("abc_00002")
    log.on_trial_start(0, [], trial)
    log.on_trial_error(0, [], trial)
    assert mlflow_log.trial_runs(client, parent)["abc_00002"].info.status == "FAILED"


def log_policy(client, experiment_id, policy):
    run_id = client.create_run(experiment_id).info.run_id
    registry.log_artifact(client, run_id, policy)
    return run_id


def test_the_champion_alias_moves_only_to_what_is_accepted(client, experiment_id):
    def enter(policy, accepted):
        run_id = log_policy(client, experiment_id, policy)
        return registry.register(client, MODEL, run_id, policy, lambda: accepted)

    def aliases():
        return registry.aliases_of(client, MODEL)

    refused = enter(a_policy(0.0, "ppo"), accepted=False)
    assert refused.alias == "candidate"
    assert aliases() == {"candidate": refused.version}
    first = enter(a_policy(0.1, "dqn"), accepted=True)
    assert first.alias == "champion"
    second = enter(a_policy(0.2, "a2c"), accepted=True)
    # What was offered last can always be served as such.
    assert aliases() == {
        "champion": second.version, "candidate": second.version, "previous": first.version
    }  # fmt: skip
    found = registry.mlflow_lookup(client.tracking_uri)(MODEL)
    assert (found.version, found.run_id) == (second.version, second.run_id)
    assert LOAD(found.path).sha256 == second.sha256 == a_policy(0.2, "a2c").sha256


def test_a_champion_that_comes_while_another_is_judged_has_to_be_beaten_too(client, experiment_id):
    model, late, early = "tokenyard-routing-two-sweeps", a_policy(0.4), a_policy(0.5)
    beaten = []

    def accepted():
        champion = registry.version_of(client, model)
        beaten.append(champion and champion.version)
        if len(beaten) == 1:
            # Another sweep ends meanwhile.
            run_id = log_policy(client, experiment_id, early)
            registry.register(client, model, run_id, early, lambda: True)
        return champion is None

    made = registry.register(client, model, log_policy(client, experiment_id, late), late, accepted)
    champion = registry.version_of(client, model)
    assert beaten == [None, champion.version]
    assert made.alias == "candidate"
    assert champion.version != made.version


def test_registering_the_same_policy_again_makes_no_second_version(client, experiment_id):
    policy = a_policy(0.3)
    run_id = log_policy(client, experiment_id, policy)
    asked = []
    made = {
        registry.register(
            client, "tokenyard-routing-again", run_id, policy, lambda: asked.append(1) or True
        )
        for _ in range(2)
    }
    assert len(made) == 1
    assert asked == [1], "a champion has not to beat itself"


@pytest.mark.parametrize("scenario", ["eu:prod", "eu/prod", "o'neil's", "70 %"])
def test_a_scenario_of_any_name_has_a_model(client, experiment_id, scenario):
    policy = a_policy(0.6)
    run_id = log_policy(client, experiment_id, policy)
    registry.register(client, model_name("routing", scenario), run_id, policy, lambda: True)
    found = registry.find_registered(client.tracking_uri, "routing", scenario)
    assert LOAD(found.path).sha256 == policy.sha256


def test_a_store_that_is_not_there_is_not_made(tmp_path):
    missing = f"sqlite:///{tmp_path}/none.db"
    assert registry.is_missing(missing)
    assert registry.mlflow_lookup(missing)(MODEL) is None
    assert not list(tmp_path.iterdir())


def test_a_store_that_is_no_database_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "bad.db").write_text("no database at all, for sure")
    with pytest.raises(RegistryError, match=r"^registry sqlite:.*bad\.db: .*not a database$"):
        registry.mlflow_lookup(f"sqlite:///{tmp_path}/bad.db")(MODEL)


def test_without_a_model_there_is_no_champion(client):
    assert registry.version_of(client, "tokenyard-routing-nothing") is None


def test_what_no_sweep_has_logged_lies_beside_its_store(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    uri = f"sqlite:///{tmp_path}/store/mlflow.db"
    (tmp_path / "store").mkdir()
    registry.offer(registry.connect(uri), MODEL, a_policy(0.4))
    registry.enter(uri, MODEL, a_policy(0.5), {})
    monkeypatch.chdir(tmp_path)
    elsewhere.rmdir()  # Nothing is there.
    found = registry.mlflow_lookup(uri, "candidate")(MODEL)
    assert found.path.is_relative_to(tmp_path / "store")
