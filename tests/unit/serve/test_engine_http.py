"""Engines of ours answer HTTP themselves, and the gateway hands their bytes on."""

import asyncio
import json
import logging
import re
from dataclasses import asdict

import httpx
import pyarrow.parquet as pq
import pytest
from unit.engine_site import SECRET, Repeater, run
from unit.raw_endpoint import RawCaller
from unit.serve.test_serve_gateway import a_body, events_of

from serve_app.engines.base import Generation, Sampling
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.engine_wire import join_json, read_generation, write_generation
from tokenyard.routing.types import OrderKey

TEXT = b"/v1/completions"
BIG = {"limits": {"max_in_flight": 256, "max_prompt_tokens": 200, "max_output_tokens": 100}}
KEY = {"authorization": f"Bearer {SECRET}"}


def a_client(port):
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30)


def to_engine(site, **options):
    return httpx.AsyncClient(base_url=site.url, timeout=30, **options)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


def test_a_completion_is_the_same_whole_and_streamed_and_named_as_in_the_log():
    async def test(port, gateway, sites):
        async with a_client(port) as client:
            whole = await client.post("/v1/completions", json=a_body())
            answer = whole.json()
            assert answer["choices"][0] == {
                "index": 0, "text": "hellohel", "finish_reason": "length",
            }  # fmt: skip
            assert answer["usage"]["completion_tokens"] == 8
            assert whole.headers["x-request-id"] == answer["id"] == sites[0].engine.asked[0][0]
            assert answer["id"].startswith("cmpl-")
            assert "x-engine-status" not in whole.headers
            streamed = await client.post("/v1/completions", json=a_body(stream=True))
            events = events_of(streamed.text)
            assert "".join(one["choices"][0]["text"] for one in events) == "hellohel"
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert events[-1]["usage"]["completion_tokens"] == 8
            assert all("usage" not in one for one in events[:-1])

    run(test)


def test_a_conversation_says_who_speaks_and_a_stop_string_ends_it():
    async def test(port, gateway, sites):
        messages = [{"role": "user", "content": "one two"}]
        body = {"model": "m", "messages": messages, "max_tokens": 20, "stop": "tw", "seed": 3}
        async with a_client(port) as client:
            whole = (await client.post("/v1/chat/completions", json=body)).json()
            assert whole["choices"][0]["message"] == {"role": "assistant", "content": "one "}
            assert whole["choices"][0]["finish_reason"] == "stop"
            options = {"stream": True, "stream_options": {"include_usage": True}}
            streamed = await client.post("/v1/chat/completions", json=body | options)
            *pieces, last = events_of(streamed.text)
            deltas = [one["choices"][0]["delta"] for one in pieces]
            assert deltas[0] == {"role": "assistant", "content": "o"}
            assert "".join(one.get("content", "") for one in deltas) == "one "
            assert [one["usage"] for one in pieces] == [None] * len(pieces)
            assert last["usage"]["completion_tokens"] == 6
        sampling = sites[0].engine.asked[0][2]
        assert (sampling.seed, sampling.max_tokens) == (3, 20)
        assert not sites[0].engine.running

    run(test)


def test_an_engine_hears_by_what_key_a_request_waits():
    async def test(port, gateway, sites):
        engine = sites[0].engine
        async with a_client(port) as client:
            await client.post("/v1/completions", json=a_body())
            gateway.manager.switch("round_robin+sjf@20")
            await client.post("/v1/completions", json=a_body())
            gateway.manager.switch("round_robin+sjf@20:8")
            engine.stops_at = 0
            waited_for = asyncio.create_task(client.post("/v1/completions", json=a_body()))
            await until(lambda: len(engine.running) == 1)
            last = asyncio.create_task(client.post("/v1/completions", json=a_body()))
            await until(lambda: len(engine.running) == 2)
            engine.may_go_on.set()
            await waited_for
            await last
        none, plain, idle, full = engine.order_keys
        now_s = gateway.clock_s()
        assert none is None
        assert now_s - 60 < plain.key_s < now_s + 120
        assert plain == OrderKey(plain.key_s)
        assert idle == OrderKey(idle.key_s)  # There was nothing to wait for.
        assert full.key_s < full.late_key_s < full.key_s + 60
        assert now_s - 60 < full.late_at_s < now_s + 60

    run(test)


