"""Learners of allocation behind one interface: RLlib algorithms, tables, and policy search.

Gradient methods act on shape (a pair of parallelism and GPUs) and memory, the hybrid action of the
allocation paper without its infeasible pairs; DQN on shapes. Their rewards are told relative to the
best of the slot were changes free, which depends on demand alone. Training has two stages where a
trial asks for it: the network first learns what the planner does (behaviour cloning), then from
rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from torch.nn import functional

from tokenyard.allocation.artifact import AllocationArtifact, AllocationMetadata
from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.forecast import scenario_forecaster
from tokenyard.allocation.plans import plan_table
from tokenyard.allocation.scenario import PAPER_WEIGHTS, AllocationScenario, Objective
from tokenyard.allocation.simulator.run import StreamRunner
from tokenyard.allocation.tabular import TabularConfig, TabularLearner
from tokenyard.rl.algorithms import CLIPPED, dqn_config, flat_numbers, hyperparameters, ppo_config
from tokenyard.rl.allocation.modules import STAY_BONUS, AllocationActorCritic, AllocationQNetwork
from tokenyard.rl.columnar.a2c import A2CConfig
from tokenyard.rl.columnar.sampling import with_sampling
from tokenyard.rl.modules import NORMALISE, layer_arrays, module_spec, moment_arrays
from tokenyard.rl.trainable import TrialConfig
from tokenyard.rl.training import LocalTraining, RllibLearner, Training
from tokenyard.types import FloatArray, IntArray

RllibAlgorithm = Literal["ppo", "a2c", "dqn"]
Algorithm = Literal["ppo", "a2c", "dqn", "q_learning", "sarsa", "cloned_ppo", "cloned_a2c"]
"""After `cloned_`, it first learns what the planner does."""
_CLONED = "cloned_"
NUM_ENVS = 32
"""Copies of the environment that one env runner steps at once."""
HIDDEN = (128, 128)
_FRAGMENT_STEPS: dict[RllibAlgorithm, int] = {"ppo": 64, "a2c": 16, "dqn": 2}
_STAY_BONUS: dict[RllibAlgorithm, float] = {"ppo": 5.0, "a2c": 5.0, "dqn": 0.1}
"""In logits: exploration keeps the plan nine times of ten. In values: a tenth of the pool's price
for a slot."""
_GAMMA = 0.98
_CLONING_EPOCHS, _CLONING_BATCH, _CLONING_LR = 10, 256, 1e-3
_NUM_DEMONSTRATIONS = 4
"""Draws of the training part that a demonstrator lives through."""
_WANDER = 0.1
"""Share of the demonstrator's slots in which another plan is taken than it wanted."""


class AllocationRllib(RllibLearner[AllocationScenario]):
    """PPO, A2C or DQN over the allocation environment."""

    _cloned = False

    def clone(self, seed: int) -> float:
        """Teach the actor what the planner does; return how often it then agrees, in [0, 1].

        Raises:
            ValueError: A Q-network, whose outputs are no preferences.
        """
        module = self.module
        if not isinstance(module, AllocationActorCritic):
            raise ValueError("only an actor can be cloned: take ppo or a2c")
        observations, shapes = demonstrations(self._trained_for, seed)
        agreement = _fit_actor(module, observations, shapes, seed)
        self._algorithm.env_runner_group.sync_weights(
            from_worker_or_learner_group=self._algorithm.learner_group, inference_only=True
        )
        self._cloned = True
        return agreement

    def artifact(
        self, metrics: Mapping[str, float], lineage: Mapping[str, str]
    ) -> AllocationArtifact:
        """The greedy policy of the present weights."""
        module = self.module
        arrays = moment_arrays(module.normaliser) | layer_arrays(module.exported_layers())
        metadata = AllocationMetadata(
            kind="grid_network" if self._trainer == "dqn" else "hybrid_network",
            scenario=self._trained_for,
            trainer=f"{self._trainer}_cloned" if self._cloned else self._trainer,
            forecaster=scenario_forecaster(self._trained_for),
            stay_bonus=module.stay_bonus,
            metrics=metrics,
            lineage=lineage,
        )
        return AllocationArtifact(metadata, arrays)


