"""What holds of HTTP/2 whatever a client sends, in whichever pieces, and whichever its windows."""

import asyncio
from struct import Struct
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st
from sizes import scaled

from serve_app.ext_proc import http2
from serve_app.ext_proc.frames import LONGEST_FRAME, MAX_HEADER_BYTES, PREFACE
from serve_app.ext_proc.http2 import Http2Protocol

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM, END_HEADERS, PADDED, HAS_PRIORITY = 1, 4, 8, 32
MAX_WINDOW = (1 << 31) - 1
FRAME_HEAD = Struct(">LBL")
GRPC_OK = b"\x00\x0bgrpc-status\x010"
MAX_STREAMS, MAX_MESSAGE_BYTES, MAX_HELD_BYTES = 4, 200, 2000


def frame(kind, flags=0, number=0, payload=b""):
    return FRAME_HEAD.pack(len(payload) << 8 | kind, flags, number) + payload


def setting(name, value):
    return name.to_bytes(2, "big") + value.to_bytes(4, "big")


def growth(number, by):
    return frame(WINDOW_UPDATE, 0, number, by.to_bytes(4, "big"))


def literal(name, value, first=b"\0"):
    return first + bytes([len(name)]) + name + bytes([len(value)]) + value


def a_block(path, is_indexed=False):
    first = b"\x40" if is_indexed else b"\0"
    fields = {b":path": path, b"content-type": b"application/grpc", b"te": b"trailers"}
    return b"\x83\x86" + b"".join(literal(name, fields[name], first) for name in fields)


def packed(message):
    return b"\0" + len(message).to_bytes(4, "big") + message


def frames_of(data):
    """Cut what was sent into kind, flags, stream and payload; all of it is frames."""
    at = 0
    while at < len(data):
        word, flags, number = FRAME_HEAD.unpack_from(data, at)
        end = at + 9 + (word >> 8)
        assert end <= len(data)
        yield word & 255, flags, number, data[at + 9 : end]
        at = end


class Wire(asyncio.Transport):
    """Collects what is written."""

    def __init__(self):
        super().__init__()
        self.written, self.is_read, self.has_closed = bytearray(), True, False

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def write(self, data):
        assert not self.has_closed
        self.written += data

    def pause_reading(self):
        self.is_read = False

    def resume_reading(self):
        self.is_read = True

    def close(self):
        self.has_closed = True

    abort = close

    def is_closing(self):
        return self.has_closed


class Mute:
    def __init__(self, stream):
        self.stream, self.taken, self.num_closed, self.num_late = stream, [], 0, 0

    def take(self, message):
        self.taken.append(message)
        self.num_late += not self.stream.is_open

    def close(self):
        self.num_closed += 1


class Echo(Mute):
    def take(self, message):
        super().take(message)
        self.stream.send(message)

    def close(self):
        super().close()
        self.stream.end()


class Failing(Echo):
    """Fails in all that it does, after it has done it."""

    def take(self, message):
        super().take(message)
        raise RuntimeError("a fault")

    def close(self):
        super().close()
        raise RuntimeError("a fault")


class Twice(Mute):
    """Sends more than it is sent, and ends by itself."""

    def take(self, message):
        super().take(message)
        self.stream.send(message, message + b"again")
        if len(message) % 2:
            self.stream.end()


class Stillborn(Mute):
    def __init__(self, stream):
        super().__init__(stream)
        stream.send(b"too early")
        stream.end()


def unmade(stream):
    raise RuntimeError("a fault")


KINDS = {b"/%s" % kind.__name__.lower().encode(): kind
         for kind in (Echo, Mute, Failing, Twice, Stillborn)}  # fmt: skip
PATHS = [*KINDS, b"/unmade", b"/unknown"]


