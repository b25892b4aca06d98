"""What callers of an external pool write arrives as it is, and so do the answers."""

import asyncio
import base64
import json
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
from unit.raw_endpoint import RawCaller, raw_endpoints
from unit.serve.test_serve_external import a_cluster
from unit.serve.test_serve_gateway import OWN, FakePool, Letters

from serve_app.cluster import Pool
from serve_app.engines.tokenizer import EstimatingTokenizer
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.upstream import Origin, UpstreamClient
from serve_app.http.answering import AsgiDownstream
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.http.free_port import free_port
from serve_app.http.listener import Listener
from serve_app.policy.manager import PolicyManager

CHAT, TEXT = b"/v1/chat/completions", b"/v1/completions"
MESSAGES = [{"role": "user", "content": "What is the weather in Ulm?"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"model": "m"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
PAST = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "sun"},
]


def chats():
    for fields in (
        {}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "auto"}, {"tool_choice": "none"},
        {"parallel_tool_calls": False}, {"response_format": SCHEMA}, {"n": 3}, {"top_logprobs": 5},
        {"response_format": {"type": "json_object"}}, {"logprobs": True}, {"logit_bias": {"5": 1}},
        {"presence_penalty": 1.5}, {"frequency_penalty": -1}, {"reasoning_effort": "low"},
        {"max_completion_tokens": 7}, {"max_tokens": 1 << 40}, {"temperature": 0.30000000000000004},
        {"stop": ["a"] * 20}, {"seed": -5}, {"user": "u"}, {"metadata": {"model": "m"}},
        {"store": True}, {"chat_template_kwargs": {"enable_thinking": False}}, {"top_k": 5},
        {"min_p": 0.1}, {"guided_json": {"a": 1}}, {"structured_outputs": {}}, {"priority": 3},
        {"unknown": {"deep": [[[1]]]}}, {"stream_options": {"include_usage": True}},
        {"service_tier": "default"}, {"modalities": ["text"]}, {"prediction": None},
        {"web_search_options": {}}, {"verbosity": "high"}, {"add_generation_prompt": False},
    ):  # fmt: skip
        yield CHAT, {"model": "m", "messages": MESSAGES, **fields}
    for said in (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}],
        [{"role": "user", "content": [AUDIO]}], [*MESSAGES, *PAST], [], "no list", [1], None,
        [{"role": "developer", "content": "a", "name": "b"}],
    ):  # fmt: skip
        yield CHAT, {"model": "m", "messages": said}


def others():
    for prompt in ("a", "\u2028 \x85 ü 漢字", ["a", "b"], [1, 2, 3], [[1], [2, 3]], "", None):
        yield TEXT, {"model": "m", "prompt": prompt}
    yield TEXT, {"prompt": "no model"}
    yield TEXT, {"model": 5, "prompt": "an odd model"}
    yield TEXT, {"model": "m", "prompt": "a", "echo": True, "suffix": "b", "best_of": 2}
    yield b"/v1/responses", {"model": "m", "input": "a", "instructions": "b"}
    yield b"/v1/responses", {"model": "m", "input": MESSAGES, "max_output_tokens": 5}
    for texts in ("a", ["a", "b"], [1, 2], [[1], [2]]):
        yield b"/v1/embeddings", {"model": "m", "input": texts, "encoding_format": "base64"}
    yield b"/v1/score", {"model": "m", "text_1": "a", "text_2": ["b", "c"]}
    yield b"/score", {"model": "m", "queries": "a", "items": ["b"]}
    yield b"/v1/rerank", {"model": "m", "query": "a", "documents": ["b", "c"], "top_n": 1}
    yield b"/rerank", {"model": "m", "query": "a", "documents": [{"text": "b"}]}
    yield b"/tokenize", {"model": "m", "prompt": "a", "return_token_strs": True}
    yield b"/detokenize", {"model": "m", "tokens": [1, 2]}


SHAPES = [*chats(), *others()]
WHOLE = b'{ "id":"x", "choices" : [{"message":{"content":"\xe2\x80\xa8"}}],"usage":null }\n'
EVENTS = b"content-type: text/event-stream\r\n"
BODY = json.dumps({"model": "m", "messages": MESSAGES}).encode()
STREAM = json.dumps({"model": "m", "messages": MESSAGES, "stream": True}).encode()


