"""A policy that decides for a while: what comes back after it, and who may lend and veto."""

import asyncio

import numpy as np
import pytest
from unit.serve.test_keys import ENTRIES, a_site, write

from serve_app.cluster import CircuitBreakerSettings
from serve_app.gateway.callers import hash_of
from serve_app.policy.manager import PolicyManager
from serve_app.policy.state import STATE_FILE, StateFile

PILOT = {"name": "pilot", "autopilot": True, "sha256": hash_of("sk-pilot")}


def run(test, file=None):
    """Run a test with a manager in which `sed` decides, and round robin did before."""

    async def inside():
        manager = PolicyManager(
            "conversation_mixed_gpus", "marginal_delay", CircuitBreakerSettings(),
            np.random.default_rng(0),
        )  # fmt: skip
        manager.resume("sed", file=file)
        await manager.switch_by_hand("round_robin", 0.0)
        await manager.switch_by_hand("sed", 0.0)
        try:
            await test(manager)
        finally:
            manager.stop()

    asyncio.run(inside())


def deciding(manager):
    return manager.policy.name, manager.previous.name


async def until_over(manager):
    async with asyncio.timeout(30):
        while manager.loan is not None:
            await asyncio.sleep(0.01)


def test_what_decided_before_decides_again_and_goes_back_to_what_it_did():
    async def test(manager):
        await manager.switch_by_hand("random", 0.0, for_s=0.05)
        assert deciding(manager) == ("random", "sed")
        await until_over(manager)
        assert deciding(manager) == ("sed", "round_robin")

    run(test)


def test_a_loan_that_follows_another_goes_back_to_the_first_lender():
    async def test(manager):
        await manager.switch_by_hand("random", 0.0, for_s=60.0)
        await manager.switch_by_hand("power_of_two", 0.0, for_s=0.05)
        await until_over(manager)
        assert deciding(manager) == ("sed", "round_robin")

    run(test)


@pytest.mark.parametrize("ends", ["rollback", "switch"])
def test_a_change_ends_a_loan_and_its_time_changes_nothing_any_more(ends):
    async def test(manager):
        await manager.switch_by_hand("random", 0.0, for_s=0.2)
        if ends == "rollback":
            await manager.change("rollback")
            expected = "sed", "round_robin"
        else:
            await manager.switch_by_hand("power_of_two", 0.0)
            expected = "power_of_two", "random"
        assert manager.loan is None
        await asyncio.sleep(0.3)
        assert deciding(manager) == expected

    run(test)


def test_a_gateway_that_begins_anew_has_forgotten_the_loan(tmp_path):
    path = tmp_path / STATE_FILE

    async def lends(manager):
        await manager.switch_by_hand("random", 0.0, for_s=60.0)
        await manager.store.save()

    async def again(manager):
        assert deciding(manager) == ("sed", "round_robin")

    run(lends, StateFile(path))
    run(again, StateFile(path))


def test_an_autopilots_key_changes_policies_until_it_is_vetoed_and_nothing_else(tmp_path):
    file = tmp_path / "keys.yaml"
    write(file, [*ENTRIES, PILOT])

    async def test():
        async with a_site(file) as (client, _, gateway, _):

            async def ask(method, path, body, key="sk-pilot"):
                headers = {"authorization": f"Bearer {key}"}
                answer = await client.request(method, path, json=body, headers=headers)
                return answer.status_code

            turn = {"policy": "random", "for_s": 60.0}
            report = {"step": "comparing", "note": "pair 1"}
            assert await ask("POST", "/v1/policy", turn, "sk-ann") == 403
            assert await ask("POST", "/v1/policy", turn) == 200
            assert gateway.manager.policy.name == "random"
            assert await ask("PUT", "/v1/autopilot", report) == 200
            assert await ask("POST", "/v1/autopilot", {"veto": False}) == 403
            assert await ask("POST", "/v1/pools", {"pool": "p", "endpoints": ["http://e"]}) == 403
            chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            assert await ask("POST", "/v1/chat/completions", chat) == 403
            assert await ask("POST", "/v1/autopilot", {"veto": True}, "sk-ops") == 200
            # The turn is over at once, and the key changes nothing any more.
            assert gateway.manager.policy.name != "random"
            assert await ask("POST", "/v1/policy", turn) == 409
            assert await ask("POST", "/v1/policies", {"action": "rollback"}) == 409
            assert await ask("POST", "/v1/autopilot", {"veto": False}, "sk-ops") == 200
            assert await ask("POST", "/v1/policy", turn) == 200

    asyncio.run(test())
