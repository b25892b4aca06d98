"""Sweeps small enough for hosts that share two cores: PPO trials, and nothing else."""

from dataclasses import replace
from functools import partial

from tune_configs.experiment import Experiment
from tune_configs.routing import _compile_kernels, _trial, smoke

SCENARIO = "conversation_mixed_gpus"
"""That of clusters/two_hosts.yaml: what is swept can decide for it."""


def _ppo(env_steps: int, iterations: int, seeds: int) -> Experiment:
    trials = [
        _trial(
            algorithm="ppo",
            env_steps=env_steps,
            seed=seed,
            iterations=iterations,
            reward_weights="response",
            scenario=SCENARIO,
        )
        for seed in range(seeds)
    ]
    warm_up = partial(_compile_kernels, SCENARIO)
    return replace(smoke(), scenario=SCENARIO, trials=tuple(trials), warm_up=warm_up)


def two_trials() -> Experiment:
    """Two seeds of PPO, a few thousand steps each."""
    return _ppo(env_steps=4_000, iterations=2, seeds=2)


def four_trials() -> Experiment:
    """Enough seeds and checkpoints that a host can die while some are done and some are not."""
    return _ppo(env_steps=20_000, iterations=5, seeds=4)
