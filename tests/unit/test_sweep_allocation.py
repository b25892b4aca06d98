from __future__ import annotations

import numpy as np
import pytest

from tokenyard.allocation.artifact import resolve_allocation_champion
from tokenyard.allocation.demand import demand_source
from tokenyard.rl.allocation_trainable import AllocationTrialConfig
from tune_configs.allocation import trainer_config
from tune_configs.allocation_judge import AllocationJudge
from tune_configs.experiment import load_experiment

EXPERIMENTS = ("default", "smoke", "two_stages", "paper_weights", "population")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_trial_of_every_experiment_can_be_built(name):
    experiment = load_experiment(f"allocation:{name}")
    assert experiment.judge is AllocationJudge
    assert experiment.baseline in experiment.baselines
    for trial in experiment.designed_trials(seed=3):
        config = AllocationTrialConfig.model_validate(trainer_config(trial))
        assert config.scenario == experiment.scenario
        assert config.cloned == str(trial["algorithm"]).startswith("cloned")


def test_a_population_keeps_every_checkpoint_since_others_may_still_go_on_from_it():
    experiment = load_experiment("allocation:population")
    assert experiment.checkpoints_kept is None
    assert experiment.max_concurrent_trials == len(experiment.trials)


def test_reward_weights_that_are_unknown_are_refused():
    trial = dict(load_experiment("allocation:smoke").trials[0])
    with pytest.raises(ValueError, match="choose 'cost' or 'paper'"):
        trainer_config({**trial, "reward_weights": "beauty"})


def test_what_a_missed_request_weighs_in_training_is_a_parameter_of_the_trial():
    trial = dict(load_experiment("allocation:smoke").trials[0])
    once, twice = (trainer_config({**trial, "missed_factor": f})["objective"] for f in (1.0, 2.0))
    assert twice.missed == 2 * once.missed
    assert twice.usd == once.usd == 1


@pytest.fixture(scope="module")
def judge():
    return AllocationJudge("a100x8_13b", seed=0)


@pytest.fixture(scope="module")
def streams(judge):
    source = demand_source(judge.scenario)
    return [source.episode(2 * 288, np.random.default_rng(seed)) for seed in range(2)]


def test_the_judge_ranks_by_cost_and_pairs_days(judge, streams):
    names = ("best_static", "autoscaler_tuned", "free_switching")
    policies = {name: judge.baseline(name) for name in names}
    comparison = judge.compare(policies, "autoscaler_tuned", streams)
    assert comparison.num_streams == 2
    assert comparison.rows[0]["policy"] == "free_switching"
    scores = [row["score"] for row in comparison.rows]
    assert scores == sorted(scores, reverse=True)
    columns = judge.columns("autoscaler_tuned")
    assert columns["cost vs autoscaler_tuned"](comparison.rows[0]).startswith("-")
    assert list(judge.figures(comparison)) == ["cost"]


def test_no_policy_beats_itself(judge, streams):
    champion, _ = resolve_allocation_champion("a100x8_13b")
    assert not judge.beats(champion, champion, streams)
