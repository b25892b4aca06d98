"""Sets the regional policies of a sweep beside the baselines, all on the same streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from tokenyard.evaluation import Row
from tokenyard.figures import draw_cost
from tokenyard.policies.regions import learned_regions, make_region_policy
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.artifact import RegionArtifact
from tokenyard.regions.demand import RegionStream
from tokenyard.regions.forecast import fit_seasonal
from tokenyard.regions.scenario import load_regions
from tokenyard.regions.simulator.run import run_regions
from tokenyard.regions.state import RegionPolicy
from tokenyard.regions_evaluation import (
    RegionValidation,
    compare_regions,
    difference,
    held_out_streams,
    measure,
    validation_streams,
)
from tune_configs.judge import Columns, Comparison, change

Maker = Callable[[], RegionPolicy]
"""Makes a policy anew for every stream: some remember."""


class RegionJudge:
    """Compares regional policies on one scenario's demand; see `Judge`."""

    score_unit = "$ an episode"

    def __init__(self, scenario: str, seed: int) -> None:
        """Draw all streams but those of the ranking from `seed`."""
        self.scenario = load_regions(scenario)
        self._rule = ActivationRule.of(self.scenario)
        self._forecaster = fit_seasonal(self.scenario)
        self._seed = seed

    def load(self, path: Path) -> RegionArtifact:
        """Read a policy file."""
        return RegionArtifact.load(path)

    def trained(self, artifact: RegionArtifact) -> Maker:
        """What makes a trained policy."""
        return lambda: learned_regions(artifact, self._rule)

    def baseline(self, name: str) -> Maker:
        """What makes a rule.

        Raises:
            ValueError: None of that name.
        """
        make_region_policy(name, self.scenario)
        return lambda: make_region_policy(name, self.scenario)

    def ranking_streams(self) -> list[RegionStream]:
        """The streams on which trials validate themselves."""
        return RegionValidation(self.scenario).streams

    def promotion_streams(self, count: int) -> list[RegionStream]:
        """Further validation streams, on which a candidate meets the champion."""
        return validation_streams(self.scenario, count, 1 + self._seed)

    def fresh_streams(self, count: int) -> list[RegionStream]:
        """Streams that no training and no validation sees."""
        return held_out_streams(self.scenario, count, self._seed)

    def compare(
        self, policies: Mapping[str, Maker], baseline: str, streams: list[RegionStream]
    ) -> Comparison:
        """Run every policy over the streams."""
        runs = {name: self._measured(make, streams) for name, make in policies.items()}
        rows: list[Row] = [
            {**row, "score": -float(row["total_cost"])}
            for row in compare_regions(self.scenario, runs, baseline)
        ]
        rows.sort(key=lambda row: -float(row["score"]))
        return Comparison(len(streams), streams, runs, rows)

    def beats(
        self, candidate: RegionArtifact, champion: RegionArtifact, streams: list[RegionStream]
    ) -> bool:
        """Whether the candidate costs less: the 95 % interval over streams of the difference."""
        ours, theirs = (
            [one["total_cost"] for one in self._measured(self.trained(policy), streams)]
            for policy in (candidate, champion)
        )
        return difference(ours, theirs).high < 0

    def figures(self, comparison: Comparison) -> dict[str, Figure]:
        """Costs of every policy with their differences to the baseline."""
        return {"cost": draw_cost(comparison.rows, "total cost", f"Scenario: {self.scenario.name}")}

    def columns(self, baseline: str) -> Columns:
        """Score, its parts, response and the difference to the baseline."""
        return {
            "score": lambda row: f"{row['score']:.1f}",
            "energy $": lambda row: f"{row['energy_cost']:.1f}",
            "switching $": lambda row: f"{row['switching_cost']:.1f}",
            "late $": lambda row: f"{row['lateness_cost']:.1f}",
            "response s": lambda row: f"{row['mean_response_s']:.1f}",
            f"cost vs {baseline}": lambda row: change(row, "delta_cost"),
        }

    def _measured(self, make: Maker, streams: list[RegionStream]) -> list[dict[str, float]]:
        return [
            measure(run_regions(self.scenario, stream, make(), self._forecaster))
            for stream in streams
        ]
