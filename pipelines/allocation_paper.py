"""Replicate the allocation paper as printed: its Table 1, and its figures 2 to 13.

    python pipelines/allocation_paper.py --figures runs/allocation-paper

docs/results/allocation-paper.md sets the numbers beside both of the paper's result sets.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from tokenyard.allocation.paper.decision_quality import decision_quality, one_vs_rest_roc
from tokenyard.allocation.paper.simulator import (
    BANDWIDTH,
    LATENCY,
    MAX_GPUS,
    MEMORY,
    NUM_ACTIONS,
    NUM_STATES,
    POWER,
    LearningConfig,
    LiteralTable,
    LiteralWeights,
    Reading,
    Update,
    decode_action,
    exact_values,
    fixed_policy,
    learn,
    literal_table,
    mean_reward,
)
from tokenyard.figures import save_figures
from tokenyard.provenance import write_result
from tokenyard.types import FloatArray, IntArray

LEARNERS: tuple[Update, ...] = get_args(Update)
PRINTED = {
    "q_learning": (".85/.83/.84/26.7", ".89/.87/.88/.875/.84"),
    "sarsa": (".79/.76/.77/22.4", ".82/.79/.81/.80/.76"),
    "fixed": (".74/.71/.72/19.6", ".68/.65/.66/.655/.62"),
}
"""The paper's two result sets: abstract (accuracy, precision, F1, mean total reward), and Table 1
(accuracy, precision, recall, F1, mean reward)."""
MEASURES = (
    "mean_reward", "accuracy", "state_accuracy", "tie_accuracy", "precision", "recall", "f1",
    "regret", "roc_auc",
)  # fmt: skip


@dataclass(frozen=True)
class Args:
    """Run the paper's three algorithms under three readings of its environment."""

    seeds: int = 10
    """Data sets and trainings."""
    passes: int = 5
    """Passes over the 30 days."""
    bins: Literal["uniform", "quantile"] = "uniform"
    of_maxima: bool = False
    """The reward of section 2.3 in place of that of section 3."""
    figures: Path | None = None
    """Draw the paper's figures into this folder."""
    json: Path | None = None
    """Write the rows to this file."""
    mlflow: bool = False
    """Log rows and figures to MLFLOW_TRACKING_URI, or to ./mlflow.db."""


Found = tuple[IntArray, FloatArray]
"""Action per state, and action scores."""


def policies(table: LiteralTable, args: Args, seed: int) -> dict[str, Found]:
    """Every policy of one data set."""
    config = LearningConfig(passes=args.passes)
    found: dict[str, Found] = {}
    for update in LEARNERS:
        q, _ = learn(table, update, config, seed)
        found[update] = (q.argmax(axis=1), q)
    rng = np.random.default_rng(seed)
    fixed = fixed_policy()
    static = np.full(NUM_STATES, int(table.rewards.mean(axis=0).argmax()))
    optimal = exact_values(table, config.gamma)
    drawn = rng.integers(0, NUM_ACTIONS, NUM_STATES)
    for name, policy in (("fixed", fixed), ("random_table", drawn), ("best_static", static)):
        found[name] = (policy, np.eye(NUM_ACTIONS)[policy])
    found["oracle"] = (optimal.argmax(axis=1), optimal)
    return found


def measure(table: LiteralTable, found: Found, optimal: FloatArray) -> dict[str, float]:
    """All measures of one policy on one data set."""
    policy, scores = found
    quality = decision_quality(policy, optimal, table.states)
    _, _, area = one_vs_rest_roc(scores, optimal.argmax(axis=1), table.states)
    values = {name: getattr(quality, name) for name in MEASURES[1:-1]}
    return {"mean_reward": mean_reward(table, policy), **values, "roc_auc": area}


def run(args: Args) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds of every measure, by reading and policy."""
    rows = []
    weights = LiteralWeights(of_maxima=args.of_maxima)
    for reading in get_args(Reading):
        values: dict[str, list[dict[str, float]]] = {}
        for seed in range(args.seeds):
            table = literal_table(reading, weights, args.bins, seed)
            optimal = exact_values(table)
            for name, found in policies(table, args, seed).items():
                values.setdefault(name, []).append(measure(table, found, optimal))
        for name, each in values.items():
            row: dict[str, Any] = {"reading": reading, "policy": name, "seeds": args.seeds}
            for key in MEASURES:
                row[key] = float(np.mean([one[key] for one in each]))
                row[f"{key}_std"] = float(np.std([one[key] for one in each]))
            rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print every row beside what the paper prints."""
    table = Table(title="mean ± standard deviation over seeds; one row per policy and reading")
    for column in (
        "reading",
        "policy",
        *MEASURES[:4],
        "precision",
        "recall",
        "F1",
        "regret",
        "AUC",
    ):
        table.add_column(column, no_wrap=True)
    table.add_column("paper: abstract; Table 1")
    for row in rows:
        cells = [f"{row[key]:.3f}±{row[f'{key}_std']:.3f}" for key in MEASURES]
        table.add_row(
            row["reading"], row["policy"], *cells, "; ".join(PRINTED.get(row["policy"], ()))
        )
    Console(width=None if sys.stdout.isatty() else 230).print(table)


