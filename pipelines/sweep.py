"""Train policies in one Ray Tune sweep, compare them honestly, keep the best.

`python pipelines/sweep.py` trains for routing and for allocation; `routing:default` trains for one
of them, and `default:smoke` is the smallest of both. What is printed on stdout are the final
tables; progress and warnings go to stderr.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

# Ray and its workers read these when they start, so they are set before Ray is imported.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # Ray's newer display cannot be told what to show.
    "RAY_AIR_NEW_OUTPUT": "0",
    # MLflow has the curves: no TensorBoard files beside them.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # A snapshot after every second checkpoint is what makes a killed sweep resume where it was.
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}.items():
    os.environ.setdefault(_name, _value)

import tyro  # noqa: E402
from ray.tune import ResultGrid  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from serve_app.cluster import load_cluster  # noqa: E402
from tokenyard.evaluation import Map, difference, level, processes  # noqa: E402
from tokenyard.problem import Measure, Row  # noqa: E402
from tokenyard.promotion import PromotionVerdict  # noqa: E402
from tokenyard.provenance import ResultFile, command_line, write_result  # noqa: E402
from tokenyard.registry import CANDIDATE  # noqa: E402
from tokenyard.rl.trainable import Placement  # noqa: E402
from tokenyard.statistics.intervals import Interval  # noqa: E402
from tune_configs.experiment import RESOURCES, SCORE, Experiment  # noqa: E402
from tune_configs.sweep import (  # noqa: E402
    FinishedTrial,
    Outcome,
    Report,
    Sweep,
    finished_trials,
    judge,
    open_chain,
    record,
    record_chain,
    register_best,
    train,
)

DEFAULT_CLUSTER = "local_cpu"
"""What `make serve` serves."""


@dataclass(frozen=True)
class Args:
    """Train policies in one sweep, compare them, and register the best."""

    experiment: Annotated[str, tyro.conf.Positional] = "default:default"
    """MODULE:FUNCTION under tune_configs, or of an importable module of your own: an experiment, or
    a chain of several, each of another problem."""
    name: str | None = None
    """Folder of the sweep under the storage; by default the experiment and the time."""
    num_samples: int | None = None
    """How often each trial is repeated, with other seeds; for Optuna, how many trials in all."""
    seed: int = 0
    """First training seed; it also fixes the streams of the comparison."""
    storage: str = "runs"
    """Where sweeps are kept: a folder, or a URI such as s3://bucket/path. The MLflow store is
    mlflow.db in that folder, unless MLFLOW_TRACKING_URI names another."""
    resume: bool = False
    """Go on with the sweep of that --name; what it finished is kept."""
    budget: float = 1.0
    """Share of its environment steps that each trial is given; less to try an experiment out."""
    env_runners: int | None = None
    """Env-runner actors per trial, in place of the experiment's."""
    cpus_per_actor: float | None = None
    """CPUs that a trial's own process and each of its env runners reserve; by default half."""
    placement: Placement | None = None
    """Where a trial's actors go: on as few nodes as possible (PACK, the default), or on many."""
    concurrent: int | None = None
    """Most trials at once, in place of the experiment's."""
    max_failures: int | None = None
    """How often a trial is started again from its checkpoint; -1 where nodes come and go."""
    json: ResultFile | None = None
    """File for the results."""


def main(args: Args) -> None:
    if args.resume and args.name is None:
        sys.exit("error: --resume needs the --name of the sweep")
    name = args.name or f"{args.experiment.replace(':', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = command_line()
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        chain = open_chain(
            args.experiment, args.storage, name, args.seed, args.num_samples, args.resume,
            lambda experiment: fitted(experiment, args),
        )  # fmt: skip
        print(
            f"sweep {name}; to go on after an interruption: --resume --name {name}", file=sys.stderr
        )
        with redirect_stdout(sys.stderr):
            results = train(chain.sweeps, args.resume)
        # Its processes take a while to start, so all comparisons share them.
        with processes(os.cpu_count() or 1) as mapped:
            found = [
                conclude(console, sweep, result, command, mapped)
                for sweep, result in zip(chain.sweeps, results, strict=True)
            ]
    except ValueError as error:
        sys.exit(f"error: {error}")
    for one in found:
        if one is not None:
            print_outcome(console, one)
            told = serve_command(one, chain.client.tracking_uri, args.storage)
            console.print(f"serve it: {told}", soft_wrap=True)
    console.print(f"curves and tables: {chain.client.tracking_uri}", soft_wrap=True)
    finished = [one for one in found if one is not None]
    if len(chain.sweeps) > 1:
        record_chain(chain, [one.outcome for one in finished], command)
    if args.json is not None:
        write_json(args.json, command, chain.seed, finished)
    failed = None in found or any(result.errors for result in results)
    chain.client.set_terminated(chain.run_id, "FAILED" if failed else "FINISHED")
    sys.exit(1 if failed else 0)


