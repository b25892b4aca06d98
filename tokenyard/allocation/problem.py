"""Allocation as a `Problem`: which parallel configuration, and how many GPUs, serve each interval.

Bounds know the demand to come and are no policies; here they only stand beside them in a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from tokenyard.allocation.artifact import (
    AllocationArtifact,
    learned_allocation,
    learned_for,
)
from tokenyard.allocation.bounds import (
    best_static_in_hindsight,
    clairvoyant,
    free_switching,
    value_iteration_policy,
)
from tokenyard.allocation.demand import DemandStream, demand_source
from tokenyard.allocation.dynamics import NUM_OUT, REWARD
from tokenyard.allocation.evaluation import MEASURES, daily_cost, summarise
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.policies import ALLOCATION_BASELINES, best_rule, make_allocation_policy
from tokenyard.allocation.policies.learned import ForecastingPolicy
from tokenyard.allocation.policies.rules import AllocationContext
from tokenyard.allocation.scenario import AllocationScenario, allocation_names
from tokenyard.allocation.simulator import AllocationOutcomes
from tokenyard.allocation.simulator.run import StreamRunner, run_allocation
from tokenyard.allocation.types import AllocationPolicy
from tokenyard.artifact import NoChampionError, RegistryLookup
from tokenyard.problem import RULE, Candidate, Drawn, Measure, Problem, Purpose, Runner, Score
from tokenyard.statistics.intervals import Samples

BOUNDS = ("best_static_hindsight", "clairvoyant", "free_switching")
"""They know the demand to come, and are no policies."""
TRAINED = ("value_iteration", "champion")
SUITES = {
    "allocation": (
        "a100x8_7b", "a100x8_13b", "a100x8_13b_tight", "a100x8_70b", "h100x8_13b", "h100x8_70b",
        "l4x4_7b", "mixed_13b",
    ),
    "allocation_recurring": (
        "a100x8_13b_schedule_30", "a100x8_13b_schedule_120", "h100x8_13b_schedule_300",
        "h100x8_13b_steps_120", "a100x8_13b_ramp_120", "a100x8_13b_bursts_30",
        "a100x8_13b_bursts_120", "a100x8_13b_flat_120",
    ),
}  # fmt: skip


Demands = Drawn[DemandStream]
"""One part of a scenario's demand under several draws of its noise."""


class Allocation(Problem[AllocationScenario, AllocationArtifact, Demands, AllocationOutcomes]):
    """Streams are draws of noise over one trace, paired by day."""

    name = "allocation"
    suites = SUITES
    default_policies = (*ALLOCATION_BASELINES, *TRAINED, *BOUNDS)
    default_baseline = "autoscaler_tuned"
    num_validation_streams = 2  # of many days each, and days are what is paired
    score = Score("cost_with_penalty", -1, "$/h")
    headline = ("cost_with_penalty", "cost_per_hour", "slo_attainment", "switches")
    trade_off = ("cost_per_hour", "slo_attainment")
    scenario_names = staticmethod(allocation_names)
    load_scenario = staticmethod(load_allocation)
    load_artifact = staticmethod(AllocationArtifact.load)
    summary = staticmethod(summarise)

    def candidate(
        self, scenario: AllocationScenario, name: str, registry: RegistryLookup | None = None
    ) -> Candidate[AllocationScenario, Demands, AllocationOutcomes]:
        """Load a rule, a bound, `value_iteration`, `champion` or a policy file (.npz) by path.

        Raises:
            ValueError: The name is unknown, or its files are missing or of another scenario.
        """
        if name in ALLOCATION_BASELINES:
            # Report missing tuned parameters before a long run.
            make_allocation_policy(name, AllocationContext(scenario, np.random.default_rng(0)))
            return Candidate(name, RULE, partial(_run_rule, name))
        if name == "value_iteration":
            policy = value_iteration_policy(scenario)
            return Candidate(name, "optimum of the Markov load", partial(_run_policy, policy))
        if name in BOUNDS:
            return Candidate(name, "bound, no policy", partial(_run_bound, name))
        if name == "champion" or name.endswith(".npz"):
            return _learned(name, scenario, registry)
        names = [*ALLOCATION_BASELINES, *TRAINED, *BOUNDS]
        raise ValueError(
            f"unknown allocation policy {name!r}; give a policy file (.npz) or one of {names}"
        )

    def trained(
        self, artifact: AllocationArtifact
    ) -> Runner[AllocationScenario, Demands, AllocationOutcomes]:
        """What runs a trained policy."""
        return partial(_run_policy, learned_allocation(artifact))

    def streams(
        self, scenario: AllocationScenario, purpose: Purpose, count: int, seed: int
    ) -> Demands:
        """The end of the training part, which no learner trains on, or the test part."""
        source = demand_source(scenario)
        if purpose == "validation":
            drawn = [source.validation(1_000 + 100 * seed + i) for i in range(count)]
        else:
            drawn = [source.test(seed + i) for i in range(count)]
        return Drawn(drawn, f"{count} draws of noise; {source.origin}")

    def best_tuned_rule(self, scenario: AllocationScenario) -> str | None:
        """Rule that decides where no policy was trained."""
        return best_rule(scenario.name)

    def measures(self, scenario: AllocationScenario) -> Sequence[Measure]:
        """Cost, attainment, energy and changes of plan."""
        return MEASURES

    def samples(
        self,
        scenario: AllocationScenario,
        streams: Demands,
        runs: Mapping[str, Sequence[AllocationOutcomes]],
        baseline: str,
    ) -> dict[str, Samples]:
        """Cost by day, mean over draws."""
        return {
            name: Samples({"cost_with_penalty": daily_cost(scenario, outcomes)})
            for name, outcomes in runs.items()
        }


