"""Champions that ship place and order; where none does, the best tuned rule decides by its name."""

from importlib import resources
from pathlib import Path

import pytest

from tokenyard.artifact import NoChampionError
from tokenyard.routing.artifact import (
    PolicyArtifact,
    best_tuned_rule,
    resolve_champion,
    rule_for,
)
from tokenyard.routing.policies.tuned import load_tuned
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import load_scenario, scenario_names

FOLDER = Path(str(resources.files("tokenyard"))) / "artifacts" / "routing"
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.npz"))


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_orders_and_beats_the_rule_that_would_decide_without_it(name):
    metadata = PolicyArtifact.load(FOLDER / f"{name}.npz").metadata
    found, beaten = metadata.metrics, metadata.lineage["beats"]
    assert beaten == rule_for(name)
    assert found["delta_mean_ci_high"] < 0.0
    assert found["delta_p99_ci_high"] <= 0.02
    assert found["delta_slo_ci_low"] <= 0.0


@pytest.mark.parametrize("name", sorted(set(scenario_names()) - set(SHIPPED)))
def test_where_no_champion_ships_the_best_tuned_rule_decides_and_is_named(name):
    with pytest.raises(NoChampionError):
        resolve_champion(name)
    assert PROBLEM.candidate(load_scenario(name), "champion").source == f"the rule {rule_for(name)}"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("multi_turn_prefix", "tuned_marginal_delay+wspt"),
        ("agentic_trace_replay@mixed", "tuned_llmd_predicted_latency+wspt"),
    ],
)
def test_of_level_scores_one_by_delay_decides_and_no_lower_one(name, rule):
    tuned = load_tuned(name)
    scores = tuned.scores | tuned.order_scores
    assert best_tuned_rule(name) == rule
    assert 0.995 <= max(scores.values()) / scores[rule] <= 1.0
