"""Champions that ship place and order; where none does, the best tuned rule decides by its name."""

from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from tokenyard.artifact import NoChampionError
from tokenyard.routing.artifact import (
    DEFAULT_RULE,
    DEFAULT_SERVER_RULE,
    PolicyArtifact,
    best_tuned_rule,
    rule_for,
)
from tokenyard.routing.gate import FULL_LOAD, load_factors
from tokenyard.routing.policies.tuned import load_tuned
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import load_scenario, scenario_names
from tokenyard.routing.simulator.streams import StreamSource

PACKAGE = Path(str(resources.files("tokenyard")))
FOLDER = PACKAGE / "artifacts" / "routing"
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.npz"))
TUNED = sorted(path.stem for path in (PACKAGE / "scenarios" / "tuned" / "routing").glob("*.json"))


@pytest.mark.parametrize("name", SHIPPED)
def test_what_ships_orders_and_beats_the_rule_that_would_decide_without_it(name):
    metadata = PolicyArtifact.load(FOLDER / f"{name}.npz").metadata
    found, beaten = metadata.metrics, metadata.lineage["beats"]
    assert beaten == best_tuned_rule(name)
    assert found["delta_mean_ci_high"] < 0.0
    assert found["delta_p99_ci_high"] <= 0.02
    assert found["delta_slo_ci_low"] <= 0.0


@pytest.mark.parametrize("name", sorted(set(scenario_names()) - set(SHIPPED)))
def test_where_no_champion_ships_the_best_tuned_rule_decides_and_is_named(name):
    with pytest.raises(NoChampionError):
        PolicyArtifact.champion(name)
    scenario = load_scenario(name)
    assert PROBLEM.candidate(scenario, "champion").source == f"the rule {rule_for(scenario)}"


@pytest.mark.parametrize("name", TUNED)
def test_what_ships_has_the_smallest_worst_regret_of_those_best_at_the_load(name):
    tuned = load_tuned(name)
    scores = tuned.load_scores
    scenario = load_scenario(name)
    rule = rule_for(scenario)
    assert rule == best_tuned_rule(name) == tuned.best_over_loads()
    loads = list(load_factors(StreamSource(scenario)))
    table = np.array([[of_rule[load] for load in loads] for of_rule in scores.values()])
    regret = ((table.max(axis=0) - table) / abs(table.max(axis=0))).max(axis=1)
    assert list(scores).index(rule) == regret.argmin()
    assert table[:, loads.index(FULL_LOAD)].argmax() == 0
    PROBLEM.candidate(scenario, rule)


def test_no_rule_is_best_where_none_was_tuned():
    assert best_tuned_rule("nowhere") is None
    for name, rule in (("poisson_085", DEFAULT_SERVER_RULE), ("churn", DEFAULT_RULE)):
        assert rule_for(load_scenario(name).model_copy(update={"name": "nowhere"})) == rule
