"""What came out of a sweep's trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.tune import Result, ResultGrid

from tokenyard.problem import Artifact
from tune_configs.experiment import ENV_STEPS, SCORE
from tune_configs.registry import ARTIFACT_FILE
from tune_configs.tuner import trial_label


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
    artifact: Artifact
    """Exported by the checkpoint with the best score in training."""

    def described(self) -> dict[str, Any]:
        """The trial's part of a result row."""
        return {
            "algorithm": self.config["algorithm"],
            "trial": self.label,
            "seed": self.config["seed"],
            "reward_weights": self.config["reward_weights"],
            "env_steps": self.env_steps,
            "wall_s": self.wall_s,
        }


def finished_trials(results: ResultGrid, load: Callable[[Path], Artifact]) -> list[FinishedTrial]:
    """Read the best policy of every trial that did not fail, in the order they were started."""
    trials: list[FinishedTrial] = []
    for result in sorted(results, key=_trial_id):
        if result.error is None:
            trials.append(_read(result, load, taken={trial.label for trial in trials}))
    return trials


def _trial_id(result: Result) -> str:
    # Tune itself gives the order in which trials ended, and after a resume another one.
    return str((result.metrics or {}).get("trial_id", ""))


def _read(result: Result, load: Callable[[Path], Artifact], taken: set[str]) -> FinishedTrial:
    metrics, config = result.metrics, result.config
    assert metrics is not None
    assert config is not None
    trial_id, label = metrics["trial_id"], trial_label(config)
    checkpoint = result.get_best_checkpoint(SCORE, "max") or result.checkpoint
    assert checkpoint is not None, "a finished trial saves at its end"
    with checkpoint.as_directory() as folder:
        artifact = load(Path(folder) / ARTIFACT_FILE)
    return FinishedTrial(
        trial_id=trial_id,
        label=f"{label}-{trial_id}" if label in taken else label,
        config=config,
        env_steps=int(metrics[ENV_STEPS]),
        wall_s=float(metrics["time_total_s"]),
        artifact=artifact,
    )
