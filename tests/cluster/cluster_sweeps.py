"""Sweeps small enough for hosts that share two cores: PPO trials, and nothing else."""

from dataclasses import replace

from tune_configs.experiment import Experiment
from tune_configs.routing import _trial, smoke


def two_trials() -> Experiment:
    """Two seeds of PPO, a few thousand steps each."""
    trials = [_trial("ppo", "response", env_steps=4_000, iterations=2, seed=s) for s in range(2)]
    return replace(smoke(), trials=tuple(trials))


def four_trials() -> Experiment:
    """Enough seeds and checkpoints that a host can die while some are done and some are not."""
    trials = [_trial("ppo", "response", env_steps=20_000, iterations=5, seed=s) for s in range(4)]
    return replace(smoke(), trials=tuple(trials))
