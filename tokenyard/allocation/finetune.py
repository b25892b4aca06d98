"""Fit a planner's forecaster to the demand that a pool has seen, and judge what came of it.

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
from tokenyard.allocation.simulator.run import StreamRunner
from tokenyard.artifact import ArtifactError
from tokenyard.cross_entropy import FinetuneConfig
from tokenyard.statistics.intervals import BlockBootstrap, Interval, percentile_interval

_LEAST_DAYS = 3
"""To learn from: fewer know no daily rhythm."""
_LEAST_SLOTS = 48


@dataclass(frozen=True)
class Finetuned:
    """What fine-tuning came to."""

    candidate: AllocationArtifact
    """The champion with another forecaster, and where that comes from."""
    change: Interval
    """Relative change of the cost on the held-out part."""
    changed: float
    """Share of held-out slots with another plan."""
    held_out_slots: int

    @property
    def objection(self) -> str | None:
        """Why the candidate is not worth offering; None: it is."""
        return None if self.change.high < 0.0 else "its interval does not lie below the champion"

    @property
    def remark(self) -> str:
        """What was found out on the way."""
        return "its forecaster was fitted to the first part of the log"

    def row(self) -> dict[str, str | float | int | bool]:
        """The judgement as a row."""
        return {
            "held_out_slots": self.held_out_slots,
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
    least = _LEAST_DAYS * scenario.slots_per_day
    if learned.num_slots < least:
        raise ValueError(
            f"{learned.num_slots} slots are too few to learn a daily rhythm from: the first part "
            f"of the log needs {least}, so log for longer"
        )
    forecaster = fit_forecaster([learned], scenario.slots_per_day)
    planner = make_planner(scenario)
    change, changed = judge(
        planner, StreamRunner(scenario, held_out, before),
        StreamRunner(scenario, held_out, forecaster), config.seed,
    )  # fmt: skip
    candidate = continued(champion, forecaster, change, lineage)
    return Finetuned(candidate, change, changed, held_out.num_slots)


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


def judge(
    planner: PlannerModel, as_champion: StreamRunner, as_candidate: StreamRunner, seed: int
) -> tuple[Interval, float]:
    """Relative change of the cost on the held-out part, and the share of slots that differ."""
    before, after = as_champion.run_planner(planner), as_candidate.run_planner(planner)
    known, ours = -before.column(REWARD), -after.column(REWARD)
    difference = ours - known
    interval = Interval(float(difference.mean()), math.nan, math.nan)
    blocks = BlockBootstrap.of(difference, np.random.default_rng([seed, 1]))
    if blocks is not None:
        means = blocks.resample(difference, lambda values: values.mean(axis=-1))
        interval = percentile_interval(interval.estimate, means)
    changed = float((after.plans != before.plans).mean())
    # Where more is earned than paid, costs are negative.
    return interval.over(abs(float(known.mean()))), changed


def continued(
    champion: AllocationArtifact, forecaster: Forecaster, change: Interval,
    lineage: Mapping[str, str],
) -> AllocationArtifact:  # fmt: skip
    """The champion with another forecaster, and where that comes from."""
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
    return replace(champion, metadata=metadata)
