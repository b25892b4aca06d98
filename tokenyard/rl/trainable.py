"""One trial of a sweep, whatever problem and algorithm: the Trainable that Ray Tune runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from ray import tune

from tokenyard.problem import AnyProblem, TrainedPolicy
from tokenyard.registry import ARTIFACT_FILE
from tokenyard.rl.columnar.sampling import TrainingSettings
from tokenyard.rl.training import Training

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Strategy of a trial's placement group, in Ray's words; the strict ones wait rather than yield."""

_SPENT_FILE = "spent.json"
"""In a checkpoint: CPU time up to it."""
_NOT_LEARNING = {"register_env", "cpus_per_actor", "placement"}
"""Fields that say where a trial runs, not what it learns."""


class TrialConfig(BaseModel):
    """What a trial is made from; every problem adds its own fields and learners."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    algorithm: str
    scenario: str
    """Name or YAML path."""
    register_env: Callable[[], None] | None = None
    """Makes the environment known to RLlib, called in the trial's process; RLlib trials need it
    (`envs.register`)."""
    env: str = ""
    """Name that `register_env` registers."""
    training: Mapping[str, Any] = {}
    """Settings for `AlgorithmConfig.training` in place of the recipe's."""
    seed: Annotated[int, Field(ge=0)] = 0
    train_steps: Annotated[int, Field(ge=1)] = 100_000
    """Environment steps the trial is planned for; schedules end with it."""
    num_env_runners: Annotated[int, Field(ge=0)] = 0
    """Env-runner actors; 0: the trial samples in its own process (decision 0010)."""
    cpus_per_actor: Annotated[float, Field(gt=0)] = 0.5
    """CPUs that the trial's own process and each env runner reserve."""
    placement: Placement = "PACK"
    """Where a trial's actors go: on as few nodes as possible, or on as many."""
    validate_every: Annotated[int, Field(ge=1)] = 1
    """Iterations between validations; results in between repeat the last one."""
    validation_streams: Annotated[int, Field(ge=1)] | None = None
    """None: as many as the problem ranks trials on."""
    validation_seed: Annotated[int, Field(ge=0)] = 0
    """Equal for all trials that are compared."""

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

    def settings(self, steps_per_iteration: int, **more: Any) -> TrainingSettings:
        """What an RLlib training is given.

        Args:
            steps_per_iteration: Fewest environment steps between two results.
            more: Further fields of `TrainingSettings`.
        """
        return TrainingSettings(
            seed=self.seed,
            num_env_runners=self.num_env_runners,
            cpus_per_env_runner=self.cpus_per_actor,
            train_steps=self.train_steps,
            steps_per_iteration=steps_per_iteration,
            **more,
        )

    def lineage(self, scenario: Any) -> dict[str, str]:
        """What a policy is made from, but for its seed and its number of steps."""
        return {"trial_sha256": self.sha256}

    def make_env_known(self) -> None:
        """Register the environment in this process.

        Raises:
            ValueError: The trial does not say how.
        """
        if self.register_env is None:
            raise ValueError(f"a {self.algorithm} trial needs register_env, such as envs.register")
        self.register_env()


class IteratedConfig(TrialConfig):
    """A trial that is cut into a number of iterations, whatever its learner."""

    iterations: Annotated[int, Field(ge=1)] = 10
    """Results until `train_steps`."""

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps between two results."""
        return max(1, self.train_steps // self.iterations)


class PolicyTrainable(tune.Trainable):
    """Trains one policy of `problem` and scores it on validation streams.

    Every result holds `timesteps_total` (environment steps), `score` (higher is better, whatever
    the reward), what else the validation found, `env_steps_per_s` and what the learner says of
    itself; `cpu_s` is the CPU time of learning so far, of its actors too, without validation. Every
    checkpoint holds `artifact.npz`, the policy as it would be served.
    """

    problem: ClassVar[AnyProblem]
    """Draws the streams of validation and scores on them."""
    trial_type: ClassVar[type[TrialConfig]]
    """What a trial's configuration is read into."""

    @staticmethod
    def spelled_out(config: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Fields of `trial_type`, from what tells one trial of a sweep from another."""
        return config

    @classmethod
    def hyperparameters(cls, config: Mapping[str, Any]) -> Mapping[str, float | str]:
        """`TrialConfig.hyperparameters` of a trial that has not been started."""
        trial = cls.trial_type.model_validate(cls.spelled_out(config))
        return trial.hyperparameters(cls.problem.load_scenario(trial.scenario))

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """What the trial and its env runners reserve: a bundle each, where `placement` says.

        A trial without env runners is counted as if it had one: it keeps a core busy, and only
        between equal requests does Tune turn an actor to the next trial.
        """
        default = {name: field.default for name, field in TrialConfig.model_fields.items()}
        given = {**default, **config}
        bundles = [{"CPU": given["cpus_per_actor"]}] * (1 + max(given["num_env_runners"], 1))
        return tune.PlacementGroupFactory(bundles, strategy=given["placement"])

    def setup(self, config: dict[str, Any]) -> None:
        """Build the learner."""
        # More threads than cores make small networks many times slower.
        torch.set_num_threads(1)
        self._validated: dict[str, float] = {}
        self._until_validation = 0
        trial = self.trial_type.model_validate(self.spelled_out(config))
        scenario = self.problem.load_scenario(trial.scenario)
        num_streams = trial.validation_streams or self.problem.num_validation_streams
        self._trial = trial
        self._made_from = trial.lineage(scenario)
        self._validate = self.problem.validation(scenario, num_streams, trial.validation_seed)
        started_cpu_s = time.process_time()
        self._training = trial.make_training(scenario)
        self._cpu_s = time.process_time() - started_cpu_s

    def step(self) -> dict[str, float]:
        """Train one iteration; score the policy when it is due."""
        steps_before, started = self._training.env_steps, time.perf_counter()
        own_before_s, actors_before_s = time.process_time(), self._training.actors_cpu_s
        learned = self._training.step()
        training_s = time.perf_counter() - started
        # An actor that was replaced meanwhile has begun anew.
        actors_s = max(self._training.actors_cpu_s - actors_before_s, 0.0)
        self._cpu_s += time.process_time() - own_before_s + actors_s
        if self._until_validation == 0:
            self._validated = self._validate(self._training.artifact({}, {}))
            self._until_validation = self._trial.validate_every
        self._until_validation -= 1
        env_steps = self._training.env_steps
        return {
            **learned,
            **self._validated,
            "timesteps_total": env_steps,
            "env_steps_per_s": (env_steps - steps_before) / training_s,
            "training_s": training_s,
            "cpu_s": self._cpu_s,
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
        self._cpu_s += json.loads((folder / _SPENT_FILE).read_text(encoding="utf-8"))["cpu_s"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become another trial in the same process."""
        self._training.stop()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Stop the learner's actors."""
        self._training.stop()
