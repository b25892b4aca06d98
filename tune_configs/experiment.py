"""What a sweep is: which trials, for how long, scheduled and judged how.

An experiment is a Python function that returns one `Experiment`, or a chain of them, each of
another problem; a variant calls it and uses `dataclasses.replace`. `load_experiments` finds them by
"MODULE:FUNCTION".
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from ray import tune
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import ConcurrencyLimiter, SearchAlgorithm, Searcher
from ray.tune.search.basic_variant import BasicVariantGenerator

from tokenyard.config import at_least_one
from tokenyard.problem import AnyProblem
from tokenyard.rl.trainable import PolicyTrainable, TrialConfig

ENV_STEPS = "timesteps_total"
"""Result key of the environment steps a trial has taken."""
SCORE = "eval/score"
"""Result key that trials are ranked on, higher is better, whatever rewards they train on."""

RESOURCES = ("num_env_runners", "cpus_per_actor", "placement")
"""Fields of a trial that say what it reserves, and where."""

_ALWAYS_SHOWN = {"algorithm", "reward_weights", "scenario", "env_steps", "iterations", "seed"}
"""Fields that are reported of every trial, be they set or not."""


@dataclass(frozen=True)
class Experiment:
    """One sweep over one problem."""

    problem: AnyProblem
    """`tokenyard.routing.problem.PROBLEM`, for example: draws streams and compares policies."""
    scenario: str
    """Scenario that all trials are trained and judged on."""
    trainable: type[PolicyTrainable]
    """Trains one trial; reports `eval/score` and `timesteps_total`, and saves `artifact.npz`."""
    trials: tuple[TrialConfig, ...]
    """The trials that are run for certain, in this order."""
    space: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a trial, with domains among their values, that more trials are drawn from; empty:
    only `trials` are run."""
    num_samples: int = 1
    """With a space: how many trials in all. Without: how often `trials` are repeated, each time
    with the next seed."""
    searcher: Callable[[int], Searcher] | None = None
    """Makes the searcher that draws all trials, from a seed; None: what is drawn is drawn at
    random, after `trials`."""
    scheduler: Callable[[], TrialScheduler] = FIFOScheduler
    """Makes the scheduler."""
    max_concurrent_trials: int = 2
    checkpoint_every: int = 1
    """Iterations between checkpoints; what comes after the last one is lost with a killed trial."""
    max_failures: int = 2
    """How often a trial is started again from its checkpoint before it counts as failed."""
    baselines: tuple[str, ...] = ("round_robin", "least_connections", "least_loaded", "sed")
    """Rules judged beside the trials."""
    baseline: str = "sed"
    """The one of `baselines` that differences are taken to."""
    warm_up: Callable[[], None] | None = None
    """Compiles what trials would otherwise each compile for themselves; called in the driver."""
    promotion_streams: int = 20
    """Further validation streams on which a champion must be beaten."""
    evaluation_streams: int = 10
    """Fresh streams on which the best trial is at last set against the baseline."""

    def __post_init__(self) -> None:
        """Refuse designs that Tune would accept and then run differently.

        Raises:
            ValueError: No trials at all, or trials and a searcher.
        """
        for name in ("num_samples", "max_concurrent_trials"):
            at_least_one(name, getattr(self, name))
        if not self.trials and not self.space:
            raise ValueError("an experiment needs trials, a space to draw them from, or both")
        if self.trials and self.searcher is not None:
            raise ValueError("a searcher draws all trials: give a space and no trials")

    def fitted(
        self,
        reserved: Mapping[str, Any],
        max_concurrent_trials: int | None = None,
        max_failures: int | None = None,
        budget: float = 1.0,
    ) -> Experiment:
        """The same experiment on another cluster, or with less time.

        Args:
            reserved: Values for some of `RESOURCES`, set for every trial.
            max_concurrent_trials: In place of the experiment's; None: that one.
            max_failures: In place of the experiment's; None: that one. -1: no limit.
            budget: Share of its environment steps that each trial is given; a number of steps
                that is itself drawn stays.

        Raises:
            ValueError: A budget that is not in (0, 1].
        """
        if not 0.0 < budget <= 1.0:
            raise ValueError(f"budget {budget} must be above 0 and at most 1")

        def changed(env_steps: object) -> dict[str, Any]:
            if not isinstance(env_steps, int):
                return dict(reserved)
            return {**reserved, "env_steps": max(1, round(env_steps * budget))}

        return replace(
            self,
            trials=tuple(
                trial.model_copy(update=changed(trial.env_steps)) for trial in self.trials
            ),
            # A designed trial overwrites all of the space, so both need every key.
            space={**self.space, **changed(self.space.get("env_steps"))} if self.space else {},
            max_concurrent_trials=(
                self.max_concurrent_trials
                if max_concurrent_trials is None
                else max_concurrent_trials
            ),
            max_failures=self.max_failures if max_failures is None else max_failures,
        )

    def designed_trials(self, seed: int) -> list[dict[str, Any]]:
        """Return `trials`, each seed raised by `seed`, repeated if there is no search space.

        The seeds of repetitions do not overlap.
        """
        fields = _ALWAYS_SHOWN.union(*(trial.model_fields_set for trial in self.trials))
        stride = max((trial.seed for trial in self.trials), default=0) + 1
        repeats = 1 if self.space else self.num_samples
        return [
            {**trial.model_dump(include=fields), "seed": seed + trial.seed + repeat * stride}
            for repeat in range(repeats)
            for trial in self.trials
        ]

    def num_trials(self, seed: int = 0) -> int:
        """How many trials the sweep runs."""
        designed = len(self.designed_trials(seed))
        return max(designed, self.num_samples) if self.space else designed

    def param_space(self, seed: int) -> dict[str, Any]:
        """The space Tune draws from; designed trials overwrite all of it.

        A key on which they differ becomes a choice, because Tune only lets a designed trial set
        what the space names, and reports as parameters only what is a domain.
        """
        designed = self.designed_trials(seed)
        keys = designed[0] if designed else {}
        choices = {key: tune.choice(_distinct([trial[key] for trial in designed])) for key in keys}
        return {**choices, "seed": seed, **self.space} if self.space else choices

    def search_algorithm(self, seed: int) -> SearchAlgorithm | Searcher:
        """The source of trials, holding at most `max_concurrent_trials` at once."""
        if self.searcher is not None:
            return ConcurrencyLimiter(self.searcher(seed), self.max_concurrent_trials)
        return BasicVariantGenerator(
            points_to_evaluate=self.designed_trials(seed),
            max_concurrent=self.max_concurrent_trials,
            random_state=seed,
        )


