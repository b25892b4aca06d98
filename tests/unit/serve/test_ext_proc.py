"""A proxy asks for picks: where requests go, in which bytes, and what is refused."""

import gzip
import json

import pytest
from unit.proxy_site import (
    BODY,
    CHAT,
    DECISION,
    DESTINATION,
    EVENTS,
    FIELDS,
    WHOLE,
    A,
    B,
    C,
    a_head,
    a_piece,
    an_answer,
    check,
    trailers,
    turns,
)  # fmt: skip
from unit.serve.test_handed_on import FORM, a_form
from unit.serve.test_keys import write

from serve_app.ext_proc.http2 import INTERNAL
from serve_app.ext_proc.protocol import (
    BUFFERED,
    FULL_DUPLEX_STREAMED,
    NONE,
    STREAMED,
)
from serve_app.gateway.callers import KeyFile, hash_of
from serve_app.http.auth import Access

UNLIKE = [[], ["127.0.0.1:9"], [""], [3.0], "", "127.0.0.1:9", " , ", True]


def test_a_pick_is_in_header_and_metadata_with_those_that_stand_in_for_it():
    async def test(site):
        first = await site.ask()
        assert sorted(first.placed) == [A, B, C]
        assert first.set_headers.keys() == {DESTINATION, DECISION}
        assert site.loads == {A: 0, B: 0, C: 0} | {first.placed[0]: 1}
        assert site.value("requests_in_flight", pool="theirs") == 1.0
        second = await site.ask()
        assert first.placed[0] not in second.placed[:2]  # The costs say so.
        first.say(*an_answer())
        second.close()

    check(test)


def test_those_that_stand_in_are_in_the_order_of_the_policys_costs():
    async def test(site):
        held = [await site.ask(subset=[place]) for place in (B, B, A)]
        stream = await site.ask()
        assert stream.placed == [C, A, B]
        for one in (*held, stream):
            one.close()

    check(test)


def test_at_most_three_of_the_same_pool_are_named():
    places = [f"127.0.0.1:80{number}" for number in range(10, 16)]
    more = {"name": "more", "endpoints": [{"url": f"http://{A}"}, {"url": f"http://{B}"}]}

    async def test(site):
        streams = [await site.ask() for _ in range(9)]
        found = {frozenset(stream.placed) for stream in streams}
        assert frozenset([A, B]) in found
        assert all(len(each) == 3 and each <= {*places} for each in found - {frozenset([A, B])})
        for stream in streams:
            stream.close()

    check(test, places=places, more_pools=[more])


@pytest.mark.parametrize("subset", [[C, "127.0.0.1:9"], f" {C} ,127.0.0.1:9", [f" {C}"]])
def test_only_a_subset_is_picked_from_even_where_others_have_no_load(subset):
    async def test(site):
        streams = [await site.ask(subset=subset) for _ in range(5)]
        assert [stream.placed for stream in streams] == [[C]] * 5
        for stream in streams:
            stream.say(*an_answer())
        await turns()
        assert site.outcomes == {"stop": 5}

    check(test)


@pytest.mark.parametrize("subset", UNLIKE)
@pytest.mark.parametrize("places", [(A, B), ()])
def test_a_subset_without_a_known_endpoint_is_refused_at_once(subset, places):
    async def test(site):
        stream = await site.ask(subset=subset)
        status, answer, _ = stream.refusal
        assert (status, answer["error"]["type"]) == (503, "server_error")
        assert (stream.placed, site.outcomes) == ([], {})

    pool = {"allowed": ["127.0.0.1"]} if not places else {}
    check(test, places=places, pool=pool)


def test_a_request_waits_for_a_first_endpoint_and_a_proxy_that_gives_up_ends_that():
    async def test(site):
        stream = site.stream(a_head(), a_piece(BODY))
        await turns()
        assert (stream.sent, site.gateway.in_flight) == ([], 1)
        stream.close()
        await turns()
        later = site.stream(a_head(), a_piece(BODY))
        await turns()
        site.gateway.backends["theirs"].change([f"http://{A}"], adds=True)
        await site.until(lambda: later.placed == [A])
        later.close()

    check(test, places=(), pool={"allowed": ["127.0.0.1"]})


def test_more_than_may_be_in_flight_is_refused_with_when_to_come_back():
    async def test(site):
        first = await site.ask()
        status, answer, headers = (await site.ask()).refusal
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        assert "content-length" not in headers
        assert site.value("refused_total", reason="too many in flight") == 1.0
        first.close()

    check(test, limits={"max_in_flight": 1})


