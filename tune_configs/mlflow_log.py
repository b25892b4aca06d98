"""What a sweep leaves in MLflow: one parent run, under it one run per trial.

Only the driver writes, so SQLite is enough. Runs are found by what they are about (sweep folder,
trial id) before they are created: a resumed sweep goes on in the runs it had.
"""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlencode, urlsplit

from matplotlib.figure import Figure
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.result import AUTO_RESULT_KEYS, DONE, EXPERIMENT_TAG, TRIAL_ID
from ray.tune.utils import flatten_dict

from tokenyard.problem import Row
from tokenyard.registry import STORE_ARTIFACTS, open_experiment
from tune_configs.experiment import ENV_STEPS, SCORE

SWEEP_TAG = "tokenyard.sweep"
TRIAL_TAG = "tokenyard.trial_id"
_TAGGED_PARAMS = ("algorithm", "reward_weights", "scenario", "seed")
_NOT_METRICS = frozenset({*AUTO_RESULT_KEYS, DONE, EXPERIMENT_TAG, TRIAL_ID})
_METRICS_PER_BATCH = 1000
"""MLflow's own limit on metrics in one log_batch call."""


def tracking_uri(storage: Path) -> str:
    """MLFLOW_TRACKING_URI where it is set, else the SQLite file in the storage folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{storage.resolve()}/mlflow.db"


def follow_move(client: MlflowClient, storage: Path) -> None:
    """Let a local store that was moved or copied with its folder know where it is now.

    MLflow writes whole paths of artifacts into its tables, and we those of sweeps into tags.
    """
    if client.tracking_uri != f"sqlite:///{storage}/mlflow.db":
        return
    for experiment in client.search_experiments():
        root, _, last = experiment.artifact_location.rpartition("/")
        if last != STORE_ARTIFACTS or not root.startswith("file:") or root == storage.as_uri():
            continue
        with closing(sqlite3.connect(storage / "mlflow.db")) as store, store:
            for table, column, old, new in (
                ("experiments", "artifact_location", root, storage.as_uri()),
                ("runs", "artifact_uri", root, storage.as_uri()),
                ("model_versions", "source", root, storage.as_uri()),
                ("model_versions", "storage_location", root, storage.as_uri()),
                ("tags", "value", unquote(urlsplit(root).path), str(storage)),
            ):
                store.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                    f"WHERE substr({column}, 1, ?) = ?",
                    (new, len(old) + 1, len(old) + 1, f"{old}/"),
                )


def find_sweep_run(client: MlflowClient, experiment_id: str, path: str) -> Run | None:
    """The parent run of the sweep in that folder; None where it was never started."""
    return _find(client, experiment_id, {SWEEP_TAG: path})


def open_sweep_run(
    client: MlflowClient, experiment_id: str, path: str, name: str, tags: Mapping[str, str]
) -> str:
    """Find or create the parent run of the sweep in that folder; its status becomes RUNNING."""
    run = find_sweep_run(client, experiment_id, path)
    if run is None:
        run = client.create_run(experiment_id, tags={**tags, SWEEP_TAG: path}, run_name=name)
    client.update_run(run.info.run_id, status="RUNNING")
    return str(run.info.run_id)


def run_page(client: MlflowClient, run_id: str) -> str:
    """Where a run is, relative to `address`."""
    experiment_id = client.get_run(run_id).info.experiment_id
    # Without the type, MLflow opens its pages on language models' traces.
    return f"#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def address(client: MlflowClient) -> str:
    """Where MLflow's pages are: on the tracking server, or where `make mlflow` puts them."""
    is_remote = client.tracking_uri.startswith("http")
    local = f"http://127.0.0.1:{os.environ.get('MLFLOW_PORT', 5000)}"
    return f"{client.tracking_uri if is_remote else local}/"


