"""What is refused before a route sees it, and bodies that would take long to refuse."""

import asyncio
import gzip
import json
import resource
import time
import zlib
from contextlib import asynccontextmanager

import pyarrow as pa
import pytest
from pydantic import ValidationError
from unit.serve.test_serve_gateway import a_body, a_cluster, check

from serve_app.http.auth import Access
from serve_app.http.decide_schema import MAX_BODY_BYTES, RouteMessage
from serve_app.http.intake import (
    MAX_HEADER_BYTES,
    IntakeMiddleware,
    PendingBodies,
    TooMuch,
    route_path,
)
from serve_app.http.openai_schema import ChatBody, CompletionBody
from serve_app.http.peek import peek, read_fields
from serve_app.http.reasons import reason_of
from serve_app.http.regions_schema import RegionsMessage


class Caller:
    """Sends what it is told to an intake, and keeps what comes back."""

    def __init__(self, headers=(), path="/v1/completions"):
        headers = [(b"host", b"localhost"), *headers]
        self.scope = {
            "type": "http", "method": "POST", "path": path, "headers": headers,
            "query_string": b"", "root_path": "", "http_version": "1.1",
            "client": ("127.0.0.1", 1), "server": ("localhost", 80), "scheme": "http",
        }  # fmt: skip
        self.sends = asyncio.Queue()
        self.num_read = 0
        self.sent = []

    def put(self, body=b"", more_body=False):
        self.sends.put_nowait({"type": "http.request", "body": body, "more_body": more_body})

    async def receive(self):
        self.num_read += 1
        return await self.sends.get()

    async def send(self, message):
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return dict(self.sent[0]["headers"])


LENGTH = [(b"content-length", b"100")]


@asynccontextmanager
async def an_intake(timeout_s=60.0, most=8, token=None, max_bytes=MAX_BODY_BYTES):
    bodies_seen = []

    async def app(scope, receive, send):
        bodies_seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def answer(request, error):
        from starlette.responses import PlainTextResponse

        return PlainTextResponse(str(error), status_code=error.status)

    bodies = PendingBodies(timeout_s, most, max_bytes)
    intake = IntakeMiddleware(app, Access(token), bodies, answer)
    yield (lambda caller: intake(caller.scope, caller.receive, caller.send)), bodies_seen


def test_a_wrong_token_is_refused_before_a_byte_of_the_body_is_read():
    async def run():
        async with an_intake(token="secret") as (ask, seen):
            caller = Caller([*LENGTH, (b"authorization", b"Bearer wrong")])
            await ask(caller)
            assert (caller.status, caller.num_read, seen) == (401, 0, [])
            other = Caller(LENGTH, path="/rerank")
            await ask(other)
            assert (other.status, other.num_read, seen) == (401, 0, [])
            assert caller.headers[b"connection"] == b"close"

    asyncio.run(run())


