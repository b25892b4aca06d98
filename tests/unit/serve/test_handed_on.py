"""What is handed on beside chats: other routes, forms, headers, encodings and names."""

import asyncio
import gzip
import json

import pytest
from pydantic import ValidationError
from unit.raw_endpoint import RawCaller
from unit.serve.test_bytes_through import MESSAGES, WHOLE, run
from unit.serve.test_serve_external import PROFILE, a_cluster
from unit.serve.test_serve_external import run as run_with_stubs
from unit.serve.test_serve_gateway import check

from serve_app.cluster import EngineProfile
from serve_app.gateway.sse import peek_whole
from serve_app.http import data_path
from serve_app.http.peek import peek_form
from serve_app.http.reasons import BadRequest

JSON_ROUTES = (
    "/v1/messages", "/v1/messages/count_tokens", "/v1/audio/speech", "/v1/moderations", "/pooling",
    "/classify", "/v2/rerank", "/v2/embed", "/generate", "/v1/images/generations",
)  # fmt: skip


CHAT = "/v1/chat/completions"


def a_chat(**fields):
    return json.dumps({"model": "m", "messages": MESSAGES, "max_tokens": 9} | fields).encode()


BODY = a_chat()


async def ask(port, method, path, body=b"", headers=b""):
    async with RawCaller.to(port) as caller:
        status, found, answer = await caller.ask(path.encode(), body, headers, method.encode())
    return status, found, answer


@pytest.mark.parametrize("path", JSON_ROUTES)
def test_a_route_arrives_as_it_is(path):
    async def test(port, gateway, endpoints):
        endpoints[0].pieces = (WHOLE,)
        status, _, answer = await ask(port, "POST", path, BODY)
        assert (status, answer) == (200, WHOLE)
        first, _, arrived = endpoints[0].asked[-1]
        assert (first, arrived) == (f"POST {path} HTTP/1.1".encode(), BODY)
        assert (await ask(port, "GET", path))[0] == 405

    run(test)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/version"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1?include=a&stream=true"), ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"), ("GET", "/v1/responses/a%0d%0ax:%20y"),
        ("GET", "/v1/files"), ("DELETE", "/v1/files/file-1"), ("POST", "/v1/files/a/b"),
        ("POST", "/odd"),
    ],
)  # fmt: skip
def test_a_route_without_a_body_arrives_as_it_is(method, path):
    async def test(port, gateway, endpoints):
        status, _, _ = await ask(port, method, path)
        first, headers, body = endpoints[0].asked[-1]
        assert (status, first, body) == (200, f"{method} {path} HTTP/1.1".encode(), b"")
        assert (b"content-length" in headers) == (method == "POST")

    run(test, gateway={"routes": ["/v1/files", "/v1/files/", "/odd"]}, model="m2")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files",
        "/v1/responses/../metrics",
        "/v1/responses/%2e%2e/metrics",
        "/v1/a/../responses/",
    ],
)
def test_an_unknown_route_is_refused_in_openais_envelope(path):
    async def test(port, gateway, endpoints):
        status, _, answer = await ask(port, "POST", path, b"{}")
        error = json.loads(answer)["error"]
        assert (status, endpoints[0].asked, error["type"]) == (404, [], "invalid_request_error")
        assert error["message"].startswith("Invalid URL (POST /v1/")
        status, _, answer = await ask(port, "POST", "/elsewhere", b"{}")
        assert (status, answer) == (404, b'{"detail":"Not Found"}')
        async with RawCaller.to(port) as caller:
            assert (await caller.begin(b"/v1/responses/resp_1", b"", method=b"HEAD"))[0] == 405

    run(test)


def test_routes_of_the_gateway_itself_cannot_be_handed_on():
    for one in ("/v1/policy", "/v1/", "/health"):
        with pytest.raises(ValueError, match=r"gateway\.routes: the gateway answers"):
            run(None, gateway={"routes": [one]})
    for one in ("v1/files", "/a b", "/a?b", "/"):
        with pytest.raises(ValidationError, match="routes"):
            a_cluster([], {}, gateway={"routes": [one]})