def demonstrations(scenario: AllocationScenario, seed: int) -> tuple[FloatArray, IntArray]:
    """Observations, and the shape that the planner would choose in each.

    Now and then a random plan is taken instead, so that it shows how it recovers.

    Returns:
        Shapes (n, observation_size) and (n,).
    """
    source, table = demand_source(scenario), plan_table(scenario)
    rng = np.random.default_rng([seed, 3])
    rows, labels = [], []
    for draw in range(_NUM_DEMONSTRATIONS):
        runner = StreamRunner(scenario, source.train(20_000 + 100 * seed + draw))
        sim, shapes = runner.sim, runner.sim.shapes
        for slot in range(runner.stream.num_slots):
            wanted = runner.planned(slot)
            rows.append(sim.observe()[0].copy())
            labels.append(shapes[wanted if sim.may_switch(0) else sim.plan(0)])
            taken = rng.integers(table.num_plans) if rng.random() < _WANDER else wanted
            sim.step(np.array([taken]))
    return np.stack(rows), np.array(labels, np.int64)


def _fit_actor(
    module: AllocationActorCritic, observations: FloatArray, shapes: IntArray, seed: int
) -> float:
    """Minimise the cross-entropy of the demonstrated shapes; return the final agreement."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.from_numpy(observations).float(), torch.from_numpy(shapes)
    module.normaliser.update(x)
    actor = [*module.encoder.actor_encoder.parameters(), *module.pi.parameters()]
    optimiser = torch.optim.Adam(actor, lr=_CLONING_LR)
    for _ in range(_CLONING_EPOCHS):
        for batch in torch.randperm(len(x), generator=generator).split(_CLONING_BATCH):
            loss = functional.cross_entropy(_preferences(module, x[batch]), y[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        return float((_preferences(module, x).argmax(-1) == y).float().mean())


def _preferences(module: AllocationActorCritic, observations: torch.Tensor) -> torch.Tensor:
    output = module._forward_train({"obs": observations})
    preferences: torch.Tensor = output["action_dist_inputs"].split(module.output_sizes, -1)[-1]
    return preferences


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
        training = AllocationRllib(self.algorithm_config(scenario), scenario, self._learner)
        if self.algorithm.startswith(_CLONED):
            training.clone(self.seed)
        return training

    @property
    def _learner(self) -> RllibAlgorithm:
        return cast("RllibAlgorithm", self.algorithm.removeprefix(_CLONED))

    def _rewarded(self, scenario: AllocationScenario) -> AllocationScenario:
        """The scenario with what a trial is rewarded for as its objective."""
        cost = Objective(usd=1.0, violations=scenario.violation_usd)
        named = cost if self.reward_weights == "cost" else PAPER_WEIGHTS
        objective = Objective.model_validate(named.model_dump() | dict(self.weights))
        return scenario.model_copy(update={"objective": objective})

    def algorithm_config(self, scenario: AllocationScenario) -> AlgorithmConfig:
        """Configure the algorithm for a scenario, whose own objective counts."""
        algorithm = self._learner
        usd = float(plan_table(scenario).usd_per_hour.max()) * scenario.slot_s / 3600
        fragment_steps = _FRAGMENT_STEPS[algorithm]
        batch_size = NUM_ENVS * fragment_steps * max(self.num_env_runners, 1)
        config = _base(algorithm, batch_size, self.env_steps)
        config = config.training(**{"gamma": _GAMMA, **self.training})
        module = AllocationQNetwork if algorithm == "dqn" else AllocationActorCritic
        extra = {NORMALISE: True, STAY_BONUS: _STAY_BONUS[algorithm]}
        spec = module_spec(module, HIDDEN, **extra)
        config = config.rl_module(rl_module_spec=spec).environment(
            self.env,
            env_config={
                "scenario": scenario.model_dump(),
                "action": "grid" if algorithm == "dqn" else "shape",
                # In units of the whole pool's price for a slot, where dollars count.
                "reward_scale": 1.0 / (usd * scenario.reward.usd) if scenario.reward.usd else 1.0,
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
    if algorithm == "dqn":
        return dqn_config(
            lr=1e-4,
            train_batch_size_per_learner=256,
            target_network_update_freq=2_000,
            num_steps_sampled_before_learning_starts=1_000,
            # Every random action is a restart.
            epsilon=[[0, 0.1], [max(train_steps // 2, 1), 0.01]],
            double_q=True,
        )
    common: dict[str, Any] = {
        "lr": [[0, 3e-4], [train_steps, 3e-5]],
        "lambda_": 0.95,
        "train_batch_size_per_learner": batch_size,
        "entropy_coeff": 0.0,
    }
    if algorithm == "a2c":
        return A2CConfig().training(**common, **CLIPPED)
    return ppo_config(**common, minibatch_size=512, num_epochs=6)
