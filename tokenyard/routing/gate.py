"""The promotion gate: no champion ships that loses to a rule on data it may be chosen by.

Rules with an order are among them, tuned and untuned. A champion is looked at below, at and above
the load it is for, and on the recorded requests before the test part, where the scenario has some.
No test part is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tokenyard.evaluation import compare
from tokenyard.problem import Problem, Row
from tokenyard.routing.artifact import PolicyArtifact, default_rule, rule_for
from tokenyard.routing.policies.order import IN_ORDER
from tokenyard.routing.policies.rule_name import RuleName
from tokenyard.routing.policies.tuned import find_tuned
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import (
    StreamSet,
    StreamSource,
    recorded_training_streams,
    synthetic_streams,
)

MARGIN = 0.01
"""By how much a mean response time exceeds a rule's before it counts as worse, as a fraction."""
TOLERANCE = 0.02
"""By how much the 99th percentile may exceed a rule's, as a fraction, and the share of SLO
violations."""
NUM_STREAMS = 30
HALF_LOAD, FULL_LOAD, ABOVE_LOAD, RECORDED = "half_load", "full_load", "above_load", "recorded"
LOAD_FACTORS = {HALF_LOAD: 0.5, FULL_LOAD: 1.0, ABOVE_LOAD: 1.15}
"""Factors on the scenario's load."""
MOST_LOAD = 1.1
"""Offered load above which nobody trains or compares: the queue only grows."""

RoutingProblem = Problem[Scenario, PolicyArtifact, StreamSet, Run]
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


def wins(row: Row) -> bool:
    """Whether the mean is lower for certain, and nothing is paid for it in the tail or in SLOs.

    Neither interval of the 99th percentile and of SLO violations lies above zero, and that of the
    99th percentile ends at `TOLERANCE` or below.
    """
    tail = _end(row, "p99", "low") <= 0.0 and _end(row, "p99", "high") <= TOLERANCE
    return _end(row, "mean", "high") < 0.0 and tail and _end(row, "slo", "low") <= 0.0


def tail_is_longer(row: Row) -> bool:
    """Whether p99 or SLO violations exceed the rule's by more than `TOLERANCE`, for certain."""
    return any(float(row[key]) > TOLERANCE for key in ("delta_p99_ci_low", "delta_slo_ci_low"))


def _end(row: Row, what: str, which: str) -> float:
    """An end of a difference's interval; the difference where there is no interval."""
    end = float(row[f"delta_{what}_ci_{which}"])
    if not math.isnan(end):
        return end
    return float(row["delta_slo_violation" if what == "slo" else f"delta_{what}_fraction"])


class Gate:
    """Compares policies with the rules of one scenario on all parts."""

    def __init__(
        self,
        problem: RoutingProblem,
        source: StreamSource,
        rules: Sequence[str] | None = None,
        parts: Mapping[str, StreamSet] | None = None,
    ) -> None:
        """Run the rules.

        Args:
            problem: Finds rules by name and compares.
            source: Traffic of the scenario.
            rules: Names; those that the scenario has no parameters for are left out. None: those
                of `rivals`.
            parts: Streams by name; None: those of `gate_streams`.
        """
        self._problem, self._scenario = problem, source.scenario
        self.parts = gate_streams(source) if parts is None else parts
        names = known(problem, rivals(source.scenario) if rules is None else rules, source)
        self.runs = {
            part: {name: rule_runs(problem, name, self._scenario, streams) for name in names}
            for part, streams in self.parts.items()
        }
        """Of every rule on every part."""

    def __call__(self, run: Runner) -> list[Row]:
        """Compare a policy with every rule on every part.

        Returns:
            Rows of `tokenyard.evaluation.compare` with `part`, `baseline` and `loses` (0 or 1).
        """
        return [row for part in self.parts for row in self._rows(part, run(self.parts[part]))]

    def _rows(self, part: str, runs: list[Run]) -> list[Row]:
        rows = []
        for rule, theirs in self.runs[part].items():
            both = {rule: theirs, "candidate": runs}
            row = compare(self._problem, self._scenario, self.parts[part], both, rule)[1]
            rows.append({**row, "part": part, "baseline": rule, "loses": int(loses(row))})
        return rows


def rivals(scenario: Scenario) -> list[str]:
    """Rules that no champion may lose to, without repeats.

    The first is what decides without a champion. Then come the tuned ones that know the order, the
    default rule, and all that is compiled first come, first served.
    """
    tuned = find_tuned(scenario.name)
    orders = () if tuned is None else tuned.order_scores
    in_order = [name for name in orders if RuleName.parse(name).base == IN_ORDER]
    compiled = server_model(scenario).compiled_rules
    return list(dict.fromkeys((rule_for(scenario), *in_order, default_rule(scenario), *compiled)))


def load_factors(source: StreamSource) -> dict[str, float]:
    """Those of `LOAD_FACTORS` at which nothing is overloaded that is not at the scenario's load."""
    load = source.offered_load
    return {
        part: factor for part, factor in LOAD_FACTORS.items()
        if factor <= 1.0 or factor * load <= MOST_LOAD
    }  # fmt: skip


def gate_streams(
    source: StreamSource, num_streams: int = NUM_STREAMS, recorded: StreamSet | None = None
) -> dict[str, StreamSet]:
    """The parts by name, with so many validation streams at every load.

    `RECORDED` is `recorded`, or the scenario's recorded training part, where there is one.
    """
    parts = {
        part: synthetic_streams(source, num_streams, 0, "validation", load_factor=factor)
        for part, factor in load_factors(source).items()
    }
    recorded = recorded or recorded_training_streams(source)
    return parts if recorded is None else {**parts, RECORDED: recorded}


def known(problem: RoutingProblem, rules: Sequence[str], source: StreamSource) -> list[str]:
    """Return those rules that the scenario has parameters for."""
    names = []
    for name in rules:
        try:
            problem.candidate(source.scenario, name)
        except ValueError:
            continue
        names.append(name)
    return names


def rule_runs(
    problem: RoutingProblem, name: str, scenario: Scenario, streams: StreamSet
) -> list[Run]:
    """Run a rule, compiled where it can be; rewards are not computed."""
    return list(problem.candidate(scenario, name).run(scenario.without_reward(), streams, 0))