@asynccontextmanager
async def a_site(number=1, model="m", own=None, tokens=(None,), **fields):
    """Yield a gateway's port, the gateway and its endpoints, all on real sockets.

    With `own` there is a pool of ours beside them, which answers "ok". `tokens` are of callers and
    of admins.
    """
    async with raw_endpoints(number) as endpoints:
        cluster = a_cluster(endpoints, fields.pop("deadlines", {}), **fields)
        pool = cluster.external_pools[0].model_copy(update={"model": model})
        pools = (pool,) if own is None else (pool, Pool(name=own.name, config=OWN))
        cluster = cluster.model_copy(update={"pools": pools})
        manager = PolicyManager(
            cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
        )
        manager.switch("champion")
        metrics = Metrics()
        backend = ExternalBackend(pool, cluster.served_model, metrics)
        backends = {one.name: one for one in (backend, own) if one is not None}
        gateway = Gateway(cluster, manager, backends, metrics)
        tokenizer = EstimatingTokenizer() if own is None else Letters()
        api = create_gateway_api(gateway, tokenizer, Access(*tokens))
        listener, port = Listener(api, cluster.limits, cluster.gateway.tls), free_port()
        await listener.start("127.0.0.1", port)
        try:
            yield port, gateway, endpoints
        finally:
            await listener.stop()
            manager.stop()
            await backend.stop()


def run(test, *args, **options):
    async def inside():
        async with asyncio.timeout(60), a_site(*args, **options) as site:
            await test(*site)

    asyncio.run(inside())


def test_every_shape_arrives_byte_by_byte_and_so_does_its_answer():
    async def test(port, gateway, endpoints):
        (endpoint,) = endpoints
        endpoint.pieces = (WHOLE,)
        async with RawCaller.to(port) as caller:
            for number, (path, fields) in enumerate(SHAPES):
                # Blanks, order and escapes are the caller's.
                indent, is_ascii = (None, 1)[number % 2], bool(number % 3)
                body = json.dumps(fields, indent=indent, ensure_ascii=is_ascii).encode()
                status, headers, answer = await caller.ask(path, body)
                first, _, arrived = endpoint.asked[-1]
                assert (status, answer, arrived) == (200, WHOLE, body)
                assert first == b"POST " + path + b" HTTP/1.1"
                assert headers[b"content-type"] == b"application/json"
        assert len(endpoint.asked) == len(SHAPES) >= 60
        assert endpoint.num_connections == 1
        assert gateway.in_flight == 0

    run(test)


def test_a_body_of_8_mib_goes_through_and_one_that_is_too_large_does_not():
    async def test(port, gateway, endpoints):
        image = base64.b64encode(bytes(range(256)) * (6 << 12)).decode()
        parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}]
        messages = [{"role": "user", "content": parts}]
        body = json.dumps({"model": "m", "messages": messages}).encode()
        endpoints[0].pieces = (body[: 4 << 20], body[4 << 20 :])
        assert len(body) > 8 << 20
        async with RawCaller.to(port) as caller:
            status, _, answer = await caller.ask(CHAT, body)
            assert (status, answer == body, endpoints[0].asked[-1][2] == body) == (200, True, True)
        async with RawCaller.to(port) as caller:
            assert (await caller.begin(CHAT, b" " * (9 << 20)))[0] == 413

    run(test, limits={"max_body_bytes": 9_000_000})


def an_event(**fields):
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n".encode()


def a_delta(**delta):
    return an_event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])


STREAMS = {
    "text": [a_delta(role="assistant", content=""), a_delta(content="a"), a_delta(content="b")],
    "reasoning": [a_delta(role="assistant"), *[a_delta(reasoning_content="hm")] * 3],
    "tools": [a_delta(role="assistant"), a_delta(tool_calls=[{"index": 0, **CALL}])],
    "odd": [a_delta(content="a\u2028b\u2029c\x85d\x0be"), a_delta(content="\u2028")],
    "choices": [an_event(choices=[{"index": i, "delta": {"content": "x"}} for i in range(3)])],
    "comments": [b": ping\n\n", a_delta(content="a"), b": ping\n\n", a_delta(content="b")],
    "usage": [an_event(choices=[{"delta": {"content": "x"}}], usage={"completion_tokens": 5})],
}
END = [an_event(choices=[{"delta": {}, "finish_reason": "stop"}]), b"data: [DONE]\n\n"]


