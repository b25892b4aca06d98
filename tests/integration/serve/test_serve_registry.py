"""Champions from a real MLflow registry."""

import asyncio
from pathlib import Path

import mlflow
import numpy as np
import pytest
from unit.serve_builders import linear_artifact

import tokenyard
from serve_app.allocation.plans import load_plan_policy
from serve_app.cluster import CircuitBreakerSettings
from serve_app.policy.loading import resolve_policy
from serve_app.policy.manager import PolicyManager
from tokenyard.allocation.artifact import champion_or_planner
from tokenyard.allocation.plans import load_allocation
from tokenyard.artifact import ArtifactError
from tokenyard.registry import mlflow_lookup, offer, settle

MODEL = "tokenyard-routing-poisson_085"


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('registry') / 'mlflow.db'}"


@pytest.fixture(scope="module")
def client(uri):
    return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


@pytest.fixture(autouse=True)
def no_model(client):
    """Each test begins without the model, as any of them may run first, or alone."""
    yield
    if client.search_registered_models(f"name = '{MODEL}'"):
        client.delete_registered_model(MODEL)


def a_version(client, folder):
    client.create_registered_model(MODEL)
    return client.create_model_version(MODEL, source=str(folder)).version


def test_a_champion_is_looked_up_by_its_alias_and_only_by_it(uri, client, tmp_path):
    lookup = mlflow_lookup(uri)
    assert lookup(MODEL) is None
    artifact = linear_artifact(trainer="a2c")
    artifact.save(tmp_path / "artifact.npz")
    version = a_version(client, tmp_path)
    assert lookup(MODEL) is None
    client.set_registered_model_alias(MODEL, "champion", version)
    loaded = resolve_policy("champion", "poisson_085", registry_uri=uri)
    assert loaded.card.sha256 == artifact.sha256
    assert loaded.card.source == f"registry {MODEL}@champion"


def test_what_is_promoted_is_champion_of_a_scenario_of_ones_own_after_a_restart(uri, tmp_path):
    shipped = Path(tokenyard.__file__).parent / "scenarios/routing/poisson_085.yaml"
    mine = tmp_path / "mine.yaml"
    mine.write_text(shipped.read_text().replace("name: poisson_085", "name: mine"))
    linear_artifact(trainer="a2c").save(tmp_path / "new.npz")
    rng, settings = np.random.default_rng(0), CircuitBreakerSettings()
    manager = PolicyManager(str(mine), "sed", settings, rng, uri)

    async def promote():
        manager.switch("sed")
        manager.start_experiment(str(tmp_path / "new.npz"), "canary", 0.2)
        await manager.change("promote")

    asyncio.run(promote())
    manager.stop()
    card = resolve_policy("champion", str(mine), uri).card
    assert card.source == "registry tokenyard-routing-mine@champion"


def test_a_version_without_a_policy_is_refused_by_name(uri, client, tmp_path):
    version = a_version(client, tmp_path)
    client.set_registered_model_alias(MODEL, "champion", version)
    with pytest.raises(ArtifactError, match=rf"{MODEL} version {version} holds 0 npz files"):
        resolve_policy("champion", "poisson_085", registry_uri=uri)


def test_a_version_whose_files_are_gone_is_refused_by_name(uri, client, tmp_path):
    version = a_version(client, tmp_path / "gone")
    client.set_registered_model_alias(MODEL, "champion", version)
    with pytest.raises(ArtifactError, match=f"files of {MODEL} version {version} cannot be read"):
        resolve_policy("champion", "poisson_085", registry_uri=uri)


def test_a_registry_that_does_not_answer_is_refused_or_what_ships_is_served(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    unreachable = "http://127.0.0.1:9"
    with pytest.raises(ArtifactError, match=f"registry {unreachable}: "):
        resolve_policy("champion", "azure_code_slo", registry_uri=unreachable)
    card = resolve_policy("champion", "azure_code_slo", unreachable, stand_in="sed").card
    assert card.source == "shipped routing/azure_code_slo"
    assert unreachable in card.registry_error


def test_aliases_of_a_registry_that_is_away_are_tried_again_and_nothing_is_made_in_its_place(
    tmp_path,
):
    away = tmp_path / "mlflow.db"
    for _ in range(2):
        with pytest.raises(ArtifactError, match="there is no such file"):
            settle(f"sqlite:///{away}", MODEL, {"champion": "1"}, ())
        assert not away.exists()


def test_an_offer_to_a_registry_that_does_not_answer_ends_in_a_sentence(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    unreachable = mlflow.MlflowClient("http://127.0.0.1:9", "http://127.0.0.1:9")
    with pytest.raises(ArtifactError, match=r"registry http://127\.0\.0\.1:9: "):
        offer(unreachable, MODEL, linear_artifact(trainer="a2c"))


def test_an_allocation_candidate_is_found_where_a_rule_decides(uri, client, tmp_path):
    scenario = load_allocation("a100x8_13b")
    _, origin = load_plan_policy("champion", scenario, uri)
    assert (origin.source, origin.mlflow_run) == ("the rule planner", None)
    with pytest.raises(ArtifactError, match="'a100x8_13b' has no candidate"):
        load_plan_policy("candidate", scenario, uri)
    _, origin = load_plan_policy("candidate", scenario, uri, may_ship=True)
    assert origin.source == "the rule planner"
    assert "has no candidate" in origin.registry_error
    artifact, _ = champion_or_planner(scenario)
    offer(client, "tokenyard-allocation-a100x8_13b", artifact)
    _, origin = load_plan_policy("candidate", scenario, uri)
    assert origin.source == "registry tokenyard-allocation-a100x8_13b@candidate"
    assert origin.sha256 == artifact.sha256
    assert client.get_run(origin.mlflow_run).info.run_name.endswith(artifact.sha256)