def test_a_handed_on_route_needs_the_token_wherever_it_is():
    async def test(port, gateway, endpoints):
        for path in ("/version", "/pooling", "/odd", "/v1/messages"):
            assert (await ask(port, "POST", path, BODY))[0] == 401
            for key in (b"authorization: Bearer secret", b"x-api-key: secret"):
                assert (await ask(port, "POST", path, BODY, key + b"\r\n"))[0] == 200
        assert not {b"authorization", b"x-api-key"} & set(endpoints[0].asked[-1][1])
        wrong = b"x-api-key: other\r\n"
        assert (await ask(port, "POST", "/v1/messages", BODY, wrong))[0] == 401

    run(test, gateway={"routes": ["/odd"]}, tokens=("secret",))


@pytest.mark.parametrize(
    ("body", "headers", "status", "kind"),
    [
        (b"{", b"", 400, "invalid_request_error"),
        (BODY, b"x-service-tier: gold\r\n", 400, "invalid_request_error"),
        (BODY, b"authorization: Bearer wrong\r\n", 401, "authentication_error"),
        (BODY.replace(b'"m"', b'"x"', 1), b"", 404, "not_found_error"),
        (b" " * 5001, b"", 413, "request_too_large"),
    ],
)
def test_what_the_gateway_has_against_a_message_is_in_anthropics_envelope(
    body, headers, status, kind
):
    key = b"x-api-key: secret\r\nanthropic-version: 2023-06-01\r\n"

    async def test(port, gateway, endpoints):
        headers_ = headers if b"Bearer" in headers else key + headers
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            got, _, answer = await ask(port, "POST", path, body, headers_)
            told = json.loads(answer)
            assert (got, told["type"], told["error"]["type"]) == (status, "error", kind)
            assert set(told) == {"type", "error"}
            assert set(told["error"]) == {"type", "message"}
        assert (await ask(port, "POST", "/v1/messages", BODY, key))[0] == 200
        assert endpoints[0].asked[-1][1][b"anthropic-version"] == b"2023-06-01"

    run(test, tokens=("secret",), limits={"max_body_bytes": 5000})


@pytest.mark.parametrize(
    ("answered", "status", "kind"), [(429, 429, "rate_limit_error"), (500, 503, "overloaded_error")]
)
def test_messages_get_anthropics_errors_where_nobody_answers(answered, status, kind):
    async def test(client, gateway, endpoints):
        endpoints[0].status = answered
        refused = await client.post("/v1/messages", json=json.loads(BODY))
        assert (refused.status_code, refused.json()["error"]["type"]) == (status, kind)

    run_with_stubs(test)


def test_a_whole_message_tells_its_tokens_and_that_it_was_cut():
    told = b'{"type":"message","stop_reason":"%b","usage":{"input_tokens":5,"output_tokens":7}}'
    assert peek_whole(told % b"max_tokens")[:2] == (7, "length")
    assert peek_whole(told % b"end_turn")[:2] == (7, "stop")


def test_an_own_pool_refuses_what_it_does_not_understand():
    async def test(client, pools, gateway):
        body = json.loads(BODY)
        message = await client.post("/v1/messages", json=body)
        assert (message.status_code, message.json()["error"]["type"]) == (404, "not_found_error")
        for method, path in (("POST", "/pooling"), ("GET", "/version"), ("GET", "/v1/responses/a")):
            answer = await client.request(method, path, json=body if method == "POST" else None)
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"{path} is not served here"

    check(test)


LINE = b"--a1b2"
SOUND = bytes(range(256)) * 100 + b"\r\n\r\n--a1\r\n"


def a_form(*fields, sound=SOUND):
    parts = [
        b'content-disposition: form-data; name="file"; filename="model.wav"\r\n'
        b"content-type: audio/wav\r\n\r\n" + sound,
        *(b'Content-Disposition: form-data; name="%b"\r\n\r\n%b' % one for one in fields),
    ]
    return b"".join(LINE + b"\r\n" + one + b"\r\n" for one in parts) + LINE + b"--\r\n"


FORM = b'content-type: multipart/form-data; charset=utf-8; boundary="a1b2"\r\n'


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_a_form_goes_to_its_model_which_alone_is_renamed(path):
    async def test(port, gateway, endpoints):
        body = a_form((b"model", b"m"), (b"language", b"de"))
        status, _, _ = await ask(port, "POST", path, body, FORM)
        _, headers, arrived = endpoints[0].asked[-1]
        assert status == 200
        assert headers[b"content-type"] == FORM.split(b": ")[1].strip()
        assert arrived == a_form((b"model", b"whisper-large"), (b"language", b"de"))
        status, _, answer = await ask(port, "POST", path, a_form((b"model", b"x")), FORM)
        assert (status, b"model 'x' is not served here" in answer) == (404, True)
        status, _, answer = await ask(port, "POST", path, body, b"content-type: audio/wav\r\n")
        assert (status, b"neither JSON nor multipart" in answer) == (400, True)

    run(test, model="whisper-large")


