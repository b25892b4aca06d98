"""Train and judge every row of the paper's Tables I and II, and what we set beside them.

That is its agents on `poisson_085`, and the ablations of its reward.

Results are appended to a CSV as each training ends, one line per training seed and episode; what
is in the CSV already is not trained again, so the command can be interrupted and repeated.
Source: Abbaraju, "Intelligent Load Balancing Using RL for Heterogeneous LLM Inference Systems",
Tables I and II.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pandas as pd
import ray
import tyro
from rich.console import Console
from rich.table import Table

from tokenyard.provenance import write_result
from tune_configs import paper_tables as paper
from tune_configs import routing
from tune_configs.tuner import start_ray, trial_label

MEASURES = ("reward", "mean_response_s", "mean_queue_length", "slo_violation_fraction")
PRINTED = {
    ("I", "ppo"): "8450±120 / 0.85±0.05 / 2.1±0.3 / 3.2±1.1 %",
    ("I", "a2c"): "8100±150 / 0.95±0.07 / 2.8±0.4 / 5.7±1.3 %",
    ("I", "dqn"): "7950±200 / 1.02±0.09 / 3.0±0.5 / 7.4±1.8 %",
    ("I", "round_robin"): "6500±250 / 1.50±0.12 / 4.5±0.6 / 22.1±3.5 %",
    ("I", "least_connections"): "7100±180 / 1.20±0.10 / 3.8±0.5 / 12.8±2.2 %",
    ("I", "least_loaded"): "7350±160 / 1.10±0.08 / 3.3±0.4 / 9.5±1.9 %",
    ("II", "ppo"): "8150±180 / 1.15±0.08 / 3.2±0.4 / 12.4±2.0 %",
    ("II", "a2c"): "7750±200 / 1.30±0.10 / 4.0±0.5 / 18.7±2.5 %",
    ("II", "dqn"): "7600±220 / 1.38±0.12 / 4.3±0.6 / 22.3±3.1 %",
    ("II", "round_robin"): "6200±240 / 2.10±0.15 / 7.5±0.7 / 61.8±4.2 %",
    ("II", "least_connections"): "6800±210 / 1.85±0.13 / 6.2±0.6 / 48.5±3.8 %",
    ("II", "least_loaded"): "7000±190 / 1.70±0.12 / 5.8±0.5 / 42.2±3.4 %",
}
"""What the paper printed: cumulative reward, mean response in seconds, queue length, SLO
violations."""
CURVE_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Moments of a training that its learning curve is printed at: shares of its length."""


@dataclass(frozen=True)
class Args:
    """Fill the paper's tables; what is in the CSV already is kept."""

    out: Path = Path("docs/results/routing-paper.csv")
    """CSV of all episodes; learning curves go beside it, `-curves` in the name."""
    policies: Path = Path("runs/paper")
    """Folder for the trained policies, for figures and for evaluate.py."""
    only: tuple[str, ...] = tuple(paper.TABLES)
    """Tables to fill: I, II, poisson_085, ablation."""
    jobs: int = 2
    """Trainings at a time, one core each."""
    json: Path | None = None
    """File for the summary."""


def main(args: Args) -> None:
    unknown = set(args.only) - set(paper.TABLES)
    if unknown:
        sys.exit(f"error: no table {sorted(unknown)}; choose among {list(paper.TABLES)}")
    left = [cell for cell in paper.cells(args.only) if cell.key not in finished(args.out)]
    print(f"{len(left)} trainings and rules left", file=sys.stderr)
    if left:
        run(left, args)
    frame = pd.read_csv(args.out)
    rows = summary(frame[frame["table"].isin(args.only)])
    report(rows)
    curves = curves_path(args.out)
    if curves.exists():
        learned = pd.read_csv(curves)
        report_curves(learned[learned["table"].isin(args.only)])
    if args.json is not None:
        write_result(args.json, " ".join(["python", *sys.argv]), None, rows)


def finished(out: Path) -> set[tuple[str, ...]]:
    """Keys of the cells in the CSV."""
    if not out.exists():
        return set()
    with out.open(newline="", encoding="utf-8") as file:
        return {
            (line["table"], line["policy"], line["reward_weights"], line["training_seed"])
            for line in csv.DictReader(file)
        }


