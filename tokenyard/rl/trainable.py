"""One trial of a sweep, whatever the algorithm: the Trainable that Ray Tune runs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from ray import tune

from tokenyard.rl.recipes import Recipe, build_config, recipe
from tokenyard.rl.rollouts import RolloutConfig, RolloutImprovement
from tokenyard.rl.sampling import Implementation
from tokenyard.rl.training import RllibTraining, SearchTraining, Training
from tokenyard.routing.artifact import PolicyArtifact, lineage_of
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.search import PolicySearch, SearchConfig
from tokenyard.scenario import RewardWeights, load_scenario
from tokenyard.sim.streams import StreamSource

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Strategy of a trial's placement group, in Ray's words; the strict ones wait rather than yield."""

_NOT_LEARNING = {"register_env", "cpus_per_actor", "placement"}
"""Fields that say where a trial runs, not what it learns."""

ARTIFACT_FILE = "artifact.npz"
"""The exported policy in every checkpoint."""


class TrialConfig(BaseModel):
    """What a trial is made from."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    algorithm: Literal["ppo", "a2c", "dqn", "policy_search", "rollouts"]
    scenario: str
    """Name or YAML path."""
    register_env: Callable[[], None] | None = None
    """Makes the environment known to RLlib, called in the trial's process; RLlib trials need it
    (`envs.register`)."""
    env: str = "LoadBalancingEnv"
    """Name that `register_env` registers."""
    implementation: Implementation = "tokenyard"
    """Who samples and learns in an RLlib trial (`recipes.build_config`)."""
    recipe: str = "ours"
    """Name of a recipe of `tokenyard.rl.recipes`."""
    reward: RewardWeights | None = None
    """Weights in place of the recipe's."""
    residual_scale: Annotated[float, Field(ge=0)] | None = None
    """In place of the recipe's; 0 trains without a baseline under the network."""
    training: Mapping[str, Any] = {}
    """Settings for `AlgorithmConfig.training` in place of the recipe's."""
    seed: Annotated[int, Field(ge=0)] = 0
    train_steps: Annotated[int, Field(ge=1)] = 100_000
    """Environment steps the trial is planned for; schedules end with it."""
    steps_per_iteration: Annotated[int, Field(ge=1)] = 4096
    """Fewest environment steps between two results of an RLlib trial."""
    num_env_runners: Annotated[int, Field(ge=0)] = 1
    """Env-runner actors; 0 samples in the trial's own process."""
    cpus_per_actor: Annotated[float, Field(gt=0)] = 0.5
    """CPUs that the trial's own process and each env runner reserve."""
    placement: Placement = "PACK"
    """Where a trial's actors go: on as few nodes as possible, or on as many."""
    num_envs: Annotated[int, Field(ge=1)] | None = None
    """Copies of the environment per env runner, in place of the recipe's."""
    generations_per_iteration: Annotated[int, Field(ge=1)] = 8
    """Generations of policy search, or rounds of rollouts, between two results."""
    validate_every: Annotated[int, Field(ge=1)] = 1
    """Iterations between validations; results in between repeat the last one."""
    validation_streams: Annotated[int, Field(ge=1)] = 8
    validation_seed: Annotated[int, Field(ge=0)] = 0
    """Equal for all trials that are compared."""

    @property
    def sha256(self) -> str:
        """Twelve digits that tell what is learned, wherever it runs."""
        text = self.model_dump_json(exclude=_NOT_LEARNING)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def adapted_recipe(self) -> Recipe:
        """The recipe with what this trial changes.

        Raises:
            ValueError: Unknown recipe.
        """
        base = recipe(self.recipe)
        own = base.algorithms[self.algorithm]
        scale = own.residual_scale if self.residual_scale is None else self.residual_scale
        changed = replace(
            own,
            training={**own.training, **self.training},
            reward=self.reward or own.reward,
            residual_scale=scale,
        )
        return replace(
            base,
            num_envs=self.num_envs or base.num_envs,
            algorithms={**base.algorithms, self.algorithm: changed},
        )


