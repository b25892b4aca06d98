"""Picks for whoever sends requests himself, and the reports of what came of them."""

import asyncio

from unit.serve.test_serve_gateway import check

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


async def pick(client, **query):
    answer = await client.post("/v1/picks", json=ASKED, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def report(client, picked, **fields):
    return await client.post(f"/v1/picks/{picked['decision_id']}", json=fields)


async def settled(gateway):
    for _ in range(200):
        if not gateway.in_flight:
            break
        await asyncio.sleep(0.01)
    assert gateway.in_flight == 0
    assert all(one.in_flight.count == 0 for one in gateway.table.replicas.values())


def requests(gateway):
    samples = gateway.metrics.registry.collect()
    counted = next(one for one in samples if one.name == "tokenyard_requests").samples
    ends = {}
    for sample in counted:
        if sample.name.endswith("_total") and sample.value:
            outcome = sample.labels["outcome"]
            ends[outcome] = ends.get(outcome, 0) + sample.value
    return ends


def test_a_pick_holds_a_place_until_its_end_is_told():
    async def test(client, pools, gateway):
        picked = await pick(client)
        assert picked["pool"] in ("a", "b")
        assert picked["replica_ids"][0] == f"{picked['pool']}-0"
        [held] = [one for one in gateway.table.replicas.values() if one.in_flight.count]
        assert held.replica_id == picked["replica_ids"][0]
        assert (await report(client, picked, output_tokens=1)).status_code == 204
        assert gateway.in_flight == 1
        end = await report(client, picked, output_tokens=3, prompt_tokens=7, outcome="length")
        assert end.status_code == 204
        await settled(gateway)
        assert requests(gateway) == {"length": 1}
        assert gateway.metrics.of_pool(picked["pool"]).output_tokens._value.get() == 3
        assert (await report(client, picked, outcome="stop")).status_code == 404
        assert not any(pool.requests for pool in pools.values())

    check(test)


def test_after_a_failure_another_is_picked_where_that_is_wanted():
    async def test(client, pools, gateway):
        first = await pick(client)
        second = (await report(client, first, outcome="unreachable", retry=True)).json()
        assert second["decision_id"] == first["decision_id"]
        assert second["pool"] != first["pool"]
        none_left = await report(client, second, outcome="failed", retry=True)
        assert none_left.status_code == 503
        await settled(gateway)
        third = await pick(client)
        ended = await report(client, third, outcome="failed")
        assert ended.status_code == 204
        await settled(gateway)
        assert requests(gateway) == {"failed": 3}

    check(test)


def test_who_leaves_or_says_nothing_gives_the_place_up():
    async def test(client, pools, gateway):
        assert (await report(client, await pick(client), outcome="abort")).status_code == 204
        await settled(gateway)
        await pick(client, lease_s=0.05)
        await settled(gateway)
        assert requests(gateway) == {"abort": 2}

    check(test)


def test_what_the_gateway_refuses_is_refused_as_on_its_own_routes():
    async def test(client, pools, gateway):
        wrong = await client.post("/v1/picks", json=ASKED | {"model": "another"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
        no_route = await client.post("/v1/picks", json=ASKED, params={"route": "chat"})
        assert no_route.status_code == 422
        for _ in range(4):
            await pick(client)
        full = await client.post("/v1/picks", json=ASKED)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert (await client.post("/v1/picks/unknown", json={})).status_code == 404

    check(test)


def test_keys_are_asked_for():
    async def test(client, pools, gateway):
        assert (await client.post("/v1/picks", json=ASKED)).status_code == 401
        headers = {"authorization": "Bearer secret"}
        picked = await client.post("/v1/picks", json=ASKED, headers=headers)
        assert picked.status_code == 200
        assert (await report(client, picked.json(), outcome="stop")).status_code == 401

    check(test, token="secret")
