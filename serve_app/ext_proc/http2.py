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


class Call(Protocol):
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
        self.call: Call | None = None
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
            self._connection.write_frame(frames.HEADERS, frames.END_HEADERS, self.number, _HEAD)
        for message in messages:
            self.unsent += b"\0" + len(message).to_bytes(4, "big") + message
        self._connection.push(self)

    def end(self, status: int = OK) -> None:
        """End the call with a status of gRPC."""
        if not self.is_open:
            return
        trailer = b"\x00\x0bgrpc-status%c%d" % (len(str(status)), status)
        self.ended = trailer if self.has_head else _HEAD + trailer
        self.inbox.clear()
        self._connection.push(self)

    @property
    def is_open(self) -> bool:
        """Whether the other side still waits for messages or for the end."""
        return self.ended is None and self.number in self._connection.streams

    @property
    def peer(self) -> str:
        """Address of the other side; empty: unknown."""
        return self._connection.peer


class Http2Protocol(asyncio.Protocol):
    """One connection."""

    def __init__(
        self, methods: Mapping[bytes, Callable[[Stream], Call]], max_streams: int,
        max_message_bytes: int, open_connections: set[Http2Protocol],
    ) -> None:  # fmt: skip
        """Answer calls of some methods, by their paths; `open_connections` holds those there are.

        Calls beyond `max_streams` at a time are refused, and so are longer messages.
        """
        self._methods, self._max_streams = methods, max_streams
        self._max_message_bytes, self._open = max_message_bytes, open_connections
        self.streams: dict[int, Stream] = {}
        self._reader = frames.FrameReader()
        self._is_reading = self._is_ending = self._is_paused = self._is_closed = False
        self._last_stream = self._last_call = 0
        """Highest number that was used, and that was not refused."""
        self._window, self._stream_window, self._frame_bytes = 65_535, 65_535, frames.LONGEST_FRAME
        """What the other side takes, bytes: on the connection, on a new stream, in a frame."""
        self._blocked: OrderedDict[int, Stream] = OrderedDict()
        """Streams that wait for the connection, and not for windows of their own."""
        self._taken = self._held = 0
        self._waste, self._waste_since_s = 0, 0.0
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what the other side may send."""
        self._transport = cast(asyncio.Transport, transport)
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
        self.write_frame(frames.SETTINGS, 0, 0, payload)
        self._allow(0, frames.MAX_WINDOW - 65_535)

    def data_received(self, data: bytes) -> None:
        """Take all complete frames."""
        if self._is_closed:
            return
        self._is_reading = True
        try:
            for kind, flags, number, payload in self._reader.feed(data):
                if kind == frames.DATA:
                    self._take_data(flags, number, payload)
                else:
                    self._take(kind, flags, number, payload)
        except BrokenProtocol as error:
            logger.warning("a connection of a proxy: %s", error)
            self._write_goaway(error.code)
            self.close()
        self._is_reading = False
        self._flush()

    def pause_writing(self) -> None:
        """Take nothing more while the other side does not take what is written."""
        self._is_paused = True
        self._transport.pause_reading()
        self._abort_in(_STALLED_S)

    def resume_writing(self) -> None:
        """Read and write again."""
        self._is_paused = False
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
            self._forget(number)

    def close(self) -> None:
        """Close the connection once what is written is sent; end all calls."""
        if self._is_closed:
            return
        self._flush()
        self._is_closed = True
        self._transport.close()
        self._abort_in(_CLOSING_S)
        for number in (*self.streams,):
            self._forget(number)

    def go_away(self) -> None:
        """Ask the other side to send its next calls over another connection."""
        self._is_ending = True
        self._write_goaway(frames.NO_ERROR)

    def _abort_in(self, wait_s: float | None) -> None:
        """Set when to give the connection up; None: not at all."""
        if self._deadline is not None:
            self._deadline.cancel()
        if wait_s is not None:
            self._deadline = self._loop.call_later(wait_s, self._transport.abort)

    # What is sent

    def write_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Write a frame with the others of this turn of the loop."""
        if not (self._out or self._is_reading):
            self._loop.call_soon(self._flush)
        head = len(payload) << 48 | kind << 40 | flags << 32 | number
        self._out.append(head.to_bytes(9, "big"))
        self._out.append(payload)

    def _write_goaway(self, code: int) -> None:
        self.write_frame(frames.GOAWAY, 0, 0, (self._last_call << 32 | code).to_bytes(8, "big"))

    def _reset(self, number: int, code: int) -> None:
        self.write_frame(frames.RST_STREAM, 0, number, code.to_bytes(4, "big"))

    def _flush(self) -> None:
        if self._out and not self._is_closed:
            out, self._out = self._out, []
            self._transport.write(b"".join(out))

    def push(self, stream: Stream) -> None:
        """Send of a stream what the windows allow, and its end."""
        unsent, number = stream.unsent, stream.number
        while unsent and not self._is_paused:
            room = min(self._window, stream.window, self._frame_bytes)
            if room <= 0:
                break
            piece = bytes(unsent[:room])
            del unsent[:room]
            self._window -= len(piece)
            stream.window -= len(piece)
            self.write_frame(frames.DATA, 0, number, piece)
        if self._blocked:
            self._blocked.pop(number, None)
        if unsent and stream.window > 0:
            self._blocked[number] = stream  # The last: others go first.
        if unsent or stream.held:
            self._allow_stream(stream)
            self._hold(stream)
        if stream.ended is not None and not unsent:
            self.write_frame(frames.HEADERS, _END, number, stream.ended)
            if not stream.is_half_closed:
                self._reset(number, frames.NO_ERROR)
            self._waste -= 1
            self._forget(number)

    def _push_blocked(self) -> None:
        while self._blocked and self._window > 0 and not self._is_paused:
            self.push(self._blocked[next(iter(self._blocked))])

    def _allow(self, number: int, num_bytes: int) -> None:
        """Let the other side send more, on a stream or on all (0)."""
        self.write_frame(frames.WINDOW_UPDATE, 0, number, num_bytes.to_bytes(4, "big"))

    def _allow_stream(self, stream: Stream) -> None:
        """Let the other side send more on a stream, unless it leaves what it is sent."""
        if stream.taken > _WINDOW // 2 and len(stream.unsent) < _WINDOW:
            self._allow(stream.number, stream.taken)
            stream.taken = 0

    def _hold(self, stream: Stream) -> None:
        """Count what is kept of a stream, and give it up where the connection's are too much."""
        held = len(stream.inbox) + len(stream.unsent)
        self._held += held - stream.held
        stream.held = held
        most = max(_MAX_HELD_BYTES, 8 * self._max_message_bytes)
        if held and self._held > most and stream.number in self.streams:
            self._reset(stream.number, frames.ENHANCE_YOUR_CALM)
            self._forget(stream.number)

    # What comes

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            self._take_head(number, bool(flags & frames.END_STREAM), payload)
        elif kind == frames.RST_STREAM:
            if (stream := self._stream(number)) is not None:
                self._forget(number)
                if not stream.has_head:
                    self._note_waste(1)
        elif kind == frames.WINDOW_UPDATE:
            self._grow(number, int.from_bytes(payload, "big") & frames.MAX_WINDOW)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._take_settings(payload)
        elif kind == frames.PING and not flags & frames.ACK:
            self.write_frame(frames.PING, frames.ACK, 0, payload)

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
            self._waste, self._waste_since_s = 0, now_s
        self._waste += amount
        if self._waste > 4 * self._max_streams + _MAX_WASTE:
            raise BrokenProtocol(frames.ENHANCE_YOUR_CALM, "too much work for nothing")

    def _take_settings(self, payload: bytes) -> None:
        if not self._is_paused:
            self._abort_in(None)  # It has begun.
        settings = frames.settings_of(payload)
        self._frame_bytes = settings.get(frames.MAX_FRAME_SIZE, self._frame_bytes)
        self.write_frame(frames.SETTINGS, frames.ACK, 0, b"")
        window = settings.get(frames.INITIAL_WINDOW_SIZE, self._stream_window)
        change, self._stream_window = window - self._stream_window, window
        if change:
            # Else few bytes could make much work, again and again.
            self._note_waste(len(self.streams) // 16)
            for stream in (*self.streams.values(),):
                self._grow_stream(stream, change)

    def _grow(self, number: int, by: int) -> None:
        if number == 0:
            self._window += by
            if self._window > frames.MAX_WINDOW:
                raise BrokenProtocol(frames.FLOW_CONTROL_ERROR, "a window is too large")
            self._push_blocked()
        elif (stream := self._stream(number)) is not None:
            self._grow_stream(stream, by)

    def _grow_stream(self, stream: Stream, by: int) -> None:
        stream.window += by
        if stream.window > frames.MAX_WINDOW:
            raise BrokenProtocol(frames.FLOW_CONTROL_ERROR, "a window is too large")
        if stream.unsent:
            self.push(stream)

    def _take_head(self, number: int, is_end: bool, block: bytes) -> None:
        """Take the head of a call, or its trailers."""
        headers = self._reader.fields_of(block)
        if (stream := self.streams.get(number)) is not None:
            if stream.is_half_closed:
                raise BrokenProtocol(frames.STREAM_CLOSED, "a head comes after the end")
            if not is_end or b":path" in headers:
                raise BrokenProtocol(frames.PROTOCOL_ERROR, "trailers are not trailers")
            self._half_close(stream)
        elif number % 2 == 0 or (number <= self._last_stream and b":path" in headers):
            raise BrokenProtocol(frames.PROTOCOL_ERROR, "a number of a stream is used again")
        elif number <= self._last_stream:
            self._reset(number, frames.STREAM_CLOSED)  # Trailers that have crossed the end.
        else:
            self._last_stream = number
            if len(self.streams) >= self._max_streams or self._is_ending:
                return self._reset(number, frames.REFUSED_STREAM)
            self._last_call = number
            if not headers.keys() >= _REQUIRED:
                return self._reset(number, frames.PROTOCOL_ERROR)
            self._open_stream(number, headers, is_end)

    def _open_stream(self, number: int, headers: Mapping[bytes, bytes], is_end: bool) -> None:
        stream = self.streams[number] = Stream(self, number, self._stream_window)
        stream.is_half_closed = is_end
        if not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            stream.ended = _UNSUPPORTED_TYPE
            return self.push(stream)
        make = self._methods.get(headers[b":path"])
        if make is None:
            return stream.end(UNIMPLEMENTED)
        try:
            stream.call = make(stream)
        except Exception as error:
            return self._fail(stream, error)
        if is_end or not stream.is_open:
            self._close_call(stream)

    def _fail(self, stream: Stream, error: Exception) -> None:
        """End one call of many: the others go on."""
        logger.error("a call of a proxy", exc_info=error)
        stream.end(INTERNAL)

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        self._taken += len(payload)
        if self._taken > frames.MAX_WINDOW // 4:
            self._allow(0, self._taken)
            self._taken = 0
        if (stream := self._stream(number)) is None:
            return self._reset(number, frames.STREAM_CLOSED)
        if stream.is_half_closed:
            raise BrokenProtocol(frames.STREAM_CLOSED, "data comes after the end of its stream")
        stream.taken += len(payload)
        if stream.taken > _WINDOW // 2:
            if stream.taken > _WINDOW:
                raise BrokenProtocol(frames.FLOW_CONTROL_ERROR, "data is beyond the window")
            self._allow_stream(stream)
        if flags & frames.PADDED:
            payload = frames.unpadded(flags, payload)
        if stream.ended is None:
            stream.inbox += payload
            self._read(stream)
            if stream.inbox or stream.held:
                self._hold(stream)
        if flags & frames.END_STREAM and number in self.streams:
            self._half_close(stream)

    def _read(self, stream: Stream) -> None:
        """Hand on the complete messages of a stream."""
        inbox = stream.inbox
        while stream.call is not None and len(inbox) >= 5:
            end = 5 + int.from_bytes(inbox[1:5], "big")
            if inbox[0] or end - 5 > self._max_message_bytes:
                # Nobody was told that it may compress.
                return stream.end(UNIMPLEMENTED if inbox[0] else RESOURCE_EXHAUSTED)
            if end > len(inbox):
                return
            message = bytes(inbox[5:end])
            del inbox[:end]
            try:
                stream.call.take(message)
            except Exception as error:
                self._fail(stream, error)

    def _half_close(self, stream: Stream) -> None:
        stream.is_half_closed = True
        if stream.inbox:
            stream.end(INTERNAL)  # A message is cut off.
        self._close_call(stream)

    def _close_call(self, stream: Stream) -> None:
        if stream.call is not None:
            try:
                stream.call.close()
            except Exception as error:
                self._fail(stream, error)

    def _forget(self, number: int) -> None:
        stream = self.streams.pop(number, None)
        if stream is not None:
            self._blocked.pop(number, None)
            self._held -= stream.held
            stream.held = 0
            stream.inbox.clear()
            stream.unsent.clear()
            self._close_call(stream)
