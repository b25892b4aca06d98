"""Errors by kind of GPU and of step, before and after the fit, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from tokenyard.figures import BASELINE, ON_TIME, new_axes, new_figure
from tokenyard.perf.step_times import STEPS

BAR_PERCENT = 8.0
_SHOWN = {
    "before": (BASELINE, "before"),
    "fitted": (ON_TIME, "fitted to a third, held-out two thirds"),
}
_CREDIT = (
    "Point: median; line: up to the 90th percentile. "
    "Step times: NVIDIA aiconfigurator-core 0.12.0, vLLM, Llama-3.1 8B and 70B, 1 to 8 GPUs"
)


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw the median error as a point and the error of nine steps in ten as the end of its line.

    Args:
        rows: Of the table `held_out`.
    """
    figure = new_figure(3.1, _CREDIT)
    for axes, step in zip(figure.subplots(1, len(STEPS), sharey=True), STEPS, strict=True):
        new_axes(axes, f"{step}: relative error, %", "")
        for (what, (colour, label)), offset in zip(_SHOWN.items(), (-0.13, 0.13), strict=True):
            chosen = [row for row in rows if row["step"] == step]
            median, p90 = (
                100 * np.array([row[f"{what}_{key}_error_fraction"] for row in chosen])
                for key in ("median", "p90")
            )
            height = np.arange(len(chosen)) + offset
            axes.hlines(height, median, p90, color=colour, linewidth=1.6)
            axes.plot(median, height, "o", color=colour, markersize=5, label=label)
        axes.axvline(
            BAR_PERCENT, color="black", linestyle=":", linewidth=1, label="bar: 8 %, median"
        )
        axes.set_xscale("log")
        axes.set_xlim(1, 200)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_yticks(range(len(chosen)), [row["gpu"].removesuffix("_vllm") for row in chosen])
    axes.invert_yaxis()
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside upper center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    return figure
