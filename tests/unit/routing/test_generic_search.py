"""The search for a policy for any cluster: what it is searched on, and what comes out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from tokenyard.routing.drawn_clusters import draw_cluster
from tokenyard.routing.scores.any_cluster import NUM_ENGINE_WEIGHTS, NUM_SERVER_WEIGHTS
from tokenyard.routing.search_any_cluster import (
    AnyClusterConfig,
    AnyClusterSearch,
    Found,
    TrainingCluster,
    any_cluster_artifact,
    search_cost,
)
from tokenyard.routing.search_order import LOSSES, candidates, cost, with_best
from tokenyard.routing.simulator.streams import stream_rng

TINY = AnyClusterConfig(population=4, num_elites=2, clusters=2, requests_per_cluster=60)


@given(seed=st.integers(0, 10_000))
def test_drawn_servers_lie_in_the_documented_ranges(seed):
    cluster = draw_cluster(np.random.default_rng(seed))
    speeds = [server.tokens_per_s for server in cluster.servers]
    assert 2 <= cluster.num_servers <= 32
    assert min(speeds) >= 2000
    assert max(speeds) <= 25_000
    assert 0.12 <= cluster.arrivals.load <= 0.98


def test_small_and_large_equal_and_unequal_clusters_are_drawn():
    drawn = [draw_cluster(np.random.default_rng(seed)) for seed in range(200)]
    slotted = [draw_cluster(np.random.default_rng(seed), "slots") for seed in range(50)]
    kinds = [len({s.tokens_per_s for s in one.servers}) for one in drawn]
    assert {1, 2, 3} < set(kinds)
    assert min(one.num_servers for one in drawn) == 2
    assert max(one.num_servers for one in drawn) > 20
    assert {one.discipline for one in drawn} == {"serial"}
    assert {one.discipline for one in slotted} == {"parallel_split", "parallel_full"}
    assert {one.output_length for one in drawn} == {"by_context", "none"}


@settings(max_examples=scaled(20))
@given(seed=st.integers(0, 10_000))
def test_drawn_fleets_lie_in_the_documented_ranges(seed):
    fleet = draw_cluster(np.random.default_rng(seed), "engines").fleet
    assert 2 <= len(fleet.replicas) <= 8
    assert 0 <= fleet.scrape_interval_s <= 2
    assert fleet.num_routers in (1, 2)


def test_fleets_with_fresh_and_with_stale_signals_with_churn_and_with_classes_are_drawn():
    seeds = range(100)
    drawn = [draw_cluster(np.random.default_rng(seed), "engines").fleet for seed in seeds]
    assert {one.scrape_interval_s < 0.1 for one in drawn} == {True, False}
    assert {one.churn is None for one in drawn} == {True, False}
    assert {len(one.classes) for one in drawn} == {1, 2}


@pytest.mark.parametrize(
    ("kind", "num_weights"),
    [
        ("servers", NUM_SERVER_WEIGHTS),
        ("slots", NUM_SERVER_WEIGHTS),
        ("engines", NUM_ENGINE_WEIGHTS),
    ],
)
def test_equal_seeds_search_alike_and_a_restored_search_goes_on(kind, num_weights):
    one, same = AnyClusterSearch(kind, TINY, 3), AnyClusterSearch(kind, TINY, 3)
    one.step()
    same.restore(one.state())
    assert one.step() == same.step()
    np.testing.assert_array_equal(one.mean, same.mean)
    assert one.mean.shape == (num_weights,)
    assert one.mean.any()


def test_searches_of_servers_and_of_slots_move_different_weights():
    moved = []
    for kind in ("servers", "slots"):
        search = AnyClusterSearch(kind, TINY, 3)
        search.step()
        moved.append(search.mean != 0.0)
    np.testing.assert_array_equal(moved[0], ~moved[1])


@pytest.mark.parametrize("kind", ["servers", "slots", "engines"])
def test_no_rule_of_a_cluster_scores_better_than_its_best_one(kind):
    """Zero weights are one of the rules that the best is chosen from."""
    rng = stream_rng(1, "training")
    cluster = TrainingCluster(draw_cluster(rng, kind), 2, 80, rng)
    best = cluster.best_rule()
    weights = np.zeros(NUM_ENGINE_WEIGHTS if kind == "engines" else NUM_SERVER_WEIGHTS)
    assert cluster.try_weights(weights).score.mean() <= best.score.mean()


def found(mean_s, p99_s=(4.0, 4.0), violations=(0.1, 0.1)):
    return Found(-np.array(mean_s), np.array(mean_s), np.array(p99_s), np.array(violations))


RULES = found([1.0, 1.0])


@pytest.mark.parametrize(
    "worse",
    [found([0.7, 1.2]), found([1.0, 1.0], p99_s=(4.0, 6.0)), found([1, 1], (4, 4), (0.1, 0.3))],
)
def test_a_gain_on_one_kind_of_cluster_does_not_excuse_a_loss_on_another(worse):
    assert search_cost(AnyClusterConfig(), worse, RULES, np.array([0, 1])) > 0.0
    assert search_cost(AnyClusterConfig(), RULES, RULES, np.array([0, 1])) == 0.0


def test_a_gain_everywhere_costs_less_than_nothing():
    assert search_cost(AnyClusterConfig(), found([0.9, 0.95]), RULES, np.array([0, 0])) < 0.0


def test_the_order_that_costs_least_is_exported_with_its_placement():
    rows = [
        {"cluster": cluster, "array": array, "placement": placement, "order": order, **loss}
        for cluster in range(3)
        for array in ("server_weights", "engine_weights")
        for placement, order, loss in (
            ("learned", "0,0", dict.fromkeys(LOSSES, 0.2)),
            ("learned", "20,0", dict.fromkeys(LOSSES, 0.0 if array[0] == "s" else 0.3)),
            ("rule", "0,20", dict.fromkeys(LOSSES, 0.1)),
        )
    ]
    start = any_cluster_artifact(np.ones(NUM_SERVER_WEIGHTS), np.ones(NUM_ENGINE_WEIGHTS))
    best = with_best(start, candidates(rows))
    assert best.arrays["server_weights"].all()
    assert not best.arrays["engine_weights"].any()
    assert best.arrays["server_order"].tolist() == [20.0, 0.0]
    assert best.arrays["engine_order"].tolist() == [0.0, 20.0]
    assert best.orders
    assert not start.orders


def test_a_cost_is_the_mean_and_the_worst_tenth_of_the_worst_measure():
    level = dict.fromkeys(LOSSES, 0.0)
    assert cost([level] * 20) == 0.0
    assert cost([level] * 18 + [level | {"loss_p99": 0.5}] * 2) == pytest.approx(0.5)
