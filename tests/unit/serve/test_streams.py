"""Answers that come bit by bit: every form passes, and each end is what it is."""

import asyncio
import gzip
import json
from types import SimpleNamespace

import pytest
from unit.raw_endpoint import RawCaller
from unit.serve.test_bytes_through import CHAT, END, STREAM, a_delta, an_event, run
from unit.serve.test_serve_external import BODY
from unit.serve.test_serve_external import run as run_stubs

from serve_app.cluster import Deadlines
from serve_app.gateway.exchange import Call, InferenceRequest
from serve_app.gateway.faults import EndpointError
from serve_app.gateway.forwarding import ResponseTimer
from serve_app.gateway.generation import Refused, RequestRejected, Unanswerable, Unserved
from serve_app.gateway.sse import ErrorEvent, EventPeek
from serve_app.gateway.upstream import Connection, Origin
from serve_app.http.answering import _error_event

EVENTS = b"content-type: text/event-stream\r\n"


def streams(endpoint, *pieces, headers=b"", framing="chunked", **fields):
    endpoint.pieces, endpoint.framing, endpoint.headers = pieces, framing, EVENTS + headers
    endpoint.hangs = endpoint.breaks = False
    for name, value in fields.items():
        setattr(endpoint, name, value)


def counted(gateway, name, **labels):
    return gateway.metrics.registry.get_sample_value(
        f"tokenyard_{name}", {"pool": "theirs", **labels}
    )


def typed(name, **fields):
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