def test_a_form_says_whether_it_wants_events():
    kind = "multipart/form-data; boundary=a1b2"
    for said, stream in ((b"true", True), (b"True", True), (b"1", True), (b"false", False)):
        assert peek_form(a_form((b"stream", said)), kind).stream is stream
    known = peek_form(a_form((b"model", b"m"), (b"prompt", "ü".encode())), kind)
    assert (known.stream, known.model, known.fields["prompt"]) == (False, "m", "ü")
    assert "file" not in known.fields
    for odd in (b"", b"--a1b2", b"--a1b2--", LINE * 1000, a_form((b"model", b"m"))[:-30]):
        assert peek_form(odd, kind).model is None
    with pytest.raises(BadRequest, match="boundary"):
        peek_form(b"--", "multipart/form-data")


TIERS = ("auto", "default", "flex", "priority", "scale", "standard", "standard_only")
CLASSES = [{"name": "first", "response_s": 9}, {"name": "flex", "response_s": 99}]


@pytest.mark.parametrize("tier", TIERS)
def test_tiers_of_openai_and_anthropic_mean_the_first_class_unless_one_is_called_so(tier):
    async def test(port, gateway, endpoints):
        assert (await ask(port, "POST", CHAT, a_chat(service_tier=tier)))[0] == 200
        assert gateway.cluster.service_class(tier).name == ("flex" if tier == "flex" else "first")
        assert gateway.cluster.service_class(None).name == "first"
        assert (await ask(port, "POST", CHAT, a_chat(service_tier="gold")))[0] == 400

    run(test, classes=CLASSES)


def test_headers_pass_that_a_pool_wants():
    sent = b"x-session-id: s\r\nX-MyCorp-Tenant: t\r\nx-other: o\r\nx-request-id: r\r\n"

    async def test(port, gateway, endpoints):
        await ask(port, "POST", CHAT, a_chat(), sent)
        headers = endpoints[0].asked[-1][1]
        assert (headers[b"x-session-id"], headers[b"x-mycorp-tenant"]) == (b"s", b"t")
        assert b"x-other" not in headers
        assert headers[b"x-request-id"] == b"r"

    run(test, pool={"pass_headers": ["X-Session-ID", "x-mycorp-tenant", "x-request-id"]})


@pytest.mark.parametrize(
    "name",
    [
        "Authorization", "host", "content-length", "connection", "transfer-encoding", "te",
        "expect", "x-order-key", "X-Order-Key-2", "proxy-authorization", "x-api-key", "a b", "",
    ],
)  # fmt: skip
def test_headers_of_a_connection_or_with_a_key_cannot_be_passed(name):
    with pytest.raises(ValidationError, match="cannot be passed"):
        a_cluster([], {}, pool={"pass_headers": [name]})


def test_an_encoded_body_arrives_decoded_at_an_endpoint():
    async def test(port, gateway, endpoints):
        sent = b"content-encoding: gzip\r\ncontent-type: application/json\r\n"
        for path in (CHAT, "/v1/messages"):
            status, _, _ = await ask(port, "POST", path, gzip.compress(BODY), sent)
            _, headers, arrived = endpoints[0].asked[-1]
            assert (status, arrived, b"content-encoding" in headers) == (200, BODY, False)
            assert headers[b"content-length"] == b"%d" % len(BODY)
        status, _, answer = await ask(
            port, "POST", "/v1/messages", BODY, b"content-encoding: a\r\n"
        )
        assert (status, json.loads(answer)["error"]["type"]) == (415, "invalid_request_error")

    run(test)


RESPONSES = "/v1/responses"


def a_response(number):
    return b'{"object":"response","id":"resp_%d","output":[{"id":"msg_1"}],"usage":null}' % number


def a_response_stream(number):
    created = b'data: {"type":"response.created","response":{"id":"resp_%d","output":[]}}'
    delta = b'data: {"type":"response.output_text.delta","item_id":"msg_1","delta":"a"}'
    done = b'data: {"type":"response.completed","response":{"id":"resp_%d","usage":null}}'
    return b"\n\n".join((b": comment", created % number, delta, done % number, b""))