class Side:
    """A connection, the calls it opened, and what it wrote."""

    def __init__(self, max_streams=MAX_STREAMS, max_message_bytes=MAX_MESSAGE_BYTES):
        self.calls, self.wire = {}, Wire()
        methods = {path: self._keep(kind) for path, kind in KINDS.items()} | {b"/unmade": unmade}
        self.protocol = Http2Protocol(methods, max_streams, max_message_bytes, set())
        self.protocol.connection_made(self.wire)

    def _keep(self, kind):
        def begin(stream):
            assert stream.number not in self.calls
            self.calls[stream.number] = kind(stream)
            return self.calls[stream.number]

        return begin

    def feed(self, *pieces):
        for piece in pieces:
            self.protocol.data_received(piece)

    async def news(self):
        """Return the frames that were written since."""
        await asyncio.sleep(0)
        written, self.wire.written = bytes(self.wire.written), bytearray()
        return [*frames_of(written)]

    def lose(self):
        self.protocol.connection_lost(None)
        assert all(call.num_closed for call in self.calls.values())
        assert not any(call.num_late or call.stream.unsent for call in self.calls.values())
        self.check_what_is_held()
        assert (self.protocol.streams, self.protocol.held) == ({}, 0)

    def check_what_is_held(self):
        protocol = self.protocol
        streams = protocol.streams.values()
        held = sum(len(stream.inbox) + len(stream.unsent) for stream in streams)
        assert held == protocol.held <= MAX_HELD_BYTES
        assert len(protocol.streams) <= protocol._max_streams
        assert protocol.blocked.keys() <= protocol.streams.keys()
        assert all(stream.unsent for stream in protocol.blocked.values())
        reader = protocol._reader
        assert len(reader._buffer) < LONGEST_FRAME + 9
        assert reader._head is None or len(reader._head[2]) <= MAX_HEADER_BYTES
        for stream in streams:
            assert len(stream.inbox) < MAX_MESSAGE_BYTES + 5
            assert stream.ended is None or (stream.unsent and not stream.inbox)


def bounded(test):
    with mock.patch.object(http2, "_MAX_HELD_BYTES", MAX_HELD_BYTES):
        asyncio.run(test)


def cut(data, cuts):
    ends = sorted(min(end, len(data)) for end in cuts)
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


# Any pieces


@st.composite
def clients(draw):
    """What a client that keeps to the protocol sends, and the messages of each of its calls."""
    sent, messages, unsent = [PREFACE + frame(SETTINGS)], {}, {}
    for _ in range(draw(st.integers(1, 12))):
        act = draw(st.sampled_from(["open", "say", "say", "say", "end", "reset", "ping", "grow"]))
        number = draw(st.sampled_from([*unsent])) if unsent else None
        if act == "open" or number is None:
            number = 1 + 2 * len(messages)
            messages[number], unsent[number] = [], b""
            ends = draw(st.lists(st.integers(0, 80), max_size=3))
            parts = cut(a_block(b"/echo", draw(st.booleans())), ends)
            extra = draw(st.sampled_from([0, PADDED, HAS_PRIORITY, PADDED | HAS_PRIORITY]))
            if extra & HAS_PRIORITY:
                parts[0] = bytes(5) + parts[0]
            if extra & PADDED:
                parts[0] = b"\x07" + parts[0] + bytes(7)
            kinds = [HEADERS] + [CONTINUATION] * (len(parts) - 1)
            flags = [0] * (len(parts) - 1) + [END_HEADERS]
            flags[0] |= extra
            sent += map(frame, kinds, flags, [number] * len(parts), parts)
        elif act == "say":
            messages[number].append(draw(st.binary(max_size=60)))
            unsent[number] += packed(messages[number][-1])
            size = draw(st.integers(0, 80))
            padding = draw(st.none() | st.integers(0, 9))
            piece, unsent[number] = unsent[number][:size], unsent[number][size:]
            if padding is None:
                sent.append(frame(DATA, 0, number, piece))
            else:
                padded = bytes([padding]) + piece + bytes(padding)
                sent.append(frame(DATA, PADDED, number, padded))
        elif act == "end":
            sent.append(frame(DATA, 0, number, unsent[number]))
            is_trailer = draw(st.booleans())
            kind, flags = (HEADERS, END_HEADERS) if is_trailer else (DATA, 0)
            sent.append(frame(kind, flags | END_STREAM, number, b""))
            del unsent[number]
        elif act == "reset":
            sent.append(frame(RST_STREAM, 0, number, bytes(4)))
            del unsent[number], messages[number][:]  # How many have come is not known.
            messages[number] = None
        elif act == "ping":
            sent.append(frame(PING, 0, 0, draw(st.binary(min_size=8, max_size=8))))
        else:
            sent.append(growth(draw(st.sampled_from([0, number])), draw(st.integers(1, 500))))
    sent += (frame(DATA, 0, number, rest) for number, rest in unsent.items())
    return b"".join(sent), messages


