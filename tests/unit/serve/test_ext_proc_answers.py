"""A proxy shows answers: what the gateway counts, learns and blames, whoever shows them."""

import pytest
from unit.proxy_site import (
    BODY,
    EVENTS,
    JSON,
    PLACES,
    STREAM,
    WHOLE,
    A,
    B,
    C,
    a_head,
    a_piece,
    a_token,
    an_answer,
    check,
    trailers,
    turns,
)  # fmt: skip

from serve_app.ext_proc import exchange
from serve_app.ext_proc.protocol import BUFFERED, FULL_DUPLEX_STREAMED, NONE, STREAMED

AT_ONCE = {"base_s": 60.0, "consecutive_failures": 1}
ERROR = b'{"error":{"message":"%b","type":"%b"}}'


async def shown(site, *messages, by="itself", **head):
    """Have an answer shown, by the filter that has asked or by another; return its stream."""
    mode = FULL_DUPLEX_STREAMED if by == "itself" else NONE
    stream = await site.ask(answer_mode=mode, **head)
    await site.until(lambda: stream.placed)
    if by == "itself":
        stream.say(*messages)
        await turns()
        stream.close()
        return stream
    if by == "another, later":
        stream.close()
    observer = await site.observe(stream, *messages)
    assert observer.sent == []
    if by == "another":
        stream.close()
    await turns()
    observer.close()
    return observer


BY = pytest.mark.parametrize("by", ["itself", "another", "another, later"])


@BY
def test_a_stream_tells_its_tokens_and_when_the_first_came(by, tmp_path):
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":7}}\n\n'

    async def test(site):
        cut = b"".join(STREAM)
        pieces = [cut[at : at + 7] for at in range(0, len(cut), 7)]
        await shown(site, *an_answer(headers=EVENTS, pieces=STREAM), by=by)
        await shown(site, *an_answer(headers=EVENTS, pieces=[*pieces, b""]), by=by)
        await shown(site, *an_answer(headers=EVENTS, pieces=[a_token(), usage, *STREAM]), by=by)
        rows = site.rows()
        assert site.outcomes == {"stop": 3}
        assert [row["output_tokens"] for row in rows] == [2, 2, 9]
        assert all(0 <= row["ttft_s"] <= row["response_s"] for row in rows)

    check(test, tmp_path)


@BY
def test_an_answer_at_once_tells_its_tokens_and_no_first_one(by, tmp_path):
    cut_off = WHOLE.replace(b'"id"', b'"finish_reason":"length","id"')

    async def test(site):
        await shown(site, *an_answer(), by=by)
        await shown(site, *an_answer(pieces=(cut_off[:30], cut_off[30:], b"")), by=by)
        await shown(site, *an_answer(204, {}, ()), by=by, method="DELETE", path="/v1/responses/a")
        encoded = EVENTS | {"content-encoding": "gzip"}
        await shown(site, *an_answer(headers=encoded, pieces=(b"\x1f\x8b", b"xyz")), by=by)
        rows = site.rows()
        assert site.outcomes == {"stop": 3, "length": 1}
        assert [row["output_tokens"] for row in rows] == [3, 3, 0, 0]

    check(test, tmp_path)


@BY
def test_trailers_end_an_answer(by):
    async def test(site):
        answer = an_answer(headers=EVENTS, pieces=STREAM, ends=False)
        stream = await shown(site, *answer, trailers("response_trailers"), by=by)
        assert site.outcomes == {"stop": 1}
        assert (stream.kinds[-1:] == ["response_trailers"]) == (by == "itself")

    check(test)


REJECTED = {"rejected": 1}
FAILED = {"failed": 1}


@BY
@pytest.mark.parametrize(
    ("status", "body", "outcome", "is_ejected", "state"),
    [
        (400, ERROR % (b"too long", b"BadRequestError"), REJECTED, False, None),
        (404, ERROR % (b"The model `m` does not exist.", b"NotFoundError"), REJECTED, False, None),
        (422, b"{}", REJECTED, False, None),
        (429, b"", FAILED, False, "full"),
        (503, b"upstream connect error", FAILED, False, "full"),
        (500, b"<html>", FAILED, True, "ejected"),
        (502, b"", FAILED, True, "ejected"),
        (401, b"", FAILED, True, "ejected"),
        (302, b"", FAILED, True, "ejected"),
    ],
)
def test_errors_are_blamed_on_whom_the_gateway_blames(by, status, body, outcome, is_ejected, state):
    async def test(site):
        stream = await shown(site, *an_answer(status, JSON, (body,) if body else ()), by=by)
        assert site.outcomes == outcome
        assert len(site.ejected) == is_ejected
        refused = site.value("refused_total", reason="replicas full")
        assert refused == (1.0 if state == "full" else None)
        states = {*site.gateway.states().values()}
        assert (state in states) == (state is not None)
        assert not any(kind == "immediate_response" for kind in stream.kinds)

    check(test, outlier_ejection=AT_ONCE)


