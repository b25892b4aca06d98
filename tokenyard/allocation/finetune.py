"""Go on from an allocation champion on the demand that a pool has seen, and judge what came of it.

Demand does not depend on what the allocator does, so a logged stretch can be lived through again
under any policy: what differs is computed by the same performance model for both, and no
importance weights are needed. The first part of the log is learned from, the last part judges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tokenyard.allocation.artifact import KINDS, AllocationArtifact
from tokenyard.allocation.demand import HISTORY_DAYS, DemandStream
from tokenyard.allocation.dynamics import REWARD
from tokenyard.allocation.forecast import Forecaster, fit_forecaster
from tokenyard.allocation.planner import PlannerModel, make_planner
from tokenyard.allocation.search import AllocationSearchConfig
from tokenyard.allocation.simulator.run import StreamRunner
from tokenyard.artifact import ArtifactError
from tokenyard.cross_entropy import CrossEntropy, FinetuneConfig, minimise
from tokenyard.statistics.intervals import (
    BlockBootstrap,
    Interval,
    percentile_interval,
)
from tokenyard.types import FloatArray, IntArray

_LEAST_DAYS = 3
"""Days of learning from which on the forecaster is fitted anew; fewer know no daily rhythm."""
_LEAST_SLOTS = 48
_SPREAD = 0.5
"""Of the first generation around the champion, as a share of where a search from nothing begins."""


@dataclass(frozen=True)
class Finetuned:
    """What fine-tuning came to."""

    candidate: AllocationArtifact
    """The champion with other parameters, and where they come from."""
    change: Interval
    """Relative change of the cost on the held-out part."""
    changed: float
    """Share of held-out slots with another plan."""
    held_out_slots: int
    forecaster_refitted: bool

    @property
    def objection(self) -> str | None:
        """Why the candidate is not worth offering; None: it is."""
        return None if self.change.high < 0.0 else "its interval does not lie below the champion"

    @property
    def remark(self) -> str:
        """What was found out on the way."""
        fitted = "fitted to the log" if self.forecaster_refitted else "the champion keeps its own"
        return f"forecaster: {fitted}"

    def row(self) -> dict[str, str | float | int | bool]:
        """The judgement as a row."""
        return {
            "held_out_slots": self.held_out_slots, "forecaster_refitted": self.forecaster_refitted,
            "delta_cost_fraction": self.change.estimate, "delta_cost_ci_low": self.change.low,
            "delta_cost_ci_high": self.change.high, "changed_fraction": self.changed,
        }  # fmt: skip


def finetune(
    champion: AllocationArtifact,
    stream: DemandStream,
    config: FinetuneConfig,
    lineage: Mapping[str, str],
) -> Finetuned:
    """Learn from the first part of a log, and judge on the last.

    Args:
        champion: Where the search begins; it brings its scenario.
        stream: The demand that was logged.
        config: How the log is cut and searched.
        lineage: Where the log comes from, for the record.

    Raises:
        ArtifactError: The champion is of a kind that is not fine-tuned.
        ValueError: The log is too short.
    """
    if not KINDS[champion.metadata.kind].is_finetuned:
        raise ArtifactError(
            f"the champion is of kind {champion.metadata.kind!r}; only planners are fine-tuned"
        )
    scenario, before = champion.metadata.scenario, champion.forecaster
    learned, held_out = split(stream, config.held_out, scenario.slots_per_day)
    refitted = learned.num_slots >= _LEAST_DAYS * scenario.slots_per_day
    forecaster = fit_forecaster([learned], scenario.slots_per_day) if refitted else before
    planner = make_planner(scenario)
    theta = np.ascontiguousarray(champion.arrays["theta"], dtype=np.float64)
    found = search(
        theta, planner, StreamRunner(scenario, learned, before),
        StreamRunner(scenario, learned, forecaster), config,
    )  # fmt: skip
    change, changed = judge(
        planner, StreamRunner(scenario, held_out, before), theta,
        StreamRunner(scenario, held_out, forecaster), found, config.seed,
    )  # fmt: skip
    candidate = continued(champion, found, forecaster, change, lineage)
    return Finetuned(candidate, change, changed, held_out.num_slots, refitted)


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
    config: FinetuneConfig,
) -> FloatArray:  # fmt: skip
    """Search from the champion's parameters.

    Every slot in which a candidate would have another plan than the champion has a price, so that
    it stays near what is known to work.
    """
    known, plans = cost_and_plans(as_champion, planner, start)
    # Where more is earned than paid, costs are negative.
    scale = max(abs(float(known.mean())), 1e-12)

    def cost(theta: FloatArray) -> float:
        costs, chosen = cost_and_plans(runner, planner, theta)
        return float(costs.mean() / scale + config.behaviour * (chosen != plans).mean())

    spread = _SPREAD if config.spread is None else config.spread
    loop = CrossEntropy(
        start, spread * np.array(AllocationSearchConfig.initial_std),
        population=config.population, num_elites=max(2, config.population // 5),
    )  # fmt: skip
    found, _ = minimise(loop, cost, np.random.default_rng(config.seed), config.generations)
    return found


def judge(
    planner: PlannerModel, as_champion: StreamRunner, start: FloatArray, runner: StreamRunner,
    theta: FloatArray, seed: int,
) -> tuple[Interval, float]:  # fmt: skip
    """Relative change of the cost on the held-out part, and the share of slots that differ."""
    champion, plans = cost_and_plans(as_champion, planner, start)
    ours, chosen = cost_and_plans(runner, planner, theta)
    difference = ours - champion
    interval = Interval(float(difference.mean()), math.nan, math.nan)
    blocks = BlockBootstrap.of(difference, np.random.default_rng([seed, 1]))
    if blocks is not None:
        means = blocks.resample(difference, lambda values: values.mean(axis=-1))
        interval = percentile_interval(interval.estimate, means)
    return interval.over(abs(float(champion.mean()))), float((chosen != plans).mean())


def continued(
    champion: AllocationArtifact, theta: FloatArray, forecaster: Forecaster, change: Interval,
    lineage: Mapping[str, str],
) -> AllocationArtifact:  # fmt: skip
    """The champion with other parameters, and where they come from."""
    made_of = dict(lineage) | {
        "champion_sha256": champion.sha256,
        "sweep_run": champion.metadata.lineage.get("sweep_run", "none"),
    }
    metadata = champion.metadata.model_copy(
        update={
            "forecaster": forecaster,
            "lineage": made_of,
            "metrics": {"delta_cost_fraction": change.estimate},
        }
    )
    return replace(champion, metadata=metadata, arrays={"theta": theta})
