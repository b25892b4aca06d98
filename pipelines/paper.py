"""Repeat what the papers print, and what stands beside it.

    python pipelines/paper.py tables         routing: its Tables I and II; six CPU-hours
    python pipelines/paper.py allocation --figures runs/allocation-paper   Table 1, figures 2 to 13
    python pipelines/paper.py fronts --figures runs/fronts                 plans, fronts, limits
    python pipelines/paper.py torta accuracy                               also ablation, failures
    python pipelines/paper.py layouts --scenario abilene --seed 1          regions, drawn layouts

Sources: Abbaraju, "Intelligent Load Balancing Using RL for Heterogeneous LLM Inference Systems";
Dadizadeh Dargiry 2026; Du et al. 2025, TORTA, arXiv 2507.10259.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pandas as pd
import tyro
from rich.table import Table

from tokenyard.allocation import fronts
from tokenyard.allocation.paper.figures import draw
from tokenyard.allocation.paper.study import MEASURES, PaperStudy, run_study
from tokenyard.allocation.plans import load_allocation
from tokenyard.config import at_least_one
from tokenyard.evaluation import difference_table, level_tables
from tokenyard.figures import save_figures
from tokenyard.problem import Row
from tokenyard.provenance import ResultFile, command_line, make_console, write_result
from tokenyard.regions import judge, studies
from tokenyard.regions.policies import REGION_BASELINES
from tokenyard.regions.problem import PROBLEM
from tokenyard.regions.scenario import load_regions

TABLES = ("I", "II", "poisson_085", "ablation")
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
ALLOCATION_PRINTED = {
    "q_learning": (".85/.83/.84/26.7", ".89/.87/.88/.875/.84"),
    "sarsa": (".79/.76/.77/22.4", ".82/.79/.81/.80/.76"),
    "fixed": (".74/.71/.72/19.6", ".68/.65/.66/.655/.62"),
}
"""The paper's two result sets: abstract (accuracy, precision, F1, mean total reward), and Table 1
(accuracy, precision, recall, F1, mean reward)."""


@dataclass(frozen=True)
class Tables:
    """Train and judge the routing paper's agents, and ablations of its reward.

    Results are appended to a CSV as each training ends, one line per training seed and episode;
    what is in the CSV already is not trained again, so the command can be interrupted and repeated.
    """

    out: Path = Path("docs/results/routing-paper.csv")
    """CSV of all episodes; learning curves go beside it, `-curves` in the name."""
    policies: Path = Path("runs/paper")
    """Folder for the trained policies, for figures and for evaluate.py."""
    only: tuple[str, ...] = TABLES
    """Tables to fill: I, II, poisson_085, ablation."""
    jobs: int = 2
    """Trainings at a time, one core each."""
    json: ResultFile | None = None
    """File for the summary."""


@dataclass(frozen=True)
class Allocation(PaperStudy):
    """Run the allocation paper's three algorithms under three readings of its environment."""

    figures: Path | None = None
    """Draw the paper's figures into this folder."""
    json: ResultFile | None = None
    """Write the rows to this file."""
    mlflow: bool = False
    """Log rows and figures to MLFLOW_TRACKING_URI, or to ./mlflow.db."""


@dataclass(frozen=True)
class Fronts:
    """Draw where kinds of plans are cheapest, a Pareto front, and planners under a constraint."""

    scenario: str = "a100x8_13b"
    """Of the front and the constraint; regions are drawn of every pool."""
    weightings: int = 32
    """Random weights of the paper's five terms."""
    attainment: float = 0.99
    """Share of requests that must attain the SLO."""
    seed: int = 0
    figures: Path | None = None
    """Draw into this folder."""
    json: ResultFile | None = None
    """Write all rows to this file."""


