import sys

import numpy as np
import pytest
from unit.region_builders import a_scenario, a_stream

from tokenyard.regions.activation import ActivationRule, targets_for
from tokenyard.regions.scenario import load_regions, region_names
from tokenyard.regions.servers import make_cluster
from tokenyard.regions.topology import load_topology
from tokenyard.regions.types import RegionState
from tune_configs.experiment import load_experiments


@pytest.mark.parametrize("name", region_names())
def test_shipped_scenarios_are_read_and_named_as_their_file(name):
    assert load_regions(name).name == name


@pytest.mark.parametrize(
    ("name", "num_regions", "longest_km"),
    [
        ("sndlib/abilene", 12, 4707),
        ("sndlib/polska", 12, 811),
        ("gabriel/25/0", 25, 638),
        ("sndlib/cost266", 37, 4032),
    ],
)
def test_topologies_of_topohub_have_their_published_size(name, num_regions, longest_km):
    pytest.importorskip("topohub")
    topology = load_topology(name)
    assert topology.num_regions == num_regions
    assert topology.path_km.max() == pytest.approx(longest_km, rel=0.01)
    assert topology.path_km == pytest.approx(topology.path_km.T)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [("WideJpn", "KDDI Otemachi", "NTT Otemachi"), ("Aarnet", "Sydney1", "Sydney2")],
)
def test_regions_at_one_place_are_as_near_as_their_link_says(name, one, other):
    pytest.importorskip("topohub")
    topology = load_topology(f"topozoo/{name}")
    between = topology.path_km[topology.regions.index(one), topology.regions.index(other)]
    assert between == pytest.approx(0.0, abs=1e-3)


def test_a_place_without_a_name_is_named_by_its_number():
    pytest.importorskip("topohub")
    regions = load_topology("caida/2024-08/1221").regions
    assert {"9545", "Darwin"} <= set(regions)


@pytest.mark.parametrize("name", ["norway", "ta1", "di-yuan"])
def test_places_that_are_no_degrees_are_refused(name):
    pytest.importorskip("topohub")
    with pytest.raises(ValueError, match=f"sndlib/{name}' lie on a plane of no known scale"):
        load_topology(f"sndlib/{name}")


def test_table_latencies_are_scaled_to_their_mean_and_geographic_ones_are_light_in_fibre():
    topology = load_topology("synthetic/gabriel/9/2")
    off = ~np.eye(9, dtype=bool)
    assert topology.latency_s(0.08)[off].mean() == pytest.approx(0.08)
    assert topology.latency_s() == pytest.approx(topology.path_km / 200_000)


def test_without_topohub_its_topologies_are_refused_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "topohub", None)
    load_topology.cache_clear()
    with pytest.raises(ValueError, match=r"pip install 'tokenyard\[train\]'"):
        load_topology("sndlib/abilene")


def test_wrong_names_are_refused_with_what_would_be_right():
    with pytest.raises(ValueError, match="did you mean 'continents'"):
        load_regions("continent")
    with pytest.raises(ValueError, match="synthetic/continents"):
        load_topology("synthetic/ring")
    with pytest.raises(ValueError, match="too few"):
        make_cluster(a_scenario(server_counts={"T4": 7}))


def test_clusters_have_the_servers_they_are_told_and_at_least_two_in_a_region():
    scenario = a_scenario()
    cluster = make_cluster(scenario)
    names = list(scenario.kinds)
    for name, count in scenario.server_counts.items():
        assert (cluster.kind == names.index(name)).sum() == count
    assert np.diff(cluster.first_server).min() >= 2


def test_mean_demand_is_the_load_that_is_asked_for():
    scenario = a_scenario(demand={"load": 0.7}, num_slots=480)
    cluster = make_cluster(scenario)
    capacity = (scenario.slot_s / cluster.mean_service_s[cluster.kind]).sum()
    stream = a_stream(scenario)
    assert stream.counts.sum(axis=1).mean() == pytest.approx(0.7 * capacity, rel=0.03)
    slot = (stream.numbers[:, 0] // scenario.slot_s).astype(int)
    assert (np.bincount(slot, minlength=480) == stream.counts.sum(axis=1)).all()


def a_state(server_tasks, waiting, active=0):
    num = len(server_tasks)
    tasks = np.asarray(server_tasks, dtype=float)
    return RegionState(
        45.0, np.zeros((num, num)), np.zeros((1, num)), np.zeros((1, num)),
        np.asarray(waiting, float), np.zeros(num), np.full(num, active), np.ones(num),
        np.eye(num), tasks, np.zeros_like(tasks),
    )  # fmt: skip


def test_where_servers_are_alike_activation_is_equation_6():
    rule = ActivationRule(sigma=1.65, utilisation=1.0)
    state = a_state([[3.0] * 10, [3.0] * 10, [3.0] * 4 + [0.0] * 6], waiting=[2, 0, 50])
    inflow = np.array([9.0, 0.0, 30.0])
    need = state.waiting + inflow + 1.65 * np.sqrt(inflow)
    expected = [np.ceil(need[0] / 3), 1, 4]
    assert targets_for(state, inflow, rule).tolist() == expected


def test_activation_counts_no_server_that_is_down():
    rule = ActivationRule(sigma=0.0, utilisation=1.0)
    state = a_state([[0.0, 3.0, 0.0, 3.0], [0.0] * 4], waiting=[0, 0])
    assert targets_for(state, np.array([5.0, 1.0]), rule).tolist() == [2, 0]


@pytest.mark.parametrize("name", ["default", "smoke"])
def test_the_default_experiments_need_no_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "topohub", None)
    load_topology.cache_clear()
    scenario = load_regions(load_experiments(f"regions:{name}")[0].scenario)
    assert load_topology(scenario.topology).num_regions == 6
