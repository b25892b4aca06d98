"""The search for a policy for any cluster: what it is searched on, and what comes out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenyard.observation import NUM_SCORE_WEIGHTS
from tokenyard.policies.learned import learned_policy
from tokenyard.rl.generic_search import (
    EveryCluster,
    GenericConfig,
    GenericSearch,
    StreamCosts,
    draw_cluster,
)
from tokenyard.sim.cluster import ClusterSim
from tokenyard.sim.streams import StreamSource, stream_rng

TINY = GenericConfig(
    population=6, num_elites=2, clusters=2, streams_per_generation=4, requests_per_stream=60
)


@given(seed=st.integers(0, 10_000))
def test_drawn_clusters_lie_in_the_documented_ranges(seed):
    cluster = draw_cluster(np.random.default_rng(seed))
    speeds = [server.tokens_per_s for server in cluster.servers]
    assert 2 <= cluster.num_servers <= 32
    assert min(speeds) >= 2000
    assert max(speeds) <= 10_000
    assert 0.3 <= cluster.arrivals.load <= 0.98


def test_small_and_large_equal_and_unequal_clusters_are_drawn():
    drawn = [draw_cluster(np.random.default_rng(seed)) for seed in range(200)]
    kinds = [len({s.tokens_per_s for s in one.servers}) for one in drawn]
    assert {1, 2, 3} < set(kinds)
    assert {2, 32} <= {one.num_servers for one in drawn}
    assert {one.discipline for one in drawn} == {"serial", "parallel_split", "parallel_full"}
    assert {one.output_length for one in drawn} == {"by_context", "none"}


def test_equal_seeds_search_alike_and_a_restored_search_goes_on():
    one, same = GenericSearch(TINY, 3), GenericSearch(TINY, 3)
    one.step()
    same.restore(one.state())
    one.step()
    same.step()
    np.testing.assert_array_equal(one.mean, same.mean)
    assert one.mean.any()


def test_the_rule_that_is_corrected_costs_as_much_as_itself():
    found = GenericSearch(TINY, 0).step()
    assert found["cost_over_baseline"] == pytest.approx(1.0)


def test_a_gain_on_one_cluster_does_not_excuse_a_loss_on_another():
    objective = EveryCluster(streams_per_cluster=1, tail_guard=1.0)
    ones = np.ones(2)
    rule = StreamCosts(cost_s=ones, p99_s=ones)
    uneven = StreamCosts(cost_s=np.array([0.7, 1.2]), p99_s=ones)
    assert objective.relative_cost(uneven, rule) > objective.relative_cost(rule, rule)


@pytest.mark.parametrize("num_servers", [2, 7, 32])
def test_the_policy_decides_between_any_number_of_servers(num_servers):
    search = GenericSearch(TINY, 0)
    search.mean = np.random.default_rng(0).normal(0, 0.3, NUM_SCORE_WEIGHTS)
    policy = learned_policy(search.artifact(any_cluster=True))
    cluster = next(
        one
        for one in (draw_cluster(np.random.default_rng(seed)) for seed in range(1000))
        if one.num_servers == num_servers
    )
    sim = ClusterSim(cluster, 1, 30)
    sim.load(0, StreamSource(cluster).sample(30, stream_rng(0, "validation")))
    for _ in range(29):
        replica = policy.route(sim.request(), sim.snapshots())
        assert 0 <= replica < num_servers
        sim.step(np.array([replica]))
