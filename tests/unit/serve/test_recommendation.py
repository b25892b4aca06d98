"""What a pool's autoscaler is told: in a metric, and in `GET /v1/pools`."""

import asyncio

import numpy as np
import pytest
from unit.serve.test_serve_external import a_gateway, pools_metric
from unit.stub_endpoint import HANG

from serve_app.allocation import recommendation
from serve_app.allocation.plans import find_plan
from serve_app.allocation.recommendation import Recommendations
from tokenyard.allocation.plans import LATENCY_S, UTILISATION, load_allocation, plan_table

SCENARIO = load_allocation("emulated_l4x4")
POOL = {"autoscaling": {"scenario": "emulated_l4x4"}}


def busy(num, share):
    """Requests in progress at replicas at a share of their full load, by Little's law."""
    table = plan_table(SCENARIO)
    i, at = table.find(find_plan(table, "data", num)), int(np.searchsorted(UTILISATION, share))
    return float(UTILISATION[at] * table.capacity_per_s[i] * table.curves[i, at, LATENCY_S])


def test_a_pool_grows_and_shrinks_with_what_is_in_progress():
    async def inside():
        async with a_gateway(2, pool=POOL) as (client, gateway, _):
            recommendations, seen = Recommendations(gateway, None), []
            for slot in range(8):
                num = seen[-1] if seen else 2
                requests = busy(num, 0.95 if slot < 4 else 0.05)
                recommendations.look(slot * SCENARIO.slot_s, {"theirs": (requests, num)})
                seen.append(int(pools_metric(gateway, "recommended_replicas")))
            (pool,) = (await client.get("/v1/pools")).json()["pools"]
            assert pool["recommended_replicas"] == seen[-1]
            return seen

    seen = asyncio.run(inside())
    assert seen[0] == 2  # Nothing is known in the first slot.
    assert max(seen) == 4
    assert seen[-1] == 1


def test_no_pool_gets_fewer_than_its_file_says():
    async def inside():
        pool = {"autoscaling": {"scenario": "emulated_l4x4", "min_replicas": 3}}
        async with a_gateway(1, pool=pool) as (_, gateway, _):
            recommendations = Recommendations(gateway, None)
            for slot in range(3):
                recommendations.look(slot * SCENARIO.slot_s, {"theirs": (0.0, 1)})
                assert pools_metric(gateway, "recommended_replicas") == 3

    asyncio.run(inside())


def test_what_runs_and_what_waits_at_the_gateway_counts(monkeypatch):
    looks = []
    monkeypatch.setattr(
        Recommendations, "look", lambda self, now_s, in_progress: looks.append(in_progress)
    )
    monkeypatch.setattr(recommendation, "_LOOK_S", 0.01)

    async def inside():
        pool = POOL | {"max_ongoing": 1}
        async with a_gateway(2, pool=pool, queue={"max_wait_s": 60}, max_ongoing=1) as (
            client, gateway, endpoints,
        ):  # fmt: skip
            for endpoint in endpoints:
                endpoint.answers = [HANG] * 3
            body = {"model": "m", "prompt": "hello", "max_tokens": 8}
            calls = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in "abc"]
            watching = asyncio.create_task(Recommendations(gateway, None).run())
            while not looks or looks[-1]["theirs"][0] < 3:
                await asyncio.sleep(0.01)
            assert looks[-1] == {"theirs": (3.0, 2)}
            for task in (*calls, watching):
                task.cancel()
            await asyncio.gather(*calls, watching, return_exceptions=True)

    asyncio.run(inside())


def test_a_scenario_that_is_unknown_is_refused():
    async def inside():
        async with a_gateway(1, pool={"autoscaling": {"scenario": "nowhere"}}) as (_, gateway, _):
            with pytest.raises(ValueError, match="'nowhere'"):
                Recommendations(gateway, None)

    asyncio.run(inside())
