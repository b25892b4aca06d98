"""A second policy beside the champion: shadow, canary, promotion and rollback, over HTTP."""

import asyncio
import threading
import time
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from unit.serve.test_serve_gateway import a_body, check
from unit.serve_builders import (
    PREDICTOR,
    a_faulty_policy,
    linear_artifact,
    marginal_artifact,
    metadata,
)

from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.generation import ReplicaFailed
from serve_app.policy import champion_alias
from serve_app.policy import manager as manager_module
from serve_app.policy.experiment import Experiment, Verdict, Verdicts
from serve_app.policy.loading import from_artifact
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.metadata import LengthPredictor
from tokenyard.routing.observation import MARGINAL_WAIT, NUM_MARGINAL_WEIGHTS
from tokenyard.routing.scenario import load_scenario

PATH = "/v1/policies"
HANG_S = 30.0
SCENARIO = load_scenario("poisson_085")


def act(client, action, **fields):
    return client.post(PATH, json={"action": action, **fields})


async def ask(client, times):
    answers = [await client.post("/v1/completions", json=a_body()) for _ in range(times)]
    return [one.status_code for one in answers]


def resolving(monkeypatch, **policies):
    """Let names stand for policies of the test's own."""
    known = manager_module.resolve_policy
    monkeypatch.setattr(
        manager_module,
        "resolve_policy",
        lambda name, *rest: policies.get(name) or known(name, *rest),
    )
    monkeypatch.setattr(manager_module, "warm_up", lambda _: None)


def crash():
    raise RuntimeError("broken")


async def settled(condition, timeout_s=10.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.01)


def test_a_shadow_is_asked_about_everything_and_decides_nothing():
    async def test(client, pools, gateway):
        gateway.manager.switch("round_robin")
        started = (await act(client, "shadow", policy="sed")).json()
        assert started["experiment"]["mode"] == "shadow"
        assert await ask(client, 120) == [200] * 120
        await settled(lambda: gateway.manager.experiment.shadow.num_asked == 120)
        seen = (await client.get(PATH)).json()["experiment"]
        assert 0 < seen["agreement_fraction"] < 1  # The pools are equal: half by round robin.
        assert len(pools["a"].requests) == len(pools["b"].requests) == 60

    check(test, circuit_breaker={"budget_s": 1.0})


@pytest.mark.parametrize("shadow", ["sed+sjf@20", "marginal_delay+sjf@20", "sed+sjf@20:1", "sed"])
def test_a_shadow_is_compared_by_its_replicas_whatever_its_order(shadow):
    async def test(client, pools, gateway):
        gateway.manager.switch("sed+sjf@20", explore_fraction=0.05)
        await act(client, "shadow", policy=shadow)
        assert await ask(client, 110) == [200] * 110
        await settled(lambda: gateway.manager.experiment.shadow.num_asked == 110)
        seen = (await client.get(PATH)).json()["experiment"]
        assert seen["agreement_fraction"] > 0.8  # 5 % are drawn at random.

    check(test, circuit_breaker={"budget_s": 1.0})


def test_a_shadow_agrees_where_only_the_turn_of_idle_replicas_differs():
    async def test(client, pools, gateway):
        gateway.manager.switch("sed")
        await act(client, "shadow", policy="sed")
        assert await ask(client, 20) == [200] * 20
        shadow = gateway.manager.experiment.shadow
        await settled(lambda: shadow.num_asked == 20)
        assert min(len(pool.requests) for pool in pools.values()) > 0
        assert shadow.num_agreed == 20

    check(test, circuit_breaker={"budget_s": 1.0})


def test_a_shadow_that_hangs_or_crashes_costs_nobody_anything(monkeypatch):
    async def test(client, pools, gateway):
        gateway.manager.switch("round_robin")
        for name in ("hangs", "crashes"):
            await act(client, "shadow", policy=name)
            started_s = time.monotonic()
            assert await ask(client, 50) == [200] * 50
            assert time.monotonic() - started_s < HANG_S / 2
            await settled(lambda: gateway.manager.experiment.shadow.num_failed > 0)
        assert (await client.get(PATH)).json()["champion"]["fallbacks_by_reason"] == {}

    hanging = a_faulty_policy(partial(time.sleep, HANG_S))
    resolving(monkeypatch, hangs=hanging, crashes=a_faulty_policy(crash))
    check(test)