def trained_on(experiment: Experiment, scenario: str, **fields: Any) -> Experiment:
    """The same experiment on another scenario, with other values of further fields of trials."""
    changed = {"scenario": scenario, **fields}
    trials = tuple(trial.model_copy(update=changed) for trial in experiment.trials)
    return replace(experiment, scenario=scenario, trials=trials)


def _distinct(values: list[Any]) -> list[Any]:
    return [value for i, value in enumerate(values) if value not in values[:i]]


def stop_at_budget(trial_id: str, result: Mapping[str, Any]) -> bool:
    """Whether a trial has used up the `env_steps` of its own configuration."""
    return float(result[ENV_STEPS]) >= float(result["config"]["env_steps"])


def load_experiments(reference: str) -> tuple[Experiment, ...]:
    """Call the function "MODULE:FUNCTION", which returns one experiment or a chain of them.

    MODULE is a module of `tune_configs`, or any importable module. After "@" comes a scenario in
    place of the experiment's own.

    Raises:
        ValueError: Not of that form, no such module or function, it returns something else, or a
            chain is given a scenario.
    """
    function_reference, _, scenario = reference.partition("@")
    module_name, colon, function_name = function_reference.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"experiment {reference!r} is not of the form MODULE:FUNCTION")
    function = getattr(_find_module(module_name), function_name, None)
    if not callable(function):
        raise ValueError(f"module {module_name!r} has no experiment function {function_name!r}")
    made = function()
    chain = made if isinstance(made, tuple) else (made,)
    if not chain or not all(isinstance(experiment, Experiment) for experiment in chain):
        raise ValueError(
            f"{reference} returns {type(made).__name__}, not an Experiment nor a tuple of them"
        )
    problems = [experiment.problem.name for experiment in chain]
    if len(set(problems)) < len(problems):
        raise ValueError(f"{reference} has two experiments of one problem: {problems}")
    if not scenario:
        return chain
    if len(chain) > 1:
        raise ValueError(f"{reference}: a scenario is of one problem, and these are {problems}")
    return (trained_on(chain[0], scenario),)


def _find_module(name: str) -> ModuleType:
    inside = f"tune_configs.{name}"
    if "." not in name and importlib.util.find_spec(inside) is not None:
        return importlib.import_module(inside)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(f"no module {name!r} in tune_configs or on the path") from error
