"""What a policy in training is worth: its score on fixed streams that it never trains on.

The greedy policy is taken from the artifact, so the number is that of what would be served.
All streams are decided together, one matrix product per step, which makes it cheap enough to
run after every iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from tokenyard import metrics
from tokenyard.routing.artifact import PolicyArtifact, equivariant_preferences
from tokenyard.routing.gate import NUM_STREAMS, Gate, gate_streams, outcome_runs
from tokenyard.routing.observation import finish_columns
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.scores.residual import fold
from tokenyard.routing.simulator import Simulator
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.constant_rate import Observations
from tokenyard.routing.simulator.rollouts import run_residual
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.streams import (
    StreamSet,
    StreamSource,
    recorded_training_streams,
    synthetic_streams,
)
from tokenyard.statistics.intervals import t_interval
from tokenyard.types import FloatArray

NAMES = ("score", "mean_response_s", "p99_response_s", "slo_violation_fraction")
"""What validation finds: the score in seconds, higher is better, and what it is made of."""
_SCORE, _MEAN, _P99, _VIOLATIONS = range(len(NAMES))
REFUSED = "nothing is written: every candidate loses to a rule (tokenyard/routing/gate.py)"
RULES_LOST_TO = "rules_lost_to"
"""Key of how often a policy loses to a rule at the promotion gate; more than 0 is refused."""


class Validation:
    """A fixed set of streams of one scenario."""

    def __init__(
        self,
        source: StreamSource,
        num_streams: int,
        seed: int = 0,
        streams: StreamSet | None = None,
    ) -> None:
        """Draw the streams; equal arguments give equal streams in every trial.

        Args:
            source: Traffic of the scenario.
            num_streams: How many to draw.
            seed: Of what is drawn.
            streams: Taken in place of any that would be drawn.
        """
        self._source = source
        drawn = streams or synthetic_streams(source, num_streams, seed, "validation")
        self._streams = drawn

    def __call__(self, artifact: PolicyArtifact) -> dict[str, float]:
        """Run the greedy policy on every stream and average over streams; keys are NAMES."""
        return dict(zip(NAMES, self.rows(artifact).mean(axis=0).tolist(), strict=True))

    def rows(self, artifact: PolicyArtifact) -> FloatArray:
        """What the greedy policy does on every stream, shape (num_streams, len(NAMES))."""
        slo_s = self._source.scenario.slo_response_s
        runs = artifact_runs(self._source.scenario, self._streams, artifact)
        return np.array(
            [
                (
                    metrics.score(one.response_s, one.violations(slo_s)),
                    metrics.mean_response_s(one.response_s),
                    metrics.percentile_response_s(one.response_s, 99.0),
                    metrics.slo_violation_fraction(one.violations(slo_s)),
                )
                for one in (run.outcomes for run in runs)
            ]
        )


def artifact_runs(scenario: Scenario, streams: StreamSet, artifact: PolicyArtifact) -> list[Run]:
    """Run the greedy policy of an artifact in compiled code; see `outcome_runs`."""
    metadata, arrays = artifact.metadata, artifact.arrays

    def decide(sim: Simulator) -> None:
        if metadata.kind in ("linear", "marginal"):
            sim.run_linear(arrays["weights"], metadata.mean_total_tokens)
        elif metadata.kind == "corrected":
            correction = fold(arrays, artifact.layers)
            run_residual(cast(BatchingSim, sim), correction, metadata.mean_total_tokens)
        elif metadata.kind == "generic":
            of_kind = "server_weights" if scenario.fleet is None else "engine_weights"
            sim.run_any_cluster(arrays[of_kind], metadata.mean_total_tokens)
        else:
            _run_network(sim, artifact)

    return outcome_runs(scenario, streams, decide, metadata.expected_finish)


class PairedScore:
    """Compares policies with a hand rule on what no search was trained on.

    That is fresh synthetic streams and, where the file is found, the recorded requests that the
    traffic model was fitted to; and what the promotion gate looks at, with the best tuned rule.
    The recorded test part is not touched.
    """

    def __init__(self, source: StreamSource, rule: PolicyArtifact, num_streams: int) -> None:
        """Draw the streams and run the rule on them."""
        self._drawn = Validation(source, num_streams)
        self._rule_rows = self._drawn.rows(rule)
        streams = recorded_training_streams(source)
        self._recorded = None if streams is None else Validation(source, 1, streams=streams)
        self._rule_recorded = None if self._recorded is None else self._recorded.rows(rule)[0]
        self._scenario = source.scenario
        self._gate = Gate(source, parts=gate_streams(source, min(num_streams, NUM_STREAMS)))

    @property
    def rule_p99_s(self) -> float:
        """The rule's 99th percentile of response times, mean over streams, seconds."""
        return float(self._rule_rows[:, _P99].mean())

    def __call__(self, artifact: PolicyArtifact) -> dict[str, float]:
        """What the policy does, and by how much it differs from the rule."""
        ours, theirs = self._drawn.rows(artifact), self._rule_rows
        mean, rule = ours.mean(axis=0), theirs.mean(axis=0)
        p99_beyond = t_interval(ours[:, _P99] - theirs[:, _P99]).high / rule[_P99]
        found = dict(zip(NAMES, mean.tolist(), strict=True)) | {
            "delta_mean_fraction": float(mean[_MEAN] / rule[_MEAN] - 1),
            "delta_p99_fraction": float(mean[_P99] / rule[_P99] - 1),
            "delta_p99_ci_high": float(p99_beyond),
            "delta_slo_violation": float(mean[_VIOLATIONS] - rule[_VIOLATIONS]),
        }
        if self._recorded is not None and self._rule_recorded is not None:
            recorded = self._recorded.rows(artifact)[0] / self._rule_recorded - 1.0
            found["recorded_delta_mean_fraction"] = float(recorded[_MEAN])
            found["recorded_delta_p99_fraction"] = float(recorded[_P99])
        rows = self._gate(lambda streams: artifact_runs(self._scenario, streams, artifact))
        return found | {RULES_LOST_TO: float(sum(int(row["loses"]) for row in rows))}


