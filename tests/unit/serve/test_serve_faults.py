"""Whose fault it is that an endpoint gives no answer, and what follows from that."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from unit.serve.test_serve_external import (
    AT_ONCE,
    BODY,
    a_cluster,
    pools_metric,
    run,
    text_of,
    until,
)
from unit.serve.test_serve_gateway import PROFILE
from unit.stub_endpoint import DONE, OK, PAGE, an_event
from unit.virtual_time import run_virtually

from serve_app.engines.base import EngineStatus
from serve_app.gateway import scraping
from serve_app.gateway.exchange import Call, InferenceRequest
from serve_app.gateway.faults import EndpointError, Fault, retry_after_s
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.generation import ReplicaFailed, RequestRejected, Unserved
from serve_app.gateway.outliers import BackOff
from serve_app.policy.manager import PolicyManager

TOO_LONG = "Input is longer than the context: 9000 > 8192 tokens"
NO_IMAGES = (
    "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
)
UNKNOWN = (
    b'{"object":"error","message":"The model `m` does not exist.","type":"NotFoundError",'
    b'"param":null,"code":404}'
)


def an_error(message="no", **fields):
    return {"error": {"message": message, **fields}}


CALLERS = [
    an_error(TOO_LONG, type="BadRequestError", code=400),
    an_error(TOO_LONG, type="BadRequestError", code="400"),
    an_error(TOO_LONG, type="invalid_request_error", code="context_length_exceeded"),
    an_error(TOO_LONG, type="exceed_context_size_error", n_ctx=8192),
    {"type": "error", **an_error(TOO_LONG, type="invalid_request_error")},
    an_error(TOO_LONG, type="UnprocessableEntityError"),
]
"""Events of vLLM, SGLang, OpenAI, llama.cpp and Anthropic that name a caller's mistake."""


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (400, an_error("bad"), Fault.CALLER),
        (413, {}, Fault.CALLER),
        (422, {"detail": [{"msg": "odd"}]}, Fault.CALLER),
        (500, an_error("odd", code=400), Fault.CALLER),
        (500, an_error(NO_IMAGES, type="server_error", code=500), Fault.CALLER),
        (500, an_error("Failed to parse messages: Missing 'role'", code=500), Fault.CALLER),
        (404, an_error("Response with id 'resp_1' not found.", code=404), Fault.CALLER),
        (429, an_error("slow down"), Fault.ROOM),
        (503, "Loading model", Fault.ROOM),
        (529, {"type": "error", **an_error(type="overloaded_error")}, Fault.ROOM),
        (404, json.loads(UNKNOWN), Fault.LACKS),
        (404, an_error('model "m" not found, try pulling it first'), Fault.LACKS),
        (400, an_error("Invalid model name passed in model=m"), Fault.LACKS),
        (404, an_error("no", code="model_not_found"), Fault.LACKS),
        (404, an_error("The LoRA adapter `sql` does not exist."), Fault.LACKS),
        (404, {"detail": "Not Found"}, Fault.LACKS),
        (404, an_error("File Not Found", type="not_found_error", code=404), Fault.LACKS),
        (404, "<html>no such page</html>", Fault.LACKS),
        (501, an_error("This server does not support embeddings"), Fault.LACKS),
        (401, {"error": "Unauthorized"}, Fault.ENDPOINT),
        (408, {}, Fault.ENDPOINT),
        (500, an_error("EngineCore encountered an issue"), Fault.ENDPOINT),
        (500, an_error("CUDA error: operation not supported"), Fault.ENDPOINT),
        (502, "", Fault.ENDPOINT),
        (307, "", Fault.ENDPOINT),
    ],
)
def test_one_table_says_whose_fault_a_status_is(status, body, fault):
    text = body if isinstance(body, str) else json.dumps(body)
    assert EndpointError.of_answer(status, text.encode()).fault is fault


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        *((one, Fault.CALLER) for one in CALLERS),
        (an_error(NO_IMAGES, type="server_error", code=500), Fault.CALLER),
        (an_error("busy", type="rate_limit_error"), Fault.ROOM),
        (an_error("sleeping", code=503), Fault.ROOM),
        (an_error("The model `m` does not exist.", type="NotFoundError"), Fault.LACKS),
        (an_error("it broke", type="InternalServerError", code=500), Fault.ENDPOINT),
        (an_error("it broke"), Fault.ENDPOINT),
        ({"error": "it broke"}, Fault.ENDPOINT),
    ],
)
def test_and_whose_fault_an_event_is(event, fault):
    assert EndpointError.of(event).fault is fault