def test_a_shadow_is_handed_nothing_that_the_gateway_goes_on_writing(monkeypatch):
    """A policy that looks at queues is shown those that the gateway keeps, in its own thread."""
    handed = []

    async def test(client, pools, gateway):
        await act(client, "shadow", policy="marginal_in_order+boost@4")
        shadow = gateway.manager.experiment.shadow
        monkeypatch.setattr(shadow, "offer", lambda *asked: handed.append(asked[0].snapshots.sent))
        assert await ask(client, 5) == [200] * 5
        assert gateway.manager.picker.sees_queues

    check(test, policy="marginal_in_order+boost@4")
    assert handed == [None] * 5


def test_a_canary_decides_for_its_share_and_its_rows_say_so(monkeypatch, tmp_path):
    async def test(client, pools, gateway):
        gateway.manager.switch("round_robin")
        answer = (await act(client, "canary", policy="only_a", share=0.3)).json()
        assert answer["experiment"]["share"] == 0.3
        assert await ask(client, 200) == [200] * 200
        experiment = (await client.get(PATH)).json()["experiment"]
        assert 30 <= experiment["canary_requests"] <= 90
        assert experiment["canary_requests"] + experiment["champion_requests"] == 200
        assert experiment["canary_attained_fraction"] == 1.0
        assert experiment["why_ended"] is None
        # The canary sends all it gets to the first replica, the champion takes turns.
        assert len(pools["a"].requests) > len(pools["b"].requests) + 20

    resolving(monkeypatch, only_a=a_faulty_policy(lambda: 0))
    check(test)


def test_a_request_that_outlives_its_canary_is_the_champions_and_its_row_says_so(tmp_path):
    log = DecisionLog(tmp_path)

    async def test(client, pools, gateway):
        def failing_first(stream):
            async def answer(generation):
                if gateway.manager.experiment.running:
                    gateway.manager.end_experiment("asked")
                    raise ReplicaFailed("broken")
                async for piece in stream(generation):
                    yield piece

            return answer

        for pool in pools.values():
            pool.stream = failing_first(pool.stream)
        for _ in range(12):
            await act(client, "canary", policy="sed", share=0.5)
            assert await ask(client, 1) == [200]

    check(test, log=log, policy="round_robin")
    log.close()
    rows = [row for file in tmp_path.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert [row["attempt"] for row in rows] == [0, 1] * 12
    assert {row["arm"] for row in rows if row["attempt"] == 0} == {"canary", "champion"}
    for row in rows:
        assert (row["arm"] == "canary") == row["policy"].startswith("sed@")


def test_a_canary_whose_requests_fail_is_stopped_within_fifty():
    async def test(client, pools, gateway):
        await act(client, "canary", policy="sed", share=0.2)
        experiment = gateway.manager.experiment
        statuses = []
        while experiment.running and len(statuses) < 500:
            bad = experiment.arm_of_next  # Set by the wrapper below.
            for pool in pools.values():
                pool.script = [(0, ReplicaFailed("broken"))] if bad else []
            statuses += await ask(client, 1)
        assert experiment.test.num_canary <= 50
        assert (
            "worse than the champion" in (await client.get(PATH)).json()["experiment"]["why_ended"]
        )
        for pool in pools.values():
            pool.script = []
        assert await ask(client, 5) == [200] * 5
        assert experiment.test.num_canary <= 50

    class Foreseen(Experiment):
        """A trial whose hash can be foreseen, so that the pools know whom to fail."""

        rng = np.random.default_rng(0)

        @property
        def arm_of_next(self):
            self.next = self.rng.random() < self.share
            return self.next

        def arm_of(self, request_id):
            return "canary" if self.running and self.next else "champion"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager_module, "Experiment", Foreseen)
        check(test, policy="round_robin")


