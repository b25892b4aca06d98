"""What an allocation trial is made from, and which learner that builds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from tokenyard.allocation.artifact import AllocationArtifact
from tokenyard.allocation.policies.rules import load_tuned_allocation
from tokenyard.allocation.problem import PROBLEM
from tokenyard.allocation.scenario import AllocationScenario, Objective
from tokenyard.allocation.tabular import TabularConfig, TabularLearner
from tokenyard.rl.algorithms import flat_numbers, hyperparameters
from tokenyard.rl.allocation.training import AllocationRllib, TabularTraining, allocation_config
from tokenyard.rl.trainable import IteratedConfig, PolicyTrainable
from tokenyard.rl.training import Training


class AllocationTrialConfig(IteratedConfig):
    """What an allocation trial is made from; its steps are control intervals."""

    algorithm: Literal["ppo", "a2c", "dqn", "q_learning", "sarsa"]
    env: str = "ParallelismEnv"
    """Name that `register_env` registers."""
    objective: Objective | None = None
    """What is rewarded in training, in place of the scenario's."""
    cloned: bool = False
    """Whether ppo or a2c first learn what the tuned autoscaler does."""
    train_steps: Annotated[int, Field(ge=1)] = 200_000
    """Intervals the trial is planned for; schedules end with it."""

    def hyperparameters(self, scenario: AllocationScenario) -> dict[str, float | str]:
        """Reward, learner and network; of tables, their settings."""
        scenario = self._rewarded(scenario)
        rewarded = flat_numbers(scenario.reward, "reward.")
        if self.algorithm == "q_learning" or self.algorithm == "sarsa":
            return rewarded | flat_numbers(TabularConfig(self.algorithm, self.train_steps))
        return rewarded | hyperparameters(self._algorithm_config(scenario))

    def make_training(self, scenario: AllocationScenario) -> Training[AllocationArtifact]:
        """Build the learner that the fields name.

        Raises:
            ValueError: An RLlib trial without `register_env`, or cloning where nothing can be
                cloned.
        """
        scenario = self._rewarded(scenario)
        if self.cloned and self.algorithm not in ("ppo", "a2c"):
            raise ValueError(f"{self.algorithm} cannot be cloned: take ppo or a2c")
        if self.algorithm == "q_learning" or self.algorithm == "sarsa":
            table = TabularConfig(self.algorithm, num_steps=self.train_steps)
            learner = TabularLearner(scenario, table, self.seed)
            return TabularTraining(learner, self.steps_per_iteration)
        self.make_env_known()
        training = AllocationRllib(self._algorithm_config(scenario), scenario, self.algorithm)
        if self.cloned:
            training.clone(load_tuned_allocation(scenario.name).autoscaler, self.seed)
        return training

    def _rewarded(self, scenario: AllocationScenario) -> AllocationScenario:
        if self.objective is None:
            return scenario
        return scenario.model_copy(update={"objective": self.objective})

    def _algorithm_config(self, scenario: AllocationScenario) -> AlgorithmConfig:
        assert self.algorithm in ("ppo", "a2c", "dqn")
        settings = self.settings(self.steps_per_iteration)
        return allocation_config(self.algorithm, self.env, scenario, settings, self.training)


class AllocationTrainable(PolicyTrainable):
    """Trains one allocator from the fields of `AllocationTrialConfig`.

    It is scored on the training part under noise of its own: by minus dollars per hour, SLO
    violations included, whatever the reward.
    """

    problem = PROBLEM
    trial_type = AllocationTrialConfig
