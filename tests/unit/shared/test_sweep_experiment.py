from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from integration.toy_sweeps import ToyTrialConfig, tiny
from ray import tune
from ray.exceptions import ActorDiedError
from ray.tune.schedulers import TrialScheduler

from serve_app.app import GatewayOptions
from serve_app.cluster import load_cluster
from tokenyard.rl.routing.rewards import ABLATIONS, reward_names, reward_weights
from tokenyard.rl.routing.trial import RoutingTrialConfig
from tokenyard.routing.scenario import RewardWeights, load_scenario
from tune_configs import routing
from tune_configs.experiment import load_experiments, stop_at_budget
from tune_configs.schedulers import parzen_estimator
from tune_configs.sweep import open_chain
from tune_configs.tuner import check_resources, fit, trial_label


@given(seed=st.integers(0, 1000), num_samples=st.integers(1, 4))
def test_repeated_trials_never_share_a_seed_with_their_twins(seed, num_samples):
    experiment = replace(tiny(), num_samples=num_samples)
    trials = experiment.designed_trials(seed)
    assert len(trials) == num_samples * len(experiment.trials)
    assert len({trial_label(trial) for trial in trials}) == len(trials)
    assert min(trial["seed"] for trial in trials) == seed


def test_a_space_is_searched_for_as_many_trials_as_were_asked_for():
    space = {"algorithm": "fast", "env_steps": 5_000, "seed": tune.randint(0, 10)}
    experiment = replace(tiny(), trials=(), space=space, num_samples=7)
    assert experiment.num_trials() == 7


def test_what_is_set_of_one_trial_is_told_of_all():
    plain, large = ToyTrialConfig(algorithm="fast"), ToyTrialConfig(algorithm="slow", num_cpus=4)
    told = replace(tiny(), trials=(plain, large)).designed_trials(0)
    assert [trial["num_cpus"] for trial in told] == [1, 4]
    assert "num_cpus" not in replace(tiny(), trials=(plain,)).designed_trials(0)[0]


def test_an_experiment_without_trials_is_refused():
    with pytest.raises(ValueError, match="needs trials"):
        replace(tiny(), trials=())


def test_trials_that_a_searcher_would_leave_out_are_refused():
    with pytest.raises(ValueError, match="a searcher draws all trials"):
        replace(tiny(), space={"algorithm": "fast"}, searcher=parzen_estimator)


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_sweep_of_no_trial_is_refused(wrong):
    with pytest.raises(ValueError, match=f"num_samples {wrong} must be at least 1"):
        replace(tiny(), num_samples=wrong)
    with pytest.raises(ValueError, match=f"max_concurrent_trials {wrong} must be at least 1"):
        tiny().fitted({}, max_concurrent_trials=wrong)
    assert tiny().fitted({}).max_concurrent_trials == tiny().max_concurrent_trials


def test_a_negative_seed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="seed -1 must not be negative"):
        open_chain("routing:smoke", str(tmp_path), "mine", seed=-1)


@pytest.mark.parametrize("size", ["default", "smoke"])
def test_what_is_swept_by_default_is_one_experiment_of_each_problem_that_is_served(size):
    chain = load_experiments(f"default:{size}")
    assert [one.problem.name for one in chain] == ["routing", "allocation"]
    assert chain[0] == load_experiments(f"routing:{size}")[0]


def test_a_chain_of_two_experiments_of_one_problem_is_refused(monkeypatch):
    monkeypatch.setattr(routing, "smoke", lambda: (routing.default(), routing.default()))
    with pytest.raises(ValueError, match="two experiments of one problem"):
        load_experiments("routing:smoke")


def test_an_experiment_is_of_the_scenario_that_is_named_after_it():
    (experiment,) = load_experiments("routing:default@bursty_serial")
    assert experiment.scenario == "bursty_serial"
    for trial in experiment.designed_trials(3):
        assert RoutingTrialConfig.model_validate(trial).scenario == "bursty_serial"
    with pytest.raises(ValueError, match="a scenario is of one problem"):
        load_experiments("default:default@bursty_serial")


@pytest.mark.parametrize("reference", ["routing", "routing:", ":default", ""])
def test_a_reference_that_is_not_module_and_function_is_refused(reference):
    with pytest.raises(ValueError, match="MODULE:FUNCTION"):
        load_experiments(reference)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("no_such_module:default", "no module"),
        ("routing:no_such_function", "no experiment function"),
        ("os:getcwd", "returns str"),
    ],
)
def test_a_reference_to_something_else_says_what_is_wrong(reference, reason):
    with pytest.raises(ValueError, match=reason):
        load_experiments(reference)


