"""Placements with orders decide alike in compiled code and as policies."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.instances import a_scenario, random_stream
from sizes import scaled

from tokenyard.routing.drawn_clusters import draw_wide
from tokenyard.routing.policies.delay import MarginalDelay
from tokenyard.routing.policies.in_order import MarginalInOrder
from tokenyard.routing.policies.order import Boost, LateLast, Ordered, ShortestJob, Wspt
from tokenyard.routing.policies.tuned import FleetRules
from tokenyard.routing.scores.order import (
    BOOST_S,
    FIRST_COME,
    PREFILL_WEIGHT,
    SERVICE_WEIGHT,
    SET_BACK_WAITS,
)
from tokenyard.routing.simulator import make_simulator
from tokenyard.routing.simulator.run import run_policy
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import StreamSet

WEIGHED = FleetRules(wait_weight=3.0, others_weight=0.5)
ORDERS = [
    (ShortestJob, SERVICE_WEIGHT), (Wspt, PREFILL_WEIGHT), (Boost, BOOST_S),
    (LateLast, SET_BACK_WAITS),
]  # fmt: skip
# Nor their ratios simple: sums in another order would break ties between equal costs.
SERVERS = [(3011.0, 3), (5003.0, 5), (7307.0, 4)]
# Of the law's draws some with one replica, many, several routers, prefix caches, failures.
FLEETS = [seed for seed in range(40) if draw_wide(np.random.default_rng(seed)).scenario.fleet][:6]


def sent_and_done(scenario, stream, decide):
    sim = make_simulator(scenario, 1, len(stream))
    sim.load(0, stream)
    decide(sim)
    outcomes = sim.view().outcomes()
    return outcomes.server, outcomes.response_s


def as_policy(scenario, stream, policy):
    (run,) = run_policy(scenario, StreamSet([stream], "test"), lambda rng: policy, seed=0)
    return run.outcomes.server, run.outcomes.response_s


def weights_of(place, knob):
    weights = FIRST_COME.copy()
    weights[place] = knob
    return weights


def check(scenario, stream, knob):
    servers = server_model(scenario)
    rules = FleetRules(), WEIGHED
    in_order, weighed = (servers.linear(each.in_order_weights) for each in rules)

    def hand(sim, weights):
        next(iter(servers.placements(sim).values()))(sim, weights)

    for (rule, place), set_back_waits in product(ORDERS, (0.0, 4.0)):
        weights, order = weights_of(place, knob), rule(knob)
        if set_back_waits:
            weights[SET_BACK_WAITS] = order.set_back_waits = set_back_waits
        for decide, policy in (
            (partial(hand, weights=weights), Ordered(MarginalDelay(), order)),
            (partial(in_order, order=weights), MarginalInOrder(order)),
            (
                partial(weighed, order=weights),
                MarginalInOrder(order, WEIGHED.wait_weight, WEIGHED.others_weight),
            ),
        ):
            compiled = sent_and_done(scenario, stream, decide)
            plain = as_policy(scenario, stream, policy)
            np.testing.assert_array_equal(compiled[0], plain[0])
            np.testing.assert_allclose(compiled[1], plain[1])


@settings(max_examples=scaled(10))
@given(seed=st.integers(0, 2**32 - 1), knob=st.sampled_from([0.5, 5.0, 60.0]))
@pytest.mark.parametrize("discipline", ["serial", "parallel_split", "processor_sharing"])
def test_servers_are_ordered_as_the_policies_order(discipline, seed, knob):
    scenario = a_scenario(SERVERS, discipline)
    check(scenario, random_stream(scenario, np.random.default_rng(seed), 60, load=1.2), knob)


@pytest.mark.parametrize("seed", FLEETS)
def test_fleets_are_ordered_as_the_policies_order(seed):
    rng = np.random.default_rng(seed)
    # The policies' own code is slow.
    cluster = replace(draw_wide(rng), num_requests=150)
    (stream,) = cluster.streams(1, rng)
    check(cluster.scenario, stream, 20.0)