@settings(max_examples=scaled(500))
@given(clients(), st.lists(st.integers(0, 1500), max_size=30) | st.none())
def test_messages_and_answers_are_the_same_wherever_bytes_are_cut(client, cuts):
    data, messages = client

    async def test():
        whole, pieces = Side(max_streams=20), Side(max_streams=20)
        whole.feed(data)
        pieces.feed(*cut(data, range(len(data)) if cuts is None else cuts))
        await asyncio.sleep(0)
        assert whole.wire.written == pieces.wire.written
        assert not whole.wire.has_closed
        assert whole.calls.keys() == pieces.calls.keys() == messages.keys()
        for number, call in whole.calls.items():
            assert call.taken == pieces.calls[number].taken
            assert messages[number] is None or call.taken == messages[number]
        whole.lose()

    bounded(test())


# Any windows

STEP = (
    st.tuples(st.just("say"), st.integers(0, 2), st.integers(0, 120))
    | st.tuples(st.just("grow"), st.integers(0, 3), st.integers(1, 150))
    | st.tuples(st.just("initial"), st.just(0), st.integers(0, 150))
    | st.tuples(st.sampled_from(["pause", "resume", "ended"]), st.integers(0, 2), st.just(0))
)


class Reader:
    """A client that counts what it lets the other side send."""

    def __init__(self, side, initial):
        self.side, self.initial = side, initial
        self.room = dict.fromkeys((1, 3, 5), initial) | {0: 65_535}
        self.bodies, self.ended = dict.fromkeys((1, 3, 5), b""), set()

    async def look(self):
        for kind, flags, number, payload in await self.side.news():
            assert kind in (DATA, HEADERS, SETTINGS, WINDOW_UPDATE, RST_STREAM)
            assert number not in self.ended or kind == RST_STREAM
            if kind == DATA:
                assert 0 < len(payload) <= min(self.room[0], self.room[number], LONGEST_FRAME)
                self.room[0] -= len(payload)
                self.room[number] -= len(payload)
                self.bodies[number] += payload
            elif kind == HEADERS and flags & END_STREAM:
                assert payload.endswith(GRPC_OK)
                self.ended.add(number)

    def grow(self, number, by):
        self.room[number] += by
        self.side.feed(growth(number, by))

    def begin_at(self, initial):
        """Change the windows of all streams, below nothing where more is on its way."""
        for number in (1, 3, 5):
            self.room[number] += initial - self.initial
        self.initial = initial
        self.side.feed(frame(SETTINGS, 0, 0, setting(4, initial)))


