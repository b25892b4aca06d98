from importlib import resources
from importlib.metadata import packages_distributions

import numpy as np
import pytest

from tokenyard.artifact import NoChampionError
from tokenyard.routing.artifact import PolicyArtifact, rule_for
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.scenario import load_scenario, scenario_names

SHIPPED = resources.files("tokenyard") / "artifacts" / "routing"


@pytest.mark.parametrize("name", ["envs", "tune_configs", "serve_app", "pipelines"])
def test_no_other_distribution_owns_our_top_level_names(name):
    assert set(packages_distributions().get(name, [])) <= {"tokenyard"}


def test_shipped_champions_are_under_a_megabyte_in_all():
    files = [file for file in SHIPPED.iterdir() if file.name.endswith(".npz")]
    assert files
    assert sum(len(file.read_bytes()) for file in files) < 1_000_000


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_has_a_champion_of_its_own_or_a_rule_that_can_be_made(name):
    scenario = load_scenario(name)
    try:
        artifact, source = PolicyArtifact.champion(name)
    except NoChampionError:
        context = PolicyContext(name, scenario.slo, np.random.default_rng(0), scenario.num_servers)
        make_policy(rule_for(scenario), context)
        return
    assert source == f"shipped routing/{name}"
    assert isinstance(artifact, PolicyArtifact)
    assert artifact.metadata.scenario == name
    assert artifact.metadata.output_length == scenario.output_length
    if scenario.fleet is None:
        assert artifact.metadata.num_replicas == scenario.num_servers
    else:
        assert artifact.metadata.num_replicas is None


def test_an_unknown_scenario_is_refused_with_the_closest_name():
    with pytest.raises(ValueError, match=r"did you mean 'bursty_serial'\?"):
        load_scenario("bursty_seriel")
