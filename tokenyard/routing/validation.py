"""What a policy in training is worth: its score on fixed streams that it never trains on.

The greedy policy is taken from the artifact, so the number is that of what would be served.
All streams are decided together, one matrix product per step, which makes it cheap enough to
run after every iteration.
"""

from __future__ import annotations

import numpy as np

from tokenyard import metrics
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.simulator.constant_rate import Outcomes
from tokenyard.routing.simulator.run import run_compiled
from tokenyard.routing.simulator.streams import (
    StreamSet,
    StreamSource,
    synthetic_streams,
)
from tokenyard.types import FloatArray

NAMES = ("score", "mean_response_s", "p99_response_s", "slo_violation_fraction")
"""What validation finds: the score in seconds, higher is better, and what it is made of."""


class Validation:
    """A fixed set of streams of one scenario."""

    def __init__(
        self,
        source: StreamSource,
        num_streams: int,
        streams: StreamSet | None = None,
    ) -> None:
        """Draw so many streams, the same in every trial; `streams` are taken in their place."""
        self._source = source
        self._streams = streams or synthetic_streams(source, num_streams, 0, "validation")

    def __call__(self, artifact: PolicyArtifact) -> dict[str, float]:
        """Run the greedy policy on every stream and average over streams; keys are NAMES."""
        return dict(zip(NAMES, self.rows(artifact).mean(axis=0).tolist(), strict=True))

    def rows(self, artifact: PolicyArtifact) -> FloatArray:
        """What the greedy policy does on every stream, shape (num_streams, len(NAMES))."""
        slo_s = self._source.scenario.slo_response_s
        runs = run_compiled(self._source.scenario, self._streams, artifact.decide)
        return np.array([outcome_row(run.outcomes, slo_s) for run in runs])


def outcome_row(outcomes: Outcomes, slo_s: float) -> tuple[float, float, float, float]:
    """What became of one stream; the numbers are NAMES."""
    offered_s, violations = outcomes.offered_response_s, outcomes.violations(slo_s)
    return (
        metrics.score(offered_s, violations),
        metrics.mean(offered_s),
        metrics.percentile(offered_s, 99.0),
        metrics.slo_violation_fraction(violations),
    )
