"""Learners of allocation behind one interface: RLlib algorithms, tables, and policy search.

Gradient methods choose a shape, a pair of parallelism and GPUs, and begin as the planner, which
their networks correct. Rewards are told relative to the best of the slot were changes free, which
depends on demand alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from tokenyard.allocation.artifact import AllocationArtifact, AllocationMetadata
from tokenyard.allocation.forecast import scenario_forecaster
from tokenyard.allocation.observation import cost_unit
from tokenyard.allocation.plans import plan_table
from tokenyard.allocation.scenario import PAPER_WEIGHTS, AllocationScenario, Objective
from tokenyard.allocation.tabular import TabularConfig, TabularLearner
from tokenyard.rl.algorithms import CLIPPED, dqn_config, flat_numbers, hyperparameters, ppo_config
from tokenyard.rl.allocation.modules import (
    PLANNER_SCALE,
    AllocationActorCritic,
    AllocationQNetwork,
)
from tokenyard.rl.columnar.a2c import A2CConfig
from tokenyard.rl.columnar.sampling import with_sampling
from tokenyard.rl.modules import (
    NORMALISE,
    layer_arrays,
    module_spec,
    moment_arrays,
    weights_of,
)
from tokenyard.rl.trainable import TrialConfig
from tokenyard.rl.training import LocalTraining, RllibLearner, Training

RllibAlgorithm = Literal["ppo", "a2c", "dqn"]
Algorithm = Literal["ppo", "a2c", "dqn", "q_learning", "sarsa"]
NUM_ENVS = 32
"""Copies of the environment that one env runner steps at once."""
HIDDEN = (128, 128)
_FRAGMENT_STEPS: dict[RllibAlgorithm, int] = {"ppo": 64, "a2c": 16, "dqn": 2}
_PLANNER_SCALE: dict[RllibAlgorithm, float] = {"ppo": 50.0, "a2c": 50.0, "dqn": 1.0}
"""In logits: a plan is tried e times less often for every fiftieth of the pool's price of a slot
that the planner expects it to cost more. In values that are returns: once."""
_GAMMA = 0.9
"""The planner looks six intervals ahead, which is where its network has something to correct."""


class AllocationRllib(RllibLearner[AllocationScenario]):
    """PPO, A2C or DQN over the allocation environment."""

    def artifact(
        self, metrics: Mapping[str, float], lineage: Mapping[str, str]
    ) -> AllocationArtifact:
        """The greedy policy of the present weights."""
        module = self.module
        arrays = moment_arrays(module.normaliser) | layer_arrays(weights_of(module.policy_layers))
        metadata = AllocationMetadata(
            kind="network",
            scenario=self._trained_for,
            trainer=self._trainer,
            forecaster=scenario_forecaster(self._trained_for),
            planner_scale=module.planner_scale,
            metrics=metrics,
            lineage=lineage,
        )
        return AllocationArtifact(metadata, arrays)


class AllocationTrialConfig(TrialConfig):
    """What an allocation trial is made from; its steps are control intervals."""

    algorithm: Algorithm
    env: str = "ParallelismEnv"
    """Name that the environment is registered under with RLlib."""
    reward_weights: Literal["cost", "paper"] = "cost"
    """Dollars and SLO violations, or the paper's sum."""

    def hyperparameters(self, scenario: AllocationScenario) -> dict[str, float | str]:
        """Reward, learner and network; of tables, their settings."""
        scenario = self._rewarded(scenario)
        rewarded = flat_numbers(scenario.reward, "reward.")
        if self.algorithm == "q_learning" or self.algorithm == "sarsa":
            return rewarded | flat_numbers(TabularConfig(self.algorithm, self.env_steps))
        return rewarded | hyperparameters(self.algorithm_config(scenario))

    def make_training(self, scenario: AllocationScenario) -> Training[AllocationArtifact]:
        """Build the learner that the fields name."""
        scenario = self._rewarded(scenario)
        if self.algorithm == "q_learning" or self.algorithm == "sarsa":
            table = TabularConfig(self.algorithm, num_steps=self.env_steps)
            learner = TabularLearner(scenario, table, self.seed)
            return LocalTraining(learner, -(-self.steps_per_iteration // learner.slots_per_step))
        return AllocationRllib(self.algorithm_config(scenario), scenario, self.algorithm)

    def _rewarded(self, scenario: AllocationScenario) -> AllocationScenario:
        """The scenario with what a trial is rewarded for as its objective."""
        cost = Objective(usd=1.0, violations=scenario.violation_usd)
        named = cost if self.reward_weights == "cost" else PAPER_WEIGHTS
        objective = Objective.model_validate(named.model_dump() | dict(self.weights))
        return scenario.model_copy(update={"objective": objective})

    def algorithm_config(self, scenario: AllocationScenario) -> AlgorithmConfig:
        """Configure the algorithm for a scenario, whose own objective counts."""
        algorithm = cast("RllibAlgorithm", self.algorithm)
        fragment_steps = _FRAGMENT_STEPS[algorithm]
        batch_size = NUM_ENVS * fragment_steps * max(self.num_env_runners, 1)
        config = _base(algorithm, batch_size, self.env_steps)
        config = config.training(**{"gamma": _GAMMA, **self.training})
        module = AllocationQNetwork if algorithm == "dqn" else AllocationActorCritic
        extra = {NORMALISE: True, PLANNER_SCALE: _PLANNER_SCALE[algorithm]}
        spec = module_spec(module, HIDDEN, **extra)
        config = config.rl_module(rl_module_spec=spec).environment(
            self.env,
            env_config={
                "scenario": scenario.model_dump(),
                "action": "grid",
                "shows_planner": True,
                "reward_scale": 1.0 / cost_unit(scenario, plan_table(scenario)),
                "subtract_bound": True,
            },
        )
        return with_sampling(
            config,
            algorithm,
            self,
            num_envs=NUM_ENVS,
            fragment_steps=fragment_steps,
            normalise=True,
        )


def _base(algorithm: RllibAlgorithm, batch_size: int, train_steps: int) -> AlgorithmConfig:
    decaying = [[0, 1e-3], [train_steps, 1e-4]]
    if algorithm == "dqn":
        return dqn_config(
            lr=decaying,
            dueling=True,  # What all plans have in common is not each one's to learn.
            train_batch_size_per_learner=256,
            target_network_update_freq=2_000,
            num_steps_sampled_before_learning_starts=1_000,
            # Every random action is a restart.
            epsilon=[[0, 0.1], [max(train_steps // 2, 1), 0.01]],
            double_q=True,
        )
    common: dict[str, Any] = {
        "lr": decaying,
        "lambda_": 0.95,
        "train_batch_size_per_learner": batch_size,
        "entropy_coeff": 0.0,
    }
    if algorithm == "a2c":
        return A2CConfig().training(**common, **CLIPPED)
    return ppo_config(**common, minibatch_size=512, num_epochs=6)
