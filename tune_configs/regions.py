"""Regional experiments: who learns to divide demand over regions, from what, for how long."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from ray import tune

import envs
from tokenyard.regions.problem import PROBLEM
from tokenyard.rl.regions.training import RegionTrialConfig
from tokenyard.rl.trainable import PolicyTrainable
from tune_configs.experiment import Experiment, trained_on
from tune_configs.schedulers import drawn_weights

SCENARIO = "continents"
"""Needs nothing beyond the installation; the paper's topologies need the extra `topologies`."""
PAPER_SCENARIO = "abilene"
RULES = ("skylb", "prox_ot_forecast", "prox_ot_forecast_live", "prox_ot_forecast_live_cost")


class RegionTrial(PolicyTrainable):
    """Trains one regional policy from the fields of `RegionTrialConfig`.

    It is scored on validation streams by minus dollars of an episode, whatever the reward.
    """

    problem = PROBLEM
    trial_type = RegionTrialConfig
    register_env = staticmethod(envs.register)


_trial = partial(RegionTrialConfig, scenario=SCENARIO, iterations=10)
_faithful = partial(_trial, algorithm="torta_faithful", reward_weights="paper")
_ppo = partial(_trial, algorithm="ppo")


def _compile_kernels() -> None:
    env = envs.RegionVectorEnv(1, scenario=SCENARIO)
    env.reset(seed=0)
    env.step(np.zeros(env.action_space.shape or ()))


def default() -> Experiment:
    """The paper's recipe, and PPO on the mix of plans, some minutes each."""
    return Experiment(
        problem=PROBLEM,
        scenario=SCENARIO,
        trainable=RegionTrial,
        trials=(_faithful(env_steps=96_000), _ppo(env_steps=96_000)),
        baselines=RULES,
        baseline="prox_ot_forecast",
        warm_up=_compile_kernels,
        promotion_streams=5,
        evaluation_streams=5,
    )


def faithful() -> Experiment:
    """The paper's recipe alone, for a few minutes: thirty episodes on one of its topologies."""
    alone = replace(
        default(),
        trials=(_faithful(env_steps=14_400, iterations=3),),
        baselines=("prox_ot", "prox_ot_forecast"),
    )
    return trained_on(alone, PAPER_SCENARIO)


def weights() -> Experiment:
    """PPO on the mix of plans under weights of the response and of smooth shares, as numbers."""
    return drawn_weights(
        default(),
        _ppo(env_steps=48_000, iterations=5),
        num_samples=8,
        weights={"response": tune.uniform(0.0, 1.0), "smoothness": tune.uniform(0.0, 1.0)},
    )


def smoke() -> Experiment:
    """The smallest sweep with everything in it."""
    return replace(
        default(),
        trials=(_faithful(env_steps=4_800, iterations=1), _ppo(env_steps=4_800, iterations=1)),
        baselines=("prox_ot_forecast",),
    )
