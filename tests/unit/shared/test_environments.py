"""What all environments have in common: Gymnasium's checks, pictures, and what a step tells."""

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from unit.region_builders import a_scenario

import tokenyard
from tokenyard import envs, metrics
from tokenyard.allocation.plans import load_allocation
from tokenyard.routing.fleet import Churn
from tokenyard.routing.scenario import load_scenario

DEMAND = load_allocation("a100x8_13b").model_copy(
    update={
        "demand": load_allocation("a100x8_13b").demand.model_copy(update={"source": "generator"})
    }
)
OPTIONS = {
    envs.LOAD_BALANCING_ID: {"scenario": "azure_code_mixed_gpus", "episode_requests": 20},
    envs.PARALLELISM_ID: {"scenario": DEMAND, "episode_slots": 10, "action": "grid"},
    envs.REGION_ID: {"scenario": a_scenario(num_slots=6)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_environment_passes_gymnasiums_checks_with_its_picture(name):
    envs.register()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(name, render_mode="rgb_array", **OPTIONS[name]).unwrapped)


@pytest.mark.parametrize("name", OPTIONS)
def test_pictures_of_an_episode_are_of_one_size_and_change(name):
    envs.register()
    env = gymnasium.make(name, render_mode="rgb_array", **OPTIONS[name])
    env.reset(seed=0)
    env.action_space.seed(0)
    pictures = [env.render()]
    ended = False
    while not ended:
        ended = env.step(env.action_space.sample())[3]
        pictures.append(env.render())
    assert {picture.shape for picture in pictures} == {pictures[0].shape}
    assert pictures[0].dtype == np.uint8
    assert any((picture != pictures[0]).any() for picture in pictures)
    with pytest.raises(ValueError, match="unknown render mode 'human'; choose rgb_array or None"):
        type(env.unwrapped)(OPTIONS[name], render_mode="human")


def placed(**config):
    """Play an episode at random; return the environment and every step's info."""
    env = envs.LoadBalancingEnv(config)
    env.reset(seed=3)
    env.action_space.seed(3)
    infos, ended = [], False
    while not ended:
        *_, ended, info = env.step(env.action_space.sample())
        infos.append(info)
    return env, infos


@pytest.mark.parametrize("scenario", ["high_load", "azure_code_mixed_gpus"])
def test_a_step_tells_where_its_request_went_and_who_was_done(scenario):
    env, infos = placed(scenario=scenario, episode_requests=150)
    outcomes = env.sim.view().outcomes()
    assert [info["replica"] for info in infos] == outcomes.server[:150].tolist()
    assert [info["waiting"] for info in infos] == outcomes.waiting_seen[:150].tolist()
    assert outcomes.server[150] == -1  # It was shown, not placed.
    # What the last step left was played to its end.
    before = sum(info["finished"] for info in infos)
    assert 0 < before < 150
    spent_s = sum(info["finished"] * info["response_s"] for info in infos if info["finished"])
    assert spent_s <= np.nansum(outcomes.response_s) + 1e-9
    last, slo_s = infos[-1], env.config.scenario.slo_response_s
    assert last["mean_response_s"] == pytest.approx(outcomes.response_s[:150].mean())
    assert last["p99_response_s"] == metrics.percentile(outcomes.response_s[:150], 99)
    assert last["slo_violation_fraction"] == outcomes.violations(slo_s)[:150].mean()
    assert not any("mean_response_s" in info for info in infos[:-1])


def test_a_refused_request_that_comes_again_is_done_once():
    scenario = load_scenario("azure_code_mixed_gpus")
    fleet = scenario.fleet.model_copy(update={"churn": Churn(mean_up_s=40.0, mean_down_s=20.0)})
    scenario = scenario.model_copy(update={"fleet": fleet})
    env, infos = placed(scenario=scenario, episode_requests=300)
    finished = np.isfinite(env.sim.view().outcomes().response_s).sum()
    assert sum(info["finished"] for info in infos) <= finished


def test_the_environments_are_found_in_the_package():
    import envs as beside

    assert tokenyard.envs is beside
    with pytest.raises(AttributeError, match="no attribute 'ennvs'"):
        tokenyard.ennvs  # noqa: B018
