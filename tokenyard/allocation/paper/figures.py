"""The paper's figures 2 to 13, drawn from our run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from tokenyard.allocation.paper.decision_quality import decision_quality, one_vs_rest_roc
from tokenyard.allocation.paper.simulator import (
    BANDWIDTH,
    LATENCY,
    MAX_GPUS,
    MEMORY,
    NUM_ACTIONS,
    NUM_STATES,
    POWER,
    LiteralTable,
    LiteralWeights,
    decode_action,
    exact_values,
    literal_table,
)
from tokenyard.allocation.paper.study import PaperStudy, Scored, policies
from tokenyard.types import FloatArray


def draw(rows: Sequence[Mapping[str, Any]], study: PaperStudy) -> dict[str, Figure]:
    """Draw the paper's figures 2 to 13 for the correlated reading and the first seed."""
    table = literal_table("correlated", LiteralWeights(of_maxima=study.of_maxima), study.bins, 0)
    by_policy, optimal = policies(table, study.passes, 0), exact_values(table)
    taken = by_policy["q_learning"][0][table.states]
    features = table.features[np.arange(table.num_slots), taken]
    shown = ("q_learning", "sarsa", "fixed")
    columns = {
        "02_average_cpu": (table.cpu[:, 2], "average CPU use, normalised"),
        "03_maximum_cpu": (table.cpu[:, 1], "maximum CPU use, normalised"),
        "04_minimum_cpu": (table.cpu[:, 0], "minimum CPU use, normalised"),
        "05_memory": (features[:, MEMORY], "memory, normalised, Q-learning's actions"),
        "06_latency": (features[:, LATENCY], "latency, normalised, Q-learning's actions"),
        "07_power": (features[:, POWER], "power, normalised, Q-learning's actions"),
        "08_bandwidth": (features[:, BANDWIDTH], "network traffic, normalised, Q-learning's"),
    }
    figures = {name: _histogram(values, label) for name, (values, label) in columns.items()}
    figures["09_gpus_per_state"] = _gpus_per_state(by_policy, shown)
    measured = {row["policy"]: row for row in rows if row["reading"] == "correlated"}
    figures["10_quality"] = _bars(
        {name: [measured[name][key] for key in ("accuracy", "precision", "f1")] for name in shown},
        ("accuracy", "precision", "F1"),
    )
    efficiency = {}
    for name in shown:
        own = table.features[np.arange(table.num_slots), by_policy[name][0][table.states]]
        efficiency[name] = [1 - own[:, LATENCY].mean(), 1 - own[:, POWER].mean()]
    figures["11_efficiency"] = _bars(efficiency, ("1 - latency", "1 - power"))
    figures["12_confusion"] = _confusions(table, by_policy, optimal, shown)
    figures["13_roc"] = _rocs(table, by_policy, optimal, shown)
    return figures


def _axes(width: float = 4.6, height: float = 3.0) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _histogram(values: FloatArray, label: str) -> Figure:
    figure, axes = _axes()
    axes.hist(values, bins=40, color="#3B7BA8")
    axes.set(xlabel=label, ylabel="slots of 5 minutes")
    return figure


def _gpus_per_state(by_policy: dict[str, Scored], shown: tuple[str, ...]) -> Figure:
    figure, axes = _axes(6.0)
    for k, name in enumerate(shown):
        gpus = [decode_action(int(action))[1] for action in by_policy[name][0]]
        axes.bar(np.arange(1, NUM_STATES + 1) + 0.27 * (k - 1), gpus, 0.25, label=name)
    axes.set(xlabel="state: bin of CPU use", ylabel="GPUs", xticks=range(1, NUM_STATES + 1))
    axes.set_ylim(0, MAX_GPUS + 1.2)
    axes.set_yticks(range(MAX_GPUS + 1))
    axes.legend(ncols=3, fontsize=8, frameon=False)
    return figure


def _bars(values: dict[str, list[float]], labels: tuple[str, ...]) -> Figure:
    figure, axes = _axes(5.2)
    for k, label in enumerate(labels):
        at = np.arange(len(values)) + 0.27 * (k - (len(labels) - 1) / 2)
        bars = axes.bar(at, [value[k] for value in values.values()], 0.25, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(values)), list(values))
    axes.set_ylim(0, 1.25)
    axes.legend(ncols=3, fontsize=8, frameon=False)
    return figure


def _confusions(
    table: LiteralTable, by_policy: dict[str, Scored], optimal: FloatArray, shown: tuple[str, ...]
) -> Figure:
    figure = Figure(figsize=(9.5, 3.6), layout="constrained", dpi=150)
    names = [f"{decode_action(a)[0][0].upper()}{decode_action(a)[1]}" for a in range(NUM_ACTIONS)]
    panels = figure.subplots(1, len(shown), sharey=True)
    for axes, name in zip(panels, shown, strict=True):
        confusion = decision_quality(by_policy[name][0], optimal, table.states).confusion
        image = axes.imshow(confusion / confusion.sum(), cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(NUM_ACTIONS), names, fontsize=6)
        axes.set_yticks(range(NUM_ACTIONS), names, fontsize=6)
        axes.set(title=name, xlabel="action taken")
    panels[0].set_ylabel("best action by dynamic programming")
    figure.colorbar(image, ax=panels, label="share of slots")
    return figure


def _rocs(
    table: LiteralTable, by_policy: dict[str, Scored], optimal: FloatArray, shown: tuple[str, ...]
) -> Figure:
    figure, axes = _axes(4.2, 3.6)
    for name in shown:
        labels = optimal.argmax(axis=1)
        fpr, tpr, area = one_vs_rest_roc(by_policy[name][1], labels, table.states)
        axes.plot(fpr, tpr, label=f"{name}, area {area:.2f}")
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.legend(fontsize=8, frameon=False)
    return figure
