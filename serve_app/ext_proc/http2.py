"""gRPC's server side over HTTP/2 (RFC 9113), as far as a proxy's calls need it.

Messages are handed on as they come, in the event loop's callback, and what is sent in one turn of
the loop is written at once: a task and a system call per message would cost more than a pick
(docs/results/gateway.md). grpcio and Envoy are its oracles in the tests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol, cast

from serve_app.ext_proc import frames
from serve_app.ext_proc.frames import BrokenProtocol

logger = logging.getLogger(__name__)

_WINDOW = 1 << 20
"""Bytes that the other side may send on a stream before they are taken; taking is immediate."""
_MAX_HELD_BYTES = 256 << 20
"""Of a connection's incomplete messages, and of those that wait for a window."""
_MAX_WRITTEN_BYTES = 1 << 20
"""Nothing is read while more than this is written and not yet sent."""
_PREFACE_S, _STALLED_S, _CLOSING_S = 10.0, 60.0, 10.0
"""How long to wait for a client's first frame, for it to read on, and for it to take the end."""
_WASTE_S, _MAX_WASTE = 10.0, 1000
"""In so many seconds there may be so much waste, beyond four times the calls that may be open."""
_END = frames.END_HEADERS | frames.END_STREAM
_REQUIRED = {b":method", b":scheme", b":path"}
# A table of no bytes, as a client with a small one must be told; status; content type.
_HEAD, _UNSUPPORTED_TYPE = b"\x20\x88\x0f\x10\x10application/grpc", b"\x20\x08\x03415"
OK, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 5, 8, 12, 13


class CallHandler(Protocol):
    """What handles one call."""

    def take(self, message: bytes) -> None:
        """Take a message."""

    def close(self) -> None:
        """Note that no message will follow: at the other side's end, and once it is over."""


