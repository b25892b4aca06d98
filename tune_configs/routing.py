"""Routing experiments: who learns to place requests, from which reward, for how long.

A trial is a `RoutingTrialConfig`; the fields that are set tell one from another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from ray import tune

import envs
from tokenyard.rl.routing.rewards import ABLATIONS, PAPER
from tokenyard.rl.routing.trial import SEARCH_STEPS, RllibAlgorithm, RoutingTrialConfig
from tokenyard.rl.trainable import PolicyTrainable
from tokenyard.routing.artifact import rule_for
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.search import PolicySearch, SearchConfig, best_start
from tune_configs.experiment import Experiment, trained_on
from tune_configs.schedulers import drawn_weights

_PAPER_BASELINES = ("round_robin", "least_connections", "least_loaded", "sed")
RLLIB_ALGORITHMS: tuple[RllibAlgorithm, ...] = ("dqn", "ppo", "a2c")
"""Slowest first: a sweep then ends with short trials, and no CPU waits for a long one."""
WEIGHTINGS = ("response", "response_slo_tail", "response_energy")
"""The reward weightings of the default sweep."""

SERVED = "local_cpu"
"""Scenario of the cluster that `make serve` serves."""
FLEET = "azure_code_mixed_gpus"
"""Scenario of the sweep over a fleet of four kinds of GPU."""
SERIAL = "poisson_085"
"""Scenario of the studies of serial servers."""


class RoutingTrial(PolicyTrainable):
    """Trains one router from the fields of `RoutingTrialConfig`."""

    problem = PROBLEM
    trial_type = RoutingTrialConfig
    register_env = staticmethod(envs.register)


def _compile_kernels(scenario: str = SERVED) -> None:
    cluster = envs.LoadBalancingVectorEnv(2, {"scenario": scenario, "shows_rule": True})
    cluster.reset(seed=0)
    cluster.step(np.zeros(2, dtype=np.int64))
    PolicySearch(load_scenario(scenario), SearchConfig(population=2, num_elites=1)).step()


_trial = partial(RoutingTrialConfig, recipe="equivariant")
_paper_trial = partial(RoutingTrialConfig, recipe="paper", iterations=20)


def _learners(weightings: Sequence[str], scenario: str) -> list[RoutingTrialConfig]:
    return [
        _trial(algorithm=algorithm, env_steps=300_000, reward_weights=weights, scenario=scenario)
        for algorithm in RLLIB_ALGORITHMS
        for weights in weightings
    ]


def _search_trial(scenario: str, num_generations: int, iterations: int = 5) -> RoutingTrialConfig:
    return _trial(
        algorithm="policy_search",
        # It looks at the score itself, so no reward is involved.
        reward_weights="score",
        scenario=scenario,
        env_steps=num_generations * SEARCH_STEPS,
        iterations=iterations,
    )


def _own_rules(scenario: str) -> tuple[str, ...]:
    """The rule that learners begin with, and the one that ships."""
    loaded = load_scenario(scenario)
    return tuple(dict.fromkeys((best_start(loaded), rule_for(loaded))))


def default() -> Experiment:
    """PPO, DQN and A2C under three reward weightings each, and policy search beside them.

    They learn for the cluster that `make serve` serves, from the best tuned rule on that their
    weights can be. Policy search moves its weights and its order; networks correct what a short
    search has found, and keep its order. The baseline is the rule that ships for the cluster.
    """
    return Experiment(
        problem=PROBLEM,
        scenario=SERVED,
        trainable=RoutingTrial,
        trials=(*_learners(WEIGHTINGS, SERVED), _search_trial(SERVED, 20)),
        baselines=("round_robin", "least_connections", "sed", *_own_rules(SERVED)),
        baseline=rule_for(load_scenario(SERVED)),
        warm_up=_compile_kernels,
    )


def smoke() -> Experiment:
    """The smallest sweep with everything in it: one RLlib trial and a short policy search."""
    search = _search_trial(SERVED, num_generations=2, iterations=2)
    learner = _trial(
        algorithm="ppo", env_steps=8_000, iterations=2, reward_weights="response", scenario=SERVED
    )
    return replace(
        default(),
        trials=(search, learner),
        baselines=("round_robin", *_own_rules(SERVED)),
        promotion_streams=5,
        evaluation_streams=5,
    )


def serial() -> Experiment:
    """The same on serial servers."""
    weightings = ("response", "response_slo_tail")
    return replace(
        default(),
        scenario=SERIAL,
        trials=(*_learners(weightings, SERIAL), _search_trial(SERIAL, 20)),
        baselines=(*_PAPER_BASELINES, *_own_rules(SERIAL)),
        baseline=rule_for(load_scenario(SERIAL)),
        warm_up=partial(_compile_kernels, SERIAL),
    )


def from_scratch() -> Experiment:
    """PPO, DQN and A2C from random weights, first come, first served, beside a rule by hand.

    They are shown the speed, the wait and the load of every replica, and must find out themselves
    what these are worth. The curves have the rule, shortest expected delay, as a line.
    """
    env_steps = {"dqn": 300_000, "ppo": 400_000, "a2c": 500_000}
    trials = [
        _trial(
            algorithm=algorithm,
            env_steps=env_steps[algorithm],
            reward_weights="response_slo_tail",
            scenario=SERVED,
            from_scratch=True,
        )
        for algorithm in RLLIB_ALGORITHMS
    ]
    baselines = ("round_robin", "least_connections", "sed", "marginal_delay")
    return replace(default(), trials=tuple(trials), baselines=baselines, baseline="sed")


def paper() -> Experiment:
    """The paper's agents and hyper-parameters on its nominal load, five seeds (Table I)."""
    trials = [
        _paper_trial(
            algorithm=algorithm,
            env_steps=200_000,
            seed=seed,
            reward_weights=PAPER,
            scenario="nominal",
        )
        for algorithm in RLLIB_ALGORITHMS
        for seed in range(5)
    ]
    return replace(
        serial(), scenario="nominal", trials=tuple(trials), baselines=_PAPER_BASELINES,
        baseline="sed",
    )  # fmt: skip


