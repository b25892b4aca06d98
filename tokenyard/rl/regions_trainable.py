"""One regional trial of a sweep, whatever the algorithm: the Trainable that Ray Tune runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from ray import tune

from tokenyard.regions.artifact import RegionArtifact
from tokenyard.regions.observation import Action
from tokenyard.regions.problem import PROBLEM
from tokenyard.regions.scenario import RegionScenario, load_regions
from tokenyard.regions.search import RegionSearch, RegionSearchConfig
from tokenyard.regions.state import Dispatch
from tokenyard.rl.regions_training import RegionRllib, regions_config
from tokenyard.rl.trainable import Placement, PolicyTrainable, trial_bundles
from tokenyard.rl.training import SearchTraining, Training

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


def make_region_training(
    config: RegionTrialConfig, scenario: RegionScenario
) -> Training[RegionArtifact]:
    """Build the learner that a configuration names.

    Raises:
        ValueError: An RLlib trial without `register_env`.
    """
    if config.algorithm == "policy_search":
        generations = max(1, config.train_steps // search_env_steps(1))
        search = RegionSearch(
            [scenario], RegionSearchConfig(num_generations=generations), config.seed
        )
        return SearchTraining(search, max(1, generations // config.iterations))
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


class RegionTrainable(PolicyTrainable):
    """Trains one regional policy from the fields of `RegionTrialConfig`.

    Steps are slots, and it is scored on validation streams by minus dollars of an episode, whatever
    the reward; the validation also finds the measures of docs/metrics.md.
    """

    def begin(self, config: dict[str, Any]) -> None:
        """Build the learner from the fields of `RegionTrialConfig`."""
        self.trial_config = RegionTrialConfig.model_validate(config)
        scenario = load_regions(self.trial_config.scenario)
        self.validate = PROBLEM.validation(scenario, PROBLEM.num_validation_streams)
        self.training = make_region_training(self.trial_config, scenario)

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """What the trial and its env runners reserve; searches count as if they had one."""
        return trial_bundles(config, 1 + config.get("num_env_runners", 1))
