"""Orders of what waits: what each says, and what holds for all of them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.instances import a_scenario, random_stream
from oracle.slow_in_order import SlowInOrder
from sizes import scaled

from tokenyard.routing.policies import PolicyContext, is_rule, make_policy, rows_for
from tokenyard.routing.policies.delay import ADDED_WAIT_S, added_delays
from tokenyard.routing.policies.in_order import MarginalInOrder
from tokenyard.routing.policies.order import FORGIVEN_LEAD_S, ORDERS, SET_BACK, Ordered
from tokenyard.routing.policies.public import Needs
from tokenyard.routing.policies.tuned import load_tuned
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator import constant_rate_kernel as kernel
from tokenyard.routing.simulator import make_simulator
from tokenyard.routing.simulator.run import choosing, run_each, run_policy
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, stream_rng
from tokenyard.routing.types import (
    EngineSnapshot,
    OrderingPolicy,
    OrderKey,
    ReplicaSnapshot,
    Request,
    WaitingQueue,
)
from tokenyard.types import Slo

few = settings(max_examples=scaled(40))
SERVERS = [(3000.0, 3), (5000.0, 5)]
SERVER = ReplicaSnapshot("server", 1000.0, 1, 4, 0, 0, 0.0)
ENGINE = EngineSnapshot(
    iteration_s=0.01, prefill_token_s=0.001, sequence_s=0.0, kv_token_s=0.0, token_budget=512,
    kv_capacity_tokens=1e6, kv_used_fraction=0.0, prefill_in_flight_tokens=0.0,
    output_in_flight_tokens=0.0, match_tokens=0,
)  # fmt: skip
REPLICA = replace(SERVER, replica_id="replica", num_slots=64, max_concurrency=64, engine=ENGINE)
requests = st.builds(
    Request,
    arrival_s=st.floats(0, 1e5),
    context_tokens=st.integers(1, 10_000),
    predicted_total_tokens=st.floats(10_000, 20_000),
    due_s=st.floats(0.1, 100) | st.just(math.inf),
    tenant=st.sampled_from("ab"),
    tenant_share=st.floats(0.1, 1.0),
)


def context(name="nominal", num_replicas=3):
    return PolicyContext(name, Slo(2.0), np.random.default_rng(0), num_replicas)


def a_request(tokens=1000, **rest):
    return Request(5.0, tokens, float(tokens), **rest)


@pytest.mark.parametrize("name", ORDERS)
@few
@given(some=st.lists(requests, min_size=1, max_size=8), knob=st.integers(0, 20))
def test_no_order_puts_a_request_before_its_arrival(name, some, knob):
    rule = ORDERS[name]
    order = rule.make(3, {rule.knob: rule.grid[knob % len(rule.grid)]})
    for request in sorted(some, key=lambda one: one.arrival_s):
        for snapshot in (SERVER, REPLICA):
            assert order.delay_s(request, snapshot) >= 0


@pytest.mark.parametrize("name", ORDERS)
@few
@given(seed=st.integers(0, 2**32 - 1), bound_s=st.sampled_from([0.0, 0.5, 5.0]))
def test_under_no_order_is_a_request_overtaken_by_one_that_comes_later_than_the_bound(
    name, seed, bound_s
):
    scenario = a_scenario(SERVERS, max_overtaking_s=bound_s)
    stream = random_stream(scenario, np.random.default_rng(seed), 60, load=1.2)
    (run,) = run_policy(
        scenario,
        StreamSet([stream], "test"),
        lambda rng: Ordered(make_policy("sed", context()), ORDERS[name].make(2, {})),
        0,
    )
    found = run.outcomes
    speed = np.array([server.tokens_per_s for server in scenario.servers])[found.server]
    arrival_s = stream[:, kernel.ARRIVAL_S]
    start_s = arrival_s + found.response_s - stream[:, kernel.TRUE_TOTAL] / speed
    for later in range(len(stream)):
        overtaken = (start_s[:later] > start_s[later] + 1e-9) & (
            found.server[:later] == found.server[later]
        )
        assert (arrival_s[later] <= arrival_s[:later][overtaken] + bound_s).all()


@few
@given(seed=st.integers(0, 2**32 - 1))
def test_an_order_that_adds_nothing_changes_no_response(seed):
    scenario = a_scenario(SERVERS)
    streams = StreamSet([random_stream(scenario, np.random.default_rng(seed), 80)], "test")
    sjf = ORDERS["sjf"].make(2, {"service_weight": 0.0})
    (plain,) = run_policy(scenario, streams, lambda rng: make_policy("sed", context()), 0)
    (ordered,) = run_policy(
        scenario, streams, lambda rng: Ordered(make_policy("sed", context()), sjf), 0
    )
    assert plain.outcomes.response_s.tobytes() == ordered.outcomes.response_s.tobytes()
    assert plain.rewards.sum() == pytest.approx(ordered.rewards.sum())


def test_a_second_of_service_counts_as_so_many_seconds_of_waiting():
    sjf = ORDERS["sjf"].make(3, {"service_weight": 20.0})
    assert sjf.delay_s(a_request(1000), SERVER) == pytest.approx(20.0)
    assert sjf.delay_s(a_request(100), SERVER) == pytest.approx(2.0)


def test_a_prompt_counts_without_what_the_replica_has_cached():
    wspt = ORDERS["wspt"].make(3, {"prefill_weight": 2.0})
    cached = replace(REPLICA, engine=replace(ENGINE, match_tokens=400))
    assert wspt.delay_s(a_request(1000), REPLICA) == pytest.approx(2.0)
    assert wspt.delay_s(a_request(1000), cached) == pytest.approx(1.2)


def test_a_boost_tells_short_requests_apart_by_their_ratio_and_long_ones_hardly():
    boost = ORDERS["boost"].make(3, {"boost_s": 10.0})
    delays = [boost.delay_s(a_request(n), SERVER) for n in (1, 10, 100, 200, 400, 100_000)]
    assert delays[:2] == [0.0, 0.0]
    assert np.diff(delays[2:5]) == pytest.approx(10.0 * math.log(2.0), rel=0.02)
    assert delays[5] == pytest.approx(10.0 * math.log(1000.0), rel=0.001)
    key_s = [10.0 * math.log(1.0 - math.exp(-n / 1e4)) for n in (100, 100_000)]
    assert delays[5] - delays[2] == pytest.approx(key_s[1] - key_s[0])


def test_the_slo_orders_by_deadline_and_by_slack():
    edf, slack = (ORDERS[name].make(3, {}) for name in ("edf", "slack"))
    assert edf.delay_s(a_request(due_s=7.0), REPLICA) == 7.0
    assert slack.delay_s(a_request(due_s=7.0), REPLICA) == pytest.approx(6.0)
    assert slack.delay_s(a_request(due_s=0.5), REPLICA) == 0.0


def test_who_cannot_be_in_time_any_more_goes_back():
    late_last = ORDERS["late_last"].make(2, {SET_BACK: 4.0})
    # A prompt of a second has to begin a second before it is due, a service of two two before.
    cached = replace(REPLICA, engine=replace(ENGINE, match_tokens=400))
    for snapshot, takes_s in ((REPLICA, 1.0), (cached, 0.6), (SERVER, 2.0)):
        request = Request(5.0, 1000, 2000.0, due_s=3.0, held_s=1.5)
        busy = replace(snapshot, predicted_wait_s=0.5)
        key = late_last.key_at(request, [SERVER, busy], 1)
        assert key == pytest.approx(OrderKey(5.0, 5.0 + 3.0 - takes_s, 13.0))
    assert late_last.key_at(a_request(), [SERVER], 0).late_at_s == math.inf


@pytest.mark.parametrize("name", ORDERS)
@few
@given(request=requests, back_waits=st.floats(0.1, 100), held_s=st.floats(0.0, 10.0))
def test_every_order_may_set_back_and_never_forward(name, request, back_waits, held_s):
    rule = ORDERS[name]
    for snapshot in (SERVER, REPLICA):
        plain, set_back = (
            rule.make(3, {rule.knob: rule.default, **more}).key_at(
                replace(request, held_s=held_s), [snapshot], 0
            )
            for more in ({}, {SET_BACK: back_waits})
        )
        assert set_back.key_s == plain.key_s
        wait_s = held_s + added_delays(request, [snapshot])[0, ADDED_WAIT_S]
        assert set_back.late_key_s == pytest.approx(set_back.key_s + back_waits * wait_s)


def test_a_tenant_that_asks_for_more_than_its_share_waits_behind_one_that_does_not():
    fair = ORDERS["fair"].make(2, {"service_weight": 1.0})
    modest, greedy = (a_request(tenant=name, tenant_share=0.5) for name in ("modest", "greedy"))
    # Each request is a second of one of two servers: a second of the half of both.
    assert [fair.delay_s(greedy, SERVER) for _ in range(3)] == pytest.approx([0.0, 1.0, 2.0])
    assert fair.delay_s(modest, SERVER) == 0.0
    assert fair.delay_s(replace(greedy, arrival_s=100.0), SERVER) == 0.0


def test_what_all_tenants_are_ahead_by_is_forgotten_and_not_what_one_is():
    fair = ORDERS["fair"].make(1, {"service_weight": 1.0})
    both = [a_request(tenant=name, tenant_share=0.5) for name in "ab"]
    for now_s in range(5, 499):
        leads = [fair.delay_s(replace(one, arrival_s=float(now_s)), SERVER) for one in both]
    assert leads == pytest.approx([FORGIVEN_LEAD_S] * 2, abs=4)
    assert fair.delay_s(replace(both[0], tenant="c", arrival_s=499.0), SERVER) == 0.0
    late = [replace(one, arrival_s=500.0) for one in both]
    for _ in range(40):
        fair.delay_s(late[0], SERVER)
    ahead, other = (fair.delay_s(one, SERVER) for one in late)
    assert ahead - other == pytest.approx(80.0, abs=4)


def test_the_placement_that_knows_the_order_counts_who_is_before_and_who_is_behind():
    sjf = ORDERS["sjf"].make(2, {"service_weight": 20.0})
    # A second is left of what runs; of those that wait the second would be behind, at 25 s.
    queue = WaitingQueue(np.array([6.0, 100.0]), np.array([1000.0, 4000.0]))
    long = replace(SERVER, num_running=1, num_waiting=2, predicted_wait_s=6.0, queue=queue)
    nobody = WaitingQueue(np.zeros(0), np.zeros(0))
    short = replace(SERVER, num_running=1, predicted_wait_s=3.5, queue=nobody)
    decision = MarginalInOrder(sjf).place(a_request(1000), [short, long])
    # Its wait, its service, and that service again for the one behind it.
    assert decision.scores == pytest.approx([3.5 + 1.0, 2.0 + 1.0 + 1.0])
    assert (decision.replica, decision.order_key) == (1, OrderKey(25.0))


@pytest.mark.parametrize("scenario_name", ["poisson_085", "homogeneous"])
@pytest.mark.parametrize("order", ["sjf@5", "wspt@1", "boost@2"])
def test_what_waits_is_known_from_what_was_sent_and_from_how_many_wait(scenario_name, order):
    """Where states are current, and no key is bounded, what is taken to wait is what waits."""
    scenario = load_scenario(scenario_name).model_copy(update={"max_overtaking_s": 1e6})
    streams = StreamSet([StreamSource(scenario).sample(500, stream_rng(0, "training"), 1.2)], "")
    runs = []
    for sees_queues in (True, False):
        rule = make_policy(f"marginal_in_order+{order}", context())
        rule.sees_queues = sees_queues
        runs += run_each(scenario, streams, [choosing(rule)])
    shown, inferred = (one.outcomes for one in runs)
    assert (shown.server == inferred.server).all()
    assert shown.response_s == pytest.approx(inferred.response_s)


def test_what_waits_is_those_of_the_latest_keys_of_all_that_were_sent():
    rule = MarginalInOrder(ORDERS["sjf"].make(2, {"service_weight": 20.0}))
    for tokens in (4000, 1000, 2000):
        rule.place(a_request(tokens), [replace(SERVER, num_waiting=3, predicted_wait_s=9.0)])
    # Two have started since, and they were the shortest.
    left = replace(SERVER, num_running=1, num_waiting=1, predicted_wait_s=6.0)
    short, long = (rule.place(a_request(n), [left]).scores for n in (1000, 8000))
    # It goes before the one of 4 s that waits, and delays it; and behind it, and waits for it.
    assert short == pytest.approx([2.0 + 1.0 + 1.0])
    assert long == pytest.approx([6.0 + 8.0])


@st.composite
def some_snapshots(draw, shown):
    """A fleet as offered to one request: some of six replicas, in any order."""
    found = []
    for number in draw(st.permutations(range(6)))[: draw(st.integers(1, 6))]:
        base, waiting = (SERVER, REPLICA)[number % 2], draw(st.integers(0, 6))
        running, prefill = draw(st.integers(0, 70)), draw(st.floats(0.0, 1e5))
        queue = None
        if shown:
            keys_s = sorted(draw(st.lists(st.floats(0, 500), min_size=waiting, max_size=waiting)))
            tokens = draw(st.lists(st.integers(1, 9000), min_size=waiting, max_size=waiting))
            queue = WaitingQueue(np.array(keys_s), np.array(tokens, dtype=float))
        engine = base.engine and replace(
            ENGINE, prefill_in_flight_tokens=prefill, output_in_flight_tokens=prefill,
            match_tokens=draw(st.integers(0, 500)),
        )  # fmt: skip
        found.append(
            replace(
                base, replica_id=f"r{number}", num_waiting=waiting, num_running=running,
                tokens_in_flight=2 * prefill, engine=engine, queue=queue,
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize("order", ["sjf", "wspt", "edf"])
@pytest.mark.parametrize("shown", [False, True])
@few
@given(data=st.data(), knob=st.sampled_from([0.5, 20.0]), weights=st.tuples(*[st.floats(0, 4)] * 2))
def test_queues_kept_as_numbers_cost_what_they_cost_request_by_request(
    order, shown, data, knob, weights
):
    made = ORDERS[order].make(6, {ORDERS[order].knob: knob})
    rule, slow = MarginalInOrder(made, *weights), SlowInOrder(made, *weights)
    for request in data.draw(st.lists(requests, min_size=1, max_size=25)):
        offered = data.draw(some_snapshots(shown))
        decision = rule.place(request, offered)
        assert decision.scores == pytest.approx(slow.costs(request, offered), rel=1e-6, abs=1e-6)
        chosen = offered[decision.replica]
        if not shown:
            slow.send(request, chosen)
        assert decision.order_key.key_s == pytest.approx(
            request.arrival_s + made.delay_s(request, chosen)
        )


def test_more_may_wait_than_there_was_room_for():
    rule = MarginalInOrder(ORDERS["sjf"].make(1, {"service_weight": 1.0}))
    for _ in range(300):
        rule.place(a_request(1000), [replace(SERVER, num_waiting=1000, predicted_wait_s=400.0)])
    full = replace(SERVER, num_waiting=1000, predicted_wait_s=400.0)
    # All 300 of a second are behind one of half a second, and one that is longer waits for them.
    assert rule.place(a_request(500), [full]).scores == pytest.approx([100.0 + 0.5 + 150.0])
    assert rule.place(a_request(2000), [full]).scores == pytest.approx([400.0 + 2.0])


def test_a_placement_may_have_parameters_of_its_own():
    assert is_rule("marginal_delay@0.5:2+sjf@5")
    assert is_rule("marginal_in_order@1:0.5+sjf@5")
    assert is_rule("sed_dump@1")
    assert not is_rule("sed@1")
    assert not is_rule("marginal_in_order@1:0.5")
    busy = replace(
        REPLICA, num_running=64, num_waiting=2,
        engine=replace(ENGINE, prefill_in_flight_tokens=4000.0, output_in_flight_tokens=9000.0),
    )  # fmt: skip
    plain, same, weighed = (
        make_policy(name, context()).decide(a_request(), [busy]).scores
        for name in ("marginal_delay", "marginal_delay@1:1", "marginal_delay@3:1")
    )
    wait_s = added_delays(a_request(), [busy])[0, ADDED_WAIT_S]
    assert wait_s > 1.0
    assert same == pytest.approx(plain)
    assert weighed - plain == pytest.approx([2 * wait_s])
    for wrong in ("marginal_delay@1", "marginal_delay@1:2:3", "sed_dump@1:2"):
        with pytest.raises(ValueError, match="too many parameters, or too few"):
            make_policy(wrong, context())
    with pytest.raises(ValueError, match="is no number"):
        make_policy("marginal_delay@1:x", context())


@pytest.mark.parametrize("scenario_name", ["poisson_095", "azure_code_mixed_gpus"])
def test_a_queue_is_shown_in_the_order_in_which_it_starts(scenario_name):
    scenario = load_scenario(scenario_name)
    stream = StreamSource(scenario).sample(400, stream_rng(0, "training"), 1.5)
    sim = make_simulator(scenario, 1, 400)
    sim.load(0, stream)
    most = 0
    while sim.view().current() >= 0:
        for server in range(scenario.num_servers):
            queue = sim.view().queue(server)
            assert len(queue.tokens) == len(queue.order_keys_s)
            assert (np.diff(queue.order_keys_s) >= 0).all()
            most = max(most, len(queue.tokens))
        request = sim.view().request()
        sim.order_next(0, OrderKey(request.arrival_s + 0.01 * request.context_tokens))
        sim.step(np.array([0]))
    assert most > 10


def test_an_order_is_named_behind_its_placement_and_routes_as_that_does():
    made = make_policy("sed+sjf", context())
    assert isinstance(made, OrderingPolicy)
    busy = replace(SERVER, num_running=1, tokens_in_flight=5000.0)
    assert made.route(a_request(), [busy, SERVER]) == 1
    decision = made.place(a_request(), [busy, SERVER])
    assert decision.order_key.key_s == pytest.approx(
        5.0 + load_tuned("nominal").orders["sed+sjf"]["service_weight"]
    )
    assert decision.scores is not None
    assert is_rule("sed+sjf")
    assert is_rule("marginal_in_order+sjf")
    assert not is_rule("marginal_in_order")
    assert not is_rule("sed+sfj")


def test_an_unknown_order_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"unknown order 'sfj'; choose one of .*did you mean"):
        make_policy("sed+sfj", context())
    with pytest.raises(ValueError, match=r"unknown policy 'sed\+sfj'.*sjf"):
        PROBLEM.candidate(load_scenario("nominal"), "sed+sfj")


def test_a_knob_that_was_tuned_beside_a_placement_counts_there_and_nowhere_else():
    rules = load_tuned("nominal").model_copy(update={"orders": {"sed+sjf": {"service_weight": 3}}})
    tuned = replace(context(), tuned=rules)
    keys = [
        make_policy(name, tuned).place(a_request(), [SERVER] * 3).order_key.key_s
        for name in ("sed+sjf", "marginal_delay+sjf")
    ]
    assert keys == pytest.approx([8.0, 5.0 + ORDERS["sjf"].default])


def test_the_name_of_an_order_may_hold_a_knob_of_ones_own():
    decision = make_policy("sed+sjf@3", context()).place(a_request(), [SERVER] * 3)
    assert decision.order_key.key_s == pytest.approx(8.0)
    assert is_rule("sed+sjf@3")
    late = replace(a_request(), due_s=4.0, held_s=1.0)
    key = make_policy("sed+sjf@3:7", context()).place(late, [SERVER] * 3).order_key
    assert key == pytest.approx(OrderKey(8.0, 8.0, 15.0))
    with pytest.raises(ValueError, match="has 3 numbers"):
        make_policy("sed+sjf@3:7:1", context())
    for wrong in ("x", "", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match="behind @ is no number"):
            make_policy(f"sed+sjf@{wrong}", context())


def test_orders_are_rows_where_they_were_tuned():
    ordered = [name for name in rows_for("azure_code_slo", Needs.BATCHING) if "+" in name]
    assert ordered == list(load_tuned("azure_code_slo").order_scores)
