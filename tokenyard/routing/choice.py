"""Which of several searched policies is kept: beside a hand rule, and past the promotion gate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.gate import NUM_STREAMS
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.simulator.streams import StreamSource, recorded_training_streams
from tokenyard.routing.validation import NAMES, Validation
from tokenyard.statistics.intervals import t_interval

_SCORE, _MEAN, _P99, _VIOLATIONS = range(len(NAMES))
REFUSED = "nothing is written: every candidate loses to a rule (tokenyard/routing/gate.py)"
RULES_LOST_TO = "rules_lost_to"
"""Key of how often a policy loses to a rule at the promotion gate; more than 0 is refused."""


class PairedScore:
    """Compares policies with a hand rule on what no search was trained on.

    That is fresh synthetic streams and, where the file is found, the recorded requests that the
    traffic model was fitted to; and what the promotion gate looks at, with the compiled rules.
    The recorded test part is not touched.
    """

    def __init__(self, source: StreamSource, rule: PolicyArtifact, num_streams: int) -> None:
        """Draw the streams and run the rule on them."""
        self._drawn = Validation(source, num_streams)
        self._rule_rows = self._drawn.rows(rule)
        streams = recorded_training_streams(source)
        self._recorded = None if streams is None else Validation(source, 1, streams=streams)
        self._rule_recorded = None if self._recorded is None else self._recorded.rows(rule)[0]
        self._gate = PROBLEM.gate(source.scenario, min(num_streams, NUM_STREAMS))

    @property
    def rule_p99_s(self) -> float:
        """The rule's 99th percentile of response times, mean over streams, seconds."""
        return float(self._rule_rows[:, _P99].mean())

    def __call__(self, artifact: PolicyArtifact) -> dict[str, float]:
        """What the policy does, and by how much it differs from the rule."""
        ours, theirs = self._drawn.rows(artifact), self._rule_rows
        mean, rule = ours.mean(axis=0), theirs.mean(axis=0)
        longer = t_interval(ours[:, _P99] - theirs[:, _P99])
        # Of a few streams nothing is known but what they show.
        p99_beyond = (longer.estimate if math.isnan(longer.high) else longer.high) / rule[_P99]
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
        lost = sum(int(row["loses"]) for row in self._gate(artifact))
        return found | {RULES_LOST_TO: float(lost)}


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
