"""Policies that also order what waits, as a gateway serves them."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.serve.test_policy_state import live, look, switching_to
from unit.serve.test_serve_gateway import a_body, check
from unit.serve_builders import a_body as a_question
from unit.serve_builders import (
    a_deciding_api,
    a_faulty_policy,
    a_manager,
    call,
    marginal_artifact,
    three_snapshots,
)

from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.generation import ReplicaFailed
from serve_app.gateway.order import bounded_key
from serve_app.policy.experiment import Experiment
from serve_app.policy.loading import resolve_policy
from serve_app.policy.runner import warm_up
from tokenyard.routing import sent_queues
from tokenyard.routing.artifact import DEFAULT_RULE
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.routing.policies import PolicyContext, in_order, make_policy, places
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.scores import waiting_key
from tokenyard.routing.snapshot_table import SnapshotTable
from tokenyard.routing.types import Decision, OrderingPolicy, OrderKey, ReplicaSnapshot, Request
from tokenyard.types import Slo

FLEET = "azure_code_slo"
times = st.floats(0, 1e4)


@pytest.mark.parametrize(
    "name",
    [
        "sed+sjf@20",
        "marginal_delay+wspt",
        "champion+sjf@5",
        DEFAULT_RULE,
        "sed+fair",
        "sed+edf",
        "marginal_in_order+sjf",
        "marginal_in_order@1:0.5+wspt@60",
        "marginal_delay@3:1+sjf@5",
        "marginal_delay+sjf@5:8",
        "champion+late_last@2",
        "marginal_in_order+late_last",
    ],
)
def test_whatever_orders_can_be_served(name):
    loaded = pickle.loads(pickle.dumps(resolve_policy(name, FLEET)))
    assert loaded.card.name == name
    warm_up(loaded)
    assert isinstance(loaded.make(np.random.default_rng(0)), OrderingPolicy)


def test_nothing_is_left_to_compile_for_the_first_request():
    """It would take longer than a decision may: the breaker opens, and opens again."""
    loaded = resolve_policy("marginal_in_order@1:0.5+wspt@60", FLEET)
    warm_up(loaded)
    compiled = [
        one
        for module in (in_order, places, sent_queues)
        for one in vars(module).values()
        if hasattr(one, "signatures") and one.py_func.__module__ == module.__name__
    ]
    before = [len(one.signatures) for one in compiled]
    policy = loaded.make(np.random.default_rng(0))
    for num in (4, 1):
        assert 0 <= policy.place(Request(0.0, 200, 205.0), SnapshotTable.idle(num)).replica < num
    assert [len(one.signatures) for one in compiled] == before
    assert before == [1] * len(compiled)


def test_an_order_may_stand_behind_a_policy_file(tmp_path):
    path = tmp_path / "mine.npz"
    marginal_artifact(np.zeros(NUM_MARGINAL_WEIGHTS)).save(path)
    plain, ordered = (resolve_policy(f"{path}{end}", FLEET).card for end in ("", "+sjf@3"))
    assert (ordered.name, ordered.source) == ("mine+sjf@3", plain.source)
    assert ordered.sha256 != plain.sha256
    assert resolve_policy(f"{path}+sjf@4", FLEET).card.sha256 != ordered.sha256


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sed+soon", "unknown order 'soon'"),
        ("champion+soon", "unknown order 'soon'; choose one of .*'late_last'"),
        ("champion+late_last@20:8", "give 1"),
        ("sed+sjf@5:8:2", "has 3 numbers behind @; give 2"),
        ("champion+sjf@-1", "no number from 0 on"),
        ("sedd+sjf", r"unknown policy 'sedd'.*'sjf'"),
        ("marginal_in_order@1+sjf", "needs two weights"),
        ("marginal_in_order+fair", "put another placement before it"),
        ("marginal_delay@1+sjf", "too many parameters, or too few"),
    ],
)
def test_what_is_no_order_is_refused(name, reason):
    with pytest.raises(ValueError, match=reason):
        resolve_policy(name, FLEET, stand_in="sed")


def test_a_rule_that_draws_draws_with_an_order_too():
    assert resolve_policy("power_of_two+sjf", FLEET).draws
    assert not resolve_policy("sed+sjf", FLEET).draws


@given(
    context=st.integers(0, 10_000), output=st.integers(1, 2_000), knob=st.integers(0, 50),
    backlogs=st.lists(st.floats(0, 1e5), min_size=1, max_size=4),
)  # fmt: skip
def test_the_choice_is_that_of_the_simulators_class(context, output, knob, backlogs):
    name, request = f"sed+sjf@{knob}:8", Request(7.0, context, float(context + output))
    snapshots = [
        ReplicaSnapshot(str(i), 1000.0, 1, 9, 0, 1, backlog) for i, backlog in enumerate(backlogs)
    ]
    manager = a_manager(resolve_policy(name, "poisson_085"))
    context = PolicyContext("poisson_085", Slo(2.0), np.random.default_rng(0), 3)
    expected = make_policy(name, context).place(request, snapshots)
    choice = manager.picker.pick(request, snapshots)
    manager.stop()
    assert (choice.index, choice.order_key) == (expected.replica, expected.order_key)


def test_the_order_is_asked_once_of_a_request_whatever_becomes_of_it():
    manager = a_manager(resolve_policy("sed+fair@1", "poisson_085"))
    snapshots = [ReplicaSnapshot("a", 1000.0, 1, 9, 0, 1, 10.0)]
    first = manager.picker.pick(Request(0.0, 1000, 2000.0), snapshots)
    assert (
        manager.picker.pick(Request(0.0, 1000, 2000.0), snapshots, has_key=True).order_key is None
    )
    second = manager.picker.pick(Request(0.0, 1000, 2000.0), snapshots)
    manager.stop()
    num_servers = load_scenario("poisson_085").num_servers
    assert first.order_key == OrderKey(0.0)
    assert second.order_key == OrderKey(pytest.approx(2.0 / num_servers))


@given(
    asked=st.builds(OrderKey, times, st.one_of(times, st.just(math.inf)), times),
    arrival=times, waited=st.floats(0, 100), bound=st.floats(0, 1e3),
)  # fmt: skip
def test_a_key_is_never_before_the_arrival_nor_after_the_bound(asked, arrival, waited, bound):
    now = arrival + waited
    key = bounded_key(asked, arrival, now, bound)
    assert arrival <= key.key_s <= max(now + bound, arrival)
    assert key.late_at_s == math.inf or key.key_s < key.late_key_s <= now + bound
    assert key == OrderKey(*waiting_key.bounded_key(tuple(asked), arrival, now, bound))
    assert bounded_key(None, arrival, now, bound) is None


def told(answer):
    return tuple(answer[name] for name in ("order_key_s", "late_at_s", "late_key_s"))


def test_whoever_only_decides_answers_the_key():
    api = a_deciding_api(resolve_policy("sed+sjf@20", "poisson_085"), clock_s=lambda: 100.0)
    question = a_question(three_snapshots(), predicted_total_tokens=2000.0)
    _, answer = call(api, "POST", "/v1/route", question)
    assert answer["replica_id"] == "middling"
    key_s = 100.0 + 20 * 2000 / 5000
    assert told(answer) == (pytest.approx(key_s), None, None)
    late = resolve_policy("sed+sjf@20:8", "poisson_085")
    _, answer = call(a_deciding_api(late, clock_s=lambda: 100.0), "POST", "/v1/route", question)
    late_at_s = 100.0 + late.card.slo_response_s - 2000 / 5000
    assert told(answer) == pytest.approx((key_s, late_at_s, key_s + 8 * 1000 / 5000))
    _, answer = call(a_deciding_api(), "POST", "/v1/route", question)
    assert told(answer) == (None, None, None)


def test_a_gateway_logs_the_key_that_a_request_keeps_when_it_is_placed_again(tmp_path):
    log = DecisionLog(tmp_path, flush_s=0.01)

    async def test(client, pools, gateway):
        switched = await client.post("/v1/policy", json={"policy": "round_robin+sjf@20:8"})
        assert switched.json()["name"] == "round_robin+sjf@20:8"
        pools["a"].num_waiting = 1
        pools["a"].script.append((0, ReplicaFailed("it died")))
        assert (await client.post("/v1/completions", json=a_body())).status_code == 200
        await client.post("/v1/policy", json={"policy": "round_robin"})
        assert (await client.post("/v1/completions", json=a_body())).status_code == 200

    check(test, log=log)
    log.close()
    rows = [row for file in sorted(tmp_path.glob("*")) for row in pq.read_table(file).to_pylist()]
    keys = [told(row) for row in sorted(rows, key=lambda row: row["time_s"])]
    assert len(rows) == 3
    assert keys[0] == keys[1]
    assert keys[0][0] > rows[0]["arrival_s"]
    assert keys[0][2] > keys[0][0]
    assert keys[2] == (None, None, None)


class Spy:
    """Looks at what waits, sends everything to the first replica, and asks for the same delay."""

    sees_queues = True

    def __init__(self, seen):
        self._seen = seen

    def route(self, request, snapshots):
        return self.place(request, snapshots).replica

    def place(self, request, snapshots):
        rows = snapshots.sent.rows_of(snapshots.replica_ids)
        starts, keys_s, tokens = snapshots.sent.queues
        known = slice(starts[rows[0]], starts[rows[0] + 1])
        self._seen.append((request, keys_s[known].tolist(), tokens[known].tolist()))
        return Decision(0, None, OrderKey(request.arrival_s + 7.0))


def test_whoever_looks_at_queues_sees_what_others_have_sent():
    seen = []
    spy = replace(a_faulty_policy(lambda: 0), make=lambda rng: Spy(seen))

    async def test(client, pools, gateway):
        manager = gateway.manager
        pools["a"].num_waiting = 1  # Of what was sent one waits, always.
        picker = manager.picker
        picker.experiment = Experiment(
            picker.policy, picker.runner("spy", spy), "canary", 0.5, picker.settings, 0.0
        )
        for _ in range(40):
            assert (await client.post("/v1/completions", json=a_body())).status_code == 200
        assert 3 < len(seen) < 37

    check(test)
    assert {len(keys_s) for _, keys_s, _ in seen} in ({1}, {0, 1})
    for request, keys_s, tokens in seen:
        assert all(key_s <= request.arrival_s + 7.0 for key_s in keys_s)
        assert set(tokens) <= {float(request.context_tokens)}


def test_no_more_is_kept_of_what_was_sent_than_waits_where_nobody_looks_at_it():
    spy = replace(a_faulty_policy(lambda: 0), make=lambda rng: Spy([]))

    async def test(client, pools, gateway):
        manager = gateway.manager
        pools["a"].num_waiting = 1
        picker = manager.picker
        picker.experiment = Experiment(
            picker.policy, picker.runner("spy", spy), "canary", 1e-9, picker.settings, 0.0
        )
        for _ in range(20):
            assert (await client.post("/v1/completions", json=a_body())).status_code == 200
        starts, *_ = gateway._placement._sent.queues
        assert starts[-1] <= 2, "one that waits, and the last one sent"

    check(test)


def test_a_policy_remembers_what_it_sent_where_nobody_keeps_it():
    def decide(policy, kept):
        table = SnapshotTable.idle(2)
        table.live[:, 0] = 1.0  # One waits at each.
        table.sent = kept
        return policy.place(Request(0.0, 100, 200.0), table)

    kept, policy = sent_queues.SentQueues(), resolve_policy("marginal_in_order+sjf", FLEET)
    kept.add("idle-0", 1e9, 500.0)
    kept.add("idle-1", -1.0, 500.0)
    ours, others = (policy.make(np.random.default_rng(0)) for _ in range(2))
    # It would go before the one that waits at the first replica, and behind that at the second.
    assert decide(ours, kept).scores[0] != decide(ours, kept).scores[1]
    assert decide(ours, kept).scores.tolist() == decide(others, kept).scores.tolist()
    first, second = (decide(ours, None) for _ in range(2))
    assert first.replica == 0
    assert first.scores.tolist() != second.scores.tolist()


def test_a_file_with_an_order_decides_after_a_crash(tmp_path):
    state, path = tmp_path / "state.json", tmp_path / "mine.npz"
    marginal_artifact(np.full(NUM_MARGINAL_WEIGHTS, 0.1)).save(path)
    live(state, switching_to(f"{path}+sjf@20"))
    sha256 = resolve_policy(f"{path}+sjf@20", FLEET).card.sha256
    path.unlink()
    seen = live(state, look)["champion"]
    assert (seen["name"], seen["sha256"]) == ("mine+sjf@20", sha256)