def test_a_canary_that_raises_is_stopped_by_its_own_breaker_and_nobody_notices(monkeypatch):
    async def test(client, pools, gateway):
        await act(client, "canary", policy="crashes", share=0.5)
        assert await ask(client, 60) == [200] * 60
        state = (await client.get(PATH)).json()
        assert "it failed" in state["experiment"]["why_ended"]
        assert state["experiment"]["policy"]["times_opened"] == 1
        assert state["champion"]["times_opened"] == 0
        assert state["champion"]["breaker_open"] is False

    resolving(monkeypatch, crashes=a_faulty_policy(crash))
    check(test, policy="sed")


def test_a_canary_for_other_replicas_ends_and_is_not_judged_by_what_the_baseline_does(monkeypatch):
    async def test(client, pools, gateway):
        await act(client, "canary", policy="of_three", share=0.5)
        assert await ask(client, 60) == [200] * 60
        experiment = (await client.get(PATH)).json()["experiment"]
        assert experiment["policy"]["fallbacks_by_reason"] == {"incompatible": 10}
        assert "it failed: {'incompatible': 10}" in experiment["why_ended"]
        assert (await act(client, "promote")).status_code == 409

    resolving(monkeypatch, of_three=from_artifact("of_three", linear_artifact(), "t", SCENARIO))
    check(test, policy="sed")


def test_promotion_moves_the_alias_with_lineage_and_rollback_takes_no_time(monkeypatch, tmp_path):
    lineage = {"trace_sha256": "t1", "calibration_sha256": "c1", "sweep_run": "s1"}
    artifacts = [
        marginal_artifact(np.eye(NUM_MARGINAL_WEIGHTS)[MARGINAL_WAIT] * factor, lineage=lineage)
        for factor in (0.1, 0.2)
    ]
    loaded = [
        from_artifact(name, one, "t", SCENARIO) for name, one in zip("xy", artifacts, strict=True)
    ]
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.chdir(tmp_path)
    # A new store first makes its tables, which takes long where others compute too.
    monkeypatch.setattr(champion_alias, "_REGISTRY_S", 300.0)

    async def test(client, pools, gateway):
        gateway.manager.registry = uri
        model = f"tokenyard-routing-{gateway.cluster.scenario}"
        for name in "xy":
            await act(client, "canary", policy=name)
            await ask(client, 20)
            promoted = await act(client, "promote")
            assert promoted.status_code == 200, promoted.text
            assert promoted.json()["champion"]["name"] == name
        store = MlflowClient(uri, uri)
        champion = store.get_model_version_by_alias(model, "champion")
        previous = store.get_model_version_by_alias(model, "previous")
        assert champion.tags["sha256"] == artifacts[1].sha256
        assert previous.tags["sha256"] == artifacts[0].sha256
        wanted = {f"lineage.{key}": value for key, value in lineage.items()}
        wanted["lineage.artifact_sha256"] = artifacts[1].sha256
        assert wanted.items() <= champion.tags.items()
        started_s = time.process_time()
        back = (await act(client, "rollback")).json()
        assert time.process_time() - started_s < 1.0
        assert back["champion"]["name"] == "x"
        assert await ask(client, 1) == [200]
        again = lambda: store.get_model_version_by_alias(model, "champion")  # noqa: E731
        await settled(lambda: again().tags["sha256"] == artifacts[0].sha256)

    resolving(monkeypatch, x=loaded[0], y=loaded[1])
    check(test, policy="sed")


def test_a_registry_that_cannot_be_written_refuses_the_promotion_and_the_canary_goes_on(
    monkeypatch,
):
    async def test(client, pools, gateway):
        gateway.manager.registry = "sqlite:////proc/no/such/place.db"
        before = gateway.manager.policy.name
        await act(client, "canary", policy="x")
        refused = await act(client, "promote")
        assert refused.status_code == 409
        assert "not promoted" in refused.json()["detail"]
        assert gateway.manager.experiment.running
        assert gateway.manager.policy.name == before
        assert await ask(client, 3) == [200] * 3

    resolving(monkeypatch, x=from_artifact("x", marginal_artifact(), "t", SCENARIO))
    check(test, policy="sed")


