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
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tokenyard.problem import Measure, Row
from tokenyard.types import FloatArray

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

    Args:
        curves: What to draw, by label.
        value: Name and unit of the metric, for the axis.
        references: Values of policies that do not learn, drawn as level lines.
        credit: Source of the data, printed small.
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
