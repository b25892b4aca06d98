"""Evaluate routing, allocation or regional policies: the tables of docs/metrics.md, and figures.

python pipelines/evaluate.py --scenario poisson_085 --policies sed,sed_dump,champion
python pipelines/evaluate.py --suite routing --policies sed,champion --json results.json
python pipelines/evaluate.py --suite fleet --policies round_robin,sed,marginal_delay
python pipelines/evaluate.py --suite regimes --policies sed,sed_dump,generic --baseline best
python pipelines/evaluate.py --scenario conversation --trace my_log.csv --streams 3
python pipelines/evaluate.py --suite allocation
python pipelines/evaluate.py --suite regions
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal

import allocation_report
import regions_report
import tyro
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from serve_app.registry import mlflow_lookup
from tokenyard.artifact import RegistryLookup
from tokenyard.candidates import Candidate, resolve_candidate, run_candidates
from tokenyard.evaluation import Row, Run, compare, mean_summary
from tokenyard.figures import draw_evaluation, save_figures
from tokenyard.policies import BASELINES
from tokenyard.provenance import write_result
from tokenyard.scenario import Scenario, load_scenario
from tokenyard.sim.streams import (
    StreamSet,
    StreamSource,
    held_out_streams,
    synthetic_streams,
    trace_streams,
)
from tokenyard.suites import SUITES, SuiteName
from tokenyard.workload.readers import read_trace

BEST = "best"
WIDTH = 170
"""Columns of a table that is not printed to a terminal."""


@dataclass(frozen=True)
class Args:
    """Evaluate routing policies on equal streams, with paired differences to a baseline."""

    scenario: str | None = None
    """Name or YAML path."""
    suite: SuiteName | Literal["allocation", "regions"] | None = None
    """Several scenarios in one run, in place of one."""
    trace: Path | None = None
    """Replay this recorded trace through the scenario's servers, in windows."""
    policies: str | None = None
    """Baselines, bounds, champion, generic or policy files (.npz), separated by commas; by default
    every baseline and the champion, of allocation the bounds too."""
    baseline: str | None = None
    """Policy that differences are taken to; it is run even when it is not named. By default sed,
    of allocation autoscaler_tuned, of regions skylb. `best`: of the rules that are named, the one
    with the best score in each scenario of routing."""
    streams: int | None = None
    """Independent synthetic streams, or windows of the trace (30 by default); of allocation and
    regions draws of the demand (5)."""
    seed: int = 2026
    """Of the streams and of the policies' own randomness."""
    source: Literal["synthetic", "held-out"] | None = None
    """Synthetic streams, or the scenario's recorded test part; by default the latter where the
    scenario names one and its file is found."""
    native_time: bool = False
    """Keep the trace's recorded time instead of scaling it to the scenario's load."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """Whether a malformed row of the trace stops the run, or is left out and counted."""
    registry: str | None = None
    """MLflow registry of champions (a URI); MLFLOW_TRACKING_URI serves in its place."""
    jobs: int = 1
    """Processes; policies are divided between them."""
    json: Path | None = None
    """Write the result rows to this file."""
    figures: Path | None = None
    """Draw the figures into this folder, one subfolder per scenario."""
    mlflow: bool = False
    """Log rows and figures as a run to MLFLOW_TRACKING_URI, or to ./mlflow.db."""


@dataclass(frozen=True)
class Plan:
    """Everything that one scenario's evaluation needs, found and checked."""

    scenario: Scenario
    streams: StreamSet
    candidates: list[Candidate]
    notes: list[str]
    credit: str
    """Where the traffic comes from, printed into every figure."""


def plan_all(args: Args) -> list[Plan]:
    """Resolve every name and read every file, so that no mistake shows after a long run."""
    if (args.scenario is None) == (args.suite is None):
        raise ValueError("give exactly one of --scenario and --suite")
    if args.streams < 1:
        raise ValueError(f"--streams {args.streams} must be at least 1")
    names = SUITES[args.suite] if args.suite else (str(args.scenario),)
    uri = args.registry or os.environ.get("MLFLOW_TRACKING_URI")
    registry = mlflow_lookup(uri) if uri else None
    return [plan(args, load_scenario(name), registry) for name in names]