@dataclass(frozen=True)
class Torta:
    """Run one study on one scenario of regions."""

    study: Annotated[studies.Study, tyro.conf.Positional]
    scenario: str = "abilene"
    """Name or YAML path."""
    policies: str = "round_robin,skylb,sdib,prox_ot_forecast,prox_ot_forecast_live_cost"
    """By name, separated by commas; `ablation` takes the first and the last."""
    streams: int = 3
    seed: int = 2026
    json: ResultFile | None = None
    """Write the result rows to this file."""


@dataclass(frozen=True)
class Layouts:
    """Compare regional policies over drawn layouts of servers, on streams of their own."""

    scenario: str = "abilene"
    """Name or YAML path."""
    policies: str | None = None
    """By name, separated by commas; by default all rules."""
    baseline: str | None = None
    """What they are compared to; by default the best rule of the other half of the layouts."""
    layouts: int = 20
    slots: int = 160
    """Length of each stream, intervals of 45 s."""
    seed: int = 0
    """Draws layouts and streams."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


Args = (
    Annotated[Tables, tyro.conf.subcommand("tables")]
    | Annotated[Allocation, tyro.conf.subcommand("allocation")]
    | Annotated[Fronts, tyro.conf.subcommand("fronts")]
    | Annotated[Torta, tyro.conf.subcommand("torta")]
    | Annotated[Layouts, tyro.conf.subcommand("layouts")]
)


def fill_tables(args: Tables) -> list[Row]:
    # Ray takes seconds to import, and no other study needs it.
    from tune_configs import paper_tables as paper

    unknown = set(args.only) - set(paper.TABLES)
    if unknown:
        raise ValueError(f"no table {sorted(unknown)}; choose among {list(paper.TABLES)}")

    def tell(cell: paper.TableEntry, num_left: int) -> None:
        print(f"{' '.join(filter(None, cell.key))} done, {num_left} left", file=sys.stderr)

    done = paper.finished(args.out)
    left = [cell for cell in paper.cells(args.only) if cell.key not in done]
    print(f"{len(left)} trainings and rules left", file=sys.stderr)
    if left:
        paper.run_cells(left, args.out, args.policies, args.jobs, tell)
    frame = pd.read_csv(args.out)
    rows = paper.summary(frame[frame["table"].isin(args.only)])
    print_tables(rows)
    curves = paper.curves_path(args.out)
    if curves.exists():
        learned = pd.read_csv(curves)
        shares = [f"{share:.0%}" for share in paper.CURVE_SHARES]
        title = "reward per request while training: mean ± deviation over training seeds"
        table = Table("table", "agent", "reward", *shares, title=title)
        for name, cells in paper.curve_summary(learned[learned["table"].isin(args.only)]):
            table.add_row(*name, *cells)
        make_console(170).print(table)
    return rows


def print_tables(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print every row beside the paper's."""
    table = Table(
        "table", "traffic", "policy", "seeds", "reward", "mean s", "queue", "violations",
        "the paper: reward / s / queue / violations",
        title="mean ± standard deviation over training seeds x episodes",
    )  # fmt: skip
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
    make_console(170).print(table)


def replicate_allocation(args: Allocation) -> list[Row]:
    rows = run_study(args)
    print_readings(rows)
    figures = draw(rows, args) if args.figures or args.mlflow else {}
    if args.figures:
        save_figures(figures, args.figures)
    if args.mlflow:
        from tune_configs.mlflow_log import log_rows

        name = f"{args.bins} bins"
        log_rows("tokenyard-allocation-paper", name, {}, "table_1.json", rows, figures)
    return rows