@pytest.mark.parametrize("framing", ["chunked", "close"])
@pytest.mark.parametrize("cut", [None, 1, 7])
@pytest.mark.parametrize("name", STREAMS)
def test_streams_come_back_byte_by_byte_however_they_are_cut(name, cut, framing):
    async def test(port, gateway, endpoints):
        (endpoint,) = endpoints
        for newline in (b"\n", b"\r\n"):
            whole = b"".join([*STREAMS[name], *END]).replace(b"\n", newline)
            step = cut or len(whole)
            endpoint.pieces = [whole[at : at + step] for at in range(0, len(whole), step)]
            endpoint.headers = b"content-type: text/event-stream; charset=utf-8\r\n"
            endpoint.framing = framing
            async with RawCaller.to(port) as caller:
                status, headers, answer = await caller.ask(CHAT, STREAM)
            assert (status, answer) == (200, whole)
            assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"

    run(test)


def test_responses_events_are_understood_as_far_as_needed():
    events = [
        an_event(type="response.created", response={"error": None}),
        an_event(type="response.output_text.delta", delta="a"),
        an_event(type="response.output_text.delta", delta="b"),
        an_event(type="response.completed", response={"usage": {"output_tokens": 2}}),
    ]

    async def test(port, gateway, endpoints):
        endpoints[0].pieces = [b"event: x\n" + one for one in events]
        endpoints[0].headers, endpoints[0].framing = EVENTS, "close"
        async with RawCaller.to(port) as caller:
            body = b'{"model":"m","input":"a","stream":true}'
            status, _, answer = await caller.ask(b"/v1/responses", body)
        assert (status, answer) == (200, b"".join(endpoints[0].pieces))
        value = gateway.metrics.registry.get_sample_value
        assert value("tokenyard_output_tokens_total", {"pool": "theirs"}) == 2

    run(test)


def test_a_pool_that_calls_the_model_otherwise_gets_its_name_and_else_the_same_bytes():
    body = '{ "messages" :[{"model":"m"}], "model" : "m","ü":"\u2028","x":{"model":"m"} }'

    async def test(port, gateway, endpoints):
        async with RawCaller.to(port) as caller:
            assert (await caller.ask(CHAT, body.encode()))[0] == 200
        expected = body.replace('"model" : "m"', '"model" : "their/name"')
        assert endpoints[0].asked[0][2].decode() == expected

    run(test, model="their/name")


def test_headers_pass_by_a_list():
    async def test(port, gateway, endpoints):
        (endpoint,) = endpoints
        endpoint.headers = (
            b"content-type: application/json\r\nx-request-id: theirs\r\nset-cookie: a=b\r\n"
            b"openai-processing-ms: 5\r\nx-ratelimit-remaining: 7\r\nserver: vllm\r\n"
        )
        sent = (
            b"content-type: application/json\r\nauthorization: Bearer callers\r\ncookie: a=b\r\n"
            b"traceparent: 00-1\r\nx-request-id: mine\r\nopenai-organization: o\r\n"
            b"x-forwarded-for: 8.8.8.8\r\nx-secret: 1\r\n"
        )
        async with RawCaller.to(port) as caller:
            _, back, _ = await caller.ask(CHAT + b"?a=b", b'{"model":"m"}', sent)
        first, arrived, _ = endpoint.asked[0]
        assert first == b"POST /v1/chat/completions?a=b HTTP/1.1"
        assert set(arrived) == {
            b"host", b"content-type", b"content-length", b"traceparent", b"x-request-id",
            b"openai-organization",
        }  # fmt: skip
        assert (arrived[b"x-request-id"], back[b"x-request-id"]) == (b"mine", b"theirs")
        assert back[b"openai-processing-ms"] == b"5"
        assert not {b"set-cookie", b"server"} & set(back)

    run(test)


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (CHAT, b'{"model":"other"}', 404, b"model 'other' is not served here"),
        (CHAT, b'{"model":"m","service_tier":"gold"}', 400, b"service_tier 'gold' is not known"),
        (CHAT, b'{"model":', 400, b"not JSON"),
        (CHAT, b"[" * 100_000, 400, b"not JSON"),
        (CHAT, b'{"a":' + b"9" * 10_000 + b"}", 400, b"not JSON"),
        (CHAT, b"\xff", 400, b"not UTF-8"),
        (CHAT, b"[1]", 400, b"JSON object"),
        (
            b"/v1/unknown",
            b"{}",
            404,
            b'{"error":{"message":"Invalid URL (POST /v1/unknown)","type"',
        ),
        (b"/unknown", b"{}", 404, b'{"detail":"Not Found"}'),
    ],
)
def test_only_what_the_gateway_must_refuse_is_refused(path, body, status, says):
    async def test(port, gateway, endpoints):
        async with RawCaller.to(port) as caller:
            got, _, answer = await caller.ask(path, body)
        assert (got, says in answer, endpoints[0].asked) == (status, True, [])

    run(test)


