"""What the listener refuses before any application sees it."""

import asyncio
import logging
import resource
import socket
from contextlib import asynccontextmanager

import pytest
from unit.serve_builders import a_deciding_api

from serve_app.app import check_no_proxy
from serve_app.cluster import Limits
from serve_app.http.free_port import free_port
from serve_app.http.intake import MAX_HEADER_BYTES
from serve_app.http.listener import Listener, hold_port
from serve_app.http.log_limits import PERIOD_S, OncePerPeriod

ASK = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


@asynccontextmanager
async def a_listener(may_answer=None, **limits):
    """Yield a port, the listener and the paths that were asked for."""
    asked = []

    async def app(scope, receive, send):
        asked.append(scope["path"])
        if may_answer is not None:
            await may_answer.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    listener, port = Listener(app, Limits(**limits)), free_port()
    await listener.start("127.0.0.1", port)
    try:
        yield port, listener, asked
    finally:
        await listener.stop()


OPEN = []


async def connect(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    OPEN.append(writer)
    return reader, writer


async def ask(port, until=b"ok"):
    reader, writer = await connect(port)
    writer.write(ASK)
    return await reader.readuntil(until), reader, writer


def run(test):
    async def inside():
        async with asyncio.timeout(30):
            await test()
        for writer in OPEN:
            writer.close()
        OPEN.clear()
        await asyncio.sleep(0)

    asyncio.run(inside())


def test_heads_that_do_not_end_are_given_up_and_others_are_answered_meanwhile():
    async def test():
        async with a_listener(head_timeout_s=0.2) as (port, _, asked):
            held = [await connect(port) for _ in range(50)]
            for number, (_, writer) in enumerate(held):
                writer.write(b"POST / HTTP/1.1\r\nhost: a\r\nx-"[: 1 + number % 30])
            held += [await connect(port) for _ in range(5)]
            answer, _, _ = await ask(port)
            assert answer.startswith(b"HTTP/1.1 200")
            for reader, _ in held:
                assert (await reader.read()).startswith(b"HTTP/1.1 408")
            assert asked == ["/"]

    run(test)


def test_a_head_that_drips_on_a_connection_that_was_answered_is_given_up_too():
    async def test():
        async with a_listener(head_timeout_s=0.2) as (port, _, asked):
            _, reader, writer = await ask(port)
            writer.write(ASK)
            await reader.readuntil(b"ok")
            writer.write(b"GET /x")
            assert (await reader.read()).startswith(b"HTTP/1.1 408")
            assert asked == ["/", "/"]

    run(test)


def test_a_head_without_an_end_is_refused_while_it_comes():
    async def test():
        async with a_listener() as (port, _, asked):
            reader, writer = await connect(port)
            writer.write(b"GET / HTTP/1.1\r\n")
            sent = 0
            while not reader.at_eof() and sent < 100 * MAX_HEADER_BYTES:
                writer.write(b"x: " + b"y" * 4000 + b"\r\n")
                sent += 4000
                try:
                    await writer.drain()
                except ConnectionError:
                    break
                await asyncio.sleep(0)
            assert sent < 50 * MAX_HEADER_BYTES
            assert asked == []

    run(test)


def test_one_address_takes_only_its_share_of_connections_and_gives_it_back():
    async def test():
        async with a_listener(max_connections_per_address=3) as (port, _, asked):
            held = [await ask(port) for _ in range(3)]
            refused, _, _ = await ask(port, until=b"connections")
            assert refused.startswith(b"HTTP/1.1 503")
            held[0][2].close()
            await asyncio.sleep(0.05)
            await ask(port)
            assert len(asked) == 4

    run(test)


def test_there_is_an_end_to_all_connections_together():
    async def test():
        async with a_listener(max_connections=2) as (port, _, asked):
            held = [await ask(port) for _ in range(2)]
            refused, _, _ = await ask(port, until=b"connections")
            assert refused.startswith(b"HTTP/1.1 503")
            assert len(held) == len(asked) == 2

    run(test)


def test_a_connection_that_says_nothing_more_is_closed_after_its_answer():
    async def test():
        async with a_listener(keep_alive_s=1) as (port, _, _):
            _, reader, _ = await ask(port)
            assert await reader.read() == b""

    run(test)


def test_an_empty_line_after_an_answer_does_not_keep_a_connection():
    async def test():
        async with a_listener(keep_alive_s=30, head_timeout_s=1.0) as (port, _, _):
            _, reader, writer = await ask(port)
            writer.write(b"\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 408")
            _, reader, writer = await ask(port)
            writer.write(b"\r\n" + ASK)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    run(test)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux ends them")
@pytest.mark.parametrize("ends", ["open", "closed", "broken"])
def test_a_caller_that_reads_nothing_of_its_answer_gives_its_place_back(ends):
    async def app(scope, receive, send):
        headers = [(b"connection", b"close")] if ends == "closed" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(16 << 20), "more_body": True})
        if ends != "broken":  # As an answer that is no stream, and whose endpoint has failed.
            await send({"type": "http.response.body", "body": b""})

    async def test():
        listener, port = Listener(app, Limits(timeout_s=0.5)), free_port()
        await listener.start("127.0.0.1", port)
        loop = asyncio.get_running_loop()
        try:
            with socket.socket() as caller:
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                caller.setblocking(False)
                await loop.sock_connect(caller, ("127.0.0.1", port))
                await loop.sock_sendall(caller, ASK)
                while not listener._config.open:
                    await asyncio.sleep(0.01)
                async with asyncio.timeout(5):
                    while listener._config.open:
                        await asyncio.sleep(0.05)
        finally:
            await listener.stop()

    run(test)