def test_a_header_says_when_to_come_back_in_seconds_or_as_a_date():
    assert retry_after_s(b"37", 0.0) == 37.0
    assert retry_after_s(b"Thu, 01 Jan 1970 00:01:40 GMT", 40.0) == 60.0
    assert retry_after_s(b"Thu, 01 Jan 1970 00:01:40 GMT", 900.0) == 0.0
    assert retry_after_s(b"soon", 0.0) is retry_after_s(None, 0.0) is None


def test_what_refuses_is_left_alone_for_twice_as_long_each_time():
    now_s = [0.0]
    off = BackOff(1.0, 5.0, lambda: now_s[0])
    rests_s = []
    for _ in range(4):
        off.refuse(("a",))
        off.refuse(("a",))  # Sent before the first of them was heard of.
        rests_s.append(off.left_s(("a",)))
        now_s[0] += rests_s[-1]
    assert rests_s == [1.0, 2.0, 4.0, 5.0]
    off.pop(("a",))
    off.refuse(("a",), retry_after_s=3.0)
    assert off.left_s(("a",)) == 3.0
    off.refuse(("b",), retry_after_s=1e9)
    assert off.left_s(("b",)) == 5.0
    assert off.left_s(("c",)) == 0.0


def sse(event):
    return f"data: {json.dumps(event)}\n\n".encode()


@pytest.mark.parametrize("event", CALLERS)
def test_an_event_that_names_the_callers_mistake_is_its_400_and_ejects_nobody(event):
    async def test(client, gateway, endpoints):
        for one in endpoints:
            one.script = (sse(event), DONE)
        for number in range(1, 6):
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.status_code in (400, 422)
            assert answer.json()["error"]["message"] == TOO_LONG
            assert sum(one.num_asked for one in endpoints) == number
        assert not gateway.outliers.records

    run(test, 3, outlier_ejection=AT_ONCE)


def test_an_image_that_no_endpoint_takes_is_the_callers_400_though_llamacpp_answers_500():
    async def test(client, gateway, endpoints):
        told = an_error(NO_IMAGES, type="server_error", code=500)
        for one in endpoints:
            one.status, one.script = 500, (json.dumps(told).encode(),)
        for number in range(1, 6):
            answer = await client.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.json()) == (400, told)
            assert sum(one.num_asked for one in endpoints) == number
        assert not gateway.outliers.records

    run(test, 2, outlier_ejection=AT_ONCE)


def test_a_mistake_that_shows_after_the_first_token_ejects_nobody_either():
    async def test(client, gateway, endpoints):
        endpoints[0].script = (an_event("a"), sse(CALLERS[0]), DONE)
        answer = await client.post("/v1/completions", json=BODY)
        assert TOO_LONG in answer.text
        assert not gateway.outliers.records

    run(test, outlier_ejection=AT_ONCE)


@pytest.mark.parametrize("num_asleep", [3, 5, 7])
def test_endpoints_that_sleep_cost_those_that_are_awake_no_request(num_asleep):
    async def test(client, gateway, endpoints):
        for one in endpoints[:num_asleep]:
            one.status, one.script = 503, (json.dumps(an_error("sleeping", code=503)).encode(),)
        answers = [await client.post("/v1/completions", json=BODY) for _ in range(24)]
        assert [text_of(one) for one in answers] == ["ok"] * 24
        assert max(one.num_asked for one in endpoints[:num_asleep]) <= 3
        # Once the time is over for which they said so, they are asked again, and serve.
        for one in endpoints[:num_asleep]:
            one.status, one.script = 200, OK
        rests = gateway._placement.availability.full
        rests.update({name: (0.0, rest_s) for name, (_, rest_s) in rests.items()})
        for _ in range(16):
            text_of(await client.post("/v1/completions", json=BODY))
        assert not rests

    # On a busy machine the requests take longer than an endpoint is left alone the first time.
    run(test, 8)


