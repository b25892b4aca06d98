"""Recipes say what is trained; wrong ones are refused in words."""

import pytest

from envs.routing import RoutingEnvConfig
from tokenyard.rl.columnar.sampling import TrainingSettings
from tokenyard.rl.routing.training import build_config, equivariant, paper, recipe, scaled
from tokenyard.routing.scenario import RewardWeights


def test_the_papers_recipe_has_the_papers_numbers():
    for algorithm in ("ppo", "a2c", "dqn"):
        config = build_config(algorithm, paper(), "unused", {})
        assert (config.lr, config.gamma) == (3e-4, 0.99)
        model = config.rl_module_spec.model_config
        assert (model["fcnet_hiddens"], model["fcnet_activation"]) == ([128, 128], "relu")
        assert not config.env_config["shows_rule"]
        assert config.env_config["reward"] == RewardWeights().model_dump()
    assert config.replay_buffer_config["capacity"] == 50_000


def test_on_policy_batches_hold_every_sampled_step_once():
    for algorithm in ("ppo", "a2c"):
        for num_env_runners in (0, 1, 2):
            settings = TrainingSettings(num_env_runners=num_env_runners)
            config = build_config(algorithm, equivariant(), "unused", {}, settings)
            config.validate()
            sampled = config.num_envs_per_env_runner * config.rollout_fragment_length
            assert config.train_batch_size_per_learner == sampled * max(num_env_runners, 1)


def test_scaling_a_reward_leaves_its_thresholds_alone():
    reward = RewardWeights(response=-1.0, tail=-2.0, tail_after_s=4.0)
    tenth = scaled(reward, 0.1)
    assert (tenth.response, tenth.tail, tenth.queue) == pytest.approx((-0.1, -0.2, -0.01))
    assert tenth.tail_after_s == 4.0


def test_wrong_names_are_refused_with_the_right_ones():
    with pytest.raises(ValueError, match=r"unknown recipe 'theirs'; choose one of \['equiv"):
        recipe("theirs")
    with pytest.raises(ValueError, match=r"unknown algorithm 'sac'; choose one of \['a2c', 'dqn'"):
        build_config("sac", equivariant(), "unused", {})


def test_from_scratch_there_is_no_rule_and_no_order():
    recipe = equivariant().from_scratch()
    assert not recipe.orders
    assert all(own.residual_scale == own.shrinkage == 0.0 for own in recipe.algorithms.values())
    assert recipe.algorithms["dqn"].epsilon[0] == 1.0


@pytest.mark.parametrize("scenario", ["churn", "poisson_085"])
def test_copies_of_the_same_traffic_are_compared(scenario):
    told = build_config("ppo", equivariant(), "unused", {"scenario": scenario}).env_config
    config = RoutingEnvConfig.model_validate(told)
    assert config.shows_rule
    assert config.copies_per_stream == equivariant().copies_per_stream > 1
    assert config.weights.credits_response


def test_rewards_are_counted_in_slos_but_for_the_papers():
    scale = equivariant().reward_scale
    assert equivariant().for_slo(15.0).reward_scale == pytest.approx(scale / 15.0)
    assert paper().for_slo(15.0) == paper()
