"""Train policies in one Ray Tune sweep, compare them honestly, keep the best.

`python pipelines/sweep.py` runs the default experiment; `routing:smoke` is the smallest. What is
printed on stdout are the final tables; progress and warnings go to stderr.
"""

from __future__ import annotations

import os
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
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from serve_app.cluster import load_cluster  # noqa: E402
from tokenyard.evaluation import difference, level  # noqa: E402
from tokenyard.problem import Measure, Row  # noqa: E402
from tokenyard.provenance import command_line, write_result  # noqa: E402
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
    open_sweep,
    record,
    register_best,
    train,
)

DEFAULT_CLUSTER = "local_cpu"
"""What `make serve` serves."""


@dataclass(frozen=True)
class Args:
    """Train policies in one sweep, compare them, and register the best."""

    experiment: Annotated[str, tyro.conf.Positional] = "routing:default"
    """MODULE:FUNCTION under tune_configs, or of an importable module of your own."""
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
    json: Path | None = None
    """File for the results."""


def main(args: Args) -> None:
    if args.resume and args.name is None:
        sys.exit("error: --resume needs the --name of the sweep")
    name = args.name or f"{args.experiment.replace(':', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = command_line()
    try:
        sweep = open_sweep(
            args.experiment, args.storage, name, args.seed, args.num_samples, args.resume,
            lambda experiment: fitted(experiment, args),
        )  # fmt: skip
        print(
            f"sweep {name}; to go on after an interruption: --resume --name {name}", file=sys.stderr
        )
        with redirect_stdout(sys.stderr):
            results = train(sweep, args.resume)
    except ValueError as error:
        sys.exit(f"error: {error}")
    for failed in results.errors:
        print(f"trial failed: {failed}", file=sys.stderr)
    trials = finished_trials(results, sweep.problem.load_artifact)
    if not trials:
        sweep.client.set_terminated(sweep.run_id, "FAILED")
        sys.exit("error: every trial failed; error.txt in the trials' folders says why")
    report = judge(sweep, trials)
    console = Console(width=None if sys.stdout.isatty() else 160)
    print_report(console, sweep, trials, report)
    try:
        outcome = register_best(sweep, trials, report)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print_outcome(console, sweep, report.best, outcome)
    console.print(f"serve it: {serve_command(sweep, outcome, args.storage)}", soft_wrap=True)
    console.print(f"curves and tables: {sweep.client.tracking_uri}", soft_wrap=True)
    record(sweep, trials, report, outcome, command)
    if args.json is not None:
        labels = {trial.label for trial in trials}
        write_result(
            args.json,
            command,
            sweep.seed,
            outcome.trial_rows(sweep.problem.name, trials, report),
            baselines=[row for row in report.ranking.rows if row["policy"] not in labels],
            evaluation=report.evaluation.rows,
            registration=asdict(outcome.registration),
            verdict=[] if outcome.verdict is None else outcome.verdict.rows,
        )
    sweep.client.set_terminated(sweep.run_id, "FAILED" if results.errors else "FINISHED")
    sys.exit(1 if results.errors else 0)


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
    table = _table(title, shown, "trial or rule", "env steps", "wall s")
    for row in report.ranking.rows:
        about = described.get(str(row["policy"]))
        steps = f"{about['env_steps']:,}" if about else "-"
        wall_s = f"{about['wall_s']:.0f}" if about else "-"
        style = "bold" if row["policy"] == report.best.label else "" if about else "dim"
        table.add_row(str(row["policy"]), steps, wall_s, *_cells(row, shown), style=style)
    console.print(table)
    title = f"the best on {experiment.evaluation_streams} fresh streams"
    fresh = _table(title, shown, "policy")
    for row in report.evaluation.rows:
        fresh.add_row(str(row["policy"]), *_cells(row, shown))
    console.print(fresh)


def print_outcome(console: Console, sweep: Sweep, best: FinishedTrial, outcome: Outcome) -> None:
    """Say what was registered, by how much it won or lost, and what that makes it."""
    made = outcome.registration
    console.print(
        f"best: trainer {best.artifact.metadata.trainer}, trial {best.label}, policy "
        f"{made.sha256}, registered as {made.model} version {made.version}, MLflow run "
        f"{made.run_id}",
        soft_wrap=True,
    )
    if outcome.verdict is not None:
        unit = sweep.problem.score.unit
        streams = sweep.experiment.promotion_streams
        title = f"gain in score over its rivals on {streams} further validation streams"
        table = Table("rival", "gain \\[95 % interval]", "", "where it comes from", title=title)
        for gain in outcome.verdict.gains:
            won = "won" if gain.won else "not won"
            table.add_row(gain.rival, f"{_interval(gain.interval)} {unit}", won, gain.source)
        for row in outcome.verdict.losses:
            table.add_row(f"{row['baseline']}, {row['part']}", "", "lost", "the gate")
        console.print(table)
    console.print(outcome.sentence, soft_wrap=True)


def _interval(interval: Interval) -> str:
    return f"{interval.estimate:+.4g} \\[{interval.low:+.4g}, {interval.high:+.4g}]"


def serve_command(sweep: Sweep, outcome: Outcome, storage: str) -> str:
    """The command that serves what was registered, by its alias."""
    candidate = outcome.registration.alias == CANDIDATE
    default = load_cluster(DEFAULT_CLUSTER)
    served = {"routing": default.scenario}
    if default.allocation is not None:
        served["allocation"] = default.allocation.scenario
    scenario = sweep.scenario.name
    if served.get(sweep.problem.name) == scenario:
        where = "" if storage == Args.storage else f" STORAGE={storage}"
        return f"make serve{where}{' POLICY=candidate' if candidate else ''}"
    asked = " --policy candidate" if candidate else ""
    registry = f"--registry {sweep.client.tracking_uri}"
    if sweep.problem.name == "routing":
        return f"python pipelines/deploy.py --cluster none --scenario {scenario} {registry}{asked}"
    return (
        f"python pipelines/deploy.py --cluster FILE {registry}{asked}, with a cluster file that "
        f"names {sweep.problem.name} scenario {scenario}"
    )


def _table(title: str, columns: Columns, *first: str) -> Table:
    table = Table(title=title, caption="changes with their 95 % intervals")
    for column in (*first, *columns):
        table.add_column(column, justify="left" if column == first[0] else "right")
    return table


def _cells(row: Row, columns: Columns) -> list[str]:
    return [show(row) for show in columns.values()]


if __name__ == "__main__":
    main(tyro.cli(Args))
