"""How each algorithm is trained, as functions that return RLlib configurations.

`paper` is the recipe of Abbaraju, "Intelligent Load Balancing Using RL for Heterogeneous LLM
Inference Systems", section V; what it leaves open is Stable-Baselines3's default, the library it
names. `equivariant` is what was found to work, on servers and on replicas that batch: the response
time credited at the decision, a network that scores any number of replicas alike, as a correction
of what a search has found, and copies of the environment that share their traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from tokenyard.rl import modules
from tokenyard.rl.algorithms import dqn_config, ppo_config
from tokenyard.rl.columnar.a2c import A2CConfig
from tokenyard.rl.columnar.learners import COPIES_PER_STREAM, SHRINKAGE
from tokenyard.rl.columnar.sampling import DEFAULT_SETTINGS, TrainingSettings, with_sampling
from tokenyard.rl.routing.equivariant import (
    RULE_WEIGHTS,
    EquivariantActorCritic,
    EquivariantQNetwork,
)
from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.routing.scenario import RewardWeights
from tokenyard.routing.scores.order import FIRST_COME

MARGINAL_DELAY = (0.0,) * NUM_MARGINAL_WEIGHTS
"""Weights of the plain rule of least marginal delay (`scores.linear.marginal_scores`)."""

PAPER_REWARD = RewardWeights()
"""The five terms at their printed values."""

RESPONSE_REWARD = RewardWeights(
    processing=0.0, queue=0.0, overload=0.0, balance=0.0, accept=0.0, response=-1.0
)
"""Minus the response time, at the decision."""

SCORE_REWARD = RESPONSE_REWARD.model_copy(update={"slo": -2.0, "tail": -4.0, "tail_after_s": 4.0})
"""The score that sweeps rank on, told at the decision: the response time, 2 s for an SLO violation,
and the tail. 0.1 x CVaR99 is 10 x the time beyond the 99th percentile (Rockafellar and Uryasev
2000, equation 4), which is near 4 s on `poisson_085`; a weight of 4 learns better than 10."""


_FROM_SCRATCH: Mapping[str, Mapping[str, Any]] = {
    "ppo": {
        "lr": 3e-3, "gamma": 0.98, "lambda_": 0.95, "vf_loss_coeff": 1.0, "minibatch_size": 1024,
    },
    "a2c": {"lr": 5e-3, "gamma": 0.95, "lambda_": 0.95, "vf_loss_coeff": 0.5},
    "dqn": {"lr": 2e-3, "gamma": 0.8},
}  # fmt: skip
"""Settings for training from random weights, in place of those that correct a rule."""


@dataclass(frozen=True)
class AlgorithmRecipe:
    """What one algorithm of a recipe is given."""

    fragment_steps: int
    """Steps of every copy of the environment per training batch (DQN: per sampling round)."""
    training: Mapping[str, Any]
    """Settings for `AlgorithmConfig.training`."""
    reward: RewardWeights = PAPER_REWARD
    residual_scale: float = 0.0
    """What an SLO of the rule's cost lowers the output by; 0: there is no rule. For PPO and A2C in
    logits, for DQN in units of the scaled reward."""
    anneal: bool = False
    """Whether the learning rate falls to a tenth over the training."""
    shrinkage: float = 0.0
    """DQN: weight in the loss of the squared correction of the rule."""
    epsilon: tuple[float, float] = (1.0, 0.05)
    """DQN: share of random actions at first, and after a tenth of the training. An equivariant
    network draws them from those that it holds to be nearly as good as the best."""


@dataclass(frozen=True)
class Recipe:
    """How the three algorithms are trained in one experiment."""

    reward_scale: float
    """Factor on all rewards. It changes no preference; small rewards keep the critic's error
    near the size that a fresh network can represent. For an equivariant network it is that of a
    reward per SLO (`for_slo`), so that slow and fast replicas are learned alike."""
    num_envs: int
    """Copies of the environment that one env runner steps at once."""
    algorithms: Mapping[str, AlgorithmRecipe]
    network: Literal["flat", "equivariant"] = "flat"
    """`flat` reads what the paper's agents see, tied to number and order of servers."""
    hidden: tuple[int, ...] = (128, 128)
    """Widths of the networks' hidden layers."""
    copies_per_stream: int = 1
    """Copies that share their traffic and are compared with each other (PPO and A2C)."""
    orders: bool = False
    """Whether requests wait in the order that was tuned with the rule; else first come."""
    episode_requests: int | None = None
    """Requests of an episode; None: the scenario's."""
    randomisation: Randomisation = field(default_factory=Randomisation)
    """How one training stream and its fleet differ from the next."""

    def from_scratch(self) -> Recipe:
        """The recipe without a rule to correct: random weights, first come, first served.

        DQN then explores all replicas, and its outputs are not held back. Steps are larger,
        horizons shorter and batches smaller: what tells a good choice from a bad one is larger too.
        """
        algorithms = {
            name: replace(
                own,
                fragment_steps=min(own.fragment_steps, 128),
                training={**own.training, **_FROM_SCRATCH.get(name, {})},
                residual_scale=0.0,
                shrinkage=0.0,
                epsilon=(1.0, 0.05),
                anneal=True,
            )
            for name, own in self.algorithms.items()
        }
        return replace(self, algorithms=algorithms, orders=False)

    def for_slo(self, slo_s: float) -> Recipe:
        """The recipe for a scenario with this response-time SLO, seconds."""
        if self.network == "flat":
            return self
        return replace(self, reward_scale=self.reward_scale / slo_s)


