"""What a routing trial is made from, and which learner that builds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from tokenyard.rl.algorithms import flat_numbers, hyperparameters
from tokenyard.rl.routing.export import export_policy
from tokenyard.rl.routing.rewards import reward_weights
from tokenyard.rl.routing.training import MARGINAL_DELAY, Recipe, build_config, recipe
from tokenyard.rl.trainable import TrialConfig
from tokenyard.rl.training import LocalTraining, RllibLearner, Training
from tokenyard.routing.artifact import PolicyArtifact, lineage_of
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.routing.scenario import RewardWeights, Scenario
from tokenyard.routing.scores.order import FIRST_COME
from tokenyard.routing.search import (
    PolicySearch,
    SearchConfig,
    best_start,
    started_at_best_rule,
)
from tokenyard.routing.simulator.streams import StreamSource

RllibAlgorithm = Literal["ppo", "a2c", "dqn"]

_STEPS_PER_GENERATION = 15_000
"""Steps of an RLlib trial per generation of the policy search that it goes on from."""

SEARCH_STEPS = (
    (SearchConfig.population + 1)  # and the baseline
    * SearchConfig.streams_per_generation
    * SearchConfig.requests_per_stream
)
"""Environment steps of one generation of policy search."""


_Rule = tuple[tuple[float, ...], tuple[float, ...], float]
"""Weights of placement, those of the order, and the CPU time of finding both, seconds."""


@lru_cache(maxsize=1)
def searched(scenario: Scenario, config: SearchConfig, seed: int) -> _Rule:
    """Run a whole search; trials that follow each other in one process begin with the same one."""
    started_s, search = time.process_time(), PolicySearch(scenario, config, seed)
    for _ in range(config.num_generations):
        search.step()
    cpu_s = time.process_time() - started_s
    return tuple(search.weights.tolist()), tuple(search.order.tolist()), cpu_s


class RllibTraining(RllibLearner[StreamSource]):
    """An RLlib algorithm over the routing environment."""

    def artifact(self, metrics: Mapping[str, float], lineage: Mapping[str, str]) -> PolicyArtifact:
        """The greedy policy of the present weights."""
        return export_policy(
            self.module, self._trained_for, self._trainer, metrics, lineage,
            order=self._config.env_config["order"],
        )  # fmt: skip


class RoutingTrialConfig(TrialConfig):
    """What a routing trial is made from."""

    algorithm: Literal["ppo", "a2c", "dqn", "policy_search"]
    env: str = "LoadBalancingEnv"
    """Name that the environment is registered under with RLlib."""
    recipe: str = "equivariant"
    """Name of a recipe of `tokenyard.rl.routing.training`; its reward is that of trials without
    `reward_weights`."""
    num_envs: Annotated[int, Field(ge=1)] | None = None
    """Copies of the environment per env runner, in place of the recipe's."""
    warm_start_generations: Annotated[int, Field(ge=0)] | None = None
    """Generations of policy search before an RLlib trial: what they found is then corrected in
    place of the tuned rule. Their CPU time is the trial's own. None: for the recipe `equivariant`
    one per 15,000 `env_steps`, else none; a flat network has none."""

    from_scratch: bool = False
    """Whether networks begin at random weights in place of a rule, and place first come, first
    served."""

    @property
    def num_generations(self) -> int:
        """Generations of a policy search, over which its noise fades."""
        return max(1, self.env_steps // SEARCH_STEPS)

    @property
    def generations_per_iteration(self) -> int:
        """Generations of a policy search between two results."""
        return max(1, self.num_generations // self.iterations)

    def adapted_recipe(self, scenario: Scenario) -> Recipe:
        """The recipe with what this trial changes, for a scenario.

        Raises:
            ValueError: Unknown recipe or reward weights, or the recipe has no such algorithm.
        """
        base = self._recipe
        if self.algorithm not in base.algorithms:
            known = sorted(base.algorithms)
            raise ValueError(f"recipe {self.recipe!r} has no {self.algorithm!r}, only {known}")
        own = base.algorithms[self.algorithm]
        named = reward_weights(self.reward_weights, scenario) if self.reward_weights else own.reward
        changed = replace(
            own,
            training={**own.training, **self.training},
            reward=RewardWeights.model_validate(named.model_dump() | dict(self.weights)),
        )
        return replace(
            base,
            num_envs=self.num_envs or base.num_envs,
            algorithms={**base.algorithms, self.algorithm: changed},
        ).for_slo(scenario.slo_response_s)

    def lineage(self, scenario: Scenario) -> dict[str, str]:
        """The recipe and the data as well."""
        return {**super().lineage(scenario), "recipe": self.recipe, **lineage_of(scenario)}

    def hyperparameters(self, scenario: Scenario) -> dict[str, float | str]:
        """Reward, recipe and network; of a search, its objective and size."""
        if self.algorithm == "policy_search":
            return flat_numbers(self._search_config(scenario))
        adapted = self.adapted_recipe(scenario)
        own = adapted.algorithms[self.algorithm]
        return {
            **hyperparameters(self._algorithm_config(adapted)),
            **flat_numbers(own.reward, "reward."),
            "reward_scale": adapted.reward_scale,
            "residual_scale": own.residual_scale,
            "start": self._start(scenario),
            "warm_start_generations": self._warm_start,
        }

    def make_training(self, scenario: Scenario) -> Training[PolicyArtifact]:
        """Build the learner that the fields name.

        Raises:
            ValueError: A flat network for a fleet, or as `adapted_recipe` has it.
        """
        if self.algorithm == "policy_search":
            search = PolicySearch(scenario, self._search_config(scenario), self.seed)
            return LocalTraining(search, self.generations_per_iteration)
        adapted = self.adapted_recipe(scenario)
        if scenario.fleet is not None and adapted.network == "flat":
            raise ValueError(f"recipe {self.recipe!r} is not for a fleet; choose 'equivariant'")
        started_cpu_s = time.process_time()
        weights, order, cpu_s = self._rule(scenario)
        spent_cpu_s = time.process_time() - started_cpu_s
        config = self._algorithm_config(adapted, weights, order)
        learner = RllibTraining(
            config, StreamSource(scenario), self.algorithm, adapted.reward_scale
        )
        learner.remembered_cpu_s = max(cpu_s - spent_cpu_s, 0.0)
        return learner

    @property
    def _recipe(self) -> Recipe:
        named = recipe(self.recipe)
        return named.from_scratch() if self.from_scratch else named

    @property
    def _warm_start(self) -> int:
        if self.from_scratch:
            return 0
        if self.warm_start_generations is not None:
            return self.warm_start_generations
        return self.env_steps // _STEPS_PER_GENERATION if self.recipe == "equivariant" else 0

    def _search_config(self, scenario: Scenario) -> SearchConfig:
        config = SearchConfig(
            num_generations=self.num_generations, randomisation=recipe(self.recipe).randomisation
        )
        return started_at_best_rule(scenario, config)

    def _start(self, scenario: Scenario) -> str:
        """Rule that the trial begins with, or that its search does."""
        if self.from_scratch:
            return "random weights"
        base = self._recipe
        return "sed" if base.network == "flat" else best_start(scenario, base.orders)

    def _rule(self, scenario: Scenario) -> _Rule:
        """The rule that a trial begins with."""
        base = self._recipe
        config = started_at_best_rule(scenario, SearchConfig(), base.orders)
        if base.network == "flat" or self.from_scratch:
            return MARGINAL_DELAY, config.order, 0.0
        assert config.start is not None
        # A network corrects the rule without SLO terms.
        start = config.start[:NUM_MARGINAL_WEIGHTS]
        if not self._warm_start:
            return start, config.order, 0.0
        config = replace(
            config, start=start, num_generations=self._warm_start,
            randomisation=base.randomisation,
        )  # fmt: skip
        return searched(scenario, config, self.seed)

    def _algorithm_config(
        self,
        adapted: Recipe,
        rule_weights: Sequence[float] = MARGINAL_DELAY,
        order: Sequence[float] = tuple(FIRST_COME.tolist()),
    ) -> AlgorithmConfig:
        env_config = {"scenario": self.scenario}
        return build_config(
            self.algorithm, adapted, self.env, env_config, self, rule_weights, order
        )
