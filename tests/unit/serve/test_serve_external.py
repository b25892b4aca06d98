"""The gateway before endpoints over real HTTP that hang, fail, and say odd things."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from unit.raw_endpoint import raw_endpoints
from unit.stub_endpoint import DONE, HANG, WHOLE, Stub, an_event, stubs

from serve_app.cluster import Cluster
from serve_app.endpoints import Endpoint
from serve_app.engines.tokenizer import EstimatingTokenizer
from serve_app.gateway import scraping
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.exchange import Call, InferenceRequest
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.replicas import Prompt
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.http.free_port import free_port
from serve_app.policy.manager import PolicyManager

PROFILE = {
    "iteration_s": 0.01, "prefill_token_s": 1e-5, "sequence_s": 0.0005, "max_batch": 8,
    "token_budget": 256, "kv_capacity_tokens": 20_000,
}  # fmt: skip
AT_ONCE = {"base_s": 60.0, "consecutive_failures": 1}
BODY = {"model": "m", "prompt": "hello", "max_tokens": 8, "stream": True}


def a_cluster(
    endpoints, deadlines, max_ongoing=1024, order="fcfs", commit="first_token", pool=None, **fields
):
    pool = (pool or {}) | {
        "name": "theirs", "kind": "external", "model": "m", "profile": PROFILE,
        "endpoints": [{"url": one.url} for one in endpoints], "deadlines": deadlines,
        "max_ongoing": max_ongoing, "order": order, "commit": commit,
    }  # fmt: skip
    known = {"name": "t", "description": "t", "served_model": "m", "explore_fraction": 0.0}
    return Cluster.model_validate(known | {"pools": [pool]} | fields)


@asynccontextmanager
async def gateway_before(cluster, log=None, policy="champion", scrapes=False):
    """Yield a client and a gateway; endpoints are scraped only where that is asked for."""
    manager = PolicyManager(
        cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
    )
    manager.switch(policy)
    metrics = Metrics()
    backend = ExternalBackend(cluster.external_pools[0], "m", metrics)
    gateway = Gateway(cluster, manager, {backend.name: backend}, metrics, log=log)
    api = create_gateway_api(gateway, EstimatingTokenizer(), Access(None, local_admin=True))
    transport = httpx.ASGITransport(api, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        if scrapes:
            backend.start()
        try:
            yield client, gateway
        finally:
            manager.stop()
            await backend.stop()


@asynccontextmanager
async def a_gateway(number, log=None, policy="champion", scrapes=False, **fields):
    """Yield a client, the gateway and its stubs."""
    async with stubs(number) as endpoints:
        cluster = a_cluster(endpoints, fields.pop("deadlines", {}), **fields)
        async with gateway_before(cluster, log, policy, scrapes) as (client, gateway):
            yield client, gateway, endpoints


def run(test, number=1, **options):
    async def inside():
        async with a_gateway(number, **options) as (client, gateway, endpoints):
            await test(client, gateway, endpoints)

    asyncio.run(inside())


def text_of(answer):
    """The text of a stream, which must have come to its end."""
    assert answer.status_code == 200, answer.text
    *events, done = answer.text.replace("\r\n", "\n").removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    found = [json.loads(one.removeprefix("data: ")) for one in events]
    return "".join(one["choices"][0]["text"] for one in found)


def pools_metric(gateway, name):
    return gateway.metrics.registry.get_sample_value(f"tokenyard_{name}", {"pool": "theirs"})


@pytest.mark.parametrize("sends_head", [True, False])
def test_requests_of_an_endpoint_that_hangs_go_elsewhere_and_it_is_ejected(sends_head):
    async def test(client, gateway, endpoints):
        hung = endpoints[3]
        hung.script, hung.sends_head = (HANG,), sends_head
        asks = [client.post("/v1/completions", json=BODY) for _ in range(8)]
        assert [text_of(one) for one in await asyncio.gather(*asks)] == ["ok"] * 8
        assert 0 < hung.num_asked < 8
        asked, ejections = hung.num_asked, pools_metric(gateway, "ejections_total")
        for _ in range(8):
            text_of(await client.post("/v1/completions", json=BODY))
        assert (hung.num_asked, ejections) == (asked, 1.0)
        shown = (await client.get("/v1/pools")).json()["replicas"]
        assert [one["ejected_s"] > 0 for one in shown] == [False, False, False, True]

    run(test, 4, deadlines={"first_token_s": 2.0}, outlier_ejection=AT_ONCE)


def test_an_endpoint_that_takes_no_connection_costs_no_answer():
    async def test(client, gateway, endpoints):
        gone, there = endpoints
        loop = asyncio.get_running_loop()
        connect, tried = loop.create_connection, []

        async def no_syn(make, host, port, **options):
            if gone.url.endswith(f":{port}"):
                tried.append(port)
                await asyncio.Event().wait()
            return await connect(make, host, port, **options)

        loop.create_connection = no_syn
        answers = [await client.post("/v1/completions", json=BODY) for _ in range(4)]
        assert [text_of(one) for one in answers] == ["ok"] * 4
        assert (there.num_asked, len(tried), pools_metric(gateway, "ejections_total")) == (4, 1, 1)

    run(test, 2, deadlines={"connect_s": 1.0}, outlier_ejection=AT_ONCE)


@pytest.mark.parametrize(
    ("deadlines", "script", "reason"),
    [
        ({"between_tokens_s": 0.1}, (an_event("a"), HANG), "sent no other token in 0.1 s, after 1"),
        ({"total_s": 1.0}, (an_event("a"), HANG), "was not done in 1 s, after 1"),
        ({"first_token_s": 0.1}, (HANG,), "sent no token in 0.1 s"),
        ({"first_byte_s": 0.1}, (HANG,), "did not begin to answer in 0.1 s"),
    ],
)
def test_every_deadline_ends_an_answer_with_its_reason(deadlines, script, reason):
    async def test(client, gateway, endpoints):
        endpoints[0].script = script
        endpoints[0].sends_head = "first_byte_s" not in deadlines
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == (200 if "after 1" in reason else 503)
        last = answer.text.removesuffix("\n\n").split("\n\n")[-1].removeprefix("data: ")
        assert reason in json.loads(last)["error"]["message"]
        assert endpoints[0].url not in answer.text

    run(test, deadlines=deadlines)


def test_an_answer_that_comes_at_once_has_time_for_each_token_that_it_may_have():
    async def test(client, gateway, endpoints):
        hung = endpoints[0]
        hung.script, hung.sends_head = (HANG,), False
        whole = {**BODY, "stream": False}
        answers = [await client.post("/v1/completions", json=whole) for _ in range(4)]
        assert {one.content for one in answers} == {WHOLE}
        assert (hung.num_asked, pools_metric(gateway, "ejections_total")) == (1, 1.0)

    deadlines = {"first_token_s": 0.1, "whole_per_token_s": 0.01}
    run(test, 2, deadlines=deadlines, outlier_ejection=AT_ONCE)


def test_an_answer_of_any_length_that_comes_at_once_has_the_time_of_a_whole_answer():
    async def test(client, gateway, endpoints):
        endpoints[0].delay_s = 0.3
        body = {key: value for key, value in BODY.items() if key != "max_tokens"}
        answer = await client.post("/v1/completions", json={**body, "stream": False})
        assert answer.content == WHOLE
        endpoints[0].delay_s = 1.0
        answer = await client.post("/v1/completions", json={**body, "stream": False})
        assert answer.status_code == 503
        answer = await client.post("/v1/embeddings", json={"model": BODY["model"], "input": "x"})
        assert "sent no answer in 0.1 s" in answer.text

    limits = {"max_retries": 0}
    run(test, deadlines={"first_token_s": 0.1, "total_s": 0.6}, limits=limits)


def test_a_timeout_in_a_stream_is_an_event_of_it_and_logged_as_what_it_was(tmp_path):
    log = DecisionLog(tmp_path)

    async def test(client, gateway, endpoints):
        endpoints[0].script = (an_event("a"), HANG)
        answer = await client.post("/v1/completions", json=BODY)
        first, last = answer.text.strip().split("\n\n")
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "a"
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["message"] == "no answer within 0.2 s"
        assert gateway.in_flight == 0

    run(test, log=log, limits={"timeout_s": 0.2})
    log.close()
    (file,) = tmp_path.glob("*.parquet")
    assert pq.read_table(file)["outcome"].to_pylist() == ["timeout"]


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
def test_what_only_unicode_calls_an_end_of_line_stays_in_the_answer(odd):
    async def test(client, gateway, endpoints):
        whole = b"".join((an_event(f"a{odd}b"), an_event("", "stop"), DONE))
        # Cut everywhere, also inside a character, and with the other end of lines.
        endpoints[0].script = [bytes([one]) for one in whole.replace(b"\n", b"\r\n")]
        assert text_of(await client.post("/v1/completions", json=BODY)) == f"a{odd}b"

    run(test)


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_what_an_endpoint_has_against_a_request_arrives_as_it_is(status, tmp_path):
    log = DecisionLog(tmp_path)

    async def test(client, gateway, endpoints):
        for one in endpoints:
            one.status, one.script = status, (b'{"object":"error","message":"too long"}',)
            one.headers = {"content-type": "application/json; odd"}
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.content) == (status, endpoints[0].script[0])
        assert answer.headers["content-type"] == "application/json; odd"
        assert sum(one.num_asked for one in endpoints) == 1
        assert pools_metric(gateway, "ejections_total") is None
        # Nobody's SLO is violated by what is no request.
        assert sum(one["finished"] for one in gateway.history.look(0.0)) == 0

    run(test, 3, log=log)
    log.close()
    (file,) = tmp_path.glob("*.parquet")
    assert pq.read_table(file)["outcome"].to_pylist() == ["rejected"]


@pytest.mark.parametrize("status", [401, 403, 409, 500, 502])
def test_what_is_the_endpoints_own_failure_is_asked_elsewhere_and_says_no_address(status):
    async def test(client, gateway, endpoints):
        for one in endpoints:
            one.status, one.script = status, (b"secret",)
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert message == f"an endpoint of pool 'theirs' answered {status}"
        assert sum(one.num_asked for one in endpoints) == 2

    run(test, 2)


@pytest.mark.parametrize(
    "event",
    [
        'data: {"error":{"message":"secret"}}', 'event: error\ndata: secret',
        'data: {"object":"error","message":"secret","code":500}', 'error: {"message":"secret"}',
        'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}',
    ],
)  # fmt: skip
def test_an_event_of_an_error_before_the_first_token_is_asked_elsewhere(event):
    async def test(client, gateway, endpoints):
        endpoints[1].script = (b": secret\n\n", f"{event}\n\n".encode())
        answers = [await client.post("/v1/completions", json=BODY) for _ in range(3)]
        assert [text_of(one) for one in answers] == ["ok"] * 3
        assert endpoints[1].num_asked == 1

    run(test, 2, outlier_ejection=AT_ONCE)


def test_an_endpoint_that_answers_its_scraper_is_waited_for_and_asked_once():
    async def test(client, gateway, endpoints):
        for one in endpoints:
            one.delay_s = 1.5
        await until(lambda: all(one.num_scraped for one in endpoints))
        for stream in (True, False):
            answer = await client.post("/v1/completions", json={**BODY, "stream": stream})
            assert answer.status_code == 200
        assert sum(one.num_asked for one in endpoints) == 2
        assert pools_metric(gateway, "ejections_total") is None

    run(test, 2, scrapes=True, deadlines={"first_token_s": 0.2, "whole_per_token_s": 0.0})


def test_equally_idle_endpoints_take_turns():
    async def test(client, gateway, endpoints):
        for one in endpoints:
            # Those that seem twice as fast as others would not be equal.
            one.delay_s = 0.2
        for _ in range(12):
            text_of(await client.post("/v1/completions", json=BODY))
        assert [one.num_asked for one in endpoints] == [3, 3, 3, 3]

    # On a busy machine a decision may take longer than the budget, and the baseline then decides.
    run(test, 4, circuit_breaker={"budget_s": 1.0})


def test_no_endpoint_gets_more_requests_than_it_may_have():
    async def test(client, gateway, endpoints):
        fast, slow = endpoints
        usual = fast.script
        fast.script = slow.script = (an_event("a"), HANG)
        held = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(4)]
        await until(lambda: fast.num_asked + slow.num_asked == 4)
        assert (fast.num_asked, slow.num_asked) == (2, 2)
        full = await client.post("/v1/completions", json=BODY)
        assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(full.headers["retry-after"]) >= 1
        assert fast.num_asked + slow.num_asked == 4
        for one in held:
            one.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await until(lambda: not gateway.in_flight)
        fast.script = slow.script = usual
        assert text_of(await client.post("/v1/completions", json=BODY)) == "ok"

    run(test, 2, max_ongoing=2)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("odd", ["+Inf", "NaN", "many", "-1"])
def test_a_value_that_cannot_be_read_costs_only_itself(odd):
    async def test(client, gateway, endpoints):
        bad, _ = endpoints
        bad.waiting = odd
        await until(lambda: info(gateway, bad).missing == ("waiting",))
        assert info(gateway, bad).engine == "vllm"
        assert gateway.table.replicas[bad.url].status.kv_used_fraction == 0.25
        bad.waiting = "5.0"
        await until(lambda: waiting(gateway, bad) == 5)
        assert not info(gateway, bad).missing

    run(test, 2, scrapes=True)


def info(gateway, endpoint):
    gateway.refresh()
    return gateway.table.replicas[endpoint.url].info


def test_an_endpoint_that_is_not_there_ends_nobodys_scraping_and_is_said_once(caplog):
    async def test(client, gateway, endpoints):
        gone, _ = endpoints
        gone.drips = True
        with caplog.at_level(logging.WARNING):
            await until(lambda: (pools_metric(gateway, "scrape_failures_total") or 0) > 2)
        assert sum("cannot be scraped" in one for one in caplog.messages) == 1
        gone.drips, gone.waiting = False, "5.0"
        await until(lambda: waiting(gateway, gone) == 5)

    with pytest.MonkeyPatch.context() as short:
        short.setattr(scraping, "TIMEOUT_S", 0.05)
        run(test, 2, scrapes=True)


def test_an_endpoint_that_was_down_has_nothing_cached_any_more():
    async def test():
        endpoint, port, writers = Stub(), free_port(), []
        endpoint.url = f"http://127.0.0.1:{port}"

        async def serve(reader, writer):
            writers.append(writer)
            await endpoint.serve(reader, writer)

        server = await asyncio.start_server(serve, "127.0.0.1", port)
        cluster = a_cluster([endpoint], {}, pool={"prefix_block_tokens": 4})
        prompt = list(range(40))
        body = BODY | {"prompt": prompt}
        async with gateway_before(cluster, scrapes=True) as (client, gateway):

            def cached():
                gateway.refresh()
                return gateway.table.replicas[endpoint.url].match_tokens(Prompt(prompt))

            await until(lambda: endpoint.num_scraped)
            assert text_of(await client.post("/v1/completions", json=body)) == "ok"
            assert cached() == 36
            failures = pools_metric(gateway, "scrape_failures_total") or 0
            server.close()
            for writer in writers:
                writer.transport.abort()
            await until(lambda: pools_metric(gateway, "scrape_failures_total") > failures + 1)
            scraped = endpoint.num_scraped
            server = await asyncio.start_server(serve, "127.0.0.1", port)
            await until(lambda: endpoint.num_scraped > scraped)
            await until(lambda: cached() == 0)
            assert text_of(await client.post("/v1/completions", json=body)) == "ok"
            assert cached() == 36
        server.close()

    asyncio.run(asyncio.wait_for(test(), 30))


def waiting(gateway, endpoint):
    gateway.refresh()
    return gateway.table.replicas[endpoint.url].status.num_waiting


def test_an_endpoint_that_drips_its_page_holds_up_nobody_else(monkeypatch):
    monkeypatch.setattr(scraping, "EVERY_S", 0.01)

    async def test(client, gateway, endpoints):
        slow, well = endpoints
        slow.drips = True
        await until(lambda: slow.num_scraped and well.num_scraped >= 20)
        monkeypatch.setattr(scraping, "TIMEOUT_S", 0.05)
        slow.drips, slow.waiting = False, "7.0"
        await until(lambda: waiting(gateway, slow) == 7)

    run(test, 2, scrapes=True)


def test_an_address_with_a_password_is_refused():
    with pytest.raises(ValueError, match="api_key_env"):
        Endpoint.model_validate({"url": "http://me:secret@10.0.0.1:8000"})


@pytest.mark.parametrize("secret", ["a-secret", "a-secret\n", " a-secret\r\n"])
def test_a_token_ends_no_head_and_none_is_sent_in_two_lines(secret, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", secret)

    async def test():
        async with raw_endpoints() as (endpoint,), asyncio.timeout(30):
            (pool,) = a_cluster([endpoint], {}).external_pools
            pool = pool.model_copy(update={"api_key_env": "THEIR_KEY"})
            backend = ExternalBackend(pool, "m", Metrics())
            call = Call(b"/v1/completions", b"x-request-id: 1\r\n", b"{}", stream=False)
            downstream = SimpleNamespace(begun=False, begin=nothing, write=nothing)
            attempt = SimpleNamespace(
                request=InferenceRequest("1", [1], 1, call), downstream=downstream,
                order_key=None, take=lambda *_, **__: None, note_send=lambda: None,
            )  # fmt: skip
            try:
                await backend.answer(endpoint.url, attempt)
            finally:
                await backend.stop()
            ((_, headers, body),) = endpoint.asked
            assert headers[b"authorization"] == b"Bearer a-secret"
            assert (headers[b"x-request-id"], body) == (b"1", b"{}")

    async def nothing(*_):
        """Nobody asked."""

    asyncio.run(test())


@pytest.mark.parametrize("secret", ["a secret", "a\nb", "gehe\u00efm", "a\x7f"])
def test_what_is_no_token_is_refused_without_being_shown(secret, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", secret)
    (pool,) = a_cluster([SimpleNamespace(url="http://127.0.0.1:9")], {}).external_pools
    pool = pool.model_copy(update={"api_key_env": "THEIR_KEY"})
    with pytest.raises(ValueError, match=r"^pool 'theirs': THEIR_KEY holds no token$"):
        ExternalBackend(pool, "m", Metrics())
