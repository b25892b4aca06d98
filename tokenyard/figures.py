"""The frame of every figure: canvas, axes, bars with intervals, learning curves, files.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from tokenyard.problem import Measure, Row
from tokenyard.statistics.pareto import front
from tokenyard.types import BoolArray, FloatArray

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
VIOLATION, ON_TIME, BASELINE = "#D55E00", "#0072B2", "#7F7F7F"

Curves = Mapping[str, Sequence[Sequence[tuple[float, float]]]]
"""Label to the curves of its repetitions; a curve is (environment steps, value) in order."""

_WIDTH_INCHES = 7.0
_DPI = 160


def learning_curves(
    curves: Curves, value: str, references: Mapping[str, float] | None = None, credit: str = ""
) -> Figure:
    """Draw a metric over environment steps: a line per repetition, a thick one for their median.

    `value` labels its axis; `references`, policies that do not learn, are level lines.
    """
    figure = new_figure(4.2, credit)
    axes = new_axes(figure.subplots(), "environment steps", value)
    for colour, (label, repetitions) in zip(colours(), curves.items(), strict=False):
        for curve in repetitions:
            axes.plot(*np.array(curve).T, color=colour, linewidth=0.6, alpha=0.5)
        axes.plot(*_median_curve(repetitions), color=colour, linewidth=2.0, label=label)
    for (name, level), style in zip(
        (references or {}).items(), ("--", ":", "-.") * 9, strict=False
    ):
        axes.axhline(level, color=BASELINE, linestyle=style, linewidth=1.2, label=name)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:g}k" if x else "0"))
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def draw_differences(rows: Sequence[Row], measure: Measure, credit: str = "") -> Figure:
    """Draw how far policies are from the baseline of `rows` in a measure, with 95 % intervals."""
    keys = ("difference", "difference_ci_low", "difference_ci_high")
    shown: list[Row] = [
        {"policy": row["policy"]}
        | {key: row[found] for key, found in zip(keys, measure.delta_keys, strict=True)}
        for row in rows
    ]
    unit = "%" if measure.relative else measure.heading
    label = f"{measure.key.replace('_', ' ')}, difference to {rows[0]['baseline']}, {unit}"
    return bars(shown, "difference", 100.0 if measure.relative else measure.factor, label, credit)


def draw_trade_off(
    rows: Sequence[Row], x: Measure, y: Measure, kinds: Mapping[str, str], credit: str = ""
) -> Figure:
    """Draw policies in the plane of two measures, and the Pareto front of all of them.

    `kinds` says what a policy is, such as its algorithm; each kind gets a colour, others are grey.
    """
    figure = new_figure(4.6, credit)
    axes = new_axes(figure.subplots(), _axis(x), _axis(y))
    points = np.array([[one.factor * float(row[one.key]) for one in (x, y)] for row in rows])
    signs = np.array([1.0 if one.more_is_better else -1.0 for one in (x, y)])
    shown = _near(points * signs)
    best = front(points[shown] * signs) * signs
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
    for point in best.tolist():
        here = [name for name, one in zip(names, points.tolist(), strict=True) if one == point]
        axes.annotate(
            ", ".join(here), point, (4, 4), textcoords="offset points", fontsize=6.5, zorder=4
        )  # fmt: skip
    if beyond := [name for name, near in zip(names, shown, strict=True) if not near]:
        axes.set_title(f"far off: {', '.join(beyond)}", fontsize=6.5, loc="left", color="#555555")
    axes.margins(0.12)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _near(goods: FloatArray) -> BoolArray:
    """Which points, shape (n, 2) and better when higher, can share axes with the others.

    One that is four times as far behind the best as the median would press them flat.
    """
    behind = goods.max(axis=0) - goods
    return np.asarray((behind <= 4.0 * np.median(behind, axis=0)).all(axis=1))


def _axis(measure: Measure) -> str:
    better = "more" if measure.more_is_better else "less"
    return f"{measure.heading}, {better} is better"


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write figures as PNG files under a folder, which is created; return their paths."""
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the version of the library in it, equal figures are equal files.
        figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    return paths


def new_figure(height_inches: float, credit: str) -> Figure:
    """An empty figure of a page's width, its source printed small."""
    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
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


def small_bars(
    rows: Sequence[Row], panels: Mapping[str, tuple[str, float]], credit: str, title: str = ""
) -> Figure:
    """Draw one panel of bars per key, side by side; a panel is (label, factor)."""
    figure = new_figure(1.3 + 0.26 * len(rows), credit)
    if title:
        figure.suptitle(title, fontsize=9)
    names = [words(str(row["policy"])) for row in rows]
    drawn = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (key, (label, factor)) in zip(drawn, panels.items(), strict=True):
        values = np.array([factor * float(row[key]) for row in rows])
        new_axes(axes, "", "")
        axes.set_title(label, fontsize=8.5)
        axes.barh(names, values, color="#CFE3F1", edgecolor=ON_TIME, linewidth=0.8)
        axes.grid(axis="y", visible=False)
        # Room for the numbers behind the bars; a share of nothing has an axis nevertheless.
        axes.set_xlim(0, 1.45 * (float(np.nanmax(values, initial=0.0)) or 1.0))
        axes.xaxis.set_major_locator(MaxNLocator(3))
        for name, value in zip(names, values, strict=True):
            text = "none" if math.isnan(value) else _three_digits(value)
            axes.annotate(
                text, (np.nan_to_num(value), name), (3, 0), textcoords="offset points",
                fontsize=7.5, va="center",
            )  # fmt: skip
    drawn[0].invert_yaxis()
    return figure


def colours() -> Iterable[str]:
    """Colours in their order, over and over."""
    return COLOURS * 9


def words(name: str) -> str:
    """A policy's name for a reader."""
    return name.replace("_", " ")


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _median_curve(repetitions: Sequence[Sequence[tuple[float, float]]]) -> FloatArray:
    """Median over repetitions at the steps that all of them reached, shape (2, num_points)."""
    steps = sorted(set.intersection(*({step for step, _ in curve} for curve in repetitions)))
    values = np.array([[dict(curve)[step] for step in steps] for curve in repetitions])
    return np.array([steps, np.median(values, axis=0) if steps else []])
