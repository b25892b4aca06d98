"""One trial of a sweep, whatever problem and algorithm: the Trainable that Ray Tune runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from ray import tune

from tokenyard.problem import AnyProblem, TrainedPolicy
from tokenyard.registry import ARTIFACT_FILE
from tokenyard.rl.columnar.sampling import TrainingSettings
from tokenyard.rl.training import Training

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Strategy of a trial's placement group, in Ray's words; the strict ones wait rather than yield."""

_SPENT_FILE = "spent.json"
"""In a checkpoint: CPU time up to it."""
_NOT_LEARNING = {"cpus_per_actor", "placement"}
"""Fields that say where a trial runs, not what it learns."""


class TrialConfig(TrainingSettings):
    """What a trial is made from; every problem adds its own fields and learners.

    A sweep tells trials apart by the fields that are set. They are what Ray Tune draws, and
    parameters of the trial's run in MLflow.
    """

    algorithm: str
    scenario: str
    """Name or YAML path."""
    reward_weights: str = ""
    """Name of the weights that training rewards with, of those that the problem knows."""
    weights: Mapping[str, float] = {}
    """Weights by term, in place of some of those that `reward_weights` names."""
    training: Mapping[str, Any] = {}
    """Settings for `AlgorithmConfig.training` in place of the recipe's."""
    placement: Placement = "PACK"
    """Where a trial's actors go: on as few nodes as possible, or on as many."""
    validation_streams: Annotated[int, Field(ge=1)] | None = None
    """None: as many as the problem ranks trials on."""

    @property
    def sha256(self) -> str:
        """Twelve digits that tell what is learned, wherever it runs."""
        text = self.model_dump_json(exclude=_NOT_LEARNING)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def make_training(self, scenario: Any) -> Training[TrainedPolicy]:
        """Build the learner that the fields name, for a scenario of the problem.

        Raises:
            ValueError: The fields do not go together.
        """
        raise NotImplementedError

    def hyperparameters(self, scenario: Any) -> Mapping[str, float | str]:
        """What is learned from and with, as plain values by name.

        Weights of the reward are under `reward.`; the rest is learning rate, discount, batch and
        network, or the size of a search.
        """
        return {}

    def lineage(self, scenario: Any) -> dict[str, str]:
        """What a policy is made from, but for its seed and its number of steps."""
        return {"trial_sha256": self.sha256}


class PolicyTrainable(tune.Trainable):
    """Trains one policy of `problem` and scores it on validation streams.

    The first result, at 0 environment steps, is of the policy that training begins with. So where
    no later checkpoint scores better, the trial's best policy is its start.

    Every result holds `timesteps_total` (environment steps) and, under a prefix each, what the
    validation found (`eval/`, with `eval/score`: higher is better, whatever the reward), what the
    learner says of itself (`train/`), and what it took (`system/`): `system/cpu_s` is the CPU time
    of learning so far, of its actors too, without validation. Every checkpoint holds
    `artifact.npz`, the policy as it would be served.
    """

    problem: ClassVar[AnyProblem]
    """Draws the streams of validation and scores on them."""
    trial_type: ClassVar[type[TrialConfig]]
    """What a trial's configuration is read into."""

    @staticmethod
    def register_env() -> None:
        """Make the environment known to RLlib, in the trial's process; nothing by default."""

    @classmethod
    def hyperparameters(cls, config: Mapping[str, Any]) -> Mapping[str, float | str]:
        """`TrialConfig.hyperparameters` of a trial that has not been started."""
        trial = cls.trial_type.model_validate(config)
        return trial.hyperparameters(cls.problem.load_scenario(trial.scenario))

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """What the trial and its env runners reserve: a bundle each, where `placement` says.

        A trial without env runners is counted as if it had one: it keeps a core busy, and only
        between equal requests does Tune turn an actor to the next trial.
        """
        trial = cls.trial_type.model_construct(**config)
        bundles = [{"CPU": trial.cpus_per_actor}] * (1 + max(trial.num_env_runners, 1))
        return tune.PlacementGroupFactory(bundles, strategy=trial.placement)

    def setup(self, config: dict[str, Any]) -> None:
        """Build the learner."""
        # More threads than cores make small networks many times slower.
        torch.set_num_threads(1)
        self._validated: dict[str, float] = {}
        trial = self.trial_type.model_validate(config)
        scenario = self.problem.load_scenario(trial.scenario)
        num_streams = trial.validation_streams or self.problem.num_validation_streams
        self._trial = trial
        self._made_from = trial.lineage(scenario)
        self._validate = self.problem.validation(scenario, num_streams)
        self.register_env()
        started_cpu_s = time.process_time()
        self._training = trial.make_training(scenario)
        self._cpu_s = time.process_time() - started_cpu_s + self._training.remembered_cpu_s
        self._start_is_scored = False

    def step(self) -> dict[str, float]:
        """Train one iteration, except the first time; score the policy."""
        learned = self._train() if self._start_is_scored else {}
        self._start_is_scored = True
        self._validated = self._validate(self._training.artifact({}, {}))
        return {
            **learned,
            **{f"eval/{key}": value for key, value in self._validated.items()},
            "timesteps_total": self._training.env_steps,
            "system/cpu_s": self._cpu_s,
        }

    def _train(self) -> dict[str, float]:
        steps_before, started = self._training.env_steps, time.perf_counter()
        own_before_s, actors_before_s = time.process_time(), self._training.actors_cpu_s
        learned = self._training.step()
        training_s = time.perf_counter() - started
        # An actor that was replaced meanwhile has begun anew.
        actors_s = max(self._training.actors_cpu_s - actors_before_s, 0.0)
        self._cpu_s += time.process_time() - own_before_s + actors_s
        return {
            **{f"train/{key}": value for key, value in learned.items()},
            "system/env_steps_per_s": (self._training.env_steps - steps_before) / training_s,
            "system/training_s": training_s,
        }

    def artifact(self) -> TrainedPolicy:
        """The present policy, with what it last scored and what it was made from."""
        lineage = {
            **self._made_from,
            "seed": str(self._trial.seed),
            "env_steps": str(self._training.env_steps),
        }
        return self._training.artifact(self._validated, lineage)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the learner's state and the policy as it would be served."""
        folder = Path(checkpoint_dir)
        self._training.save(folder)
        (folder / _SPENT_FILE).write_text(json.dumps({"cpu_s": self._cpu_s}), encoding="utf-8")
        self.artifact().save(folder / ARTIFACT_FILE)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Go on from a checkpoint."""
        folder = Path(checkpoint_dir)
        self._training.restore(folder)
        self._start_is_scored = True
        self._cpu_s += json.loads((folder / _SPENT_FILE).read_text(encoding="utf-8"))["cpu_s"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become another trial in the same process."""
        self._training.stop()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Stop the learner's actors."""
        self._training.stop()
