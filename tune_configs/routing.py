"""Routing experiments: who learns to place requests, from which reward, for how long.

Every trial is told apart by a few plain values; `trainer_config` turns them into what
`RouterTrainable` is built from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from ray import tune

import envs
from tokenyard.rl.routing.training import SCORE_REWARD
from tokenyard.rl.routing.trial import RouterTrainable
from tokenyard.routing.artifact import rule_for
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import RewardWeights, Scenario, load_scenario
from tokenyard.routing.search import PolicySearch, SearchConfig, best_start
from tune_configs.experiment import RESOURCES, WEIGHTS, Experiment, TrialConfig, trial_of
from tune_configs.schedulers import drawn_weights

PAPER_TERMS = ("processing", "queue", "overload", "balance", "accept")
"""The five terms of the paper's reward (Abbaraju, section IV)."""

_JOULE_S = 0.5
"""Seconds of response time that a joule is worth in `response_energy`."""
_NO_PAPER_TERM = {**dict.fromkeys(PAPER_TERMS, 0.0), "complete": 0.0, "slo_at_completion": 0.0}
_CREDITED_AT_DECISION = {
    "response": RewardWeights(**_NO_PAPER_TERM, response=-1.0),
    "response_slo": RewardWeights(**_NO_PAPER_TERM, response=-1.0, slo=-2.0),
    "response_slo_tail": SCORE_REWARD,
    "response_energy": RewardWeights(**_NO_PAPER_TERM, response=-1.0, energy=-_JOULE_S),
}
_ABLATED_FIELDS = {
    "processing": ("processing",),
    "queue": ("queue",),
    "overload": ("overload",),
    "balance": ("balance",),
    "base": ("accept", "complete"),
    "slo": ("slo_at_completion",),
}

_PAPER_BASELINES = ("round_robin", "least_connections", "least_loaded", "sed")
PAPER = "paper"
ABLATIONS = tuple(f"paper_without_{term}" for term in _ABLATED_FIELDS)
"""The paper's reward with one term removed; `base` is what a placed or finished request earns."""

RLLIB_ALGORITHMS = ("dqn", "ppo", "a2c")
"""Slowest first: a sweep then ends with short trials, and no CPU waits for a long one."""
POLICY_SEARCH = "policy_search"
WEIGHTINGS = ("response", "response_slo_tail", "response_energy")
"""The reward weightings of the default sweep."""

_STEPS_PER_GENERATION = 15_000
"""Steps of an RLlib trial per generation of the policy search that it goes on from."""

SERVED = "local_cpu"
"""Scenario of the cluster that `make serve` serves."""
FLEET = "azure_code_mixed_gpus"
"""Scenario of the sweep over a fleet of four kinds of GPU."""
SERIAL = "poisson_085"
"""Scenario of the studies of serial servers."""


def reward_names() -> tuple[str, ...]:
    """All names that `reward_weights` knows."""
    return (PAPER, *_CREDITED_AT_DECISION, *ABLATIONS)


def reward_weights(name: str, scenario: Scenario) -> RewardWeights:
    """Weights of that name; `paper` and its ablations start from the scenario's own.

    Raises:
        ValueError: Unknown name.
    """
    if name == PAPER:
        return scenario.reward
    if name in _CREDITED_AT_DECISION:
        weights = _CREDITED_AT_DECISION[name]
        if weights.tail and scenario.fleet is not None:
            # The tail of serial servers begins at a time; elsewhere its SLO says what is long.
            tail_after_s = scenario.slo_response_s / 2
            return weights.model_copy(update={"tail_after_s": tail_after_s})
        return weights
    term = name.removeprefix("paper_without_")
    if name not in ABLATIONS:
        raise ValueError(f"unknown reward weights {name!r}; choose one of {list(reward_names())}")
    return scenario.reward.model_copy(update=dict.fromkeys(_ABLATED_FIELDS[term], 0.0))


