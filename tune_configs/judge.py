"""Sets the policies of a sweep beside the baselines, all on the same streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from matplotlib.figure import Figure

from tokenyard.allocation.artifact import AllocationArtifact
from tokenyard.evaluation import PolicyFactory, Row, Run, compare, run_policy, score
from tokenyard.figures import draw_evaluation
from tokenyard.intervals import t_interval
from tokenyard.policies import PolicyContext, make_policy
from tokenyard.routing.artifact import PolicyArtifact, learned_policy
from tokenyard.scenario import load_scenario
from tokenyard.sim.streams import StreamSet, StreamSource, synthetic_streams
from tokenyard.types import FloatArray, RoutingPolicy

VALIDATION_STREAMS = 8
VALIDATION_SEED = 0
"""The same for all trials of all sweeps, so that their curves can be compared."""


Artifact = PolicyArtifact | AllocationArtifact
"""A trained policy of any problem."""
Columns = Mapping[str, Callable[[Row], str]]
"""Headings of a printed table, and what stands under them."""


@dataclass(frozen=True)
class Comparison:
    """Policies on the same streams."""

    num_streams: int
    streams: Any
    runs: Mapping[str, Sequence[Any]]
    rows: list[Row]
    """One per policy with its differences to the baseline, best score first."""


class Judge(Protocol):
    """What a sweep needs to know of its problem; made from a scenario's name and a seed.

    Trials and rules are ranked on the streams on which trials validate themselves in training,
    so that a learning curve ends where the ranking puts it. Promotion and the final evaluation
    use others, on which nothing was chosen.
    """

    score_unit: str

    def load(self, path: Path) -> Any:
        """Read a policy file."""
        ...

    def trained(self, artifact: Any) -> Any:
        """What `compare` takes for a trained policy."""
        ...

    def baseline(self, name: str) -> Any:
        """The same for a hand-written rule."""
        ...

    def ranking_streams(self) -> Any:
        """The streams on which trials validate themselves."""
        ...

    def promotion_streams(self, count: int) -> Any:
        """Further validation streams, on which a candidate meets the champion."""
        ...

    def fresh_streams(self, count: int) -> Any:
        """Streams on which nothing was chosen."""
        ...

    def compare(self, policies: Mapping[str, Any], baseline: str, streams: Any) -> Comparison:
        """Run every policy over the streams."""
        ...

    def beats(self, candidate: Any, champion: Any, streams: Any) -> bool:
        """Whether the candidate is better beyond doubt."""
        ...

    def figures(self, comparison: Comparison) -> dict[str, Figure]:
        """Draw a comparison, by names of files."""
        ...

    def columns(self, baseline: str) -> Columns:
        """What a printed table shows of a row."""
        ...


class RoutingJudge:
    """Compares routing policies on one scenario's streams."""

    score_unit = "s"

    def __init__(self, scenario: str, seed: int) -> None:
        """Draw all streams but those of the ranking from `seed`."""
        self.scenario = load_scenario(scenario)
        self._source = StreamSource(self.scenario)
        self._seed = seed

    def load(self, path: Path) -> PolicyArtifact:
        """Read a policy file."""
        return PolicyArtifact.load(path)

    def trained(self, artifact: PolicyArtifact) -> PolicyFactory:
        """Factory of a trained policy."""
        return trained(artifact)

    def ranking_streams(self) -> StreamSet:
        """The streams on which trials validate themselves."""
        return synthetic_streams(self._source, VALIDATION_STREAMS, VALIDATION_SEED, "validation")

    def promotion_streams(self, count: int) -> StreamSet:
        """Further validation streams, on which a candidate meets the champion."""
        return synthetic_streams(
            self._source, count, VALIDATION_SEED + 1 + self._seed, "validation"
        )

    def fresh_streams(self, count: int) -> StreamSet:
        """Streams on which nothing was chosen."""
        return synthetic_streams(self._source, count, self._seed, "evaluation")

    def baseline(self, name: str) -> PolicyFactory:
        """Factory of a hand-written rule.

        Raises:
            ValueError: No rule of that name.
        """

        def make(rng: np.random.Generator) -> RoutingPolicy:
            scenario = self.scenario
            context = PolicyContext(scenario.name, scenario.slo, rng, scenario.num_servers)
            return make_policy(name, context)

        return make

    def compare(
        self, policies: Mapping[str, PolicyFactory], baseline: str, streams: StreamSet
    ) -> Comparison:
        """Run every policy over the streams."""
        runs = {name: self._run(factory, streams) for name, factory in policies.items()}
        rows = compare(self.scenario, runs, baseline, streams.bootstrap)
        rows = sorted(rows, key=lambda row: -float(row["score"]))
        return Comparison(len(streams.requests), streams, runs, rows)

    def figures(self, comparison: Comparison) -> dict[str, Figure]:
        """Draw a comparison, by names of files."""
        credit = f"Traffic: {comparison.streams.origin}"
        return draw_evaluation(self.scenario, comparison.runs, comparison.rows, credit)

    def columns(self, baseline: str) -> Columns:
        """Score, response times and their differences to the baseline."""
        return {
            "score": lambda row: f"{row['score']:.3f}",
            "mean s": lambda row: f"{row['mean_response_s']:.3f}",
            "p99 s": lambda row: f"{row['p99_response_s']:.2f}",
            "SLO missed": lambda row: f"{row['slo_violation_fraction']:.1%}",
            f"mean vs {baseline}": lambda row: change(row, "delta_mean"),
            f"p99 vs {baseline}": lambda row: change(row, "delta_p99"),
        }

    def beats(
        self, candidate: PolicyArtifact, champion: PolicyArtifact, streams: StreamSet
    ) -> bool:
        """Whether the candidate's score is higher: the 95 % interval of the paired difference."""
        ours, theirs = (self._scores(policy, streams) for policy in (candidate, champion))
        return t_interval(ours - theirs).low > 0

    def _run(self, factory: PolicyFactory, streams: StreamSet) -> Sequence[Run]:
        return run_policy(self.scenario, streams, factory, self._seed)

    def _scores(self, artifact: PolicyArtifact, streams: StreamSet) -> FloatArray:
        slo_s = self.scenario.slo_response_s
        runs = self._run(trained(artifact), streams)
        return np.array([_score(run, slo_s) for run in runs])


def change(row: Row, key: str) -> str:
    """A difference to the baseline with its interval, in words."""
    low, high = row[f"{key}_ci_low"], row[f"{key}_ci_high"]
    return f"{row[f'{key}_fraction']:+.1%} [{low:+.1%}, {high:+.1%}]"


def _score(run: Run, slo_s: float) -> float:
    return score(run.outcomes.response_s, run.outcomes.missed(slo_s))


def trained(artifact: PolicyArtifact) -> PolicyFactory:
    """Factory of a trained policy."""
    return lambda rng: learned_policy(artifact)
