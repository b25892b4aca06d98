"""Sets allocation policies beside each other on the same demand, with intervals over days.

All policies live through the same test part under several draws of its noise. One trace is one
trace: draws are averaged, and intervals are Student's over its days, paired by day.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenyard.allocation.artifact import AllocationArtifact, resolve_allocation_champion
from tokenyard.allocation.demand import DemandStream, demand_source
from tokenyard.allocation.dynamics import (
    DROPPED,
    ENERGY_J,
    MISSED,
    NUM_OUT,
    OFFERED,
    REWARD,
    SERVED,
    SWITCHED,
    USD,
)
from tokenyard.allocation.plans import plan_table
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.simulator import AllocationOutcomes
from tokenyard.artifact import RegistryLookup
from tokenyard.intervals import Interval, t_interval
from tokenyard.policies.allocation import (
    ALLOCATION_BASELINES,
    AllocationContext,
    learned_allocation,
    learned_for,
    make_allocation_policy,
)
from tokenyard.sim.allocation_bounds import (
    best_static_in_hindsight,
    clairvoyant,
    free_switching,
    value_iteration_policy,
)
from tokenyard.sim.allocation_run import StreamRunner, run_allocation
from tokenyard.types import AllocationPolicy, FloatArray

Row = dict[str, str | float]
Runner = Callable[[AllocationScenario, DemandStream, int], AllocationOutcomes]
BOUNDS = ("best_static_hindsight", "clairvoyant", "free_switching")
"""They know the demand to come, and are no policies."""
TRAINED = ("value_iteration", "champion")
NUM_VALIDATION_STREAMS = 2


@dataclass(frozen=True)
class AllocationCandidate:
    """Something to be evaluated."""

    name: str
    source: str
    """Where it comes from, in words for a table."""
    run: Runner


def resolve_allocation_candidate(
    name: str, scenario: AllocationScenario, registry: RegistryLookup | None = None
) -> AllocationCandidate:
    """Find what a name means: a baseline, a bound, `champion` or a policy file.

    Raises:
        ValueError: The name is unknown, or what it needs is missing or of another scenario.
    """
    if name in ALLOCATION_BASELINES:
        # Tuned parameters that are missing must show before a long run.
        make_allocation_policy(name, AllocationContext(scenario, np.random.default_rng(0)))
        return AllocationCandidate(name, "baseline", _baseline(name))
    if name == "value_iteration":
        return AllocationCandidate(
            name, "optimum of the Markov load", fixed(value_iteration_policy(scenario))
        )
    if name in BOUNDS:
        return AllocationCandidate(name, "bound, no policy", _bound(name))
    if name == "champion" or name.endswith(".npz"):
        path = name if name.endswith(".npz") else None
        artifact, source = resolve_allocation_champion(scenario.name, path, registry)
        return _trained(Path(name).stem if path else name, artifact, source, scenario)
    known = [*ALLOCATION_BASELINES, *TRAINED, *BOUNDS]
    raise ValueError(
        f"unknown allocation policy {name!r}; give a policy file (.npz) or one of {known}"
    )


def _trained(
    name: str, artifact: AllocationArtifact, source: str, scenario: AllocationScenario
) -> AllocationCandidate:
    policy = learned_for(artifact, scenario, source)
    words = f"{source}, trained by {artifact.metadata.trainer}, {artifact.sha256}"
    return AllocationCandidate(name, words, fixed(policy))


def _baseline(name: str) -> Runner:
    def run(scenario: AllocationScenario, stream: DemandStream, seed: int) -> AllocationOutcomes:
        context = AllocationContext(scenario, np.random.default_rng([seed, 7]))
        return run_allocation(scenario, stream, make_allocation_policy(name, context))

    return run


def fixed(policy: AllocationPolicy) -> Runner:
    """What runs one policy object over streams."""
    return lambda scenario, stream, seed: run_allocation(scenario, stream, policy)


def _bound(name: str) -> Runner:
    def run(scenario: AllocationScenario, stream: DemandStream, seed: int) -> AllocationOutcomes:
        runner = StreamRunner(scenario, stream)
        if name == "best_static_hindsight":
            return best_static_in_hindsight(runner)
        if name == "clairvoyant":
            return clairvoyant(runner)
        # Of free switching only rewards are known: nothing else is shown.
        outs = np.full((stream.num_slots, NUM_OUT), np.nan)
        outs[:, REWARD] = free_switching(runner)
        return AllocationOutcomes(np.full(stream.num_slots, -1), outs, 0)

    return run


def run_candidates(
    scenario: AllocationScenario,
    candidates: Sequence[AllocationCandidate],
    num_streams: int,
    seed: int,
) -> dict[str, list[AllocationOutcomes]]:
    """Run every candidate over the test part under so many draws of its noise."""
    source = demand_source(scenario)
    streams = [source.test(seed + i) for i in range(num_streams)]
    return {
        one.name: [one.run(scenario, stream, seed + i) for i, stream in enumerate(streams)]
        for one in candidates
    }


def compare_allocation(
    scenario: AllocationScenario,
    runs: Mapping[str, Sequence[AllocationOutcomes]],
    baseline: str,
) -> list[Row]:
    """Return one row per policy, with paired differences in cost to a baseline.

    Raises:
        ValueError: The baseline is not among `runs`.
    """
    if baseline not in runs:
        raise ValueError(f"baseline {baseline!r} was not run; choose one of {sorted(runs)}")
    theirs = daily_cost(scenario, runs[baseline])
    return [_row(scenario, name, some, theirs) for name, some in runs.items()]


def daily_cost(scenario: AllocationScenario, runs: Sequence[AllocationOutcomes]) -> FloatArray:
    """Dollars per hour of every day, missed requests included, mean over draws; shape (days,).

    Where the objective is another than dollars, minus the reward of a slot.
    """
    per_slot = np.mean([_cost(scenario, one) for one in runs], axis=0)
    days = max(1, len(per_slot) // scenario.slots_per_day)
    each = len(per_slot) // days
    return np.asarray(per_slot[: days * each].reshape(days, each).mean(axis=1))


def _cost(scenario: AllocationScenario, outcomes: AllocationOutcomes) -> FloatArray:
    if scenario.objective is None:
        return -outcomes.column(REWARD) * 3600 / scenario.slot_s
    return -outcomes.column(REWARD)


def difference(ours: FloatArray, theirs: FloatArray) -> Interval:
    """Paired difference over days, over the other's mean."""
    return t_interval(ours - theirs).over(abs(float(theirs.mean())))


