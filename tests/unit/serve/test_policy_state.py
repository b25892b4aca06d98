"""What a gateway remembers over a crash and a new deployment, and what it refuses to."""

import asyncio
import json
import math
from pathlib import Path

import httpx
import numpy as np
import pytest
from unit.serve.test_serve_allocator import FOUR, ONE, World
from unit.serve.test_serve_gateway import LOCAL, FakePool, Letters, a_body, a_cluster
from unit.serve_builders import marginal_artifact

from serve_app.gateway.callers import Caller, CallerLimits
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.rate_limits import Grant, OverLimit, RateLimits
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.policy import state as state_module
from serve_app.policy.manager import PolicyManager
from serve_app.policy.state import StateFile
from tokenyard.allocation.policies.rules import StaticPlan
from tokenyard.routing.observation import NUM_MARGINAL_WEIGHTS
from tokenyard.statistics.sequential import SequentialTest

PATH = "/v1/policies"


def live(path, test, policy="sed", registry=None, more_parts=None):
    """One life of a gateway with a state file; it ends as a crash does, without a word."""

    async def run():
        cluster = a_cluster(policy=policy, explore_fraction=0.0)
        manager = PolicyManager(
            cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0),
            registry,
        )  # fmt: skip
        pools = {pool.name: FakePool(pool.name) for pool in cluster.pools}
        gateway = Gateway(cluster, manager, pools)
        gateway.limits = RateLimits(lambda _: CallerLimits(tokens_per_day=100))
        parts = {"outliers": gateway.outliers, "limits": gateway.limits, **(more_parts or {})}
        manager.resume(cluster.policy, may_be_missing=True, file=StateFile(path), parts=parts)
        api = create_gateway_api(gateway, Letters(), Access(None, None, True))
        transport = httpx.ASGITransport(api, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as client:
            try:
                return await test(client, gateway)
            finally:
                manager.stop()

    return asyncio.run(run())


async def look(client, gateway):
    return (await client.get(PATH)).json()


def switching_to(policy):
    async def switch(client, gateway):
        answer = await client.post("/v1/policy", json={"policy": policy})
        assert answer.status_code == 200, answer.text

    return switch


def test_a_policy_set_by_hand_decides_after_a_crash_though_its_file_is_gone(tmp_path):
    state, file = tmp_path / "state.json", tmp_path / "mine.npz"
    artifact = marginal_artifact(np.full(NUM_MARGINAL_WEIGHTS, 0.1))
    artifact.save(file)
    live(state, switching_to(str(file)))
    file.unlink()
    seen = live(state, look)
    assert (seen["champion"]["name"], seen["champion"]["sha256"]) == ("mine", artifact.sha256)
    assert seen["previous"]["name"] == "sed"
    assert seen["events"][0]["what"] == "goes on with"


def test_a_rollback_outlives_a_crash_and_can_be_taken_back_after_it(tmp_path):
    async def roll_back(client, gateway):
        return (await client.post(PATH, json={"action": "rollback"})).json()

    state = tmp_path / "state.json"
    live(state, switching_to("round_robin"))
    assert live(state, roll_back)["champion"]["name"] == "sed"
    assert live(state, look)["champion"]["name"] == "sed"
    assert live(state, roll_back)["champion"]["name"] == "round_robin"


def test_what_was_set_by_hand_outlives_a_crash_also_where_the_registry_is_away(tmp_path):
    async def explore(client, gateway):
        body = {"policy": "champion", "explore_fraction": 0.05}
        return (await client.post("/v1/policy", json=body)).json()

    async def see(client, gateway):
        return (await client.get("/v1/policy")).json()

    state, away = tmp_path / "state.json", f"sqlite:///{tmp_path}/away.db"
    before = live(state, explore, policy="champion")
    for registry in (away, away, None):
        after = live(state, see, policy="champion", registry=registry)
        assert (after["sha256"], after["explore_fraction"]) == (before["sha256"], 0.05)


def test_a_rollback_to_what_the_name_no_longer_means_outlives_a_crash(tmp_path):
    """A newer policy has taken the name that the cluster file gives, and was worse."""
    state, file = tmp_path / "state.json", tmp_path / "mine.npz"
    older, newer = (marginal_artifact(np.full(NUM_MARGINAL_WEIGHTS, one)) for one in (0.1, 0.2))

    async def take_and_go_back(client, gateway):
        newer.save(file)
        await switching_to(str(file))(client, gateway)
        assert gateway.manager.policy.loaded.card.sha256 == newer.sha256
        return (await client.post(PATH, json={"action": "rollback"})).json()

    older.save(file)
    back = live(state, take_and_go_back, policy=str(file))
    again = live(state, look, policy=str(file))
    assert back["champion"]["sha256"] == again["champion"]["sha256"] == older.sha256


def test_a_rollback_from_what_a_restart_has_found_goes_to_what_decided_until_then(tmp_path):
    """A newer policy has taken the name that the cluster file gives while no gateway ran."""
    state, file = tmp_path / "state.json", tmp_path / "mine.npz"
    older, newer = (marginal_artifact(np.full(NUM_MARGINAL_WEIGHTS, one)) for one in (0.1, 0.2))

    async def begin(client, gateway):
        await gateway.manager.store.save()

    async def go_back(client, gateway):
        assert gateway.manager.policy.loaded.card.sha256 == newer.sha256
        return (await client.post(PATH, json={"action": "rollback"})).json()

    older.save(file)
    live(state, begin, policy=str(file))
    newer.save(file)
    back = live(state, go_back, policy=str(file))
    again = live(state, look, policy=str(file))
    assert back["champion"]["sha256"] == again["champion"]["sha256"] == older.sha256
    assert again["previous"]["sha256"] == newer.sha256


def test_what_cannot_be_gone_back_to_any_more_takes_nothing_else_along(tmp_path):
    state, file = tmp_path / "state.json", tmp_path / "mine.npz"
    marginal_artifact().save(file)
    live(state, switching_to(str(file)))
    live(state, switching_to("round_robin"))
    found = json.loads(state.read_text())
    found["previous"]["loaded"]["artifact"] = (
        ""  # As a release that does not read such files finds it.
    )
    state.write_text(json.dumps(found))
    seen = live(state, look)
    assert seen["champion"]["name"] == "round_robin"
    assert "nothing to go back to" in seen["state"]
    assert not (tmp_path / "state.json.refused").exists()


def test_a_plan_by_hand_that_is_none_any_more_takes_nothing_else_along(tmp_path):
    state = tmp_path / "state.json"
    before, after = (World(StaticPlan(ONE), start=ONE).allocator for _ in range(2))
    before.set_plan(FOUR)
    before.dry_run = True
    live(state, switching_to("round_robin"), more_parts={"allocation": before})
    found = json.loads(state.read_text())
    found["parts"]["allocation"]["plan"]["max_batch"] = 7  # As of a scenario of other plans.
    state.write_text(json.dumps(found))
    seen = live(state, look, more_parts={"allocation": after})
    assert seen["champion"]["name"] == "round_robin"
    assert "allocation is not as it was" in seen["state"]
    assert "max_batch=7" in seen["state"]
    assert (after.by_hand, after.plan, after.dry_run) == (False, ONE, True)
    assert not (tmp_path / "state.json.refused").exists()


def test_another_policy_in_the_cluster_file_counts_before_the_state(tmp_path):
    state = tmp_path / "state.json"
    live(state, switching_to("round_robin"))
    seen = live(state, look, policy="power_of_two")
    assert seen["champion"]["name"] == "power_of_two"
    assert "no longer names" in seen["state"]


def test_what_keys_have_used_holds_whichever_policy_the_cluster_file_names(tmp_path):
    """A new policy in the file is no new day for those whose quota is used up."""
    caller, state = Caller("t", "k"), tmp_path / "state.json"

    async def use(client, gateway):
        assert isinstance(gateway.limits.admit(caller, 80), Grant)
        for _ in range(20):
            gateway.outliers.fail("a-0", math.inf)  # For minutes.
        await gateway.manager.store.save()

    async def ask_again(client, gateway):
        found = gateway.limits.admit(caller, 30)
        assert isinstance(found, OverLimit)
        assert found.code == "insufficient_quota"
        assert gateway.outliers.ejected_s("a-0") > 0.0

    live(state, use)
    live(state, ask_again, policy="power_of_two")


def test_an_ejection_outlives_a_crash_though_its_replica_is_found_after_others(tmp_path):
    async def fail(client, gateway):
        for _ in range(8):  # Ejected by the third, and for 32 s at the last.
            gateway.outliers.fail("b-0", math.inf)
        await gateway.manager.store.save()

    async def ask(client, gateway):
        gateway.backends["b"].there = False
        assert (await client.post("/v1/completions", json=a_body())).status_code == 200
        gateway.backends["b"].there = True
        assert (await client.post("/v1/completions", json=a_body())).status_code == 200
        assert gateway.outliers.ejected_s("b-0") > 0.0
        assert not gateway.backends["b"].requests

    state = tmp_path / "state.json"
    live(state, fail)
    live(state, ask)


def test_a_canary_goes_on_with_its_share_its_evidence_and_its_requests(tmp_path):
    async def begin(client, gateway):
        body = {"action": "canary", "policy": "round_robin", "share": 0.3}
        await client.post(PATH, json=body)
        experiment = gateway.manager.experiment
        for i in range(60):
            experiment.test.record(i % 3 == 0, i % 7 != 0, 10 + i, 5 + i)
        gateway.manager.policy.breaker.fail(too_slow=True)
        for _ in range(20):
            gateway.outliers.fail("a-0", math.inf)  # For minutes.
        await gateway.manager.store.save()
        return [experiment.arm_of(str(i)) for i in range(100)], experiment.test.saved()

    async def go_on(client, gateway):
        experiment = gateway.manager.experiment
        assert gateway.manager.policy.breaker.state == "open"
        assert gateway.outliers.ejected_s("a-0") > 0.0
        return [experiment.arm_of(str(i)) for i in range(100)], experiment.test.saved()

    state = tmp_path / "state.json"
    assert live(state, begin) == live(state, go_on)


def test_a_canary_of_a_champion_that_is_another_after_a_restart_is_told_to_have_ended(tmp_path):
    async def begin(client, gateway):
        await client.post(PATH, json={"action": "canary", "policy": "round_robin"})

    state, file = tmp_path / "state.json", tmp_path / "mine.npz"
    marginal_artifact().save(file)
    live(state, begin, policy=str(file))
    marginal_artifact(np.full(NUM_MARGINAL_WEIGHTS, 0.1)).save(file)
    last, *_ = live(state, look, policy=str(file))["events"]
    assert (last["what"], last["why"]) == ("canary ended", "another policy decides")
    assert last["policy"].startswith("round_robin@")


def test_a_canary_of_an_earlier_release_that_orders_otherwise_has_ended(tmp_path):
    async def begin(client, gateway):
        await client.post(PATH, json={"action": "canary", "policy": "round_robin"})
        gateway.manager.experiment.test.record(True, True, 10, 5)
        await gateway.manager.store.save()

    state = tmp_path / "state.json"
    live(state, begin)
    found = json.loads(state.read_text())
    # What an earlier release wrote of a canary that it let begin.
    found["experiment"]["policy"]["name"] = "round_robin+sjf"
    found["experiment"]["policy"]["loaded"]["card"]["name"] = "round_robin+sjf"
    state.write_text(json.dumps(found))
    seen = live(state, look)
    assert seen["state"] is None
    assert seen["champion"]["name"] == "sed"
    assert "same queues" in seen["experiment"]["why_ended"]
    assert seen["experiment"]["canary_requests"] == 1
    assert [one["what"] for one in seen["events"]][:1] == ["canary ended"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "broken"), ("[1]", "format version None"), ('{"format_version": 1}', "reads 2"),
        ('{"format_version": 2}', "configured: Field required"), ("[" * 100_000, "broken"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_kept_aside_and_says_why(tmp_path, text, reason):
    state = tmp_path / "state.json"
    state.write_text(text)
    seen = live(state, look)
    assert reason in seen["state"]
    assert seen["champion"]["name"] == "sed"
    assert (tmp_path / "state.json.refused").read_text() == text


def test_why_a_state_was_not_taken_up_is_still_told_once_another_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "_WATCH_EVERY_S", 0.01)
    state = tmp_path / "state.json"
    state.write_text("")

    async def look_later(client, gateway):
        gateway.manager.start()
        async with asyncio.timeout(10):
            while not state.exists():
                await asyncio.sleep(0.01)
        await gateway.manager.store.save()
        return (await client.get(PATH)).json()

    assert "broken" in live(state, look_later)["state"]
    assert live(state, look)["state"] is None


def test_a_file_that_cannot_be_kept_aside_either_stops_no_gateway():
    """As on a disk that may only be read by now."""
    seen = live(Path("/proc/version"), look)
    assert "broken" in seen["state"]
    assert seen["champion"]["name"] == "sed"


def test_a_part_of_the_state_that_is_no_mapping_is_refused_by_its_name(tmp_path):
    state = tmp_path / "state.json"
    live(state, switching_to("round_robin"))
    found = json.loads(state.read_text())
    found["policy"]["breaker"] = 5
    state.write_text(json.dumps(found))
    seen = live(state, look)
    assert "policy.breaker: Input should be a valid dictionary" in seen["state"]
    assert seen["champion"]["name"] == "sed"


def test_evidence_that_is_none_is_refused_and_the_cluster_file_counts(tmp_path):
    async def begin(client, gateway):
        await client.post(PATH, json={"action": "canary", "policy": "round_robin"})

    state = tmp_path / "state.json"
    live(state, begin)
    found = json.loads(state.read_text())
    found["experiment"]["evidence"]["test"]["log_capital"] = [0.0] * 9
    state.write_text(json.dumps(found))
    seen = live(state, look)
    assert "log_capital must be" in seen["state"]
    assert seen["experiment"] is None


def test_a_change_that_the_next_gateway_would_not_hear_of_is_refused(tmp_path):
    """A gateway that ends answers those who are connected, after its last state is written."""
    state = tmp_path / "state.json"

    async def end(client, gateway):
        await switching_to("round_robin")(client, gateway)
        await gateway.manager.hand_over()
        changes = [("/v1/policy", {"policy": "power_of_two"}), (PATH, {"action": "rollback"})]
        for path, body in changes:
            refused = await client.post(path, json=body)
            assert refused.status_code == 409
            assert "about to end" in refused.json()["detail"]
        return (await client.get(PATH)).json()["champion"]["name"]

    assert live(state, end) == "round_robin"
    assert live(state, look)["champion"]["name"] == "round_robin"


def test_of_two_gateways_with_one_file_the_first_is_told_and_writes_no_more(tmp_path, caplog):
    state = tmp_path / "state.json"

    async def another(client, gateway):
        await switching_to("power_of_two")(client, gateway)

    async def first(client, gateway):
        await switching_to("round_robin")(client, gateway)
        await asyncio.to_thread(live, state, another)
        others = state.read_bytes()
        for _ in range(3):
            await gateway.manager.store.save()
        assert state.read_bytes() == others
        return (await client.get(PATH)).json()

    seen = live(state, first)
    assert seen["champion"]["name"] == "round_robin"
    assert "another gateway writes it too" in seen["state"]
    assert caplog.text.count("another gateway writes it too") == 1
    assert live(state, look)["champion"]["name"] == "power_of_two"


def test_a_disk_that_is_full_is_told_and_stops_nothing(tmp_path):
    async def test(client, gateway):
        gateway.manager.store.file.path = tmp_path / "a file" / "state.json"
        (tmp_path / "a file").write_text("")
        changed = await client.post("/v1/policy", json={"policy": "round_robin"})
        assert changed.status_code == 200
        return (await client.get(PATH)).json()

    assert "cannot be written" in live(tmp_path / "state.json", test)["state"]


def test_a_test_that_is_taken_up_goes_on_as_if_nothing_had_been():
    rng = np.random.default_rng(0)
    draws = [(bool(rng.random() < 0.3), bool(rng.random() < 0.8), 10 * i, i) for i in range(200)]
    one, other = SequentialTest(0.3), SequentialTest(0.3)
    for draw in draws[:120]:
        one.record(*draw)
    other.restore(json.loads(json.dumps(one.saved())))
    for draw in draws[120:]:
        assert one.record(*draw) == other.record(*draw)
    assert one.saved() == other.saved()
