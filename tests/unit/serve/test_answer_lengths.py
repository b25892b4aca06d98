"""The gateway learns how long answers are, and decides by it."""

from contextlib import suppress

import httpx
import pytest
from unit.serve.test_serve_external import BODY, run
from unit.stub_endpoint import DONE, HANG, an_event

LONG = (*(an_event("word ") for _ in range(39)), an_event("", "stop"), DONE)


def predicted(gateway):
    """Output that the last decision was based on, tokens."""
    request = gateway.history._decisions[-1][2].request
    return request.predicted_total_tokens - request.context_tokens


async def learned(client):
    return (await client.get("/v1/policy")).json()["answer_lengths"]


def test_what_was_answered_is_expected_of_the_next_request():
    async def test(client, gateway, endpoints):
        body = BODY | {"max_tokens": 4000}
        endpoints[0].script = LONG
        assert await learned(client) is None
        await client.post("/v1/completions", json=body)
        before = predicted(gateway)
        for _ in range(80):
            await client.post("/v1/completions", json=body)
        lengths = await learned(client)
        assert (lengths["num_answers"], lengths["decides"]) == (81, True)
        assert 30 < lengths["p50_tokens"] < 50
        assert abs(predicted(gateway) - 39) < 0.2 * abs(before - 39)
        # Another caller's other request is not known as well.
        await client.post("/v1/completions", json=body | {"max_tokens": 20, "prompt": "a b " * 99})
        assert predicted(gateway) <= 20

    run(test, policy="marginal_delay+sjf@60")


@pytest.mark.parametrize("script", [(b"no",), (*LONG[:9], HANG)])
def test_answers_that_do_not_come_to_their_end_teach_nothing(script):
    async def test(client, gateway, endpoints):
        endpoints[0].status, endpoints[0].script = (400 if script == (b"no",) else 200), script
        for _ in range(3):
            with suppress(httpx.HTTPError):
                await client.post("/v1/completions", json=BODY)
        assert await learned(client) is None

    run(test, deadlines={"between_tokens_s": 0.1})


def test_embeddings_teach_nothing():
    async def test(client, gateway, endpoints):
        await client.post("/v1/embeddings", json={"model": "m", "input": "hello"})
        assert await learned(client) is None

    run(test)