@dataclass(frozen=True)
class Finished:
    """A sweep that has a best trial."""

    sweep: Sweep
    trials: list[FinishedTrial]
    report: Report
    outcome: Outcome


def conclude(
    console: Console, sweep: Sweep, results: ResultGrid, command: str, mapped: Map
) -> Finished | None:
    """Compare, print the tables, register and record; None: every trial failed."""
    for failed in results.errors:
        print(f"trial failed: {failed}", file=sys.stderr)
    trials = finished_trials(results, sweep.problem.load_artifact)
    if not trials:
        sweep.client.set_terminated(sweep.run_id, "FAILED")
        print(
            f"error: every trial of {sweep.problem.name} failed; error.txt in the trials' folders "
            "says why",
            file=sys.stderr,
        )
        return None
    report = judge(sweep, trials, mapped)
    print_report(console, sweep, trials, report)
    outcome = register_best(sweep, trials, report, mapped)
    record(sweep, trials, report, outcome, command)
    sweep.client.set_terminated(sweep.run_id, "FAILED" if results.errors else "FINISHED")
    return Finished(sweep, trials, report, outcome)


def write_json(path: Path, command: str, seed: int, found: list[Finished]) -> None:
    """Write the rows of all problems into one file."""
    rows: list[Row] = []
    baselines: list[Row] = []
    evaluation: list[Row] = []
    for one in found:
        problem: Row = {"problem": one.outcome.problem}
        labels = {trial.label for trial in one.trials}
        rows += one.outcome.trial_rows(one.trials, one.report)
        ranking = one.report.ranking.rows
        baselines += [problem | row for row in ranking if row["policy"] not in labels]
        evaluation += [problem | row for row in one.report.evaluation.rows]
    write_result(
        path,
        command,
        seed,
        rows,
        baselines=baselines,
        evaluation=evaluation,
        verdict=[row for one in found for row in one.outcome.rows],
        registrations=[
            {"problem": one.outcome.problem, **asdict(one.outcome.registration)} for one in found
        ],
    )


def fitted(experiment: Experiment, args: Args) -> Experiment:
    values = (args.env_runners, args.cpus_per_actor, args.placement)
    reserved = {k: v for k, v in zip(RESOURCES, values, strict=True) if v is not None}
    return experiment.fitted(reserved, args.concurrent, args.max_failures, args.budget)


Columns = Mapping[str, Callable[[Row], str]]
"""Headings of a printed table, and what stands under them."""


def columns(sweep: Sweep) -> Columns:
    """The score, what the problem puts first, and differences to the baseline."""

    def shown(measure: Measure) -> Columns:
        of_measure = {measure.heading: partial(level, measure=measure)}
        if not measure.delta:
            return of_measure
        heading = f"{measure.heading} vs {sweep.experiment.baseline}"
        return of_measure | {heading: partial(difference, measure=measure)}

    found: dict[str, Callable[[Row], str]] = {"score": lambda row: f"{row[SCORE]:.3f}"}
    measures = sweep.problem.measures(sweep.scenario)
    headline = sweep.problem.headline or [one.key for one in measures if one.delta]
    for measure in measures:
        if measure.key in headline:
            found |= shown(measure)
    return found