def paper() -> Recipe:
    """Learning rate 3e-4, discount 0.99, replay of 50,000; the rest as Stable-Baselines3 has it.

    DQN there makes one update of 32 transitions every 4 steps; here it is 128 every 16, which
    replays each transition as often.
    """
    common = {"lr": 3e-4, "gamma": 0.99}
    ppo = {"lambda_": 0.95, "minibatch_size": 64, "num_epochs": 10}
    a2c = {"lambda_": 1.0, "entropy_coeff": 0.0}
    dqn = {
        "train_batch_size_per_learner": 128,
        "target_network_update_freq": 10_000,
        "num_steps_sampled_before_learning_starts": 128,
        "double_q": False,
    }
    return Recipe(
        reward_scale=1.0,
        num_envs=8,
        algorithms={
            "ppo": AlgorithmRecipe(256, {**common, **ppo}),
            "a2c": AlgorithmRecipe(5, {**common, **a2c}),
            "dqn": AlgorithmRecipe(2, {**common, **dqn}),
        },
    )


def equivariant() -> Recipe:
    """For servers and fleets; decision 0008 says what each of these is good for."""
    # Returns are those of whole episodes, less what the other copies of a stream have from the same
    # request on. A critic errs by more than a better placement gains (docs/results/learning.md).
    whole = {"gamma": 1.0, "lambda_": 1.0, "vf_loss_coeff": 0.0}
    ppo = {"lr": 1e-3, "minibatch_size": 4096, "num_epochs": 3, **whole}
    a2c = {"lr": 1e-2, "entropy_coeff": 0.0, **whole}
    dqn = {
        "lr": 3e-4,
        # With a longer one it does worse (decision 0008).
        "gamma": 0.9,
        "train_batch_size_per_learner": 512,
        "target_network_update_freq": 2_000,
        "num_steps_sampled_before_learning_starts": 1_000,
        "double_q": True,
        "dueling": True,
    }
    return Recipe(
        reward_scale=0.3,
        num_envs=128,
        algorithms={
            "ppo": AlgorithmRecipe(512, ppo, RESPONSE_REWARD, residual_scale=400.0, anneal=True),
            "a2c": AlgorithmRecipe(512, a2c, RESPONSE_REWARD, residual_scale=400.0, anneal=True),
            "dqn": AlgorithmRecipe(
                2, dqn, RESPONSE_REWARD, residual_scale=0.3, shrinkage=10.0, epsilon=(0.3, 0.3)
            ),
        },
        network="equivariant",
        hidden=(32, 32),
        orders=True,
        copies_per_stream=8,
        # Streams and loads are drawn anew with every batch.
        episode_requests=512,
        # As wide as what the gate asks for.
        randomisation=Randomisation(load_factor=(0.5, 1.15)),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "paper": paper,
    "equivariant": equivariant,
}