def test_nobody_asks_an_engine_without_its_secret_which_is_shown_nowhere(caplog):
    async def test(port, gateway, sites):
        for headers in ({}, {"authorization": "Bearer wrong"}):
            async with to_engine(sites[0], headers=headers) as stranger:
                answer = await stranger.post("/v1/completions", json=a_body())
                assert (answer.status_code, answer.json()["error"]["type"]) == (
                    401, "authentication_error",
                )  # fmt: skip
        assert not sites[0].engine.asked
        async with a_client(port) as client:
            await client.post("/v1/completions", json=a_body())
            for path in ("/v1/pools", "/v1/policy", "/metrics", "/v1/console"):
                assert SECRET not in (await client.get(path)).text
        assert SECRET not in caplog.text

    caplog.set_level(logging.DEBUG)
    run(test)


def test_what_the_gateway_did_not_write_is_refused_in_a_sentence():
    generation = Generation([5, 70_000], Sampling(3), "m", False, True, ("x",))
    good = write_generation(generation, "r", OrderKey(1.0, 2.0, 3.0))
    assert read_generation(good) == (generation, "r", "1.0 2.0 3.0")
    bad_key = join_json([asdict(generation), "r", "2 1 1"], b"\0" * 4)
    bad_sampling = join_json([asdict(generation) | {"sampling": {}}, "r", None], b"\0" * 4)
    contents = (b"", b"{}", b"\xff" * 9, good[:-1], good[:9], bad_key, bad_sampling)

    async def test(port, gateway, sites):
        async with to_engine(sites[0], headers=KEY) as client:
            for content in contents:
                answer = await client.post("/v1/completions", content=content)
                assert answer.status_code == 400
                assert answer.json()["error"]["message"]
            assert not sites[0].engine.asked

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_callers_that_leave_leave_no_generation_behind(stream):
    async def test(port, gateway, sites):
        sites[0].engine.every_s = 0.005
        body = json.dumps(a_body(stream=stream, max_tokens=100)).encode()

        async def leave(number):
            async with RawCaller.to(port) as caller:
                await caller.begin(TEXT, body)
                await asyncio.sleep(0.003 * (number % 25))

        for _ in range(4):
            await asyncio.gather(*(leave(number) for number in range(50)))
        engine = sites[0].engine
        assert len(engine.asked) > 100
        await until(lambda: not engine.running)
        await until(lambda: not gateway.in_flight)
        assert gateway.table.replicas["replica-0"].in_flight.count == 0
        assert sites[0].texts.status().num_waiting == 0

    run(test, **BIG, pools_config={"max_batch": 64})


@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_fails_says_why_and_is_not_ejected(num_tokens, stream):
    async def test(port, gateway, sites):
        sites[0].engine.fails_at = num_tokens
        sites[0].engine.every_s = 0.002
        reason = "a replica of pool 'ours': rank 1 of 2: its process has died"
        reason += f", after {num_tokens} tokens" if num_tokens else ""
        async with a_client(port) as client:
            answer = await client.post("/v1/completions", json=a_body(stream=stream))
            assert answer.status_code == (200 if stream and num_tokens else 503)
            last = answer.text.strip().split("\n\n")[-1].removeprefix("data: ")
            told = json.loads(last)["error"]["message"]
            if stream or not num_tokens:
                assert told == reason
            else:
                # Of a whole answer the gateway hears now and then how long it is.
                assert re.fullmatch(reason.replace("3", "[123]"), told)
            assert answer.text.count('"text"') == num_tokens * stream
        assert not gateway.outliers.records

    run(test)


def test_before_its_first_token_a_request_goes_elsewhere():
    async def test(port, gateway, sites):
        sites[0].engine.fails_at = 0
        async with a_client(port) as client:
            for stream in (True, False) * 2:
                answer = await client.post("/v1/completions", json=a_body(stream=stream))
                assert answer.status_code == 200
        assert len(sites[1].engine.asked) == 4

    run(test, 2)


def test_an_answer_without_a_length_is_as_long_as_the_engines_memory_allows(monkeypatch):
    monkeypatch.setattr(Repeater, "longest", 12)

    async def test(port, gateway, sites):
        async with a_client(port) as client:
            answer = await client.post("/v1/completions", json=a_body(max_tokens=None))
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 7
            longer = await client.post("/v1/completions", json=a_body(max_tokens=8))
            assert longer.status_code == 400
            assert "a prompt of 5 tokens and 8 to generate are more than the 12" in longer.text

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_what_no_engine_of_a_pool_can_hold_is_400_and_is_asked_of_one_of_them_alone(stream):
    async def test(port, gateway, sites):
        for one in sites:
            one.engine.longest = 12
        async with a_client(port) as client:
            answer = await client.post("/v1/completions", json=a_body(stream=stream))
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert "a prompt of 5 tokens and 8 to generate are more than the 12" in error["message"]
            assert sum(len(one.engine.asked) for one in sites) == 1
            fits = await client.post("/v1/completions", json=a_body(max_tokens=7))
            assert fits.status_code == 200
        assert not gateway.outliers.records

    run(test, 2)


