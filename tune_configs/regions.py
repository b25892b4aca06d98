"""Regional experiments: who learns to divide demand over regions, from what, for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from ray import tune

import envs
from envs.regions import PAPER_REWARD, RegionReward
from tokenyard.regions.problem import PROBLEM
from tokenyard.rl.regions.trial import RegionTrainable
from tune_configs.experiment import RESOURCES, WEIGHTS, Experiment, trial_of
from tune_configs.schedulers import drawn_weights

SCENARIO = "continents"
"""Needs nothing beyond the installation; the paper's topologies need the extra `topologies`."""
PAPER_SCENARIO = "abilene"
RULES = ("skylb", "prox_ot_forecast", "prox_ot_forecast_live", "prox_ot_forecast_live_cost")
FAITHFUL = "torta_faithful"
COST, PAPER = "cost", "paper"
"""Reward weightings: dollars, and the paper's Eq 3."""


def trainer_config(trial: Mapping[str, Any]) -> dict[str, Any]:
    """Spell a trial out for `RegionTrainable`.

    Raises:
        ValueError: Unknown reward weights.
    """
    rewards = {COST: RegionReward(), PAPER: PAPER_REWARD}
    if trial["reward_weights"] not in rewards:
        raise ValueError(
            f"unknown reward weights {trial['reward_weights']!r}; choose {COST!r} or {PAPER!r}"
        )
    return {
        "algorithm": trial["algorithm"],
        "scenario": trial["scenario"],
        "register_env": envs.register,
        "reward": rewards[trial["reward_weights"]].model_dump() | dict(trial.get(WEIGHTS, {})),
        # The paper's policy sends by its shares, which are free, and by nothing else.
        "action": "shares" if trial["algorithm"] == FAITHFUL else "mix",
        "dispatch": "shares" if trial["algorithm"] == FAITHFUL else "live_cost",
        "seed": trial["seed"],
        "train_steps": trial["env_steps"],
        "iterations": trial["iterations"],
        **{key: trial[key] for key in RESOURCES if key in trial},
    }


class RegionTrial(RegionTrainable):
    """`RegionTrainable` from the few values by which trials are told apart."""

    spelled_out = staticmethod(trainer_config)


_trial = partial(trial_of, weights=COST, scenario=SCENARIO)


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
        trials=(
            _trial(FAITHFUL, 96_000, weights=PAPER),
            _trial("ppo", 96_000),
        ),
        baselines=RULES,
        baseline="prox_ot_forecast",
        warm_up=_compile_kernels,
        promotion_streams=5,
        evaluation_streams=5,
    )


def faithful() -> Experiment:
    """The paper's recipe alone, for a few minutes: thirty episodes on one of its topologies."""
    return replace(
        default(),
        scenario=PAPER_SCENARIO,
        trials=(_trial(FAITHFUL, 14_400, iterations=3, weights=PAPER, scenario=PAPER_SCENARIO),),
        baselines=("prox_ot", "prox_ot_forecast"),
        promotion_streams=5,
        evaluation_streams=5,
    )


def weights() -> Experiment:
    """PPO on the mix of plans under weights of the response and of smooth shares, as numbers."""
    space = {
        **_trial("ppo", 48_000, iterations=5),
        WEIGHTS: {"response": tune.uniform(0.0, 1.0), "smoothness": tune.uniform(0.0, 1.0)},
        "seed": tune.randint(0, 1_000),
    }
    return drawn_weights(default(), space, num_samples=8)


def smoke() -> Experiment:
    """The smallest sweep with everything in it."""
    return replace(
        default(),
        trials=(
            _trial(FAITHFUL, 4_800, iterations=1, weights=PAPER),
            _trial("ppo", 4_800, iterations=1),
        ),
        baselines=("prox_ot_forecast",),
        promotion_streams=5,
        evaluation_streams=5,
    )