PROBLEM = Allocation()


def _learned(
    name: str, scenario: AllocationScenario, registry: RegistryLookup | None
) -> Candidate[AllocationScenario, Demands, AllocationOutcomes]:
    path = name if name.endswith(".npz") else None
    try:
        artifact, source = AllocationArtifact.champion(scenario.name, path, registry)
    except NoChampionError:
        rule = best_rule(scenario.name)
        return Candidate(name, f"the rule {rule}", partial(_run_rule, rule), rule)
    policy = learned_for(artifact, scenario, source)
    words = f"{source}, trained by {artifact.metadata.trainer}, {artifact.sha256}"
    return Candidate(Path(name).stem if path else name, words, partial(_run_policy, policy))


def _run_rule(
    name: str, scenario: AllocationScenario, demands: Demands, seed: int
) -> list[AllocationOutcomes]:
    outcomes = []
    for i, stream in enumerate(demands.streams):
        context = AllocationContext(scenario, np.random.default_rng([seed + i, 7]))
        outcomes.append(_run(scenario, stream, make_allocation_policy(name, context)))
    return outcomes


def _run_policy(
    policy: AllocationPolicy, scenario: AllocationScenario, demands: Demands, seed: int
) -> list[AllocationOutcomes]:
    return [_run(scenario, stream, policy) for stream in demands.streams]


def _run(
    scenario: AllocationScenario, stream: DemandStream, policy: AllocationPolicy
) -> AllocationOutcomes:
    if isinstance(policy, ForecastingPolicy):
        policy = policy.on(stream)
    return run_allocation(scenario, stream, policy)


def _run_bound(
    name: str, scenario: AllocationScenario, demands: Demands, seed: int
) -> list[AllocationOutcomes]:
    return [_bound(name, StreamRunner(scenario, stream)) for stream in demands.streams]


def _bound(name: str, runner: StreamRunner) -> AllocationOutcomes:
    if name == "best_static_hindsight":
        return best_static_in_hindsight(runner)
    if name == "clairvoyant":
        return clairvoyant(runner)
    # Of free switching only rewards are known: nothing else is shown.
    rewards = free_switching(runner)
    outs = np.full((len(rewards), NUM_OUT), np.nan)
    outs[:, REWARD] = rewards
    return AllocationOutcomes(np.full(len(rewards), -1), outs, 0)
