"""Hybrid actions on the columnar path: sampled, weighed, clipped, masked, or refused."""

import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns

import envs
from tokenyard.allocation.observation import ALLOWED
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.scenario import SwitchBudget
from tokenyard.rl.allocation.training import AllocationTrialConfig
from tokenyard.rl.columnar.actions import actions_of
from tokenyard.rl.columnar.env_runner import CLIPPED_FRACTION, ColumnarEnvRunner, RouterEnvRunner

SCENARIO = load_allocation("a100x8_13b")
SCENARIO = SCENARIO.model_copy(
    update={"demand": SCENARIO.demand.model_copy(update={"source": "generator"})}
)
MANY_LIMITS = SCENARIO.model_copy(update={"max_batches": (64, 128, 256)})


def a_runner(scenario=SCENARIO, runner=ColumnarEnvRunner, algorithm="ppo", seed=3, **env):
    envs.register()
    trial = AllocationTrialConfig(algorithm=algorithm, scenario="a100x8_13b", seed=seed)
    config = trial.algorithm_config(scenario)
    config = config.environment(env_config={**config.env_config, "episode_slots": 6, **env})
    config = config.env_runners(
        env_runner_cls=runner, num_envs_per_env_runner=4, rollout_fragment_length=10
    )
    return runner(config=config, worker_index=1)


def replayed(runner, rollout):
    """Rewards and observations of the same environments under the same actions."""
    env = envs.ParallelismVectorEnv(4, runner.config.env_config)
    observations, _ = env.reset(seed=runner._seed)
    seen, earned = [observations], []
    kept = actions_of(env.single_action_space)
    for actions in rollout.actions:
        observations, rewards, *_ = env.step(kept.for_env(actions))
        seen.append(observations)
        earned.append(rewards)
    return np.stack(seen), np.stack(earned), env


@pytest.mark.parametrize("scenario", [SCENARIO, MANY_LIMITS], ids=["one limit", "three limits"])
def test_a_rollout_is_what_the_environment_does_with_its_hybrid_actions(scenario):
    runner = a_runner(scenario)
    (rollout,) = runner.sample()
    num_columns = 2 if scenario is SCENARIO else 3
    assert rollout.actions.shape == (11, 4, num_columns)
    assert len(rollout) == 40
    seen, earned, env = replayed(runner, rollout)
    np.testing.assert_array_equal(rollout.observations, seen)
    np.testing.assert_allclose(rollout.rewards, earned, rtol=1e-6)
    assert env.sim.num_refused == 0


@pytest.mark.parametrize("scenario", [SCENARIO, MANY_LIMITS], ids=["one limit", "three limits"])
def test_log_probabilities_of_what_was_sampled_are_those_of_the_modules_distribution(scenario):
    runner = a_runner(scenario)
    (rollout,) = runner.sample()
    module = runner.module
    seen = torch.from_numpy(rollout.observations[:-1]).flatten(0, 1)
    inputs = module.forward_exploration({Columns.OBS: seen})[Columns.ACTION_DIST_INPUTS]
    np.testing.assert_allclose(
        rollout.action_inputs.reshape(inputs.shape), inputs.detach(), atol=1e-5
    )
    kept = actions_of(module.action_space)
    actions = torch.from_numpy(rollout.actions).flatten(0, 1)
    nested = {name: actions[:, at] for name, at in zip(kept.names, kept.columns, strict=True)}
    theirs = module.get_exploration_action_dist_cls().from_logits(inputs).logp(nested)
    ours = kept.distribution(torch.from_numpy(rollout.action_inputs).flatten(0, 1))
    torch.testing.assert_close(ours.log_prob(actions), theirs, rtol=1e-4, atol=1e-4)


def test_memory_beyond_the_bounds_is_clipped_and_counted():
    runner = a_runner()
    # Above the upper bound half of the time, and now and then below the lower one.
    runner.module.output_shift[:2] = torch.tensor([1.0, 1.0])
    (rollout,) = runner.sample()
    memory = rollout.actions[..., 0][rollout.real]
    beyond = np.mean(np.abs(memory) > 1.0)
    assert beyond > 0.2
    assert runner.get_metrics()[CLIPPED_FRACTION].peek() == pytest.approx(beyond)
    _, _, env = replayed(runner, rollout)
    assert env.sim.num_refused == 0
    # A report is of its own rounds alone.
    runner.module.output_shift[:2] = torch.tensor([0.0, -9.0])
    runner.sample()
    assert runner.get_metrics()[CLIPPED_FRACTION].peek() == 0.0


def test_a_network_that_has_lost_its_numbers_is_stopped_by_the_environment():
    runner = a_runner()
    with torch.no_grad():
        runner.module.policy_layers[-1].bias[0] = torch.nan
    with pytest.raises(RuntimeError) as stopped:
        runner.sample()
    assert "memory_fraction" in str(stopped.value.__cause__)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_where_no_change_is_allowed_the_mask_leaves_the_shape_in_force(algorithm):
    tight = SCENARIO.model_copy(
        update={"switch_budget": SwitchBudget(switches=1, period_slots=288), "hysteresis_slots": 2}
    )
    runner = a_runner(tight, algorithm=algorithm)
    if algorithm == "ppo":
        with torch.no_grad():
            # Without the mask this network would move all the time.
            runner.module.stay_bonus = -20.0
    rollouts = [runner.sample()[0] for _ in range(3)]
    num_fixed = 0
    for rollout in rollouts:
        seen = rollout.observations[:-1]
        num_shapes = runner.module.action_space["shape"].n if algorithm == "ppo" else None
        num_shapes = num_shapes or int(runner.module.action_space.n)
        fixed = (seen[..., ALLOWED] == 0) & rollout.real
        chosen = rollout.actions[..., 1] if algorithm == "ppo" else rollout.actions
        assert (chosen == seen[..., -num_shapes:].argmax(-1))[fixed].all()
        num_fixed += int(fixed.sum())
    assert num_fixed > 20


def test_metrics_and_evaluation_are_those_of_rllibs_own_env_runner():
    reduced, evaluated = {}, {}
    for one in (RouterEnvRunner, ColumnarEnvRunner):
        runner = a_runner(runner=one)
        runner.sample()
        reduced[one] = runner.get_metrics()
        evaluated[one] = [len(episode) for episode in runner.sample(num_episodes=4, explore=False)]
    theirs, found = reduced[RouterEnvRunner], reduced[ColumnarEnvRunner]
    assert all("_to_module_" in key or "_to_env_" in key for key in set(theirs) - set(found))
    assert set(found) - set(theirs) == {CLIPPED_FRACTION}
    assert evaluated[ColumnarEnvRunner] == evaluated[RouterEnvRunner] == [6, 6, 6, 6]


def test_equal_seeds_give_equal_rollouts_and_others_others():
    one, same, other = (a_runner(seed=seed).sample()[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.actions, same.actions)
    np.testing.assert_array_equal(one.observations, same.observations)
    assert not np.array_equal(one.observations, other.observations)
