"""From an `Experiment` to a running Ray Tune sweep, fresh or resumed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray import tune
from ray.tune import Callback, CheckpointConfig, CLIReporter, FailureConfig, RunConfig, TuneConfig
from ray.tune.experiment import Trial

from tune_configs.experiment import ENV_STEPS, SCORE, Experiment, stop_at_budget

_OBJECT_STORE_BYTES = 512 * 2**20
"""Enough for weights and batches of a few megabytes; Ray's default is a third of the memory."""


def start_ray(num_cpus: int) -> None:
    """Join the cluster that RAY_ADDRESS names, else start a local one with so many CPUs."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
    if "RAY_ADDRESS" in os.environ:
        ray.init(address=os.environ["RAY_ADDRESS"], **quiet)
        return
    # "local" even where another Ray runs on this machine: that one belongs to somebody else.
    ray.init(
        address="local",
        num_cpus=max(2, num_cpus),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        **quiet,
    )


def check_resources(experiment: Experiment, seed: int, available: Mapping[str, float]) -> None:
    """Refuse a sweep whose trials could never start: Tune would wait for ever.

    Args:
        experiment: The sweep.
        seed: Its seed.
        available: The cluster's resources, as `ray.cluster_resources()` gives them.

    Raises:
        ValueError: A trial asks for more of a resource than there is.
    """
    for trial in experiment.designed_trials(seed) or [dict(experiment.space)]:
        request = experiment.trainable.default_resource_request(trial)
        if request is None:
            continue
        for resource, amount in request.required_resources.items():
            if amount > available.get(resource, 0.0):
                raise ValueError(
                    f"trial {trial_label(trial)} needs {amount:g} {resource}, the cluster has "
                    f"{available.get(resource, 0.0):g}: use fewer env runners or a larger cluster"
                )


def trial_label(config: Mapping[str, Any]) -> str:
    """Short name of a trial: algorithm, reward weights and seed."""
    parts = [str(config[key]) for key in ("algorithm", "reward_weights") if key in config]
    return "-".join([*parts, f"s{config['seed']}"])


def new_tuner(
    experiment: Experiment, seed: int, storage: str, name: str, callbacks: list[Callback]
) -> tune.Tuner:
    """Prepare a fresh sweep in the folder `name` under `storage`."""
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
            storage_path=storage,
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
            # The one progress display: a short table, printed anew every half minute.
            verbose=1,
            progress_reporter=_progress(),
        ),
    )


def _progress() -> CLIReporter:
    return CLIReporter(
        parameter_columns=["algorithm", "reward_weights", "seed"],
        metric_columns={
            ENV_STEPS: "env steps",
            SCORE: "score",
            "mean_response_s": "mean s",
            "p99_response_s": "p99 s",
            "time_total_s": "wall s",
        },
        max_report_frequency=30,
    )


def resumed_tuner(experiment: Experiment, path: str) -> tune.Tuner:
    """Go on with the sweep in `path`: unfinished trials from their checkpoints, failed ones anew.

    Raises:
        ValueError: There is no sweep.
    """
    if not tune.Tuner.can_restore(path):
        raise ValueError(f"no sweep to resume in {path}")
    return tune.Tuner.restore(
        path, experiment.trainable, resume_unfinished=True, restart_errored=True
    )


def _trial_name(trial: Trial) -> str:
    return trial_label(trial.config)


def _trial_folder(trial: Trial) -> str:
    # Trials drawn by a searcher can share a label; their ids differ.
    return f"{trial_label(trial.config)}-{trial.trial_id}"
