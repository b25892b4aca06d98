"""Who chooses trials and who stops them: a search over reward weights, and successive halving.

Algorithms learn at different speeds, so at equal environment steps a slow starter would be cut
for being what it is. One bracket per algorithm compares like with like.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler
from ray.tune.search import Searcher

from tokenyard.rl.trainable import TrialConfig
from tune_configs.experiment import ENV_STEPS, SCORE, Experiment


class AshaPerAlgorithm(FIFOScheduler):
    """Asynchronous successive halving (Li et al. 2020, arXiv:1810.05934v5), one per algorithm.

    Time is environment steps: an iteration may be empty while a lost actor is replaced.
    """

    def __init__(self, grace_share: float) -> None:
        """Cut for the first time at a share of the budget of an algorithm's first trial.

        Further cuts come each time three times as late, and a third of the trials stays.
        """
        super().__init__()
        self._grace_share = grace_share
        self._brackets: dict[str, ASHAScheduler] = {}

    def _bracket(self, trial: Trial) -> ASHAScheduler:
        algorithm, budget = str(trial.config["algorithm"]), int(trial.config["env_steps"])
        if algorithm not in self._brackets:
            self._brackets[algorithm] = ASHAScheduler(
                time_attr=ENV_STEPS,
                metric=SCORE,
                mode="max",
                max_t=budget,
                grace_period=max(1, round(self._grace_share * budget)),
                reduction_factor=3,
                # At its budget a trial stops by itself.
                stop_last_trials=False,
            )
        return self._brackets[algorithm]

    def on_trial_add(self, tune_controller: TuneController, trial: Trial) -> None:
        """Enter the trial in its algorithm's bracket."""
        self._bracket(trial).on_trial_add(tune_controller, trial)

    def on_trial_result(
        self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]
    ) -> str:
        """Stop the trial when it is not among the best of its algorithm so far."""
        decision: str = self._bracket(trial).on_trial_result(tune_controller, trial, result)
        return decision

    def on_trial_complete(
        self, tune_controller: TuneController, trial: Trial, result: dict[str, Any]
    ) -> None:
        """Record the last result."""
        self._bracket(trial).on_trial_complete(tune_controller, trial, result)

    def on_trial_remove(self, tune_controller: TuneController, trial: Trial) -> None:
        """Forget a trial that never ran to an end."""
        self._bracket(trial).on_trial_remove(tune_controller, trial)

    def debug_string(self) -> str:
        """Say how many trials each bracket has stopped."""
        lines = [f"{name}: {bracket.debug_string()}" for name, bracket in self._brackets.items()]
        return "\n".join([f"ASHA, {len(lines)} brackets, on {ENV_STEPS}", *lines])

    def save(self, checkpoint_path: str) -> None:
        """Write the brackets' state; Tune calls it with every snapshot of the experiment."""
        Path(checkpoint_path).write_bytes(pickle.dumps(self.__dict__))

    def restore(self, checkpoint_path: str) -> None:
        """Read what `save` wrote."""
        self.__dict__.update(pickle.loads(Path(checkpoint_path).read_bytes()))


def drawn_weights(
    experiment: Experiment, trial: TrialConfig, num_samples: int, **domains: object
) -> Experiment:
    """Draw fields of a trial by a tree-structured Parzen estimator; halving stops the poor ones.

    What is drawn are weights as numbers, and maybe the algorithm; the estimator looks at the score,
    which is the same for all.

    Args:
        experiment: Whose scenario, rules and streams hold.
        trial: Its fields are those of all trials, but for the seed and what is drawn.
        num_samples: How many trials.
        domains: Of the fields that are drawn.
    """
    (fields,) = replace(experiment, trials=(trial,), num_samples=1).designed_trials(0)
    # The estimator draws in the order of the space.
    first = {"algorithm": fields["algorithm"], "seed": 0}
    return replace(
        experiment,
        trials=(),
        space={**first, **fields, "seed": tune.randint(0, 1_000), **domains},
        num_samples=num_samples,
        searcher=parzen_estimator,
        scheduler=partial(AshaPerAlgorithm, grace_share=0.2),
    )


def parzen_estimator(seed: int) -> Searcher:
    """Make the searcher (Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization")."""
    # Imported here: few experiments need it.
    from ray.tune.search.optuna import OptunaSearch

    return OptunaSearch(metric=SCORE, mode="max", seed=seed)
