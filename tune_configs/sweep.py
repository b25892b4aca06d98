"""One sweep from its name to its champion: open, train, judge, record.

A sweep is over one problem. A chain has one sweep per problem, under one parent run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from ray.tune import Checkpoint, Result, ResultGrid, Tuner
from ray.tune.logger import JsonLoggerCallback

from tokenyard import registry
from tokenyard.artifact import model_name
from tokenyard.evaluation import SCORE as SCORE_KEY
from tokenyard.evaluation import Comparison, Map, rank
from tokenyard.problem import AnyProblem, Row, Scenario, TrainedPolicy
from tokenyard.promotion import PromotionVerdict, judge_candidate, rivals
from tokenyard.provenance import git_sha
from tokenyard.registry import ARTIFACT_FILE, Registration, open_experiment
from tune_configs import mlflow_log
from tune_configs.experiment import ENV_STEPS, SCORE, Experiment, load_experiments
from tune_configs.tuner import (
    await_resources,
    fit,
    is_begun,
    new_tuner,
    open_storage,
    resumed_tuner,
    start_ray,
    trial_label,
)

VALIDATION_SEED = 0
"""Of the streams on which trials choose their checkpoint: the same for all trials of all sweeps, so
that their curves can be compared."""
RANKING_SEED = 2**20
"""Of the streams on which finished trials are ranked: no checkpoint was chosen on them."""
_JOINING_S = 600.0
"""Time in which machines of a cloud are rented, installed, and join."""
REFERENCE_TAG = "tokenyard.experiment"


@dataclass(frozen=True)
class Sweep:
    """What a sweep runs, where it is kept and where it is logged."""

    experiment: Experiment
    reference: str
    """MODULE:FUNCTION of the experiment."""
    seed: int
    name: str
    path: str
    """Folder or URI of the sweep."""
    client: MlflowClient
    run_id: str
    """Parent of the runs of trials."""

    @property
    def problem(self) -> AnyProblem:
        """What draws streams and compares policies."""
        return self.experiment.problem

    @cached_property
    def scenario(self) -> Scenario:
        """What trials are judged on."""
        scenario = self.problem.load_scenario(self.experiment.scenario)
        unrewarded: Scenario = self.problem.without_reward(scenario)
        return unrewarded


@dataclass(frozen=True)
class Chain:
    """One sweep per problem."""

    sweeps: tuple[Sweep, ...]
    client: MlflowClient
    run_id: str
    """Parent of the sweeps' runs, or the only sweep's own."""
    seed: int


@dataclass(frozen=True)
class FinishedTrial:
    """One trial and its best policy."""

    trial_id: str
    label: str
    """Algorithm, reward weights and seed; made unique within the sweep."""
    config: Mapping[str, Any]
    env_steps: int
    """Environment steps taken in all, also after the best checkpoint."""
    wall_s: float
    cpu_s: float | None
    """CPU time of learning; None: the trainable does not tell."""
    artifact: TrainedPolicy
    """Exported by the checkpoint with the best score on the trial's own validation streams, which
    may be the policy that training began with."""
    checkpoint_env_steps: int = 0
    """Environment steps up to that checkpoint; 0: nothing that was learned beats the start."""

    @property
    def learned(self) -> bool:
        """Whether a checkpoint beats the start."""
        return self.checkpoint_env_steps > 0

    def described(self) -> dict[str, Any]:
        """The trial's part of a result row."""
        return {
            "algorithm": self.config["algorithm"],
            "trial": self.label,
            "seed": self.config["seed"],
            "reward_weights": self.config["reward_weights"],
            "env_steps": self.env_steps,
            "checkpoint_env_steps": self.checkpoint_env_steps,
            "learned": self.learned,
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
            "sha256": self.artifact.sha256,
        }


@dataclass(frozen=True)
class Report:
    """The outcome of a sweep."""

    ranking: Comparison[Any, Any]
    """Trials and rules on the same validation streams."""
    evaluation: Comparison[Any, Any]
    """The best trial and the baseline on fresh streams."""
    best: FinishedTrial
    """The trial with the best score of those that lose nowhere at the gate; if all do, of all."""
    gate: Sequence[Row]
    """What the gate found of it."""
    passed_over: Sequence[str]
    """Labels of trials with a better score, which lose at the gate."""
    rule_scores: Mapping[str, float]
    """Of the rules, on the streams on which trials chose their checkpoints, by name."""


