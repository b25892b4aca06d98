import warnings

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from unit.region_builders import a_scenario

from envs import RegionEnv, RegionVectorEnv
from tokenyard.regions.observation import LOGIT_SCALE, wanted_shares
from tokenyard.regions.scenario import PAPER_REWARD

TINY = a_scenario(num_slots=6)


@pytest.mark.parametrize(
    "options", [{}, {"action": "shares", "reward": PAPER_REWARD}, {"dispatch": "live_shares"}]
)
def test_the_environment_passes_gymnasiums_checks(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(RegionEnv(scenario=TINY, **options), skip_render_check=True)


def test_copy_i_of_the_vector_twin_lives_the_life_of_a_single_one_seeded_with_seed_plus_i():
    many = RegionVectorEnv(2, scenario=TINY)
    many.action_space.seed(1)
    single = [RegionEnv(scenario=TINY) for _ in range(2)]
    observations, _ = many.reset(seed=5)
    assert np.array_equal(observations, [one.reset(seed=5 + i)[0] for i, one in enumerate(single)])
    for _ in range(10):
        actions = many.action_space.sample()
        observations, rewards, _, ended, _ = many.step(actions)
        for i, one in enumerate(single):
            if one.sim.ended:
                expected, earned = one.reset()[0], 0.0
            else:
                expected, earned, *_ = one.step(actions[i])
            assert np.array_equal(expected, observations[i])
            assert earned == rewards[i]
            assert ended[i] == one.sim.ended


def test_the_papers_reward_is_best_where_its_optimum_in_closed_form_is():
    env = RegionEnv(scenario=TINY, action="shares", reward=PAPER_REWARD.model_copy(
        update={"waiting": 0.0}
    ))  # fmt: skip
    env.reset(seed=0)
    from tokenyard.regions.transport import prox

    wanted = wanted_shares(env.state)
    best = prox(wanted, env.state.previous, PAPER_REWARD.smoothness)
    worst = -((best - wanted) ** 2).sum() - 0.4 * ((best - env.state.previous) ** 2).sum()
    _, reward, *_ = env.step(np.log(np.maximum(best, 1e-9)).ravel() / LOGIT_SCALE)
    assert reward == pytest.approx(worst / (2 * len(best)), abs=1e-6)
    env.reset(seed=0)
    assert env.step(np.zeros(16))[1] < reward


def test_a_step_after_the_end_is_refused():
    env = RegionEnv(scenario=TINY)
    env.reset(seed=0)
    for _ in range(6):
        *_, truncated, _ = env.step(np.zeros(16))
    assert truncated
    with pytest.raises(ValueError, match="call reset first"):
        env.step(np.zeros(16))
    env.reset(seed=0)
    with pytest.raises(ValueError, match="not finite"):
        env.step(np.full(16, np.nan))
