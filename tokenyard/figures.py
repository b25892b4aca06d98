"""The frame of every figure: canvas, axes, bars with intervals, learning curves, files.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tokenyard.problem import Measure, Row
from tokenyard.statistics.pareto import front
from tokenyard.types import BoolArray, FloatArray

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
VIOLATION, ON_TIME, BASELINE = "#D55E00", "#0072B2", "#7F7F7F"

Curves = Mapping[str, Sequence[Sequence[tuple[float, float]]]]
"""Label to the curves of its repetitions; a curve is (share of its budget, value) in order."""

_WIDTH_INCHES = 7.0
_DPI = 160


def draw_learning_curves(
    panels: Mapping[str, Curves], value: str, rule: tuple[str, float], title: str, credit: str = ""
) -> Figure:
    """Draw a value over training: a thin line per repetition, a thick one for their median.

    `panels` have titles and curves, and share an axis labelled `value`; `rule` is the name and the
    value of what does not learn, a level line.
    """
    num_columns = 2 if len(panels) in (2, 4) else min(len(panels), 3)
    num_rows = -(-len(panels) // num_columns)
    figure = new_figure(1.2 + 2.3 * num_rows, f"The rule: {rule[0]}\n{credit}", title)
    drawn = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).ravel()
    labels = sorted({label for curves in panels.values() for label in curves})
    palette = dict(zip(labels, colours(), strict=False))
    every = [curve for curves in panels.values() for runs in curves.values() for curve in runs]
    levels = np.array([rule[1], *(level for curve in every for _, level in curve)])
    near = levels[_near(levels[:, None])]
    margin = 0.08 * float(np.ptp(near) or abs(rule[1]) or 1.0)
    bottom, top = near.min() - margin, near.max() + margin
    for place, (axes, (name, curves)) in enumerate(zip(drawn, panels.items(), strict=False)):
        is_lowest = place + num_columns >= len(panels)
        new_axes(axes, "steps, % of budget" if is_lowest else "", "")
        axes.tick_params(labelbottom=is_lowest)
        axes.set_title(name, fontsize=8.5, loc="left")
        below = []
        for label, repetitions in curves.items():
            for curve in repetitions:
                axes.plot(*np.array(curve).T, color=palette[label], linewidth=0.6, alpha=0.5)
                if curve[-1][1] < bottom:
                    below.append(f"{words(label)} ends at {curve[-1][1]:.3g}")
            median = _median_curve(repetitions)
            style = {"linewidth": 1.6, "marker": "o", "markersize": 2.5}
            axes.plot(*median, color=palette[label], label=words(label), **style)
        axes.axhline(rule[1], color="black", linestyle="--", linewidth=1.2, label="the rule")
        axes.annotate("\n".join(below), (0.03, 0.03), xycoords="axes fraction", fontsize=7)
    drawn[0].set_ylim(bottom, top)
    drawn[0].set_xlim(left=0)
    for axes in drawn[len(panels) :]:
        axes.set_visible(False)
    figure.supylabel(value, fontsize=9)
    named = [pair for axes in drawn for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in sorted(named, key=lambda pair: pair[1])}
    figure.legend(handles.values(), handles, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def draw_differences(
    rows: Sequence[Row], measure: Measure, title: str = "", credit: str = ""
) -> Figure:
    """Draw how far policies are from the baseline of `rows` in a measure, with 95 % intervals.

    Blue is better than the baseline, red worse, grey neither; outliers are shown at the edge.
    """
    factor = 100.0 if measure.relative else measure.factor
    values = np.array([[factor * float(row[key]) for key in measure.delta_keys] for row in rows])
    sign = 1.0 if measure.more_is_better else -1.0
    near = _near(sign * values[:, :1])
    figure = new_figure(1.2 + 0.24 * len(rows), credit, title)
    unit = "%" if measure.relative else measure.heading.rpartition(" ")[2]
    what = measure.key.replace("_", " ")
    label = f"{what}, difference to {words(str(rows[0]['baseline']))}, {unit} ({_better(measure)})"
    axes = new_axes(figure.subplots(), label, "")
    axes.set_title("blue: better, red: worse, grey: could be either", fontsize=8, loc="left")
    axes.axvline(0, color="black", linewidth=0.8)
    low, high = np.nanmin(values[near]), np.nanmax(values[near])
    margin = 0.12 * ((high - low) or 1.0)
    axes.set_xlim(low - margin, high + margin)
    for place, (row, (value, *ends)) in enumerate(zip(rows, values, strict=True)):
        settled = min(ends) > 0 or max(ends) < 0
        colour = (ON_TIME if sign * value > 0 else VIOLATION) if settled else BASELINE
        if near[place]:
            axes.plot(ends, [place, place], color=colour, linewidth=1.6)
            is_rule = row["policy"] == row["baseline"]
            axes.plot(value, place, "D" if is_rule else "o", color="black" if is_rule else colour)
        else:
            text = f"{value:+,.3g} ▸" if value > 0 else f"◂ {value:+,.3g}"
            edge, side = (high + margin, "right") if value > 0 else (low - margin, "left")
            axes.text(edge, place, text, color=colour, fontsize=8, va="center", ha=side)
    axes.set_yticks(range(len(rows)), [words(str(row["policy"])) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    return figure


def draw_trade_off(
    rows: Sequence[Row], x: Measure, y: Measure, kinds: Mapping[str, str], credit: str = ""
) -> Figure:
    """Draw policies in the plane of two measures, and the Pareto front of all of them.

    `kinds` maps a trial to its kind, such as its algorithm; kinds have colours, rules are grey.
    """
    points = np.array([[axis.factor * float(row[axis.key]) for axis in (x, y)] for row in rows])
    signs = np.array([1.0 if axis.more_is_better else -1.0 for axis in (x, y)])
    shown = _near(points * signs)
    best = front(points[shown] * signs) * signs
    on_front = sum(
        str(row["policy"]) in kinds and point in best.tolist()
        for row, point in zip(rows, points.tolist(), strict=True)
    )
    title = f"{on_front} of {len(kinds)} trials are on the Pareto front"
    figure = new_figure(4.6, credit, title)
    axes = new_axes(figure.subplots(), _axis(x), _axis(y))
    axes.ticklabel_format(useOffset=False)
    # The step stays where nothing is better than the front.
    across, up = best[np.argsort(best[:, 0])].T
    style = "steps-pre" if x.more_is_better else "steps-post"
    axes.plot(across, up, drawstyle=style, color="black", linewidth=0.8)
    names = [words(str(row["policy"])) for row in rows]
    palette = dict(zip(sorted({*kinds.values()}), colours(), strict=False)) | {"": BASELINE}
    for kind, colour in palette.items():
        drawn = [kinds.get(str(row["policy"]), "") == kind for row in rows] & shown
        sideways, upwards = points[drawn].T
        axes.scatter(sideways, upwards, 22, colour, label=words(kind) or "rule", zorder=3)
    # Label towards the middle, alternately above and below, because neighbours can be close.
    for number, point in enumerate(sorted(best.tolist())):
        here = [name for name, other in zip(names, points.tolist(), strict=True) if other == point]
        is_right = point[0] > points[shown, 0].mean()
        axes.annotate(
            ", ".join(here), point, (-5 if is_right else 5, -9 if number % 2 else 5), fontsize=6.5,
            textcoords="offset points", ha="right" if is_right else "left", zorder=4,
        )  # fmt: skip
    if beyond := [name for name, near in zip(names, shown, strict=True) if not near]:
        note = textwrap.fill(f"far off: {', '.join(beyond)}", 100)
        axes.set_title(note, fontsize=6.5, loc="left", color="#555555")
    axes.margins(0.12)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _near(goods: FloatArray) -> BoolArray:
    """Which points, shape (n, 2) and better when higher, can share axes with the others.

    One that is four times as far behind the best as the median would press them flat.
    """
    behind = np.nanmax(goods, axis=0) - goods
    return np.asarray((behind <= 4.0 * np.nanmedian(behind, axis=0)).all(axis=1))


def _axis(measure: Measure) -> str:
    return f"{measure.heading}, {_better(measure)}"


def _better(measure: Measure) -> str:
    return f"{'more' if measure.more_is_better else 'less'} is better"


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write figures as PNG files under a folder, which is created; return their paths."""
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the version of the library in it, equal figures are equal files.
        figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    return paths


