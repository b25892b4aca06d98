"""Time lanes: what ran when at each replica, under two entries that decide the same stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tokenyard.problem import Row
from tokenyard.routing.arena import Match, streams_of
from tokenyard.routing.artifact import DEFAULT_RULE
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.simulator.batching import BatchingOutcomes
from tokenyard.routing.simulator.constant_rate import Outcomes
from tokenyard.types import FloatArray

MOST_SHOWN = 160
"""Requests that are drawn, from the middle of the first stream on."""
MOST_ROWS = 40
"""Requests that a replica's lane shows at one time; more are counted."""


@dataclass(frozen=True)
class Bar:
    """One request in a lane; places and lengths are shares of the time that is shown."""

    row: int
    start: float
    wait: float
    """Until its first token; servers without tokens: 0."""
    run: float
    """From then to its end, or to the end of what is shown."""
    told: str


@dataclass(frozen=True)
class Lane:
    """One replica."""

    name: str
    bars: tuple[Bar, ...]
    num_rows: int
    num_hidden: int
    """Requests for which there was no row."""


@dataclass(frozen=True)
class Lanes:
    """All replicas under one entry."""

    entry: str
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class Figure:
    """Entries side by side, over the same time."""

    cell: str
    start_s: float
    end_s: float
    sides: tuple[Lanes, ...]


def draw_lanes(matches: Sequence[Match]) -> Figure:
    """Play the first stream of a cell under each entry, and lay out its middle.

    Args:
        matches: Entries in the same cell.

    Raises:
        ValueError: An entry cannot play.
    """
    outcomes = [_first_stream(match) for match in matches]
    # Closed clients ask at other times under each entry, and are done sooner under the better.
    soonest = min(outcomes, key=lambda one: float(one.arrival_s[-1]))
    shown = _shown(soonest)
    start_s = float(soonest.arrival_s[shown.start])
    end_s = float(soonest.arrival_s[shown.stop - 1])
    names = matches[0].cell.scenario.server_names
    sides = [
        Lanes(match.entry.name, _lay_out(one, names, start_s, end_s))
        for match, one in zip(matches, outcomes, strict=True)
    ]
    return Figure(matches[0].cell.name, start_s, end_s, tuple(sides))


def _first_stream(match: Match) -> Outcomes:
    scenario, streams = streams_of(match)
    one = replace(streams, requests=streams.requests[:1])
    return (
        PROBLEM.candidate(scenario, match.entry.policy).run(scenario, one, match.seed)[0].outcomes
    )


def _shown(outcomes: Outcomes) -> slice:
    num = len(outcomes.arrival_s)
    start = max(0, min(num // 2, num - MOST_SHOWN))
    return slice(start, min(start + MOST_SHOWN, num))


def _lay_out(
    outcomes: Outcomes, names: Sequence[str], start_s: float, end_s: float
) -> tuple[Lane, ...]:
    done_s = outcomes.arrival_s + outcomes.response_s
    in_sight = (outcomes.arrival_s < end_s) & (done_s > start_s)
    first_s = outcomes.arrival_s
    if isinstance(outcomes, BatchingOutcomes):
        first_s = outcomes.arrival_s + outcomes.first_token_s
    times_s = np.stack([outcomes.arrival_s, first_s, done_s], axis=1)
    return tuple(
        _lane(name, times_s[in_sight & (outcomes.server == which)], start_s, end_s)
        for which, name in enumerate(names)
    )


def _lane(name: str, times_s: FloatArray, start_s: float, end_s: float) -> Lane:
    """Give each request the first row that is free when it arrives.

    Args:
        name: Of the replica.
        times_s: Arrival, first token and end of its requests, shape (num, 3).
        start_s: Begin of what is shown, seconds.
        end_s: End of it.
    """
    free_s: list[float] = []
    bars: list[Bar] = []
    hidden = 0
    for arrival, first, done in times_s.tolist():
        row = next((i for i, one in enumerate(free_s) if one <= arrival), len(free_s))
        if row == MOST_ROWS:
            hidden += 1
            continue
        free_s[row : row + 1] = [done]
        at, token, end = np.clip([arrival, first, done], start_s, end_s) - start_s
        told = f"{done - arrival:.2f} s, first token after {first - arrival:.2f} s"
        shares = np.array([at, token - at, end - token]) / (end_s - start_s)
        bars.append(Bar(row, float(shares[0]), float(shares[1]), float(shares[2]), told))
    return Lane(name, tuple(bars), len(free_s), hidden)


def entries_to_draw(rows: Sequence[Row]) -> tuple[str, str, str] | None:
    """The cell in which the default rule is furthest from the best, and both; None: nowhere."""
    theirs = [row for row in rows if row["entry"] == DEFAULT_RULE]
    if not theirs:
        return None
    row = max(theirs, key=lambda one: abs(float(one["regret_mean_fraction"])))
    best = str(row["best_rule"]).partition(" or ")[0]
    return str(row["cell"]), DEFAULT_RULE, best


def find_matches(matches: Sequence[Match], wanted: tuple[str, str, str]) -> list[Match]:
    """Return the two matches of a cell and two entries; a cell is named by how it begins.

    Raises:
        ValueError: There is no such match.
    """
    cell, *entries = wanted
    found: list[Match] = []
    for entry in entries:
        fitting = [
            one for one in matches if one.entry.name == entry and one.cell.name.startswith(cell)
        ]
        if not fitting:
            raise ValueError(f"no entry {entry!r} in a cell {cell!r}")
        found.append(fitting[0])
    return found