def trainer_config(trial: Mapping[str, Any]) -> dict[str, Any]:
    """Spell a trial out for `RouterTrainable`."""
    config: dict[str, Any] = {
        "algorithm": trial["algorithm"],
        "scenario": trial["scenario"],
        "seed": trial["seed"],
        "register_env": envs.register,
    }
    config |= {key: trial[key] for key in (*RESOURCES, "implementation") if key in trial}
    config["recipe"] = trial["recipe"]
    if trial["algorithm"] == POLICY_SEARCH:
        generations = trial["env_steps"] // _search_env_steps(num_generations=1)
        config["num_generations"] = max(1, generations)
        config["generations_per_iteration"] = max(1, generations // trial["iterations"])
    else:
        scenario = load_scenario(trial["scenario"])
        named = reward_weights(trial["reward_weights"], scenario).model_dump()
        config["reward"] = RewardWeights.model_validate(named | dict(trial.get(WEIGHTS, {})))
        config["train_steps"] = trial["env_steps"]
        if trial["recipe"] == "equivariant":
            config["warm_start_generations"] = trial["env_steps"] // _STEPS_PER_GENERATION
        config["steps_per_iteration"] = trial["env_steps"] // trial["iterations"]
    return config


class RoutingTrial(RouterTrainable):
    """`RouterTrainable` from the few values by which trials are told apart."""

    spelled_out = staticmethod(trainer_config)


def _compile_kernels(scenario: str = SERVED) -> None:
    cluster = envs.LoadBalancingVectorEnv(2, {"scenario": scenario, "shows_rule": True})
    cluster.reset(seed=0)
    cluster.step(np.zeros(2, dtype=np.int64))
    PolicySearch(load_scenario(scenario), SearchConfig(population=2, num_elites=1)).step()


_trial = partial(trial_of, recipe="equivariant")
_paper_trial = partial(trial_of, recipe="paper", iterations=20)


def _search_trial(scenario: str, num_generations: int, iterations: int = 5) -> TrialConfig:
    env_steps = _search_env_steps(num_generations)
    # It looks at the score itself, so no reward is involved.
    return _trial(
        POLICY_SEARCH, env_steps, iterations=iterations, weights="score", scenario=scenario
    )


def _own_rules(scenario: str) -> tuple[str, ...]:
    """The rule that learners begin with, and the one that ships."""
    return tuple(dict.fromkeys((best_start(load_scenario(scenario)), rule_for(scenario))))


def _search_env_steps(num_generations: int) -> int:
    search = SearchConfig()
    candidates = search.population + 1  # and the baseline
    requests = search.streams_per_generation * search.requests_per_stream
    return num_generations * candidates * requests


def default() -> Experiment:
    """PPO, DQN and A2C under three reward weightings each, and policy search beside them.

    They learn for the cluster that `make serve` serves, from the best tuned rule on that their
    weights can be. Policy search moves its weights and its order; networks correct what a short
    search has found, and keep its order. The baseline is the rule that ships for the cluster.
    """
    learners = [
        _trial(algorithm, 300_000, weights=weights, scenario=SERVED)
        for algorithm in RLLIB_ALGORITHMS
        for weights in WEIGHTINGS
    ]
    return Experiment(
        problem=PROBLEM,
        scenario=SERVED,
        trainable=RoutingTrial,
        trials=(*learners, _search_trial(SERVED, 20)),
        baselines=("round_robin", "least_connections", "sed", *_own_rules(SERVED)),
        baseline=rule_for(SERVED),
        warm_up=_compile_kernels,
    )


def smoke() -> Experiment:
    """The smallest sweep with everything in it: one RLlib trial and a short policy search."""
    search = _search_trial(SERVED, num_generations=2, iterations=2)
    learner = _trial("ppo", 8_000, iterations=2, weights="response", scenario=SERVED)
    return replace(
        default(),
        trials=(search, learner),
        baselines=("round_robin", *_own_rules(SERVED)),
        promotion_streams=5,
        evaluation_streams=5,
    )


def serial() -> Experiment:
    """The same on serial servers."""
    learners = [
        _trial(algorithm, 300_000, weights=weights, scenario=SERIAL)
        for algorithm in RLLIB_ALGORITHMS
        for weights in ("response", "response_slo_tail")
    ]
    return replace(
        default(),
        scenario=SERIAL,
        trials=(*learners, _search_trial(SERIAL, 20)),
        baselines=(*_PAPER_BASELINES, *_own_rules(SERIAL)),
        baseline=rule_for(SERIAL),
        warm_up=partial(_compile_kernels, SERIAL),
    )


def paper() -> Experiment:
    """The paper's agents and hyper-parameters on its nominal load, five seeds (Table I)."""
    trials = [
        _paper_trial(algorithm, 200_000, seed, weights=PAPER, scenario="nominal")
        for algorithm in RLLIB_ALGORITHMS
        for seed in range(5)
    ]
    return replace(
        serial(), scenario="nominal", trials=tuple(trials), baselines=_PAPER_BASELINES,
        baseline="sed",
    )  # fmt: skip


def paper_high_load() -> Experiment:
    """The paper's agents under its high load, twice as long (Table II)."""
    trials = [{**t, "scenario": "high_load", "env_steps": 400_000} for t in paper().trials]
    return replace(paper(), scenario="high_load", trials=tuple(trials))


def paper_poisson() -> Experiment:
    """The paper's recipe as long as on its nominal load, on the traffic that champions are for."""
    trials = [{**t, "scenario": "poisson_085"} for t in paper().trials]
    return replace(paper(), scenario="poisson_085", trials=tuple(trials))


def ablation() -> Experiment:
    """PPO under high load with one term of the paper's reward removed at a time, three seeds.

    A quarter as long as in `paper_high_load`, the whole reward included.
    """
    trials = [
        _paper_trial("ppo", 100_000, seed, weights=weights, scenario="high_load")
        for weights in (PAPER, *ABLATIONS)
        for seed in range(3)
    ]
    return replace(paper(), scenario="high_load", trials=tuple(trials))


def fleet() -> Experiment:
    """Each algorithm on four kinds of GPU, beside policy search."""
    learners = [
        _trial(algorithm, 300_000, weights="response", scenario=FLEET)
        for algorithm in RLLIB_ALGORITHMS
    ]
    search = _search_trial(FLEET, SearchConfig().num_generations, iterations=10)
    return replace(
        default(),
        scenario=FLEET,
        trials=(search, *learners),
        baselines=("round_robin", "least_connections", "sed", *_own_rules(FLEET)),
        baseline=rule_for(FLEET),
        warm_up=partial(_compile_kernels, FLEET),
    )


def weights() -> Experiment:
    """PPO and A2C under weights of violations, tail and energy that are drawn as numbers.

    A second of response time always weighs 1, and so does a joule at most.
    """
    space = {
        **_trial("ppo", 300_000, weights="response", scenario=SERVED),
        "algorithm": tune.choice(["ppo", "a2c"]),
        WEIGHTS: {
            "slo": tune.uniform(-6.0, 0.0),
            "tail": tune.uniform(-2.0, 0.0),
            "energy": tune.uniform(-1.0, 0.0),
        },
        "seed": tune.randint(0, 1_000),
    }
    return drawn_weights(default(), space, num_samples=12)