def make_training(config: TrialConfig, source: StreamSource) -> Training[PolicyArtifact]:
    """Build the learner that a configuration names.

    Raises:
        ValueError: An RLlib trial without `register_env`, a flat network for a fleet, or rollouts
            without one.
    """
    if config.algorithm == "policy_search":
        like_the_others = SearchConfig(randomisation=recipe(config.recipe).randomisation)
        search = PolicySearch(source.scenario, like_the_others, config.seed)
        return SearchTraining(search, config.generations_per_iteration)
    if config.algorithm == "rollouts":
        improvement = RolloutImprovement(
            source.scenario,
            RolloutConfig(load_factor=recipe(config.recipe).randomisation.load_factor),
            config.seed,
        )
        return SearchTraining(improvement, config.generations_per_iteration)
    if config.register_env is None:
        raise ValueError(f"a {config.algorithm} trial needs register_env, such as envs.register")
    adapted = config.adapted_recipe()
    if source.scenario.fleet is not None and adapted.network == "flat":
        raise ValueError(f"recipe {config.recipe!r} is not for a fleet; choose 'fleet'")
    config.register_env()
    algorithm = build_config(
        config.algorithm,
        adapted,
        config.env,
        {"scenario": config.scenario},
        seed=config.seed,
        num_env_runners=config.num_env_runners,
        cpus_per_env_runner=config.cpus_per_actor,
        train_steps=config.train_steps,
        steps_per_iteration=config.steps_per_iteration,
        implementation=config.implementation,
    )
    return RllibTraining(algorithm, source, config.algorithm, adapted.reward_scale)


class PolicyTrainable(tune.Trainable):
    """Trains one policy, whatever it decides, and scores it on validation streams.

    Every result holds `timesteps_total` (environment steps), `score` (higher is better, whatever
    the reward), what else the validation found, `env_steps_per_s` and what the learner says of
    itself. Every checkpoint holds `artifact.npz`, the policy as it would be served.
    """

    trial_config: Any
    """The validated fields, with a `seed` and a `sha256`."""
    training: Training[Any]
    validate: Callable[[Any], dict[str, float]]
    """Scores an exported policy."""
    validate_every = 1
    """Iterations between validations; results in between repeat the last one."""

    def begin(self, config: dict[str, Any]) -> None:
        """Set `trial_config`, `training` and `validate` from a trial's configuration."""
        raise NotImplementedError

    def lineage(self) -> dict[str, str]:
        """What the policy was made from."""
        return {
            "trial_sha256": self.trial_config.sha256,
            "seed": str(self.trial_config.seed),
            "env_steps": str(self.training.env_steps),
        }

    def setup(self, config: dict[str, Any]) -> None:
        """Build the learner."""
        # More threads than cores make small networks many times slower.
        torch.set_num_threads(1)
        self._validated: dict[str, float] = {}
        self._until_validation = 0
        self.begin(config)

    def step(self) -> dict[str, float]:
        """Train one iteration; score the policy when it is due."""
        steps_before, started = self.training.env_steps, time.perf_counter()
        learned = self.training.step()
        training_s = time.perf_counter() - started
        if self._until_validation == 0:
            self._validated = self.validate(self.training.artifact({}, {}))
            self._until_validation = self.validate_every
        self._until_validation -= 1
        env_steps = self.training.env_steps
        return {
            **learned,
            **self._validated,
            "timesteps_total": env_steps,
            "env_steps_per_s": (env_steps - steps_before) / training_s,
            "training_s": training_s,
        }

    def artifact(self) -> Any:
        """The present policy, with what it last scored and what it was made from."""
        return self.training.artifact(self._validated, self.lineage())

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
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Stop the learner's actors."""
        self.training.stop()


class RouterTrainable(PolicyTrainable):
    """Trains one router from the fields of `TrialConfig`.

    Its validation finds `mean_response_s`, `p99_response_s` and `slo_violation_fraction`.
    """

    def begin(self, config: dict[str, Any]) -> None:
        """Build the learner from the fields of `TrialConfig`."""
        self.trial_config = TrialConfig.model_validate(config)
        scenario = load_scenario(self.trial_config.scenario)
        streams, seed = self.trial_config.validation_streams, self.trial_config.validation_seed
        self.validate = PROBLEM.validation(scenario, streams, seed)
        self.validate_every = self.trial_config.validate_every
        self.training = make_training(self.trial_config, StreamSource(scenario))

    def lineage(self) -> dict[str, str]:
        """The recipe and the data as well."""
        scenario = load_scenario(self.trial_config.scenario)
        return {
            **super().lineage(), "recipe": self.trial_config.recipe, **lineage_of(scenario)
        }  # fmt: skip

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """What the trial and its env runners reserve, one bundle each."""
        search = config["algorithm"] in ("policy_search", "rollouts")
        num_env_runners = 0 if search else config.get("num_env_runners", 1)
        return trial_bundles(config, 1 + num_env_runners)


def trial_bundles(config: Mapping[str, Any], num_actors: int) -> tune.PlacementGroupFactory:
    """Reserve a bundle for each of a trial's actors, by its `cpus_per_actor` and `placement`."""
    cpus = config.get("cpus_per_actor", TrialConfig.model_fields["cpus_per_actor"].default)
    strategy = config.get("placement", TrialConfig.model_fields["placement"].default)
    return tune.PlacementGroupFactory([{"CPU": cpus}] * num_actors, strategy=strategy)
