"""RoutingTrial with real Ray actors: reproducible, resumable, hard to kill."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest

import envs
from tokenyard.registry import ARTIFACT_FILE
from tokenyard.rl.columnar.sampling import TrainingSettings
from tokenyard.rl.routing.training import build_config, equivariant
from tokenyard.rl.routing.trial import searched
from tokenyard.routing.artifact import PolicyArtifact
from tune_configs.routing import RoutingTrial

pytestmark = pytest.mark.usefixtures("ray_cluster")


def a_trial(algorithm, **changes):
    """A trial that has scored its start."""
    config = {
        "algorithm": algorithm,
        "scenario": "poisson_085",
        "num_envs": 32,
        "env_steps": 6000,
        "validation_streams": 1,
        "seed": 3,
    }
    trial = RoutingTrial({**config, **changes})
    trial.step()
    return trial


@pytest.mark.parametrize("algorithm", ["a2c", "policy_search"])
def test_the_first_result_is_of_the_policy_that_training_begins_with(algorithm, tmp_path):
    trial = RoutingTrial(
        {"algorithm": algorithm, "scenario": "poisson_085", "env_steps": 6000, "num_envs": 32,
         "validation_streams": 1}
    )  # fmt: skip
    begun = trial.artifact().sha256
    result = trial.step()
    trial.save_checkpoint(str(tmp_path))
    after, ended = trial.step(), trial.artifact().sha256
    trial.stop()
    assert result["timesteps_total"] == 0 < after["timesteps_total"]
    assert np.isfinite(result["eval/score"])
    saved = PolicyArtifact.load(tmp_path / ARTIFACT_FILE)
    assert saved.metadata.metrics["score"] == result["eval/score"]
    assert begun != ended


@pytest.mark.smoke
def test_every_result_has_a_score_and_only_finite_numbers():
    trial = a_trial("a2c")
    result = trial.step()
    trial.stop()
    assert {
        "eval/score", "eval/mean_response_s", "train/reward_per_request", "train/policy_loss"
    } <= result.keys()  # fmt: skip
    assert all(isinstance(value, float | int) for value in result.values())
    assert np.isfinite(list(result.values())).all()
    assert result["timesteps_total"] >= 600


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_equal_seeds_give_equal_policies(algorithm):
    hashes = []
    for _ in range(2):
        trial = a_trial(algorithm, env_steps=8000, iterations=4)
        trial.step()
        hashes.append(trial.artifact().sha256)
        trial.stop()
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("algorithm", ["ppo", "dqn", "policy_search"])
def test_a_restored_trial_has_the_policy_and_the_step_count_of_the_saved_one(algorithm, tmp_path):
    trial = a_trial(algorithm)
    before = trial.step()
    trial.save_checkpoint(str(tmp_path))
    saved = trial.artifact()
    trial.stop()
    assert PolicyArtifact.load(tmp_path / ARTIFACT_FILE).sha256 == saved.sha256

    restored = a_trial(algorithm, seed=4)
    restored.load_checkpoint(str(tmp_path))
    for name, array in restored.artifact().arrays.items():
        np.testing.assert_array_equal(array, saved.arrays[name])
    after = restored.step()
    restored.stop()
    assert after["timesteps_total"] > before["timesteps_total"]
    assert after["system/cpu_s"] > before["system/cpu_s"] > 0


def test_the_cpu_time_of_a_trial_holds_that_of_its_env_runners():
    trial = a_trial("a2c", num_env_runners=1)
    before_s = trial._training.actors_cpu_s
    trial.step()
    after_s = trial._training.actors_cpu_s
    trial.stop()
    assert after_s > before_s > 0


def test_a_trial_becomes_another_without_a_new_process():
    trial = a_trial("ppo")
    trial.step()
    config = {**trial.config, "algorithm": "a2c", "seed": 9}
    assert trial.reset_config(config)
    assert trial.step()["timesteps_total"] == 0
    reused = trial.step()["timesteps_total"], trial.artifact()
    trial.stop()

    fresh_trial = a_trial("a2c", seed=9)
    fresh = fresh_trial.step()["timesteps_total"], fresh_trial.artifact()
    fresh_trial.stop()
    assert reused[0] == fresh[0]
    assert reused[1].sha256 == fresh[1].sha256


def test_trials_that_begin_with_one_search_run_it_once_and_each_counts_its_time():
    searched.cache_clear()
    trials = [a_trial(algorithm, env_steps=30_000) for algorithm in ("ppo", "a2c")]
    assert searched.cache_info()[:2] == (1, 1)
    first_s, second_s = (trial._training.remembered_cpu_s for trial in trials)
    assert first_s == 0.0
    assert trials[1].step()["system/cpu_s"] > second_s > 0.0
    for trial in trials:
        trial.stop()


@pytest.mark.parametrize(
    "algorithm",
    [
        "ppo",
        pytest.param("a2c", marks=pytest.mark.slow),
        pytest.param("dqn", marks=pytest.mark.slow),
    ],
)
def test_a_killed_env_runner_is_replaced_and_the_trial_goes_on(algorithm):
    trial = a_trial(algorithm, num_env_runners=1)
    before = trial.step()
    runners = trial._training._algorithm.env_runner_group
    (pid,) = runners.foreach_env_runner(lambda _: os.getpid(), local_env_runner=False)
    os.kill(pid, signal.SIGKILL)

    results = [trial.step() for _ in range(2)]

    assert results[-1]["timesteps_total"] > before["timesteps_total"]
    assert results[-1]["system/cpu_s"] > before["system/cpu_s"]
    assert all(np.isfinite(result["eval/score"]) for result in results)
    (new_pid,) = runners.foreach_env_runner(lambda _: os.getpid(), local_env_runner=False)
    assert new_pid != pid
    trial.stop()


def test_remote_runners_and_evaluation_work_as_in_any_rllib_algorithm():
    envs.register()
    short = replace(equivariant(), num_envs=16, episode_requests=30)
    config = build_config(
        "ppo", short, "LoadBalancingEnv", {"scenario": "poisson_085"},
        TrainingSettings(num_env_runners=2, env_steps=10_240),
    )  # fmt: skip
    config = config.evaluation(
        evaluation_interval=1, evaluation_duration=2, evaluation_config={"explore": False}
    )
    algorithm = config.build_algo()
    try:
        result = algorithm.train()
        starts = algorithm.env_runner_group.foreach_env_runner(
            lambda runner: runner.sample()[0].observations[0], local_env_runner=False
        )
        weights = algorithm.env_runner_group.foreach_env_runner(
            lambda runner: runner.module.scorer.state_dict(), local_env_runner=False
        )
    finally:
        algorithm.stop()
    fragment_steps = short.algorithms["ppo"].fragment_steps
    assert result["env_runners"]["num_env_steps_sampled"] == 2 * 16 * fragment_steps
    assert result["env_runners"]["episode_len_mean"] == 30
    assert result["evaluation"]["env_runners"]["num_episodes"] == 2
    assert {"policy_loss", "vf_loss", "entropy"} <= result["learners"]["default_policy"].keys()
    assert not np.array_equal(*starts)
    for one, other in zip(*(state.values() for state in weights), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "dqn"])
def test_rllibs_own_path_is_still_there_to_compare_with(algorithm):
    # DQN begins to learn after a thousand steps.
    trial = a_trial(algorithm, implementation="rllib_stock", env_steps=12_000)
    result = trial.step()
    trial.stop()
    assert result["timesteps_total"] >= 1200
    assert {"train/policy_loss", "train/q_loss"} & set(result)
    assert np.isfinite(result["eval/score"])


TRIVIAL_CLUSTER = """
name: trivial
description: A fast server and a slow one, at a load that the fast one carries alone.
servers:
  - {name: slow, tokens_per_s: 2000, concurrency: 4}
  - {name: fast, tokens_per_s: 20000, concurrency: 4}
arrivals: {process: poisson, load: 0.15}
requests_per_stream: 1000
"""


@pytest.mark.parametrize(
    ("algorithm", "lr"),
    [
        ("a2c", 2e-3),
        pytest.param("ppo", 1e-3, marks=pytest.mark.slow),
        pytest.param("dqn", 1e-3, marks=pytest.mark.slow),
    ],
)
def test_an_agent_without_a_baseline_learns_a_trivial_cluster(algorithm, lr, tmp_path):
    scenario = tmp_path / "trivial.yaml"
    scenario.write_text(TRIVIAL_CLUSTER)
    trial = a_trial(
        algorithm,
        scenario=str(scenario),
        recipe="paper",
        reward_weights="response",
        training={"lr": lr},
        env_steps=10_000,
        iterations=5,
    )
    results = [trial.step() for _ in range(4)]
    trial.stop()
    # Of each report alone: what is learned in the first is kept, give or take the traffic.
    first, *later = (-result["train/reward_per_request"] for result in results)
    assert max(later) < 0.7 * first
    # Half of the requests on the slow server cost ten times as much.
    assert results[-1]["eval/mean_response_s"] < 0.2
