import warnings

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import envs
from envs import LiteralParallelismEnv, ParallelismEnv, ParallelismVectorEnv
from tokenyard.allocation.plans import load_allocation

GENERATED = load_allocation("a100x8_13b").model_copy(
    update={"demand": load_allocation("a100x8_13b").demand.model_copy(
        update={"source": "generator"}
    )}
)  # fmt: skip


@pytest.mark.parametrize(
    "env",
    [
        ParallelismEnv(scenario=GENERATED),
        ParallelismEnv(scenario=GENERATED, action="grid"),
        ParallelismEnv(scenario=GENERATED, action="grid", shows_planner=True, subtract_bound=True),
        ParallelismEnv(scenario="a100x8_13b_budget"),
        ParallelismEnv(scenario=GENERATED.model_copy(update={"max_batches": (64, 256)})),
        LiteralParallelismEnv(),
        LiteralParallelismEnv(reading="random", observation="features"),
    ],
    ids=lambda env: type(env).__name__,
)
def test_the_environments_pass_gymnasiums_checks(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)


def test_copy_i_of_the_vector_twin_lives_the_life_of_a_single_one_seeded_with_seed_plus_i():
    options = {"scenario": GENERATED, "episode_slots": 7}
    many = ParallelismVectorEnv(3, options)
    many.action_space.seed(1)
    observations, _ = many.reset(seed=5)
    single = [ParallelismEnv(options) for _ in range(3)]
    assert np.array_equal(observations, [one.reset(seed=5 + i)[0] for i, one in enumerate(single)])
    for _ in range(20):
        actions = many.action_space.sample()
        observations, rewards, _, _, _ = many.step(actions)
        for i, one in enumerate(single):
            if one.sim.ended()[0]:
                expected, earned = one.reset()[0], 0.0
            else:
                expected, earned, *_ = one.step({k: v[i] for k, v in actions.items()})
            assert np.array_equal(expected, observations[i])
            assert earned == rewards[i]


def test_what_the_mask_forbids_is_refused_and_changes_nothing_but_the_count():
    env = ParallelismEnv(scenario=GENERATED)
    _, info = env.reset(seed=0)
    kind, gpus = np.argwhere(info["action_mask"] == 0)[0]
    before = env.sim.plan(0)
    action = {"parallelism": kind, "num_gpus": gpus + 1, "memory_fraction": np.array([0.9])}
    env.step(action)
    assert env.sim.plan(0) == before
    assert env.sim.num_refused == 1


def test_every_plan_that_the_mask_allows_is_accepted():
    env = ParallelismEnv(scenario=GENERATED, episode_slots=10_000)
    _, info = env.reset(seed=0)
    for kind, gpus in np.argwhere(info["action_mask"]):
        for memory in (0.0, 0.55, 1.0):
            action = {"parallelism": kind, "num_gpus": gpus + 1, "memory_fraction": [memory]}
            env.step(action)
            plan = env.sim.table.plans[env.sim.plan(0)]
            assert plan.num_gpus == gpus + 1
    assert env.sim.num_refused == 0


def test_actions_out_of_range_are_refused_by_name():
    env = ParallelismEnv(scenario=GENERATED)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="memory_fraction"):
        env.step({"parallelism": 0, "num_gpus": 1, "memory_fraction": [1.5]})
    with pytest.raises(ValueError, match="num_gpus"):
        env.step({"parallelism": 0, "num_gpus": 9, "memory_fraction": [0.5]})


def test_the_variant_of_the_environment_is_chosen_by_name():
    assert isinstance(envs.make_parallelism({"variant": "literal"}), LiteralParallelismEnv)
    made = envs.make_parallelism({"scenario": GENERATED, "num_envs": 2})
    assert isinstance(made, ParallelismVectorEnv)
    with pytest.raises(ValueError, match="variant"):
        envs.make_parallelism({"variant": "imagined"})


def test_the_documented_reward_of_the_literal_environment_comes_out():
    env = LiteralParallelismEnv()
    features = np.array([0.2, 0.5, 0.4, 0.3, 0.6])
    assert env.config.weights.reward(features) == pytest.approx(0.94, abs=1e-12)
    reward_a = env.config.weights.model_copy(update={"of_maxima": True})
    expected = 0.5 * 0.6 + 0.4 * 0.3 + 0.3 * 0.4 + 0.2 * 0.5
    assert reward_a.reward(features) == pytest.approx(expected, abs=1e-12)


def test_a_list_of_actions_is_the_batch_of_them():
    options = {"scenario": GENERATED}
    one, other = ParallelismVectorEnv(3, options), ParallelismVectorEnv(3, options)
    one.action_space.seed(0)
    one.reset(seed=0)
    other.reset(seed=0)
    batch = one.action_space.sample()
    each = [{name: part[i] for name, part in batch.items()} for i in range(3)]
    assert np.array_equal(one.step(batch)[1], other.step(each)[1])


def test_the_bound_that_is_subtracted_is_no_worse_than_any_plan_and_depends_on_no_action():
    options = {"scenario": GENERATED, "action": "grid", "episode_slots": 5}
    plain = ParallelismVectorEnv(4, options)
    told = ParallelismVectorEnv(4, options, subtract_bound=True)
    plain.action_space.seed(0)
    plain.reset(seed=3)
    told.reset(seed=3)
    for step in range(12):
        actions = plain.action_space.sample()
        earned, relative = plain.step(actions)[1], told.step(actions)[1]
        assert (relative <= 1e-12).all()
        if step % 6 == 5:
            assert (relative == 0).all(), "nothing is stepped while episodes begin anew"
            assert (earned == 0).all()
