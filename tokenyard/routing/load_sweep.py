"""Policies on the last part of a trace over a range of loads, and how much load its SLOs allow.

All policies see the same requests, whose time is stretched or pressed. Above what the servers can
do the queue only grows, so that a number there also tells how long the part is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenyard.metrics import mean
from tokenyard.problem import Row
from tokenyard.routing.own_traffic import Choice, OwnTraffic, measured
from tokenyard.routing.simulator.run import Run
from tokenyard.statistics.intervals import Interval
from tokenyard.statistics.jackknife import forgets, jackknife_interval, left_out
from tokenyard.types import FloatArray

_STEP = 1.15
_LEAST_LOAD, _MOST_LOAD = 0.05, 2.0
_REFINEMENTS = 4
"""How often the distance between the loads beside the goal is halved."""


@dataclass(frozen=True)
class Played:
    """A policy, and as what it is played."""

    role: str
    """`now`, `default`, `best_rule` or `searched`."""
    choice: Choice


class LoadSweep:
    """Plays policies at half of the load, at the load, and on until none holds the SLOs."""

    def __init__(self, own: OwnTraffic, played: Sequence[Played], goal: float) -> None:
        """Play them.

        Args:
            own: What is asked, of which servers.
            played: Differences are to the first.
            goal: Share of requests that are to attain their SLOs.
        """
        self._own, self._goal = own, goal
        self._choices = {candidate.choice.name: candidate.choice for candidate in played}
        self._roles = {candidate.choice.name: candidate.role for candidate in reversed(played)}
        self._baseline = played[0].choice.name
        self._violations: dict[str, dict[float, FloatArray]] = {name: {} for name in self._choices}
        self._rows: dict[float, list[Row]] = {}
        for load in (own.load * np.geomspace(1.0, 0.5, 6)).tolist():
            self._play(load)
        while self._attained(load := max(self._rows)).max() >= goal and load < _MOST_LOAD:
            self._play(_STEP * load)
        while self._attained(load := min(self._rows)).min() < goal and load > _LEAST_LOAD:
            self._play(load / _STEP**2)
        for name in self._choices:
            self._refine(name)

    def rows(self) -> list[Row]:
        """One row per policy and load, with the load that its SLOs allow, by rising loads."""
        curves = {name: self._crossings(name) for name in self._choices}
        allowed = {name: self._allowed(name, curves) for name in self._choices}
        return [
            row | allowed[str(row["policy"])]
            for load in sorted(self._rows)
            for row in self._rows[load]
        ]

    def _play(self, load: float) -> None:
        streams, scenario = self._own.judging(load), self._own.scenario
        runs = {name: choice.runs(scenario, streams) for name, choice in self._choices.items()}
        for name, (run,) in runs.items():
            self._violations[name][load] = self._violated(run)
        self._rows[load] = [
            {
                **row,
                "role": self._roles[str(row["policy"])],
                "offered_load": load,
                "rate_per_s": load / self._own.load_of_one_per_s,
                "requests": len(self._violations[self._baseline][load]),
                "mean_ttft_s": row.get("mean_ttft_s", math.nan),
                "slo_attainment_fraction": 1.0 - float(row["slo_violation_fraction"]),
            }
            for row in measured(scenario, streams, runs, self._baseline)
        ]

    def _violated(self, run: Run) -> FloatArray:
        return run.outcomes.violations(self._own.scenario.slo_response_s).astype(np.float64)

    def _attained(self, load: float) -> FloatArray:
        return np.array([float(row["slo_attainment_fraction"]) for row in self._rows[load]])

    def _refine(self, name: str) -> None:
        """Play one policy between the loads where it falls below the goal."""
        violations = self._violations[name]
        for _ in range(_REFINEMENTS):
            loads = sorted(violations)
            below = [1.0 - violations[load].mean() < self._goal for load in loads]
            if not any(below) or below[0]:
                return
            at = below.index(True)
            load = math.sqrt(loads[at - 1] * loads[at])
            (run,) = self._choices[name].runs(self._own.scenario, self._own.judging(load))
            violations[load] = self._violated(run)

    def _crossings(self, name: str) -> FloatArray:
        """Load at which a policy falls below the goal: on all requests, then without each block."""
        by_load = self._violations[name]
        loads = sorted(by_load)
        violated = [[by_load[at].mean(), *left_out(by_load[at], mean)] for at in loads]
        attained = 1.0 - np.transpose(violated)
        return np.array([crossing(loads, curve, self._goal) for curve in attained])

    def _allowed(self, name: str, curves: dict[str, FloatArray]) -> Row:
        """The load per second that SLOs allow, and how much more that is than of the first."""
        ours, theirs = curves[name], curves[self._baseline]
        with np.errstate(divide="ignore", invalid="ignore"):
            change, *without = (ours / theirs - 1.0).tolist()
        more = Interval(change if math.isfinite(change) else math.nan, math.nan, math.nan)
        if forgets(self._beside_goal(name) - self._beside_goal(self._baseline)):
            more = jackknife_interval(more.estimate, np.array(without))
        keys = (f"delta_sustainable_{of}" for of in ("fraction", "ci_low", "ci_high"))
        gain: Row = dict(zip(keys, more, strict=True))
        return {"sustainable_load_per_s": ours[0] / self._own.load_of_one_per_s, **gain}

    def _beside_goal(self, name: str) -> FloatArray:
        """Which requests violated their SLO at the load nearest to the goal, 0 or 1."""
        violations = self._violations[name]
        return min(violations.values(), key=lambda late: abs(1.0 - late.mean() - self._goal))


def crossing(loads: Sequence[float], attained: Iterable[float], goal: float) -> float:
    """Load at which what is attained falls below the goal for the first time.

    0 where it is below from the start on, NaN where it never is.
    """
    last_load, last = 0.0, math.nan
    for load, share in zip(loads, attained, strict=True):
        if share < goal:
            if math.isnan(last):
                return 0.0
            return last_load + (last - goal) / (last - share) * (load - last_load)
        last_load, last = load, share
    return math.nan