class Stream:
    """One call of a connection, as it is answered."""

    __slots__ = ("_connection", "call", "ended", "has_head", "held", "inbox", "is_half_closed",
                 "number", "taken", "unsent", "window")  # fmt: skip

    def __init__(self, connection: Http2Protocol, number: int, window: int) -> None:
        self._connection, self.number, self.window = connection, number, window
        self.call: CallHandler | None = None
        self.inbox = bytearray()
        """The begin of a message that is not complete."""
        self.taken = 0
        """Bytes that came since the other side was last told that it may send more."""
        self.unsent = bytearray()
        """What the other side's window has no room for."""
        self.held = 0
        """Bytes of both, as counted by the connection."""
        self.ended: bytes | None = None
        """Trailers that follow what is not sent; None: it goes on."""
        self.has_head = self.is_half_closed = False

    def send(self, *messages: bytes) -> None:
        """Send messages; nothing where the call has ended."""
        if not self.is_open:
            return
        if not self.has_head:
            self.has_head = True
            write = self._connection.writer.write
            write(frames.HEADERS, frames.END_HEADERS, self.number, _HEAD)
        for message in messages:
            self.unsent += b"\0" + len(message).to_bytes(4, "big") + message
        self.push()

    def end(self, status: int = OK) -> None:
        """End the call with a status of gRPC."""
        if not self.is_open:
            return
        trailer = b"\x00\x0bgrpc-status%c%d" % (len(str(status)), status)
        self.ended = trailer if self.has_head else _HEAD + trailer
        self.inbox.clear()
        self.push()

    def fail(self, error: Exception) -> None:
        """End one call of many: the others go on."""
        logger.error("a call of a proxy", exc_info=error)
        self.end(INTERNAL)

    @property
    def is_open(self) -> bool:
        """Whether the other side still waits for messages or for the end."""
        return self.ended is None and self.number in self._connection.streams

    @property
    def peer(self) -> str:
        """Address of the other side; empty: unknown."""
        return self._connection.peer

    def push(self) -> None:
        """Send what the windows allow, and the end."""
        connection, unsent, number = self._connection, self.unsent, self.number
        write = connection.writer.write
        while unsent and not connection.is_paused:
            room = min(connection.window, self.window, connection.frame_bytes)
            if room <= 0:
                break
            piece = bytes(unsent[:room])
            del unsent[:room]
            connection.window -= len(piece)
            self.window -= len(piece)
            write(frames.DATA, 0, number, piece)
        if connection.blocked:
            connection.blocked.pop(number, None)
        if unsent and self.window > 0:
            connection.blocked[number] = self  # The last: others go first.
        if unsent or self.held:
            self._allow()
            self._hold()
        if self.ended is not None and not unsent:
            write(frames.HEADERS, _END, number, self.ended)
            if not self.is_half_closed:
                connection.writer.reset(number, frames.NO_ERROR)
            connection.waste -= 1
            connection.forget(number)

    def grow(self, by: int) -> None:
        """Send more where the other side takes more."""
        self.window += by
        if self.window > frames.MAX_WINDOW:
            raise BrokenProtocol(frames.FLOW_CONTROL_ERROR, "a window is too large")
        if self.unsent:
            self.push()

    def _allow(self) -> None:
        """Let the other side send more, unless it leaves what it is sent."""
        if self.taken > _WINDOW // 2 and len(self.unsent) < _WINDOW:
            self._connection.writer.allow(self.number, self.taken)
            self.taken = 0

    def _hold(self) -> None:
        """Count what is kept, and give the stream up where the connection's are too much."""
        connection, held = self._connection, len(self.inbox) + len(self.unsent)
        connection.held += held - self.held
        self.held = held
        most = max(_MAX_HELD_BYTES, 8 * connection.max_message_bytes)
        if held and connection.held > most and self.number in connection.streams:
            connection.writer.reset(self.number, frames.ENHANCE_YOUR_CALM)
            connection.forget(self.number)

    def take(self, flags: int, payload: bytes) -> None:
        """Take a frame of data."""
        if self.is_half_closed:
            raise BrokenProtocol(frames.STREAM_CLOSED, "data comes after the end of its stream")
        self.taken += len(payload)
        if self.taken > _WINDOW // 2:
            if self.taken > _WINDOW:
                raise BrokenProtocol(frames.FLOW_CONTROL_ERROR, "data is beyond the window")
            self._allow()
        if flags & frames.PADDED:
            payload = frames.unpadded(flags, payload)
        if self.ended is None:
            self.inbox += payload
            self._read()
            if self.inbox or self.held:
                self._hold()
        if flags & frames.END_STREAM and self.number in self._connection.streams:
            self.half_close()

    def _read(self) -> None:
        """Hand on the complete messages."""
        inbox = self.inbox
        while self.call is not None and len(inbox) >= 5:
            end = 5 + int.from_bytes(inbox[1:5], "big")
            if inbox[0] or end - 5 > self._connection.max_message_bytes:
                # Nobody was told that it may compress.
                return self.end(UNIMPLEMENTED if inbox[0] else RESOURCE_EXHAUSTED)
            if end > len(inbox):
                return
            message = bytes(inbox[5:end])
            del inbox[:end]
            try:
                self.call.take(message)
            except Exception as error:
                self.fail(error)

    def half_close(self) -> None:
        """Note that nothing more comes."""
        self.is_half_closed = True
        if self.inbox:
            self.end(INTERNAL)  # A message is cut off.
        self.close_call()

    def close_call(self) -> None:
        """Tell the call that no message will follow."""
        if self.call is not None:
            try:
                self.call.close()
            except Exception as error:
                self.fail(error)


