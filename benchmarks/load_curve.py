"""What ships and the six best rules over the load range: mean response and SLOs attained, drawn.

    python benchmarks/load_curve.py --figure docs/results/load.png

Rules are those with the best training score at the scenario's own load, one per placement, each
with its best order. Streams are synthetic ones of a fresh seed, the same for all at a load. Bands
are 95 % intervals over streams.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro
from fresh_seeds import ours_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich import box
from rich.table import Table

from tokenyard.evaluation import compare
from tokenyard.figures import colours, new_axes, new_figure, save_figures, words
from tokenyard.problem import Row
from tokenyard.provenance import ResultFile, report
from tokenyard.routing.gate import rule_runs
from tokenyard.routing.policies.rule_name import RuleName
from tokenyard.routing.policies.tuned import find_tuned
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.streams import StreamSource, synthetic_streams

OURS = "what ships"
MEAN, VIOLATED = "mean_response_s", "slo_violation_fraction"


@dataclass(frozen=True)
class Args:
    """Draw mean response and SLO attainment against load."""

    scenario: tuple[str, ...] = ("azure_code_slo", "conversation_mixed_gpus")
    loads: tuple[float, ...] = (0.3, 0.5, 0.7, 0.85, 0.95, 1.0, 1.05)
    rules: int = 6
    seed: int = 94811
    streams: int = 12
    figure: Path | None = None
    """Where to write the picture."""
    json: ResultFile | None = None
    """Where to write the rows."""


def best_placements(scenario: str, count: int) -> list[str]:
    """The rules with the best training scores, at most one per placement."""
    tuned = find_tuned(scenario)
    if tuned is None:
        raise ValueError(f"no rule was tuned for {scenario!r}")
    scores = tuned.scores | tuned.order_scores
    best: dict[str, str] = {}
    for name in sorted(scores, key=scores.__getitem__, reverse=True):
        best.setdefault(RuleName.parse(name).base.removeprefix("tuned_"), name)
    return list(best.values())[:count]


def rows_of(args: Args, name: str) -> list[Row]:
    """One row per load and policy."""
    source = StreamSource(load_scenario(name))
    scenario, rules, rows = source.scenario, best_placements(name, args.rules), []
    _, run = ours_of(source, None)
    for load in args.loads:
        factor = load / source.offered_load
        streams = synthetic_streams(source, args.streams, args.seed, load_factor=factor)
        runs = {OURS: run(streams)} | {
            one: rule_runs(PROBLEM, one, scenario, streams) for one in rules
        }
        found = compare(PROBLEM, scenario, streams, runs, OURS)
        rows += [{**row, "offered_load": load} for row in found]
        print(f"{name} at {load:g}", file=sys.stderr, flush=True)
    return rows


def draw(rows: list[Row]) -> Figure:
    """Two panels per scenario, one above the other, with a line and a band per policy."""
    names = list(dict.fromkeys(str(row["scenario"]) for row in rows))
    figure = new_figure(2.9 * len(names), "")
    panels = figure.subplots(len(names), 2, sharex=True, squeeze=False)
    for (mean, attained), name in zip(panels, names, strict=True):
        new_axes(mean, "", "mean response, s (log scale)")
        new_axes(attained, "", "requests that attained their SLO, %")
        here = [row for row in rows if row["scenario"] == name]
        mean.set_title(name, fontsize=9, loc="left")
        _lines(mean, here, MEAN, lambda value: value)
        mean.set_yscale("log")
        mean.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        mean.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        mean.yaxis.set_minor_formatter(NullFormatter())
        _lines(attained, here, VIOLATED, lambda value: 100.0 * (1.0 - value))
        attained.legend(frameon=False, fontsize=6.5, loc="lower left")
    for axes in panels[-1]:
        axes.set_xlabel("offered load", fontsize=9)
    return figure


def _lines(axes: Axes, rows: list[Row], key: str, shown: Callable[[float], float]) -> None:
    policies = list(dict.fromkeys(str(row["policy"]) for row in rows))
    for policy, colour in zip(policies, ("black", *colours()), strict=False):
        mine = [row for row in rows if row["policy"] == policy]
        loads = [float(row["offered_load"]) for row in mine]
        keys = (f"{key}_ci_low", key, f"{key}_ci_high")
        low, value, high = ([shown(float(row[one])) for row in mine] for one in keys)
        width = 2.0 if policy == OURS else 1.0
        axes.plot(loads, value, color=colour, linewidth=width, label=words(policy), zorder=3)
        axes.fill_between(loads, low, high, color=colour, alpha=0.15, linewidth=0)


def table(rows: list[Row]) -> Table:
    """Lay out means and shares of attained SLOs, a line per scenario and policy."""
    loads = list(dict.fromkeys(f"{row['offered_load']:g}" for row in rows))
    found = Table("scenario", "policy", *loads, box=box.SIMPLE_HEAD)
    for key in dict.fromkeys((str(row["scenario"]), str(row["policy"])) for row in rows):
        mine = [row for row in rows if (row["scenario"], row["policy"]) == key]
        cells = [f"{float(r[MEAN]):.3g} s, {100 * (1 - float(r[VIOLATED])):.1f} %" for r in mine]
        found.add_row(*key, *cells)
    return found


def main(args: Args) -> None:
    rows = [row for name in args.scenario for row in rows_of(args, name)]
    if args.figure is not None:
        save_figures({args.figure.stem: draw(rows)}, args.figure.parent)
    report(table(rows), rows, args.json, args.seed, width=200)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
