"""Train policies in one Ray Tune sweep, compare them honestly, keep the best.

`python pipelines/sweep.py` trains for routing and for allocation; `routing:default` trains for one
of them, and `default:smoke` is the smallest of both. What is printed on stdout are the final
tables; progress and warnings go to stderr.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

# Ray and its workers read these when they start, so they are set before Ray is imported.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # Ray's newer display takes no reporter of ours (tune_configs/progress.py).
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
from rich.markup import escape  # noqa: E402
from rich.table import Table  # noqa: E402

from serve_app.cluster import load_cluster  # noqa: E402
from tokenyard.evaluation import SCORE, Map, processes  # noqa: E402
from tokenyard.problem import Row  # noqa: E402
from tokenyard.promotion import PromotionVerdict  # noqa: E402
from tokenyard.provenance import ResultFile, command_line, write_result  # noqa: E402
from tokenyard.registry import CANDIDATE  # noqa: E402
from tokenyard.rl.trainable import Placement  # noqa: E402
from tune_configs.experiment import RESOURCES, Experiment  # noqa: E402
from tune_configs.mlflow_log import address, run_page  # noqa: E402
from tune_configs.record import Finished, record, record_chain  # noqa: E402
from tune_configs.sweep import (  # noqa: E402
    Outcome,
    Sweep,
    finished_trials,
    judge,
    open_chain,
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
    a chain of several, each of another problem. @SCENARIO after it trains for that one instead."""
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
    words = re.sub(r"[^\w.-]+", "-", args.experiment)
    name = args.name or f"{words}-{time.strftime('%Y%m%d-%H%M%S')}"
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
        # Worker processes start slowly, so all comparisons share them.
        with processes(os.cpu_count() or 1) as mapped:
            concluded = [
                conclude(console, sweep, result, command, mapped, args.storage)
                for sweep, result in zip(chain.sweeps, results, strict=True)
            ]
    except ValueError as error:
        sys.exit(f"error: {error}")
    finished = [sweep for sweep in concluded if sweep is not None]
    for sweep in finished:
        print_outcome(console, sweep)
        console.print(f"serve it: {sweep.next_command}", soft_wrap=True)
    page = address(chain.client) + run_page(chain.client, chain.run_id)
    make = f"make mlflow{make_storage(args.storage)}, then "
    first = "" if page.startswith(chain.client.tracking_uri) else make
    console.print(f"see it: {first}{page}", soft_wrap=True)
    if len(chain.sweeps) > 1:
        record_chain(chain, finished, command)
    if args.json is not None:
        write_json(args.json, command, chain.seed, finished)
    failed = None in concluded or any(result.errors for result in results)
    chain.client.set_terminated(chain.run_id, "FAILED" if failed else "FINISHED")
    sys.exit(1 if failed else 0)