@dataclass(frozen=True)
class Outcome:
    """What became of the best trial."""

    problem: str
    registration: Registration
    verdict: PromotionVerdict | None
    """Of the best trial against its rivals; None: it was champion before the sweep ended."""

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        reason = "it was champion already" if self.verdict is None else self.verdict.reason
        return f"{self.registration.alias}: {reason}"

    @property
    def rows(self) -> list[Row]:
        """The verdict's rows."""
        rows = [] if self.verdict is None else self.verdict.rows
        return [{"problem": self.problem, **row} for row in rows]

    def trial_rows(self, trials: list[FinishedTrial], report: Report) -> list[Row]:
        """The ranking's rows of trials, told what each of them was and became."""
        described = {trial.label: trial.described() for trial in trials}
        registered = {report.best.label: self.registration.alias}
        return [
            {
                "problem": self.problem,
                **described[label],
                "registered": registered.get(label, "none"),
                **row,
            }
            for row in report.ranking.rows
            if (label := str(row["policy"])) in described
        ]


def open_chain(
    reference: str,
    storage: str,
    name: str,
    seed: int = 0,
    num_samples: int | None = None,
    resume: bool = False,
    fit: Callable[[Experiment], Experiment] = lambda experiment: experiment,
) -> Chain:
    """Check the request, and find or create its runs in MLflow.

    `fit` adapts experiments to the cluster; a resumed sweep keeps the settings it began with.

    Raises:
        ValueError: The sweep cannot run; nothing has been started.
    """
    if seed < 0:
        raise ValueError(f"seed {seed} must not be negative")
    experiments = [fit(experiment) for experiment in load_experiments(reference)]
    if num_samples is not None:
        experiments = [replace(experiment, num_samples=num_samples) for experiment in experiments]
    storage, store = _locate(storage)
    open_storage(storage)
    client = MlflowClient(mlflow_log.tracking_uri(store))
    mlflow_log.follow_move(client, store)
    problems = [experiment.problem.name for experiment in experiments]
    mlflow_id = open_experiment(client, f"tokenyard-{'-'.join(problems)}")
    path = f"{storage}/{name}"
    run = mlflow_log.find_sweep_run(client, mlflow_id, path)
    if resume:
        # The comparison must use the streams that the sweep began with.
        seed = _check_resumable(run, reference, path, client)
    elif run is not None or _is_taken(path, experiments):
        raise ValueError(f"sweep {name!r} exists already: add --resume, or choose another --name")

    tags = {REFERENCE_TAG: reference, "seed": str(seed), "git_sha": git_sha()}
    run_tags = {**tags, "scenario": ", ".join(experiment.scenario for experiment in experiments)}
    run_id = mlflow_log.open_sweep_run(client, mlflow_id, path, name, run_tags)
    sweeps = []
    for experiment, problem in zip(experiments, problems, strict=True):
        inside, own_id = path, run_id
        if len(experiments) > 1:
            inside = f"{path}/{problem}"
            run_tags = {**tags, "scenario": experiment.scenario, MLFLOW_PARENT_RUN_ID: run_id}
            own_id = mlflow_log.open_sweep_run(client, mlflow_id, inside, problem, run_tags)
        sweeps.append(Sweep(experiment, reference, seed, name, inside, client, own_id))
    return Chain(tuple(sweeps), client, run_id, seed)


def _is_taken(path: str, experiments: Sequence[Experiment]) -> bool:
    """Return whether a sweep of any problem occupies the path of one of these experiments."""
    inside = [f"{path}/{experiment.problem.name}" for experiment in experiments]
    return any(map(is_begun, inside if len(inside) > 1 else [path]))


def _locate(storage: str) -> tuple[str, Path]:
    """Storage as Tune wants it, and the folder of a local MLflow store."""
    if "://" in storage:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            raise ValueError(f"with storage {storage} name an MLflow store: MLFLOW_TRACKING_URI")
        return storage.rstrip("/"), Path.cwd()
    folder = Path(storage).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder), folder


