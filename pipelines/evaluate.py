"""Evaluate routing, allocation or regional policies: the tables of docs/metrics.md, and figures.

    python pipelines/evaluate.py --scenario poisson_085 --policies sed,sed_dump,champion
    python pipelines/evaluate.py --suite routing --policies sed,champion --json results.json
    python pipelines/evaluate.py --suite fleet --policies round_robin,sed,marginal_delay
    python pipelines/evaluate.py --suite regimes --policies sed,sed_dump,champion --baseline best
    python pipelines/evaluate.py --scenario conversation --trace my_log.csv --streams 3
    python pipelines/evaluate.py --suite allocation
    python pipelines/evaluate.py --suite regions
    python pipelines/evaluate.py --scenario agentic_sessions_mixed@36 --policies index,thunderagent

A trace has the columns arrival_s (seconds), context_tokens and generated_tokens, or is one of
Azure's, Mooncake's, Bailian's or BurstGPT's (docs/workloads.md).
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal

import tyro
from rich.console import Console

from tokenyard import evaluation
from tokenyard.artifact import RegistryLookup
from tokenyard.config import at_least_one
from tokenyard.problem import A, Candidate, D, Problem, R, Row, S, StreamOptions, find_problem
from tokenyard.provenance import ResultFile, command_line, make_console, write_result
from tokenyard.registry import mlflow_lookup
from tokenyard.routing.policy_file import PolicyFileError
from tokenyard.workload.trace_options import TraceOptions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEST = "best"
MOST_LOAD = 2.0


@dataclass(frozen=True)
class Args(TraceOptions):
    """Evaluate policies on equal streams, with paired differences to a baseline."""

    scenario: str | None = None
    """Name or YAML path."""
    suite: str | None = None
    """Several scenarios in one run, in place of one: paper, routing, fleet, regimes, sessions,
    allocation or regions."""
    trace: Path | None = None
    """Replay this recorded trace, a file or a published one by name, through the scenario's
    servers, in windows."""
    policies: str | None = None
    """Baselines, bounds, champion or policy files (.npz, .py), separated by commas; by default
    every baseline whose signals the servers have (docs/rules.md) and the champion, of allocation
    the bounds too."""
    baseline: str | None = None
    """Policy that differences are taken to; it is run even when it is not named. By default sed,
    of allocation autoscaler_tuned, of regions prox_ot_forecast_live_cost. `best`: of the rules that
    are named, the one with the best score in each scenario."""
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
    load: float | None = None
    """Offered load that streams or the trace are scaled to (0.8: four fifths of what the servers
    can do), in place of the scenario's."""
    reward: bool = False
    """Measure the scenario's reward of routing policies too, which takes twice to ten times as
    long; policies are not compared by it."""
    registry: str | None = None
    """MLflow registry of champions (a URI); MLFLOW_TRACKING_URI serves in its place."""
    jobs: int = 1
    """Processes; policies are divided between them."""
    json: ResultFile | None = None
    """Write the result rows to this file."""
    figures: Path | None = None
    """Draw the figures into this folder, one subfolder per scenario."""
    mlflow: bool = False
    """Log rows and figures as a run to MLFLOW_TRACKING_URI, or to ./mlflow.db."""


@dataclass(frozen=True)
class EvaluationPlan(Generic[S, D, R]):
    """Everything that one scenario's evaluation needs, found and checked."""

    scenario: S
    streams: D
    candidates: list[Candidate[S, D, R]]
    baseline: str
    notes: list[str]


def plan_all(args: Args, problem: Problem[S, A, D, R]) -> list[EvaluationPlan[S, D, R]]:
    """Resolve every name and read every file, so that no mistake shows after a long run."""
    names = problem.suites[args.suite] if args.suite else [str(args.scenario)]
    uri = args.registry or os.environ.get("MLFLOW_TRACKING_URI")
    registry = mlflow_lookup(uri) if uri else None
    scenarios = [problem.load_scenario(name) for name in names]
    if not args.reward:
        scenarios = [problem.without_reward(scenario) for scenario in scenarios]
    return [plan(args, problem, scenario, registry) for scenario in scenarios]