def draw(rows: list[dict[str, Any]], args: Args) -> dict[str, Figure]:
    """The paper's figures 2 to 13, of the correlated reading and the first seed."""
    table = literal_table("correlated", LiteralWeights(of_maxima=args.of_maxima), args.bins, 0)
    found, optimal = policies(table, args, 0), exact_values(table)
    taken = found["q_learning"][0][table.states]
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
    figures["09_gpus_per_state"] = _gpus_per_state(found, shown)
    measured = {row["policy"]: row for row in rows if row["reading"] == "correlated"}
    figures["10_quality"] = _bars(
        {name: [measured[name][key] for key in ("accuracy", "precision", "f1")] for name in shown},
        ("accuracy", "precision", "F1"),
    )
    efficiency = {}
    for name in shown:
        own = table.features[np.arange(table.num_slots), found[name][0][table.states]]
        efficiency[name] = [1 - own[:, LATENCY].mean(), 1 - own[:, POWER].mean()]
    figures["11_efficiency"] = _bars(efficiency, ("1 - latency", "1 - power"))
    figures["12_confusion"] = _confusions(table, found, optimal, shown)
    figures["13_roc"] = _rocs(table, found, optimal, shown)
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


def _gpus_per_state(found: dict[str, Found], shown: tuple[str, ...]) -> Figure:
    figure, axes = _axes(6.0)
    for k, name in enumerate(shown):
        gpus = [decode_action(int(action))[1] for action in found[name][0]]
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
        bars = axes.bar(at, [one[k] for one in values.values()], 0.25, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(values)), list(values))
    axes.set_ylim(0, 1.25)
    axes.legend(ncols=3, fontsize=8, frameon=False)
    return figure


def _confusions(
    table: LiteralTable, found: dict[str, Found], optimal: FloatArray, shown: tuple[str, ...]
) -> Figure:
    figure = Figure(figsize=(9.5, 3.6), layout="constrained", dpi=150)
    names = [f"{decode_action(a)[0][0].upper()}{decode_action(a)[1]}" for a in range(NUM_ACTIONS)]
    panels = figure.subplots(1, len(shown), sharey=True)
    for axes, name in zip(panels, shown, strict=True):
        confusion = decision_quality(found[name][0], optimal, table.states).confusion
        image = axes.imshow(confusion / confusion.sum(), cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(NUM_ACTIONS), names, fontsize=6)
        axes.set_yticks(range(NUM_ACTIONS), names, fontsize=6)
        axes.set(title=name, xlabel="action taken")
    panels[0].set_ylabel("best action by dynamic programming")
    figure.colorbar(image, ax=panels, label="share of slots")
    return figure


def _rocs(
    table: LiteralTable, found: dict[str, Found], optimal: FloatArray, shown: tuple[str, ...]
) -> Figure:
    figure, axes = _axes(4.2, 3.6)
    for name in shown:
        labels = optimal.argmax(axis=1)
        fpr, tpr, area = one_vs_rest_roc(found[name][1], labels, table.states)
        axes.plot(fpr, tpr, label=f"{name}, area {area:.2f}")
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    axes.legend(fontsize=8, frameon=False)
    return figure


def log_to_mlflow(args: Args, rows: list[dict[str, Any]], figures: dict[str, Figure]) -> None:
    """Leave one run with the rows as a table and the figures as images."""
    from mlflow import MlflowClient

    from tune_configs.mlflow_log import open_experiment, tracking_uri

    client = MlflowClient(tracking_uri(Path()))
    experiment = open_experiment(client, "tokenyard-allocation-paper", Path())
    run_id = client.create_run(experiment, run_name=f"{args.bins} bins").info.run_id
    client.log_table(run_id, {key: [row[key] for row in rows] for key in rows[0]}, "table_1.json")
    for name, figure in figures.items():
        client.log_figure(run_id, figure, f"figures/{name}.png")
    client.set_terminated(run_id)


def main(args: Args) -> None:
    rows = run(args)
    print_table(rows)
    figures = draw(rows, args) if args.figures or args.mlflow else {}
    if args.figures:
        save_figures(figures, args.figures)
    if args.json:
        write_result(args.json, shlex.join(["python", *sys.argv]), None, rows)
    if args.mlflow:
        log_to_mlflow(args, rows, figures)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
