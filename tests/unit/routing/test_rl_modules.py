"""What our networks add to RLlib's: the normaliser, and the way out of the paper's agents."""

from functools import partial

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns

from tokenyard.rl.modules import SMALLEST_STD, RunningNormaliser
from tokenyard.rl.routing.export import export_policy
from tokenyard.rl.routing.training import build_config, paper
from tokenyard.routing.artifact import KINDS, learned_policy, network_preferences
from tokenyard.routing.observation import observation_size
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.constant_rate import ClusterSim
from tokenyard.routing.simulator.run import run_policy
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, stream_rng
from tokenyard.routing.types import OrderingPolicy

ALGORITHMS = ("ppo", "a2c", "dqn")


def a_module(algorithm, num_servers=3):
    """The learner's module of an algorithm, built without starting anything."""
    config = build_config(algorithm, paper(), "unused", {})
    size = observation_size(num_servers, whole=False)
    spaces = Box(-20, 20, (size,), np.float32), Discrete(num_servers)
    spec = config.get_rl_module_spec(spaces={DEFAULT_MODULE_ID: spaces})
    torch.manual_seed(0)
    return spec.build()


def disturb(module):
    """Give every weight a value that no code path can hide."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3, generator=rng)


def greedy_actions(module, observations):
    output = module.forward_inference({Columns.OBS: torch.from_numpy(observations)})
    if Columns.ACTIONS in output:
        return output[Columns.ACTIONS].numpy()
    return output[Columns.ACTION_DIST_INPUTS].argmax(dim=1).numpy()


def a_run(num_requests=300):
    """A cluster under load that is driven at random, so that queues build up."""
    scenario = load_scenario("poisson_085")
    source = StreamSource(scenario)
    sim = ClusterSim(scenario, 1, num_requests)
    sim.load(0, source.sample(num_requests, stream_rng(5, "validation")))
    return source, sim


observations_strategy = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 40), st.just(3)), elements=st.floats(-20, 20, width=32)
)


@given(batches=st.lists(observations_strategy, min_size=1, max_size=5))
def test_the_normaliser_knows_the_moments_of_all_it_was_shown(batches):
    normaliser = RunningNormaliser(3)
    for batch in batches:
        normaliser.update(torch.from_numpy(batch))
    seen = np.concatenate(batches).astype(np.float64)
    np.testing.assert_allclose(normaliser.mean, seen.mean(0), atol=1e-3)
    np.testing.assert_allclose(normaliser.variance, seen.var(0), atol=1e-2, rtol=1e-3)
    assert float(normaliser.count) == len(seen)


def test_a_number_that_never_varied_does_not_explode_when_it_does():
    normaliser = RunningNormaliser(1)
    normaliser.update(torch.zeros(1000, 1))
    assert float(normaliser(torch.ones(1))) == pytest.approx(1.0 / SMALLEST_STD)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_trainer_and_server_pick_the_same_replica_on_the_same_snapshots(algorithm):
    source, sim = a_run()
    module = a_module(algorithm)
    disturb(module)
    artifact = export_policy(module, source, algorithm)
    policy = learned_policy(artifact)
    rng = np.random.default_rng(1)
    observations = sim.observe()
    for _ in range(299):
        trained = int(greedy_actions(module, observations)[0])
        assert policy.route(sim.view().request(), sim.view().snapshots()) == trained
        assert int(network_preferences(artifact, observations).argmax()) == trained
        observations, _ = sim.step_and_observe(rng.integers(0, 3, 1))


def test_a_network_with_an_order_is_served_as_it_is_validated():
    source, _ = a_run()
    module = a_module("ppo")
    disturb(module)
    stream = source.sample(400, stream_rng(5, "validation"))
    sim = ClusterSim(source.scenario, 1, 400)
    # The last one orders nothing, whatever came before.
    for order in ((8.0, 5.0, 2.0, 4.0), ()):
        artifact = export_policy(module, source, "ppo", order=order)
        streams, make = StreamSet([stream], "drawn"), partial(learned_policy, artifact)
        assert isinstance(make(), OrderingPolicy) == artifact.orders == bool(order)
        (run,) = run_policy(source.scenario, streams, lambda rng, make=make: make(), 0)
        sim.load(0, stream)
        KINDS["mlp"].run(artifact, sim)
        np.testing.assert_array_equal(sim.view().outcomes().response_s, run.outcomes.response_s)