FORMS = {
    "several lines of data": (b'data: {"choices":\ndata: [{"text": "a"}]}\n\n' * 3, 3),
    "carriage returns": (b'data: {"choices":[{"text":"a"}]}\r\r' * 3, 3),
    "other fields": (b'event: message\nid: 5\nretry: 9\ndata:{"choices":[{"text":"a"}]}\n\n', 1),
    "no JSON": (b"data: {\n\n", 1),
    "odd JSON": (b'data: [1]\n\ndata: {"choices":["x"]}\n\ndata: {"usage":3}\n\n', 3),
    "another API": (b'data: {"candidates":[{"text":"a"}]}\n\n' * 4, 4),
    "events of audio": (
        typed("transcript.text.done", text="a", usage={"type": "duration", "seconds": 9}), 1,
    ),
    "no events": (b'{"text":"a"}\n{"text":"b"}\n', 2),
    "no end of the last line": (b'data: {"choices":[{"text":"a"}]}', 1),
    "a choice that is not ended": (
        an_event(choices=[{"index": 0, "text": "a"}, {"index": 1, "text": "a"}])
        + an_event(choices=[{"index": 0, "text": "", "finish_reason": "stop"}]), 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_what_is_whole_passes_whether_or_not_it_is_understood(name):
    data, num_tokens = FORMS[name]

    async def test(port, gateway, endpoints):
        streams(endpoints[0], data)
        async with RawCaller.to(port) as caller:
            status, _, answer = await caller.ask(CHAT, STREAM)
        assert (status, answer) == (200, data)
        assert counted(gateway, "output_tokens_total") == num_tokens
        assert counted(gateway, "ejections_total") is None

    run(test)


@pytest.mark.parametrize("coding", [b"gzip", b"br", b"zstd"])
def test_a_stream_that_is_compressed_passes_as_it_comes(coding):
    data = gzip.compress(b"".join([a_delta(content="a"), *END]))

    async def test(port, gateway, endpoints):
        streams(endpoints[0], data[:9], headers=b"content-encoding: %b\r\n" % coding, hangs=True)
        async with RawCaller.to(port) as caller:
            _, headers = await caller.begin(CHAT, STREAM)
            # Its first piece is there while the last one is not.
            assert await caller.reader.readexactly(14) == b"9\r\n" + data[:9] + b"\r\n"
        streams(endpoints[0], data[:9], data[9:], headers=b"content-encoding: %b\r\n" % coding)
        async with RawCaller.to(port) as caller:
            status, headers, answer = await caller.ask(CHAT, STREAM)
        assert (status, answer, headers[b"content-encoding"]) == (200, data, coding)
        # No event can be added to what is compressed.
        streams(endpoints[0], data[:9], headers=b"content-encoding: gzip\r\n", breaks=True)
        async with RawCaller.to(port) as caller:
            with pytest.raises(asyncio.IncompleteReadError):
                await caller.ask(CHAT, STREAM)

    run(test)


ENDED = {
    "usage": [a_delta(content="a"), END[0], b'data: {"choi'],
    "both choices": [
        an_event(choices=[{"index": index, "text": text, "finish_reason": reason}])
        for text, reason in (("a", None), ("", "stop")) for index in (0, 1)
    ],
    "responses": [typed("response.completed", response={"usage": {"output_tokens": 2}})],
}  # fmt: skip
CUT = {
    "no end": [a_delta(content="a")],
    "one choice": [
        an_event(choices=[{"index": 0, "text": "a"}, {"index": 1, "text": "a"}]),
        an_event(choices=[{"index": 0, "text": "", "finish_reason": "stop"}]),
    ],
    "an event": [a_delta(content="a"), b'data: {"choi'],
}


@pytest.mark.parametrize("name", ENDED)
def test_an_answer_whose_connection_breaks_after_its_end_is_whole(name):
    async def test(port, gateway, endpoints):
        streams(endpoints[0], *ENDED[name], breaks=True)
        async with RawCaller.to(port) as caller:
            status, _, answer = await caller.ask(CHAT, STREAM)
        assert (status, answer) == (200, b"".join(ENDED[name]).removesuffix(b'data: {"choi'))
        assert counted(gateway, "ejections_total") is None

    run(test)


@pytest.mark.parametrize(
    ("name", "framing"), [*[(one, "chunked") for one in CUT], ("no end", "close")]
)
def test_an_answer_that_is_cut_says_so(name, framing):
    async def test(port, gateway, endpoints):
        streams(endpoints[0], *CUT[name], framing=framing, breaks=True)
        async with RawCaller.to(port) as caller:
            status, _, answer = await caller.ask(CHAT, STREAM)
        whole, _, said = answer.rpartition(b"data: ")
        assert (status, whole) == (200, b"".join(CUT[name]).removesuffix(b'data: {"choi'))
        assert json.loads(said)["error"]["type"] == "server_error"
        assert counted(gateway, "ejections_total") == 1

    run(test, outlier_ejection={"consecutive_failures": 1})


def test_an_answer_that_says_itself_that_it_failed_ends_by_that():
    failed = [
        typed("response.output_text.delta", delta="a"),
        typed("response.failed", response={"error": {"message": "bad grammar"}}),
    ]

    async def test(port, gateway, endpoints):
        streams(endpoints[0], *failed)
        async with RawCaller.to(port) as caller:
            asked = await caller.ask(b"/v1/responses", b'{"model":"m","input":"a","stream":true}')
        assert (asked[0], asked[2]) == (200, b"".join(failed))
        assert counted(gateway, "ejections_total") is None
        labels = {"service_class": "default", "outcome": "failed"}
        assert counted(gateway, "requests_total", **labels) == 1

    run(test)


MESSAGE = [
    typed("message_start", message={"usage": {"input_tokens": 9, "output_tokens": 1}}),
    typed("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    typed("ping"),
    typed("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"}),
    typed("content_block_delta", index=0, delta={"type": "text_delta", "text": "b"}),
    typed("content_block_stop", index=0),
]
STOP = typed("message_delta", delta={"stop_reason": "max_tokens"}, usage={"output_tokens": 7})


def test_messages_of_anthropic_are_understood():
    peek = EventPeek()
    for event, num_tokens in zip(MESSAGE, [0, 0, 0, 1, 2, 3], strict=True):
        peek.feed(event)
        # After the first token nobody looks what an event is, until one tells of all.
        assert (peek.num_tokens, peek.has_ended) == (num_tokens, False)
    peek.feed(STOP)
    assert (peek.num_tokens, peek.finish_reason, peek.is_complete) == (7, "length", True)
    peek.feed(typed("message_stop"))
    assert peek.finish_reason == "length"


@pytest.mark.parametrize(
    ("event", "code", "kind"),
    [
        (an_event(error={"message": "no", "type": "BadRequestError", "code": 400}), 400,
         "BadRequestError"),
        (an_event(object="error", message="no", type="BadRequestError", code=400), 400,
         "BadRequestError"),
        (typed("error", error={"type": "overloaded_error", "message": "no"}), None,
         "overloaded_error"),
        (typed("error", code="server_error", message="no", param=None), "server_error", "error"),
        (b'error: {"code":400,"message":"no","type":"exceed_context_size_error"}\n\n', 400,
         "exceed_context_size_error"),
        (b'data: {"error":\ndata: {"message": "no", "code": "x"}}\n\n', "x", None),
        (b'data: {"error":"no"}\n\n', None, None), (b"event: error\ndata: no\n\n", None, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", [b"", a_delta(content="a"), b"".join(MESSAGE)])
def test_an_event_of_an_error_says_what_it_is(event, code, kind, before):
    peek = EventPeek()
    peek.feed(before)
    with pytest.raises(ErrorEvent) as told:
        peek.feed(b": a\n\n" + event)
    error = EndpointError.of(told.value.event)
    assert (error.message, error.code, error.type) == ("no", code, kind)
    assert told.value.before == b": a\n\n"


def test_the_head_and_comments_of_an_endpoint_come_at_once_where_that_is_asked_for():
    async def test(port, gateway, endpoints):
        for one in endpoints:
            streams(one, b": wait\n\n", hangs=True)
        async with RawCaller.to(port) as caller:
            status, _ = await caller.begin(CHAT, STREAM)
            assert (status, await caller.reader.readline()) == (200, b"8\r\n")
        for one in endpoints:
            streams(one, b": wait\n\n", an_event(error={"message": "no"}))
        async with RawCaller.to(port) as caller:
            status, _, answer = await caller.ask(CHAT, STREAM)
        assert status == 200
        assert answer.startswith(b': wait\n\ndata: {"error":{"message":"an endpoint of pool')
        assert sum(len(one.asked) for one in endpoints) == 2

    run(test, 2, commit="first_byte")


COMMENT = b": keep-alive\n\n"
COMMENTS = {"sse_keep_alive_interval_s": 0.05}


def test_after_comments_of_the_gateway_another_endpoint_can_still_answer():
    async def test(port, gateway, endpoints):
        broken, well = endpoints
        streams(broken, b": theirs\n\n", breaks=True, gap_s=0.3)
        streams(well, a_delta(content="a"), *END)
        answers = []
        async with RawCaller.to(port) as caller:
            for _ in range(2):
                status, headers, answer = await caller.ask(CHAT, STREAM)
                assert (status, headers[b"content-type"][:17]) == (200, b"text/event-stream")
                assert answer.replace(COMMENT, b"") == b"".join(well.pieces)
                answers.append(answer)
        assert len(broken.asked) == 1
        assert any(one.startswith(COMMENT) for one in answers)

    ejection = {"base_s": 60.0, "consecutive_failures": 1}
    run(test, 2, gateway=COMMENTS, outlier_ejection=ejection)


def test_a_caller_that_leaves_while_it_reads_comments_is_gone():
    async def test(port, gateway, endpoints):
        streams(endpoints[0], b": theirs\n\n", hangs=True)
        async with RawCaller.to(port) as caller:
            await caller.begin(CHAT, STREAM)
            assert await caller.reader.readline() == b"e\r\n"
        while not endpoints[0].num_gone or gateway.in_flight:
            await asyncio.sleep(0.01)

    run(test, gateway=COMMENTS)


@pytest.mark.parametrize(("status", "says"), [(400, "too long"), (500, "answered 500")])
def test_what_goes_wrong_after_a_comment_is_an_event(status, says):
    async def test(client, gateway, endpoints):
        endpoints[0].delay_s, endpoints[0].status = 0.5, status
        endpoints[0].script = (b'{"object":"error","message":"too long","type":"T"}',)
        endpoints[0].headers = {"content-type": "application/json"}
        answer = await client.post("/v1/completions", json=BODY)
        comments, _, event = answer.text.rpartition("data: ")
        assert (answer.status_code, comments.replace(COMMENT.decode(), "")) == (200, "")
        assert comments
        assert says in json.loads(event)["error"]["message"]
        # What is no stream gets its status.
        answer = await client.post("/v1/completions", json={**BODY, "stream": False})
        assert answer.status_code == (400 if status == 400 else 503)

    run_stubs(test, gateway=COMMENTS)


def test_an_answer_that_is_no_stream_cannot_follow_comments():
    async def test(client, gateway, endpoints):
        endpoints[0].delay_s, endpoints[0].script = 0.5, (b"{}",)
        endpoints[0].headers = {"content-type": "application/json"}
        answer = await client.post("/v1/completions", json=BODY)
        assert "something else than a stream" in answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")

    run_stubs(test, gateway=COMMENTS)


REJECTED = RequestRejected(400, (), b'{"error":{"message":"no","type":"T","code":"c"}}')


@pytest.mark.parametrize(
    ("path", "error", "event"),
    [
        (CHAT, Unserved("no"), {"error": {
            "message": "no", "type": "server_error", "param": None, "code": None}}),
        (CHAT, REJECTED, {"error": {"message": "no", "type": "T", "param": None, "code": "c"}}),
        (b"/v1/messages?beta=true", Unserved("no"), {
            "type": "error", "error": {"type": "api_error", "message": "no"}}),
        (b"/v1/messages", Refused("no", 1), {
            "type": "error", "error": {"type": "rate_limit_error", "message": "no"}}),
        (b"/v1/responses", Unanswerable("no"), {
            "type": "error", "code": "invalid_request_error", "message": "no", "param": None,
            "sequence_number": 0}),
    ],
)  # fmt: skip
def test_an_error_has_the_form_of_its_route(path, error, event):
    written = _error_event(path, error)
    name, _, data = written.decode().rpartition("data: ")
    assert json.loads(data) == event
    assert name == ("" if path == CHAT else "event: error\n")
    with pytest.raises(ErrorEvent, match="error event"):
        EventPeek().feed(written)


class Loop:
    """A clock that is set, and the timer that waits for it."""

    def __init__(self):
        self.now_s, self.at_s, self.call = 0.0, 0.0, None

    def time(self):
        return self.now_s

    def call_at(self, at_s, call):
        self.at_s, self.call = at_s, call
        return self

    def call_later(self, after_s, call):
        return self.call_at(self.now_s + after_s, call)

    def cancel(self):
        self.call = None

    def run(self, until_s):
        while self.call is not None and self.at_s <= until_s:
            self.now_s, call = max(self.at_s, self.now_s), self.call
            self.call = None
            call()
        self.now_s = until_s


@pytest.fixture
def waiting(monkeypatch):
    """A clock, a connection on which an answer is waited for, and how to begin."""
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    connection = Connection(Origin.of("http://127.0.0.1:1"))
    connection._waiter = asyncio.Future(loop=asyncio.new_event_loop())

    def begin(stream=True, prefill_s=0.0):
        request = InferenceRequest("1", [1], 8, Call(CHAT, b"", b"", stream))
        attempt = SimpleNamespace(request=request, note_send=lambda: None)
        timer = ResponseTimer(Deadlines(), attempt, prefill_s)
        timer.watch(connection)
        return timer

    yield loop, connection, begin
    connection._waiter.get_loop().close()


def test_a_prompt_has_as_much_longer_as_it_takes_to_read(waiting):
    loop, connection, begin = waiting
    begin(prefill_s=100.4)
    loop.run(159.0)
    assert connection._error is None
    loop.run(161.0)
    assert str(connection._error) == "sent no token in 160 s"


def test_comments_put_the_first_token_off(waiting):
    loop, connection, begin = waiting
    timer = begin()
    loop.run(50.0)
    timer.wait_again()
    loop.run(109.0)
    assert connection._error is None
    loop.run(111.0)
    assert str(connection._error) == "sent no token in 60 s"


@pytest.mark.parametrize("stream", [True, False])
def test_an_endpoint_that_answers_its_scraper_has_the_time_of_a_whole_answer(waiting, stream):
    loop, connection, begin = waiting
    begin(stream)
    for now_s in range(600):
        connection.origin.scraped_s = float(now_s)
        loop.run(now_s + 0.5)
    assert connection._error is None
    loop.run(601.0)
    assert str(connection._error) == "was not done in 600 s"


def test_an_endpoint_that_falls_silent_while_it_is_late_is_given_up(waiting):
    loop, connection, begin = waiting
    begin()
    connection.origin.scraped_s = 80.0
    loop.run(84.0)
    assert connection._error is None
    loop.run(87.0)
    assert str(connection._error) == "sent no token in 60 s"


def test_a_caller_of_http_1_0_gets_a_body_until_the_connection_closes():
    async def test(port, gateway, endpoints):
        streams(endpoints[0], a_delta(content="a"), a_delta(content="b"), *END)
        head = b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % (CHAT, len(STREAM))
        for body in (STREAM, STREAM.replace(b"true", b"null")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.replace(b"%d" % len(STREAM), b"%d" % len(body)) + body)
            told, _, answer = (await reader.read()).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in told
            assert answer == b"".join(endpoints[0].pieces)
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
        told, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(answer) in told + b"\r\n"
        writer.close()

    run(test)