@pytest.mark.parametrize(("status", "answered"), [(429, 429), (503, 503), (529, 503)])
def test_where_none_has_room_the_caller_is_told_when_the_first_may_have(status, answered):
    async def test(client, gateway, endpoints):
        for one, after in zip(endpoints, ("37", "25"), strict=True):
            one.status, one.script = status, (json.dumps(an_error(f"come in {after}")).encode(),)
            one.headers = {
                "content-type": "application/json", "retry-after": after,
                "x-ratelimit-remaining-requests": "0",
            }  # fmt: skip
        for _ in range(2):
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.status_code == answered
            assert 24 <= int(answer.headers["retry-after"]) <= 25
            # The second time nobody is asked: they have said when.
            assert [one.num_asked for one in endpoints] == [1, 1]
        first = pools_metric(gateway, "sends_total")
        assert first == 2.0

    async def told(client, gateway, endpoints):
        await test(client, gateway, endpoints)
        gateway._placement.availability.full.clear()
        answer = await client.post("/v1/completions", json=BODY)
        assert "come in 25" in answer.json()["error"]["message"]
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert not gateway.outliers.records

    run(told, 2)


def test_a_model_that_one_endpoint_does_not_know_is_asked_of_the_others():
    async def test(client, gateway, endpoints):
        odd = endpoints[2]
        odd.status, odd.script = 404, (UNKNOWN,)
        asks = 0
        for _ in range(15):
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=BODY) for _ in range(8))
            )
            asks += len(answers)
            assert [text_of(one) for one in answers] == ["ok"] * len(answers)
        assert asks == 120
        assert odd.num_asked <= 8
        assert not gateway.outliers.records

    run(test, 4)


def test_an_endpoint_that_lacks_a_model_is_asked_for_it_again_once_it_lists_it(monkeypatch):
    monkeypatch.setattr(scraping, "INFO_EVERY_S", 0.05)

    def listing(*names):
        return {
            "/metrics": PAGE % "0.0",
            "/v1/models": json.dumps({"data": [{"id": one} for one in names]}),
        }

    async def test(client, gateway, endpoints):
        odd = endpoints[0]
        odd.status, odd.script, odd.pages = 404, (UNKNOWN,), listing("another")
        await until(lambda: gateway.refresh() and info_of(gateway, odd).models)
        while not odd.num_asked:
            text_of(await client.post("/v1/completions", json=BODY))
        lacks = gateway._placement.availability.lacks
        # However long that takes.
        lacks.update({name: (0.0, rest_s) for name, (_, rest_s) in lacks.items()})
        for _ in range(4):
            text_of(await client.post("/v1/completions", json=BODY))
        assert odd.num_asked == 1
        odd.status, odd.script, odd.pages = 200, OK, listing("another", "m")
        await until(lambda: gateway.refresh() and "m" in info_of(gateway, odd).models)
        for _ in range(4):
            text_of(await client.post("/v1/completions", json=BODY))
        assert odd.num_asked > 1

    run(test, 2, scrapes=True)


def info_of(gateway, endpoint):
    return gateway.table.replicas[endpoint.url].info


def test_a_model_that_none_knows_is_the_endpoints_404_and_one_is_asked_from_then_on():
    async def test(client, gateway, endpoints):
        for one in endpoints:
            one.status, one.script = 404, (UNKNOWN,)
        for asked in (3, 4, 5):
            answer = await client.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.content) == (404, UNKNOWN)
            assert sum(one.num_asked for one in endpoints) == asked

    run(test, 3)


def test_a_route_that_one_endpoint_does_not_have_is_asked_of_the_others():
    async def test(client, gateway, endpoints):
        endpoints[0].status, endpoints[0].script = 404, (b'{"detail":"Not Found"}',)
        for _ in range(6):
            text_of(await client.post("/v1/completions", json=BODY))
        assert endpoints[0].num_asked == 1
        # Of what it does have nothing is known.
        endpoints[0].status, endpoints[0].script = 200, OK
        for _ in range(4):
            body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
            await client.post("/v1/chat/completions", json=body)
        assert endpoints[0].num_asked > 1

    run(test, 2)


def test_a_request_that_all_endpoints_fail_is_taken_for_the_cause():
    async def test(client, gateway, endpoints):
        for one in endpoints:
            one.status, one.script = 500, (b"it broke",)
        for _ in range(6):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 503
        assert not gateway.outliers.records

    run(test, 4, outlier_ejection=AT_ONCE)


def test_an_endpoint_that_fails_what_others_answer_is_ejected_after_some():
    async def test(client, gateway, endpoints):
        endpoints[1].status = 500
        for _ in range(12):
            text_of(await client.post("/v1/completions", json=BODY))
        assert endpoints[1].num_asked == 3
        assert pools_metric(gateway, "ejections_total") == 1.0

    run(test, 4, outlier_ejection={"base_s": 60.0})


