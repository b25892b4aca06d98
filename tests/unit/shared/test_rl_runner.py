"""The columnar env runner: what it returns is what happened, and what it logs RLlib's metrics."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

import envs
from envs import LoadBalancingVectorEnv
from tokenyard.rl.columnar.env_runner import (
    REWARD_PER_REQUEST,
    ColumnarEnvRunner,
    RouterEnvRunner,
    _rewards,
)
from tokenyard.rl.columnar.rounds import LocalRounds
from tokenyard.rl.columnar.sampling import TrainingSettings
from tokenyard.rl.routing.training import build_config, paper


def a_runner(algorithm="ppo", runner=ColumnarEnvRunner, num_envs=4, episode_requests=6, **config):
    envs.register()
    short = replace(paper(), num_envs=num_envs, episode_requests=episode_requests)
    settings = TrainingSettings(seed=3)
    built = build_config(
        algorithm, short, "LoadBalancingEnv", {"scenario": "poisson_085"}, settings
    )
    built = built.env_runners(env_runner_cls=runner, rollout_fragment_length=10)
    for name, value in config.items():
        built = getattr(built, name)(**value)
    return runner(config=built, worker_index=1)


def test_a_rollout_is_what_the_environment_does_with_its_actions():
    runner = a_runner()
    (rollout,) = runner.sample()
    config = {**runner.config.env_config}
    env = LoadBalancingVectorEnv(4, config)
    observations, _ = env.reset(seed=runner._seed)
    ended = np.zeros(4, bool)
    for t, actions in enumerate(rollout.actions):
        np.testing.assert_array_equal(rollout.observations[t], observations)
        observations, rewards, terminated, truncated, _ = env.step(actions)
        np.testing.assert_allclose(rollout.rewards[t], rewards, rtol=1e-6)
        np.testing.assert_array_equal(rollout.truncated[t], truncated)
        np.testing.assert_array_equal(rollout.terminated[t], terminated)
        np.testing.assert_array_equal(rollout.real[t], ~ended)
        ended = terminated | truncated
    np.testing.assert_array_equal(rollout.observations[-1], observations)
    # Episodes of 6 requests: one step of each copy only begins the next one and does not count.
    assert rollout.actions.shape == (11, 4)
    assert len(rollout) == 40


def test_the_next_rollout_goes_on_where_the_last_one_stopped():
    runner = a_runner()
    first, second = (runner.sample()[0] for _ in range(2))
    np.testing.assert_array_equal(first.observations[-1], second.observations[0])
    assert not np.array_equal(first.actions, second.actions)


def test_logits_are_those_of_the_module_and_actions_follow_them():
    runner = a_runner(num_envs=2)
    (rollout,) = runner.sample()
    flat = torch.from_numpy(rollout.observations[:-1]).flatten(0, 1)
    output = runner.module.forward_exploration({Columns.OBS: flat})
    np.testing.assert_allclose(
        rollout.action_inputs.reshape(-1, 3), output[Columns.ACTION_DIST_INPUTS], atol=1e-5
    )


def test_equal_seeds_give_equal_rollouts_and_other_runners_others():
    one, same = (a_runner().sample()[0] for _ in range(2))
    np.testing.assert_array_equal(one.observations, same.observations)
    np.testing.assert_array_equal(one.actions, same.actions)
    envs.register()
    other = a_runner(debugging={"seed": 4}).sample()[0]
    assert not np.array_equal(one.observations, other.observations)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_metrics_are_those_of_rllibs_own_env_runner(algorithm):
    reduced = {}
    for runner_class in (RouterEnvRunner, ColumnarEnvRunner):
        runner = a_runner(algorithm, runner_class)
        for _ in range(2):
            runner.sample()
        reduced[runner_class] = runner.get_metrics()
    theirs, found = reduced[RouterEnvRunner], reduced[ColumnarEnvRunner]
    # All but what tells of connectors, which are not used.
    assert all("_to_module_" in key or "_to_env_" in key for key in set(theirs) - set(found))
    assert found["episode_len_mean"].peek() == theirs["episode_len_mean"].peek() == 6
    for key in ("num_env_steps_sampled", "num_episodes"):
        assert found[key].peek() == theirs[key].peek()


def test_returns_of_episodes_are_the_sums_of_their_rewards():
    runner = a_runner(num_envs=1, episode_requests=4)
    rollouts = [runner.sample()[0] for _ in range(3)]
    rewards = np.concatenate([one.rewards[one.real] for one in rollouts])
    whole = rewards[: len(rewards) // 4 * 4].reshape(-1, 4).sum(1)
    assert runner.get_metrics()["episode_return_mean"].peek() == pytest.approx(
        whole.mean(), rel=1e-5
    )


@pytest.mark.parametrize(
    "runner_class", [ColumnarEnvRunner, pytest.param(RouterEnvRunner, marks=pytest.mark.slow)]
)
def test_a_restored_runner_does_not_begin_with_the_traffic_of_the_beginning_again(runner_class):
    def first_seen(steps_before):
        runner = a_runner(runner=runner_class)
        runner.set_state({NUM_ENV_STEPS_SAMPLED_LIFETIME: steps_before})
        sampled = runner.sample()[0]
        columnar = runner_class is ColumnarEnvRunner
        return sampled.observations[0, 0] if columnar else sampled.get_observations(0)

    fresh, restored = first_seen(0), first_seen(4096)
    assert not np.array_equal(fresh, restored)
    np.testing.assert_array_equal(restored, first_seen(4096))
    env = LoadBalancingVectorEnv(4, {**a_runner().config.env_config})
    np.testing.assert_array_equal(fresh, env.reset(seed=a_runner()._seed)[0][0])


@pytest.mark.parametrize("runner_class", [ColumnarEnvRunner, RouterEnvRunner])
def test_a_report_tells_the_mean_reward_of_its_own_rounds_and_of_no_earlier_ones(runner_class):
    runner, root = a_runner(runner=runner_class), MetricsLogger(root=True)
    for num_rounds in (1, 3):
        rounds = [runner.sample() for _ in range(num_rounds)]
        root.aggregate([runner.get_metrics()])
        earned = [np.concatenate([_rewards(one) for one in sampled]).mean() for sampled in rounds]
        told = root.reduce(compile=True)[REWARD_PER_REQUEST]
        assert told == pytest.approx(np.mean(earned), rel=1e-5)


def test_evaluation_gets_rllibs_episodes_and_training_begins_afresh_after_it():
    runner = a_runner()
    (before,) = runner.sample()
    episodes = runner.sample(num_episodes=2, explore=False)
    assert [len(episode) for episode in episodes] == [6, 6]
    (after,) = runner.sample()
    assert len(after) == len(before)
    # Not the traffic of the beginning again.
    assert not np.array_equal(after.observations[0], before.observations[0])


def test_an_environment_that_fails_is_made_anew_where_that_is_configured():
    runner = a_runner(fault_tolerance={"restart_failed_sub_environments": True})
    runner.sample()
    step, calls = runner.env.unwrapped.step, []

    def fail_once(actions):
        calls.append(actions)
        if len(calls) == 3:
            raise RuntimeError("the simulator has fallen over")
        return step(actions)

    runner.env.unwrapped.step = fail_once
    (rollout,) = runner.sample()
    assert len(calls) == 3
    assert len(rollout) == 40
    assert rollout.real[0].all()


def test_callbacks_that_need_episodes_are_refused_in_words():
    with pytest.raises(ValueError, match="on_episode_end needs episode objects"):
        a_runner(callbacks={"on_episode_end": print})


def test_schedules_of_exploration_go_on_from_round_to_round_between_two_reports():
    runner, asked = a_runner("dqn", num_envs=4, episode_requests=1000), []
    explore = runner.module._forward_exploration
    runner.module._forward_exploration = lambda batch, t: asked.append(t) or explore(batch, t=t)
    here = SimpleNamespace(
        env_runner=runner,
        learner_group=SimpleNamespace(_learner=None),
        metrics=MetricsLogger(root=True),
        config=SimpleNamespace(rounds_per_training_step=3),
        to_learn_from=lambda sampled, num_sampled: [],
    )
    LocalRounds.rounds_here(here)
    # Rounds of ten steps in each of four copies.
    assert asked == list(range(0, 120, 4))
