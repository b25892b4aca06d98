"""AllocationTrial with real Ray actors, actions as columns all the way."""

import numpy as np
import pytest
import yaml

from tokenyard.allocation.artifact import AllocationArtifact
from tokenyard.allocation.plans import load_allocation
from tokenyard.registry import ARTIFACT_FILE
from tune_configs.allocation import AllocationTrial

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    """The pool under generated demand, two limits of the batch, eight changes a day."""
    written = load_allocation("a100x8_13b").model_dump(mode="json")
    written["demand"]["source"] = "generator"
    written["max_batches"] = [64, 256]
    written["switch_budget"] = {"switches": 8, "period_slots": 288}
    path = tmp_path_factory.mktemp("scenario") / "a100x8_13b.yaml"
    path.write_text(yaml.safe_dump(written))
    return str(path)


def a_trial(algorithm, scenario, **changes):
    config = {
        "algorithm": algorithm,
        "scenario": scenario,
        "env_steps": 4096,
        "iterations": 2,
        "seed": 3,
    }
    trial = AllocationTrial({**config, **changes})
    assert trial.step()["timesteps_total"] == 0
    return trial


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "dqn"])
def test_equal_seeds_give_equal_policies(algorithm, scenario):
    hashes = []
    for _ in range(2):
        trial = a_trial(algorithm, scenario)
        result = trial.step()
        hashes.append(trial.artifact().sha256)
        trial.stop()
    assert hashes[0] == hashes[1]
    assert result["timesteps_total"] >= 2048
    assert result["eval/refused"] == 0
    assert np.isfinite(list(result.values())).all()


@pytest.mark.parametrize(("algorithm", "num_env_runners"), [("ppo", 2), ("a2c", 0)])
def test_a_restored_trial_has_the_policy_and_the_step_count_of_the_saved_one(
    algorithm, num_env_runners, scenario, tmp_path
):
    settings = {"num_env_runners": num_env_runners}
    trial = a_trial(algorithm, scenario, **settings)
    steps = trial.step()["timesteps_total"]
    trial.save_checkpoint(str(tmp_path))
    saved = trial.artifact()
    trial.stop()
    assert AllocationArtifact.load(tmp_path / ARTIFACT_FILE).sha256 == saved.sha256

    restored = a_trial(algorithm, scenario, **settings, seed=4)
    restored.load_checkpoint(str(tmp_path))
    for name, array in restored.artifact().arrays.items():
        np.testing.assert_array_equal(array, saved.arrays[name])
    result = restored.step()
    again = restored.artifact()
    restored.stop()
    assert result["timesteps_total"] > steps
    assert {
        "eval/score", "eval/cost_per_hour", "train/policy_loss", "train/value_loss",
        "train/entropy_nats",
    } <= set(result)  # fmt: skip
    assert any(not np.array_equal(again.arrays[name], saved.arrays[name]) for name in saved.arrays)
