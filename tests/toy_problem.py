"""A fourth problem in one file: how much to keep in stock where demand is drawn anew every day."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from integration.toy_sweeps import tiny

from tokenyard.artifact import Artifact
from tokenyard.config import FrozenModel
from tokenyard.problem import RULE, Candidate, Drawn, Measure, Problem, Score
from tokenyard.rl.trainable import PolicyTrainable, TrialConfig
from tokenyard.rl.training import LocalTraining
from tune_configs.experiment import Experiment

DAYS = 50


class ToyScenario(NamedTuple):
    name: str
    mean: float
    description: str = "stock for a day's demand"


SCENARIOS = {name: ToyScenario(name, mean) for name, mean in (("toy_low", 3), ("toy_high", 9))}


class ToyMetadata(FrozenModel):
    format_version: int = 1
    problem: str = "toy"
    trainer: str
    metrics: Mapping[str, float] = {}
    lineage: Mapping[str, str] = {}


class ToyArtifact(Artifact[ToyMetadata]):
    METADATA = ToyMetadata

    @property
    def level(self):
        return float(self.arrays["level"])

    @classmethod
    def keeping(cls, level, **metadata):
        return cls(ToyMetadata(**metadata), {"level": np.array(level)})


class ToyProblem(Problem[ToyScenario, ToyArtifact, Drawn[np.ndarray], dict[str, float]]):
    name = "toy"
    suites = {"toys": tuple(SCENARIOS)}  # noqa: RUF012
    default_policies, default_baseline = ("one", "champion"), "one"
    score = Score("cost", -1, "$")

    def scenario_names(self):
        return sorted(SCENARIOS)

    def load_scenario(self, name):
        return SCENARIOS[name]

    def load_artifact(self, path):
        return ToyArtifact.load(path)

    def candidate(self, scenario, name, registry=None):
        if name == "one":
            return Candidate(name, RULE, partial(run, 1.0))
        artifact, source = ToyArtifact.champion(scenario.name, registry=registry)
        return Candidate(name, f"{source}, {artifact.sha256}", self.trained(artifact))

    def trained(self, artifact):
        return partial(run, artifact.level)

    def streams(self, scenario, purpose, count, seed):
        rng = np.random.default_rng([seed, purpose == "evaluation"])
        days = rng.normal(scenario.mean, 0.5, (count, DAYS))
        return Drawn(days, f"{count} times {DAYS} days")

    def measures(self, scenario):
        return [Measure("cost", "cost $", interval=True, delta="delta_cost_fraction")]


def run(level, scenario, streams, seed):
    return [{"cost": np.abs(days - level).mean()} for days in streams.streams]


TOY = ToyProblem()


class ToySearch:
    def __init__(self, scenario, seed):
        self._scenario, self._seed, self._level, self.env_steps = scenario, seed, 0.0, 0

    def step(self):
        rng = np.random.default_rng([self._seed, self.env_steps])
        days = rng.normal(self._scenario.mean, 0.5, DAYS)
        tried = [self._level, self._level + rng.normal(0.0, 1.0)]
        self._level = min(tried, key=lambda level: np.abs(days - level).mean())
        self.env_steps += DAYS
        return {"level": self._level}

    def artifact(self, metrics, lineage):
        return ToyArtifact.keeping(self._level, trainer="search", metrics=metrics, lineage=lineage)

    def state(self):
        return {"level": self._level, "env_steps": self.env_steps}

    def restore(self, state):
        self._level, self.env_steps = state["level"], state["env_steps"]


class ToyTrialConfig(TrialConfig):
    def make_training(self, scenario):
        return LocalTraining(ToySearch(scenario, self.seed), steps_per_result=1)


class ToyTrial(PolicyTrainable):
    problem, trial_type = TOY, ToyTrialConfig


def sweep(env_steps):
    """Two seeds of the search."""
    trials = tuple(
        ToyTrialConfig(algorithm="search", scenario="toy_low", env_steps=env_steps, seed=seed)
        for seed in range(2)
    )
    return Experiment(
        TOY, "toy_low", ToyTrial, trials, baselines=("one",), baseline="one", promotion_streams=5
    )


short, long = partial(sweep, DAYS), partial(sweep, 40 * DAYS)


def chain():
    """This problem after another one."""
    return tiny(), short()