@pytest.mark.parametrize("queue", [None, {"max_wait_s": 0.02}, {"max_wait_s": 60.0}])
def test_endpoints_without_room_are_not_picked(queue):
    async def test(site):
        held = [await site.ask() for _ in range(3)]
        assert {*site.loads.values()} == {1}
        stream = site.stream(a_head(), a_piece(BODY))
        await turns()
        if queue is not None and queue["max_wait_s"] > 1.0:
            assert stream.sent == []
            held[1].say(*an_answer())
            await site.until(lambda: stream.placed)
            assert stream.placed == held[1].placed[:1]
        else:
            await site.until(lambda: stream.sent)
            assert stream.refusal[0] == 429
            assert "retry-after" in stream.refusal[2]
        for one in (*held, stream):
            one.close()

    check(test, pool={"max_ongoing": 1}, queue=queue)


@pytest.mark.parametrize("goes_on", [False, True])
def test_who_waits_for_one_endpoint_keeps_nobody_from_the_others(goes_on):
    fields = {"model": "m", "input": "x", "previous_response_id": "resp_1"}

    async def test(site):
        first = await site.ask(b'{"model":"m","input":"x"}', path="/v1/responses", subset=[A])
        first.say(*an_answer(pieces=[WHOLE.replace(b'"a"', b'"resp_1"')]))
        await turns()
        held = [await site.ask(subset=[place]) for place in (A, B, C)]
        head, body = a_head(subset=[A]), BODY
        if goes_on:
            head, body = a_head(path="/v1/responses"), json.dumps(fields).encode()
        waits = site.stream(head, a_piece(body))
        await turns()
        other = site.stream(a_head(), a_piece(BODY))
        await turns()
        held[1].say(*an_answer())
        await site.until(lambda: other.placed == [B])
        assert waits.sent == []
        for one in (*held, waits, other):
            one.close()

    check(test, pool={"max_ongoing": 1}, queue={})


def test_objectives_are_classes_and_fairness_ids_tenants(tmp_path):
    classes = [{"name": "first", "response_s": 9}, {"name": "batch", "response_s": 99}]

    async def test(site):
        asked = [
            {"x-gateway-inference-objective": "batch", "x-gateway-inference-fairness-id": "red"},
            {"x-gateway-inference-objective": "unknown"},
            {"x-gateway-inference-objective": "batch", "x-service-tier": "first"},
            {
                "x-gateway-inference-objective": "\xff\x00",
                "x-gateway-inference-fairness-id": "\xff",
            },
        ]
        tenants, serve = [], site.gateway.serve

        async def spy(request, *others):
            tenants.append(request.tenant)
            await serve(request, *others)

        site.gateway.serve = spy
        for headers in asked:
            (await site.ask(headers=headers)).say(*an_answer())
        await turns()
        found = [row["service_class"] for row in site.rows()]
        assert found == ["batch", "first", "first", "first"]
        assert tenants == ["red", "default", "default", "default"]

    check(test, tmp_path, classes=classes, tenants={"red": {"weight": 1}})


@pytest.mark.parametrize(
    "pieces",
    [[BODY], [BODY, b""], [b"", BODY], [bytes([one]) for one in BODY], [BODY[:9], BODY[9:]]],
)
def test_a_body_is_handed_back_in_full_duplex_after_the_pick(pieces):
    async def test(site):
        stream = await site.ask(*pieces)
        assert stream.kinds == ["request_headers", "request_body"]
        assert stream.handed_back() == BODY
        assert stream.sent[-1].request_body.response.body_mutation.streamed_response.end_of_stream
        assert "content-length" not in stream.set_headers
        stream.close()

    check(test)