@pytest.mark.parametrize(
    ("pieces", "outcomes", "tokens", "is_ejected"),
    [
        ([a_token(), b'data: {"error":{"code":500}}\n\n'], FAILED, 1, True),
        ([a_token() + b'data: {"error":{"code":500}}\n\n'], FAILED, 1, True),
        ([b'data: {"error":{"message":"no","code":400}}\n\n'], REJECTED, 0, False),
        ([b'data: {"error":{"code":400}}'], REJECTED, 0, False),
        ([b": nothing\n\n"], FAILED, 0, True),
        ([], FAILED, 0, True),
        ([a_token()], {"stop": 1}, 1, False),
        ([b"\xff\xfe\n", b"x"], {"stop": 1}, 2, False),
    ],
)
@BY
def test_errors_in_streams_are_told_from_ends(by, pieces, outcomes, tokens, is_ejected, tmp_path):
    async def test(site):
        await shown(site, *an_answer(headers=EVENTS, pieces=pieces), by=by)
        assert (site.outcomes, len(site.ejected)) == (outcomes, is_ejected)
        assert [row["output_tokens"] for row in site.rows()] == [tokens]

    check(test, tmp_path, outlier_ejection=AT_ONCE)


@BY
@pytest.mark.parametrize("num_shown", [0, 1, 2, 4])
def test_who_leaves_is_not_answered(by, num_shown, tmp_path):
    async def test(site):
        answer = an_answer(headers=EVENTS, pieces=STREAM)[:num_shown]
        stream = await shown(site, *answer, by=by)
        await turns()
        assert (site.outcomes, site.ejected) == ({"abort": 1}, [])
        stream.call.close()  # Streams may be said to be over more than once.
        assert [row["output_tokens"] for row in site.rows()] == [min(max(num_shown - 1, 0), 2)]

    check(test, tmp_path, outlier_ejection=AT_ONCE)


def test_a_request_that_is_left_before_it_is_complete_is_none():
    async def test(site):
        for messages in ((), (a_head(),), (a_head(), a_piece(b"{", ends=False))):
            site.stream(*messages).close()
        await turns()
        assert (site.outcomes, site.gateway.num_offered) == ({}, 0)

    check(test)


def test_a_request_that_is_left_in_the_turn_in_which_it_came_leaves_nothing():
    async def test(site):
        stream = site.stream(a_head(), a_piece(BODY))
        stream.close()
        await turns()
        assert (stream.sent, site.gateway.num_offered) == ([], 0)

    check(test)


def heads_only(site, status=200, **more):
    return site.ask(mode=BUFFERED, answer_mode=NONE, **more), an_answer(status)[:1]


@pytest.mark.parametrize(
    ("status", "outcome", "last"),
    [
        (200, "stop", "close"), (200, "stop", "trailers"), (404, "rejected", "close"),
        (400, "rejected", "trailers"), (500, "failed", "close"), (204, "stop", "close"),
    ],
)  # fmt: skip
def test_heads_alone_tell_when_an_answer_begins_and_ends(status, outcome, last, tmp_path):
    async def test(site):
        for _ in range(2):
            asks, head = heads_only(site, status)
            stream = await asks
            head[0].response_headers.headers.headers[1].raw_value = b"text/event-stream"
            stream.say(*head)
            assert sum(site.loads.values()) == 1
            if last == "trailers":
                stream.say(trailers("response_trailers"))
            stream.close()
            await turns()
        assert site.outcomes == {outcome: 2}
        # What is not found may be the route, or what the request names.
        assert not site.gateway._placement.availability.lacks
        assert [row["output_tokens"] for row in site.rows()] == [0, 0]

    check(test, tmp_path, places=[A])


def test_where_another_filter_never_shows_the_answer_it_counts_as_abandoned(monkeypatch):
    monkeypatch.setattr(exchange, "_OBSERVED_S", 0.02)

    async def test(site):
        stream = await site.ask(answer_mode=NONE)
        stream.close()
        assert sum(site.loads.values()) == 1
        await site.until(lambda: site.outcomes == {"abort": 1})
        late = await site.observe(stream, *an_answer())
        assert site.outcomes == {"abort": 1}
        late.close()
        assert late.status == 0

    check(test)


