"""Draws the figures from the rows in docs/results, and writes README's gains from the board.

    python docs/figures/draw.py                        # what `make figures` does
    python docs/figures/draw.py load runs/load/*.json  # from the rows of a command, which it keeps

`load` takes rows of `evaluate`, and `learning` the MLflow store of a sweep.
"""

import csv
import json
import re
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from mlflow.tracking import MlflowClient

from tokenyard.figures import (
    colours,
    draw_learning_curves,
    new_axes,
    new_figure,
    save_figures,
    words,
)
from tokenyard.problem import Row
from tune_configs.experiment import SCORE
from tune_configs.mlflow_log import learning_curve

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/results"
MEAN, VIOLATED = "mean_response_s", "slo_violation_fraction"
COLUMNS = {
    "load": ["scenario", "policy", "offered_load"]
    + [key + end for key in (MEAN, VIOLATED) for end in ("", "_ci_low", "_ci_high")],
    "learning": ["algorithm", "seed", "share_of_steps", "score"],
}
RULE = "sed"
GAINS = (
    "round_robin",
    "ray_p2c",
    "least_connections",
    "llmd_blend",
    "default",
    "marginal_in_order+boost",
)
"""Entries of the arena in README's table, in its order."""


def read(name: str) -> list[Row]:
    """The rows of docs/results/NAME.csv."""
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def keep(name: str, paths: list[str]) -> None:
    """Write docs/results/NAME.csv from results."""
    rows: list[Row] = []
    for path in paths:
        if name == "learning":
            rows += curves(path)
            continue
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        rows += result["rows"]
    with (RESULTS / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS[name])
        for row in rows:
            cells = (row[key] for key in COLUMNS[name])
            table.writerow(f"{one:.5g}" if isinstance(one, float) else one for one in cells)


def curves(store: str) -> list[Row]:
    """The points of all learning curves in the MLflow store of a sweep; last the rule."""
    client, rows = MlflowClient(f"sqlite:///{store}"), []
    experiments = [one.experiment_id for one in client.search_experiments()]
    runs = client.search_runs(experiments)
    (rule,) = (one for run in runs if (one := run.data.metrics.get("eval/rule_score")))
    for run in runs:
        facts = run.data.params
        rows += [
            {**facts, "share_of_steps": 100 * steps / int(facts["env_steps"]), "score": score}
            for steps, score in learning_curve(client, run.info.run_id, SCORE)
        ]
    return [*rows, {"algorithm": RULE, "seed": "", "share_of_steps": "", "score": rule}]


def draw_load(rows: list[Row]) -> Figure:
    """Two panels per scenario: mean response and attained SLOs against load, 95 % bands."""
    names = list(dict.fromkeys(row["scenario"] for row in rows))
    figure = new_figure(2.9 * len(names), "")
    panels = figure.subplots(len(names), 2, sharex=True, squeeze=False)
    for (mean, attained), name in zip(panels, names, strict=True):
        new_axes(mean, "", "mean response, s (log scale)").set_title(name, fontsize=9, loc="left")
        new_axes(attained, "", "requests that attained their SLO, %")
        here = [row for row in rows if row["scenario"] == name]
        draw_lines(mean, here, MEAN, lambda value: value)
        mean.set_yscale("log")
        mean.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        mean.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        mean.yaxis.set_minor_formatter(NullFormatter())
        draw_lines(attained, here, VIOLATED, lambda value: 100.0 * (1.0 - value))
        attained.legend(frameon=False, fontsize=6.5, loc="lower left")
    for axes in panels[-1]:
        axes.set_xlabel("offered load", fontsize=9)
    return figure


def draw_lines(axes: Axes, rows: list[Row], key: str, shown) -> None:
    """A line and a band per policy; the first one is what ships, and black."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for policy, colour in zip(policies, ("black", *colours()), strict=False):
        mine = sorted(
            (row for row in rows if row["policy"] == policy),
            key=lambda row: float(row["offered_load"]),
        )
        loads = [float(row["offered_load"]) for row in mine]
        value, low, high = (
            [shown(float(row[key + end])) for row in mine] for end in ("", "_ci_low", "_ci_high")
        )
        label = "what ships" if policy == "champion" else words(policy)
        width = 2.0 if policy == "champion" else 1.0
        axes.plot(loads, value, color=colour, linewidth=width, label=label, zorder=3)
        axes.fill_between(loads, low, high, color=colour, alpha=0.15, linewidth=0)


def table(page: str, heading: str) -> tuple[int, list[list[str]]]:
    """The number of a table's first row on a page, and the cells of all rows."""
    lines = (ROOT / page).read_text(encoding="utf-8").split("\n")
    begin = next(i for i, line in enumerate(lines) if line.startswith(heading)) + 2
    end = next(i for i in range(begin, len(lines)) if not lines[i].startswith("|"))
    return begin, [line.strip("| ").split(" | ") for line in lines[begin:end]]


def readme() -> str:
    """README, its table of gains with the numbers of the board in docs/arena.md."""
    _, board = table("docs/arena.md", "| rank | entry")
    of_entry = {re.search("`([^`]+)`", row[1])[1]: row for row in board}
    lines = (ROOT / "README.md").read_text(encoding="utf-8").split("\n")
    begin, rows = table("README.md", "| you route by")
    for number, (label, entry) in enumerate(zip((row[0] for row in rows), GAINS, strict=True)):
        bold = "**" if label.startswith("**") else ""
        _, _, cells, _, *regrets = of_entry[entry][:6]
        shown = [f"{bold}{percent(one)}{bold}" for one in regrets]
        lines[begin + number] = f"| {' | '.join([label, cells, *shown])} |"
    return "\n".join(lines)


def percent(text: str) -> str:
    """A number of the board as README has it: without decimals from 50 on."""
    value = float(text.strip("*").removesuffix(" %"))
    return f"{value:+,.0f} %" if value >= 50 else f"{value:+.1f} %"


def figures() -> dict[str, Figure]:
    """The figures, by their names in docs/results."""
    *points, rule = read("learning")
    of_trial: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in points:
        curve = of_trial.setdefault(row["algorithm"], {}).setdefault(row["seed"], [])
        curve.append((float(row["share_of_steps"]), float(row["score"])))
    panel = {algorithm: list(curves.values()) for algorithm, curves in of_trial.items()}
    learning = draw_learning_curves(
        {"from random weights": panel},
        "score, s (higher is better)",
        (RULE, float(rule["score"])),
        "",
    )
    return {"load": draw_load(read("load")), "learning": learning}


def main(arguments: list[str]) -> None:
    """Keep rows where a name and results are given, then draw and write everything."""
    if arguments:
        keep(arguments[0], arguments[1:])
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")
    save_figures(figures(), RESULTS)


if __name__ == "__main__":
    main(sys.argv[1:])
