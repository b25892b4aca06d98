"""Champions that ship place and order; where none does, the best tuned rule decides by its name."""

from importlib import resources
from pathlib import Path

import pytest

from tokenyard.artifact import NoChampionError
from tokenyard.routing.artifact import PolicyArtifact, resolve_champion, rule_for
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