def run(left: Sequence[paper.Cell], args: Args) -> None:
    """Work the cells off, `jobs` at a time; each is written as a whole when it is done."""
    assert routing.default().warm_up is not None
    routing.default().warm_up()
    args.policies.mkdir(parents=True, exist_ok=True)
    start_ray(args.jobs)
    # A worker per cell: nothing of one training can reach the next.
    remote = ray.remote(num_cpus=1, max_calls=1)(paper.run_cell)
    folder = str(args.policies.resolve())
    pending = {remote.remote(cell, folder): cell for cell in left}
    while pending:
        (ready,), _ = ray.wait(list(pending), num_returns=1)
        cell = pending.pop(ready)
        curve, episodes = ray.get(ready)
        append(curves_path(args.out), curve)
        append(args.out, episodes)
        label = trial_label(cell.trial) if cell.trial else cell.policy
        print(f"table {cell.table}: {label} done, {len(pending)} left", file=sys.stderr)
    ray.shutdown()


def curves_path(out: Path) -> Path:
    """Where the learning curves of a CSV go."""
    return out.with_name(f"{out.stem}-curves.csv")


def append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Add lines to a CSV in one write, with its header when it is new."""
    if not lines:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    text = pd.DataFrame(lines).to_csv(index=False, header=not path.exists(), float_format="%.6g")
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def summary(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Mean and standard deviation over training seeds and episodes, one row per printed row."""
    rows = []
    keys = ["table", "origin", "policy", "reward_weights"]
    for key, group in frame.groupby(keys, sort=False, dropna=False):
        row: dict[str, Any] = dict(zip(keys, key, strict=True))
        row["training_seeds"] = int(group["training_seed"].nunique())
        row["episodes"] = len(group)
        for measure in MEASURES:
            row[measure] = float(group[measure].mean())
            row[f"{measure}_std"] = float(group[measure].std())
        rows.append(row)
    return rows


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print every row beside the paper's."""
    table = Table(title="mean ± standard deviation over training seeds x episodes")
    for column in (
        "table",
        "traffic",
        "policy",
        "seeds",
        "reward",
        "mean s",
        "queue",
        "violations",
    ):
        table.add_column(column)
    table.add_column("the paper: reward / s / queue / violations")
    for row in rows:
        weights = row["reward_weights"]
        name = row["policy"] + (f" ({weights})" if row["table"] == "ablation" else "")
        table.add_row(
            row["table"],
            row["origin"],
            name,
            f"{row['training_seeds'] or '-'} x {row['episodes'] // max(row['training_seeds'], 1)}",
            f"{row['reward']:,.0f}±{row['reward_std']:,.0f}",
            f"{row['mean_response_s']:.2f}±{row['mean_response_s_std']:.2f}",
            f"{row['mean_queue_length']:.1f}±{row['mean_queue_length_std']:.1f}",
            f"{row['slo_violation_fraction']:.1%}±{row['slo_violation_fraction_std']:.1%}",
            PRINTED.get((row["table"], row["policy"]), ""),
        )
    Console(width=None if sys.stdout.isatty() else 170).print(table)


def report_curves(curves: pd.DataFrame) -> None:
    """Print what an agent earned per request at five moments of its training."""
    table = Table(title="reward per request while training: mean ± deviation over training seeds")
    for column in ("table", "agent", "reward", *(f"{share:.0%}" for share in CURVE_SHARES)):
        table.add_column(column)
    keys = ["table", "policy", "reward_weights"]
    for key, group in curves.groupby(keys, sort=False):
        seeds = [one.sort_values("env_steps") for _, one in group.groupby("training_seed")]
        cells = []
        for share in CURVE_SHARES:
            at = [one.iloc[round(share * len(one)) - 1] for one in seeds]
            earned = pd.Series([point["reward_per_request"] for point in at])
            cells.append(
                f"{at[0]['env_steps'] / 1000:.0f}k: {earned.mean():.2f}±{earned.std():.2f}"
            )
        table.add_row(*(str(part) for part in key), *cells)
    Console(width=None if sys.stdout.isatty() else 170).print(table)


if __name__ == "__main__":
    main(tyro.cli(Args))