def test_one_that_has_begun_in_time_may_take_its_time(monkeypatch):
    monkeypatch.setattr(exchange, "_OBSERVED_S", 0.0)

    async def test(site):
        stream = await site.ask(answer_mode=NONE)
        observer = await site.observe(stream)
        stream.close()
        await turns(50)
        observer.say(*an_answer())
        assert observer.status == 0  # It is not kept open.
        await turns()
        assert site.outcomes == {"stop": 1}

    check(test)


def test_observers_of_what_is_not_known_or_known_twice_do_no_harm():
    async def test(site):
        unknown = a_head({"x-gateway-decision-id": "\xff"}, ends=True)
        unknown.observability_mode = True
        odd = site.stream(unknown, *an_answer(), trailers())
        first = await site.ask(answer_mode=NONE)
        second = await site.ask(answer_mode=NONE)
        one = await site.observe(first, *an_answer(headers=EVENTS, pieces=STREAM)[:2])
        other = await site.observe(first, *an_answer(headers=EVENTS, pieces=STREAM)[:2])
        other.close()
        first.close()
        await turns()
        assert site.outcomes == {"abort": 1}
        one.say(*an_answer(headers=EVENTS, pieces=STREAM)[2:])
        for stream in (one, odd, second):
            stream.close()
        await turns()

    check(test)


def test_an_observer_stays_with_its_first_request():
    async def test(site):
        first, second = [await site.ask(answer_mode=NONE) for _ in range(2)]
        observer = await site.observe(first)
        observer.say(a_head({"x-gateway-decision-id": second.decision}, ends=True))
        first.close()
        observer.close()
        await turns()
        assert site.outcomes == {"abort": 1}
        second.say(*an_answer()[:1])
        second.close()
        await turns()
        assert site.outcomes == {"abort": 1, "stop": 1}

    check(test)


def test_a_second_head_is_none():
    async def test(site):
        stream = site.stream(a_head(), a_piece(BODY), a_head(), a_piece(BODY), a_head(ends=True))
        await site.until(lambda: stream.placed)
        stream.close()
        await turns()
        assert site.outcomes == {"abort": 1}

    check(test)


SERVED = pytest.mark.parametrize("by", ["metadata", "attribute"])


@SERVED
@pytest.mark.parametrize("max_retries", [0, 2])
def test_a_request_counts_where_it_is_answered(by, max_retries, tmp_path):
    async def test(site):
        stream = await site.ask()
        picked, other, _ = stream.placed
        head, *rest = an_answer(headers=EVENTS, pieces=STREAM, served=other, by=by)
        stream.say(head, rest[0])
        await turns()
        assert site.loads == dict.fromkeys(PLACES, 0) | {other: 1}
        stream.say(*rest[1:])
        await turns()
        assert site.outcomes == {"failed": 1, "stop": 1}
        assert site.ejected == [picked]
        assert stream.placed == [picked, other, stream.placed[2]]  # It is said once.
        assert stream.handed_back("response_body") == b"".join(STREAM)
        stream.close()
        rows = site.rows()
        assert [(row["attempt"], row["output_tokens"]) for row in rows] == [(0, 0), (1, 2)]

    check(test, tmp_path, limits={"max_retries": max_retries}, outlier_ejection=AT_ONCE)


@SERVED
@pytest.mark.parametrize("served", ["", "127.0.0.1:9", "\u00fc", "the same"])
def test_an_answer_of_an_unknown_endpoint_counts_where_it_was_picked(by, served):
    async def test(site):
        stream = await site.ask()
        place = stream.placed[0] if served == "the same" else served
        stream.say(*an_answer(served=place, by=by))
        stream.close()
        await turns()
        assert (site.outcomes, site.ejected) == ({"stop": 1}, [])

    check(test, limits={"max_retries": 0}, outlier_ejection=AT_ONCE)


def test_all_that_is_shown_at_once_counts_where_it_is_answered():
    async def test(site):
        stream = await site.ask()
        stream.say(*an_answer(headers=EVENTS, pieces=STREAM, served=stream.placed[1]))
        stream.close()
        await turns()
        assert site.outcomes == {"failed": 1, "stop": 1}
        gone = await site.ask()
        gone.say(*an_answer(headers=EVENTS, pieces=STREAM, served=gone.placed[1])[:2])
        gone.close()
        await turns()
        assert site.outcomes == {"failed": 2, "stop": 1, "abort": 1}

    check(test)