def conclude(
    console: Console, sweep: Sweep, results: ResultGrid, command: str, mapped: Map, storage: str
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
    outcome = register_best(sweep, trials, report, mapped)
    served_by = serve_command(sweep, outcome, storage)
    finished = Finished(sweep, trials, report, outcome, served_by)
    print_report(console, finished)
    record(finished, command)
    sweep.client.set_terminated(sweep.run_id, "FAILED" if results.errors else "FINISHED")
    return finished


def write_json(path: Path, command: str, seed: int, finished: list[Finished]) -> None:
    """Write the rows of all problems into one file."""
    rows: list[Row] = []
    baselines: list[Row] = []
    evaluation: list[Row] = []
    for sweep in finished:
        problem: Row = {"problem": sweep.outcome.problem}
        labels = {trial.label for trial in sweep.trials}
        rows += sweep.outcome.trial_rows(sweep.trials, sweep.report)
        ranking = sweep.report.ranking.rows
        baselines += [problem | row for row in ranking if row["policy"] not in labels]
        evaluation += [problem | row for row in sweep.report.evaluation.rows]
    write_result(
        path,
        command,
        seed,
        rows,
        baselines=baselines,
        evaluation=evaluation,
        verdict=[row for sweep in finished for row in sweep.outcome.rows],
        registrations=[
            {"problem": sweep.outcome.problem, **asdict(sweep.outcome.registration)}
            for sweep in finished
        ],
    )


def fitted(experiment: Experiment, args: Args) -> Experiment:
    values = (args.env_runners, args.cpus_per_actor, args.placement)
    reserved = {k: v for k, v in zip(RESOURCES, values, strict=True) if v is not None}
    return experiment.fitted(reserved, args.concurrent, args.max_failures, args.budget)


def print_report(console: Console, finished: Finished) -> None:
    """Print how trials and rules rank, and how the best did on fresh streams."""
    experiment, report = finished.sweep.experiment, finished.report
    head, *lines = finished.table
    title = (
        f"{experiment.scenario}: ranking on {len(report.ranking.streams)} streams on which no "
        "checkpoint was chosen"
    )
    table = Table(title=title, caption="differences with their 95 % intervals")
    for column in head:
        table.add_column(column, justify="left" if column == head[0] else "right")
    styles = {finished.rule: "dim", report.best.label: "bold"}
    for line in lines:
        table.add_row(*map(escape, line), style=styles.get(line[0], ""))
    console.print(table)
    if report.passed_over:
        names = ", ".join(report.passed_over)
        console.print(f"a better score, but they lose to a rule at the gate: {names}")
    scores = ", ".join(f"{row['policy']} {row[SCORE]:.4g}" for row in report.evaluation.rows)
    console.print(f"score on {len(report.evaluation.streams)} fresh streams: {scores}")


def print_outcome(console: Console, finished: Finished) -> None:
    """Print what was registered, its gains and losses, and the verdict."""
    made, best = finished.outcome.registration, finished.report.best
    console.print(
        f"best of {finished.outcome.problem}: trainer {best.artifact.metadata.trainer}, trial "
        f"{best.label}, policy {made.sha256}, registered as {made.model} version {made.version}, "
        f"MLflow run {made.run_id}",
        soft_wrap=True,
    )
    if finished.outcome.verdict is not None:
        console.print(verdict_table(finished.sweep, finished.outcome.verdict))
    console.print(finished.outcome.sentence, soft_wrap=True)


def verdict_table(sweep: Sweep, verdict: PromotionVerdict) -> Table:
    """Tabulate the policy's gain over every rival, and its losses at the gate."""
    streams = sweep.experiment.promotion_streams
    title = f"gain in score over its rivals on {streams} further validation streams"
    unit = f"gain, {sweep.problem.score.unit} \\[95 % interval]"
    table = Table("rival", unit, "", "where it comes from", title=title)
    for gain in verdict.gains:
        won, of = "won" if gain.won else "not won", gain.interval
        interval = f"{of.estimate:+.4g} \\[{of.low:+.4g}, {of.high:+.4g}]"
        table.add_row(gain.rival, interval, won, gain.source)
    for row in verdict.losses:
        table.add_row(f"{row['baseline']}, {row['part']}", "", "lost", "the gate")
    return table


def serve_command(sweep: Sweep, outcome: Outcome, storage: str) -> str:
    """Return the command that serves the registered policy, by its alias."""
    problem, scenario = sweep.problem.name, sweep.scenario.name
    candidate = outcome.registration.alias == CANDIDATE
    if served_scenarios().get(problem) == scenario:
        return f"make serve{make_storage(storage)}{' POLICY=candidate' if candidate else ''}"
    options = f"--registry {sweep.client.tracking_uri}{' --policy candidate' if candidate else ''}"
    deploy = "python pipelines/deploy.py --cluster"
    if problem == "routing":
        return f"{deploy} none --scenario {scenario} {options}"
    return f"{deploy} FILE {options}, with a file that names {problem} scenario {scenario}"


def make_storage(storage: str) -> str:
    """What `make` has to be told of where sweeps are kept."""
    return "" if storage == Args.storage else f" STORAGE={shlex.quote(storage)}"


def served_scenarios() -> dict[str, str]:
    """Scenarios of what `make serve` serves, by problem."""
    cluster = load_cluster(DEFAULT_CLUSTER)
    served = {"routing": cluster.scenario}
    if cluster.allocation is not None:
        served["allocation"] = cluster.allocation.scenario
    return served


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
