"""Which of several searched policies is kept: beside the best rule, and past the promotion gate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenyard.problem import Row
from tokenyard.routing import gate
from tokenyard.routing.artifact import PolicyArtifact, rule_for
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator.run import run_compiled
from tokenyard.routing.simulator.server_models import COMPARED
from tokenyard.routing.simulator.streams import StreamSet, StreamSource

LOSSES, WINS, CHANGE = "losses", "wins", "delta_mean_over_parts"
"""Keys of how often a policy loses at the gate, whether it beats the best rule at the scenario's
load (0 or 1), and the mean over parts of the difference to that rule's mean response time."""
_KEPT = (
    "mean_response_s", "p99_response_s", "slo_violation_fraction",
    *(key for measure in COMPARED for key in measure.delta_keys), LOSSES, WINS, CHANGE,
)  # fmt: skip
"""What of it goes into a policy's metadata."""


class Judge:
    """Compares policies with the rules of one scenario on what no search was trained on.

    The recorded test part is not touched.
    """

    def __init__(
        self,
        source: StreamSource,
        num_streams: int = gate.NUM_STREAMS,
        rules: Sequence[str] = (),
        recorded: StreamSet | None = None,
    ) -> None:
        """Draw the streams and run the rules on them.

        Args:
            source: Traffic of the scenario.
            num_streams: At every load.
            rules: The first is to be beaten; none: `rivals`, whose first is what decides without a
                champion.
            recorded: Streams in place of the scenario's recorded training part.
        """
        self._source = source
        names = rules or gate.rivals(source.scenario)
        self.bar = names[0]
        """The rule to be beaten."""
        parts = gate.gate_streams(source, num_streams, recorded=recorded)
        self._gate = gate.Gate(PROBLEM, source, names, parts)

    def __call__(self, policy: PolicyArtifact) -> Row:
        """A policy's row at the scenario's load, and how it stands beside the rules."""
        scenario = self._source.scenario
        rows = self._gate(lambda streams: run_compiled(scenario, streams, policy.decide))
        beside = [row for row in rows if row["baseline"] == self.bar]
        at_load = next(row for row in beside if row["part"] == gate.FULL_LOAD)
        losses = sum(int(row["loses"]) for row in rows) + sum(map(gate.tail_is_longer, beside))
        return {
            **at_load,
            LOSSES: float(losses),
            WINS: float(gate.wins(at_load)),
            CHANGE: float(np.mean([float(row["delta_mean_fraction"]) for row in beside])),
        }


def choose(rows: Sequence[Mapping[str, Any]], must_win: bool = True) -> int | None:
    """Pick one of what `Judge` found; what loses to a rule at the gate is refused.

    Args:
        rows: Of every candidate.
        must_win: Refuse, too, what does not beat the best rule at the scenario's load.

    Returns:
        Index of the one whose mean is furthest below that rule's over all parts; None where all
        are refused.
    """
    passing = [
        index for index, row in enumerate(rows)
        if not row[LOSSES] and (row[WINS] or not must_win)
    ]  # fmt: skip
    return min(passing, key=lambda index: float(rows[index][CHANGE]), default=None)


def recorded(row: Row) -> dict[str, float]:
    """What of it goes into a policy's metadata: of few streams some intervals are not known."""
    kept = {key: float(row[key]) for key in _KEPT}
    return {key: value for key, value in kept.items() if math.isfinite(value)}


def refused(scenario: Scenario) -> str:
    """What is said where no candidate is kept."""
    return (
        f"nothing is written: no candidate beats the rule {rule_for(scenario)} and loses to none "
        "(tokenyard/routing/gate.py)"
    )