def test_a_replica_that_is_gone_is_ejected_and_one_that_dies_ends_its_answers_with_a_reason():
    async def test(port, gateway, sites):
        sites[0].engine.stops_at = sites[1].engine.stops_at = 2
        async with a_client(port) as client:
            body = a_body(stream=True)
            asks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in "12"]
            await until(lambda: all(2 in one.engine.running.values() for one in sites))
            for one in list(sites[0].listener._config.open):
                one.transport.abort()
            sites[0].listener.refuse()
            sites[1].engine.may_go_on.set()
            texts = [(await one).text for one in asks]
            broken = "a replica of pool 'ours' closed its connection, after 2 tokens"
            assert sum(broken in one for one in texts) == 1
            assert sum(one.endswith("data: [DONE]\n\n") for one in texts) == 1
            await until(lambda: not sites[0].engine.running)
            again = [await client.post("/v1/completions", json=a_body()) for _ in range(3)]
            assert [one.status_code for one in again] == [200] * 3
        assert gateway.outliers.records

    run(test, 2, outlier_ejection={"consecutive_failures": 1})


def test_full_engines_are_429():
    async def test(port, gateway, sites):
        sites[0].engine.stops_at = 1
        async with a_client(port) as client:
            held = [
                asyncio.create_task(client.post("/v1/completions", json=a_body())) for _ in "12"
            ]
            await until(lambda: len(sites[0].engine.running) == 2)
            full = await client.post("/v1/completions", json=a_body())
            assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
            assert "2 requests are being answered already" in full.json()["error"]["message"]
            assert int(full.headers["retry-after"]) >= 1
            sites[0].engine.may_go_on.set()
            assert [(await one).status_code for one in held] == [200] * 2

    run(test, pools_config={"max_batch": 2, "max_waiting": 0})


def test_a_replica_that_drains_finishes_what_it_has_and_others_get_the_rest():
    async def test(port, gateway, sites):
        for one in sites:
            one.engine.stops_at = 1
        async with a_client(port) as client:
            body = a_body(stream=True)
            held = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in "12"]
            await until(lambda: all(one.engine.running for one in sites))
            draining = asyncio.create_task(sites[0].texts.drain())
            await asyncio.sleep(0)
            sites[1].engine.may_go_on.set()
            for _ in range(4):
                answer = await client.post("/v1/completions", json=a_body())
                assert answer.status_code == 200
            assert (len(sites[0].engine.asked), draining.done()) == (1, False)
            sites[0].engine.may_go_on.set()
            assert [len(events_of((await one).text)) for one in held] == [8, 8]
            await draining
        assert not gateway.outliers.records

    run(test, 2)


def test_the_books_know_how_far_an_answer_is_that_comes_whole(tmp_path):
    log = DecisionLog(tmp_path)

    async def test(port, gateway, sites):
        sites[0].engine.stops_at = 1
        async with a_client(port) as client:
            ask = asyncio.create_task(client.post("/v1/completions", json=a_body()))
            await until(lambda: "replica-0" in gateway.table.replicas)
            state = gateway.table.replicas["replica-0"]
            await until(lambda: state.in_flight.count and not state.in_flight.prefill_tokens)
            assert state.status.num_running == 1
            await asyncio.sleep(0.05)
            sites[0].engine.may_go_on.set()
            answer = await ask
            assert answer.headers["content-length"] == str(len(answer.content))
            assert answer.content.startswith(b"{")
            one = await client.post("/v1/completions", json=a_body(max_tokens=1))
            assert one.json()["usage"]["completion_tokens"] == 1

    run(test, log=log)
    log.close()
    (file,) = tmp_path.glob("*.parquet")
    first, second = pq.read_table(file).to_pylist()
    assert (first["outcome"], first["output_tokens"], first["context_tokens"]) == ("length", 8, 5)
    assert first["response_s"] > first["ttft_s"] + 0.04
    assert second["response_s"] >= second["ttft_s"] > 0


def test_rays_own_router_sees_how_long_queues_are():
    async def test(port, gateway, sites):
        gateway.manager.switch("ray_default")
        async with a_client(port) as client:
            asks = [client.post("/v1/completions", json=a_body()) for _ in range(4)]
            assert {one.status_code for one in await asyncio.gather(*asks)} == {200}
            queue = [await one.get_queue_len(deadline_s=1) for one in
                     gateway.backends["ours"].ray_replicas()]  # fmt: skip
            assert queue == [0, 0]

    run(test, 2)