@settings(max_examples=scaled(1000))
@given(st.integers(0, 150), st.lists(STEP, max_size=25))
@example(100, [("say", 0, 200), ("initial", 0, 20), ("grow", 1, 50), ("grow", 1, 31)])
@example(0, [("say", 0, 50), ("pause", 0, 0), ("grow", 1, 9), ("resume", 0, 0)])
def test_never_more_is_sent_than_windows_allow_and_all_once_they_do(initial, steps):
    async def test():
        side = Side()
        side.feed(PREFACE + frame(SETTINGS, 0, 0, setting(4, initial)))
        side.feed(*(frame(HEADERS, END_HEADERS, n, a_block(b"/mute")) for n in (1, 3, 5)))
        reader, said, ended, is_paused = Reader(side, initial), {1: b"", 3: b"", 5: b""}, set(), 0
        # Few are left of the connection's, so that streams wait for each other.
        side.protocol.window = reader.room[0] = 300
        await reader.look()
        for act, which, size in steps:
            number = 1 + 2 * which
            if act == "say" and number not in ended:
                message = bytes([number]) * size
                side.calls[number].stream.send(message, b"")
                said[number] += packed(message) + packed(b"")
            elif act == "grow" and which == 0:
                reader.grow(0, size)
            elif act == "grow":
                reader.grow(2 * which - 1, size)
            elif act == "initial":
                reader.begin_at(size)
            elif act == "ended":
                side.calls[number].stream.end()
                ended.add(number)
            elif act == "pause" and not is_paused:
                # What this turn has written is not held back.
                await reader.look()
                side.protocol.pause_writing()
                is_paused = True
            elif act == "resume" and is_paused:
                side.protocol.resume_writing()
                is_paused = False
            before = dict(reader.bodies)
            await reader.look()
            assert side.wire.is_read == (not is_paused)
            assert not is_paused or reader.bodies == before
            side.check_what_is_held()
            # Nothing waits that may be sent.
            for number, stream in side.protocol.streams.items():
                may_go = reader.room[0] > 0 and reader.room[number] > 0 and not is_paused
                assert not (may_go and stream.unsent)
        if is_paused:
            side.protocol.resume_writing()
        reader.begin_at(5000)
        reader.grow(0, 20_000)
        await reader.look()
        assert (reader.bodies, reader.ended) == (said, ended)
        assert not side.wire.has_closed
        side.lose()

    # All may wait.
    with mock.patch(f"{__name__}.MAX_HELD_BYTES", 1 << 20):
        bounded(test())


# Anything at all

