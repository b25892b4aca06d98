"""What a routing trial is made from, and which learner that builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from tokenyard.rl.algorithms import flat_numbers, hyperparameters
from tokenyard.rl.columnar.sampling import Implementation
from tokenyard.rl.routing.training import MARGINAL_DELAY, Recipe, build_config, recipe
from tokenyard.rl.trainable import PolicyTrainable, TrialConfig
from tokenyard.rl.training import RllibTraining, SearchTraining, Training
from tokenyard.routing.artifact import PolicyArtifact, lineage_of
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import RewardWeights, Scenario
from tokenyard.routing.scores.order import FIRST_COME
from tokenyard.routing.search import (
    PolicySearch,
    SearchConfig,
    best_start,
    started_at_best_rule,
)
from tokenyard.routing.simulator.streams import StreamSource


class RoutingTrialConfig(TrialConfig):
    """What a routing trial is made from."""

    algorithm: Literal["ppo", "a2c", "dqn", "policy_search"]
    env: str = "LoadBalancingEnv"
    """Name that `register_env` registers."""
    implementation: Implementation = "tokenyard"
    """Who samples and learns in an RLlib trial (`recipes.build_config`)."""
    recipe: str = "equivariant"
    """Name of a recipe of `tokenyard.rl.routing.training`."""
    reward: RewardWeights | None = None
    """Weights in place of the recipe's."""
    steps_per_iteration: Annotated[int, Field(ge=1)] = 4096
    """Fewest environment steps between two results of an RLlib trial."""
    num_envs: Annotated[int, Field(ge=1)] | None = None
    """Copies of the environment per env runner, in place of the recipe's."""
    fragment_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps of every copy per training batch, in place of the recipe's."""
    warm_start_generations: Annotated[int, Field(ge=0)] = 0
    """Generations of policy search before an RLlib trial: what they found is then corrected in
    place of the tuned rule. Their CPU time is the trial's own. A flat network has none."""
    generations_per_iteration: Annotated[int, Field(ge=1)] = 8
    """Generations of policy search between two results."""
    num_generations: Annotated[int, Field(ge=1)] = SearchConfig.num_generations
    """Generations over which the noise of policy search fades."""

    def adapted_recipe(self, slo_s: float) -> Recipe:
        """The recipe with what this trial changes, for a scenario of this SLO, seconds.

        Raises:
            ValueError: Unknown recipe, or it has no such algorithm.
        """
        base = recipe(self.recipe)
        if self.algorithm not in base.algorithms:
            known = sorted(base.algorithms)
            raise ValueError(f"recipe {self.recipe!r} has no {self.algorithm!r}, only {known}")
        own = base.algorithms[self.algorithm]
        changed = replace(
            own,
            fragment_steps=self.fragment_steps or own.fragment_steps,
            training={**own.training, **self.training},
            reward=self.reward or own.reward,
        )
        return replace(
            base,
            num_envs=self.num_envs or base.num_envs,
            algorithms={**base.algorithms, self.algorithm: changed},
        ).for_slo(slo_s)

    def lineage(self, scenario: Scenario) -> dict[str, str]:
        """The recipe and the data as well."""
        return {**super().lineage(scenario), "recipe": self.recipe, **lineage_of(scenario)}

    def hyperparameters(self, scenario: Scenario) -> dict[str, float | str]:
        """Reward, recipe and network; of a search, its objective and size."""
        if self.algorithm == "policy_search":
            return flat_numbers(self._search_config(scenario))
        adapted = self.adapted_recipe(scenario.slo_response_s)
        own = adapted.algorithms[self.algorithm]
        return {
            **hyperparameters(self._algorithm_config(adapted)),
            **flat_numbers(own.reward, "reward."),
            "reward_scale": adapted.reward_scale,
            "residual_scale": own.residual_scale,
            "start": self._start(scenario),
            "warm_start_generations": self.warm_start_generations,
        }

    def make_training(self, scenario: Scenario) -> Training[PolicyArtifact]:
        """Build the learner that the fields name.

        Raises:
            ValueError: An RLlib trial without `register_env`, or a flat network for a fleet.
        """
        if self.algorithm == "policy_search":
            search = PolicySearch(scenario, self._search_config(scenario), self.seed)
            return SearchTraining(search, self.generations_per_iteration)
        adapted = self.adapted_recipe(scenario.slo_response_s)
        if scenario.fleet is not None and adapted.network == "flat":
            raise ValueError(f"recipe {self.recipe!r} is not for a fleet; choose 'equivariant'")
        self.make_env_known()
        source = StreamSource(scenario)
        return RllibTraining(
            self._algorithm_config(adapted, *self._rule(scenario)),
            source,
            self.algorithm,
            adapted.reward_scale,
        )

    def _search_config(self, scenario: Scenario) -> SearchConfig:
        config = SearchConfig(
            num_generations=self.num_generations, randomisation=recipe(self.recipe).randomisation
        )
        return started_at_best_rule(scenario, config)

    def _start(self, scenario: Scenario) -> str:
        """Rule that the trial begins with, or that its search does."""
        base = recipe(self.recipe)
        return "sed" if base.network == "flat" else best_start(scenario, base.orders)

    def _rule(self, scenario: Scenario) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Weights of the rule that a trial begins with, and of the order in which requests wait."""
        base = recipe(self.recipe)
        config = started_at_best_rule(scenario, SearchConfig(), base.orders)
        if base.network == "flat":
            return MARGINAL_DELAY, config.order
        assert config.start is not None
        # A network corrects the rule without SLO terms.
        start = config.start if base.network == "linear" else config.start[:NUM_MARGINAL_WEIGHTS]
        if not self.warm_start_generations:
            return start, config.order
        config = replace(
            config, start=start, num_generations=self.warm_start_generations,
            randomisation=base.randomisation,
        )  # fmt: skip
        search = PolicySearch(scenario, config, self.seed)
        for _ in range(self.warm_start_generations):
            search.step()
        return tuple(search.weights.tolist()), tuple(search.order.tolist())

    def _algorithm_config(
        self,
        adapted: Recipe,
        rule_weights: Sequence[float] = MARGINAL_DELAY,
        order: Sequence[float] = tuple(FIRST_COME.tolist()),
    ) -> AlgorithmConfig:
        return build_config(
            self.algorithm,
            adapted,
            self.env,
            {"scenario": self.scenario},
            self.settings(self.steps_per_iteration, implementation=self.implementation),
            rule_weights,
            order,
        )


class RouterTrainable(PolicyTrainable):
    """Trains one router from the fields of `RoutingTrialConfig`."""

    problem = PROBLEM
    trial_type = RoutingTrialConfig
