"""Sets the allocators of a sweep beside the baselines, all on the same demand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from tokenyard.allocation.artifact import AllocationArtifact, learned_allocation
from tokenyard.allocation.demand import DemandStream, demand_source
from tokenyard.allocation.scenario import load_allocation
from tokenyard.allocation_evaluation import (
    Runner,
    compare_allocation,
    daily_cost,
    difference,
    fixed,
    resolve_allocation_candidate,
    validation_streams,
)
from tokenyard.evaluation import Row
from tokenyard.figures import draw_cost
from tune_configs.judge import Columns, Comparison, change


class AllocationJudge:
    """Compares allocation policies on one scenario's demand; see `Judge`."""

    score_unit = "$/h"

    def __init__(self, scenario: str, seed: int) -> None:
        """Draw all streams but those of the ranking from `seed`."""
        self.scenario = load_allocation(scenario)
        self._seed = seed

    def load(self, path: Path) -> AllocationArtifact:
        """Read a policy file."""
        return AllocationArtifact.load(path)

    def trained(self, artifact: AllocationArtifact) -> Runner:
        """What runs a trained policy."""
        return fixed(learned_allocation(artifact))

    def baseline(self, name: str) -> Runner:
        """What runs a rule or a bound.

        Raises:
            ValueError: None of that name.
        """
        return resolve_allocation_candidate(name, self.scenario).run

    def ranking_streams(self) -> list[DemandStream]:
        """The streams on which trials validate themselves."""
        return validation_streams(self.scenario)

    def promotion_streams(self, count: int) -> list[DemandStream]:
        """The training part under further noise, on which a candidate meets the champion."""
        return validation_streams(self.scenario, count, seed=1 + self._seed)

    def fresh_streams(self, count: int) -> list[DemandStream]:
        """The test part under several draws of its noise."""
        source = demand_source(self.scenario)
        return [source.test(self._seed + i) for i in range(count)]

    def compare(
        self, policies: Mapping[str, Runner], baseline: str, streams: list[DemandStream]
    ) -> Comparison:
        """Run every policy over the streams."""
        runs = {
            name: [run(self.scenario, stream, self._seed + i) for i, stream in enumerate(streams)]
            for name, run in policies.items()
        }
        rows: list[Row] = [
            {**row, "score": -float(row["cost_with_penalty"])}
            for row in compare_allocation(self.scenario, runs, baseline)
        ]
        rows.sort(key=lambda row: -float(row["score"]))
        return Comparison(len(streams), streams, runs, rows)

    def beats(
        self,
        candidate: AllocationArtifact,
        champion: AllocationArtifact,
        streams: list[DemandStream],
    ) -> bool:
        """Whether the candidate costs less: the 95 % interval over days of the difference."""
        ours, theirs = (
            daily_cost(self.scenario, [run(self.scenario, one, self._seed) for one in streams])
            for run in (self.trained(candidate), self.trained(champion))
        )
        return difference(ours, theirs).high < 0

    def figures(self, comparison: Comparison) -> dict[str, Figure]:
        """Costs of every policy with their differences to the baseline."""
        credit = f"Demand: {demand_source(self.scenario).origin}"
        return {"cost": draw_cost(comparison.rows, "cost with missed requests", credit)}

    def columns(self, baseline: str) -> Columns:
        """Score, cost, promises, changes and the difference to the baseline."""
        return {
            "score": lambda row: f"{row['score']:.3f}",
            "$/h": lambda row: f"{row['cost_per_hour']:.2f}",
            "in time": lambda row: f"{row['slo_attainment']:.2%}",
            "changes": lambda row: f"{row['switches']:.0f}",
            f"cost vs {baseline}": lambda row: change(row, "delta_cost"),
        }