def test_who_reads_slowly_has_all_of_its_answer():
    whole, read_s = bytes(4 << 20), 0.05

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": whole})

    async def test():
        listener, port = Listener(app, Limits(timeout_s=0.5)), free_port()
        await listener.start("127.0.0.1", port)
        loop, num_read = asyncio.get_running_loop(), 0
        try:
            with socket.socket() as caller:
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                caller.setblocking(False)
                await loop.sock_connect(caller, ("127.0.0.1", port))
                await loop.sock_sendall(caller, ASK)
                while num_read < len(whole):
                    await asyncio.sleep(read_s)
                    num_read += len(await loop.sock_recv(caller, 1 << 17))
        finally:
            await listener.stop()

    run(test)


UPGRADE = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
)
WEBSOCKET = b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
BODIES = {
    "length": b"content-length: 5\r\n\r\nhello", "none": b"\r\n",
    "chunked": b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("cut", [1, 7, 40, 1 << 20])
@pytest.mark.parametrize("asks", [UPGRADE, WEBSOCKET, b""])
@pytest.mark.parametrize("framing", BODIES)
def test_who_asks_for_another_protocol_is_answered_in_this_one(framing, asks, cut):
    """Java's client asks so with its first request, and the body belongs to that."""

    async def app(scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message["more_body"]
        told = b"%b %b %b;" % (scope["method"].encode(), scope["path"].encode(), body)
        assert not any(name == b"upgrade" for name, _ in scope["headers"])
        headers = [(b"content-length", b"%d" % len(told))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": told})

    async def test():
        listener, port = Listener(app, Limits()), free_port()
        await listener.start("127.0.0.1", port)
        reader, writer = await connect(port)
        asked = b"POST /a HTTP/1.1\r\nhost: a\r\n" + asks + BODIES[framing]
        for _ in range(2):  # Over the same connection.
            sent = asked + asked  # The second before the first is answered.
            for at in range(0, len(sent), cut):
                writer.write(sent[at : at + cut])
                await asyncio.sleep(0)
            for _ in range(2):
                answer = await reader.readuntil(b";")
                assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
                body = b"" if framing == "none" else b"hello"
                assert answer.endswith(b"\r\n\r\nPOST /a %b;" % body)
        await listener.stop()

    run(test)


def test_another_listens_beside_one_that_ends_and_answers_that_have_begun_arrive():
    async def test():
        may_answer = asyncio.Event()
        async with a_listener(may_answer) as (port, old, asked):
            slow = asyncio.create_task(ask(port))
            while not asked:
                await asyncio.sleep(0.01)

            async def app(scope, receive, send):
                await send({"type": "http.response.start", "status": 204, "headers": []})
                await send({"type": "http.response.body", "body": b""})

            new = Listener(app, Limits())
            await new.start("127.0.0.1", port)
            old.refuse()
            await asyncio.sleep(0.3)
            for _ in range(8):
                answer, _, _ = await ask(port, until=b"\r\n")
                assert b"204" in answer
            may_answer.set()
            assert (await slow)[0].endswith(b"ok")
            await new.stop()

    run(test)


def test_who_comes_before_a_gateway_is_ready_waits_unless_another_takes_connections():
    async def test():
        port = free_port()
        held = hold_port("127.0.0.1", port)
        early = asyncio.create_task(ask(port))
        await asyncio.sleep(0.2)
        assert not early.done()

        async def app(scope, receive, send):
            headers = [(b"content-length", b"2")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"ok"})

        listener = Listener(app, Limits())
        assert await listener.start("127.0.0.1", port, held) == port
        assert (await early)[0].endswith(b"ok")
        # One that takes this one's place must not take connections before it is ready.
        assert hold_port("127.0.0.1", port) is None
        assert hold_port("0.0.0.0", port) is None
        await listener.stop()
        assert hold_port("192.0.2.1", port) is None

    run(test)


def test_a_port_that_serves_own_proxy_has_is_refused_and_one_of_another_gateway_is_not():
    async def test():
        async with a_listener() as (port, _, asked):
            with pytest.raises(OSError, match="proxy_location: Disabled"):
                await check_no_proxy("0.0.0.0", port)
            assert asked == ["/-/healthz"]
        await check_no_proxy("127.0.0.1", port)
        api = a_deciding_api()
        other = Listener(api, Limits())
        await other.start("127.0.0.1", port)
        await check_no_proxy("127.0.0.1", port)
        await other.stop()

    run(test)


def test_who_has_connected_when_the_port_is_handed_over_is_answered_and_goes():
    async def test():
        async with a_listener() as (port, listener, asked):
            _, reader, writer = await ask(port)
            # The kernel lets them in; nobody has accepted them when the port is given up.
            waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
            leaving = asyncio.create_task(listener.hand_over())
            streams = [await asyncio.open_connection(sock=one) for one in waiting]
            for theirs, ours in [*streams, (reader, writer)]:
                ours.write(ASK)
                answer = await theirs.read()
                assert answer.startswith(b"HTTP/1.1 200")
                assert b"connection: close" in answer.lower()
                OPEN.append(ours)
            assert len(asked) == 5
            await leaving
            assert listener.is_up
            with pytest.raises(ConnectionRefusedError):
                await connect(port)

    run(test)


def test_strangers_who_send_what_is_no_http_do_not_fill_the_log(caplog):
    async def test():
        async with a_listener() as (port, *_):
            (limit,) = [
                one for one in logging.getLogger("uvicorn.error").filters
                if isinstance(one, OncePerPeriod)
            ]  # fmt: skip
            limit._seen.clear()
            for _ in range(50):
                reader, writer = await connect(port)
                writer.write(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
                assert b"400 Bad Request" in await reader.read()

    run(test)
    said = [one.getMessage() for one in caplog.records if one.name == "uvicorn.error"]
    assert said == ["Invalid HTTP request received."]


def test_what_was_left_out_of_the_log_is_counted_there_a_minute_later():
    now_s = [1000.0]
    limit, said = OncePerPeriod(lambda: now_s[0]), []

    def say(text, *values, error=None):
        info = None if error is None else (type(error), error, None)
        record = logging.LogRecord("n", logging.WARNING, "f", 1, text, values, info)
        if limit.filter(record):
            said.append(record.getMessage())

    for number in range(1000):
        say("request %d is odd", number)
        say("it failed", error=KeyError(number))
    say("it failed", error=ValueError())
    assert said == ["request 0 is odd", "it failed", "it failed"]
    said.clear()
    now_s[0] += PERIOD_S
    say("request %d is odd", 7)
    say("request %d is odd", 8)
    assert said == ["request 7 is odd (and 999 more since the last such line)"]
    # Texts that somebody makes up do not take memory without limit either.
    for number in range(1000):
        say(f"text {number}")
    assert len(limit._seen) <= 64


def test_what_may_be_in_flight_by_default_is_not_refused_by_the_system():
    """As many as Envoy lets through to a cluster; many systems begin with 1,024 open files."""
    assert Limits().max_in_flight == 1024
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, files[1]))
        Listener(a_deciding_api(), Limits())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == files[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