def plan(args: Args, scenario: Scenario, registry: RegistryLookup | None) -> Plan:
    source = StreamSource(scenario)
    streams, notes = find_streams(args, source)
    wanted = [name.strip() for name in args.policies.split(",") if name.strip()]
    if args.baseline == BEST and not set(wanted) & set(BASELINES):
        raise ValueError(f"--baseline {BEST} needs a rule among --policies {args.policies}")
    names = dict.fromkeys([*wanted, *([args.baseline] if args.baseline != BEST else [])])
    candidates = [resolve_candidate(name, scenario, registry) for name in names]
    notes.append(f"output length known to the router: {scenario.output_length}")
    notes += [f"{c.name}: {c.source}" for c in candidates if c.source != "baseline"]
    credit = f"Traffic: {streams.origin}"
    if args.trace is None:
        credit += f"\nWorkload model fitted to {source.model.provenance}"
    return Plan(scenario, streams, candidates, notes, credit)


def find_streams(args: Args, source: StreamSource) -> tuple[StreamSet, list[str]]:
    """Return the streams to evaluate on, and what is worth knowing about them."""
    if args.trace is not None:
        trace, skipped = read_trace(args.trace, args.on_bad_row)
        streams = trace_streams(source, trace, args.streams, args.native_time)
        return streams, [f"trace {args.trace}: {skipped} malformed rows skipped"]
    held_out = None if args.source == "synthetic" else held_out_streams(source)
    if held_out is not None:
        return held_out, ["intervals: block bootstrap over the requests of one recorded stream"]
    missing = "no recorded test part of this scenario was found (TOKENYARD_DATA)"
    if args.source == "held-out":
        raise ValueError(f"--source held-out: {missing}")
    notes = (
        [] if source.scenario.held_out_trace is None or args.source else [f"synthetic: {missing}"]
    )
    return synthetic_streams(source, args.streams, args.seed), notes


def best_rule(scenario: Scenario, runs: Mapping[str, Sequence[Run]]) -> str:
    """Name the rule with the best mean score: a choice that no rule could make beforehand."""
    rules = [name for name in runs if name in BASELINES]
    return max(rules, key=lambda name: mean_summary(scenario, runs[name])["score"])


def print_tables(console: Console, plan: Plan, rows: list[Row], baseline: str) -> None:
    num_streams, length = len(plan.streams.requests), len(plan.streams.requests[0])
    console.print(f"\n[bold]{plan.scenario.name}[/]: {plan.scenario.description}")
    console.print(f"{num_streams} x {length} requests, {plan.streams.origin}")
    for note in plan.notes:
        console.print(note)
    if plan.scenario.fleet is None:
        console.print(levels_table(rows, plan.scenario))
    else:
        console.print(fleet_table(rows))
        if any(key.startswith("attained_tenant_") for key in rows[0]) or (
            len(plan.scenario.fleet.classes) > 1
        ):
            console.print(attainment_table(rows))
    console.print(differences_table(rows, baseline))


def fleet_table(rows: list[Row]) -> Table:
    """Lay out what matters of replicas that batch."""
    table = _table(
        "Means over streams ± 95 % interval; missed: not all that the class is promised",
        ["mean s", "p99 s", "ttft s", "p99 ttft", "p99 tpot ms", "p99 itl ms", "good/s", "missed %",
         "drop %", "retry %", "hit %", "kv %", "preempt", "waste %", "J/token"],
    )  # fmt: skip
    for row in rows:
        table.add_row(
            str(row["policy"]),
            _with_half_width(row, "mean_response_s", 1, ".2f"),
            _with_half_width(row, "p99_response_s", 1, ".1f"),
            f"{row['mean_ttft_s']:.2f}",
            f"{row['p99_ttft_s']:.2f}",
            f"{1000 * float(row['p99_tpot_s']):.0f}",
            f"{1000 * float(row['p99_itl_s']):.0f}",
            f"{row['goodput_per_s']:.2f}",
            _with_half_width(row, "slo_violation_fraction", 100, ".1f"),
            _percent(row, "dropped_fraction"),
            _percent(row, "retried_fraction"),
            _percent(row, "prefix_hit_fraction"),
            _percent(row, "kv_used_fraction"),
            f"{row['preemptions_per_request']:.2f}",
            _percent(row, "wasted_tokens_fraction"),
            f"{row['energy_j_per_token']:.2f}",
        )
    return table