@pytest.mark.parametrize("stream", [False, True])
def test_what_goes_on_from_a_response_sticks_to_its_endpoint(stream):
    async def test(port, gateway, endpoints):
        made = {}
        for number in range(6):
            for one in endpoints:
                one.pieces = ((a_response_stream if stream else a_response)(number),)
                kind = b"text/event-stream" if stream else b"application/json"
                one.headers = b"content-type: " + kind + b"\r\n"
            before = [len(one.asked) for one in endpoints]
            body = json.dumps({"model": "m", "input": "a", "stream": stream}).encode()
            assert (await ask(port, "POST", RESPONSES, body))[0] == 200
            after = [len(one.asked) for one in endpoints]
            made[f"resp_{number}"] = [x - y for x, y in zip(after, before, strict=True)].index(1)
        assert len(set(made.values())) > 1
        for one in endpoints:
            one.pieces, one.headers = (a_response(99),), b"content-type: application/json\r\n"
            one.asked.clear()
        for name, place in made.items():
            follow = json.dumps({"model": "m", "input": "b", "previous_response_id": name}).encode()
            for _ in range(3):
                assert (await ask(port, "POST", RESPONSES, follow))[0] == 200
            path = f"{RESPONSES}/{name}"
            assert (await ask(port, "GET", path))[0] == 200
            assert (await ask(port, "POST", f"{path}/cancel"))[0] == 200
            assert (await ask(port, "DELETE", path))[0] == 200
            assert len(endpoints[place].asked) == 6
            endpoints[place].asked.clear()
            assert [len(one.asked) for one in endpoints] == [0, 0, 0]
        # Nobody knows who made this one, so that all may be asked.
        unknown = [ask(port, "GET", f"{RESPONSES}/resp_unknown") for _ in range(6)]
        assert {status for status, *_ in await asyncio.gather(*unknown)} == {200}
        assert sum(len(one.asked) > 0 for one in endpoints) > 1

    run(test, 3)


def test_responses_that_go_on_from_each_other_are_one_session():
    async def test(port, gateway, endpoints):
        for number, previous in enumerate((None, "resp_0", "resp_1", None)):
            endpoints[0].pieces = (a_response(number),)
            body = {"model": "m", "input": "a"} | (
                {"previous_response_id": previous, "user": "one of many"} if previous else {}
            )
            assert (await ask(port, "POST", RESPONSES, json.dumps(body).encode()))[0] == 200
        shown = gateway.sessions.describe(0.0)["sessions"]
        assert sorted(session["turns"] for session in shown) == [1, 3]

    run(test, sessions={"rule": "index_las:lease_s=60"})


def test_a_response_whose_endpoint_is_gone_is_not_found():
    async def test(port, gateway, endpoints):
        endpoints[0].pieces = (a_response(1),)
        await ask(port, "POST", RESPONSES, b'{"model":"m","input":"a"}')
        follow = b'{"model":"m","input":"b","previous_response_id":"resp_1"}'
        backend = gateway.backends["theirs"]
        backend.refresh = lambda table, now_s: None
        gateway.table.keep("theirs", [])
        gateway.table.add("http://other", "theirs", EngineProfile(**PROFILE), 0, 0.0)
        for method, path, body in (
            ("POST", RESPONSES, follow),
            ("GET", f"{RESPONSES}/resp_1", b""),
        ):
            status, _, answer = await ask(port, method, path, body)
            error = json.loads(answer)["error"]
            assert (status, error["type"]) == (404, "invalid_request_error")
            assert "not found" in error["message"]

    run(test)


def test_an_endpoint_that_is_ejected_is_asked_for_its_responses_all_the_same():
    async def test(port, gateway, endpoints):
        for one in endpoints:
            one.pieces = (a_response(1),)
        await ask(port, "POST", RESPONSES, b'{"model":"m","input":"a"}')
        maker = next(one for one in endpoints if one.asked)
        for _ in range(3):
            gateway.outliers.fail(maker.url, gateway.outliers.clock_s())
        assert gateway.outliers.ejected_s(maker.url) > 0
        assert (await ask(port, "GET", f"{RESPONSES}/resp_1"))[0] == 200
        assert len(maker.asked) == 2

    run(test, 2)


