"""Allocation experiments: who learns to choose parallelism plans, from what, for how long."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from ray import tune

import envs
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.problem import PROBLEM
from tokenyard.allocation.tabular import TabularLearner
from tokenyard.rl.allocation.training import AllocationTrialConfig
from tokenyard.rl.trainable import PolicyTrainable
from tune_configs.experiment import Experiment, trained_on
from tune_configs.schedulers import drawn_weights

SCENARIO = "local_cpu_ranks"
"""The allocated pool of the cluster that `make serve` serves."""
STUDIED = "a100x8_13b"
"""The pool that docs/results/allocation.md studies."""
RULES = ("best_static", "autoscaler_forecast", "autoscaler_tuned", "planner")


class AllocationTrial(PolicyTrainable):
    """Trains one allocator from the fields of `AllocationTrialConfig`.

    It is scored on the training part under noise of its own: by minus dollars per hour, SLO
    violations included, whatever the reward.
    """

    problem = PROBLEM
    trial_type = AllocationTrialConfig
    register_env = staticmethod(envs.register)


_trial = partial(AllocationTrialConfig, scenario=SCENARIO)


def _compile_kernels(scenario: str = SCENARIO) -> None:
    loaded = load_allocation(scenario)
    env = envs.ParallelismVectorEnv(
        2, scenario=scenario, action="grid", shows_planner=True, subtract_bound=True
    )
    env.reset(seed=0)
    env.step(np.zeros(2, dtype=np.int64))
    TabularLearner(loaded).step()


def default() -> Experiment:
    """PPO, A2C and DQN, which begin as the planner, and a table, for a minute."""
    return Experiment(
        problem=PROBLEM,
        scenario=SCENARIO,
        trainable=AllocationTrial,
        trials=(
            _trial(algorithm="dqn", env_steps=60_000, iterations=3),
            _trial(algorithm="ppo", env_steps=80_000, iterations=4),
            _trial(algorithm="a2c", env_steps=40_000, iterations=2),
            _trial(algorithm="q_learning", env_steps=5_000_000, iterations=2),
        ),
        baselines=RULES,
        baseline="autoscaler_tuned",
        warm_up=_compile_kernels,
        promotion_streams=2,
        evaluation_streams=5,
    )


def learners() -> Experiment:
    """Every learner once on the pool that the docs study, longer than by default."""
    trials = (
        _trial(algorithm="ppo", env_steps=400_000, iterations=5),
        _trial(algorithm="a2c", env_steps=400_000, iterations=5),
        _trial(algorithm="dqn", env_steps=200_000, iterations=5),
        _trial(algorithm="q_learning", env_steps=20_000_000, iterations=2),
        _trial(algorithm="sarsa", env_steps=20_000_000, iterations=2),
    )
    longer = replace(default(), trials=trials, warm_up=partial(_compile_kernels, STUDIED))
    return trained_on(longer, STUDIED)


def smoke() -> Experiment:
    """The smallest sweep with everything in it: PPO, and a table."""
    return replace(
        default(),
        trials=(
            _trial(algorithm="ppo", env_steps=4_000, iterations=1),
            _trial(algorithm="sarsa", env_steps=100_000, iterations=1),
        ),
        baselines=("best_static", "autoscaler_tuned"),
        promotion_streams=1,
        evaluation_streams=1,
    )


def weights() -> Experiment:
    """PPO under weights of violations and energy that are drawn as numbers.

    Every trial is scored by dollars, violations at the scenario's price. In training a violation
    weighs a quarter to four times that, and a megajoule up to 3 dollars: about what an A100 costs
    in the time in which it takes one.
    """
    violation_usd = load_allocation(STUDIED).violation_usd
    return drawn_weights(
        learners(),
        _trial(algorithm="ppo", env_steps=100_000, iterations=5, scenario=STUDIED),
        num_samples=12,
        weights={
            "violations": tune.loguniform(violation_usd / 4, violation_usd * 4),
            "energy": tune.uniform(0.0, 3.0),
        },
    )
