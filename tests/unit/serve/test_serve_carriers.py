"""Several carriers and one decider, on real sockets: who knows what, and what a death takes."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from unit.raw_endpoint import RawCaller, raw_endpoints
from unit.serve.test_bytes_through import CHAT, END, STREAMS, WHOLE, a_delta
from unit.serve.test_serve_external import a_cluster

from serve_app.app import GatewayOptions, find_cluster
from serve_app.cluster import Cluster
from serve_app.engines.tokenizer import EstimatedTokens, EstimatingTokenizer
from serve_app.gateway import carrier as carrier_module
from serve_app.gateway.carrier import Carrier
from serve_app.gateway.carrier_wire import read_place, read_request, write_place, write_request
from serve_app.gateway.decider import CarriedPool, Decider
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.exchange import Call, InferenceRequest
from serve_app.gateway.external import ExternalBackend
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.generation import ReplicaTooSmall
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.replicas import Prompt
from serve_app.http.api import create_gateway_api
from serve_app.http.auth import Access
from serve_app.http.free_port import free_port
from serve_app.http.listener import Listener
from serve_app.http.passage import create_carrier_api
from serve_app.policy.manager import PolicyManager
from tokenyard.routing.types import OrderKey

EVENTS = b"content-type: text/event-stream\r\n"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
STREAM = BODY[:-1] + b', "stream": true}'
ACCESS = Access(None, local_admin=True)


def a_gateway(cluster, wrap=lambda pool: pool, log=None, policy=None):
    manager = PolicyManager(
        cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
    )
    manager.switch(policy or cluster.baseline)
    metrics = Metrics()
    pool = ExternalBackend(cluster.external_pools[0], cluster.served_model, metrics)
    return Gateway(cluster, manager, {pool.name: wrap(pool)}, metrics, log=log)


class Site:
    """A decider that may be away, and carriers that listen on ports of their own."""

    def __init__(self, endpoints, cluster, log=None, access=ACCESS):
        self.endpoints, self.cluster, self.log = endpoints, cluster, log
        self.access = access
        self.gateway = self.decider = None
        self.carriers, self.ports, self.listeners = [], [], []

    async def decide(self):
        self.gateway = a_gateway(self.cluster, CarriedPool, self.log, "champion")
        api = create_gateway_api(self.gateway, EstimatingTokenizer(), self.access)
        self.decider = Decider(self.gateway, api)
        await self.decider.start()

    async def kill_decider(self):
        """As `kill -9` does: nobody says anything more."""
        self.decider._server.close()
        for link in (*self.decider._links,):
            link._transport.abort()
        self.decider, self.gateway = None, None
        await asyncio.sleep(0.05)

    async def find(self):
        if self.decider is None:
            raise ConnectionRefusedError("it is away")
        return self.decider.path

    async def carry(self):
        carrier, port = Carrier(a_gateway(self.cluster), self.find), free_port()
        await carrier.start()
        api = create_carrier_api(carrier, EstimatingTokenizer(), self.access)
        listener = Listener(api, self.cluster.limits, self.cluster.gateway.tls)
        await listener.start("127.0.0.1", port)
        self.carriers.append(carrier)
        self.ports.append(port)
        self.listeners.append(listener)

    def kill_carrier(self, index):
        self.carriers[index]._seeking.cancel()
        self.carriers[index]._link._transport.abort()
        for one in (*self.listeners[index]._config.open,):
            one.transport.abort()

    def value(self, name, **labels):
        return self.gateway.metrics.registry.get_sample_value(f"tokenyard_{name}", labels) or 0

    def in_flight(self):
        return {r.replica_id: r.in_flight.count for r in self.gateway.table.replicas.values()}

    async def stop(self):
        for listener, carrier in zip(self.listeners, self.carriers, strict=True):
            await listener.stop()
            await carrier.stop()
            for pool in carrier.alone.backends.values():
                await pool.stop()
            carrier.alone.manager.stop()
        if self.decider is not None:
            await self.decider.stop()
            self.gateway.manager.stop()


@asynccontextmanager
async def a_site(num_endpoints=1, num_carriers=2, log=None, access=ACCESS, **fields):
    async with raw_endpoints(num_endpoints) as endpoints:
        cluster = a_cluster(endpoints, fields.pop("deadlines", {}), **fields)
        site = Site(endpoints, cluster, log, access)
        await site.decide()
        try:
            for _ in range(num_carriers):
                await site.carry()
            await until(lambda: site.value("carriers") == num_carriers)
            yield site
        finally:
            await site.stop()


def run(test, *args, **options):
    async def inside():
        async with asyncio.timeout(60), a_site(*args, **options) as site:
            await test(site)

    asyncio.run(inside())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


@asynccontextmanager
async def callers(*ports):
    """Callers that have asked for streams, whose answers have begun."""
    async with AsyncExitStack() as stack:
        for port in ports:
            one = await stack.enter_async_context(RawCaller.to(port))
            status, _ = await one.begin(CHAT, STREAM)
            assert status == 200
        yield


@pytest.mark.parametrize("name", STREAMS)
def test_streams_come_back_byte_by_byte_and_the_decider_knows_how_long_they_were(name, tmp_path):
    whole = b"".join([*STREAMS[name], *END])
    log = DecisionLog(tmp_path)

    async def test(site):
        (endpoint,) = site.endpoints
        endpoint.headers, endpoint.framing = EVENTS, "chunked"
        endpoint.pieces = [*STREAMS[name], *END]
        for port in site.ports:
            async with RawCaller.to(port) as caller:
                assert (await caller.ask(CHAT, STREAM))[::2] == (200, whole)
        outcome = {"pool": "theirs", "service_class": "default", "outcome": "stop"}
        await until(lambda: site.value("requests_total", **outcome) == 2)
        assert site.value("ttft_seconds_count", pool="theirs") == 2
        assert set(site.in_flight().values()) == {0}
        assert site.gateway.in_flight == 0

    run(test, log=log)
    log.close()
    rows = [row for file in tmp_path.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert [row["outcome"] for row in rows] == ["stop"] * 2
    assert all(row["output_tokens"] > 0 and row["ttft_s"] < row["response_s"] for row in rows)


def test_carriers_place_on_the_same_counts():
    async def test(site):
        for endpoint in site.endpoints:
            endpoint.pieces, endpoint.hangs = [a_delta(content="a")], True
            endpoint.headers, endpoint.framing = EVENTS, "chunked"
        async with callers(*site.ports * 4):
            assert set(site.in_flight().values()) == {2}
            assert site.gateway.in_flight == 8
        await until(lambda: not site.gateway.in_flight)

    run(test, num_endpoints=4)


def test_requests_wait_in_the_decider_for_those_of_other_carriers():
    async def test(site):
        (endpoint,) = site.endpoints
        endpoint.pieces, endpoint.hangs = [a_delta(content="a")], True
        endpoint.headers, endpoint.framing = EVENTS, "chunked"
        async with RawCaller.to(site.ports[1]) as waits:
            async with callers(site.ports[0]):
                async with RawCaller.to(site.ports[1]) as leaves:
                    left = asyncio.create_task(leaves.ask(CHAT, BODY))
                    await until(lambda: site.value("held") == 1)
                    left.cancel()
                await until(lambda: site.value("held") == 0)
                endpoint.pieces, endpoint.hangs = [WHOLE], False
                endpoint.headers, endpoint.framing = b"", "length"
                asked = asyncio.create_task(waits.ask(CHAT, BODY))
                await until(lambda: site.value("held") == 1)
                assert len(endpoint.asked) == 1
            assert (await asked)[::2] == (200, WHOLE)
        await until(lambda: not site.gateway.in_flight)
        assert set(site.in_flight().values()) == {0}

    run(test, max_ongoing=1, queue={"max_wait_s": 50.0})


def test_a_carrier_that_dies_takes_its_requests_and_no_others():
    async def test(site):
        (endpoint,) = site.endpoints
        endpoint.pieces, endpoint.hangs = [a_delta(content="a")], True
        endpoint.headers, endpoint.framing = EVENTS, "chunked"
        async with callers(*site.ports * 3):
            assert site.gateway.in_flight == 6
            site.kill_carrier(0)
            await until(lambda: site.gateway.in_flight == 3)
            assert list(site.in_flight().values()) == [3]
            assert site.value("carriers") == 1
            endpoint.pieces, endpoint.hangs = [WHOLE], False
            endpoint.headers, endpoint.framing = b"", "length"
            async with RawCaller.to(site.ports[1]) as caller:
                assert (await caller.ask(CHAT, BODY))[0] == 200

    run(test)


def test_without_a_decider_what_runs_goes_on_and_what_comes_is_answered():
    async def test(site):
        (endpoint,) = site.endpoints
        endpoint.headers, endpoint.framing, endpoint.gap_s = EVENTS, "chunked", 0.1
        endpoint.pieces = [a_delta(content="a"), a_delta(content="b"), *END]
        async with RawCaller.to(site.ports[0]) as caller:
            asked = asyncio.create_task(caller.ask(CHAT, STREAM))
            await until(lambda: site.gateway.in_flight == 1)
            await until(lambda: site.value("prompt_tokens_total", pool="theirs") > 0)
            await asyncio.sleep(0.15)
            await site.kill_decider()
            assert (await asked)[2] == b"".join(endpoint.pieces)
        endpoint.gap_s = 0.0
        async with RawCaller.to(site.ports[1]) as caller:
            assert (await caller.ask(CHAT, STREAM))[2] == b"".join(endpoint.pieces)
        base = f"http://127.0.0.1:{site.ports[1]}"
        async with httpx.AsyncClient(base_url=base) as client:
            assert (await client.get("/healthz")).json() == {"status": "ok", "replicas": 1}
            refused = await client.post("/v1/policy", json={"policy": "sed"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        await site.decide()
        await until(lambda: site.value("carriers") == 2)
        assert site.value("carried_alone_total") == 1
        async with RawCaller.to(site.ports[1]) as caller:
            assert (await caller.ask(CHAT, STREAM))[0] == 200
        await until(lambda: site.value("output_tokens_total", pool="theirs") == 2)

    run(test)


def test_a_decider_that_is_replaced_keeps_what_it_has_and_the_next_gets_the_rest():
    async def test(site):
        (endpoint,) = site.endpoints
        endpoint.headers, endpoint.framing, endpoint.gap_s = EVENTS, "chunked", 0.1
        endpoint.pieces = [*[a_delta(content="a")] * 5, *END]
        async with RawCaller.to(site.ports[0]) as caller:
            asked = asyncio.create_task(caller.ask(CHAT, STREAM))
            await until(lambda: site.value("prompt_tokens_total", pool="theirs") > 0)
            before, former = site.gateway, site.decider
            site.decider = None
            await former.resign()
            drained = asyncio.create_task(before.drain())
            async with RawCaller.to(site.ports[1]) as other:
                assert (await other.ask(CHAT, STREAM))[0] == 200
            await site.decide()
            assert (await asked)[2] == b"".join(endpoint.pieces)
            assert await drained == 0
        await former.stop()
        before.manager.stop()
        value = before.metrics.registry.get_sample_value
        assert value("tokenyard_output_tokens_total", {"pool": "theirs"}) == 5
        await until(lambda: site.value("carriers") == 2)
        assert site.value("carried_alone_total") == 1

    run(test)


def test_requests_that_wait_for_a_decider_which_hangs_are_placed_without_it(monkeypatch):
    monkeypatch.setattr(carrier_module, "_SILENT_S", 0.3)
    monkeypatch.setattr(carrier_module, "_PING_EVERY_S", 0.1)

    async def test(site):
        for link in site.decider._links:
            link.take = lambda *_: None
        site.endpoints[0].pieces = (WHOLE,)
        async with RawCaller.to(site.ports[0]) as caller:
            assert (await caller.ask(CHAT, BODY))[::2] == (200, WHOLE)
        assert site.carriers[0]._num_alone == 1

    run(test)


def test_a_replica_that_fails_is_ejected_for_all_carriers_and_its_requests_go_elsewhere():
    async def test(site):
        bad = site.endpoints[0]
        bad.status = b"500 Oh"
        for port in site.ports * 8:
            async with RawCaller.to(port) as caller:
                assert (await caller.ask(CHAT, BODY))[0] == 200
            # The caller may have its answer before the decider hears of the failure.
            await until(lambda: not site.gateway.in_flight)
        assert len(bad.asked) == 3
        assert site.value("retries_total", pool="theirs") == 3
        assert site.value("ejections_total", pool="theirs") == 1

    run(test, num_endpoints=2, outlier_ejection={"base_s": 60.0})


def test_what_an_endpoint_has_against_a_request_arrives_as_it_is():
    async def test(site):
        (endpoint,) = site.endpoints
        endpoint.status, endpoint.pieces = b"422 No", (b'{"error":"odd"}',)
        async with RawCaller.to(site.ports[0]) as caller:
            assert (await caller.ask(CHAT, BODY))[::2] == (422, b'{"error":"odd"}')
        outcome = {"pool": "theirs", "service_class": "default", "outcome": "rejected"}
        await until(lambda: site.value("requests_total", **outcome) == 1)

    run(test)


def test_what_no_engine_can_ever_answer_is_400_through_a_carrier_too():
    async def test(site):
        async def answer(*_):
            raise ReplicaTooSmall("too long")

        site.carriers[0].alone.backends["theirs"].answer = answer
        async with RawCaller.to(site.ports[0]) as caller:
            status, _, told = await caller.ask(CHAT, BODY)
        error = json.loads(told)["error"]
        assert (status, error["type"], error["message"]) == (
            400, "invalid_request_error", "too long",
        )  # fmt: skip
        assert not site.gateway.in_flight

    run(test)


def test_too_many_in_all_carriers_are_refused_and_callers_who_leave_make_room():
    async def test(site):
        (endpoint,) = site.endpoints
        endpoint.pieces, endpoint.hangs = [a_delta(content="a")], True
        endpoint.headers, endpoint.framing = EVENTS, "chunked"
        async with callers(*site.ports):
            async with RawCaller.to(site.ports[0]) as caller:
                status, headers, _ = await caller.ask(CHAT, BODY)
            assert (status, b"retry-after" in headers) == (429, True)
        await until(lambda: endpoint.num_gone == 2 and not site.gateway.in_flight)
        outcome = {"pool": "theirs", "service_class": "default", "outcome": "abort"}
        assert site.value("requests_total", **outcome) == 2

    run(test, limits={"max_in_flight": 2})


def test_answers_that_take_too_long_end_with_an_event_in_every_carrier():
    async def test(site):
        (endpoint,) = site.endpoints
        endpoint.pieces, endpoint.hangs = [a_delta(content="a")], True
        endpoint.headers, endpoint.framing = EVENTS, "chunked"
        async with RawCaller.to(site.ports[0]) as caller:
            status, _, answer = await caller.ask(CHAT, STREAM)
        assert (status, b"no answer within 0.5 s" in answer) == (200, True)
        await until(lambda: endpoint.num_gone == 1)

    run(test, limits={"timeout_s": 0.5})


def test_a_decider_that_drains_lets_answers_end_for_a_while():
    async def test(site):
        (endpoint,) = site.endpoints
        endpoint.pieces, endpoint.hangs = [a_delta(content="a")], True
        endpoint.headers, endpoint.framing = EVENTS, "chunked"
        async with RawCaller.to(site.ports[0]) as caller:
            asked = asyncio.create_task(caller.ask(CHAT, STREAM))
            await until(lambda: site.gateway.in_flight == 1)
            await asyncio.sleep(0.1)
            drained = asyncio.create_task(site.gateway.drain())
            await asyncio.sleep(0.05)
            async with RawCaller.to(site.ports[1]) as other:
                assert (await other.ask(CHAT, BODY))[0] == 503
            assert b"the gateway ended before the answer did" in (await asked)[2]
            assert await drained == 1

    run(test, limits={"drain_s": 0.3})


def test_operators_ask_and_change_through_any_carrier_as_from_their_own_address():
    async def test(site):
        for port in site.ports:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                changed = await client.post("/v1/policy", json={"policy": "sed"})
                assert changed.json()["active"] == "sed"
                forwarded = {"x-forwarded-for": "8.8.8.8"}
                denied = await client.post("/v1/policy", json={"policy": "sed"}, headers=forwarded)
                assert denied.status_code == 403
                assert b"tokenyard_carriers 2.0" in (await client.get("/metrics")).content
                assert (await client.get("/v1/pools")).json()["replicas"]
                assert "<!doctype html>" in (await client.get("/")).text

    run(test)


def test_a_gateway_with_an_allocated_pool_is_one_process():
    known = find_cluster(GatewayOptions(cluster="local_cpu")).model_dump()
    with pytest.raises(ValueError, match="gateway with an allocated pool has one carrier"):
        Cluster.model_validate(known | {"gateway": {"carriers": 2}})


def test_a_request_tells_the_names_of_its_blocks():
    tokens = EstimatedTokens("some words " * 20)
    call = Call(b"/v1/completions", b"", b"{}", stream=False)
    request = InferenceRequest("req-ü", tokens, 7, call, for_engines=True, tenant="t")
    wire = write_request(request, "batch", (4, 16))
    read, class_name = read_request(wire, (4, 16))
    assert (read.request_id, read.max_tokens, read.for_engines, class_name, read.tenant) == (
        "req-ü", 7, True, "batch", "t",
    )  # fmt: skip
    for size in (0, 4, 16):
        expected = Prompt(list(tokens)).blocks(size)
        assert read.prompt.blocks(size).tolist() == expected.tolist()
    assert len(read.token_ids) == len(tokens)


def test_a_request_with_long_names_is_told_whole():
    call = Call(b"/v1/completions", b"", b"{}", stream=False)
    name = "é" * 60_000
    request = InferenceRequest(name, EstimatedTokens("words"), 7, call, tenant="t")
    wire = write_request(request, "batch", (16,))
    assert read_request(wire, (16,))[0].request_id == name


def test_estimated_tokens_are_the_same_in_every_process():
    # Names of blocks are compared between carriers, each with a hash seed of its own.
    assert list(EstimatedTokens("abcdefg\ud800")) == list(EstimatedTokens("abcdefg\ud800"))
    assert EstimatedTokens("abcdabce")[0] != EstimatedTokens("abcdabce")[1]
    assert EstimatedTokens("abcd")[0] == 4413565704599234494


@pytest.mark.parametrize("headers", [[], [(b"x-ratelimit-limit-requests", b"7"), (b"a", b"")]])
@pytest.mark.parametrize(
    "key", [None, OrderKey(1.7e9 + 1 / 3), OrderKey(0.0, 1.5), OrderKey(1.7e9, 1.7e9 + 0.1, 1.8e9)]
)
def test_a_place_is_read_as_it_was_written(key, headers):
    place = ("pool", "http://a:1/b", key, headers, b"")
    assert read_place(write_place(*place)) == place


def test_nothing_is_left_of_a_request_whose_caller_leaves_at_once():
    class Nobody:
        begun = False

        def add_headers(self, headers):
            """No answer, no head."""

    async def test(site):
        (carrier,), (link,) = site.carriers, site.decider._links
        call, (first, *_) = Call(CHAT, b"", BODY, stream=False), site.cluster.classes
        for number in range(20):
            request = InferenceRequest(f"{number}", [1], 1, call, model="m")
            task = asyncio.create_task(carrier.serve(request, first, Nobody()))
            await asyncio.sleep(0)
            task.cancel()  # The decider hears of both by one read.
            await asyncio.wait([task])
        heard_s = link.heard_s
        await until(lambda: link.heard_s > heard_s)
        await asyncio.sleep(0.05)
        assert not link._carried
        assert not site.gateway.in_flight

    run(test, num_carriers=1)