class FakeRegistry:
    """Aliases of one model; the first write waits until it may go on."""

    def __init__(self, monkeypatch, aliases):
        self.aliases = dict(aliases)
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        for name in ("enter", "settle"):
            monkeypatch.setattr(champion_alias.registry, name, getattr(self, name))

    def enter(self, uri, model, artifact, tags):
        return "7", dict(self.aliases)

    def settle(self, uri, model, wanted, known):
        self.begun.set()
        assert self.may_go_on.wait(30)
        assert self.aliases.get("champion") in {None, *known}
        self.aliases = dict(wanted)
        return True


@pytest.mark.parametrize("aliases", [{"champion": "3", "previous": "1"}, {}])
@pytest.mark.parametrize("how", ["worse", "late", "switched", "left"])
def test_a_promotion_that_does_not_come_about_leaves_the_registry_as_it_was(
    monkeypatch, aliases, how
):
    store = FakeRegistry(monkeypatch, aliases)
    resolving(monkeypatch, x=from_artifact("x", marginal_artifact(), "t", SCENARIO))

    async def test(client, pools, gateway):
        manager = gateway.manager
        manager.registry, before = "a store", manager.policy
        await act(client, "canary", policy="x")
        if how == "late":
            monkeypatch.setattr(champion_alias, "_REGISTRY_S", 0.05)
        promoting = asyncio.create_task(act(client, "promote"))
        await settled(store.begun.is_set)
        switching = None
        if how == "worse":
            manager.end_experiment("it is worse than the champion")
        elif how == "left":
            promoting.cancel()
        elif how == "late":
            assert (await promoting).status_code == 409
        else:
            switching = asyncio.create_task(client.post("/v1/policy", json={"policy": "sed"}))
            await asyncio.sleep(0.05)
            assert not switching.done()  # One change at a time.
            await act(client, "rollback")
            manager.end_experiment("asked")
        store.may_go_on.set()
        if how in ("worse", "switched"):
            refused = await promoting
            assert (refused.status_code, "ended meanwhile" in refused.text) == (409, True)
        await settled(lambda: store.aliases == aliases)
        if switching is None:
            assert manager.policy is before
        else:
            assert (await switching).json()["active"] == "sed"

    check(test, policy="sed")


@pytest.mark.parametrize(
    ("champion", "canary", "why"),
    [
        ("sed", "sed+sjf@20", "first come, first served, and those of sed+sjf@20@"),
        ("sed+sjf@20", "sed", "by sjf@20, and those of sed@"),
        ("sed+sjf@20", "marginal_delay+sjf@21", "by sjf@20, and those of marginal_delay+sjf@21@"),
        ("sed+sjf@20:1", "sed+sjf@20:2", "by sjf@20:1, and those of sed+sjf@20:2@"),
        ("sed+fair", "marginal_delay+fair", "fair@2 counts the requests that it orders"),
        ("sed", "marginal_in_order+boost@4", "by boost@4"),
    ],
)
def test_a_canary_that_orders_otherwise_is_refused_and_the_experiment_goes_on(
    champion, canary, why
):
    async def test(client, pools, gateway):
        await act(client, "shadow", policy="round_robin")
        refused = await act(client, "canary", policy=canary)
        assert refused.status_code == 409, refused.text
        detail = refused.json()["detail"]
        assert why in detail
        assert "same queues" in detail
        assert "shadow" in detail
        running = gateway.manager.experiment
        assert (running.mode, running.running) == ("shadow", True)
        # It may be promoted all the same, and taken back.
        assert (await act(client, "shadow", policy=canary)).status_code == 200
        promoted = (await act(client, "promote")).json()
        assert promoted["champion"]["name"] == canary
        assert (await act(client, "rollback")).json()["champion"]["name"] == champion

    check(test, policy=champion)


