"""The compiled simulator against the oracle that shares no line with it."""

import numpy as np
import pytest
from hypothesis import given, settings
from oracle.instances import (
    DISCIPLINES,
    a_scenario,
    instances,
    loaded,
    ordered_instances,
    random_stream,
    step,
    the_oracle,
)
from sizes import scaled

from tokenyard.routing import observation as ob
from tokenyard.routing.scenario import RewardWeights
from tokenyard.routing.simulator import constant_rate_kernel as kernel
from tokenyard.routing.types import OrderKey


def assert_same_history(scenario, stream, actions, keys=None):
    oracle = the_oracle(scenario, stream, actions, keys)
    keys = [None] * len(stream) if keys is None else keys
    expected_rewards = oracle.rewards()
    sim = loaded(scenario, stream)
    for index, action in enumerate(actions):
        seen = oracle.seen[index]
        table, held = sim.arrays.tables[0], sim.arrays.state[0]
        assert table[:, ob.NUM_WAITING].tolist() == [s.num_waiting for s in seen]
        assert table[:, ob.NUM_RUNNING].tolist() == [s.num_running for s in seen]
        # The exponential mean depends on the order in which requests completed.
        assert table[:, ob.MEAN_RESPONSE_S] == pytest.approx(
            [s.mean_response_s for s in seen], abs=1e-9, nan_ok=True
        )
        predicted = [s.predicted_tokens for s in seen]
        assert table[:, ob.TOKENS_IN_FLIGHT] == pytest.approx(predicted, abs=1e-6)
        assert held[:, kernel.TOKENS] == pytest.approx([s.tokens for s in seen], abs=1e-6)
        reward = step(sim, action, keys[index])
        assert reward == pytest.approx(expected_rewards[index], abs=1e-7)
    sim.drain()
    outcomes = sim.view().outcomes()
    servers = [job.action if job.accepted else -1 for job in oracle.jobs]
    responses = [job.response_s for job in oracle.jobs]
    assert outcomes.server.tolist() == servers
    assert outcomes.response_s == pytest.approx(responses, rel=0, abs=1e-9, nan_ok=True)
    waiting = [sum(s.num_waiting for s in seen) for seen in oracle.seen]
    assert outcomes.waiting_seen.tolist() == waiting


@settings(max_examples=scaled(400))
@given(instances())
def test_the_kernel_tells_the_same_history_as_the_oracle_even_when_events_coincide(instance):
    assert_same_history(*instance)


@settings(max_examples=scaled(400))
@given(ordered_instances())
def test_the_kernel_starts_requests_in_the_order_of_their_keys_as_the_oracle_does(instance):
    assert_same_history(*instance)


@settings(max_examples=scaled(400))
@given(ordered_instances(late=True))
def test_the_kernel_sets_back_those_who_are_late_as_the_oracle_does(instance):
    assert_same_history(*instance)


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_tells_the_same_history_as_the_oracle_on_long_random_streams(discipline, seed):
    rng = np.random.default_rng(seed)
    scenario = a_scenario(
        [(3000.0, 3), (5000.0, 5), (7000.0, 7)],
        discipline,
        queue_limit=[1, 5, 50, 1000][seed],
        overflow=["queue", "drop"][seed % 2],
        reward=RewardWeights(complete=1.0, slo_at_completion=-5.0),
    )
    stream = random_stream(scenario, rng, 3000, load=1.1)
    if seed == 2:
        stream[:, kernel.DISPATCH_S] = np.ceil(stream[:, kernel.ARRIVAL_S] / 0.1) * 0.1
    actions = rng.integers(0, 3, len(stream)).tolist()
    assert_same_history(scenario, stream, actions)
    arrival_s = stream[:, kernel.ARRIVAL_S]
    key_s = arrival_s + rng.exponential(20.0, len(stream))
    late_at_s = arrival_s + rng.exponential(5.0, len(stream))
    late_key_s = key_s + rng.exponential(20.0, len(stream))
    keys = [OrderKey(*key) for key in np.stack([key_s, late_at_s, late_key_s], axis=1).tolist()]
    assert_same_history(scenario, stream, actions, keys)


def test_what_was_credited_at_a_decision_stays_when_it_is_overtaken_later():
    scenario = a_scenario(
        [(1000.0, 1)], reward=RewardWeights(tail=-1.0, tail_after_s=1.0), queue_limit=2
    )
    row = np.zeros(kernel.NUM_REQUEST)
    row[:6] = [0.5, 0.125, 500.0, 250.0, 500.0, 0.25]
    assert_same_history(
        scenario, np.stack([row] * 4), [0] * 4, [None, None, OrderKey(-0.875), None]
    )