def test_a_long_body_is_handed_back_in_pieces_that_windows_take():
    body = json.dumps(FIELDS | {"user": "x" * 400_000}).encode()

    async def test(site):
        stream = await site.ask(*[body[at : at + 16_384] for at in range(0, len(body), 16_384)])
        assert stream.handed_back() == body
        longest = max(message.ByteSize() for message in stream.sent)
        assert (len(stream.sent), longest < 65_535) == (1 + -(-len(body) // 62_000), True)
        stream.close()

    check(test)


def test_trailers_end_a_body():
    async def test(site):
        stream = site.stream(a_head(), a_piece(BODY, ends=False), trailers())
        await site.until(lambda: stream.sent)
        assert stream.kinds == ["request_headers", "request_body", "request_trailers"]
        assert not any(
            message.request_body.response.body_mutation.streamed_response.end_of_stream
            for message in stream.sent
        )
        stream.close()

    check(test)


@pytest.mark.parametrize("mode", [NONE, STREAMED, BUFFERED, FULL_DUPLEX_STREAMED])
def test_a_request_without_a_body_is_picked_for_by_its_head(mode):
    async def test(site):
        stream = site.stream(a_head(method="GET", path="/v1/models?a=b", ends=True, mode=mode))
        await site.until(lambda: stream.placed)
        assert stream.kinds == ["request_headers"]
        stream.say(*an_answer())
        await turns()
        assert site.outcomes == {"stop": 1}

    check(test)


def test_a_buffered_body_is_placed_with_it_and_left_as_it_is():
    async def test(site):
        for ends in (True, False):  # It does not end it where trailers follow.
            stream = site.stream(a_head(mode=BUFFERED))
            assert stream.kinds == ["request_headers"]
            stream.say(a_piece(BODY, ends=ends))
            await site.until(lambda: stream.placed)  # noqa: B023
            assert stream.kinds == ["request_headers", "request_body"]
            assert not stream.sent[1].request_body.response.HasField("body_mutation")
            stream.say(*[trailers()] * (not ends))
            assert stream.kinds[2:] == ["request_trailers"] * (not ends)
            stream.close()

    check(test)


@pytest.mark.parametrize("mode", [NONE, STREAMED, 3])
@pytest.mark.parametrize("headers", [{}, {"content-encoding": "gzip"}, {"content-length": "3"}])
def test_a_body_that_is_not_shown_counts_as_empty_and_stays_as_it_is(mode, headers):
    async def test(site):
        stream = site.stream(a_head(headers, mode=mode))
        await site.until(lambda: stream.placed)
        assert stream.kinds == ["request_headers"]
        assert stream.set_headers.keys() == {DESTINATION, DECISION}
        stream.say(a_piece(b"x", ends=False), a_piece(b"y", ends=False), trailers())
        assert stream.kinds[1:] == ["request_body", "request_body", "request_trailers"]
        stream.say(*an_answer())

    check(test, pool={"model": "theirs", "order": "priority"})


@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX_STREAMED])
@pytest.mark.parametrize("is_encoded", [False, True])
@pytest.mark.parametrize("renames", [False, True])
def test_a_body_and_its_headers_agree(mode, is_encoded, renames):
    sent = gzip.compress(BODY) if is_encoded else BODY
    headers = {"content-length": str(len(sent))}
    headers |= {"content-encoding": "gzip"} if is_encoded else {}
    renamed = json.dumps(FIELDS | {"model": "their-model"}).encode()

    async def test(site):
        stream = await site.ask(sent, headers=headers, mode=mode)
        await site.until(lambda: stream.placed)
        if mode == BUFFERED:
            body = stream.sent[1].request_body.response.body_mutation.body or sent
        else:
            body = stream.handed_back()
        assert (json.loads(body) == json.loads(renamed)) if renames else (body == sent)
        length = stream.set_headers.get("content-length", headers["content-length"])
        assert int(length) == len(body)
        assert stream.removed == ({"content-encoding"} if renames else set())
        stream.close()
        del headers["content-length"]
        chunked = await site.ask(sent, headers=headers, mode=mode)
        await site.until(lambda: chunked.placed)
        assert "content-length" not in chunked.set_headers
        chunked.close()

    check(test, pool={"model": "their-model"} if renames else {})


def test_the_model_of_a_form_is_renamed():
    async def test(site):
        kind = FORM.split(b": ")[1].strip()
        form = a_form((b"model", b"m"), (b"language", b"de"))
        stream = await site.ask(
            form, headers={"content-type": kind}, path="/v1/audio/transcriptions"
        )
        renamed = a_form((b"model", b"whisper"), (b"language", b"de"))
        assert stream.handed_back() == renamed
        stream.close()

    check(test, pool={"model": "whisper"})