def test_a_caller_that_leaves_closes_the_endpoints_connection_at_once():
    async def test(port, gateway, endpoints):
        (endpoint,) = endpoints
        endpoint.pieces, endpoint.hangs = [a_delta(content="a")], True
        endpoint.headers, endpoint.framing = EVENTS, "chunked"
        for _ in range(20):
            async with RawCaller.to(port) as caller:
                status, _ = await caller.begin(CHAT, STREAM)
                assert status == 200
        while endpoint.num_gone < 20 or gateway.in_flight:
            await asyncio.sleep(0.01)
        assert all(not one.in_flight.count for one in gateway.table.replicas.values())

    run(test)


def paced(endpoint, *pieces):
    """Have an endpoint send tokens one by one."""
    endpoint.pieces, endpoint.gap_s = [*[a_delta(content="a")] * 20, *pieces], 0.005
    endpoint.headers, endpoint.framing = EVENTS, "chunked"


def test_tokens_are_handed_on_as_they_come_without_a_wait(monkeypatch):
    waits, wait = [], AsgiDownstream.write

    async def counted(self, data):
        waits.append(data)
        await wait(self, data)

    monkeypatch.setattr(AsgiDownstream, "write", counted)

    async def test(port, gateway, endpoints):
        odd = a_delta(content="\u2028\x85")
        paced(endpoints[0], odd[:20], odd[20:], *END)
        async with RawCaller.to(port) as caller:
            status, _, answer = await caller.ask(CHAT, STREAM)
        assert (status, answer) == (200, b"".join(endpoints[0].pieces))
        # The first token, what came in parts, and the end: not the tokens between.
        assert len(waits) <= 6
        value = gateway.metrics.registry.get_sample_value
        assert value("tokenyard_output_tokens_total", {"pool": "theirs"}) == 21

    run(test)


@pytest.mark.parametrize(
    ("hangs", "says"), [(True, b"sent no other token in 0.3 s"), (False, b"closed its connection")]
)
def test_a_stream_whose_endpoint_falls_silent_or_dies_between_tokens_says_so(hangs, says):
    async def test(port, gateway, endpoints):
        (endpoint,) = endpoints
        paced(endpoint)
        endpoint.hangs, endpoint.breaks = hangs, not hangs
        async with RawCaller.to(port) as caller:
            status, _, answer = await caller.ask(CHAT, STREAM)
        assert status == 200
        assert answer.startswith(b"".join(endpoint.pieces) + b'data: {"error":')
        assert says in answer
        assert gateway.in_flight == 0

    run(test, deadlines={"between_tokens_s": 0.3})


def test_a_caller_that_leaves_between_tokens_closes_the_endpoints_connection():
    async def test(port, gateway, endpoints):
        (endpoint,) = endpoints
        paced(endpoint)
        endpoint.hangs = True
        async with RawCaller.to(port) as caller:
            await caller.begin(CHAT, STREAM)
            await asyncio.sleep(0.05)
        while not endpoint.num_gone or gateway.in_flight:
            await asyncio.sleep(0.01)

    run(test)


def test_a_slow_reader_holds_its_endpoint_up_and_not_the_gateways_memory():
    async def test(port, gateway, endpoints):
        (endpoint,) = endpoints
        big = a_delta(content="x" * 500_000)
        endpoint.pieces = [big] * 40
        endpoint.headers, endpoint.framing = EVENTS, "chunked"
        async with RawCaller.to(port) as caller:
            await caller.begin(CHAT, STREAM)
            await asyncio.sleep(0.5)
            (connection,) = gateway.backends["theirs"]._forwarder.client._made
            assert connection._num_unread < 4 << 20
            assert connection._paused
            caller.writer.transport.abort()
        while gateway.in_flight:
            await asyncio.sleep(0.01)

    run(test, deadlines={"between_tokens_s": 0.2})


