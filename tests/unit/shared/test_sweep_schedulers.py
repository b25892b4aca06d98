from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.tune.schedulers import TrialScheduler

from tune_configs.experiment import load_experiments
from tune_configs.schedulers import AshaPerAlgorithm


def a_trial(algorithm, number):
    config = {"algorithm": algorithm, "env_steps": 9_000}
    return SimpleNamespace(trial_id=f"{algorithm}-{number}", config=config)


def first_decision(scheduler, trial, score):
    scheduler.on_trial_add(None, trial)
    return scheduler.on_trial_result(None, trial, {"timesteps_total": 1_000, "eval/score": score})


def halving():
    return AshaPerAlgorithm(grace_share=1 / 9)


def test_a_slow_algorithm_is_not_stopped_by_a_fast_one():
    scheduler = halving()
    for number, score in enumerate((5.0, 4.0, 3.0)):
        first_decision(scheduler, a_trial("fast", number), score)
    alone = first_decision(scheduler, a_trial("slow", 0), -100.0)
    assert alone == TrialScheduler.CONTINUE


def test_the_worst_of_its_own_algorithm_is_stopped():
    scheduler = halving()
    for number, score in enumerate((5.0, 4.0, 3.0)):
        first_decision(scheduler, a_trial("fast", number), score)
    assert first_decision(scheduler, a_trial("fast", 3), -1.0) == TrialScheduler.STOP


def test_a_restored_scheduler_still_knows_who_was_good(tmp_path):
    scheduler = halving()
    for number, score in enumerate((5.0, 4.0, 3.0)):
        first_decision(scheduler, a_trial("fast", number), score)
    scheduler.save(str(tmp_path / "state"))
    restored = halving()
    restored.restore(str(tmp_path / "state"))
    assert first_decision(restored, a_trial("fast", 3), -1.0) == TrialScheduler.STOP


@pytest.mark.parametrize("problem", ["routing", "allocation", "regions"])
def test_weights_that_are_drawn_are_numbers_that_the_trial_is_rewarded_by(problem):
    experiment = load_experiments(f"{problem}:weights")[0]
    searcher = experiment.searcher(0)
    searcher.set_search_properties("eval/score", "max", experiment.param_space(0))
    for number in range(3):
        trial = {**experiment.param_space(0), **searcher.suggest(f"trial-{number}")}
        learned_with = experiment.trainable.hyperparameters(trial)
        for name, weight in trial["weights"].items():
            assert learned_with[f"reward.{name}"] == weight
