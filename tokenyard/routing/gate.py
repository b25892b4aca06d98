"""The promotion gate: no champion ships that loses to a hand rule on data it may be chosen by.

Two parts are looked at, and neither is a test part: validation streams at half of the scenario's
load, where a policy must not cost more than a rule that is there anyway, and the recorded requests
before the test part, where the scenario has some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tokenyard.evaluation import compare
from tokenyard.problem import Row
from tokenyard.routing.evaluation import mean_summary
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import (
    StreamSet,
    StreamSource,
    recorded_training_streams,
    synthetic_streams,
)
from tokenyard.routing.validation import outcome_runs

MARGIN = 0.01
"""By how much a mean response time exceeds a rule's before it counts as worse, as a fraction."""
NUM_STREAMS = 30
HALF_LOAD, RECORDED = "half_load", "recorded"

Runner = Callable[[StreamSet], list[Run]]
"""Runs one policy over streams."""


def loses(row: Row) -> bool:
    """Whether a policy loses to the rule that it was compared with, by its row of `compare`.

    It does where its mean response time is longer by more than `MARGIN`, with an interval above
    zero, and neither its 99th percentile nor its share of SLO violations is lower with an interval
    below zero: what it costs in the mean buys nothing. Where there is too little for an interval,
    the differences themselves decide, as a champion that may be worse is not to ship unseen.
    """
    worse = float(row["delta_mean_fraction"]) > MARGIN and _end(row, "mean", "low") > 0.0
    buys = _end(row, "p99", "high") < 0.0 or _end(row, "slo", "high") < 0.0
    return worse and not buys


def _end(row: Row, what: str, which: str) -> float:
    """An end of a difference's interval; the difference where there is no interval."""
    end = float(row[f"delta_{what}_ci_{which}"])
    if not math.isnan(end):
        return end
    return float(row["delta_slo_violation" if what == "slo" else f"delta_{what}_fraction"])


class Gate:
    """Compares policies with the hand rules of one scenario on both parts."""

    def __init__(
        self,
        source: StreamSource,
        rules: Sequence[str] | None = None,
        parts: Mapping[str, StreamSet] | None = None,
    ) -> None:
        """Run the rules.

        Args:
            source: Traffic of the scenario.
            rules: Names; those that the scenario has no parameters for are left out. None: those
                that are compiled for its servers.
            parts: Streams by name; None: those of `gate_streams`.
        """
        self._scenario = source.scenario
        self.parts = gate_streams(source) if parts is None else parts
        if rules is None:
            rules = server_model(source.scenario).compiled_rules
        self._runs = {
            part: {name: rule_runs(name, self._scenario, streams) for name in known(rules, source)}
            for part, streams in self.parts.items()
        }

    def __call__(self, run: Runner) -> list[Row]:
        """Compare a policy with every rule on every part.

        Returns:
            Rows of `tokenyard.evaluation.compare` with `part`, `baseline` and `loses` (0 or 1).
        """
        return [row for part in self.parts for row in self._rows(part, run(self.parts[part]))]

    def _rows(self, part: str, runs: list[Run]) -> list[Row]:
        rows = []
        for rule, theirs in self._runs[part].items():
            both = {rule: theirs, "candidate": runs}
            row = compare(PROBLEM, self._scenario, self.parts[part], both, rule)[1]
            rows.append({**row, "part": part, "baseline": rule, "loses": int(loses(row))})
        return rows


def gate_streams(
    source: StreamSource, num_streams: int = NUM_STREAMS, seed: int = 0
) -> dict[str, StreamSet]:
    """The parts by name; `RECORDED` only where the scenario has one and its file is found."""
    half = synthetic_streams(source, num_streams, seed, "validation", load_factor=0.5)
    recorded = recorded_training_streams(source)
    return {HALF_LOAD: half} if recorded is None else {HALF_LOAD: half, RECORDED: recorded}


def known(rules: Sequence[str], source: StreamSource) -> list[str]:
    """Those rules that the scenario has parameters for."""
    found = []
    for name in rules:
        try:
            PROBLEM.candidate(source.scenario, name)
        except ValueError:
            continue
        found.append(name)
    return found


def rule_runs(name: str, scenario: Scenario, streams: StreamSet) -> list[Run]:
    """Run a rule; what is compiled for the scenario's servers earns no rewards."""
    decide = server_model(scenario).compiled_rule(name)
    if decide is None:
        return list(PROBLEM.candidate(scenario, name).run(scenario, streams, 0))
    return outcome_runs(scenario, streams, decide)


def strongest(
    rules: Sequence[str], source: StreamSource, streams: StreamSet, most: int
) -> list[str]:
    """Those rules that have the lowest mean response time on streams, the best first."""
    scenario = source.scenario
    mean_s = {
        name: mean_summary(scenario, rule_runs(name, scenario, streams))["mean_response_s"]
        for name in known(rules, source)
    }
    return sorted(mean_s, key=mean_s.__getitem__)[:most]
