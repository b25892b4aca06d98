"""Endpoints of vLLM that queue by priority: what the gateway tells them, and what it refuses."""

import asyncio
import json
import time

import pytest
from unit.serve.test_serve_external import BODY, run

ASK = {"content-type": "application/json"}


def test_the_body_says_the_place_in_the_order_and_stays_as_it_is_otherwise():
    async def test(client, gateway, endpoints):
        written = b'{ "model":"m",  "prompt": "hell\\u00f6", "max_tokens":8,"stream": true }\n'
        answer = await client.post("/v1/completions", content=written, headers=ASK)
        assert answer.status_code == 200
        (body,) = endpoints[0].bodies
        told = json.loads(body)["priority"]
        assert abs(told / 1000 - time.time()) < 150
        assert body == b'{ "priority": %d, ' % told + written[2:]

    run(test, policy="sed+sjf@20:8", order="priority")


def test_longer_requests_get_higher_numbers_and_without_an_order_it_is_the_time():
    async def test(client, gateway, endpoints):
        for policy, lengths in (("sed+sjf@20", (50, 1)), ("sed", (50, 1))):
            gateway.manager.switch(policy)
            for words in lengths:
                body = BODY | {"prompt": "word " * 40 * words, "service_tier": "default"}
                await client.post("/v1/completions", json=body)
        long, short, first, second = (json.loads(one)["priority"] for one in endpoints[0].bodies)
        assert short < long
        assert first <= second

    run(test, order="priority", limits={"max_prompt_tokens": 100_000})


@pytest.mark.parametrize(("order", "status"), [("priority", 400), ("fcfs", 200)])
def test_a_callers_own_priority_is_refused_where_the_gateway_sets_it(order, status):
    async def test(client, gateway, endpoints):
        answer = await client.post("/v1/completions", json=BODY | {"priority": -1})
        assert answer.status_code == status
        if status == 200:
            assert json.loads(endpoints[0].bodies[0])["priority"] == -1
        else:
            assert answer.json()["error"]["param"] == "priority"
            assert not endpoints[0].bodies

    run(test, order=order)


def test_what_generates_nothing_has_no_place_in_the_order():
    async def test(client, gateway, endpoints):
        body = {"model": "m", "input": "hello"}
        async with asyncio.timeout(10):
            await client.post("/v1/embeddings", json=body)
        assert "priority" not in json.loads(endpoints[0].bodies[0])

    run(test, order="priority")