@pytest.mark.parametrize("queue", [None, {"max_wait_s": 60.0}])
def test_an_endpoint_that_answers_already_needs_no_room(queue):
    async def test(site):
        held = [await site.ask() for _ in range(2)]
        one, other = (stream.placed[0] for stream in held)
        held[0].say(*an_answer(headers=EVENTS, pieces=STREAM, served=other)[:2])
        await turns()
        assert site.loads == {one: 0, other: 2}
        held[0].say(*an_answer(headers=EVENTS, pieces=STREAM)[2:])
        await turns()
        assert site.outcomes == {"failed": 1, "stop": 1}
        for stream in held:
            stream.close()

    check(test, places=[A, B], pool={"max_ongoing": 1}, queue=queue)


def test_a_turn_of_a_session_counts_where_it_is_answered():
    async def test(site):
        headers = {"x-session-id": "s"}
        for number in range(3):
            stream = await site.ask(headers=headers)
            other = next(place for place in PLACES if place != stream.placed[0])
            stream.say(*an_answer(served=other))
            await turns()
            assert site.outcomes == {"failed": 1 + number, "stop": 1 + number}
            stream.close()
        assert site.gateway.sessions.describe(0.0)["replicas"]

    check(test, sessions={})


def test_an_endpoint_outside_of_the_subset_or_that_drains_counts_where_it_answers():
    async def test(site):
        stream = await site.ask(subset=[A])
        backend = site.gateway.backends["theirs"]
        other = await site.ask(subset=[B])
        backend.change([f"http://{B}"], adds=False)
        site.gateway.refresh()
        stream.say(*an_answer(served=B))
        await turns()
        assert site.outcomes == {"failed": 1, "stop": 1}
        other.close()
        await turns()
        site.gateway.refresh()
        assert B not in site.loads

    check(test)


def test_one_that_was_ejected_meanwhile_may_still_answer():
    async def test(site):
        streams = [await site.ask(subset=[C]) for _ in range(3)]
        streams[0].say(*an_answer(500))
        await turns()
        assert site.ejected == [C]
        streams[1].say(*an_answer())
        streams[2].say(*an_answer(served=A))
        await turns()
        assert site.outcomes == {"failed": 2, "stop": 2}
        for stream in streams:
            stream.close()

    check(test, outlier_ejection=AT_ONCE)


def test_an_answer_that_changes_its_place_has_failed():
    async def test(site):
        stream = await site.ask()
        head, *rest = an_answer(headers=EVENTS, pieces=STREAM, served=stream.placed[0])
        stream.say(head, rest[0], *an_answer(served=stream.placed[1]))
        stream.close()
        await turns()
        assert site.outcomes == {"failed": 1}

    check(test)


def test_what_comes_after_the_time_of_a_request_counts_no_more(tmp_path):
    async def test(site):
        stream = await site.ask()
        head, *rest = an_answer(headers=EVENTS, pieces=STREAM)
        stream.say(head, rest[0])
        await site.until(lambda: site.outcomes == {"timeout": 1})
        stream.say(*rest)
        assert stream.handed_back("response_body") == STREAM[0] + b"".join(STREAM)
        stream.close()
        assert [row["output_tokens"] for row in site.rows()] == [1]

    check(test, tmp_path, limits={"timeout_s": 0.1})


def test_a_gateway_that_ends_counts_those_that_it_cuts_off():
    async def test(site):
        stream = await site.ask()
        stream.say(*an_answer(headers=EVENTS, pieces=STREAM)[:2])
        assert await site.gateway.drain(0.0) == 1
        assert site.outcomes == {"cut_off": 1}
        stream.close()

    check(test)


@pytest.mark.parametrize("mode", [NONE, STREAMED, BUFFERED, FULL_DUPLEX_STREAMED])
def test_every_message_of_an_answer_is_answered_in_its_mode(mode):
    async def test(site):
        stream = await site.ask(answer_mode=mode)
        num_sent = len(stream.sent)
        stream.say(*an_answer(ends=False), trailers("response_trailers"))
        kinds = ["response_headers", "response_body", "response_trailers"]
        assert stream.kinds[num_sent:] == kinds
        body = stream.sent[num_sent + 1].response_body.response
        assert body.HasField("body_mutation") == (mode == FULL_DUPLEX_STREAMED)
        stream.close()

    check(test)