BLOCK = (
    st.builds(a_block, st.sampled_from(PATHS), st.booleans())
    | st.binary(max_size=30)
    | st.sampled_from([b"", b"\x82", literal(b"a", b"b"), b"\x20", b"\x3f\xe1\x7f"])
)
BYTES = (
    st.binary(max_size=50)
    | st.binary(max_size=150).map(packed)
    | st.integers(0, 400).map(lambda size: b"\0" + size.to_bytes(4, "big") + bytes(size // 2))
    | st.sampled_from([b"", b"\0\0\0\0\0", b"\1\0\0\0\0", b"\0\xff\xff\xff\xff", bytes(1000)])
)
NUMBER = st.sampled_from([1, 1, 1, 3, 3, 5, 7, 9, 11, 13, 0, 2, MAX_WINDOW])
FOUR = st.sampled_from([0, 1, 7, 70, 1 << 14, 1 << 24, MAX_WINDOW, MAX_WINDOW + 1]).map(
    lambda value: value.to_bytes(4, "big")
)
LIKELY = (
    st.builds(frame, st.just(HEADERS), st.sampled_from([4, 4, 4, 5, 0, 12, 36]), NUMBER, BLOCK)
    | st.builds(frame, st.just(CONTINUATION), st.sampled_from([0, 4]), NUMBER, BLOCK)
    | st.builds(frame, st.just(DATA), st.sampled_from([0, 0, 0, 1, 8]), NUMBER, BYTES)
    | st.builds(frame, st.sampled_from([RST_STREAM, WINDOW_UPDATE]), st.just(0), NUMBER, FOUR)
    | st.builds(
        lambda name, value: frame(SETTINGS, 0, 0, name.to_bytes(2, "big") + value),
        st.integers(0, 7), FOUR,
    )
    | st.sampled_from([frame(PING, 0, 0, bytes(8)), frame(SETTINGS, 1), frame(SETTINGS)])
)  # fmt: skip
ANY = st.builds(
    frame, st.integers(0, 12), st.integers(0, 255), NUMBER | st.integers(0, (1 << 32) - 1),
    BYTES | FOUR | BLOCK | st.binary(min_size=5, max_size=8),
)  # fmt: skip
BEGIN = st.sampled_from([PREFACE + frame(SETTINGS, 0, 0, setting(4, 60))] * 20 + [PREFACE, b""])


@st.composite
def rude(draw):
    """What a client sends that keeps to the protocol of frames, and to nothing else."""
    sent, going, closed, last = [], [], [], -1
    for _ in range(draw(st.integers(1, 25))):
        act = draw(st.sampled_from(["open", "say", "say", "say", "stop", "late", "set", "grow"]))
        if act == "open" or (act in ("say", "stop") and not going):
            last += 2
            is_end = draw(st.sampled_from([0, 0, 0, END_STREAM]))
            path = PATHS[(draw(st.integers(0, 9)) + last // 2) % len(PATHS)]
            block = draw(st.sampled_from([a_block(path)] * 9 + [b"\x83"]))
            sent.append(frame(HEADERS, END_HEADERS | is_end, last, block))
            (closed if is_end else going).append(last)
        elif act == "say":
            sent.append(frame(DATA, 0, draw(st.sampled_from(going)), draw(BYTES)))
        elif act == "stop":
            number = going.pop(draw(st.integers(0, len(going) - 1)))
            closed.append(number)
            sent.append(draw(st.sampled_from([
                frame(DATA, END_STREAM, number), frame(RST_STREAM, 0, number, bytes(4)),
                frame(HEADERS, END_HEADERS | END_STREAM, number),
            ])))  # fmt: skip
        elif act == "late" and closed:
            number = draw(st.sampled_from(closed))
            sent.append(draw(st.sampled_from([
                growth(number, 9), frame(RST_STREAM, 0, number, bytes(4)), frame(DATA, 0, number),
            ])))  # fmt: skip
        elif act == "set":
            sent.append(frame(SETTINGS, 0, 0, setting(4, draw(st.integers(0, 300)))))
        elif act == "grow":
            sent.append(growth(draw(st.sampled_from([0, *going])), draw(st.integers(1, 300))))
    return b"".join(sent)


def check_order(news, over):
    """Nothing follows the end of a stream; `over` holds those that have ended."""
    for kind, flags, number, payload in news:
        if kind in (DATA, HEADERS):
            assert number not in over
        if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            over.add(number)
        if kind == HEADERS:
            assert b"application/grpc" in payload or b"grpc-status" in payload or b"415" in payload


@settings(max_examples=scaled(2000))
@given(
    BEGIN,
    rude(),
    st.lists(LIKELY | ANY | st.binary(max_size=30), max_size=8),
    st.lists(st.integers(0, 3000), max_size=5),
)
def test_whatever_is_sent_is_bounded_and_every_call_is_closed(begin, sent, more, cuts):
    async def test():
        side, over = Side(), set()
        for piece in cut(b"".join([begin, sent, *more]), cuts):
            side.feed(piece)
            news = await side.news()
            check_order(news, over)
            side.check_what_is_held()
            assert side.wire.has_closed == any(kind == GOAWAY for kind, *_ in news)
            if side.wire.has_closed:
                assert news[-1][0] == GOAWAY
                assert all(call.num_closed for call in side.calls.values())
                break
        side.feed(b"")
        side.lose()

    with mock.patch.object(http2.logger, "error"), mock.patch.object(http2.logger, "warning"):
        bounded(test())


@settings(max_examples=scaled(300))
@given(
    st.lists(st.tuples(st.sampled_from([1, 3, 5]), st.integers(1, 190)), max_size=60),
    st.sampled_from([b"/mute", b"/echo"]),
)
def test_messages_without_end_and_answers_nobody_reads_are_bounded(sizes, path):
    async def test():
        side = Side(max_streams=50)
        side.feed(PREFACE + frame(SETTINGS, 0, 0, setting(4, 0)))
        numbers = range(1, 100, 2)
        side.feed(*(frame(HEADERS, END_HEADERS, n, a_block(path)) for n in numbers))
        for which, size in sizes:
            for number in range(which, 100, 6):
                whole = packed(bytes(size))
                side.feed(frame(DATA, 0, number, whole if path == b"/echo" else whole[:-1]))
                side.check_what_is_held()
                if side.wire.has_closed:
                    return
        side.lose()

    with mock.patch.object(http2.logger, "warning"):
        bounded(test())
