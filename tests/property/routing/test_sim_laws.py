"""Laws of the token-level cluster; docs/invariants.md lists them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.instances import (
    DISCIPLINES,
    KNOWN_FINISH,
    a_scenario,
    a_stream,
    instances,
    loaded,
    one,
    ordered_instances,
    random_stream,
    step,
)
from sizes import scaled

from tokenyard.routing import observation as ob
from tokenyard.routing.scenario import RewardWeights
from tokenyard.routing.simulator import constant_rate_kernel as kernel
from tokenyard.routing.simulator.constant_rate import ClusterSim

SERVERS = [(3000.0, 3), (5000.0, 5), (7000.0, 7)]
few = settings(max_examples=scaled(100))
seeds = st.integers(0, 2**32 - 1)


def bytes_of(sim):
    arrays = (*sim.arrays, sim.rewards)
    return b"".join(array.tobytes() for array in arrays)


@few
@given(instances())
def test_every_placed_request_is_completed_waiting_running_or_dropped_at_any_time(instance):
    scenario, stream, actions = instance
    sim = loaded(scenario, stream)
    for placed, action in enumerate(actions, start=1):
        sim.step(one(action))
        outcomes = sim.view().outcomes()
        completed = np.isfinite(outcomes.response_s).sum()
        dropped = (outcomes.server[:placed] == -1).sum()
        outstanding = sim.arrays.state[0][:, [kernel.WAITING, kernel.RUNNING]].sum()
        assert placed == completed + outstanding + dropped
    sim.drain()
    outcomes = sim.view().outcomes()
    assert (np.isnan(outcomes.response_s) == (outcomes.server == -1)).all()
    assert not sim.arrays.state[0][:, [kernel.WAITING, kernel.RUNNING, kernel.TOKENS]].any()


@few
@given(instances())
def test_no_request_waits_at_a_server_with_a_free_slot_or_beyond_the_queue_limit(instance):
    scenario, stream, actions = instance
    sim = loaded(scenario, stream)
    for action in actions:
        sim.step(one(action))
        waiting, running = sim.arrays.state[0][:, [kernel.WAITING, kernel.RUNNING]].T
        assert (running <= sim.arrays.params[:, kernel.SLOTS]).all()
        assert ((waiting == 0) | (running == sim.arrays.params[:, kernel.SLOTS])).all()
        assert (waiting <= scenario.queue_limit).all()
        if scenario.overflow == "drop":
            assert (waiting + running <= sim.arrays.params[:, kernel.CONCURRENCY]).all()


@few
@given(instances())
def test_the_clock_never_goes_back_and_no_request_is_served_faster_than_its_server(instance):
    scenario, stream, actions = instance
    sim = loaded(scenario, stream)
    last_s = sim.view().now_s()
    for action in actions:
        sim.step(one(action))
        assert sim.view().now_s() >= last_s
        last_s = sim.view().now_s()
    sim.drain()
    outcomes = sim.view().outcomes()
    done = outcomes.server >= 0
    speed = sim.arrays.params[outcomes.server[done], kernel.SLOT_TOKENS_PER_S]
    held_back_s = (stream[:, kernel.DISPATCH_S] - stream[:, kernel.ARRIVAL_S])[done]
    assert (
        outcomes.response_s[done] >= held_back_s + outcomes.total_tokens[done] / speed - 1e-9
    ).all()


@few
@given(instances(disciplines=("serial",)))
def test_a_serial_server_serves_in_order_of_arrival_as_lindley_says(instance):
    scenario, stream, actions = instance
    sim = loaded(scenario, stream)
    for action in actions:
        sim.step(one(action))
    sim.drain()
    outcomes = sim.view().outcomes()
    finish_s = np.full(scenario.num_servers, -np.inf)
    for row, server, response_s in zip(stream, outcomes.server, outcomes.response_s, strict=True):
        if server < 0:
            continue
        start_s = max(finish_s[server], row[kernel.DISPATCH_S])
        finish_s[server] = start_s + row[kernel.TRUE_TOTAL] / sim.arrays.params[server, 0]
        assert response_s == pytest.approx(finish_s[server] - row[kernel.ARRIVAL_S], abs=1e-9)


def ran(scenario, stream, actions, keys):
    sim = loaded(scenario, stream)
    for action, key in zip(actions, keys, strict=True):
        step(sim, action, key)
    sim.drain()
    return sim


def starts_s(sim, stream):
    """When each request started; NaN where it was dropped."""
    outcomes = sim.view().outcomes()
    speed = sim.arrays.params[outcomes.server, kernel.SLOT_TOKENS_PER_S]
    return stream[:, kernel.ARRIVAL_S] + outcomes.response_s - outcomes.total_tokens / speed


@few
@given(ordered_instances(disciplines=KNOWN_FINISH))
def test_a_request_is_overtaken_only_by_those_that_arrive_within_the_bound(instance):
    scenario, stream, actions, keys = instance
    sim = ran(scenario, stream, actions, keys)
    start_s, server = starts_s(sim, stream), sim.view().outcomes().server
    for later in range(len(stream)):
        overtaken = (start_s[:later] > start_s[later] + 1e-9) & (server[:later] == server[later])
        latest_s = stream[:later, kernel.DISPATCH_S] + scenario.max_overtaking_s
        assert (stream[later, kernel.ARRIVAL_S] <= latest_s[overtaken]).all()


@few
@given(ordered_instances(disciplines=("serial",)))
def test_a_serial_server_is_busy_at_the_same_times_in_any_order(instance):
    scenario, stream, actions, keys = instance
    scenario = scenario.model_copy(update={"queue_limit": 100, "overflow": "queue"})
    busy = []
    for some in (keys, [None] * len(keys)):
        sim = ran(scenario, stream, actions, some)
        start_s, server = starts_s(sim, stream), sim.view().outcomes().server
        end_s = stream[:, kernel.ARRIVAL_S] + sim.view().outcomes().response_s
        for which in range(scenario.num_servers):
            here = np.argsort(start_s[server == which], kind="stable")
            begin, end = start_s[server == which][here], end_s[server == which][here]
            gaps = begin[1:] > end[:-1] + 1e-9
            busy.append(np.concatenate([begin[:1], begin[1:][gaps], end[:-1][gaps], end[-1:]]))
    for ordered, first_come in zip(
        busy[: scenario.num_servers], busy[scenario.num_servers :], strict=True
    ):
        assert ordered == pytest.approx(first_come, abs=1e-9)


@few
@given(instances())
def test_keys_that_are_arrivals_change_nothing(instance):
    scenario, stream, actions = instance
    stream[:, kernel.DISPATCH_S] = stream[:, kernel.ARRIVAL_S]
    none = ran(scenario, stream, actions, [None] * len(stream))
    by_arrival = ran(scenario, stream, actions, stream[:, kernel.ARRIVAL_S].tolist())
    assert none.arrays.outcomes.tobytes() == by_arrival.arrays.outcomes.tobytes()
    assert none.arrays.state.tobytes() == by_arrival.arrays.state.tobytes()


@few
@given(ordered_instances(disciplines=KNOWN_FINISH))
def test_all_responses_are_paid_for_once_in_any_order(instance):
    scenario, stream, actions, keys = instance
    # From the first request on: what was credited before cannot be taken back.
    keys = [0.0 if key is None else key for key in keys]
    only_response = RewardWeights(
        processing=0, queue=0, overload=0, balance=0, accept=0, drop=0, response=-1
    )
    sim = loaded(scenario.model_copy(update={"reward": only_response}), stream)
    earned = sum(step(sim, *both) for both in zip(actions, keys, strict=True))
    earned += float(sim.drain()[0])
    assert -earned == pytest.approx(np.nansum(sim.view().outcomes().response_s), abs=1e-9)


@few
@given(instances(disciplines=KNOWN_FINISH))
def test_with_exact_predictions_a_request_waits_as_long_as_the_router_was_told(instance):
    scenario, stream, actions = instance
    stream[:, kernel.PREDICTED_TOTAL] = stream[:, kernel.TRUE_TOTAL]
    sim = loaded(scenario, stream)
    told_s = []
    for action in actions:
        told_s.append(sim.view().snapshots()[action].wait_s)
        sim.step(one(action))
    sim.drain()
    outcomes = sim.view().outcomes()
    done = outcomes.server >= 0
    service_s = outcomes.total_tokens / sim.arrays.params[outcomes.server, kernel.SLOT_TOKENS_PER_S]
    start_s = stream[:, kernel.ARRIVAL_S] + outcomes.response_s - service_s
    waited_s = start_s - stream[:, kernel.DISPATCH_S]
    assert waited_s[done] == pytest.approx(np.array(told_s)[done], abs=1e-9)


@pytest.mark.parametrize("discipline", KNOWN_FINISH)
@few
@given(seed=seeds)
def test_the_response_paid_for_at_the_decision_is_the_one_recorded_at_completion(discipline, seed):
    rng = np.random.default_rng(seed)
    only_response = RewardWeights(
        processing=0, queue=0, overload=0, balance=0, accept=0, drop=0, response=-1
    )
    scenario = a_scenario(SERVERS, discipline, queue_limit=3, reward=only_response)
    stream = random_stream(scenario, rng, 200, load=1.5)
    sim = loaded(scenario, stream)
    rewards = [float(sim.step(one(a))[0]) for a in rng.integers(0, 3, len(stream))]
    sim.drain()
    expected = -np.nan_to_num(sim.view().outcomes().response_s)
    assert rewards == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("discipline", DISCIPLINES)
@few
@given(seed=seeds)
def test_equal_streams_and_actions_give_equal_bytes_though_another_simulator_runs_between(
    discipline, seed
):
    rng = np.random.default_rng(seed)
    scenario = a_scenario(SERVERS, discipline)
    stream, other_stream = (random_stream(scenario, rng, 60) for _ in range(2))
    actions = rng.integers(0, 3, (60, 1))
    alone, together, other = (loaded(scenario, s) for s in (stream, stream, other_stream))
    for action in actions:
        alone.step_and_observe(action)
    for action, other_action in zip(actions, reversed(actions), strict=True):
        together.step_and_observe(action)
        other.step_and_observe(other_action)
    assert bytes_of(alone) == bytes_of(together)
    assert alone.observations.tobytes() == together.observations.tobytes()


@pytest.mark.parametrize("discipline", DISCIPLINES)
@few
@given(seed=seeds)
def test_a_copy_among_many_lives_the_life_it_would_live_alone(discipline, seed):
    rng = np.random.default_rng(seed)
    scenario = a_scenario(SERVERS, discipline)
    streams = [random_stream(scenario, rng, 40) for _ in range(3)]
    actions = rng.integers(0, 3, (40, 3))
    many = ClusterSim(scenario, 3, 40)
    for copy, stream in enumerate(streams):
        many.load(copy, stream)
    for row in actions:
        many.step(row)
    for copy, stream in enumerate(streams):
        single = loaded(scenario, stream)
        for row in actions:
            single.step(row[[copy]])
        assert single.arrays.state[0].tobytes() == many.arrays.state[copy].tobytes()
        assert single.arrays.tables[0].tobytes() == many.arrays.tables[copy].tobytes()


@pytest.mark.parametrize("discipline", DISCIPLINES)
@few
@given(seed=seeds, order=st.permutations(range(3)))
def test_permuting_the_servers_permutes_what_is_seen_and_changes_no_response(
    discipline, seed, order
):
    rng = np.random.default_rng(seed)
    # Slots of unequal speed under every discipline: equal ones are ranked by position.
    servers = [(3000.0, 3), (5000.0, 4), (7000.0, 5)]
    scenario = a_scenario(servers, discipline)
    permuted = a_scenario([servers[i] for i in order], discipline)
    stream = random_stream(scenario, rng, 60)
    sim, twin = loaded(scenario, stream), loaded(permuted, stream)
    for action in rng.integers(0, 3, len(stream)):
        reward = sim.step(one(action))[0]
        assert twin.step(one(order.index(action)))[0] == pytest.approx(reward, abs=1e-7)
        assert sim.arrays.tables[0][list(order)].tobytes() == twin.arrays.tables[0].tobytes()
    sim.drain()
    twin.drain()
    assert sim.view().outcomes().response_s.tobytes() == twin.view().outcomes().response_s.tobytes()


@few
@given(
    seed=seeds,
    wrong=st.sampled_from([-1, 3, 2**40, -(2**40)]),
    copy=st.integers(0, 2),
)
def test_an_action_that_names_no_server_is_refused_and_changes_nothing(seed, wrong, copy):
    rng = np.random.default_rng(seed)
    scenario = a_scenario(SERVERS)
    sim = ClusterSim(scenario, 3, 20)
    for each in range(3):
        sim.load(each, random_stream(scenario, rng, 20))
    for row in rng.integers(0, 3, (5, 3)):
        sim.step(row)
    before = bytes_of(sim)
    actions = np.array([0, 1, 2])
    actions[copy] = wrong
    with pytest.raises(ValueError, match=rf"action {wrong} of copy {copy} names no server"):
        sim.step_and_observe(actions)
    assert bytes_of(sim) == before


@few
@given(seed=seeds)
def test_run_linear_with_zero_weights_is_shortest_expected_delay(seed):
    rng = np.random.default_rng(seed)
    scenario = a_scenario(SERVERS)
    stream = random_stream(scenario, rng, 60)
    compiled, stepped = loaded(scenario, stream), loaded(scenario, stream)
    compiled.run_linear(np.zeros(ob.NUM_MARGINAL_WEIGHTS), 2000.0)
    for _ in range(len(stream)):
        tokens = stepped.view().request().predicted_total_tokens
        delays_s = [s.wait_s + tokens / s.tokens_per_s for s in stepped.view().snapshots()]
        stepped.step(one(int(np.argmin(delays_s))))
    stepped.drain()
    assert compiled.arrays.outcomes.tobytes() == stepped.arrays.outcomes.tobytes()


def test_the_next_action_of_a_copy_that_was_just_loaded_can_be_ignored():
    scenario = a_scenario(SERVERS)
    sim = loaded(scenario, a_stream([0.0, 1.0], [2000.0, 2000.0]))
    sim.skip_next(0)
    assert sim.step(one(99))[0] == 0.0
    assert sim.view().snapshots()[0].num_running == 0
    sim.step(one(0))
    assert sim.view().now_s() == 1.0


def test_a_stream_that_is_over_is_not_stepped_further():
    sim = loaded(a_scenario(SERVERS), a_stream([0.0], [2000.0]))
    sim.step(one(0))
    with pytest.raises(ValueError, match="the stream of copy 0 is over"):
        sim.step(one(0))
