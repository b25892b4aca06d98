"""Compare policies of any problem on equal streams: rows, intervals, printed tables.

Every policy sees the same streams (common random numbers), so the difference to the baseline is
taken unit by unit, and its interval is much narrower than that of either mean. What the units are
(streams, days, blocks of one recorded stream) is for the problem to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Generic

from rich import box
from rich.table import Table

from tokenyard.problem import A, Candidate, D, Measure, Problem, R, Row, Runner, S
from tokenyard.statistics.intervals import Interval, Samples, holm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORE = "score"
"""Key of the score in rows of a sweep and in what validation finds; higher is better."""
DIFFERENCES = "paired differences [95 % interval]"
SIGNIFICANT = 0.05
"""p-value, corrected for a whole table of differences, below which one is marked."""
MARK = "*"


Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map` itself, or one that shares the work out."""


@contextmanager
def processes(jobs: int) -> Iterator[Map]:
    """Make a `map` that works in so many processes of its own; in this one where it is one."""
    if jobs == 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield pool.map


def run_candidates(
    candidates: Sequence[Candidate[S, D, R]], scenario: S, streams: D, seed: int, mapped: Map = map
) -> dict[str, list[R]]:
    """Run candidates over equal streams; runs by name."""
    return run_all(
        {candidate.name: candidate.run for candidate in candidates}, scenario, streams, seed, mapped
    )


def run_all(
    policies: Mapping[str, Runner[S, D, R]], scenario: S, streams: D, seed: int, mapped: Map = map
) -> dict[str, list[R]]:
    """Run policies over equal streams, one after another or as `mapped` does; runs by name."""
    run = partial(_run, scenario=scenario, streams=streams, seed=seed)
    return dict(zip(policies, mapped(run, policies.values()), strict=True))


def _run(policy: Runner[S, D, R], scenario: S, streams: D, seed: int) -> list[R]:
    return list(policy(scenario, streams, seed))


def compare(
    problem: Problem[S, A, D, R],
    scenario: S,
    streams: D,
    runs: Mapping[str, Sequence[R]],
    baseline: str,
) -> list[Row]:
    """One row per policy with its difference to a baseline, in the order of `runs`.

    Raises:
        ValueError: The baseline is not among `runs`.
    """
    if baseline not in runs:
        raise ValueError(f"baseline {baseline!r} was not run; choose one of {sorted(runs)}")
    samples = problem.samples(scenario, streams, runs, baseline)
    rows = [_row(problem, scenario, name, runs[name], samples, baseline) for name in runs]
    pairs = [(samples[name], samples[baseline]) for name in runs]
    return _corrected(problem.measures(scenario), rows, pairs)


def _corrected(
    measures: Sequence[Measure], rows: list[Row], pairs: Sequence[tuple[Samples, Samples]]
) -> list[Row]:
    """Add p-values: all differences in the rows are one family (Holm)."""
    compared = [measure for measure in measures if measure.delta]
    tests, p_values = [], []
    for row, (ours, theirs) in zip(rows, pairs, strict=True):
        row |= {measure.p_key: 1.0 for measure in compared}
        if row["policy"] != row["baseline"]:
            tests += [(row, measure) for measure in compared]
            p_values += [ours.p_value(theirs, measure.key) for measure in compared]
    for (row, measure), p_value in zip(tests, holm(p_values), strict=True):
        row[measure.p_key] = p_value
    return rows


def _row(
    problem: Problem[S, A, D, R],
    scenario: S,
    name: str,
    runs: Sequence[R],
    samples: Mapping[str, Samples],
    baseline: str,
) -> Row:
    row: Row = {
        "policy": name,
        "scenario": scenario.name,
        "baseline": baseline,
        "stream_count": len(runs),
        **problem.summary(scenario, runs),
    }
    ours, theirs = samples[name], samples[baseline]
    for measure in problem.measures(scenario):
        if measure.interval and measure.key in row:
            interval = ours.interval(measure.key)
            row |= {f"{measure.key}_ci_low": interval.low, f"{measure.key}_ci_high": interval.high}
        if measure.delta:
            difference = ours.difference(theirs, measure.key, measure.relative)
            row |= dict(zip(measure.delta_keys, difference, strict=True))
    return row


def margins(
    problem: Problem[S, A, D, R], scenario: S, streams: D, runs: Mapping[str, Sequence[R]]
) -> list[Row]:
    """The learned policy beside each of its rivals that was run; none where it was not run."""
    name = problem.learned
    rivals = [rival for rival in problem.rivals if rival in runs and name in runs]
    rows, pairs = [], []
    for rival in rivals:
        both = {name: runs[name], rival: runs[rival]}
        samples = problem.samples(scenario, streams, both, rival)
        rows.append(_row(problem, scenario, name, runs[name], samples, rival))
        pairs.append((samples[name], samples[rival]))
    return _corrected(problem.measures(scenario), rows, pairs)


