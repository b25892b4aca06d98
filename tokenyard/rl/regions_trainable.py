"""One regional trial of a sweep, whatever the algorithm: the Trainable that Ray Tune runs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from ray import tune

from tokenyard.regions.artifact import RegionArtifact
from tokenyard.regions.observation import Action
from tokenyard.regions.scenario import RegionScenario, load_regions
from tokenyard.regions.state import Dispatch
from tokenyard.regions_evaluation import RegionValidation
from tokenyard.rl.regions_search import RegionSearch, RegionSearchConfig
from tokenyard.rl.regions_training import (
    RegionRllib,
    RegionSearchTraining,
    RegionTraining,
    regions_config,
)
from tokenyard.rl.trainable import ARTIFACT_FILE, Placement, trial_bundles

_NOT_LEARNING = {"register_env", "cpus_per_actor", "placement"}


class RegionTrialConfig(BaseModel):
    """What a regional trial is made from."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    algorithm: Literal["ppo", "a2c", "torta_faithful", "policy_search"]
    scenario: str
    """Name or YAML path."""
    register_env: Callable[[], None] | None = None
    """Makes the environment known to RLlib, called in the trial's process; RLlib trials need it
    (`envs.register`)."""
    env: str = "RegionEnv"
    """Name that `register_env` registers."""
    reward: Mapping[str, float] = {}
    """Fields of `envs.regions.RegionReward`; a search has its own objective."""
    action: Action = "mix"
    dispatch: Dispatch = "live_cost"
    seed: Annotated[int, Field(ge=0)] = 0
    train_steps: Annotated[int, Field(ge=1)] = 100_000
    """Slots the trial is planned for; schedules end with it."""
    iterations: Annotated[int, Field(ge=1)] = 10
    """Results until then."""
    num_env_runners: Annotated[int, Field(ge=0)] = 1
    """Env-runner actors; 0 samples in the trial's own process."""
    cpus_per_actor: Annotated[float, Field(gt=0)] = 0.5
    """CPUs that the trial's own process and each env runner reserve."""
    placement: Placement = "PACK"
    """Where a trial's actors go: on as few nodes as possible, or on as many."""

    @property
    def sha256(self) -> str:
        """Twelve digits that tell what is learned, wherever it runs."""
        text = self.model_dump_json(exclude=_NOT_LEARNING)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def search_env_steps(num_generations: int, config: RegionSearchConfig | None = None) -> int:
    """Slots that so many generations of policy search over one scenario live through."""
    config = config or RegionSearchConfig()
    return num_generations * (config.population + 2) * config.slots


def make_region_training(config: RegionTrialConfig, scenario: RegionScenario) -> RegionTraining:
    """Build the learner that a configuration names.

    Raises:
        ValueError: An RLlib trial without `register_env`.
    """
    if config.algorithm == "policy_search":
        generations = max(1, config.train_steps // search_env_steps(1))
        search = RegionSearch(
            [scenario], RegionSearchConfig(num_generations=generations), config.seed
        )
        return RegionSearchTraining(search, max(1, generations // config.iterations))
    if config.register_env is None:
        raise ValueError(f"a {config.algorithm} trial needs register_env, such as envs.register")
    config.register_env()
    algorithm = regions_config(
        config.algorithm,
        config.env,
        scenario,
        reward=config.reward,
        action=config.action,
        dispatch=config.dispatch,
        seed=config.seed,
        num_env_runners=config.num_env_runners,
        cpus_per_env_runner=config.cpus_per_actor,
        train_steps=config.train_steps,
        steps_per_iteration=max(1, config.train_steps // config.iterations),
    )
    return RegionRllib(algorithm, scenario, config.algorithm)


class RegionTrainable(tune.Trainable):
    """Trains one regional policy and scores it on validation streams.

    Every result holds `timesteps_total` (slots), `score` (minus dollars of an episode, whatever the
    reward), the measures of docs/metrics.md, `env_steps_per_s` and what the learner says of itself.
    Every checkpoint holds `artifact.npz`.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Build the learner from the fields of `RegionTrialConfig`."""
        self._start(config)

    def _start(self, config: Mapping[str, Any]) -> None:
        # More threads than cores make small networks many times slower.
        torch.set_num_threads(1)
        self.trial_config = RegionTrialConfig.model_validate(dict(config))
        scenario = load_regions(self.trial_config.scenario)
        self._validate = RegionValidation(scenario)
        self._validated: dict[str, float] = {}
        self.training = make_region_training(self.trial_config, scenario)

    def step(self) -> dict[str, float]:
        """Train one iteration and score the policy."""
        steps_before, started = self.training.env_steps, time.perf_counter()
        learned = self.training.step()
        training_s = time.perf_counter() - started
        self._validated = self._validate(self.training.artifact({}, {}))
        env_steps = self.training.env_steps
        return {
            **learned,
            **self._validated,
            "timesteps_total": env_steps,
            "env_steps_per_s": (env_steps - steps_before) / training_s,
            "training_s": training_s,
        }

    def artifact(self) -> RegionArtifact:
        """The present policy, with what it last scored and what it was made from."""
        lineage = {
            "trial_sha256": self.trial_config.sha256,
            "seed": str(self.trial_config.seed),
            "env_steps": str(self.training.env_steps),
        }
        return self.training.artifact(self._validated, lineage)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the learner's state and the policy as it would be served."""
        folder = Path(checkpoint_dir)
        self.training.save(folder)
        self.artifact().save(folder / ARTIFACT_FILE)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Go on from a checkpoint."""
        self.training.restore(Path(checkpoint_dir))

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become another trial in the same process."""
        self.training.stop()
        self._start(new_config)
        return True

    def cleanup(self) -> None:
        """Stop the learner's actors."""
        self.training.stop()

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """What the trial and its env runners reserve; searches count as if they had one."""
        return trial_bundles(config, 1 + config.get("num_env_runners", 1))
