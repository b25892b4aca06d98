"""From an `Experiment` to a running Ray Tune sweep, fresh or resumed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import ray
from fsspec.core import url_to_fs
from pyarrow import ArrowInvalid
from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem
from ray import tune
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayActorError
from ray.tune import (
    Callback,
    CheckpointConfig,
    FailureConfig,
    ResultGrid,
    RunConfig,
    TuneConfig,
)
from ray.tune.execution.placement_groups import PlacementGroupFactory
from ray.tune.experiment import Trial

from tune_configs.experiment import SCORE, Experiment, stop_at_budget
from tune_configs.progress import Progress

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 512 * 2**20
"""Enough for weights and batches of a few megabytes; Ray's default is a third of the memory."""
_LOOK_EVERY_S = 1.0
_SWEEP_AT: ContextVar[tuple[str, str]] = ContextVar("sweep_at")
"""Storage and name of the sweep that runs. Tune takes up a sweep that was moved, but its searcher
makes further trials where it was (ray 2.60, tune/experiment/config_parser.py:216)."""
_MOST_RERUNS = 3


def start_ray(num_cpus: int) -> bool:
    """Join the cluster that RAY_ADDRESS names, else start a local one with so many CPUs.

    Returns:
        Whether a cluster was joined.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
    if "RAY_ADDRESS" in os.environ:
        ray.init(address=os.environ["RAY_ADDRESS"], **quiet)
        return True
    # "local" even where another Ray runs on this machine: that one belongs to somebody else.
    ray.init(
        address="local",
        num_cpus=max(2, num_cpus),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        **quiet,
    )
    return False


def await_resources(experiment: Experiment, seed: int, timeout_s: float) -> None:
    """Wait until every trial fits the cluster that was joined.

    Workers may still be starting, and the request makes an autoscaler add some.

    Raises:
        ValueError: A trial needs more than the cluster has after `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    has_requested = False
    while True:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        try:
            check_resources(experiment, seed, nodes)
        except ValueError as error:
            if time.monotonic() > deadline_s:
                raise
            if not has_requested:
                logger.warning("waiting up to %g s: %s", timeout_s, error)
                request_resources(bundles=_largest_request(experiment, seed))
                has_requested = True
            time.sleep(_LOOK_EVERY_S)
        else:
            if has_requested:
                # From now on the trials themselves are the demand.
                request_resources(bundles=[])
            return


def check_resources(
    experiment: Experiment, seed: int, nodes: Sequence[Mapping[str, float]]
) -> None:
    """Refuse a sweep whose trials could never start: Tune would wait for ever.

    Raises:
        ValueError: A trial asks for more of a resource than there is, in all or on any one node.
    """
    for trial, request in _requests(experiment, seed):
        label = f"trial {trial_label(trial)}"
        for resource, amount in request.required_resources.items():
            total = sum(node.get(resource, 0.0) for node in nodes)
            if amount > total:
                raise ValueError(
                    f"{label} needs {amount:g} {resource}, the cluster has {total:g}: use fewer "
                    "env runners or a larger cluster"
                )
        needed = len(request.bundles) if request.strategy == "STRICT_SPREAD" else 1
        bundles = (
            [request.required_resources] if request.strategy == "STRICT_PACK" else request.bundles
        )
        for bundle in bundles:
            fitting = sum(
                all(node.get(resource, 0.0) >= amount for resource, amount in bundle.items())
                for node in nodes
            )
            if fitting < needed:
                raise ValueError(
                    f"{label} needs {bundle} on each of {needed} nodes, the cluster has {fitting} "
                    "such nodes: reserve less per actor, or place trials otherwise"
                )


def _requests(
    experiment: Experiment, seed: int
) -> Iterator[tuple[dict[str, Any], PlacementGroupFactory]]:
    for trial in experiment.designed_trials(seed) or [dict(experiment.space)]:
        request = experiment.trainable.default_resource_request(trial)
        if request is not None:
            yield trial, request


def _largest_request(experiment: Experiment, seed: int) -> list[dict[str, float]]:
    """Bundles of the trial that reserves most, for as many trials as run at once."""
    requests: list[list[dict[str, float]]]
    requests = [request.bundles for _, request in _requests(experiment, seed)]
    return max(requests, key=len) * experiment.max_concurrent_trials


def trial_label(config: Mapping[str, Any]) -> str:
    """Name of a trial in tables, figures and MLflow: algorithm, reward weights and seed."""
    parts = [str(config[key]) for key in ("algorithm", "reward_weights") if config.get(key)]
    return " ".join([*parts, f"seed {config['seed']}"])


def new_tuner(
    experiment: Experiment, seed: int, storage: str, name: str, callbacks: list[Callback]
) -> tune.Tuner:
    """Prepare a fresh sweep in the folder `name` under `storage`."""
    filesystem, folder = open_storage(storage)
    _SWEEP_AT.set((folder, name))
    return tune.Tuner(
        experiment.trainable,
        param_space=experiment.param_space(seed),
        tune_config=TuneConfig(
            metric=SCORE,
            mode="max",
            num_samples=experiment.num_trials(seed),
            search_alg=experiment.search_algorithm(seed),
            scheduler=experiment.scheduler(),
            reuse_actors=True,
            trial_name_creator=_trial_name,
            trial_dirname_creator=_trial_folder,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=folder,
            storage_filesystem=filesystem,
            stop=stop_at_budget,
            callbacks=callbacks,
            failure_config=FailureConfig(max_failures=experiment.max_failures),
            checkpoint_config=CheckpointConfig(
                # The best one is exported, and the latest one, which Tune always keeps, resumes.
                num_to_keep=2,
                checkpoint_score_attribute=SCORE,
                checkpoint_frequency=experiment.checkpoint_every,
                checkpoint_at_end=True,
            ),
            # Below 1 Tune calls no reporter; at 1 it prints nothing itself.
            verbose=1,
            progress_reporter=Progress(
                f"{experiment.problem.name} on {experiment.scenario}", experiment.num_trials(seed)
            ),
        ),
    )


def fit(tuner: tune.Tuner, resumed: Callable[[], tune.Tuner]) -> ResultGrid:
    """Run all trials; those that went with their node in a bad moment, again.

    A trial whose node dies while its actor is being turned to it, or is restoring a checkpoint,
    fails for good, whatever `max_failures` says: Tune recovers from RUNNING alone
    (ray 2.60, tune/execution/tune_controller.py:1354).
    """
    results = tuner.fit()
    for _ in range(_MOST_RERUNS):
        if not any(isinstance(error, RayActorError) for error in results.errors):
            break
        logger.warning("trials went with their node and are started again")
        results = resumed().fit()
    return results


def is_begun(path: str) -> bool:
    """Whether there is a sweep in `path` to go on with."""
    filesystem, folder = open_storage(path)
    return bool(tune.Tuner.can_restore(folder, storage_filesystem=filesystem))


def resumed_tuner(experiment: Experiment, path: str) -> tune.Tuner:
    """Go on with the sweep in `path`: unfinished trials from checkpoints, failed ones anew."""
    filesystem, folder = open_storage(path)
    parent, _, name = folder.rpartition("/")
    _SWEEP_AT.set((parent, name))
    return tune.Tuner.restore(
        folder,
        experiment.trainable,
        storage_filesystem=filesystem,
        resume_unfinished=True,
        restart_errored=True,
    )


def _trial_name(trial: Trial) -> str:
    return trial_label(trial.config)


def _trial_folder(trial: Trial) -> str:
    if trial.storage is not None:
        trial.storage.storage_fs_path, trial.storage.experiment_dir_name = _SWEEP_AT.get()
    # Trials drawn by a searcher can share a label; their ids differ.
    return f"{trial_label(trial.config).replace(' ', '-')}-{trial.trial_id}"


def open_storage(location: str) -> tuple[FileSystem | None, str]:
    """Return the file system of a folder or URI, and the path on it.

    pyarrow serves `s3://`, `gs://`, `hdfs://` and `file://` itself; other schemes (`az://`,
    `sftp://`, ...) go to the fsspec package of that scheme. S3 stores other than Amazon's are named
    by AWS_ENDPOINT_URL, on every node.

    Returns:
        The file system, None for a local folder, which Tune treats best itself; and the path.

    Raises:
        ValueError: Nobody knows the scheme, or its package is not installed.
    """
    if "://" not in location:
        return None, location
    try:
        filesystem, path = FileSystem.from_uri(location)
        return filesystem, str(path)
    except ArrowInvalid:
        # Not a scheme of pyarrow's.
        pass
    try:
        filesystem, path = url_to_fs(location)
    except (ValueError, ImportError) as error:
        raise ValueError(f"storage {location}: {error}") from None
    return PyFileSystem(FSSpecHandler(filesystem)), path