def plan(
    args: Args, problem: Problem[S, A, D, R], scenario: S, registry: RegistryLookup | None
) -> EvaluationPlan[S, D, R]:
    baseline = args.baseline or problem.default_baseline
    wanted = args.policies.split(",") if args.policies else problem.policies_for(scenario)
    names = dict.fromkeys(name.strip() for name in [*wanted, baseline] if name.strip())
    by_name = {name: problem.candidate(scenario, name, registry) for name in names if name != BEST}
    candidates = _told_apart(by_name)
    if baseline == BEST and not any(candidate.is_rule for candidate in candidates):
        raise ValueError(f"--baseline {BEST} needs a rule among --policies {args.policies}")
    count = problem.default_streams if args.streams is None else args.streams
    at_least_one("--streams", count)
    at_least_one("--jobs", args.jobs)
    if args.load is not None and not 0 < args.load < MOST_LOAD:
        raise ValueError(f"--load {args.load:g} must lie between 0 and {MOST_LOAD:g}")
    options = StreamOptions(
        count, args.seed, args.source, args.trace, args.native_time, args, args.load
    )
    streams, notes = problem.evaluation_streams(scenario, options)
    notes += [
        f"{candidate.name}: {candidate.source}" for candidate in candidates if not candidate.is_rule
    ]
    if baseline != BEST:
        baseline = candidates[list(by_name).index(baseline.strip())].name
    return EvaluationPlan(scenario, streams, candidates, baseline, notes)


def _told_apart(by_name: Mapping[str, Candidate[S, D, R]]) -> list[Candidate[S, D, R]]:
    """Call candidates of one name, such as files of several folders, as they were asked for."""
    known = Counter(candidate.name for candidate in by_name.values())
    return [
        candidate if known[candidate.name] == 1 else replace(candidate, name=name)
        for name, candidate in by_name.items()
    ]


def evaluate(
    args: Args, problem: Problem[S, A, D, R], planned: EvaluationPlan[S, D, R], console: Console
) -> tuple[list[Row], dict[str, Figure]]:
    """Run one scenario and print its tables."""
    scenario, streams = planned.scenario, planned.streams
    with evaluation.processes(args.jobs) as mapped:
        runs = evaluation.run_candidates(planned.candidates, scenario, streams, args.seed, mapped)
    baseline = planned.baseline
    if baseline == BEST:
        baseline = evaluation.best_rule(problem, scenario, planned.candidates, runs)
    rows = evaluation.compare(problem, scenario, streams, runs, baseline)
    beside = evaluation.margins(problem, scenario, streams, runs)
    console.print(f"\n[bold]{scenario.name}[/]: {scenario.description}")
    for line in (streams.described, *planned.notes):
        console.print(line)
    for table in evaluation.level_tables(problem, scenario, rows):
        console.print(table)
    overload = problem.overload(scenario, streams)
    if overload is not None:
        rows, beside = [_without_differences(row) for row in rows], []
        console.print(
            f"offered load {overload:.1f}: the queue only grows; use --load 0.8. Differences are "
            "not shown: they would tell how long the streams are."
        )
    elif any(row["policy"] != baseline for row in rows):
        console.print(evaluation.difference_table(problem, scenario, rows))
    if beside:
        console.print(evaluation.difference_table(problem, scenario, beside, "baseline"))
    figures: dict[str, Figure] = {}
    if args.figures is not None or args.mlflow:
        drawn = evaluation.figures_of(problem, scenario, streams, runs, rows)
        figures = {f"{scenario.name}/{name}": drawn[name] for name in drawn}
    rows += [row for row in beside if row["baseline"] != baseline]
    load = streams.offered_load
    return [row if load is None else {**row, "offered_load": load} for row in rows], figures


def _without_differences(row: Row) -> Row:
    return {key: math.nan if key.startswith("delta_") else value for key, value in row.items()}


def main(args: Args) -> None:
    try:
        problem = find_problem(args.scenario, args.suite)
        plans = plan_all(args, problem)
    except (ValueError, OSError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    console = make_console(170)
    rows: list[Row] = []
    figures: dict[str, Figure] = {}
    while plans:
        try:
            new_rows, drawn = evaluate(args, problem, plans.pop(0), console)
        except PolicyFileError as error:
            print(f"evaluate: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        rows += new_rows
        figures |= drawn
        # A suite takes minutes: what is done is kept.
        if args.json:
            write_result(args.json, command_line(), args.seed, rows)
    if args.figures:
        from tokenyard.figures import save_figures

        save_figures(figures, args.figures)
    if args.mlflow:
        # MLflow takes seconds to import, and most evaluations do without it.
        from tune_configs.mlflow_log import log_rows

        experiment, name = "tokenyard-evaluation", args.suite or str(args.scenario)
        where = log_rows(experiment, name, asdict(args), "evaluation.json", rows, figures)
        print(f"logged to {where}", file=sys.stderr)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