def worst_p99(found: Mapping[str, Any]) -> float:
    """How far p99 may exceed that of the hand rule, by all that `PairedScore` shows."""
    recorded = float(found.get("recorded_delta_p99_fraction", -1.0))
    return max(float(found["delta_p99_ci_high"]), recorded)


def choose(rows: Sequence[Mapping[str, Any]], violation_s: float, p99_margin: float) -> int | None:
    """Pick one of what `PairedScore` found; what loses to a rule at the gate is refused.

    Returns: Index of the least mean and SLO violations, at `violation_s` seconds for a share of 1,
        of those whose tail exceeds the hand rule's by no more than `p99_margin`; if none does, of
        the best tail. None where all are refused.
    """
    passing = [index for index, row in enumerate(rows) if not row.get(RULES_LOST_TO)]

    def cost_s(index: int) -> float:
        return mean_and_violations_s(rows[index], violation_s)

    keeps_tail = [index for index in passing if worst_p99(rows[index]) <= p99_margin]
    if keeps_tail:
        return min(keeps_tail, key=cost_s)
    return min(passing, key=lambda index: worst_p99(rows[index]), default=None)


def mean_and_violations_s(found: Mapping[str, Any], violation_s: float) -> float:
    """Mean response time, and the share of SLO violations at `violation_s` seconds."""
    return float(found["mean_response_s"]) + violation_s * float(found["slo_violation_fraction"])


def _run_network(sim: Simulator, artifact: PolicyArtifact) -> None:
    equivariant = artifact.metadata.kind == "equivariant"
    preferences = equivariant_preferences if equivariant else network_preferences
    observations = sim.observe()
    while sim.undecided():
        actions = preferences(artifact, observations).argmax(axis=1)
        observations, _rewards = sim.step_and_observe(actions)
    sim.drain()


def network_preferences(artifact: PolicyArtifact, observations: Observations) -> FloatArray:
    """Preferences of an exported network for many observations at once.

    Args:
        artifact: A policy of kind `mlp`.
        observations: Shape (num, size).

    Returns:
        Shape (num, num_replicas), higher is better.
    """
    metadata = artifact.metadata
    assert metadata.num_replicas is not None
    x = (observations - artifact.arrays["mean"]) / artifact.arrays["std"]
    *hidden, (last_weight, last_bias) = artifact.layers
    for weight, bias in hidden:
        x = x @ weight.T + bias
        x = np.maximum(x, 0.0) if metadata.activation == "relu" else np.tanh(x)
    preferences: FloatArray = x @ last_weight.T + last_bias
    if metadata.residual_scale:
        finish_s = np.expm1(observations[:, finish_columns(metadata.num_replicas)])
        preferences -= metadata.residual_scale * finish_s
    return preferences