def test_an_idle_connection_that_the_endpoint_has_closed_costs_no_request():
    async def test(port, gateway, endpoints):
        (endpoint,) = endpoints
        endpoint.framing = "length"
        async with RawCaller.to(port) as caller:
            for _ in range(3):
                assert (await caller.ask(CHAT, b'{"model":"m"}'))[0] == 200
                origin = gateway.backends["theirs"]._endpoints[endpoint.url].origin
                for connection in origin.idle:
                    # As if its end were not known yet when the next request is written.
                    connection._transport.get_extra_info("socket").shutdown(2)
        value = gateway.metrics.registry.get_sample_value
        assert value("tokenyard_retries_total", {"pool": "theirs"}) is None
        assert len(endpoint.asked) == 3

    run(test)


def test_beside_a_pool_of_ours_endpoints_get_what_our_engines_do_not_understand():
    own = FakePool("ours")
    plain = json.dumps({"model": "m", "messages": MESSAGES, "max_tokens": 8}).encode()
    tools = json.dumps({"model": "m", "messages": MESSAGES, "tools": [TOOL]}).encode()

    async def test(port, gateway, endpoints):
        endpoints[0].pieces = (WHOLE,)
        gateway.manager.switch("round_robin")
        async with RawCaller.to(port) as caller:
            answers = [await caller.ask(CHAT, plain) for _ in range(4)]
            assert {status for status, _, _ in answers} == {200}
            texts = [answer for _, _, answer in answers]
            assert (texts.count(WHOLE), len(own.requests)) == (2, 2)
            assert sum(b'"content":"ok"' in text for text in texts) == 2
            for path, body in ((CHAT, tools), (b"/v1/embeddings", b'{"input":"a"}')) * 3:
                assert (await caller.ask(path, body))[2] == WHOLE
        assert (len(own.requests), len(endpoints[0].asked)) == (2, 8)

    run(test, own=own)


def test_health_is_as_vllms():
    async def test(port, gateway, endpoints):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            well = await client.get("/health")
            assert (well.status_code, well.content) == (200, b"")
            gateway.draining = True
            assert (await client.get("/health")).status_code == 503

    run(test)


SCORE = json.dumps({"model": "m", "text_1": "a", "text_2": ["b"]}).encode()


def test_an_endpoint_that_is_stale_is_asked_where_no_other_pool_fits():
    async def test(port, gateway, endpoints):
        endpoints[0].pieces = (WHOLE,)
        async with RawCaller.to(port) as caller:
            assert (await caller.ask(b"/v1/score", SCORE))[0] == 200
            await asyncio.sleep(0.1)
            assert (await caller.ask(b"/v1/score", SCORE))[0] == 200

    # Nobody scrapes the endpoint, and our own pool is always fresh.
    run(test, own=FakePool("own"), circuit_breaker={"stale_after_s": 0.05})


def test_an_endpoint_that_is_ejected_is_asked_where_no_other_pool_fits():
    async def test(port, gateway, endpoints):
        (endpoint,) = endpoints
        endpoint.pieces, endpoint.status = (WHOLE,), b"500 Broken"
        async with RawCaller.to(port) as caller:
            assert (await caller.ask(b"/v1/score", SCORE))[0] == 503
            endpoint.status = b"200 OK"
            assert (await caller.ask(b"/v1/score", SCORE))[0] == 200

    run(test, own=FakePool("own"), outlier_ejection={"base_s": 30.0})


def test_a_connection_that_waits_for_a_reader_who_has_left_is_used_no_more():
    """It reads nothing, so the next answer over it would not come before its deadline."""

    async def test():
        async with raw_endpoints() as (endpoint,), asyncio.timeout(30):
            client, origin = UpstreamClient(1.0), Origin.of(endpoint.url)
            head = origin.head(b"GET", b"/", b"content-length: 0\r\n", 0)
            # The last of what is read at once is more than is kept, and the answer's end.
            endpoint.pieces = (bytes((1 << 20) + 1000),)
            connection = await client.send(origin, head)
            while not connection._paused:
                await asyncio.sleep(0.01)
            client.release(connection)
            endpoint.pieces = (b"{}",)
            try:
                async with asyncio.timeout(10):
                    assert await client.get(origin, head, 100) == (200, b"{}")
            finally:
                await client.close()
        assert endpoint.num_connections == 2

    asyncio.run(test())
