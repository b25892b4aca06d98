from __future__ import annotations

import numpy as np
import pytest

from tokenyard.allocation.artifact import champion_or_planner
from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.problem import PROBLEM
from tokenyard.allocation.scenario import PAPER_WEIGHTS
from tokenyard.evaluation import figures_of, rank
from tokenyard.problem import Drawn
from tokenyard.promotion import judge_candidate, rivals
from tokenyard.rl.allocation.training import AllocationTrialConfig
from tune_configs.allocation import AllocationTrial
from tune_configs.experiment import load_experiments

EXPERIMENTS = ("default", "smoke", "learners")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_trial_of_every_experiment_can_be_built(name):
    experiment = load_experiments(f"allocation:{name}")[0]
    assert experiment.problem is PROBLEM
    assert experiment.baseline in experiment.baselines
    for trial in experiment.designed_trials(seed=3):
        config = AllocationTrialConfig.model_validate(trial)
        assert config.scenario == experiment.scenario


def test_reward_weights_that_are_unknown_are_refused():
    trial = load_experiments("allocation:smoke")[0].designed_trials(0)[0]
    with pytest.raises(ValueError, match="should be 'cost' or 'paper'"):
        AllocationTrialConfig.model_validate({**trial, "reward_weights": "beauty"})


def test_a_weight_that_is_drawn_takes_the_place_of_the_named_one():
    trial = load_experiments("allocation:smoke")[0].designed_trials(0)[0]
    drawn = {**trial, "weights": {"violations": 0.5, "energy": 0.1}}
    found = AllocationTrial.hyperparameters(drawn)
    terms = ("usd", "violations", "energy")
    assert [found[f"reward.{term}"] for term in terms] == [1.0, 0.5, 0.1]
    assert AllocationTrial.hyperparameters(trial)["reward.energy"] == 0.0


@pytest.fixture(scope="module")
def scenario():
    return PROBLEM.load_scenario("a100x8_13b")


@pytest.fixture(scope="module")
def streams(scenario):
    source = demand_source(scenario)
    drawn = [source.episode(5 * 288, np.random.default_rng(seed)) for seed in range(2)]
    return Drawn(drawn, "episodes")


def test_policies_are_ranked_by_cost_and_their_days_are_paired(scenario, streams):
    names = ("best_static", "autoscaler_tuned", "free_switching")
    policies = {name: PROBLEM.candidate(scenario, name).run for name in names}
    comparison = rank(PROBLEM, scenario, policies, "autoscaler_tuned", streams, seed=0)
    assert comparison.rows[0]["policy"] == "free_switching"
    assert comparison.rows[0]["delta_cost_ci_high"] < 0
    scores = [row["score"] for row in comparison.rows]
    assert scores == sorted(scores, reverse=True)
    assert all(row["score"] == -row["cost_with_penalty"] for row in comparison.rows)
    figures = figures_of(PROBLEM, scenario, streams, comparison.runs, comparison.rows)
    assert list(figures) == ["differences"]


def test_whatever_is_rewarded_policies_are_compared_by_dollars(scenario, streams):
    paper = scenario.model_copy(update={"objective": PAPER_WEIGHTS})
    names = ("autoscaler_70", "autoscaler_tuned")
    policies = {name: PROBLEM.candidate(paper, name).run for name in names}
    rows = rank(PROBLEM, paper, policies, "autoscaler_tuned", streams, seed=0).rows
    ours, theirs = (next(row for row in rows if row["policy"] == name) for name in names)
    costs = [float(row["cost_with_penalty"]) for row in (ours, theirs)]
    assert ours["delta_cost_fraction"] == pytest.approx((costs[0] - costs[1]) / costs[1])


def test_no_policy_beats_itself_and_the_rule_that_ships_beats_a_tuned_one(scenario, streams):
    planner, _ = champion_or_planner(scenario)
    against = rivals(PROBLEM, scenario, "best_static")
    assert [one.name for one in against] == ["planner"], "it ships, so that it is no champion too"
    against.append(PROBLEM.candidate(scenario, "autoscaler_forecast"))
    verdict = judge_candidate(PROBLEM, scenario, planner, against, [], streams, seed=0)
    itself, tuned = verdict.gains
    assert tuple(itself.interval) == (0.0, 0.0, 0.0)
    assert not itself.won
    assert tuned.interval.estimate > 0
    assert not verdict.accepted
    assert verdict.reason.startswith("it does not beat planner")


def test_a_policy_in_training_is_scored_on_streams_of_its_own(scenario):
    planner, _ = champion_or_planner(scenario)
    found = PROBLEM.validation(scenario, num_streams=1)(planner)
    assert found["score"] == -found["cost_with_penalty"]
    assert {"cost_per_hour", "slo_attainment", "switches", "refused"} <= set(found)
    assert np.isfinite(list(found.values())).all()
