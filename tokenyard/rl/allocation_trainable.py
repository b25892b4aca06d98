"""One allocation trial of a sweep, whatever the algorithm: the Trainable that Ray Tune runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from ray import tune

from tokenyard.allocation.artifact import AllocationArtifact
from tokenyard.allocation.policies.rules import load_tuned_allocation
from tokenyard.allocation.problem import PROBLEM
from tokenyard.allocation.scenario import AllocationScenario, Objective, load_allocation
from tokenyard.allocation.search import AllocationSearch, AllocationSearchConfig
from tokenyard.allocation.tabular import TabularConfig, TabularLearner
from tokenyard.rl.allocation_training import AllocationRllib, TabularTraining, allocation_config
from tokenyard.rl.trainable import Placement, PolicyTrainable, trial_bundles
from tokenyard.rl.training import SearchTraining, Training

_NOT_LEARNING = {"register_env", "cpus_per_actor", "placement"}


class AllocationTrialConfig(BaseModel):
    """What an allocation trial is made from."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    algorithm: Literal["ppo", "a2c", "dqn", "policy_search", "q_learning", "sarsa"]
    scenario: str
    """Name or YAML path."""
    register_env: Callable[[], None] | None = None
    """Makes the environment known to RLlib, called in the trial's process; RLlib trials need it
    (`envs.register`)."""
    env: str = "ParallelismEnv"
    """Name that `register_env` registers."""
    objective: Objective | None = None
    """What is rewarded in training, in place of the scenario's."""
    cloned: bool = False
    """Whether ppo or a2c first learn what the tuned autoscaler does."""
    training: Mapping[str, Any] = {}
    """Settings for `AlgorithmConfig.training` in place of ours."""
    seed: Annotated[int, Field(ge=0)] = 0
    train_steps: Annotated[int, Field(ge=1)] = 200_000
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


def search_env_steps(scenario: AllocationScenario, num_generations: int) -> int:
    """Slots that so many generations of policy search live through."""
    config = AllocationSearchConfig()
    days = (config.population + 1) * config.days_per_generation
    return num_generations * days * scenario.slots_per_day


def make_allocation_training(
    config: AllocationTrialConfig, scenario: AllocationScenario
) -> Training[AllocationArtifact]:
    """Build the learner that a configuration names.

    Args:
        config: Of the trial.
        scenario: With the objective that is trained on.

    Raises:
        ValueError: An RLlib trial without `register_env`, or cloning where nothing can be cloned.
    """
    per_iteration = max(1, config.train_steps // config.iterations)
    if config.cloned and config.algorithm not in ("ppo", "a2c"):
        raise ValueError(f"{config.algorithm} cannot be cloned: take ppo or a2c")
    if config.algorithm == "policy_search":
        generations = config.train_steps // search_env_steps(scenario, 1)
        search = AllocationSearch(
            scenario, AllocationSearchConfig(num_generations=max(generations, 1)), config.seed
        )
        return SearchTraining(search, max(1, generations // config.iterations))
    if config.algorithm == "q_learning" or config.algorithm == "sarsa":
        table = TabularConfig(config.algorithm, num_steps=config.train_steps)
        return TabularTraining(TabularLearner(scenario, table, config.seed), per_iteration)
    if config.register_env is None:
        raise ValueError(f"a {config.algorithm} trial needs register_env, such as envs.register")
    config.register_env()
    algorithm = allocation_config(
        config.algorithm,
        config.env,
        scenario,
        training=config.training,
        seed=config.seed,
        num_env_runners=config.num_env_runners,
        cpus_per_env_runner=config.cpus_per_actor,
        train_steps=config.train_steps,
        steps_per_iteration=per_iteration,
    )
    training = AllocationRllib(algorithm, scenario, config.algorithm)
    if config.cloned:
        training.clone(load_tuned_allocation(scenario.name).autoscaler, config.seed)
    return training


class AllocationTrainable(PolicyTrainable):
    """Trains one allocator from the fields of `AllocationTrialConfig`.

    It is scored on the training part under noise of its own: by minus dollars per hour, missed
    requests included, whatever the reward. The validation also finds the measures of
    docs/metrics.md.
    """

    def begin(self, config: dict[str, Any]) -> None:
        """Build the learner from the fields of `AllocationTrialConfig`."""
        self.trial_config = AllocationTrialConfig.model_validate(config)
        scenario = load_allocation(self.trial_config.scenario)
        self.validate = PROBLEM.validation(scenario, PROBLEM.num_validation_streams)
        if self.trial_config.objective is not None:
            scenario = scenario.model_copy(update={"objective": self.trial_config.objective})
        self.training = make_allocation_training(self.trial_config, scenario)

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """What the trial and its env runners reserve, one bundle each.

        Tables and searches have no env runner and are counted as if they had: they keep a core
        busy, and only between equal requests does Tune turn an actor to the next trial.
        """
        return trial_bundles(config, 1 + config.get("num_env_runners", 1))