def print_report(
    console: Console, sweep: Sweep, trials: list[FinishedTrial], report: Report
) -> None:
    shown = columns(sweep)
    described = {trial.label: trial.described() for trial in trials}
    experiment = sweep.experiment
    title = (
        f"{experiment.scenario}: {len(trials)} trials and {len(experiment.baselines)} rules on "
        f"{len(report.ranking.streams)} validation streams"
    )
    table = _table(title, shown, "trial or rule", "env steps", "CPU s", "wall s")
    for row in report.ranking.rows:
        about = described.get(str(row["policy"]))
        steps = f"{about['env_steps']:,}" if about else "-"
        wall_s = f"{about['wall_s']:.0f}" if about else "-"
        cpu_s = f"{about['cpu_s']:.0f}" if about and about["cpu_s"] is not None else "-"
        style = "bold" if row["policy"] == report.best.label else "" if about else "dim"
        table.add_row(str(row["policy"]), steps, cpu_s, wall_s, *_cells(row, shown), style=style)
    console.print(table)
    if report.passed_over:
        names = ", ".join(report.passed_over)
        console.print(f"a better score, but they lose to a rule at the gate: {names}")
    title = f"the best on {experiment.evaluation_streams} fresh streams"
    fresh = _table(title, shown, "policy")
    for row in report.evaluation.rows:
        fresh.add_row(str(row["policy"]), *_cells(row, shown))
    console.print(fresh)


def print_outcome(console: Console, found: Finished) -> None:
    """Say what was registered, by how much it won or lost, and what that makes it."""
    made, best = found.outcome.registration, found.report.best
    console.print(
        f"best of {found.outcome.problem}: trainer {best.artifact.metadata.trainer}, trial "
        f"{best.label}, policy {made.sha256}, registered as {made.model} version {made.version}, "
        f"MLflow run {made.run_id}",
        soft_wrap=True,
    )
    if found.outcome.verdict is not None:
        console.print(verdict_table(found.sweep, found.outcome.verdict))
    console.print(found.outcome.sentence, soft_wrap=True)


def verdict_table(sweep: Sweep, verdict: PromotionVerdict) -> Table:
    """What the policy has over every rival, and where it loses at the gate."""
    streams = sweep.experiment.promotion_streams
    title = f"gain in score over its rivals on {streams} further validation streams"
    unit = f"gain, {sweep.problem.score.unit} \\[95 % interval]"
    table = Table("rival", unit, "", "where it comes from", title=title)
    for gain in verdict.gains:
        won = "won" if gain.won else "not won"
        table.add_row(gain.rival, _interval(gain.interval), won, gain.source)
    for row in verdict.losses:
        table.add_row(f"{row['baseline']}, {row['part']}", "", "lost", "the gate")
    return table


def _interval(interval: Interval) -> str:
    return f"{interval.estimate:+.4g} \\[{interval.low:+.4g}, {interval.high:+.4g}]"


def serve_command(found: Finished, registry: str, storage: str) -> str:
    """The command that serves what was registered, by its alias."""
    problem, scenario = found.outcome.problem, found.sweep.scenario.name
    candidate = found.outcome.registration.alias == CANDIDATE
    if served_scenarios().get(problem) == scenario:
        where = "" if storage == Args.storage else f" STORAGE={shlex.quote(storage)}"
        return f"make serve{where}{' POLICY=candidate' if candidate else ''}"
    asked = f"--registry {registry}{' --policy candidate' if candidate else ''}"
    deploy = "python pipelines/deploy.py --cluster"
    if problem == "routing":
        return f"{deploy} none --scenario {scenario} {asked}"
    return f"{deploy} FILE {asked}, with a file that names {problem} scenario {scenario}"


def served_scenarios() -> dict[str, str]:
    """Scenarios of what `make serve` serves, by problem."""
    cluster = load_cluster(DEFAULT_CLUSTER)
    served = {"routing": cluster.scenario}
    if cluster.allocation is not None:
        served["allocation"] = cluster.allocation.scenario
    return served


def _table(title: str, columns: Columns, *first: str) -> Table:
    table = Table(title=title, caption="changes with their 95 % intervals")
    for column in (*first, *columns):
        table.add_column(column, justify="left" if column == first[0] else "right")
    return table


def _cells(row: Row, columns: Columns) -> list[str]:
    return [show(row) for show in columns.values()]


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