def test_keys_of_callers_stay_here_and_those_of_a_pool_are_set(monkeypatch):
    monkeypatch.setenv("POOLS_KEY", "of-the-pool")

    async def test(site):
        for path in (CHAT, "/metrics", "/v1/models", "/%76%31/models", "/x/../v1/models", "*"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
                stream = await site.ask(headers=headers, path=path)
                assert stream.refusal[0] == 401
        stream = await site.ask(headers={"x-api-key": "secret"})
        assert stream.set_headers["authorization"] == "Bearer of-the-pool"
        assert stream.removed == {"x-api-key"}
        stream.close()

    check(test, pool={"api_key_env": "POOLS_KEY"}, access=Access("secret"))


def test_a_key_that_is_the_pools_own_reaches_it(monkeypatch):
    monkeypatch.setenv("POOLS_KEY", "secret")

    async def test(site):
        stream = await site.ask(headers={"authorization": "Bearer secret"})
        assert stream.removed == {"x-api-key"}
        stream.close()

    check(test, pool={"api_key_env": "POOLS_KEY"}, access=Access("secret"))


def test_keys_go_on_where_they_are_not_the_gateways():
    async def test(site):
        stream = await site.ask(headers={"authorization": "Bearer theirs"})
        assert (stream.removed, "authorization" in stream.set_headers) == (set(), False)
        stream.close()

    check(test)


def test_the_limits_of_a_key_hold_and_are_told(tmp_path):
    limits = {"requests_per_minute": 1}
    write(
        tmp_path / "keys",
        [{"name": "ann", "tenant": "red", "sha256": hash_of("sk"), "limits": limits}],
    )
    access = Access(None, keys=KeyFile(tmp_path / "keys"))
    access.open()

    async def test(site):
        headers = {"authorization": "Bearer sk"}
        first = await site.ask(headers=headers)
        first.say(*an_answer())
        assert first.set_headers["x-ratelimit-limit-requests"] == "1"
        status, _, told = (await site.ask(headers=headers)).refusal
        assert (status, "retry-after" in told) == (429, True)

    tenants = {"red": {"weight": 1}}
    check(test, access=access, tenants=tenants, gateway={"keys": str(tmp_path / "keys")})


@pytest.mark.parametrize(
    ("body", "head", "status"),
    [
        (b"{", {}, 400), (b"", {}, 400), (b"[]", {}, 400), (b"\xff\xfe", {}, 400),
        (BODY.replace(b'"m"', b'"x"'), {}, 404), (BODY, {"method": "PUT"}, 405),
        (BODY, {"method": ""}, 405), (BODY, {"headers": {"content-encoding": "gzip"}}, 400),
        (BODY, {"headers": {"content-encoding": "rot13"}}, 415),
        (BODY, {"headers": {"content-length": "99999"}}, 413),
        (BODY, {"headers": {"x": "y" * 70_000}}, 431),
        (BODY, {"headers": {"x-service-tier": "gold"}}, 400), (BODY + b" " * 5000, {}, 413),
        (gzip.compress(BODY + b" " * 5000), {"headers": {"content-encoding": "gzip"}}, 413),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX_STREAMED])
def test_what_cannot_be_served_is_refused_as_by_the_gateway(body, head, status, mode):
    async def test(site):
        stream = await site.ask(body, mode=mode, **head)
        await site.until(lambda: stream.kinds[-1] == "immediate_response")
        assert (stream.refusal[0], stream.placed, site.outcomes) == (status, [], {})
        assert "error" in stream.refusal[1]

    check(test, limits={"max_body_bytes": 5000})


def test_of_a_body_that_is_too_long_the_refusal_is_all_that_is_told():
    async def test(site):
        pieces = [a_piece(b"x" * 600, ends=False)] * 5
        stream = site.stream(a_head(), *pieces, trailers())
        await site.until(lambda: stream.sent)
        assert stream.kinds == ["immediate_response"]
        assert stream.refusal[0] == 413
        stream.say(*pieces)
        assert len(stream.sent) == 1

    check(test, limits={"max_body_bytes": 1000})


IN_EVENTS = [
    b'data: {"type":"response.created","response":{"id":"resp_1"}}\n\n',
    b'data: {"type":"response.output_text.delta","delta":"a"}\n\n',
    b'data: {"type":"response.completed","response":{"id":"resp_1"}}\n\n',
]


@pytest.mark.parametrize(
    "answer",
    [{"pieces": [WHOLE.replace(b'"a"', b'"resp_1"')]}, {"pieces": IN_EVENTS, "headers": EVENTS}],
)
def test_a_request_goes_to_the_endpoint_of_the_response_that_it_goes_on_from(answer):
    body = {"model": "m", "input": "x", "previous_response_id": "resp_1"}

    async def test(site):
        first = await site.ask(b'{"model":"m","input":"x"}', path="/v1/responses")
        first.say(*an_answer(**answer))
        await turns()
        next_ones = [await site.ask(json.dumps(body).encode(), path="/v1/responses") for _ in "ab"]
        assert [one.placed for one in next_ones] == [first.placed[:1]] * 2
        apart = await site.ask(
            json.dumps(body).encode(), path="/v1/responses",
            subset=[place for place in (A, B, C) if place != first.placed[0]],
        )  # fmt: skip
        assert apart.refusal[0] == 503
        for one in next_ones:
            one.close()

    check(test)


def test_a_fault_of_the_gateway_ends_one_stream(monkeypatch):
    async def test(site):
        async def breaks(*_):
            raise LookupError

        monkeypatch.setattr(site.gateway, "serve", breaks)
        stream = site.stream(a_head(), a_piece(BODY))
        await site.until(lambda: stream.status == INTERNAL)
        stream.close()

    check(test)


@pytest.mark.parametrize(
    "noted", ["", "unknown", "1.2.3.4:5, ", "a, [::1]:80", ",,,", "\xff", "x" * 5000, "\r\n"]
)
def test_odd_heads_are_served_or_refused(noted):
    async def test(site):
        stream = await site.ask(headers={"x-forwarded-for": noted.encode("latin-1")})
        assert stream.placed
        stream.close()
        bare = a_head()
        del bare.request_headers.headers.headers[:]
        odd = site.stream(bare, a_piece(BODY))
        await site.until(lambda: odd.sent)
        odd.close()

    check(test)