def recipe(name: str) -> Recipe:
    """Look a recipe up by name; ValueError: there is none of that name."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; choose one of {sorted(RECIPES)}")
    return RECIPES[name]()


def build_config(
    algorithm: str,
    recipe: Recipe,
    env: str,
    env_config: Mapping[str, Any],
    settings: TrainingSettings = DEFAULT_SETTINGS,
    rule_weights: Sequence[float] = MARGINAL_DELAY,
    order: Sequence[float] = tuple(FIRST_COME.tolist()),
) -> AlgorithmConfig:
    """Configure one algorithm, by a recipe, for one environment.

    The environment's name is registered with RLlib; its creator must return a vectorised
    environment where the configuration holds "num_envs". Reward, length of an episode,
    randomisation and copies of a stream are the recipe's. An equivariant network begins with the
    rule of `rule_weights`; the order in which requests wait is not learned.

    Raises:
        ValueError: Unknown algorithm.
    """
    if algorithm not in recipe.algorithms:
        known = sorted(recipe.algorithms)
        raise ValueError(f"unknown algorithm {algorithm!r}; choose one of {known}")
    own = recipe.algorithms[algorithm]
    batch_size = recipe.num_envs * own.fragment_steps * max(settings.num_env_runners, 1)
    config = _base(algorithm, own, batch_size, settings.env_steps)
    config = config.rl_module(rl_module_spec=_module(algorithm, recipe, rule_weights)).environment(
        env,
        env_config={
            **env_config,
            "reward": scaled(own.reward, recipe.reward_scale).model_dump(),
            "episode_requests": recipe.episode_requests,
            "randomisation": recipe.randomisation.model_dump(),
            "shows_rule": recipe.network == "equivariant",
            "order": tuple(order),
            COPIES_PER_STREAM: 1 if algorithm == "dqn" else recipe.copies_per_stream,
        },
    )
    config = config.learners(learner_config_dict={SHRINKAGE: own.shrinkage})
    return with_sampling(
        config,
        algorithm,
        settings,
        num_envs=recipe.num_envs,
        fragment_steps=own.fragment_steps,
        normalise=recipe.network == "equivariant",
    )


def scaled(reward: RewardWeights, factor: float) -> RewardWeights:
    """The same reward in other units: every term times `factor`."""
    weights = {
        name: value if name == "tail_after_s" else value * factor
        for name, value in reward.model_dump().items()
    }
    return RewardWeights.model_validate(weights)


def _module(algorithm: str, recipe: Recipe, rule_weights: Sequence[float]) -> RLModuleSpec:
    extra = {
        modules.RESIDUAL_SCALE: recipe.algorithms[algorithm].residual_scale,
        RULE_WEIGHTS: tuple(rule_weights),
    }
    critic, q_network = _MODULES[recipe.network]
    module = q_network if algorithm == "dqn" else critic
    return modules.module_spec(module, recipe.hidden, **extra)


_MODULES: dict[str, tuple[type[Any], type[Any]]] = {
    "flat": (modules.ActorCritic, modules.QNetwork),
    "equivariant": (EquivariantActorCritic, EquivariantQNetwork),
}


def _base(
    algorithm: str, own: AlgorithmRecipe, batch_size: int, train_steps: int
) -> AlgorithmConfig:
    lr = own.training["lr"]
    schedule = [[0, lr], [train_steps, lr / 10]] if own.anneal else lr
    settings = {**own.training, "lr": schedule}
    if algorithm == "dqn":
        first, last = own.epsilon
        epsilon = [[0, first], [max(train_steps // 10, 1), last]]
        return dqn_config(**{"epsilon": epsilon, **settings})
    settings = {"train_batch_size_per_learner": batch_size, **settings}
    if algorithm == "a2c":
        return A2CConfig().training(**settings)
    settings["minibatch_size"] = min(settings["minibatch_size"], batch_size)
    return ppo_config(**settings)
