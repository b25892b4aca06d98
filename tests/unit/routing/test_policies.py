from __future__ import annotations

import numpy as np
import pytest

from tokenyard.routing.policies import BASELINES, PolicyContext, make_policy
from tokenyard.routing.policies.tuned import FleetRules, TunedRules, load_tuned
from tokenyard.routing.scenario import load_scenario, scenario_names
from tokenyard.types import Slo

NAMES_A_REPLICA = ["sed_reserve", "sed_dump", "sita"]
SUITS_ANY_NUMBER = [
    "tuned_marginal_delay",
    "sed_linear",
    "tuned_dynamo_cost",
]
FLEETS = [name for name in scenario_names() if load_scenario(name).fleet]


def context(scenario_name: str, num_replicas: int = 3) -> PolicyContext:
    return PolicyContext(scenario_name, Slo(2.0), np.random.default_rng(0), num_replicas)


def test_an_unknown_policy_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"unknown policy 'least_conections'.*did you mean 'least"):
        make_policy("least_conections", context("nominal"))


@pytest.mark.parametrize("name", NAMES_A_REPLICA + SUITS_ANY_NUMBER)
def test_a_tuned_rule_without_its_parameters_names_the_command_that_makes_them(name):
    with pytest.raises(ValueError, match=r"tune_baselines.py --scenario my_own"):
        make_policy(name, context("my_own"))


@pytest.mark.parametrize("name", NAMES_A_REPLICA)
def test_rules_tuned_for_other_clusters_are_refused(name):
    with pytest.raises(ValueError, match="tuned for 3 replicas, not for 4"):
        make_policy(name, context("nominal", num_replicas=4))


@pytest.mark.parametrize("name", SUITS_ANY_NUMBER)
def test_rules_that_name_no_replica_are_made_for_any_number(name):
    make_policy(name, context("nominal", num_replicas=4))


@pytest.mark.parametrize("scenario_name", scenario_names())
def test_every_baseline_can_be_made_for_every_scenario_that_ships(scenario_name):
    scenario = load_scenario(scenario_name)
    for name in BASELINES:
        make_policy(name, context(scenario_name, scenario.num_servers))


@pytest.mark.parametrize("scenario_name", scenario_names())
def test_a_rule_that_can_fall_back_to_sed_was_never_tuned_to_be_worse(scenario_name):
    scores = load_tuned(scenario_name).scores
    assert scores["sed_reserve"] >= scores["sed"]


@pytest.mark.parametrize("scenario_name", FLEETS)
def test_tuning_never_lost_to_the_values_it_began_with(scenario_name):
    rules = load_tuned(scenario_name)
    assert rules.scores["tuned_marginal_delay"] >= rules.scores["marginal_delay"]
    assert rules.scores["tuned_marginal_delay"] >= rules.scores["sed"]


@pytest.mark.parametrize("field", ["wait_weight", "others_weight"])
def test_parameters_of_fleet_rules_that_make_no_sense_are_refused(field):
    with pytest.raises(ValueError, match=field):
        FleetRules.model_validate({field: -1.0})


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"sita_cuts_tokens": (900.0, 100.0)}, "must not decrease"),
        ({"sita_cuts_tokens": (900.0,)}, "one fewer"),
        ({"sita_replicas": (0, 1, 1)}, "each replica once"),
        ({"dump_replica": 3}, "is not 0..2"),
        ({"cuts": 1}, "Extra inputs"),
    ],
)
def test_parameters_that_fit_no_cluster_are_refused(wrong, reason):
    right = {
        "scenario": "test",
        "reserve_above_tokens": 100.0,
        "dump_replica": 0,
        "sita_cuts_tokens": (100.0, 900.0),
        "sita_replicas": (0, 1, 2),
    }
    with pytest.raises(ValueError, match=reason):
        TunedRules.model_validate(right | wrong)
