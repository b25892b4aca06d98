"""Allocation on the columnar path: sampled, weighed, masked, or refused."""

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
from tokenyard.rl.columnar.env_runner import ColumnarEnvRunner, RouterEnvRunner

SCENARIO = load_allocation("a100x8_13b")
SCENARIO = SCENARIO.model_copy(
    update={"demand": SCENARIO.demand.model_copy(update={"source": "generator"})}
)


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


def test_a_rollout_is_what_the_environment_does_with_its_actions():
    runner = a_runner()
    (rollout,) = runner.sample()
    assert rollout.actions.shape == (11, 4)
    assert len(rollout) == 40
    seen, earned, env = replayed(runner, rollout)
    np.testing.assert_array_equal(rollout.observations, seen)
    np.testing.assert_allclose(rollout.rewards, earned, rtol=1e-6)
    assert env.sim.num_refused == 0


def test_log_probabilities_of_what_was_sampled_are_those_of_the_modules_distribution():
    runner = a_runner()
    (rollout,) = runner.sample()
    module = runner.module
    seen = torch.from_numpy(rollout.observations[:-1]).flatten(0, 1)
    inputs = module.forward_exploration({Columns.OBS: seen})[Columns.ACTION_DIST_INPUTS]
    np.testing.assert_allclose(
        rollout.action_inputs.reshape(inputs.shape), inputs.detach(), atol=1e-5
    )
    kept = actions_of(module.action_space)
    actions = torch.from_numpy(rollout.actions).flatten(0, 1)
    theirs = module.get_exploration_action_dist_cls().from_logits(inputs).logp(actions)
    ours = kept.distribution(torch.from_numpy(rollout.action_inputs).flatten(0, 1))
    torch.testing.assert_close(ours.log_prob(actions), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_where_no_change_is_allowed_the_mask_leaves_the_shape_in_force(algorithm):
    tight = SCENARIO.model_copy(
        update={"switch_budget": SwitchBudget(switches=1, period_slots=288), "hysteresis_slots": 2}
    )
    runner = a_runner(tight, algorithm=algorithm)
    with torch.no_grad():
        # Without the mask this network would move all the time.
        runner.module.policy_layers[-1].bias.copy_(torch.arange(15.0) * 1e3)
    rollouts = [runner.sample()[0] for _ in range(3)]
    num_fixed = 0
    for rollout in rollouts:
        seen = rollout.observations[:-1]
        num_shapes = int(runner.module.action_space.n)
        fixed = (seen[..., ALLOWED] == 0) & rollout.real
        in_force = seen[..., -2 * num_shapes : -num_shapes].argmax(-1)
        assert (rollout.actions == in_force)[fixed].all()
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
    assert set(found) <= set(theirs)
    assert evaluated[ColumnarEnvRunner] == evaluated[RouterEnvRunner] == [6, 6, 6, 6]


def test_equal_seeds_give_equal_rollouts_and_others_others():
    one, same, other = (a_runner(seed=seed).sample()[0] for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.actions, same.actions)
    np.testing.assert_array_equal(one.observations, same.observations)
    assert not np.array_equal(one.observations, other.observations)