def attainment_table(rows: list[Row]) -> Table:
    """Lay out how every class and tenant fared."""
    keys = [key for key in rows[0] if key.startswith("attained_")]
    gaps = [key for key in rows[0] if "service_gap" in key]
    names = [key.removeprefix("attained_").removesuffix("_fraction") for key in keys]
    titles = [f"{name.replace('_', ' ')} %" for name in names]
    titles += ["gap tokens/s", "largest gap"][: len(gaps)]
    table = _table("Requests that got all they were promised, by class and tenant", titles)
    for row in rows:
        cells = [_percent(row, key) for key in keys] + [f"{float(row[key]):.0f}" for key in gaps]
        table.add_row(str(row["policy"]), *cells)
    return table


def _percent(row: Row, key: str) -> str:
    return f"{100 * float(row[key]):.1f}"


def levels_table(rows: list[Row], scenario: Scenario) -> Table:
    """Lay out the columns of the paper's tables, and what they leave out."""
    table = _table(
        f"Means over streams ± 95 % interval; late: over {scenario.slo_response_s:g} s",
        ["reward", "mean s", "queue", "late %", "p50 s", "p95 s", "p99 s", "good/s", "drop %"],
    )
    table.add_column("share %", justify="right", no_wrap=True)
    for row in rows:
        shares = [row[f"share_server_{i}_fraction"] for i in range(scenario.num_servers)]
        table.add_row(
            str(row["policy"]),
            _with_half_width(row, "reward", 1, ".0f"),
            _with_half_width(row, "mean_response_s", 1, ".3f"),
            _with_half_width(row, "mean_queue_length", 1, ".2f"),
            _with_half_width(row, "slo_violation_fraction", 100, ".1f"),
            f"{row['p50_response_s']:.2f}",
            f"{row['p95_response_s']:.2f}",
            _with_half_width(row, "p99_response_s", 1, ".2f"),
            f"{row['goodput_per_s']:.2f}",
            f"{100 * float(row['dropped_fraction']):.1f}",
            "/".join(f"{100 * float(share):.0f}" for share in shares),
        )
    return table


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _with_half_width(row: Row, key: str, factor: float, form: str) -> str:
    half = (float(row[f"{key}_ci_high"]) - float(row[f"{key}_ci_low"])) / 2
    value = f"{factor * float(row[key]):{form}}"
    return value if math.isnan(half) else f"{value} ±{factor * half:{form}}"


def differences_table(rows: list[Row], baseline: str) -> Table:
    """Lay out the paired differences with their intervals."""
    table = _table(
        f"Paired differences to {baseline} [95 % interval]",
        ["mean response %", "p99 response %", "late or missed, points"],
    )
    for row in rows:
        if row["policy"] == baseline:
            continue
        table.add_row(
            str(row["policy"]),
            _difference(row, "delta_mean_fraction", "delta_mean"),
            _difference(row, "delta_p99_fraction", "delta_p99"),
            _difference(row, "delta_slo_violation", "delta_slo"),
        )
    return table


def _difference(row: Row, key: str, prefix: str) -> str:
    values = [100 * float(row[k]) for k in (key, f"{prefix}_ci_low", f"{prefix}_ci_high")]
    interval = " \\[{:+.1f}, {:+.1f}]".format(*values[1:])
    return f"{values[0]:+.1f}" + ("" if math.isnan(values[1]) else interval)


