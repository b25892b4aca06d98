"""Direct policy search from the command line."""

from dataclasses import replace

import pytest

from pipelines.search import Policy, main
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.choice import RULES_LOST_TO
from tokenyard.routing.observation import NUM_MARGINAL_SLO_WEIGHTS, NUM_MARGINAL_WEIGHTS
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.search_study import OBJECTIVES, best_of, search, untrained
from tokenyard.routing.simulator.server_models import server_model

SLO_FIRST = OBJECTIVES[-1]
MIXED = Policy(
    scenario="azure_code_mixed_gpus_085", seeds=1, objectives=(5,), generations=4, streams=2,
    violation_s=300.0, p99_margin=10.0, jobs=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return search(load_scenario(MIXED.scenario), MIXED, SLO_FIRST, seed=0)


@pytest.mark.slow
def test_a_search_that_prices_slo_violations_has_fewer_of_them_than_the_hand_rule(found):
    assert len(found.weights) == NUM_MARGINAL_SLO_WEIGHTS
    assert found.row["objective_violation"] == 300.0
    assert found.row["delta_slo_violation"] < -0.02


@pytest.mark.slow
def test_without_slos_the_weights_are_those_of_delays():
    study = replace(MIXED, slo_terms=False, generations=1, streams=1)
    found = search(load_scenario(MIXED.scenario), study, SLO_FIRST, seed=0)
    assert len(found.weights) == NUM_MARGINAL_WEIGHTS


@pytest.mark.slow
def test_what_is_kept_is_what_was_asked_for(found):
    rule = untrained(load_scenario(MIXED.scenario))
    assert RULES_LOST_TO not in rule.row  # The rule itself is what is left, so never refused.
    passed = replace(found, row={**found.row, RULES_LOST_TO: 0.0})
    refused = replace(found, row={**found.row, RULES_LOST_TO: 1.0})
    assert best_of([rule, passed], MIXED) is passed
    careful = replace(MIXED, p99_margin=float(rule.row["delta_p99_ci_high"]))
    assert best_of([rule, passed], careful) is rule
    assert best_of([rule, refused], MIXED) is rule


@pytest.mark.integration
def test_the_best_is_written(tmp_path):
    main(replace(MIXED, generations=1, streams=1, out=tmp_path))
    artifact = PolicyArtifact.load(tmp_path / f"{MIXED.scenario}.npz")
    assert artifact.metadata.kind == "marginal"
    assert "slo_violation_fraction" in artifact.metadata.metrics


def test_without_a_search_the_rule_is_written_by_its_name(tmp_path):
    main(replace(MIXED, seeds=0, out=tmp_path))
    artifact = PolicyArtifact.load(tmp_path / f"{MIXED.scenario}.npz")
    assert artifact.metadata.lineage["rule"] == "tuned_marginal_delay"
    assert artifact.arrays["weights"].tolist() == list(
        server_model(load_scenario(MIXED.scenario)).hand_weights()
    )
