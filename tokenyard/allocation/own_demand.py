"""A planner for the demand that one's own pool has seen.

Demand does not depend on what the allocator does, so a logged stretch can be lived through again
under any policy, and the same performance model computes the cost of each. The forecaster is fitted
to the first part of the log. The last part judges: the planner with that forecaster is accepted if
it costs less than the planner of today, with an interval below zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tokenyard.allocation.artifact import AllocationArtifact
from tokenyard.allocation.demand import HISTORY_DAYS, DemandStream
from tokenyard.allocation.dynamics import REWARD
from tokenyard.allocation.forecast import fit_forecaster
from tokenyard.allocation.simulator.run import StreamRunner
from tokenyard.artifact import ArtifactError
from tokenyard.statistics.intervals import BlockBootstrap, Interval, percentile_interval

HELD_OUT = 0.4
"""Share of the log, the last part, that judges."""
_LEAST_DAYS = 3
"""To learn from: fewer know no daily rhythm."""
_LEAST_SLOTS = 48


@dataclass(frozen=True)
class Fitted:
    """What fitting a forecaster came to."""

    planner: AllocationArtifact
    """The planner of today with another forecaster, and where that comes from."""
    change: Interval
    """Relative change of the cost on the last part."""
    changed: float
    """Share of the last part's slots with another plan."""

    @property
    def accepted(self) -> bool:
        """Whether it costs less for certain."""
        return self.change.high < 0.0


def fit_planner(
    today: AllocationArtifact, stream: DemandStream, seed: int, lineage: Mapping[str, str]
) -> Fitted:
    """Learn from the first part of a log, and judge on the last.

    Raises:
        ArtifactError: What decides today is no planner.
        ValueError: The log is too short.
    """
    metadata = today.metadata
    if metadata.kind != "planner":
        raise ArtifactError(f"the champion is of kind {metadata.kind!r}; only planners are fitted")
    scenario = metadata.scenario
    learned, held_out = split(stream, HELD_OUT, scenario.slots_per_day)
    least = _LEAST_DAYS * scenario.slots_per_day
    if learned.num_slots < least:
        raise ValueError(
            f"{learned.num_slots} slots are too few to learn a daily rhythm from: the first part "
            f"of the log needs {least}, so log for longer"
        )
    forecaster = fit_forecaster([learned], scenario.slots_per_day)
    before, after = (StreamRunner(scenario, held_out, f) for f in (today.forecaster, forecaster))
    change, changed = judge(before, after, seed)
    fields = {
        "forecaster": forecaster,
        "lineage": {**lineage, "champion_sha256": today.sha256},
        "metrics": {"delta_cost_fraction": change.estimate},
    }
    planner = replace(today, metadata=metadata.model_copy(update=fields))
    return Fitted(planner, change, changed)


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


def judge(today: StreamRunner, fitted: StreamRunner, seed: int) -> tuple[Interval, float]:
    """Return the relative change of cost on the last part, and the share of changed plans."""
    before, after = today.run_planner(), fitted.run_planner()
    cost_today, cost_fitted = -before.column(REWARD), -after.column(REWARD)
    difference = cost_fitted - cost_today
    interval = Interval(float(difference.mean()), np.nan, np.nan)
    blocks = BlockBootstrap.of(difference, np.random.default_rng([seed, 1]))
    if blocks is not None:
        means = blocks.resample(difference, lambda values: values.mean(axis=-1))
        interval = percentile_interval(interval.estimate, means)
    changed = float((after.plans != before.plans).mean())
    # Costs are negative where earnings exceed them.
    return interval.over(abs(float(cost_today.mean()))), changed
