"""One learner of each kind behind one interface: an RLlib algorithm, policy search, or a table.

A sweep compares them; what it needs of each is to go on for a while, to say what the present
policy is, and to be saved and restored.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID

from tokenyard.rl.columnar.env_runner import CLIPPED_FRACTION, REWARD_PER_REQUEST

ArtifactT = TypeVar("ArtifactT", covariant=True)
"""Of routing, allocation or regions."""
TrainedForT = TypeVar("TrainedForT")
"""A scenario, or the traffic of one."""


class Learner(Protocol[ArtifactT]):
    """What is advanced step by step."""

    @property
    def env_steps(self) -> int:
        """Steps of its environment so far: requests routed, or slots lived through."""

    def step(self) -> dict[str, float]:
        """Learn for a while and return what there is to say about it."""

    def artifact(self, metrics: Mapping[str, float], lineage: Mapping[str, str]) -> ArtifactT:
        """The present policy, with what it scored and what it was made from."""


class Training(Learner[ArtifactT], Protocol[ArtifactT]):
    """A learner that a trial runs."""

    remembered_cpu_s: float
    """CPU time of what it begins with, as far as an earlier trial had spent it, seconds."""

    @property
    def actors_cpu_s(self) -> float:
        """CPU time so far of processes that work for it beside its own, seconds."""

    def save(self, folder: Path) -> None:
        """Write what `restore` needs into an existing folder."""

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote."""

    def stop(self) -> None:
        """Let go of actors and memory."""


class Resumable(Learner[ArtifactT], Protocol[ArtifactT]):
    """What learns in this process: a direct policy search, or a table."""

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON has it."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""


class LocalTraining(Generic[ArtifactT]):
    """A search or a table as a `Training`."""

    actors_cpu_s = 0.0
    remembered_cpu_s = 0.0

    def __init__(self, learner: Resumable[ArtifactT], steps_per_result: int) -> None:
        self._learner, self._steps_per_result = learner, steps_per_result
        self.artifact = learner.artifact

    @property
    def env_steps(self) -> int:
        """Of all candidates."""
        return self._learner.env_steps

    def step(self) -> dict[str, float]:
        """Take some steps and return what the last one came to."""
        for _ in range(self._steps_per_result):
            metrics = self._learner.step()
        return metrics

    def save(self, folder: Path) -> None:
        """Write the learner's state as JSON."""
        (folder / "learner.json").write_text(json.dumps(self._learner.state()), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """Read the learner's state."""
        self._learner.restore(json.loads((folder / "learner.json").read_text(encoding="utf-8")))

    def stop(self) -> None:
        """Nothing is held."""


_LEARNER_METRICS = {
    "policy_loss": "policy_loss",
    "vf_loss": "value_loss",
    "entropy": "entropy_nats",
    "vf_explained_var": "value_explained_fraction",
    "qf_loss": "q_loss",
    "qf_mean": "q_mean",
    "td_error_mean": "td_error_mean",
    "gradients_default_optimizer_global_norm": "gradient_norm",
}
"""What is kept of RLlib's learner results, and what it is called here."""


class RllibLearner(Generic[TrainedForT]):
    """An RLlib algorithm, advanced step by step; what it exports is for subclasses to say."""

    remembered_cpu_s = 0.0

    def __init__(
        self,
        config: AlgorithmConfig,
        trained_for: TrainedForT,
        trainer: str,
        reward_scale: float | None = None,
    ) -> None:
        """Build the algorithm and its env runners; a record names the trainer and what it is for.

        Rewards are times `reward_scale`, metrics are without it; None: what the environment's
        configuration says, or 1.
        """
        self._config, self._trained_for, self._trainer = config, trained_for, trainer
        configured = config.env_config.get("reward_scale", 1.0)
        self._reward_scale = float(configured if reward_scale is None else reward_scale)
        self._algorithm: Algorithm = config.build_algo()
        # Every algorithm makes itself a folder in the home directory; this one writes nothing.
        os.rmdir(self._algorithm.logdir)
        if (buffer := self._algorithm.local_replay_buffer) is not None:
            # RLlib draws replay from an unseeded generator: two equal runs would differ.
            buffer.rng = np.random.default_rng(self._config.seed)
        self._env_steps = 0

    @property
    def env_steps(self) -> int:
        """Environment steps sampled so far."""
        return self._env_steps

    @property
    def actors_cpu_s(self) -> float:
        """CPU time of the env-runner actors that are alive, seconds."""
        if not self._config.num_env_runners:
            return 0.0
        spent = self._algorithm.env_runner_group.foreach_env_runner(
            lambda _: time.process_time(), local_env_runner=False
        )
        return float(sum(spent))

    @property
    def module(self) -> Any:
        """The module that is being trained."""
        results = self._algorithm.learner_group.foreach_learner(
            lambda learner: learner.module[DEFAULT_MODULE_ID].unwrapped()
        )
        return next(iter(results)).get()

    @property
    def env_runner(self) -> Any:
        """The env runner in this process."""
        return self._algorithm.env_runner

    def step(self) -> dict[str, float]:
        """Train for one iteration of the configuration.

        While env runners are being restarted there may be no sample, and then no metric.
        """
        result = self._algorithm.train()
        runners = result.get("env_runners", {})
        learner = result.get("learners", {}).get(DEFAULT_MODULE_ID, {})
        metrics = {ours: learner[key] for key, ours in _LEARNER_METRICS.items() if key in learner}
        if REWARD_PER_REQUEST in runners:
            metrics[REWARD_PER_REQUEST] = runners[REWARD_PER_REQUEST] / self._reward_scale
        if CLIPPED_FRACTION in runners:
            metrics[CLIPPED_FRACTION] = runners[CLIPPED_FRACTION]
        self._env_steps = int(runners.get("num_env_steps_sampled_lifetime", self._env_steps))
        return {name: float(value) for name, value in metrics.items() if np.isfinite(value)}

    def save(self, folder: Path) -> None:
        """Write RLlib's checkpoint of weights, optimiser and counters."""
        self._algorithm.save_to_path((folder / "algorithm").absolute())
        state = json.dumps({"env_steps": self._env_steps})
        (folder / "training.json").write_text(state, encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """Read RLlib's checkpoint; replay starts afresh, and environments with other traffic."""
        self._algorithm.restore_from_path((folder / "algorithm").absolute())
        state = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        self._env_steps = state["env_steps"]

    def stop(self) -> None:
        """Stop the env-runner actors."""
        self._algorithm.stop()