def last_sweep_pages(client: MlflowClient) -> list[str]:
    """URLs of the last sweep's run and of its trials, best first; empty without a sweep."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, f"tags.`{SWEEP_TAG}` LIKE '%'", max_results=1)
    if not runs:
        return []
    parent = client.get_run(runs[0].data.tags.get(MLFLOW_PARENT_RUN_ID, runs[0].info.run_id))
    listed = {
        "workflowType": "machine_learning",
        "searchFilter": f"tags.sweep = {_quoted(parent.info.run_name)}",
        "orderByKey": f"metrics.`{SCORE}`",
        "orderByAsc": "false",
    }
    trials = f"#/experiments/{parent.info.experiment_id}/runs?{urlencode(listed)}"
    return [address(client) + page for page in (run_page(client, parent.info.run_id), trials)]


def trial_runs(client: MlflowClient, parent_run_id: str) -> dict[str, Run]:
    """The runs under a sweep, by trial id."""
    parent = client.get_run(parent_run_id)
    runs = client.search_runs(
        [parent.info.experiment_id],
        f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent_run_id}'",
        max_results=5000,
    )
    return {run.data.tags[TRIAL_TAG]: run for run in runs}


def learning_curve(client: MlflowClient, run_id: str, key: str) -> list[tuple[float, float]]:
    """(environment steps, value) of one metric, in order of steps."""
    return sorted((float(m.step), m.value) for m in client.get_metric_history(run_id, key))


def metrics_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a Tune result that the trial itself reported.

    Tune adds a dozen of its own (pid, timestamps, the configuration once more): of those only
    the trial's wall time is kept. A NaN is left out: it means that there is no value.
    """
    reported = {key: value for key, value in result.items() if key not in _NOT_METRICS}
    reported["system/wall_s"] = result.get("time_total_s", math.nan)
    return {
        key: float(value)
        for key, value in flatten_dict(reported).items()
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    }


class TrialLog(Callback):
    """Writes every trial's parameters, curves over environment steps and end into its run.

    Tune calls it in the driver. A trial that starts from a checkpoint first loses what was
    logged past that checkpoint, since those steps are taken again, and not in the same way.
    """

    resumed_uri: ClassVar[str | None] = None
    """Store of a log that Tune has pickled: it may have been moved meanwhile."""

    def __init__(
        self,
        uri: str,
        parent_run_id: str,
        tags: Mapping[str, str],
        hyperparameters: Callable[[Mapping[str, Any]], Mapping[str, object]],
    ) -> None:
        """Log into a store."""
        self._uri = uri
        self._parent_run_id = parent_run_id
        self._tags = dict(tags)
        self._hyperparameters = hyperparameters
        self._run_ids: dict[str, str] = {}
        self._cached_client: MlflowClient | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connection behind: Tune pickles its callbacks into the experiment's state."""
        return {**self.__dict__, "_cached_client": None, "_run_ids": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on where the store is now."""
        self.__dict__ = {**state, "_uri": self.resumed_uri or state["_uri"]}

    @property
    def _client(self) -> MlflowClient:
        if self._cached_client is None:
            self._cached_client = MlflowClient(self._uri)
        return self._cached_client

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Open the trial's run, cut back to the checkpoint that the trial starts from."""
        run = _find(self._client, self._experiment_id(), self._identity(trial))
        run = self._create_run(trial) if run is None else self._truncated(run, trial)
        self._client.update_run(run.info.run_id, status="RUNNING")
        self._run_ids[trial.trial_id] = run.info.run_id

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """Log what the trial reported, at its number of environment steps, in one call."""
        now_ms = int(time.time() * 1000)
        step = int(result[ENV_STEPS])
        metrics = [Metric(key, value, now_ms, step) for key, value in metrics_of(result).items()]
        self._client.log_batch(self._run_ids[trial.trial_id], metrics=metrics)

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Close the run as finished."""
        self._close(trial, "FINISHED")

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        """Close the run as failed; Tune keeps the traceback in the trial's error.txt."""
        self._close(trial, "FAILED")

    def _close(self, trial: Trial, status: str) -> None:
        # A trial can be stopped before it ever started; it then has no run.
        if trial.trial_id in self._run_ids:
            self._client.set_terminated(self._run_ids[trial.trial_id], status)

    def _identity(self, trial: Trial) -> dict[str, str]:
        return {MLFLOW_PARENT_RUN_ID: self._parent_run_id, TRIAL_TAG: trial.trial_id}

    def _experiment_id(self) -> str:
        return str(self._client.get_run(self._parent_run_id).info.experiment_id)

    def _create_run(self, trial: Trial) -> Run:
        # Drawn weights come back among those that the trial is rewarded by.
        params = {key: value for key, value in trial.config.items() if key != "weights"}
        tags = {key: str(params[key]) for key in _TAGGED_PARAMS if key in params}
        run = self._client.create_run(
            self._experiment_id(),
            tags={**self._tags, **tags, **self._identity(trial)},
            run_name=str(trial),
        )
        params |= self._hyperparameters(trial.config)
        self._client.log_batch(
            run.info.run_id, params=[Param(key, str(value)) for key, value in params.items()]
        )
        return run

    def _truncated(self, run: Run, trial: Trial) -> Run:
        checkpoint = trial.latest_checkpoint_result
        last_step = int(checkpoint.metrics[ENV_STEPS]) if checkpoint else -1
        return truncate(self._client, run, last_step)


def truncate(client: MlflowClient, run: Run, last_step: int) -> Run:
    """Drop what was logged after `last_step`; returns the run that holds the rest.

    MLflow cannot delete single points. So where there are any, the run is replaced by a copy
    without them, and deleted.
    """
    points = [
        metric
        for key in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, key)
    ]
    kept = [metric for metric in points if metric.step <= last_step]
    if len(kept) == len(points):
        return run
    copy = client.create_run(
        run.info.experiment_id, start_time=run.info.start_time, tags=run.data.tags
    )
    params = [Param(key, value) for key, value in run.data.params.items()]
    client.log_batch(copy.info.run_id, params=params)
    for batch in _batches(kept, _METRICS_PER_BATCH):
        client.log_batch(copy.info.run_id, metrics=batch)
    client.delete_run(run.info.run_id)
    return copy