class Http2Protocol(asyncio.Protocol):
    """One connection."""

    def __init__(
        self, methods: Mapping[bytes, Callable[[Stream], CallHandler]], max_streams: int,
        max_message_bytes: int, open_connections: set[Http2Protocol],
    ) -> None:  # fmt: skip
        """Answer calls of some methods, by their paths; `open_connections` holds those there are.

        Calls beyond `max_streams` at a time are refused, and so are longer messages.
        """
        self._methods, self._max_streams = methods, max_streams
        self.max_message_bytes, self._open = max_message_bytes, open_connections
        self.streams: dict[int, Stream] = {}
        self._reader = frames.FrameReader()
        self._is_ending = self.is_paused = self._is_closed = False
        self._last_stream = self._last_call = 0
        """Highest number that was used, and that was not refused."""
        self.window, self._stream_window, self.frame_bytes = 65_535, 65_535, frames.LONGEST_FRAME
        """What the other side takes, bytes: on the connection, on a new stream, in a frame."""
        self.blocked: OrderedDict[int, Stream] = OrderedDict()
        """Streams that wait for the connection, and not for windows of their own."""
        self._taken = self.held = 0
        self.waste, self._waste_since_s = 0, 0.0
        self._loop = asyncio.get_running_loop()
        self.writer = frames.FrameWriter(self._loop.call_soon)
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what the other side may send."""
        self._transport = self.writer.transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_MAX_WRITTEN_BYTES)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else ""
        self._open.add(self)
        self._abort_in(_PREFACE_S)
        payload = frames.encoded_settings({
            frames.MAX_CONCURRENT_STREAMS: self._max_streams,
            frames.INITIAL_WINDOW_SIZE: _WINDOW,
            frames.MAX_HEADER_LIST_SIZE: frames.MAX_HEADER_BYTES,
        })  # fmt: skip
        self.writer.write(frames.SETTINGS, 0, 0, payload)
        self.writer.allow(0, frames.MAX_WINDOW - 65_535)

    def data_received(self, data: bytes) -> None:
        """Take all complete frames."""
        if self._is_closed:
            return
        self.writer.is_held = True
        try:
            for kind, flags, number, payload in self._reader.feed(data):
                if kind == frames.DATA:
                    self._take_data(flags, number, payload)
                else:
                    self._take(kind, flags, number, payload)
        except BrokenProtocol as error:
            logger.warning("a connection of a proxy: %s", error)
            self.writer.leave(self._last_call, error.code)
            self.close()
        self.writer.is_held = False
        self.writer.flush()

    def pause_writing(self) -> None:
        """Take nothing more while the other side does not take what is written."""
        self.is_paused = True
        self._transport.pause_reading()
        self._abort_in(_STALLED_S)

    def resume_writing(self) -> None:
        """Read and write again."""
        self.is_paused = False
        if not self._is_closed:
            self._abort_in(None)
            self._transport.resume_reading()
            self._push_blocked()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all calls."""
        self._open.discard(self)
        self._abort_in(None)
        self._is_closed = True
        for number in (*self.streams,):
            self.forget(number)

    def close(self) -> None:
        """Close the connection once what is written is sent; end all calls."""
        if self._is_closed:
            return
        self.writer.flush()
        self._is_closed = True
        self._transport.close()
        self._abort_in(_CLOSING_S)
        for number in (*self.streams,):
            self.forget(number)

    def go_away(self) -> None:
        """Ask the other side to send its next calls over another connection."""
        self._is_ending = True
        self.writer.leave(self._last_call, frames.NO_ERROR)

    def _abort_in(self, wait_s: float | None) -> None:
        """Set when to give the connection up; None: not at all."""
        if self._deadline is not None:
            self._deadline.cancel()
        if wait_s is not None:
            self._deadline = self._loop.call_later(wait_s, self._transport.abort)

    def _push_blocked(self) -> None:
        while self.blocked and self.window > 0 and not self.is_paused:
            self.blocked[next(iter(self.blocked))].push()

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            self._take_head(number, bool(flags & frames.END_STREAM), payload)
        elif kind == frames.RST_STREAM:
            if (stream := self._stream(number)) is not None:
                self.forget(number)
                if not stream.has_head:
                    self._note_waste(1)
        elif kind == frames.WINDOW_UPDATE:
            self._grow(number, int.from_bytes(payload, "big") & frames.MAX_WINDOW)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._take_settings(payload)
        elif kind == frames.PING and not flags & frames.ACK:
            self.writer.write(frames.PING, frames.ACK, 0, payload)

    def _stream(self, number: int) -> Stream | None:
        """Return an open stream; None: it is closed."""
        stream = self.streams.get(number)
        if stream is None and (number > self._last_stream or number % 2 == 0):
            raise BrokenProtocol(frames.PROTOCOL_ERROR, "a stream has not begun")
        return stream

    def _note_waste(self, amount: int) -> None:
        """Count work for nothing: calls reset before an answer, less those that were ended."""
        now_s = self._loop.time()
        if now_s - self._waste_since_s > _WASTE_S:
            self.waste, self._waste_since_s = 0, now_s
        self.waste += amount
        if self.waste > 4 * self._max_streams + _MAX_WASTE:
            raise BrokenProtocol(frames.ENHANCE_YOUR_CALM, "too much work for nothing")

    def _take_settings(self, payload: bytes) -> None:
        if not self.is_paused:
            self._abort_in(None)  # It has begun.
        settings = frames.settings_of(payload)
        self.frame_bytes = settings.get(frames.MAX_FRAME_SIZE, self.frame_bytes)
        self.writer.write(frames.SETTINGS, frames.ACK, 0, b"")
        window = settings.get(frames.INITIAL_WINDOW_SIZE, self._stream_window)
        change, self._stream_window = window - self._stream_window, window
        if change:
            # Else few bytes could make much work, again and again.
            self._note_waste(len(self.streams) // 16)
            for stream in (*self.streams.values(),):
                stream.grow(change)

    def _grow(self, number: int, by: int) -> None:
        if number == 0:
            self.window += by
            if self.window > frames.MAX_WINDOW:
                raise BrokenProtocol(frames.FLOW_CONTROL_ERROR, "a window is too large")
            self._push_blocked()
        elif (stream := self._stream(number)) is not None:
            stream.grow(by)

    def _take_head(self, number: int, is_end: bool, block: bytes) -> None:
        """Take the head of a call, or its trailers."""
        headers = self._reader.fields_of(block)
        if (stream := self.streams.get(number)) is not None:
            if stream.is_half_closed:
                raise BrokenProtocol(frames.STREAM_CLOSED, "a head comes after the end")
            if not is_end or b":path" in headers:
                raise BrokenProtocol(frames.PROTOCOL_ERROR, "trailers are not trailers")
            stream.half_close()
        elif number % 2 == 0 or (number <= self._last_stream and b":path" in headers):
            raise BrokenProtocol(frames.PROTOCOL_ERROR, "a number of a stream is used again")
        elif number <= self._last_stream:
            self.writer.reset(number, frames.STREAM_CLOSED)  # Trailers that have crossed the end.
        else:
            self._last_stream = number
            if len(self.streams) >= self._max_streams or self._is_ending:
                return self.writer.reset(number, frames.REFUSED_STREAM)
            self._last_call = number
            if not headers.keys() >= _REQUIRED:
                return self.writer.reset(number, frames.PROTOCOL_ERROR)
            self._open_stream(number, headers, is_end)

    def _open_stream(self, number: int, headers: Mapping[bytes, bytes], is_end: bool) -> None:
        stream = self.streams[number] = Stream(self, number, self._stream_window)
        stream.is_half_closed = is_end
        if not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            stream.ended = _UNSUPPORTED_TYPE
            return stream.push()
        make = self._methods.get(headers[b":path"])
        if make is None:
            return stream.end(UNIMPLEMENTED)
        try:
            stream.call = make(stream)
        except Exception as error:
            return stream.fail(error)
        if is_end or not stream.is_open:
            stream.close_call()

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        self._taken += len(payload)
        if self._taken > frames.MAX_WINDOW // 4:
            self.writer.allow(0, self._taken)
            self._taken = 0
        if (stream := self._stream(number)) is None:
            return self.writer.reset(number, frames.STREAM_CLOSED)
        stream.take(flags, payload)

    def forget(self, number: int) -> None:
        """Let go of a stream, which is over."""
        stream = self.streams.pop(number, None)
        if stream is not None:
            self.blocked.pop(number, None)
            self.held -= stream.held
            stream.held = 0
            stream.inbox.clear()
            stream.unsent.clear()
            stream.close_call()