def test_the_oldest_responses_are_forgotten(monkeypatch):
    monkeypatch.setattr(data_path, "_MOST_RESPONSES", 2)

    async def test(port, gateway, endpoints):
        for number in (1, 2, 3):
            endpoints[0].pieces = (a_response(number),)
            await ask(port, "POST", RESPONSES, b'{"model":"m","input":"a"}')
        gateway.table.keep("theirs", [])
        gateway.backends["theirs"].refresh = lambda table, now_s: None
        gateway.table.add("http://127.0.0.1:9", "theirs", EngineProfile(**PROFILE), 0, 0.0)
        statuses = [(await ask(port, "GET", f"{RESPONSES}/resp_{one}"))[0] for one in (1, 2, 3)]
        assert statuses[1:] == [404, 404]
        assert statuses[0] != 404

    run(test)


ORIGIN = b"origin: https://chat.example.com\r\n"
PREFLIGHT = ORIGIN + (
    b"access-control-request-method: POST\r\n"
    b"access-control-request-headers: authorization,content-type,x-stainless-os\r\n"
)


def test_pages_of_other_sites_ask_where_that_is_configured():
    async def test(port, gateway, endpoints):
        for path in (CHAT, "/v1/models", "/v1/messages", "/v1/pools"):
            status, headers, _ = await ask(port, "OPTIONS", path, b"", PREFLIGHT)
            assert (status, headers[b"access-control-allow-origin"]) == (
                200,
                b"https://chat.example.com",
            )
            assert b"POST" in headers[b"access-control-allow-methods"]
            assert b"x-stainless-os" in headers[b"access-control-allow-headers"]
            other = PREFLIGHT.replace(b"chat.", b"evil.")
            assert (await ask(port, "OPTIONS", path, b"", other))[0] == 400
        key = b"authorization: Bearer secret\r\n"
        for method, path, body in (("POST", CHAT, BODY), ("GET", "/v1/models", b"")):
            status, headers, _ = await ask(port, method, path, body, ORIGIN + key)
            assert (status, headers[b"access-control-allow-origin"]) == (
                200,
                b"https://chat.example.com",
            )
            status, headers, _ = await ask(port, method, path, body, ORIGIN)
            # The page is told that its key is missing.
            assert (status, headers[b"access-control-allow-origin"]) == (
                401,
                b"https://chat.example.com",
            )
        assert not any(b"access-control" in name for name in (await ask(port, "GET", "/health"))[1])

    run(test, gateway={"cors": {"origins": ["https://chat.example.com"]}}, tokens=("secret",))


def test_without_cors_no_answer_has_its_headers():
    async def test(port, gateway, endpoints):
        assert (await ask(port, "OPTIONS", CHAT, b"", PREFLIGHT))[0] == 405
        _, headers, _ = await ask(port, "POST", CHAT, BODY, ORIGIN)
        assert not any(name.startswith(b"access-control") for name in headers)

    run(test)


def a_delta(text, model):
    delta = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: %b\n\n" % json.dumps({"model": model, "choices": [delta]}).encode()


def test_streams_pass_cors_token_by_token_and_name_the_model_that_was_asked_for():
    said = 'not "model":"their/own" in a text'

    async def test(port, gateway, endpoints):
        tokens = [a_delta(said, "their/own")] * 20
        endpoints[0].pieces = [*tokens, b"data: [DONE]\n\n"]
        endpoints[0].headers = b"content-type: text/event-stream\r\n"
        endpoints[0].gap_s, endpoints[0].framing = 0.005, "chunked"
        status, _, answer = await ask(port, "POST", CHAT, a_chat(stream=True), ORIGIN)
        assert status == 200
        assert answer == a_delta(said, "m") * 20 + b"data: [DONE]\n\n"

    options = {"gateway": {"cors": {"origins": ["*"]}}, "pool": {"rewrite_model": True}}
    run(test, model="their/own", **options)


def test_whole_answers_name_the_model_that_was_asked_for_where_that_is_wanted():
    whole = b'{"model" : "o\\"wn", "usage": {"completion_tokens": 3}, "x": "\\"model\\":\\"own\\""}'

    async def renamed(port, gateway, endpoints):
        endpoints[0].pieces = (whole,)
        status, _, answer = await ask(port, "POST", CHAT, BODY)
        assert (status, answer) == (200, whole.replace(b'"o\\"wn"', b'"m"'))
        assert json.loads(endpoints[0].asked[-1][2])["model"] == 'o"wn'

    async def as_it_is(port, gateway, endpoints):
        endpoints[0].pieces = (whole,)
        assert (await ask(port, "POST", CHAT, BODY))[2] == whole

    run(renamed, model='o"wn', pool={"rewrite_model": True})
    run(as_it_is, model='o"wn')