def log_rows(
    experiment: str,
    run_name: str,
    params: Mapping[str, Any],
    table: str,
    rows: Sequence[Row],
    figures: Mapping[str, Figure],
) -> str:
    """Leave one run with rows as a table and figures as images, outside of any sweep.

    Args:
        experiment: Found, or created beside the working directory's `mlflow.db`.
        run_name: Of the run.
        params: What is logged of how the rows came about; None is left out.
        table: Name of the table's file.
        rows: Whose keys may differ.
        figures: By names without a suffix.

    Returns:
        Where the run is, in words.
    """
    client = MlflowClient(tracking_uri(Path()))
    run = client.create_run(open_experiment(client, experiment), run_name=run_name)
    run_id = run.info.run_id
    for name, value in params.items():
        if value is not None:
            client.log_param(run_id, name, str(value))
    log_table(client, run_id, rows, table)
    for name, figure in figures.items():
        client.log_figure(run_id, figure, f"figures/{name}.png")
    client.set_terminated(run_id)
    return f"{client.tracking_uri}, run {run_id}"


def log_table(client: MlflowClient, run_id: str, rows: Sequence[Row], path: str) -> None:
    """Leave rows, whose keys may differ, as a table in a file of the run."""
    columns = dict.fromkeys(key for row in rows for key in row)
    client.log_table(run_id, {key: [row.get(key) for row in rows] for key in columns}, path)


def log_metrics(client: MlflowClient, run_id: str, metrics: Mapping[str, float]) -> None:
    """Log numbers that a run has one of each; a NaN is left out: it means that there is none."""
    now_ms = int(time.time() * 1000)
    points = [Metric(k, v, now_ms, 0) for k, v in metrics.items() if math.isfinite(v)]
    client.log_batch(run_id, metrics=points)


def set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    """Set several tags in one call."""
    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def _find(client: MlflowClient, experiment_id: str, tags: Mapping[str, str]) -> Run | None:
    query = " and ".join(f"tags.`{key}` = {_quoted(value)}" for key, value in tags.items())
    runs = client.search_runs([experiment_id], query, max_results=1)
    return runs[0] if runs else None


def _quoted(value: str) -> str:
    """A text as MLflow's filters have it: folders may have an apostrophe in their names."""
    return f'"{value}"' if "'" in value else f"'{value}'"


def _batches(metrics: Sequence[Metric], size: int) -> Iterable[Sequence[Metric]]:
    return (metrics[i : i + size] for i in range(0, len(metrics), size))