def _check_resumable(run: Run | None, reference: str, path: str, client: MlflowClient) -> int:
    if run is None and _is_taken(path, load_experiments(reference)):
        raise ValueError(
            f"no run of {client.tracking_uri} is of the sweep at {path}: name the store that it "
            f"began with (MLFLOW_TRACKING_URI), and if it was moved, move it back or set the tag "
            f"{mlflow_log.SWEEP_TAG} of its runs to where it is now"
        )
    if run is None:
        raise ValueError(f"no sweep to resume at {path}")
    recorded = run.data.tags[REFERENCE_TAG]
    if recorded != reference:
        raise ValueError(f"the sweep at {path} runs {recorded}, not {reference}")
    return int(run.data.tags["seed"])


def train(sweeps: Sequence[Sweep], resume: bool) -> list[ResultGrid]:
    """Run all trials of all sweeps in one Ray, or those that are left; results by sweep.

    Raises:
        ValueError: A trial asks for more than the cluster has.
    """
    for sweep in sweeps:
        if sweep.experiment.warm_up is not None:
            sweep.experiment.warm_up()
    joined = start_ray(num_cpus=os.cpu_count() or 1)
    try:
        for sweep in sweeps:
            await_resources(sweep.experiment, sweep.seed, _JOINING_S if joined else 0.0)
        return [_train(sweep, resume) for sweep in sweeps]
    finally:
        ray.shutdown()


def _train(sweep: Sweep, resume: bool) -> ResultGrid:
    def resumed() -> Tuner:
        mlflow_log.TrialLog.resumed_uri = sweep.client.tracking_uri
        return resumed_tuner(sweep.experiment, sweep.path)

    # One that was ended before its turn came has not begun.
    if resume and is_begun(sweep.path):
        return fit(resumed(), resumed)
    log = mlflow_log.TrialLog(
        sweep.client.tracking_uri, sweep.run_id, {"git_sha": git_sha(), "sweep": sweep.name},
        sweep.experiment.trainable.hyperparameters,
    )  # fmt: skip
    # Tune reads a trial's last result back from its own JSON lines.
    callbacks = [log, JsonLoggerCallback()]
    storage, _, name = sweep.path.rpartition("/")
    return fit(new_tuner(sweep.experiment, sweep.seed, storage, name, callbacks), resumed)


def finished_trials(
    results: ResultGrid, load: Callable[[Path], TrainedPolicy]
) -> list[FinishedTrial]:
    """Read the best policy of every trial that did not fail, in the order they were started."""
    trials: list[FinishedTrial] = []
    # Tune itself gives the order in which trials ended, and after a resume another one.
    for result in sorted(
        results, key=lambda result: str((result.metrics or {}).get("trial_id", ""))
    ):
        if result.error is None:
            trials.append(_read(result, load, taken={trial.label for trial in trials}))
    return trials


def _read(result: Result, load: Callable[[Path], TrainedPolicy], taken: set[str]) -> FinishedTrial:
    metrics, config = result.metrics, result.config
    assert metrics is not None
    assert config is not None
    trial_id, label = metrics["trial_id"], trial_label(config)
    checkpoint, chosen = _best_checkpoint(result)
    with checkpoint.as_directory() as folder:
        artifact = load(Path(folder) / ARTIFACT_FILE)
    return FinishedTrial(
        trial_id=trial_id,
        label=f"{label} ({trial_id})" if label in taken else label,
        config=config,
        env_steps=int(metrics[ENV_STEPS]),
        wall_s=float(metrics["time_total_s"]),
        cpu_s=metrics.get("system/cpu_s"),
        artifact=artifact,
        checkpoint_env_steps=int(chosen[ENV_STEPS]),
    )


def _best_checkpoint(result: Result) -> tuple[Checkpoint, Mapping[str, Any]]:
    """The kept checkpoint with the best score, and its metrics; without any score, the last one."""
    kept = result.best_checkpoints or []
    scored = [
        (checkpoint, metrics)
        for checkpoint, metrics in kept
        if math.isfinite(metrics.get(SCORE, math.nan))
    ]
    if scored:
        return max(scored, key=lambda pair: float(pair[1][SCORE]))
    assert result.checkpoint is not None, "a finished trial saves at its end"
    return result.checkpoint, result.metrics or {}


