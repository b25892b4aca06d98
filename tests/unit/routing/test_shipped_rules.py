"""Champions that are the tuned rule itself: they hold its weights and go by its name."""

import pytest

from tokenyard.routing.artifact import resolve_champion
from tokenyard.routing.policies.tuned import load_tuned
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import load_scenario

WITHDRAWN = (
    "azure_code_mixed_gpus_085",
    "conversation_mixed_gpus",
    "emulated",
    "two_classes_slo",
    "multi_turn_prefix",
)


@pytest.mark.parametrize("name", WITHDRAWN)
def test_where_no_champion_passed_the_gate_the_tuned_rule_ships_and_is_named(name):
    artifact, _ = resolve_champion("routing", name)
    assert artifact.metadata.lineage["rule"] == "tuned_marginal_delay"
    assert artifact.arrays["weights"].tolist() == list(load_tuned(name).fleet.marginal_weights)
    source = PROBLEM.candidate(load_scenario(name), "champion").source
    assert "the rule tuned_marginal_delay" in source
    assert artifact.sha256 in source
