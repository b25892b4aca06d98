"""What a regional trial is made from, and which learner that builds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from tokenyard.regions.artifact import RegionArtifact
from tokenyard.regions.observation import Action
from tokenyard.regions.problem import PROBLEM
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.types import Dispatch
from tokenyard.rl.algorithms import hyperparameters
from tokenyard.rl.regions.training import RegionRllib, regions_config
from tokenyard.rl.trainable import IteratedConfig, PolicyTrainable
from tokenyard.rl.training import Training


class RegionTrialConfig(IteratedConfig):
    """What a regional trial is made from; its steps are intervals."""

    algorithm: Literal["ppo", "a2c", "torta_faithful"]
    env: str = "RegionEnv"
    """Name that `register_env` registers."""
    reward: Mapping[str, float] = {}
    """Fields of `envs.regions.RegionReward`."""
    action: Action = "mix"
    dispatch: Dispatch = "live_cost"

    def hyperparameters(self, scenario: RegionScenario) -> dict[str, float | str]:
        """Reward, learner and network."""
        rewarded = {f"reward.{name}": weight for name, weight in self.reward.items()}
        return rewarded | hyperparameters(self._algorithm_config(scenario))

    def make_training(self, scenario: RegionScenario) -> Training[RegionArtifact]:
        """Build the learner that the fields name.

        Raises:
            ValueError: No `register_env`.
        """
        self.make_env_known()
        return RegionRllib(self._algorithm_config(scenario), scenario, self.algorithm)

    def _algorithm_config(self, scenario: RegionScenario) -> AlgorithmConfig:
        return regions_config(
            self.algorithm,
            self.env,
            scenario,
            self.settings(self.steps_per_iteration, implementation="rllib_stock"),
            reward=self.reward,
            action=self.action,
            dispatch=self.dispatch,
            training=self.training,
        )


class RegionTrainable(PolicyTrainable):
    """Trains one regional policy from the fields of `RegionTrialConfig`.

    It is scored on validation streams by minus dollars of an episode, whatever the reward.
    """

    problem = PROBLEM
    trial_type = RegionTrialConfig