def test_what_is_too_large_by_its_headers_is_refused_without_reading():
    async def run():
        async with an_intake() as (ask, seen):
            large = Caller([(b"content-length", str(MAX_BODY_BYTES + 1).encode())])
            many = Caller([*LENGTH, *[(b"x", b"y" * 1000)] * (MAX_HEADER_BYTES // 1000 + 1)])
            for caller in (large, many):
                await ask(caller)
            assert (large.status, many.status) == (413, 431)
            assert (large.num_read, many.num_read, seen) == (0, 0, [])

    asyncio.run(run())


def test_a_body_that_never_comes_is_given_up():
    async def run():
        async with an_intake(timeout_s=0.05) as (ask, seen):
            caller = Caller(LENGTH)
            caller.put(b"a", more_body=True)
            await ask(caller)
            assert (caller.status, seen) == (408, [])

    asyncio.run(run())


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time goes on only where a test says so."""

    now_s = 0.0

    def time(self):
        return self.now_s


@pytest.mark.parametrize(
    ("num_bytes", "every_s", "status"),
    [
        (250_000 // 4, 0.25, 200),
        (20_000, 1.0, 200),
        (90_000, 5.0, 200),
        (1, 1.0, 408),
        (9_000, 1, 408),
    ],
)
def test_a_slow_body_is_read_as_long_as_it_goes_on(num_bytes, every_s, status):
    """The first is a photo of 3 MB at 2 Mbit/s; others come at less than 16 KiB/s."""

    async def run(loop):
        async with an_intake(timeout_s=10.0, max_bytes=4_000_000) as (ask, seen):
            caller = Caller([(b"content-length", b"3000000")])
            task, sent = asyncio.create_task(ask(caller)), 0
            while sent < 3_000_000 and not task.done():
                sent += num_bytes
                caller.put(b"x" * num_bytes, more_body=sent < 3_000_000)
                loop.now_s += every_s
                for _ in range(20):
                    await asyncio.sleep(0)
            await task
            assert caller.status == status
            assert [len(one) >= 3_000_000 for one in seen] == [True] * (status == 200)

    with asyncio.Runner(loop_factory=Clock) as runner:
        runner.run(run(runner.get_loop()))


PLAIN = b'{"prompt": "aaaa"}' * 50


def by(codec):
    return lambda data: pa.Codec(codec).compress(data, asbytes=True)


ENCODERS = {
    "gzip": gzip.compress, "x-gzip": gzip.compress, "GZIP": gzip.compress, "identity": bytes,
    "deflate": zlib.compress, "zstd": by("zstd"), "br": by("brotli"),
    "gzip, zstd": lambda data: by("zstd")(gzip.compress(data)), "": bytes,
    "zstd,": lambda data: by("zstd")(data[:100]) + by("zstd")(data[100:]),
}  # fmt: skip


@pytest.mark.parametrize("coding", ENCODERS)
def test_an_encoded_body_is_decoded(coding):
    async def run():
        async with an_intake() as (ask, seen):
            body = ENCODERS[coding](PLAIN)
            length = (b"content-length", b"%d" % len(body))
            caller = Caller([length, (b"content-encoding", coding.encode()), (b"x-a", b"b")])
            caller.put(body)
            await ask(caller)
            assert (caller.status, seen) == (200, [PLAIN])
            names = [name for name, _ in caller.scope["headers"]]
            is_decoded = coding not in ("", "identity")
            assert (b"content-encoding" in names) == (not is_decoded)
            assert b"x-a" in names

    asyncio.run(run())


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "br"])
def test_an_encoded_body_that_is_too_large_or_broken_is_refused_early(coding):
    async def refused(body, **options):
        async with an_intake(**options) as (ask, seen):
            caller = Caller([(b"content-encoding", coding.encode())])
            caller.put(body)
            await ask(caller)
            assert seen == []
            return caller.status

    async def run():
        encoded = ENCODERS[coding]
        bomb = encoded(bytes(300 << 20))
        assert len(bomb) < MAX_BODY_BYTES
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert await refused(bomb) == 413
        # Kilobytes on Linux: all of it would take 300 MiB.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
        assert await refused(encoded(PLAIN), max_bytes=len(PLAIN) - 1) == 413
        for broken in (encoded(PLAIN)[:-5], b"garbage of some length", PLAIN):
            assert await refused(broken) == 400

    asyncio.run(run())


@pytest.mark.parametrize(
    ("coding", "named"),
    [
        (b"compress", "'compress'"), (b"gzip, X", "'gzip, x'"), (b"\xff", "'ÿ'"),
        (b"gzip, gzip, gzip", "'gzip, gzip, gzip'"),
    ],
)  # fmt: skip
def test_an_unknown_encoding_is_refused_by_name_without_reading(coding, named):
    async def run():
        async with an_intake() as (ask, seen):
            caller = Caller([(b"content-encoding", coding)])
            await ask(caller)
            assert (caller.status, caller.num_read, seen) == (415, 0, [])
            reason = caller.sent[1]["body"].decode()
            assert reason.startswith(f"content-encoding {named} is not known; send one of gzip, ")

    asyncio.run(run())


def test_of_too_many_bodies_on_their_way_the_oldest_is_given_up_and_others_are_served():
    async def run():
        async with an_intake(most=4) as (ask, seen):
            held = [Caller(LENGTH) for _ in range(20)]
            tasks = [asyncio.create_task(ask(one)) for one in held]
            while sum(task.done() for task in tasks) < 16:
                await asyncio.sleep(0)
            assert [task.done() for task in tasks] == [True] * 16 + [False] * 4
            assert {one.status for one in held[:16]} == {408}
            well = Caller(LENGTH)
            well.put(b"whole")
            await ask(well)
            assert (well.status, seen) == (200, [b"whole"])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_a_body_in_pieces_arrives_whole_and_one_without_a_body_is_not_waited_for():
    async def run():
        async with an_intake() as (ask, seen):
            caller, bare = Caller([(b"transfer-encoding", b"chunked")]), Caller()
            bare.scope["method"] = "GET"
            for piece, more in ((b"a", True), (b"b", True), (b"", False)):
                caller.put(piece, more)
            await ask(caller)
            await ask(bare)
            assert (seen, bare.num_read) == ([b"ab", b""], 0)

    asyncio.run(run())


def test_a_body_that_is_longer_than_it_said_is_refused():
    async def run():
        caller = Caller()
        caller.put(b"x" * (MAX_BODY_BYTES + 1), more_body=True)
        with pytest.raises(TooMuch, match="larger"):
            await PendingBodies(60.0, 8).read(caller.receive)

    asyncio.run(run())


def test_a_length_that_no_float_holds_is_counted_with_a_bound():
    assert peek(read_fields(b'{"max_tokens": 1' + b"0" * 400 + b"}")).max_tokens == 10**9


def test_a_body_that_takes_the_place_of_one_whose_time_is_just_up_is_read():
    async def run():
        bodies, late, other = PendingBodies(60.0, 1), Caller(), Caller()
        first = asyncio.create_task(bodies.read(late.receive, 100))
        await asyncio.sleep(0)
        [deadline] = bodies._waiting
        deadline.reschedule(asyncio.get_running_loop().time())
        other.put(b"x")
        # It begins after the first one's time is up, and before the first one's task knows.
        second = asyncio.create_task(bodies.read(other.receive, 100))
        with pytest.raises(TooMuch):
            await first
        assert await second == b"x"

    asyncio.run(run())


def test_the_gateway_refuses_in_openais_envelope():
    async def test(client, pools, gateway):
        content = b" " * 5001
        answer = await client.post("/v1/completions", content=content)
        assert answer.status_code == 413
        elsewhere = await client.post("/v1/policy", content=b" " * (MAX_BODY_BYTES + 1))
        assert elsewhere.status_code == 413
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert (await client.post("/v1/completions", json=a_body())).status_code == 200

    check(test, limits={"max_body_bytes": 5000})
    limits = a_cluster().limits
    assert (limits.body_timeout_s, limits.max_body_bytes) == (10.0, 16 << 20)


MANY = 300_000
SNAPSHOT = {"replica_id": "a"}
BAD = [
    (CompletionBody, {"model": "x", "prompt": [-1] * MANY}),
    (CompletionBody, {"model": "x", "prompt": "y", "stop": [""] * MANY}),
    (CompletionBody, {"model": "x", "prompt": "y", "metadata": {str(i): 1 for i in range(MANY)}}),
    (CompletionBody, {"model": "x", "prompt": "y"} | {str(i): 1 for i in range(MANY)}),
    (ChatBody, {"model": "x", "messages": [{}] * MANY}),
    (ChatBody, {"model": "x", "messages": [{"role": "user", "content": [{}] * MANY}]}),
    (RouteMessage, {"request": {}, "snapshots": [SNAPSHOT] * MANY}),
    (RouteMessage, {"request": {str(i): 1 for i in range(MANY)}, "snapshots": []}),
    (RegionsMessage, {"regions": [{}] * MANY, "latency_s": [["x"] * MANY] * 3}),
    (RegionsMessage, {"regions": [{"arrivals": ["x"] * MANY, "servers": [{}] * MANY}]}),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_body_of_very_many_mistakes_is_refused_for_a_few_of_them(number):
    model, body = BAD[number]
    started_s = time.process_time()
    try:
        model.model_validate(body)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        assert len(problems) < 100
        assert len(reason_of(problems)) < 300
    else:
        assert "metadata" in body
    # It took 2 to 4 s of computing, which nothing else could do meanwhile.
    assert time.process_time() - started_s < 0.5
    assert len(json.dumps(body)) > MANY


@pytest.mark.parametrize(
    ("root", "path", "route"),
    [
        ("", "/v1/policy", "/v1/policy"), ("/a", "/a/v1/policy", "/v1/policy"), ("/a", "/a", ""),
        ("/a", "/ab/v1", "/ab/v1"), ("/a", "/v1", "/v1"),
    ],
)  # fmt: skip
def test_a_route_is_what_stands_below_the_mount(root, path, route):
    assert route_path({"path": path, "root_path": root}) == route