def log_to_mlflow(args: Args, rows: list[Row], figures: dict[str, Figure]) -> None:
    """Leave one run with the rows as a table and the figures as images."""
    # MLflow takes seconds to import, and most evaluations do without it.
    from mlflow import MlflowClient

    from tune_configs.mlflow_log import open_experiment, tracking_uri

    client = MlflowClient(tracking_uri(Path()))
    experiment = open_experiment(client, "tokenyard-evaluation", Path())
    run = client.create_run(experiment, run_name=args.suite or str(args.scenario))
    for name, value in asdict(args).items():
        if value is not None:
            client.log_param(run.info.run_id, name, str(value))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = {key: [row.get(key) for row in rows] for key in columns}
    client.log_table(run.info.run_id, table, "evaluation.json")
    for name, figure in figures.items():
        client.log_figure(run.info.run_id, figure, f"figures/{name}.png")
    client.set_terminated(run.info.run_id)
    print(f"logged to {client.tracking_uri}, run {run.info.run_id}", file=sys.stderr)


def with_defaults(args: Args, policies: Iterable[str], baseline: str, streams: int) -> Args:
    """Fill in what was left open."""
    return replace(
        args,
        policies=",".join(policies) if args.policies is None else args.policies,
        baseline=args.baseline or baseline,
        streams=streams if args.streams is None else args.streams,
    )


def main_other(report: ModuleType, args: Args) -> None:
    """Evaluate a problem that is not routing; its report says how."""
    if args.trace or args.source or args.native_time or args.figures:
        print("evaluate: --trace, --source, --native-time and --figures are for routing; the demand"
              " of other scenarios is in their files", file=sys.stderr)  # fmt: skip
        raise SystemExit(2)
    args = with_defaults(
        args, report.DEFAULT_POLICIES, report.DEFAULT_BASELINE, report.DEFAULT_STREAMS
    )
    names = report.SUITE if args.suite else (str(args.scenario),)
    wanted = [name.strip() for name in str(args.policies).split(",") if name.strip()]
    uri = args.registry or os.environ.get("MLFLOW_TRACKING_URI")
    try:
        if args.streams is None or args.streams < 1:
            raise ValueError(f"--streams {args.streams} must be at least 1")
        policies = list(dict.fromkeys([*wanted, args.baseline]))
        prepared = report.prepare(list(names), policies, mlflow_lookup(uri) if uri else None)
    except ValueError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        raise SystemExit(2) from None

    def keep(rows: list[Row]) -> None:
        # A suite takes minutes: what is done is kept.
        if args.json:
            write_result(args.json, shlex.join(sys.argv), args.seed, rows)

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    rows = report.evaluate_all(prepared, args.baseline, args.streams, args.seed, console, keep)
    if args.mlflow:
        log_to_mlflow(args, rows, {})


def main(args: Args) -> None:
    for report, is_its_own in (
        (allocation_report, allocation_report.is_allocation),
        (regions_report, regions_report.is_regions),
    ):
        if is_its_own(args.scenario, args.suite):
            main_other(report, args)
            return
    args = with_defaults(args, [*BASELINES, "champion"], "sed", 30)
    try:
        plans = plan_all(args)
    except ValueError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    rows: list[Row] = []
    figures: dict[str, Figure] = {}
    draw = args.figures is not None or args.mlflow
    for one in plans:
        runs = run_candidates(one.candidates, one.scenario, one.streams, args.seed, args.jobs)
        baseline = best_rule(one.scenario, runs) if args.baseline == BEST else args.baseline
        compared = compare(one.scenario, runs, baseline, one.streams.bootstrap)
        compared = [{**row, "baseline": baseline} for row in compared]
        print_tables(console, one, compared, baseline)
        rows += compared
        if draw:
            drawn = draw_evaluation(one.scenario, runs, compared, one.credit)
            figures |= {f"{one.scenario.name}/{name}": drawn[name] for name in drawn}
    if args.figures:
        save_figures(figures, args.figures)
    if args.json:
        write_result(args.json, shlex.join(sys.argv), args.seed, rows)
    if args.mlflow:
        log_to_mlflow(args, rows, figures)


if __name__ == "__main__":
    main(tyro.cli(Args))