def _row(
    scenario: AllocationScenario,
    name: str,
    runs: Sequence[AllocationOutcomes],
    theirs: FloatArray,
) -> Row:
    outs = np.concatenate([one.outs for one in runs])
    offered, missed = outs[:, OFFERED].sum(), outs[:, MISSED].sum()
    hours = len(outs) * scenario.slot_s / 3600
    tokens = outs[:, SERVED].sum() * scenario.generated_tokens
    usd = outs[:, USD].sum()
    ours = daily_cost(scenario, runs)
    delta = difference(ours, theirs)
    table = plan_table(scenario)
    kinds = [table.plans[i].parallelism for one in runs for i in one.plans.tolist() if i >= 0]
    shares = {
        f"share_{kind}_fraction": float(np.mean([k.startswith(kind) for k in kinds]))
        if kinds
        else np.nan
        for kind in ("data", "model", "hybrid")
    }
    return {
        "policy": name,
        "scenario": scenario.name,
        "stream_count": len(runs),
        "reward": float(outs[:, REWARD].mean()),
        "cost_per_hour": float(usd / hours),
        "cost_with_penalty": float(ours.mean())
        if scenario.objective is None
        else float((usd + scenario.missed_usd * missed) / hours),
        "cost_per_million_tokens": float(1e6 * usd / tokens),
        "goodput_fraction": float(1 - missed / offered),
        "slo_attainment": float(1 - missed / offered),
        "worst_day_attainment": _worst_day(scenario, runs),
        "dropped_fraction": float(outs[:, DROPPED].sum() / offered),
        "energy_j_per_token": float(outs[:, ENERGY_J].sum() / tokens),
        "switches": float(outs[:, SWITCHED].sum() / len(runs)),
        "refused": float(sum(one.num_refused for one in runs)),
        **shares,
        "delta_cost_fraction": delta.estimate,
        "delta_cost_ci_low": delta.low,
        "delta_cost_ci_high": delta.high,
    }


def _worst_day(scenario: AllocationScenario, runs: Sequence[AllocationOutcomes]) -> float:
    each = scenario.slots_per_day
    days = []
    for one in runs:
        for start in range(0, len(one.outs) - each + 1, each):
            day = one.outs[start : start + each]
            days.append(1 - day[:, MISSED].sum() / day[:, OFFERED].sum())
    return float(min(days)) if days else np.nan


class AllocationValidation:
    """What a policy in training is worth: its cost on the training part under noise of its own."""

    def __init__(self, scenario: AllocationScenario) -> None:
        """Draw the streams; equal scenarios give equal streams in every trial."""
        self._scenario = scenario
        self._streams = validation_streams(scenario)

    def __call__(self, artifact: AllocationArtifact) -> dict[str, float]:
        """Return `score`, minus the cost with missed requests, and what it is made of."""
        policy = learned_allocation(artifact)
        runs = [run_allocation(self._scenario, stream, policy) for stream in self._streams]
        row = _row(self._scenario, "", runs, daily_cost(self._scenario, runs))
        kept = ("cost_per_hour", "slo_attainment", "switches", "refused")
        return {"score": -float(row["cost_with_penalty"]), **{key: float(row[key]) for key in kept}}


def validation_streams(
    scenario: AllocationScenario, count: int = NUM_VALIDATION_STREAMS, seed: int = 0
) -> list[DemandStream]:
    """The training part under noise that no learner trains on."""
    source = demand_source(scenario)
    return [source.train(1_000 + 100 * seed + i) for i in range(count)]