def judge(sweep: Sweep, trials: list[FinishedTrial], mapped: Map = map) -> Report:
    """Rank the trials on validation streams, and evaluate the best on fresh ones.

    Trials and rules are ranked on other streams than those on which each trial chose its
    checkpoint. The gate looks at other loads as well, so the best of the ranking may lose there.
    The evaluation, and promotion after it, use other streams again, on which nothing was chosen.
    """
    experiment, problem, scenario = sweep.experiment, sweep.problem, sweep.scenario
    rules = {name: problem.candidate(scenario, name).run for name in experiment.baselines}
    policies = {trial.label: problem.trained(trial.artifact) for trial in trials}
    num_streams, baseline = problem.num_validation_streams, experiment.baseline
    unseen = problem.streams(scenario, "validation", num_streams, RANKING_SEED)
    ranking = rank(problem, scenario, policies | rules, baseline, unseen, sweep.seed, mapped)
    by_label = {trial.label: trial for trial in trials}
    ranked = [by_label[str(row["policy"])] for row in ranking.rows if row["policy"] in by_label]
    best, gate, passed_over = _first_to_pass(
        ranked, problem.gate(scenario, experiment.promotion_streams)
    )
    finalists = {best.label: policies[best.label], baseline: rules[baseline]}
    fresh = problem.streams(scenario, "evaluation", experiment.evaluation_streams, sweep.seed)
    evaluation = rank(problem, scenario, finalists, baseline, fresh, sweep.seed, mapped)
    seen = problem.streams(scenario, "validation", num_streams, VALIDATION_SEED)
    of_rules = rank(problem, scenario, rules, baseline, seen, sweep.seed, mapped).rows
    rule_scores = {str(row["policy"]): float(row[SCORE_KEY]) for row in of_rules}
    return Report(ranking, evaluation, best, gate, passed_over, rule_scores)


def _first_to_pass(
    ranked: Sequence[FinishedTrial], gate: Callable[[TrainedPolicy], list[Row]]
) -> tuple[FinishedTrial, list[Row], list[str]]:
    """Return the first trial that loses nowhere, its rows at the gate, and the trials before it.

    If all lose, return the first and no trials.
    """
    rows_of: dict[str, list[Row]] = {}
    for trial in ranked:
        rows = gate(trial.artifact)
        if not any(row["loses"] for row in rows):
            return trial, rows, list(rows_of)
        rows_of[trial.label] = rows
    return ranked[0], rows_of[ranked[0].label], []


def register_best(
    sweep: Sweep, trials: list[FinishedTrial], report: Report, mapped: Map = map
) -> Outcome:
    """Log every trial's policy to its run, register the best, and settle who is champion.

    Raises:
        ValueError: The present champion cannot be read.
    """
    runs = mlflow_log.trial_runs(sweep.client, sweep.run_id)
    for trial in trials:
        registry.log_artifact(sweep.client, runs[trial.trial_id].info.run_id, trial.artifact)
    verdicts: list[PromotionVerdict] = []

    def accepted() -> bool:
        verdicts.append(against_rivals(sweep, report, mapped))
        return verdicts[-1].accepted

    registration = registry.register(
        sweep.client,
        model_name(sweep.problem.name, sweep.scenario.name),
        runs[report.best.trial_id].info.run_id,
        report.best.artifact,
        accepted,
    )
    verdict = verdicts[-1] if verdicts else None
    return Outcome(sweep.problem.name, registration, verdict)


def against_rivals(sweep: Sweep, report: Report, mapped: Map = map) -> PromotionVerdict:
    """Set the best trial against the present champion and the best tuned rule."""
    experiment, problem, scenario = sweep.experiment, sweep.problem, sweep.scenario
    registered = registry.mlflow_lookup(sweep.client.tracking_uri)
    # Further validation streams: what was ranked on the first ones may owe its place to them.
    streams = problem.streams(
        scenario, "validation", experiment.promotion_streams, VALIDATION_SEED + 1 + sweep.seed
    )
    against = rivals(problem, scenario, experiment.baseline, registered)
    return judge_candidate(
        problem, scenario, report.best.artifact, against, report.gate, streams, sweep.seed, mapped
    )