def paper_high_load() -> Experiment:
    """The paper's agents under its high load, twice as long (Table II)."""
    return trained_on(paper(), "high_load", env_steps=400_000)


def paper_poisson() -> Experiment:
    """The paper's recipe as long as on its nominal load, on the traffic that champions are for."""
    return trained_on(paper(), "poisson_085")


def ablation() -> Experiment:
    """PPO under high load with one term of the paper's reward removed at a time, three seeds.

    A quarter as long as in `paper_high_load`, the whole reward included.
    """
    trials = [
        _paper_trial(
            algorithm="ppo",
            env_steps=100_000,
            seed=seed,
            reward_weights=weights,
            scenario="high_load",
        )
        for weights in (PAPER, *ABLATIONS)
        for seed in range(3)
    ]
    return replace(paper(), scenario="high_load", trials=tuple(trials))


def fleet() -> Experiment:
    """Each algorithm on four kinds of GPU, beside policy search."""
    search = _search_trial(FLEET, SearchConfig().num_generations, iterations=10)
    return replace(
        default(),
        scenario=FLEET,
        trials=(search, *_learners(("response",), FLEET)),
        baselines=("round_robin", "least_connections", "sed", *_own_rules(FLEET)),
        baseline=rule_for(load_scenario(FLEET)),
        warm_up=partial(_compile_kernels, FLEET),
    )


def weights() -> Experiment:
    """PPO and A2C under weights of violations, tail and energy that are drawn as numbers.

    A second of response time always weighs 1, and so does a joule at most.
    """
    return drawn_weights(
        default(),
        _learners(("response",), SERVED)[1],
        num_samples=12,
        algorithm=tune.choice(["ppo", "a2c"]),
        weights={
            "slo": tune.uniform(-6.0, 0.0),
            "tail": tune.uniform(-2.0, 0.0),
            "energy": tune.uniform(-1.0, 0.0),
        },
    )