def test_health_pools_and_page_say_whether_any_endpoint_could_answer():
    async def test(client, gateway, endpoints):
        async def statuses():
            paths = ("/health", "/healthz")
            codes = [(await client.get(path)).status_code for path in paths]
            shown = (await client.get("/v1/pools")).json()["replicas"]
            return codes, [one["state"] for one in shown]

        await until(lambda: all(one.num_scraped > 1 for one in endpoints))
        assert await statuses() == ([200, 200], ["ready", "ready"])
        for one in endpoints:
            one.drips = True
        await until(lambda: "ready" not in gateway.states().values())
        assert await statuses() == ([503, 503], ["unreachable"] * 2)
        assert (await client.get("/healthz")).json() == {"status": "unavailable", "replicas": 2}
        for one in endpoints:
            one.drips = False
        await until(lambda: set(gateway.states().values()) == {"ready"})
        # All that are there say that they have no room.
        for one in endpoints:
            one.status, one.script = 503, (b"sleeping",)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 503
        assert await statuses() == ([503, 503], ["full", "full"])

    run(test, 2, scrapes=True, circuit_breaker={"stale_after_s": 0.5})


class SlowEndpoints:
    """A pool of endpoints that take a time for each request, four at once, and fail what is bad."""

    name, takes_any, max_model_tokens = "theirs", True, 1000

    def __init__(self, urls, fault):
        self._fault, self._rng = fault, np.random.default_rng(1)
        self._slots = {url: asyncio.Semaphore(4) for url in urls}

    def refresh(self, table, now_s):
        for url in self._slots:
            table.add(url, self.name, PROFILE, 0, now_s).publish(EngineStatus(0, 0, 0.0, now_s))

    def ray_replicas(self):
        return ()

    def by_our_clock(self, replica_id, status, now_s):
        return status

    async def answer(self, replica_id, attempt):
        attempt.note_send()
        if attempt.request.request_id.startswith("bad"):
            raise self._fault()
        async with self._slots[replica_id]:
            await asyncio.sleep(self._rng.exponential(0.3))
            attempt.take(1)
            attempt.take(1, "stop")


@pytest.mark.parametrize(
    "fault",
    [lambda: RequestRejected(400, (), b"{}"), lambda: ReplicaFailed("answered 500")],
    ids=["a mistake", "what every endpoint fails"],
)
def test_a_caller_with_two_mistakes_a_second_ejects_nobody_and_delays_nobody(fault):
    with_them, ejected = run_virtually(response_times(fault, every_s=0.5))
    without, _ = run_virtually(response_times(fault, every_s=None))
    assert ejected == 0
    assert len(with_them) == len(without) == 2400
    assert np.percentile(with_them, 99) <= 1.05 * np.percentile(without, 99)


async def response_times(fault, every_s):
    """Response times of 2,400 requests at 40/s to 8 endpoints, seconds; how many were ejected."""
    loop = asyncio.get_running_loop()
    urls = [f"http://127.0.0.1:{port}" for port in range(8)]
    cluster = a_cluster([SimpleNamespace(url=url) for url in urls], {})
    manager = PolicyManager(
        cluster.scenario, cluster.baseline, cluster.circuit_breaker, np.random.default_rng(0)
    )
    manager.switch("least_loaded")
    pool = SlowEndpoints(urls, fault)
    gateway = Gateway(cluster, manager, {"theirs": pool}, clock_s=lambda: 1e6 + loop.time())
    gateway.outliers.clock_s = loop.time
    times_s, rng = [], np.random.default_rng(2)

    async def ask(name):
        began_s = loop.time()
        downstream = SimpleNamespace(begun=False)
        call = Call(b"/v1/completions", b"", b"{}", stream=True)
        request = InferenceRequest(name, [1] * 100, 8, call)
        with contextlib.suppress(RequestRejected, Unserved):
            await gateway.serve(request, cluster.classes[0], downstream)
            times_s.append(loop.time() - began_s)

    async def make_mistakes():
        while every_s is not None:
            await ask("bad")
            await asyncio.sleep(every_s)

    mistakes = asyncio.create_task(make_mistakes())
    asks = []
    for number in range(2400):
        asks.append(asyncio.create_task(ask(f"good {number}")))
        await asyncio.sleep(rng.exponential(1 / 40))
    await asyncio.gather(*asks)
    mistakes.cancel()
    manager.stop()
    return times_s, len(gateway.outliers.saved())
