"""What a regional trial is made from, and which learner that builds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from tokenyard.regions.artifact import RegionArtifact
from tokenyard.regions.observation import Action
from tokenyard.regions.problem import PROBLEM
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.search import RegionSearch, RegionSearchConfig
from tokenyard.regions.types import Dispatch
from tokenyard.rl.algorithms import flat_numbers, hyperparameters
from tokenyard.rl.regions.training import RegionRllib, regions_config
from tokenyard.rl.trainable import IteratedConfig, PolicyTrainable
from tokenyard.rl.training import SearchTraining, Training


class RegionTrialConfig(IteratedConfig):
    """What a regional trial is made from; its steps are intervals."""

    algorithm: Literal["ppo", "a2c", "torta_faithful", "policy_search"]
    env: str = "RegionEnv"
    """Name that `register_env` registers."""
    reward: Mapping[str, float] = {}
    """Fields of `envs.regions.RegionReward`; a search has its own objective."""
    action: Action = "mix"
    dispatch: Dispatch = "live_cost"

    def hyperparameters(self, scenario: RegionScenario) -> dict[str, float | str]:
        """Reward, learner and network; of a search, its settings."""
        if self.algorithm == "policy_search":
            return flat_numbers(self._search_config())
        rewarded = {f"reward.{name}": weight for name, weight in self.reward.items()}
        return rewarded | hyperparameters(self._algorithm_config(scenario))

    def make_training(self, scenario: RegionScenario) -> Training[RegionArtifact]:
        """Build the learner that the fields name.

        Raises:
            ValueError: An RLlib trial without `register_env`.
        """
        if self.algorithm == "policy_search":
            _, per_iteration = self.generations(search_env_steps(1))
            search = RegionSearch([scenario], self._search_config(), self.seed)
            return SearchTraining(search, per_iteration)
        self.make_env_known()
        return RegionRllib(self._algorithm_config(scenario), scenario, self.algorithm)

    def _search_config(self) -> RegionSearchConfig:
        return RegionSearchConfig(num_generations=self.generations(search_env_steps(1))[0])

    def _algorithm_config(self, scenario: RegionScenario) -> AlgorithmConfig:
        assert self.algorithm != "policy_search"
        return regions_config(
            self.algorithm,
            self.env,
            scenario,
            self.settings(self.steps_per_iteration, implementation="rllib_stock"),
            reward=self.reward,
            action=self.action,
            dispatch=self.dispatch,
        )


def search_env_steps(num_generations: int, config: RegionSearchConfig | None = None) -> int:
    """Slots that so many generations of policy search over one scenario live through."""
    config = config or RegionSearchConfig()
    return num_generations * (config.population + 1) * config.slots


class RegionTrainable(PolicyTrainable):
    """Trains one regional policy from the fields of `RegionTrialConfig`.

    It is scored on validation streams by minus dollars of an episode, whatever the reward.
    """

    problem = PROBLEM
    trial_type = RegionTrialConfig