@pytest.mark.parametrize(
    ("champion", "canary"),
    [
        ("sed+sjf@20:1", "marginal_delay+sjf@20:1"),
        ("marginal_delay+boost@4", "marginal_in_order+boost@4"),
        ("sed+edf@2", "round_robin+edf@2"),
    ],
)
def test_a_canary_in_the_champions_order_begins_and_ends_when_another_policy_decides(
    champion, canary
):
    async def test(client, pools, gateway):
        for change in ("/v1/policy", PATH):
            started = await act(client, "canary", policy=canary)
            assert started.status_code == 200, started.text
            # The new champion orders otherwise than the canary, which must not outlive the old.
            if change == PATH:
                assert (await act(client, "rollback")).json()["champion"]["name"] == "sed+slack"
            else:
                await client.post("/v1/policy", json={"policy": "sed+slack"})
            assert gateway.manager.experiment.why == "another policy decides"
            assert gateway.manager.picker.arm_of("any") == "champion"
            await client.post("/v1/policy", json={"policy": champion})

    check(test, policy=champion)


def test_a_canary_that_predicts_other_lengths_is_refused_where_the_order_goes_by_them(monkeypatch):
    other = LengthPredictor(bin_edges_tokens=(), mean_generated_tokens=(7.0,))
    order = np.array([20.0, 0.0, 0.0, 0.0])
    ours, theirs, unordered = (
        PolicyArtifact(
            metadata(kind="marginal", predictor=predictor),
            {"weights": np.full(NUM_MARGINAL_WEIGHTS, weight)}
            | ({"order": order} if ordered else {}),
        )
        for predictor, weight, ordered in (
            (PREDICTOR, 0.1, True), (other, 0.2, True), (other, 0.2, False),
        )
    )  # fmt: skip

    async def test(client, pools, gateway):
        await client.post("/v1/policy", json={"policy": "ours"})
        refused = await act(client, "canary", policy="theirs")
        assert refused.status_code == 409
        assert "predict other lengths" in refused.json()["detail"]
        assert (await act(client, "canary", policy="again")).status_code == 200
        await client.post("/v1/policy", json={"policy": "sed"})
        assert (await act(client, "canary", policy="unordered")).status_code == 200

    known = {"ours": ours, "theirs": theirs, "again": ours, "unordered": unordered}
    resolving(monkeypatch, **{n: from_artifact(n, one, "t", SCENARIO) for n, one in known.items()})
    check(test)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"action": "promote"}, 409, "no experiment runs"),
        ({"action": "stop"}, 409, "no experiment runs"),
        ({"action": "canary"}, 422, "policy is missing"),
        ({"action": "canary", "policy": "bogus"}, 422, "unknown policy"),
        ({"action": "canary", "policy": "sed", "share": 0.9}, 422, "share"),
        ({"action": "canary", "policy": "ray_default"}, 422, "ray_default"),
        ({"action": "explode"}, 422, "action"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(body, status, reason):
    async def test(client, pools, gateway):
        answer = await client.post(PATH, json=body)
        assert answer.status_code == status
        assert reason in answer.json()["detail"]

    check(test)


def test_changes_need_the_token():
    async def test(client, pools, gateway):
        assert (await act(client, "rollback")).status_code == 401
        client.headers["authorization"] = "Bearer secret"
        assert (await act(client, "shadow", policy="sed")).status_code == 200

    check(test, token="secret")


def test_a_late_request_is_waited_for_until_it_is_given_up():
    verdicts = Verdicts()
    verdicts.open("never", canary=True, prompt_tokens=7, abandon_s=10.0)
    verdicts.open("left", canary=True, prompt_tokens=7, abandon_s=30.0)
    verdicts.open("late", canary=False, prompt_tokens=9, abandon_s=20.0)
    assert verdicts.close("late", good=False, output_tokens=5, now_s=11.0) == [
        Verdict(canary=True, good=False, prompt_tokens=7, output_tokens=None),
        Verdict(canary=False, good=False, prompt_tokens=9, output_tokens=5),
    ]
    assert verdicts.close("never", good=True, output_tokens=5, now_s=12.0) == []
    assert verdicts.close("left", good=None, output_tokens=None, now_s=13.0) == []
    assert verdicts.overdue(99.0) == []