@pytest.mark.parametrize(
    "name",
    [
        "default", "smoke", "serial", "paper", "paper_high_load", "ablation", "fleet",
    ],
)  # fmt: skip
def test_every_trial_of_every_routing_experiment_is_one_the_trainer_accepts(name):
    experiment = load_experiments(f"routing:{name}")[0]
    for trial in experiment.designed_trials(3):
        config = RoutingTrialConfig.model_validate(trial)
        assert config.seed == trial["seed"]


def test_a_share_of_the_budget_is_at_least_one_generation():
    for trial in routing.fleet().fitted({}, 2, 0, 0.01).designed_trials(3):
        assert RoutingTrialConfig.model_validate(trial).num_generations >= 1


@pytest.mark.parametrize("experiment", [routing.default, routing.serial])
def test_networks_go_on_from_a_search_as_long_as_the_one_beside_them(experiment):
    def warm_start(trial):
        scenario = load_scenario(trial.scenario)
        return trial.hyperparameters(scenario)["warm_start_generations"]

    *learners, search = experiment().trials
    assert search.algorithm == "policy_search"
    assert {warm_start(trial) for trial in learners} == {search.num_generations} == {20}
    assert warm_start(learners[0].model_copy(update={"env_steps": 30_000})) == 2
    assert warm_start(routing.paper().trials[0]) == 0


def test_the_default_sweep_trains_each_algorithm_on_three_weightings_and_searches_beside_them():
    trials = routing.default().designed_trials(0)
    learners = [t for t in trials if t["algorithm"] != "policy_search"]
    assert len(trials) == len(learners) + 1
    for algorithm in ("ppo", "dqn", "a2c"):
        theirs = [t for t in learners if t["algorithm"] == algorithm]
        assert len({t["reward_weights"] for t in theirs}) >= 3
        assert all(t["env_steps"] >= 20_000 for t in theirs)


def test_a_trial_stops_at_its_own_budget():
    config = {"env_steps": 100}
    assert not stop_at_budget("t", {"timesteps_total": 99, "config": config})
    assert stop_at_budget("t", {"timesteps_total": 100, "config": config})


def test_a_sweep_whose_trials_do_not_fit_the_cluster_is_refused_before_it_starts():
    experiment = replace(tiny(), trials=(ToyTrialConfig(algorithm="fast", num_cpus=64),))
    with pytest.raises(ValueError, match="needs 64 CPU, the cluster has 2"):
        check_resources(experiment, 0, [{"CPU": 2.0}])
    check_resources(experiment, 0, [{"CPU": 64.0}])


def test_an_ablation_removes_its_term_and_nothing_else():
    scenario = load_scenario("high_load")
    whole = scenario.reward.model_dump()
    for name in ABLATIONS:
        changed = {
            key
            for key, value in reward_weights(name, scenario).model_dump().items()
            if value != whole[key]
        }
        assert changed, name
        assert all(getattr(reward_weights(name, scenario), key) == 0 for key in changed)


def test_weights_credited_at_the_decision_pay_no_term_of_the_paper():
    scenario = load_scenario("poisson_085")
    paper = RewardWeights()
    for name in reward_names():
        weights = reward_weights(name, scenario)
        if weights.credits_response:
            terms = ("processing", "queue", "overload", "balance", "accept")
            assert all(getattr(weights, term) == 0 for term in terms)
            assert weights.drop == paper.drop


def test_unknown_reward_weights_are_refused_with_the_list():
    with pytest.raises(ValueError, match="response_slo_tail"):
        reward_weights("mystery", load_scenario("poisson_085"))


def test_a_trial_is_refused_that_no_node_or_too_few_nodes_can_hold():
    spread = {"num_env_runners": 2, "cpus_per_actor": 1, "placement": "STRICT_SPREAD"}
    experiment = load_experiments("routing:smoke")[0].fitted(spread)
    check_resources(experiment, 0, [{"CPU": 1.0}] * 3)
    with pytest.raises(ValueError, match="on each of 3 nodes, the cluster has 2 such nodes"):
        check_resources(experiment, 0, [{"CPU": 2.0}] * 2)
    packed = experiment.fitted({"placement": "STRICT_PACK"})
    check_resources(packed, 0, [{"CPU": 4.0}, {}])
    with pytest.raises(ValueError, match="the cluster has 0 such nodes"):
        check_resources(packed, 0, [{"CPU": 2.0}] * 2)
    large = experiment.fitted({"cpus_per_actor": 4, "placement": "SPREAD"})
    with pytest.raises(ValueError, match="reserve less per actor"):
        check_resources(large, 0, [{"CPU": 2.0}] * 8)


