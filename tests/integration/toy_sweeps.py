"""Sweeps over a trainable that learns nothing, to test what goes on around the learning."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ray import tune

from tokenyard.rl.trainable import TrialConfig
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.metadata import ArtifactMetadata
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.routing.problem import PROBLEM
from tune_configs.experiment import Experiment, trained_on
from tune_configs.schedulers import AshaPerAlgorithm

STEPS_PER_ITERATION = 1_000


class ToyRouter(tune.Trainable):
    """Claims a score that rises with its steps; its policies are shortest expected delay."""

    def setup(self, config: dict[str, Any]) -> None:
        self.env_steps = 0

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.config = new_config
        self.env_steps = 0
        return True

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([{"CPU": config.get("num_cpus", 1)}])

    @classmethod
    def hyperparameters(cls, config: dict[str, Any]) -> dict[str, float]:
        return {"gamma": 0.5, "reward.response": -1.0}

    def step(self) -> dict[str, Any]:
        time.sleep(float(os.environ.get("TOY_STEP_S", "0.01")))
        self.env_steps += STEPS_PER_ITERATION
        skill = {"fast": 2.0, "slow": 1.0}[self.config["algorithm"]]
        score = -10.0 + skill * self.env_steps / 1_000 + 0.01 * self.config["seed"]
        return {
            "timesteps_total": self.env_steps,
            "eval/score": score,
            "not_known_yet": float("nan"),
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "env_steps.txt").write_text(str(self.env_steps))
        weights = np.zeros(NUM_MARGINAL_WEIGHTS)
        weights[0] = 1e-9 * self.config["seed"]
        metadata = ArtifactMetadata(
            kind="marginal",
            scenario="poisson_085",
            trainer=self.config["algorithm"],
            num_replicas=3,
            slo_response_s=2.0,
            mean_total_tokens=2_000.0,
            output_length="by_context",
        )
        PolicyArtifact(metadata, {"weights": weights}).save(Path(checkpoint_dir, "artifact.npz"))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.env_steps = int(Path(checkpoint_dir, "env_steps.txt").read_text())


class ToyTrialConfig(TrialConfig):
    scenario: str = "poisson_085"
    reward_weights: str = "none"
    env_steps: int = 5_000
    num_cpus: int = 1


def toy_trial(algorithm: str) -> dict[str, Any]:
    """A trial's config, as Tune hands it on."""
    (designed,) = replace(tiny(), trials=(ToyTrialConfig(algorithm=algorithm),)).designed_trials(0)
    return designed


def tiny() -> Experiment:
    """Two algorithms, two seeds, five iterations each."""
    return Experiment(
        problem=PROBLEM,
        scenario="poisson_085",
        trainable=ToyRouter,
        trials=tuple(
            ToyTrialConfig(algorithm=a, seed=seed) for a in ("fast", "slow") for seed in range(2)
        ),
        baselines=("round_robin", "sed"),
        promotion_streams=2,
        evaluation_streams=2,
    )


def long() -> Experiment:
    """`tiny` with enough iterations to be killed in the middle."""
    return trained_on(tiny(), "poisson_085", env_steps=30_000)


def halving() -> Experiment:
    """Both algorithms under successive halving."""
    trials = tuple(
        ToyTrialConfig(algorithm=a, seed=s, env_steps=9_000)
        for s in range(4)
        for a in ("fast", "slow")
    )
    return replace(tiny(), trials=trials, scheduler=partial(AshaPerAlgorithm, grace_share=1 / 9))


def too_big() -> Experiment:
    """Asks for more CPUs than any machine here has."""
    return replace(tiny(), trials=(ToyTrialConfig(algorithm="fast", num_cpus=10_000),))