def print_readings(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print every row beside what the paper prints."""
    table = Table(title="mean ± standard deviation over seeds; one row per policy and reading")
    measures = (*MEASURES[:4], "precision", "recall", "F1", "regret", "AUC")
    for column in ("reading", "policy", *measures):
        table.add_column(column, no_wrap=True)
    table.add_column("paper: abstract; Table 1")
    for row in rows:
        cells = [f"{row[key]:.3f}±{row[f'{key}_std']:.3f}" for key in MEASURES]
        printed = "; ".join(ALLOCATION_PRINTED.get(row["policy"], ()))
        table.add_row(row["reading"], row["policy"], *cells, printed)
    make_console(230).print(table)


def draw_fronts(args: Fronts) -> list[Row]:
    at_least_one("--weightings", args.weightings)
    scenario = load_allocation(args.scenario)
    regions = fronts.region_rows()
    print_rows("share of the range of load in which a kind is cheapest", regions)
    points, volumes = fronts.front_rows(scenario, args.weightings, args.seed)
    print_rows(f"{scenario.name}: fronts of goodput and dollars", volumes)
    constraints = fronts.constraint_rows(scenario, args.attainment, args.seed)
    print_rows(f"{scenario.name}: at least {args.attainment:.1%} attainment", constraints)
    if args.figures:
        drawn = {"regions": fronts.draw_regions(), "front": fronts.draw_front(points, scenario)}
        save_figures(drawn, args.figures)
    return [*regions, *points, *volumes, *constraints]


def print_rows(title: str, rows: Sequence[Row]) -> None:
    table = Table(title=title)
    keys = [key for key in rows[0] if key != "table"]
    for key in keys:
        table.add_column(key, no_wrap=True)
    for row in rows:
        values = [row[key] for key in keys]
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in values))
    make_console(160).print(table)


def study_regions(args: Torta) -> list[Row]:
    at_least_one("--streams", args.streams)
    rows: list[Row] = []
    names = tuple(args.policies.replace(" ", "").split(","))
    for case in studies.cases(args.study, load_regions(args.scenario), names, args.seed):
        for row in studies.run_case(case, args.streams, args.seed):
            rows.append({"study": args.study, **row})
            print(
                f"{row['case']}: {row['policy']} response {row['mean_response_s']:.2f} s, "
                f"p99 {row['p99_response_s']:.0f} s, total {row['total_cost']:.1f} $, overhead "
                f"{100 * float(row['overhead_fraction']):.2f} %, violations "
                f"{100 * float(row['deadline_miss_fraction']):.1f} %, dropped "
                f"{100 * float(row['dropped_fraction']):.2f} %, restarted "
                f"{row['restarted_tasks']:.0f}, migrated {row['migrated_tasks']:.0f}, rerouted "
                f"{row['rerouted_tasks']:.0f}, unaccounted {row['unaccounted_tasks']:.0f}",
                flush=True,
            )
        # A study takes long: what is done is kept.
        write_result(args.json, command_line(), args.seed, rows)
    return rows


def judge_regions(args: Layouts) -> list[Row]:
    scenario = load_regions(args.scenario).model_copy(update={"num_slots": args.slots})
    names = args.policies.split(",") if args.policies else tuple(REGION_BASELINES)
    runs = judge.run_layouts(scenario, names, args.layouts, args.seed)
    rows = judge.judge(scenario, runs, args.baseline)
    print(f"{scenario.name}: {args.layouts} layouts, {args.slots} slots, seed {args.seed}")
    for table in level_tables(PROBLEM, scenario, rows):
        make_console(170).print(table)
    make_console(230).print(difference_table(PROBLEM, scenario, rows[1:]))
    table = Table("policy", *judge.CLAIMS, title="p-values, Holm over all of them")
    for row in rows[1:]:
        cells = [f"{row[f'{key}_p_holm']:.3f}" for key in judge.CLAIMS]
        table.add_row(str(row["policy"]), *cells)
    make_console(170).print(table)
    return rows


def run(args: Args) -> list[Row]:
    if isinstance(args, Tables):
        return fill_tables(args)
    if isinstance(args, Allocation):
        return replicate_allocation(args)
    if isinstance(args, Fronts):
        return draw_fronts(args)
    if isinstance(args, Layouts):
        return judge_regions(args)
    return study_regions(args)


def main(args: Args) -> None:
    try:
        rows = run(args)
    except ValueError as error:
        sys.exit(f"paper: {error}")
    write_result(args.json, command_line(), getattr(args, "seed", None), rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
