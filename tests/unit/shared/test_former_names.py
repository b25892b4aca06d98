"""Names of earlier releases are refused with the ones that count now."""

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from serve_app.cluster import Pool, load_cluster
from serve_app.engines.base import EngineError
from serve_app.engines.models import find_model
from serve_app.ray_serve.replica import engine_class
from tokenyard.allocation.artifact import AllocationArtifact, champion_or_planner
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.artifact import ArtifactError
from tokenyard.routing.artifact import resolve_champion
from tokenyard.routing.scenario import load_scenario

CONFIG = {"model": "emulated", "emulates": {"gpu": "l4", "llm": "llama3_8b"}}


@pytest.mark.parametrize(
    ("load", "former", "name"),
    [
        (load_scenario, "azure_code_promises", "azure_code_slo"),
        (load_scenario, "rehearsal", "emulated"),
        (load_allocation, "rehearsal_l4x4", "emulated_l4x4"),
        (load_cluster, "rehearsal", "emulated"),
    ],
)
def test_a_former_name_is_refused_with_the_one_that_counts_now(load, former, name):
    with pytest.raises(ValueError, match=f"{former} is called {name} now"):
        load(former)
    assert load(name).name == name


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"promise": {"ttft_s": 1.0}}, "slo"),
        ({"missed_usd": 0.1}, "violation_usd"),
        ({"objective": {"missed": 1.0}}, "violations"),
    ],
)
def test_a_former_key_of_a_scenario_is_refused_with_its_field(change, name):
    fields = load_allocation("l4x4_7b").model_dump(mode="json") | change
    with pytest.raises(ValidationError, match=f"is called {name} now") as caught:
        AllocationScenario.model_validate(fields)
    (error,) = caught.value.errors()
    assert error["loc"][0] == next(iter(change))


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("trust", {"budget_s": 0.1}, "circuit_breaker"),
        (
            "pools",
            [{"name": "a", "kind": "own", "config": {**CONFIG, "rehearses": {}}}],
            "emulates",
        ),
        (
            "pools",
            [{"name": "a", "kind": "own", "config": {**CONFIG, "emulates": {"slow_down": 2}}}],
            "time_scale",
        ),
    ],
)
def test_a_former_key_of_a_cluster_is_refused(tmp_path, key, value, name):
    fields = load_cluster("emulated").model_dump(mode="json", exclude_defaults=True)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(fields | {key: value}))
    with pytest.raises(ValueError, match=f"mine.yaml: .*is called {name} now"):
        load_cluster(str(path))


def test_other_mistakes_are_told_as_before():
    fields = load_allocation("l4x4_7b").model_dump(mode="json") | {"gpus": 8}
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        AllocationScenario.model_validate(fields)


def test_former_engines_and_models_are_refused():
    pool = Pool.model_validate({"name": "a", "engine": "gang", "config": CONFIG})
    with pytest.raises(ValueError, match="gang is called sharded now"):
        engine_class(pool)
    with pytest.raises(EngineError, match="rehearsal is called emulated now"):
        find_model("rehearsal")


def test_a_policy_file_with_a_former_key_is_refused(tmp_path):
    planner, _ = champion_or_planner(load_allocation("l4x4_7b"))
    planner.save(tmp_path / "new.npz")
    with np.load(tmp_path / "new.npz") as archive:
        arrays = dict(archive)
    arrays["metadata"] = np.array(str(arrays["metadata"]).replace('"slo":', '"promise":'))
    np.savez(tmp_path / "old.npz", **arrays)
    with pytest.raises(ArtifactError, match="promise is called slo now"):
        AllocationArtifact.load(tmp_path / "old.npz")


def test_champions_go_by_the_new_names():
    scenario = "azure_code_slo"
    artifact, source = resolve_champion(scenario)
    assert (artifact.metadata.scenario, source) == (scenario, f"shipped routing/{scenario}")
