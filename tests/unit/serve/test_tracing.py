"""Spans of requests, and traces that are only handed on."""

import asyncio
import json

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from unit.raw_endpoint import RawCaller
from unit.serve.test_bytes_through import BODY, CHAT, END, EVENTS, STREAM, WHOLE, a_delta
from unit.serve.test_bytes_through import a_site as a_gateway_site
from unit.serve.test_models import a_site as a_site_of_models
from unit.serve.test_models import ask as ask_for
from unit.serve.test_models import external
from unit.serve.test_serve_gateway import cluster_of
from unit.stub_endpoint import stubs

from serve_app.gateway.tracing import Tracing, tracing_of
from tokenyard.routing.artifact import best_tuned_rule

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NAMED = f"traceparent: 00-{TRACE}-{PARENT}-01\r\ntracestate: a=b\r\n".encode()


def run(test):
    async def inside():
        async with asyncio.timeout(60):
            await test()

    asyncio.run(inside())


async def ask(port, body=BODY, headers=b""):
    async with RawCaller.to(port) as caller:
        return await caller.ask(CHAT, body, headers)


def streams(endpoint):
    endpoint.pieces = [a_delta(content="a"), a_delta(content="b"), *END]
    endpoint.headers, endpoint.framing = EVENTS, "chunked"


def spans_of(tracing, exporter):
    tracing._provider.force_flush()
    return exporter.get_finished_spans()


@pytest.fixture
def traced():
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    yield tracing, exporter
    tracing.close()


def names_of(span):
    return [one.name for one in span.events]


def test_without_tracing_what_the_caller_names_goes_on_and_nothing_is_made_up():
    async def test():
        async with a_gateway_site() as (port, gateway, (endpoint,)):
            endpoint.pieces = (WHOLE,)
            await ask(port, headers=NAMED)
            await ask(port)
            assert gateway.tracing is None
        named = [headers.get(b"traceparent") for _, headers, _ in endpoint.asked]
        assert named == [f"00-{TRACE}-{PARENT}-01".encode(), None]

    run(test)


def test_a_span_tells_the_decision_and_the_endpoint_works_below_it(traced):
    tracing, exporter = traced

    async def test():
        async with a_gateway_site(2) as (port, gateway, endpoints):
            gateway.tracing = tracing
            for endpoint in endpoints:
                streams(endpoint)
            endpoints[0].status = b"500 Oh"
            assert (await ask(port, STREAM, NAMED))[0] == 200
            while not any(one.asked for one in endpoints[:1]):  # Until the bad one was tried.
                await ask(port, STREAM, NAMED)
            asked = [one.asked[-1][1] for one in endpoints]
        span = spans_of(tracing, exporter)[-1]
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
        line = f"00-{TRACE}-{span.context.span_id:016x}-01".encode()
        assert [one[b"traceparent"] for one in asked] == [line, line]
        assert asked[0][b"tracestate"] == b"a=b"
        told = span.attributes
        assert told["tokenyard.replica"] == endpoints[1].url
        assert (told["tokenyard.pool"], told["tokenyard.retries"]) == ("theirs", 1)
        assert told["tokenyard.policy"].partition("@")[0] == best_tuned_rule(
            "conversation_mixed_gpus"
        )
        assert told["tokenyard.decision_us"] > 0
        assert told["gen_ai.usage.output_tokens"] == 2
        assert told["gen_ai.response.finish_reasons"] == ("stop",)
        assert names_of(span) == [
            "tokenyard.placed", "tokenyard.attempt_ended", "tokenyard.placed",
            "gen_ai.first_token", "tokenyard.attempt_ended",
        ]  # fmt: skip
        ended = [one for one in span.events if one.name == "tokenyard.attempt_ended"]
        assert [one.attributes["tokenyard.sends"] for one in ended] == [1, 1]
        assert span.status.is_ok or span.status.is_unset
        assert span.end_time > span.start_time
        assert span.resource.attributes["service.name"] == "tokenyard-gateway"

    run(test)


def test_a_span_tells_which_of_several_models_is_asked(traced):
    tracing, exporter = traced

    async def test():
        async with stubs(2) as (one, two):
            pools = [external("m", one.url), external("large", two.url, served_model="large",
                                                      loras=["sql"])]  # fmt: skip
            async with a_site_of_models(cluster_of(pools), tracing=tracing) as (client, _):
                for model in ("m", "large", "sql", None):
                    assert (await ask_for(client, model)).status_code == 200
        asked = [one.attributes["gen_ai.request.model"] for one in spans_of(tracing, exporter)]
        assert asked == ["m", "large", "sql", "m"]

    run(test)


def test_a_trace_is_begun_where_the_caller_names_none_and_ends_with_the_reason(traced):
    tracing, exporter = traced

    async def test():
        async with a_gateway_site() as (port, gateway, (endpoint,)):
            gateway.tracing = tracing
            endpoint.status = b"500 Oh"
            assert (await ask(port, headers=b"traceparent: nonsense\r\n"))[0] == 503
            gateway.draining = True
            assert (await ask(port))[0] == 503
        failed, refused = spans_of(tracing, exporter)
        sent = endpoint.asked[0][1][b"traceparent"].decode().split("-")
        assert sent[1] == f"{failed.context.trace_id:032x}"
        assert failed.parent is None
        assert (failed.attributes["error.type"], failed.status.is_ok) == ("Unserved", False)
        assert (refused.attributes["error.type"], names_of(refused)) == ("Draining", [])

    run(test)


def test_the_environment_says_whether_and_where_to():
    assert tracing_of({}) is None
    assert tracing_of({"OTEL_TRACES_EXPORTER": "none"}) is None
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    assert tracing_of({"OTEL_SDK_DISABLED": "True", **endpoint}) is None
    console = tracing_of({"OTEL_TRACES_EXPORTER": "console"})
    console.close()
    with pytest.raises(ValueError, match=r"'other' is not installed; .*tokenyard\[tracing\]"):
        tracing_of({"OTEL_TRACES_EXPORTER": "other"})


def test_what_a_sampler_leaves_out_is_not_told_but_handed_on(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)

    async def test():
        async with a_gateway_site() as (port, gateway, (endpoint,)):
            gateway.tracing = tracing
            endpoint.pieces = (WHOLE,)
            assert (await ask(port, json.dumps(json.loads(BODY)).encode(), NAMED))[0] == 200
            assert endpoint.asked[0][1][b"traceparent"].decode().endswith("-00")

    run(test)
    assert not spans_of(tracing, exporter)
    tracing.close()