def best_rule(
    problem: Problem[S, A, D, R],
    scenario: S,
    candidates: Sequence[Candidate[S, D, R]],
    runs: Mapping[str, Sequence[R]],
) -> str:
    """Name the rule with the best score: a choice that no rule could make beforehand."""
    rules = [candidate.name for candidate in candidates if candidate.is_rule]
    return max(rules, key=lambda name: problem.score.value(problem.summary(scenario, runs[name])))


@dataclass(frozen=True)
class Comparison(Generic[D, R]):
    """Policies on the same streams."""

    streams: D
    runs: Mapping[str, Sequence[R]]
    rows: list[Row]
    """One per policy with its differences to the baseline and its `score`, best first."""


def rank(
    problem: Problem[S, A, D, R],
    scenario: S,
    policies: Mapping[str, Runner[S, D, R]],
    baseline: str,
    streams: D,
    seed: int,
    mapped: Map = map,
) -> Comparison[D, R]:
    """Run every policy over the streams, as `run_all`, and order them by score."""
    runs = run_all(policies, scenario, streams, seed, mapped)
    rows = compare(problem, scenario, streams, runs, baseline)
    scored: list[Row] = [{**row, SCORE: problem.score.value(row)} for row in rows]
    return Comparison(streams, runs, sorted(scored, key=lambda row: -float(row[SCORE])))


def level_tables(problem: Problem[S, A, D, R], scenario: S, rows: Sequence[Row]) -> list[Table]:
    """Lay out what was measured, best score first; a table per `Measure.table`."""
    best_first = sorted(rows, key=lambda row: -problem.score.value(row))
    tables: dict[str, list[Measure]] = {}
    for measure in problem.measures(scenario):
        if measure.heading and measure.key in rows[0]:
            tables.setdefault(measure.table, []).append(measure)
    return [_table(title, "policy", listed, best_first, level) for title, listed in tables.items()]


def difference_table(
    problem: Problem[S, A, D, R], scenario: S, rows: Sequence[Row], first: str = "policy"
) -> Table:
    """Lay out paired differences; rows are told apart by the key `first`."""
    compared = [measure for measure in problem.measures(scenario) if measure.delta]
    shown = [row for row in rows if row["policy"] != row["baseline"]]
    to = {str(row["baseline" if first == "policy" else "policy"]) for row in shown}
    title = f"{'difference to' if first == 'policy' else 'differences of'} {', '.join(sorted(to))}"
    caption = f"{title}: {DIFFERENCES}; {MARK} p < {SIGNIFICANT:g} over this table (Holm)"
    return _table(caption, first, compared, shown, difference)


def _table(
    title: str,
    first: str,
    measures: Sequence[Measure],
    rows: Sequence[Row],
    show: Callable[[Row, Measure], str],
) -> Table:
    # As wide as its title, which would be broken else.
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        min_width=len(title),
    )  # fmt: skip
    table.add_column(first, no_wrap=True)
    for measure in measures:
        table.add_column(measure.heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row[first]), *(show(row, measure) for measure in measures))
    return table


def level(row: Row, measure: Measure) -> str:
    """A measure as it is printed, with half the width of its interval where it has one."""
    value = f"{measure.factor * float(row[measure.key]):{measure.form}}"
    if not measure.interval:
        return value
    ends = (float(row[f"{measure.key}_ci_{end}"]) for end in ("low", "high"))
    half = measure.factor * Interval(0.0, *ends).half_width
    return value if math.isnan(half) else f"{value} ±{half:{measure.form}}"


def difference(row: Row, measure: Measure) -> str:
    """A paired difference as it is printed, in % where it is relative, with its interval."""
    factor = 100.0 if measure.relative else measure.factor
    estimate, low, high = (factor * float(row[key]) for key in measure.delta_keys)
    unit = "%" if measure.relative else ""
    interval = "" if math.isnan(low) else f" \\[{low:+.1f}, {high:+.1f}]"
    mark = MARK if float(row.get(measure.p_key, math.nan)) < SIGNIFICANT else ""
    return f"{estimate:+.1f}{unit}{interval}{mark}"


def figures_of(
    problem: Problem[S, A, D, R],
    scenario: S,
    streams: D,
    runs: Mapping[str, Sequence[R]],
    rows: Sequence[Row],
) -> dict[str, Figure]:
    """Draw a comparison, by names of files: the problem's figures, else what is scored."""
    drawn = problem.figures(scenario, streams, runs, rows)
    if drawn:
        return drawn
    # matplotlib takes a second to import, and most runs draw nothing.
    from tokenyard.figures import draw_differences

    measures = [measure for measure in problem.measures(scenario) if measure.delta]
    score = next((measure for measure in measures if measure.key == problem.score.key), measures[0])
    return {"differences": draw_differences(rows, score, credit=streams.described)}
