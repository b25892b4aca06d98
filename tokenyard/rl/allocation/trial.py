"""What an allocation trial is made from, and which learner that builds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tokenyard.allocation.artifact import AllocationArtifact
from tokenyard.allocation.policies.rules import load_tuned_allocation
from tokenyard.allocation.problem import PROBLEM
from tokenyard.allocation.scenario import AllocationScenario, Objective
from tokenyard.allocation.search import AllocationSearch, AllocationSearchConfig
from tokenyard.allocation.tabular import TabularConfig, TabularLearner
from tokenyard.rl.allocation.training import AllocationRllib, TabularTraining, allocation_config
from tokenyard.rl.trainable import IteratedConfig, PolicyTrainable
from tokenyard.rl.training import SearchTraining, Training


class AllocationTrialConfig(IteratedConfig):
    """What an allocation trial is made from; its steps are control intervals."""

    algorithm: Literal["ppo", "a2c", "dqn", "policy_search", "q_learning", "sarsa"]
    env: str = "ParallelismEnv"
    """Name that `register_env` registers."""
    objective: Objective | None = None
    """What is rewarded in training, in place of the scenario's."""
    cloned: bool = False
    """Whether ppo or a2c first learn what the tuned autoscaler does."""
    train_steps: Annotated[int, Field(ge=1)] = 200_000
    """Intervals the trial is planned for; schedules end with it."""

    def make_training(self, scenario: AllocationScenario) -> Training[AllocationArtifact]:
        """Build the learner that the fields name.

        Raises:
            ValueError: An RLlib trial without `register_env`, or cloning where nothing can be
                cloned.
        """
        if self.objective is not None:
            scenario = scenario.model_copy(update={"objective": self.objective})
        if self.cloned and self.algorithm not in ("ppo", "a2c"):
            raise ValueError(f"{self.algorithm} cannot be cloned: take ppo or a2c")
        if self.algorithm == "policy_search":
            generations, per_iteration = self.generations(search_env_steps(scenario, 1))
            config = AllocationSearchConfig(num_generations=generations)
            return SearchTraining(AllocationSearch(scenario, config, self.seed), per_iteration)
        if self.algorithm == "q_learning" or self.algorithm == "sarsa":
            table = TabularConfig(self.algorithm, num_steps=self.train_steps)
            learner = TabularLearner(scenario, table, self.seed)
            return TabularTraining(learner, self.steps_per_iteration)
        self.make_env_known()
        settings = self.settings(self.steps_per_iteration)
        algorithm = allocation_config(self.algorithm, self.env, scenario, settings, self.training)
        training = AllocationRllib(algorithm, scenario, self.algorithm)
        if self.cloned:
            training.clone(load_tuned_allocation(scenario.name).autoscaler, self.seed)
        return training


def search_env_steps(scenario: AllocationScenario, num_generations: int) -> int:
    """Slots that so many generations of policy search live through."""
    config = AllocationSearchConfig()
    days = (config.population + 1) * config.days_per_generation
    return num_generations * days * scenario.slots_per_day


class AllocationTrainable(PolicyTrainable):
    """Trains one allocator from the fields of `AllocationTrialConfig`.

    It is scored on the training part under noise of its own: by minus dollars per hour, SLO
    violations included, whatever the reward.
    """

    problem = PROBLEM
    trial_type = AllocationTrialConfig