def new_figure(height_inches: float, credit: str, title: str = "") -> Figure:
    """An empty figure of a page's width, its source printed small."""
    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    if credit:
        # A label of the whole figure, so that the layout keeps clear of it.
        figure.supxlabel(credit, x=0.005, ha="left", fontsize=5.5, color="#555555")
    return figure


def new_axes(axes: Axes, x: str, y: str) -> Axes:
    """Label axes and take away what is not read."""
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def log_seconds(axes: Axes) -> None:
    """Make x logarithmic, once all is drawn: labels at 1, 2 and 5, or at 1 beyond two decades.

    Matplotlib labels every minor tick of a short range, and the labels run into each other.
    """
    axes.set_xscale("log")
    if not axes.dataLim.minposx < math.inf:
        # Nothing was drawn, or at 0 alone: matplotlib makes no ticks of that.
        axes.set_xlim(0.1, 10.0)
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def bars(rows: Sequence[Row], key: str, factor: float, label: str, credit: str) -> Figure:
    """Draw one bar per row, `factor` times its `key`, with the interval that the row holds."""
    figure = new_figure(0.9 + 0.3 * len(rows), credit)
    axes = new_axes(figure.subplots(), label, "")
    values = np.array([factor * float(row[key]) for row in rows])
    low = np.array([factor * float(row[f"{key}_ci_low"]) for row in rows])
    high = np.array([factor * float(row[f"{key}_ci_high"]) for row in rows])
    names = [words(str(row["policy"])) for row in rows]
    # A percentile interval may leave the estimate out; a bar's whisker cannot have less than none.
    whiskers = np.nan_to_num(np.stack([values - low, high - values])).clip(min=0)
    axes.barh(names, values, color="#CFE3F1", edgecolor=ON_TIME, linewidth=0.8)
    axes.errorbar(values, names, xerr=whiskers, fmt="none", ecolor="black", capsize=2, linewidth=1)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.grid(axis="y", visible=False)
    for name, value, below, above in zip(names, values, *whiskers, strict=True):
        right = value >= 0
        end = value + above if right else value - below
        axes.annotate(
            f"{value:,.0f}" if factor == 1 else f"{value:.1f}", (end, name),
            (4 if right else -4, 0), textcoords="offset points", fontsize=7.5, va="center",
            ha="left" if right else "right",
        )  # fmt: skip
    axes.margins(x=0.12)
    axes.invert_yaxis()
    return figure


def colours() -> Iterable[str]:
    """Colours in their order, over and over."""
    return COLOURS * 9


def words(name: str) -> str:
    """A policy's name for a reader."""
    return name.replace("_", " ")


def _median_curve(repetitions: Sequence[Sequence[tuple[float, float]]]) -> FloatArray:
    """Median over repetitions at the steps that all of them reached, shape (2, num_points)."""
    steps = sorted(set.intersection(*({step for step, _ in curve} for curve in repetitions)))
    values = np.array([[dict(curve)[step] for step in steps] for curve in repetitions])
    return np.array([steps, np.median(values, axis=0) if steps else []])
