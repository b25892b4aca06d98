"""The allocation half of `finetune.py`: go on from the champion on the demand that a pool has seen.

Demand does not depend on what the allocator does, so a logged stretch can be lived through again
under any policy: what differs is computed by the same performance model for both, and no
importance weights are needed. The first part of the log is learned from, the last part judges.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from mlflow import MlflowClient
from rich.console import Console

from tokenyard.allocation.artifact import AllocationArtifact, resolve_allocation_champion
from tokenyard.allocation.demand import HISTORY_DAYS, DemandStream
from tokenyard.allocation.dynamics import REWARD
from tokenyard.allocation.forecast import Forecaster, fit_forecaster
from tokenyard.allocation.planner import PlannerModel, make_planner
from tokenyard.allocation.telemetry import read_telemetry
from tokenyard.artifact import ArtifactError
from tokenyard.intervals import BlockBootstrap, Interval, block_length, percentile_interval
from tokenyard.provenance import git_sha
from tokenyard.registry import mlflow_lookup, model_name, offer
from tokenyard.rl.allocation_search import AllocationSearchConfig
from tokenyard.sim.allocation_run import StreamRunner
from tokenyard.types import FloatArray, IntArray

Row = dict[str, str | float | int | bool]
_LEAST_DAYS = 3
"""Days of learning from which on the forecaster is fitted anew; fewer know no daily rhythm."""
_LEAST_SLOTS = 48


@dataclass(frozen=True)
class Options:
    """What `finetune.py` was asked for."""

    log: Path
    scenario: str
    champion: Path | None
    out: Path | None
    registry: str | None
    held_out: float
    generations: int
    population: int
    spread: float
    behaviour: float
    seed: int


def finetune(options: Options, console: Console) -> Row:
    """Learn, judge, and offer.

    Raises:
        ValueError: The log or the champion cannot be used.
    """
    registry = mlflow_lookup(options.registry) if options.registry else None
    champion, source = resolve_allocation_champion(options.scenario, options.champion, registry)
    if champion.metadata.kind != "planner":
        raise ArtifactError(
            f"{source} is of kind {champion.metadata.kind!r}; only planners are fine-tuned"
        )
    scenario = champion.metadata.scenario
    stream, trace_hash = read_telemetry(options.log, scenario.slots_per_day)
    console.print(f"champion: {source}, {champion.sha256}; log: {len(stream.per_s)} slots")
    learned, held_out = split(stream, options.held_out, scenario.slots_per_day)
    before = champion.metadata.forecaster
    assert before is not None
    forecaster = before
    if learned.num_slots >= _LEAST_DAYS * scenario.slots_per_day:
        forecaster = fit_forecaster([learned], scenario.slots_per_day)
    refitted = forecaster is not before
    console.print(
        f"forecaster: {'fitted to the log' if refitted else 'the champion keeps its own'}"
    )
    planner = make_planner(scenario)
    theta = np.ascontiguousarray(champion.arrays["theta"], dtype=np.float64)
    found = search(
        theta, planner, StreamRunner(scenario, learned, before),
        StreamRunner(scenario, learned, forecaster), options,
    )  # fmt: skip
    change, differs = judge(
        planner, StreamRunner(scenario, held_out, before), theta,
        StreamRunner(scenario, held_out, forecaster), found, options.seed,
    )  # fmt: skip
    candidate = continued(champion, found, forecaster, change, trace_hash)
    offered = change.high < 0.0
    row: Row = {
        "champion": champion.sha256, "candidate": candidate.sha256,
        "slots": len(stream.per_s), "held_out_slots": held_out.num_slots,
        "forecaster_refitted": refitted,
        "delta_cost_fraction": change.estimate, "delta_cost_ci_low": change.low,
        "delta_cost_ci_high": change.high, "changed_fraction": differs, "offered": offered,
    }  # fmt: skip
    if not offered:
        console.print("not offered: its interval does not lie below the champion")
        return row
    if options.out is not None:
        candidate.save(options.out)
        console.print(f"wrote {options.out} ({candidate.sha256}); try it with dry_run first")
    if options.registry:
        client = MlflowClient(options.registry, options.registry)
        version = offer(client, model_name("allocation", scenario.name), candidate)
        console.print(f"registered as version {version}, alias candidate")
    return row


def split(
    stream: DemandStream, held_out: float, slots_per_day: int
) -> tuple[DemandStream, DemandStream]:
    """The part to learn from, and the last part with days of history before it.

    Raises:
        ValueError: Either would be too short.
    """
    total = len(stream.per_s)
    cut = total - round(held_out * total)
    if min(cut, total - cut) < _LEAST_SLOTS:
        raise ValueError(
            f"{total} slots are too few: both parts need {_LEAST_SLOTS}, so log for longer"
        )
    history = min(cut, HISTORY_DAYS * slots_per_day)
    start = (stream.start_slot + cut - history) % slots_per_day
    return (
        DemandStream(stream.per_s[:cut], 0, stream.start_slot),
        DemandStream(stream.per_s[cut - history :], history, start),
    )


def cost_and_plans(
    runner: StreamRunner, planner: PlannerModel, theta: FloatArray
) -> tuple[FloatArray, IntArray]:
    """Cost and plan of every slot."""
    outcomes = runner.run_planner(planner, theta)
    return -outcomes.column(REWARD), outcomes.plans


def search(
    start: FloatArray, planner: PlannerModel, as_champion: StreamRunner, runner: StreamRunner,
    options: Options,
) -> FloatArray:  # fmt: skip
    """Cross-entropy search from the champion's parameters.

    Every slot in which a candidate would have another plan than the champion has a price, so that
    it stays near what is known to work.
    """
    rng = np.random.default_rng(options.seed)
    known, plans = cost_and_plans(as_champion, planner, start)
    scale = max(float(known.mean()), 1e-12)

    def cost(theta: FloatArray) -> float:
        costs, chosen = cost_and_plans(runner, planner, theta)
        return float(costs.mean() / scale + options.behaviour * (chosen != plans).mean())

    std = options.spread * np.array(AllocationSearchConfig.initial_std)
    mean, found, least = start.copy(), start, cost(start)
    elites = max(2, options.population // 5)
    for _ in range(options.generations):
        drawn = rng.normal(mean, std, (options.population, len(mean)))
        drawn[0] = mean
        costs = np.array([cost(theta) for theta in drawn])
        best = drawn[np.argsort(costs, kind="stable")[:elites]]
        if costs.min() < least:
            found, least = best[0], float(costs.min())
        mean, std = best.mean(axis=0), best.std(axis=0)
    return mean if cost(mean) <= least else found


def judge(
    planner: PlannerModel, as_champion: StreamRunner, start: FloatArray, runner: StreamRunner,
    theta: FloatArray, seed: int,
) -> tuple[Interval, float]:  # fmt: skip
    """Relative change of the cost on the held-out part, and the share of slots that differ."""
    champion, plans = cost_and_plans(as_champion, planner, start)
    ours, chosen = cost_and_plans(runner, planner, theta)
    difference = ours - champion
    blocks = BlockBootstrap(
        len(difference), block_length(difference), np.random.default_rng([seed, 1])
    )
    means = blocks.resample(difference, lambda values: values.mean(axis=-1))
    interval = percentile_interval(float(difference.mean()), means)
    return interval.over(float(champion.mean())), float((chosen != plans).mean())


def continued(
    champion: AllocationArtifact, theta: FloatArray, forecaster: Forecaster, change: Interval,
    trace_hash: str,
) -> AllocationArtifact:  # fmt: skip
    """The champion with other parameters, and where they come from."""
    lineage = {
        "command": shlex.join(["python", *sys.argv]), "git_sha": git_sha(),
        "champion_sha256": champion.sha256, "trace_sha256": trace_hash,
        "sweep_run": champion.metadata.lineage.get("sweep_run", "none"),
    }  # fmt: skip
    metadata = champion.metadata.model_copy(
        update={
            "forecaster": forecaster,
            "lineage": lineage,
            "metrics": {"delta_cost_fraction": change.estimate},
        }
    )
    return replace(champion, metadata=metadata, arrays={"theta": theta})
