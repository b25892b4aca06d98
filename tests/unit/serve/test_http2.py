"""HTTP/2 as gRPC's own client and TLS speak it, and what hostile clients are answered."""

import asyncio
import gc
import ssl
from contextlib import asynccontextmanager
from struct import Struct

import grpc
import pytest
from hpack import Decoder
from unit.serve.test_tls import make

from serve_app.ext_proc import http2
from serve_app.ext_proc.frames import PREFACE
from serve_app.ext_proc.health import Health
from serve_app.ext_proc.http2 import Http2Protocol
from serve_app.ext_proc.protocol import CHECK, WATCH
from serve_app.http.tls import Certificate

MAX_MESSAGE_BYTES = 8 << 20
NO_LIMITS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""Answers of health, encoded."""
FRAME_HEAD = Struct(">LBL")
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
ENHANCE_YOUR_CALM = 11


class Echo:
    """Sends back what comes, and ends with the other side."""

    def __init__(self, stream):
        self.stream, self.taken, self.num_closed = stream, [], 0

    def take(self, message):
        self.taken.append(message)
        self.stream.send(message)

    def close(self):
        self.num_closed += 1
        self.stream.end()


class Mute(Echo):
    """Answers nothing until it is told to."""

    def take(self, message):
        self.taken.append(message)

    def close(self):
        self.num_closed += 1


class Failing(Mute):
    def take(self, message):
        raise RuntimeError("a fault")


class Site:
    """A server of `Http2Protocol`, and what was opened on it."""

    def __init__(self, max_streams=1000):
        self.calls, self.connections, self.all_connections = [], set(), []
        self.is_ready, self.max_streams = True, max_streams
        self.health = Health(("",), lambda: self.is_ready)

    def _keep(self, kind):
        def begin(stream):
            self.calls.append(kind(stream))
            return self.calls[-1]

        return begin

    def connection(self):
        methods = {
            b"/test/echo": self._keep(Echo), b"/test/mute": self._keep(Mute),
            b"/test/failing": self._keep(Failing),
            CHECK: self.health.check, WATCH: self.health.watch,
        }  # fmt: skip
        made = Http2Protocol(methods, self.max_streams, MAX_MESSAGE_BYTES, self.connections)
        self.all_connections.append(made)
        return made

    async def start(self, tls=None):
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(self.connection, "127.0.0.1", 0, ssl=tls)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self):
        self.server.close()
        for connection in (*self.connections,):
            connection.close()
        await until(lambda: not self.connections)

    def check_all_is_released(self):
        assert all(call.num_closed for call in self.calls)
        for one in self.all_connections:
            assert (one.streams, one.held, len(one.blocked)) == ({}, 0, 0)


async def until(is_so):
    while not is_so():
        await asyncio.sleep(0.005)


@asynccontextmanager
async def a_site(max_streams=1000, tls=None):
    site = Site(max_streams)
    await site.start(tls)
    try:
        yield site
    finally:
        await site.stop()
    site.check_all_is_released()


@asynccontextmanager
async def a_channel(site, options=NO_LIMITS):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{site.port}", options=options) as channel:
        yield channel


def both(channel, method="echo"):
    return channel.stream_stream(f"/test/{method}", None, None)


async def echoed(channel, messages):
    """Send messages, half close, and return what comes back."""
    call = both(channel)()

    async def send():
        for message in messages:
            await call.write(message)
        await call.done_writing()

    sending = asyncio.create_task(send())
    answers = [answer async for answer in call]
    await sending
    assert await call.code() == grpc.StatusCode.OK
    return answers


def run(test):
    async def inside():
        async with asyncio.timeout(60):
            await test()
        # What a client leaves is taken away while its loop is there.
        gc.collect()

    asyncio.run(inside())


def with_site(**options):
    """Run a coroutine with a site and a channel to it."""

    def decorate(test):
        async def with_both():
            async with a_site(**options) as site, a_channel(site) as channel:
                await test(site, channel)

        def wrapper():
            run(with_both)

        wrapper.__name__ = test.__name__
        return wrapper

    return decorate


@with_site()
async def test_messages_come_back_in_order(site, channel):
    messages = [b"%d" % number * (number % 50) for number in range(2000)]
    assert await echoed(channel, messages) == messages
    assert site.calls[0].taken == messages


@with_site()
async def test_messages_longer_than_any_window_come_back(site, channel):
    messages = [bytes([letter]) * (5 << 20) for letter in b"abc"]
    first, second = await asyncio.gather(echoed(channel, messages), echoed(channel, messages))
    assert first == second == messages


@with_site()
async def test_hundreds_of_calls_share_a_connection(site, channel):
    answers = await asyncio.gather(*(echoed(channel, [b"%d" % n, b""]) for n in range(500)))
    assert answers == [[b"%d" % n, b""] for n in range(500)]
    assert len(site.connections) == 1


@with_site(max_streams=20)
async def test_calls_beyond_the_limit_wait_for_others(site, channel):
    answers = await asyncio.gather(*(echoed(channel, [b"%d" % n]) for n in range(200)))
    assert answers == [[b"%d" % n] for n in range(200)]


@with_site()
async def test_a_call_of_one_message_is_answered(site, channel):
    assert await channel.unary_unary("/test/echo", None, None)(b"a message") == b"a message"


@with_site()
async def test_an_end_waits_for_what_the_client_has_not_read(site, channel):
    call, message = both(channel)(), b"a" * (7 << 20)
    await call.write(message)
    await call.done_writing()
    assert [answer async for answer in call] == [message]
    assert await call.code() == grpc.StatusCode.OK


@with_site()
async def test_cancelled_calls_are_closed_and_others_go_on(site, channel):
    calls = [both(channel, "mute")() for _ in range(100)]
    for call in calls:
        await call.write(b"a message")
    await until(lambda: sum(len(call.taken) for call in site.calls) == 100)
    for call in calls[1:]:
        call.cancel()
    await until(lambda: sum(call.num_closed for call in site.calls) == 99)
    (left,) = (call for call in site.calls if not call.num_closed)
    left.stream.send(b"an answer")
    left.stream.end()
    assert await calls[0].read() == b"an answer"
    assert await calls[0].code() == grpc.StatusCode.OK


@with_site()
async def test_a_deadline_of_the_client_closes_the_call(site, channel):
    call = both(channel, "mute")(timeout=0.05)
    assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: all(call.num_closed for call in site.calls))


@with_site()
async def test_a_call_that_is_ended_first_is_over_for_both(site, channel):
    call = both(channel, "mute")()
    await call.write(b"a message")
    await until(lambda: site.calls and site.calls[0].taken)
    site.calls[0].stream.end(http2.NOT_FOUND)
    assert await call.code() == grpc.StatusCode.NOT_FOUND
    (connection,) = site.connections
    assert connection.streams == {}
    assert site.calls[0].num_closed


@pytest.mark.parametrize(
    ("method", "message", "code"),
    [
        ("unknown", b"", grpc.StatusCode.UNIMPLEMENTED),
        ("echo", b"a" * (MAX_MESSAGE_BYTES + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("failing", b"", grpc.StatusCode.INTERNAL),
    ],
)
def test_what_cannot_be_answered_has_a_status(method, message, code):
    @with_site()
    async def test(site, channel):
        for kind in (channel.unary_unary, channel.stream_unary):
            sent = message if kind == channel.unary_unary else iter([message])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await kind(f"/test/{method}", None, None)(sent)
            assert caught.value.code() == code
        assert await echoed(channel, [b"and others go on"]) == [b"and others go on"]

    test()


@with_site()
async def test_compressed_messages_are_refused(site, channel):
    call = channel.unary_unary("/test/echo", None, None)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"a" * 10_000, compression=grpc.Compression.Gzip)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


@with_site()
async def test_health_is_answered_and_watched(site, channel):
    check = channel.unary_unary(CHECK.decode(), None, None)
    assert await check(b"") == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(b"\x0a\x07another")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    watch = channel.unary_stream(WATCH.decode(), None, None)(b"")
    assert await watch.read() == SERVING
    site.is_ready = False
    site.health.tell()
    assert await watch.read() == NOT_SERVING
    watch.cancel()
    await until(lambda: not site.health.watching)


@with_site()
async def test_who_asks_nothing_of_health_is_answered(site, channel):
    for method in (CHECK, WATCH):
        call = channel.stream_stream(method.decode(), None, None)()
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.INTERNAL


@with_site()
async def test_new_calls_go_elsewhere_after_a_goaway(site, channel):
    old = both(channel)()
    await old.write(b"before")
    assert await old.read() == b"before"
    (first,) = site.connections
    first.go_away()
    assert await echoed(channel, [b"elsewhere"]) == [b"elsewhere"]
    assert len(site.all_connections) == 2
    await old.write(b"after")
    assert await old.read() == b"after"
    await old.done_writing()
    assert await old.code() == grpc.StatusCode.OK


@with_site()
async def test_a_server_that_stops_ends_its_calls(site, channel):
    call = both(channel)()
    await call.write(b"a message")
    assert await call.read() == b"a message"
    await site.stop()
    assert await call.code() == grpc.StatusCode.UNAVAILABLE


def test_small_windows_and_tables_of_a_client_are_kept():
    options = (
        *NO_LIMITS, ("grpc.http2.lookahead_bytes", 1000), ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.hpack_table_size.decoder", 0), ("grpc.http2.max_frame_size", 1 << 20),
    )  # fmt: skip

    async def test():
        async with a_site() as site, a_channel(site, options) as channel:
            messages = [b"a" * 300_000, b"", b"b"]
            for _ in range(3):
                assert await echoed(channel, messages) == messages

    run(test)


def test_tls_agrees_on_http2(tmp_path):
    files = make(tmp_path, 1)
    context = Certificate(files, ("h2",)).context
    credentials = grpc.ssl_channel_credentials(files.certificate.read_bytes())

    async def test():
        async with a_site(tls=context) as site:
            target = f"127.0.0.1:{site.port}"
            async with grpc.aio.secure_channel(target, credentials, NO_LIMITS) as channel:
                messages = [b"a message", b"a" * (5 << 20)]
                assert await echoed(channel, messages) == messages
            trusting = ssl.create_default_context(cafile=str(files.certificate))
            trusting.set_alpn_protocols(["h2"])
            _, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=trusting)
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
            writer.close()

    run(test)


# What no client of gRPC's does


def frame(kind, flags=0, number=0, payload=b""):
    return FRAME_HEAD.pack(len(payload) << 8 | kind, flags, number) + payload


def literal(name, value):
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def a_head(number, path=b"/test/mute", flags=4):
    fields = literal(b":path", path) + literal(b"content-type", b"application/grpc")
    return frame(1, flags, number, b"\x83\x86" + fields)


@asynccontextmanager
async def a_stranger(site):
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def frames_until(reader, kind):
    """Read frames up to the first of a kind; return that one."""
    while True:
        word, flags, number = FRAME_HEAD.unpack(await reader.readexactly(9))
        payload = await reader.readexactly(word >> 8)
        if word & 255 == kind:
            return flags, number, payload


async def goaway_code(reader):
    _, _, payload = await frames_until(reader, 7)
    assert await reader.read() == b""
    return int.from_bytes(payload[4:8], "big")


def test_who_never_begins_is_let_go(monkeypatch):
    monkeypatch.setattr(http2, "_PREFACE_S", 0.01)

    async def test():
        async with a_site() as site:
            for num_made, begin in enumerate((b"", PREFACE[:5], PREFACE)):
                async with a_stranger(site) as (_, writer):
                    writer.write(begin)
                    await until(lambda: len(site.all_connections) > num_made)  # noqa: B023
                    await until(lambda: not site.connections)
            async with a_channel(site) as channel:
                assert await echoed(channel, [b"others"]) == [b"others"]

    run(test)


def test_who_never_reads_is_let_go(monkeypatch):
    monkeypatch.setattr(http2, "_STALLED_S", 0.05)

    async def test():
        async with a_site() as site, a_stranger(site) as (_, writer):
            writer.write(PREFACE + SETTINGS)
            pings = frame(6, payload=bytes(8)) * 10_000
            try:
                while not site.all_connections or site.connections:
                    writer.write(pings)
                    await writer.drain()
                    for connection in site.connections:
                        written = connection._transport.get_write_buffer_size()
                        assert written < http2._MAX_WRITTEN_BYTES + (1 << 20)
            except ConnectionError:
                pass
            await until(lambda: not site.connections)

    run(test)


@pytest.mark.parametrize("is_answered", [False, True])
def test_calls_reset_without_end_are_too_many_where_none_is_answered(is_answered):
    path = b"/test/echo" if is_answered else b"/test/mute"

    async def test():
        async with a_site(max_streams=10) as site, a_stranger(site) as (reader, writer):
            writer.write(PREFACE + SETTINGS)
            for number in range(1, 6001, 2):
                message = frame(0, 0, number, bytes(5)) if is_answered else b""
                writer.write(a_head(number, path) + message + frame(3, 0, number, bytes(4)))
            writer.write(frame(6, payload=b"are you?"))
            if is_answered:
                assert await frames_until(reader, 6) == (1, 0, b"are you?")
            else:
                # What is not read may hide the reason.
                await until(lambda: not site.connections)

    run(test)


def test_incomplete_messages_of_a_connection_are_bounded(monkeypatch):
    monkeypatch.setattr(http2, "_MAX_HELD_BYTES", 1 << 20)

    async def test():
        async with a_site() as site, a_stranger(site) as (reader, writer):
            writer.write(PREFACE + SETTINGS)
            begin = b"\0" + MAX_MESSAGE_BYTES.to_bytes(4, "big")
            # The bound is of eight messages at least.
            for number in range(1, 2 * 100, 2):
                writer.write(a_head(number) + frame(0, 0, number, begin))
            piece = bytes(1 << 14)
            for _ in range(50):
                for number in range(1, 2 * 100, 2):
                    writer.write(frame(0, 0, number, piece))
                await writer.drain()
            _, _, code = await frames_until(reader, 3)
            assert int.from_bytes(code, "big") == ENHANCE_YOUR_CALM
            (connection,) = site.connections
            assert connection.held <= 8 * MAX_MESSAGE_BYTES
            assert 0 < len(connection.streams) < 100

    run(test)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n" + bytes(20), 1),
        (PREFACE + frame(6, payload=bytes(8)), 1),  # Not settings.
        (frame(4, 0, 1), 1),  # Settings of a stream.
        (frame(4, 0, 0, bytes(5)), 6),
        (frame(4, 1, 0, bytes(6)), 6),  # An answer with settings.
        (frame(4, 0, 0, b"\0\2\0\0\0\2"), 1),  # A push that is neither on nor off.
        (frame(4, 0, 0, b"\0\4\xff\xff\xff\xff"), 3),
        (frame(4, 0, 0, b"\0\5\0\0\0\1"), 1),
        (frame(6, 0, 0, bytes(7)), 6),
        (frame(6, 0, 1, bytes(8)), 1),
        (frame(7, 0, 1, bytes(8)), 1),
        (frame(2, 0, 1, bytes(4)), 6),
        (frame(2, 0, 0, bytes(5)), 1),
        (frame(5, 4, 1, bytes(4)), 1),
        (frame(9, 4, 1), 1),
        (frame(8, 0, 0, bytes(4)), 1),  # Grows by nothing.
        (frame(8, 0, 0, b"\x7f\xff\xff\xff"), 3),
        (frame(8, 0, 1, b"\0\0\0\1"), 1),  # Not begun.
        (frame(3, 0, 1, bytes(4)), 1),
        (frame(0, 0, 1), 1),
        (frame(0, 0, 0), 1),
        (frame(0, 0, 2), 1),
        (b"\0\x40\x01" + bytes(6), 6),
        (a_head(2), 1),
        (a_head(0), 1),
        (a_head(3) + frame(3, 0, 3, bytes(4)) + a_head(3), 1),
        (a_head(3) + a_head(1), 1),
        (a_head(1) + a_head(1), 1),
        (a_head(1, flags=5) + frame(0, 0, 1), 5),
        (a_head(1, flags=5) + frame(1, 5, 1), 5),
        (a_head(1, flags=0) + frame(6, payload=bytes(8)), 1),
        (a_head(1, flags=0) + frame(9, 4, 3), 1),
        (a_head(1, flags=0) + frame(9, 0, 1, bytes(1 << 14)) * 4, ENHANCE_YOUR_CALM),
        (frame(1, 0x24, 1, bytes(4)), 6),  # A priority that is cut off.
        (frame(1, 0x0C, 1, b"\x05abc"), 1),  # Padding that is longer.
        (a_head(1) + frame(0, 8, 1), 1),
        (frame(1, 4, 1, b"\xff" * 100), 9),
        (frame(1, 4, 1, b"\x40\x01a\x7f\x80\x10" + b"b" * 2047 + b"\xbe" * 9000), 9),
        (a_head(1) + frame(8, 0, 1, b"\x7f\xff\xff\xff"), 3),
    ],
)  # fmt: skip
def test_what_breaks_the_protocol_ends_the_connection(sent, code):
    async def test():
        async with a_site() as site, a_stranger(site) as (reader, writer):
            writer.write(sent if sent[:3] in (b"PRI", b"GET") else PREFACE + SETTINGS + sent)
            assert await goaway_code(reader) == code
            assert not site.connections

    run(test)


@pytest.mark.parametrize(
    ("sent", "kind", "payload"),
    [
        (frame(1, 4, 1, b"\x83\x86"), 3, b"\0\0\0\x01"),  # No path.
        (frame(1, 4, 1, b"\x83\x86\x84"), 1, b"\x20\x08\x03415"),  # Not gRPC's content.
        (a_head(1) + a_head(3) + a_head(5), 3, b"\0\0\0\x07"),  # More than may be.
        (a_head(1) + frame(3, 0, 1, bytes(4)) + frame(0, 0, 1), 3, b"\0\0\0\x05"),
        (a_head(1) + frame(3, 0, 1, bytes(4)) + frame(1, 5, 1), 3, b"\0\0\0\x05"),
    ],
    ids="no_path no_grpc too_many late_data late_trailers".split(),
)
def test_a_fault_of_one_stream_leaves_the_others(sent, kind, payload):
    async def test():
        async with a_site(max_streams=2) as site, a_stranger(site) as (reader, writer):
            writer.write(PREFACE + SETTINGS + sent)
            assert (await frames_until(reader, kind))[2] == payload
            writer.write(frame(6, payload=b"are you?"))
            assert await frames_until(reader, 6) == (1, 0, b"are you?")

    run(test)


def test_a_client_without_a_table_for_heads_reads_them():
    decoder = Decoder()
    decoder.max_allowed_table_size = 0

    async def test():
        async with a_site() as site, a_stranger(site) as (reader, writer):
            writer.write(PREFACE + frame(4, 0, 0, b"\0\1\0\0\0\0"))
            for number in (1, 3):
                writer.write(a_head(number, b"/test/echo") + frame(0, 1, number, bytes(5)))
                _, _, head = await frames_until(reader, 1)
                assert decoder.decode(head) == [
                    (":status", "200"), ("content-type", "application/grpc"),
                ]  # fmt: skip
                _, _, trailers = await frames_until(reader, 1)
                assert decoder.decode(trailers) == [("grpc-status", "0")]

    run(test)


@pytest.mark.parametrize("reads_on", [False, True])
def test_who_leaves_what_it_is_sent_may_send_no_more_until_it_reads_on(reads_on):
    async def test():
        async with a_site() as site, a_stranger(site) as (reader, writer):
            writer.write(PREFACE + frame(4, 0, 0, b"\0\4\0\0\0\0") + a_head(1, b"/test/echo"))
            message = frame(0, 0, 1, b"\0\0\0\x3f\xfb" + bytes((1 << 14) - 5))
            writer.write(frame(8, 0, 0, b"\0\x80\0\0") + message * 80)
            num_allowed = 1 << 20
            while num_allowed < 80 << 14:
                _, number, by = await frames_until(reader, 8)
                num_allowed += int.from_bytes(by, "big") * (number == 1)
            if reads_on:
                writer.write(frame(8, 0, 1, b"\0\x80\0\0"))
                assert (await frames_until(reader, 8))[1] == 1
            writer.write(message * 70)
            kind = 8 if reads_on else 7
            _, number, payload = await frames_until(reader, kind)
            assert number == 1 if reads_on else payload[4:] == b"\0\0\0\3"

    run(test)