def test_a_smaller_budget_gives_every_trial_fewer_steps_and_changes_nothing_else():
    whole = load_experiments("allocation:learners")[0]
    tenth = whole.fitted({}, budget=0.1)
    for less, full in zip(tenth.trials, whole.trials, strict=True):
        assert less == full.model_copy(update={"env_steps": full.env_steps // 10})
    assert whole.fitted({}) == whole
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match="must be above 0 and at most 1"):
            whole.fitted({}, budget=wrong)


@pytest.mark.parametrize("problem", ["routing", "allocation", "regions"])
def test_a_smaller_budget_is_that_of_drawn_trials_too_and_halving_goes_by_it(problem):
    whole = load_experiments(f"{problem}:weights")[0]
    tenth = whole.fitted({}, budget=0.1)
    budget = whole.space["env_steps"] // 10
    assert tenth.param_space(0) == {**whole.param_space(0), "env_steps": budget}
    scheduler, decided = tenth.scheduler(), []
    for score in (3.0, 2.0, 1.0):
        config = {**tenth.param_space(0), "algorithm": "ppo"}
        trial = SimpleNamespace(trial_id=str(score), config=config)
        scheduler.on_trial_add(None, trial)
        result = {"timesteps_total": budget // 5, "eval/score": score}
        decided.append(scheduler.on_trial_result(None, trial, result))
    assert decided == [TrialScheduler.CONTINUE, TrialScheduler.STOP, TrialScheduler.STOP]


def test_what_a_cluster_changes_reaches_every_trial_drawn_or_designed():
    reserved = {"num_env_runners": 3, "cpus_per_actor": 2.0}
    designed = load_experiments("routing:default")[0].fitted(reserved, 8, -1)
    assert designed.max_concurrent_trials == 8
    assert designed.max_failures == -1
    for trial in designed.designed_trials(0):
        request = designed.trainable.default_resource_request(trial)
        assert request.bundles == [{"CPU": 2.0}] * 4
    drawn = load_experiments("routing:weights")[0].fitted({"placement": "SPREAD"})
    assert drawn.param_space(0)["placement"] == "SPREAD"
    assert drawn.max_failures == load_experiments("routing:weights")[0].max_failures


def test_where_a_trial_runs_does_not_change_what_it_is():
    here = load_experiments("routing:smoke")[0].trials[-1]
    there = here.model_copy(update={"cpus_per_actor": 2.0, "placement": "SPREAD"})
    assert there.cpus_per_actor == 2.0
    assert there.placement == "SPREAD"
    assert here.sha256 == there.sha256


class Fitted:
    """Stands in for a tuner, and for its results."""

    def __init__(self, *errors):
        self.errors = list(errors)

    def fit(self):
        return self


def test_trials_that_went_with_their_node_are_started_again_and_others_are_not():
    last = Fitted()
    rounds = iter([Fitted(ActorDiedError(), ValueError()), last])
    assert fit(Fitted(ActorDiedError()), lambda: next(rounds)) is last
    own_fault = Fitted(ValueError())
    assert fit(own_fault, lambda: pytest.fail("started again")) is own_fault
    hopeless = Fitted(ActorDiedError())
    assert fit(hopeless, lambda: hopeless) is hopeless


@pytest.mark.parametrize("module", ["routing", "allocation", "regions"])
def test_every_trial_says_in_numbers_what_it_learns_from_and_with(module):
    experiment = load_experiments(f"{module}:default")[0]
    for trial in experiment.designed_trials(0):
        found = experiment.trainable.hyperparameters(trial)
        assert all(isinstance(value, float | int | str) for value in found.values())
        if trial["algorithm"] in ("ppo", "a2c", "dqn"):
            assert {"lr", "gamma", "train_batch_size", "network"} <= found.keys()
            weights = [value for key, value in found.items() if key.startswith("reward.")]
            assert any(weights), "nothing is rewarded"
        else:
            assert found


def test_make_sweep_trains_for_the_cluster_that_make_serve_serves():
    served = load_cluster(GatewayOptions().cluster)
    routing, allocation = load_experiments("default:default")
    assert (routing.problem.name, allocation.problem.name) == ("routing", "allocation")
    assert routing.scenario == served.scenario
    assert allocation.scenario == served.allocation.scenario
