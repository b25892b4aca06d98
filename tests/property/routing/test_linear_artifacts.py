"""Policies of linear costs: simulator and server decide and order alike, for all weights.

Compiled variants of shortest expected delay are held to their policies here too.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.instances import DISCIPLINES, a_scenario, loaded, one, random_stream
from sizes import scaled

from tokenyard.routing.artifact import KINDS, PolicyArtifact, learned_policy
from tokenyard.routing.drawn_clusters import draw_cluster
from tokenyard.routing.metadata import ArtifactMetadata
from tokenyard.routing.observation import NUM_MARGINAL_SLO_WEIGHTS, NUM_MARGINAL_WEIGHTS
from tokenyard.routing.policies.delay import SedDump, SedReserve, ShortestExpectedDelay
from tokenyard.routing.simulator import make_simulator
from tokenyard.routing.simulator.run import run_policy
from tokenyard.routing.simulator.streams import StreamSet, StreamSource
from tokenyard.routing.types import EngineSnapshot, OrderingPolicy, ReplicaSnapshot, Request
from tokenyard.types import Slo

ORDER = np.array([8.0, 5.0, 2.0, 4.0])
SERVERS = [(3000.0, 3), (5000.0, 5), (5000.0, 5), (7000.0, 7)]
SIZES = (NUM_MARGINAL_WEIGHTS, NUM_MARGINAL_SLO_WEIGHTS)
ENGINE = EngineSnapshot(0.01, 1e-4, 1e-3, 1e-7, 512, 5e4, 0.2, 900.0, 300.0, 0)
seeds = st.integers(0, 2**32 - 1)


def an_artifact(weights, order=None, slo_s=2.0, num_replicas=None):
    metadata = ArtifactMetadata(
        kind="marginal", scenario="test", trainer="policy_search", num_replicas=num_replicas,
        slo_response_s=slo_s, mean_total_tokens=2000.0, output_length="none",
    )  # fmt: skip
    return PolicyArtifact(
        metadata, {"weights": weights, **({} if order is None else {"order": order})}
    )


def random_artifact(rng, order, slo_s, num_replicas=None):
    weights = rng.normal(0.0, 0.3, rng.choice(SIZES))
    return an_artifact(weights, order, slo_s, num_replicas)


def check(artifact, scenario, stream):
    sim = make_simulator(scenario, 1, len(stream))
    sim.load(0, stream)
    KINDS[artifact.metadata.kind].run(artifact, sim)
    policy = learned_policy(artifact)
    assert isinstance(policy, OrderingPolicy) == artifact.orders
    (run,) = run_policy(scenario, StreamSet([stream], "test"), lambda rng: policy, seed=0)
    np.testing.assert_array_equal(sim.view().outcomes().server, run.outcomes.server)
    np.testing.assert_allclose(sim.view().outcomes().response_s, run.outcomes.response_s)


@pytest.mark.parametrize("discipline", DISCIPLINES)
@settings(max_examples=scaled(10))
@given(seed=seeds, order=st.sampled_from([None, ORDER]))
def test_servers_are_chosen_and_ordered_as_the_gateway_would(discipline, seed, order):
    rng = np.random.default_rng(seed)
    scenario = a_scenario(SERVERS, discipline)
    stream = random_stream(scenario, rng, 60, load=1.2)
    check(random_artifact(rng, order, scenario.slo_response_s, len(SERVERS)), scenario, stream)


@pytest.mark.parametrize("order", [None, ORDER])
@pytest.mark.parametrize("seed", range(4))
def test_replicas_that_batch_are_chosen_and_ordered_as_the_gateway_would(seed, order):
    rng = np.random.default_rng(seed)
    scenario = draw_cluster(rng, "engines")
    stream = StreamSource(scenario).sample(80, rng)
    check(random_artifact(rng, order, scenario.slo_response_s), scenario, stream)


@pytest.mark.parametrize("engine", [None, ENGINE])
@settings(max_examples=scaled(60))
@given(seed=seeds)
def test_the_order_key_grows_with_the_request(engine, seed):
    rng = np.random.default_rng(seed)
    policy = learned_policy(random_artifact(rng, ORDER, 2.0, num_replicas=1))
    replica = ReplicaSnapshot("a", rng.uniform(1000, 9000), 4, 8, 1, 1, 900.0, engine=engine)
    short, long = Request(3.0, 100, 150.0), Request(3.0, 2000, 2500.0)
    keys = [policy.place(request, [replica]).order_key.key_s for request in (short, long)]
    assert 3.0 < keys[0] < keys[1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("order", "reason"), [(-ORDER, "below 0"), (np.zeros(3), "'order' has shape")]
)
def test_an_order_that_does_not_fit_is_refused(size, order, reason):
    with pytest.raises(ValueError, match=reason):
        an_artifact(np.zeros(size), order)


@settings(max_examples=scaled(20))
@given(seed=seeds, above=st.floats(0, 6000), dump=st.integers(0, 3))
def test_compiled_delay_rules_are_the_policies(seed, above, dump):
    rng = np.random.default_rng(seed)
    scenario = a_scenario(SERVERS)
    stream = random_stream(scenario, rng, 60, load=1.2)
    slo = Slo(scenario.slo_response_s)
    for reserve_above, dump_server, policy in (
        (np.inf, -1, ShortestExpectedDelay()),
        (above, -1, SedReserve(above)),
        (np.inf, dump, SedDump(slo, dump, len(SERVERS))),
    ):
        compiled, stepped = loaded(scenario, stream), loaded(scenario, stream)
        compiled.run_delay_rule(reserve_above, dump_server)
        for _ in range(len(stream)):
            stepped.step(one(policy.route(stepped.view().request(), stepped.view().snapshots())))
        stepped.drain()
        assert compiled.arrays.outcomes.tobytes() == stepped.arrays.outcomes.tobytes()
