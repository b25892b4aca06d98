"""gRPC's server side over HTTP/2 (RFC 9113), as far as a proxy's calls need it.

Messages are handed on as they come, in the event loop's callback, and what is sent in one turn of
the loop is written at once: a task and a system call per message would cost more than a pick
(docs/results/gateway.md). grpcio and Envoy are its oracles in the tests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol, cast

from hpack import Decoder, HPACKError

logger = logging.getLogger(__name__)

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS = 0, 1, 2, 3, 4
_PUSH, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 5, 6, 7, 8, 9
_END_STREAM, _END_HEADERS, _PADDED, _HAS_PRIORITY, _ACK = 1, 4, 8, 32, 1
_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 3, 4, 5
_PROTOCOL_ERROR, _FLOW_CONTROL_ERROR, _FRAME_SIZE_ERROR = 1, 3, 6
_REFUSED_STREAM, _COMPRESSION_ERROR, _ENHANCE_YOUR_CALM = 7, 9, 11
_MAX_FRAME = 1 << 14
"""Longest frame that the other side may send: the default."""
_MAX_WINDOW = (1 << 31) - 1
_WINDOW = 1 << 20
"""Bytes that the other side may send on a stream before they are taken; taking is immediate."""
_MAX_HEADER_BYTES = 64 << 10
_HEAD = b"\x88\x0f\x10\x10application/grpc"  # :status 200, and the content type, not indexed.
OK, NOT_FOUND, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 5, 8, 12, 13


class Call(Protocol):
    """What handles one call."""

    def take(self, message: bytes) -> None:
        """Take a message."""

    def close(self) -> None:
        """Note that no message will follow: the other side has ended the call, or is gone."""


class Stream:
    """One call of a connection, as it is answered."""

    __slots__ = ("_connection", "_has_head", "call", "ended", "inbox", "is_half_closed", "number",
                 "taken", "unsent", "window")  # fmt: skip

    def __init__(self, connection: Http2Protocol, number: int, window: int) -> None:
        self._connection, self.number, self.window = connection, number, window
        self.call: Call | None = None
        self.inbox = bytearray()
        self.taken = 0
        """Bytes that came since the other side was last told that it may send more."""
        self.unsent = bytearray()
        """What the other side's window has no room for."""
        self.ended: bytes | None = None
        """Trailers that follow what is not sent; None: it goes on."""
        self._has_head = self.is_half_closed = False

    def send(self, *messages: bytes) -> None:
        """Send messages; nothing where the call has ended."""
        if self.ended is not None or self.number not in self._connection.streams:
            return
        if not self._has_head:
            self._has_head = True
            self._connection.write_frame(_HEADERS, _END_HEADERS, self.number, _HEAD)
        for message in messages:
            self.unsent += b"\0" + len(message).to_bytes(4, "big") + message
        self._connection.push(self)

    def end(self, status: int = OK) -> None:
        """End the call with a status of gRPC."""
        if self.ended is not None or self.number not in self._connection.streams:
            return
        trailer = b"\x00\x0bgrpc-status" + bytes([len(str(status))]) + str(status).encode()
        self.ended = trailer if self._has_head else _HEAD + trailer
        self._connection.push(self)

    @property
    def peer(self) -> str:
        """Address of the other side; empty: unknown."""
        return self._connection.peer


class _Broken(Exception):
    """The other side violates the protocol."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


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
        self.peer = ""
        self._buffer = b""
        self._has_preface = self._is_ending = False
        self._decoder = Decoder(max_header_list_size=_MAX_HEADER_BYTES)
        self._block: tuple[int, int, bytearray] | None = None
        """Stream, flags and fragments of a head that is not complete."""
        self._last_stream = 0
        self._window, self._stream_window, self._frame_bytes = 65_535, 65_535, _MAX_FRAME
        """What the other side takes, bytes: on the connection, on a new stream, in a frame."""
        self._blocked: dict[int, Stream] = {}
        self._taken = 0
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what the other side may send."""
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else ""
        self._open.add(self)
        settings = (
            (_MAX_CONCURRENT_STREAMS, self._max_streams), (_INITIAL_WINDOW_SIZE, _WINDOW),
        )  # fmt: skip
        payload = b"".join(
            name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in settings
        )
        self.write_frame(_SETTINGS, 0, 0, payload)
        self.write_frame(_WINDOW_UPDATE, 0, 0, (_MAX_WINDOW - 65_535).to_bytes(4, "big"))

    def data_received(self, data: bytes) -> None:
        """Take all complete frames."""
        buffer, at = self._buffer + data, 0
        try:
            if not self._has_preface:
                if not buffer.startswith(_PREFACE[: len(buffer)]):
                    raise _Broken(_PROTOCOL_ERROR, "no HTTP/2")
                if len(buffer) < len(_PREFACE):
                    self._buffer = buffer
                    return
                self._has_preface, at = True, len(_PREFACE)
            while len(buffer) - at >= 9:
                length = int.from_bytes(buffer[at : at + 3], "big")
                if length > _MAX_FRAME:
                    raise _Broken(_FRAME_SIZE_ERROR, "a frame is too long")
                end = at + 9 + length
                if end > len(buffer):
                    break
                number = int.from_bytes(buffer[at + 5 : at + 9], "big") & _MAX_WINDOW
                self._take(buffer[at + 3], buffer[at + 4], number, buffer[at + 9 : end])
                at = end
        except _Broken as error:
            logger.warning("a connection of a proxy: %s", error)
            payload = self._last_stream.to_bytes(4, "big") + error.code.to_bytes(4, "big")
            self.write_frame(_GOAWAY, 0, 0, payload)
            self._flush()
            self.close()
            return
        self._buffer = buffer[at:]
        if self._out:
            self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all calls."""
        self._open.discard(self)
        self._transport = None
        for number in (*self.streams,):
            self._forget(number)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def go_away(self) -> None:
        """Ask the other side to send its next calls over another connection."""
        self._is_ending = True
        self.write_frame(_GOAWAY, 0, 0, self._last_stream.to_bytes(4, "big") + bytes(4))

    # What is sent

    def write_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Write a frame with the others of this turn of the loop."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(
            len(payload).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big")
        )
        self._out.append(payload)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and self._transport is not None:
            self._transport.write(b"".join(out))

    def push(self, stream: Stream) -> None:
        """Send of a stream what the windows allow, and its end."""
        unsent, number = stream.unsent, stream.number
        while unsent and (room := min(self._window, stream.window, self._frame_bytes)) > 0:
            piece = bytes(unsent[:room])
            del unsent[:room]
            self._window -= len(piece)
            stream.window -= len(piece)
            self.write_frame(_DATA, 0, number, piece)
        if unsent:
            self._blocked[number] = stream
            return
        self._blocked.pop(number, None)
        if stream.ended is not None:
            self.write_frame(_HEADERS, _END_HEADERS | _END_STREAM, number, stream.ended)
            if stream.is_half_closed:
                self._forget(number)

    # What comes

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and (kind != _CONTINUATION or number != self._block[0]):
            raise _Broken(_PROTOCOL_ERROR, "a head is not complete")
        if kind == _DATA:
            self._take_data(flags, number, payload)
        elif kind == _HEADERS:
            payload = _unpadded(flags, payload)
            payload = payload[5:] if flags & _HAS_PRIORITY else payload
            self._block = number, flags, bytearray()
            self._take_block(flags, payload)
        elif kind == _CONTINUATION:
            if self._block is None:
                raise _Broken(_PROTOCOL_ERROR, "a head goes on that has not begun")
            self._take_block(flags, payload)
        elif kind == _RST_STREAM:
            self._forget(number)
        elif kind == _WINDOW_UPDATE:
            self._grow(number, payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._take_settings(payload)
        elif kind == _PING and not flags & _ACK:
            if len(payload) != 8:
                raise _Broken(_FRAME_SIZE_ERROR, "a ping has eight bytes")
            self.write_frame(_PING, _ACK, 0, payload)
        elif kind == _PUSH:
            raise _Broken(_PROTOCOL_ERROR, "a client pushes nothing")

    def _take_settings(self, payload: bytes) -> None:
        if len(payload) % 6:
            raise _Broken(_FRAME_SIZE_ERROR, "settings have six bytes each")
        for at in range(0, len(payload), 6):
            name = int.from_bytes(payload[at : at + 2], "big")
            value = int.from_bytes(payload[at + 2 : at + 6], "big")
            if name == _INITIAL_WINDOW_SIZE:
                if value > _MAX_WINDOW:
                    raise _Broken(_FLOW_CONTROL_ERROR, "a window is too large")
                change, self._stream_window = value - self._stream_window, value
                for stream in self.streams.values():
                    stream.window += change
            elif name == _MAX_FRAME_SIZE:
                if not _MAX_FRAME <= value < 1 << 24:
                    raise _Broken(_PROTOCOL_ERROR, "a frame size is out of bounds")
                self._frame_bytes = value
        self.write_frame(_SETTINGS, _ACK, 0, b"")
        self._push_blocked()

    def _grow(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _Broken(_FRAME_SIZE_ERROR, "a window grows by four bytes")
        by = int.from_bytes(payload, "big") & _MAX_WINDOW
        if number == 0:
            self._window += by
            if by == 0 or self._window > _MAX_WINDOW:
                raise _Broken(_FLOW_CONTROL_ERROR, "a window is too large")
            self._push_blocked()
        elif (stream := self.streams.get(number)) is not None:
            stream.window += by
            if by == 0 or stream.window > _MAX_WINDOW:
                raise _Broken(_FLOW_CONTROL_ERROR, "a window is too large")
            if number in self._blocked:
                self.push(stream)

    def _push_blocked(self) -> None:
        for stream in (*self._blocked.values(),):
            if self._window <= 0:
                return
            self.push(stream)

    def _take_block(self, flags: int, fragment: bytes) -> None:
        assert self._block is not None
        number, first_flags, block = self._block
        block += fragment
        if len(block) > _MAX_HEADER_BYTES:
            raise _Broken(_ENHANCE_YOUR_CALM, "a head is too long")
        if not flags & _END_HEADERS:
            return
        self._block = None
        try:
            # Always: what it says of names counts for later heads.
            headers = dict(self._decoder.decode(bytes(block), raw=True))
        except HPACKError as error:
            raise _Broken(_COMPRESSION_ERROR, f"a head cannot be read: {error}") from None
        if (stream := self.streams.get(number)) is None:
            stream = self._open_stream(number, headers)
        if stream is not None and first_flags & _END_STREAM:
            self._half_close(stream)

    def _open_stream(self, number: int, headers: Mapping[bytes, bytes]) -> Stream | None:
        if number % 2 == 0 or number <= self._last_stream:
            raise _Broken(_PROTOCOL_ERROR, "a number of a stream is used again")
        self._last_stream = number
        if len(self.streams) >= self._max_streams or self._is_ending:
            self._reset(number, _REFUSED_STREAM)
            return None
        stream = self.streams[number] = Stream(self, number, self._stream_window)
        make = self._methods.get(headers.get(b":path", b""))
        if make is None:
            stream.end(UNIMPLEMENTED)
        else:
            stream.call = make(stream)
        return stream

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        self._taken += len(payload)
        if self._taken > _MAX_WINDOW // 4:
            self.write_frame(_WINDOW_UPDATE, 0, 0, self._taken.to_bytes(4, "big"))
            self._taken = 0
        stream = self.streams.get(number)
        if stream is None:
            if number > self._last_stream or number % 2 == 0:
                raise _Broken(_PROTOCOL_ERROR, "data of a stream that has not begun")
            return
        stream.taken += len(payload)
        if stream.taken > _WINDOW // 2:
            self.write_frame(_WINDOW_UPDATE, 0, number, stream.taken.to_bytes(4, "big"))
            stream.taken = 0
        stream.inbox += _unpadded(flags, payload)
        self._read(stream)
        if flags & _END_STREAM and number in self.streams:
            self._half_close(stream)

    def _read(self, stream: Stream) -> None:
        """Hand on the complete messages of a stream."""
        inbox = stream.inbox
        while len(inbox) >= 5:
            end = 5 + int.from_bytes(inbox[1:5], "big")
            if inbox[0] or end - 5 > self._max_message_bytes:
                # Nobody was told that it may compress.
                stream.end(UNIMPLEMENTED if inbox[0] else RESOURCE_EXHAUSTED)
                self._forget(stream.number)
                return
            if end > len(inbox):
                return
            message = bytes(inbox[5:end])
            del inbox[:end]
            if stream.call is not None and stream.ended is None:
                try:
                    stream.call.take(message)
                except Exception:
                    # One call of many: the others go on.
                    logger.exception("a call of a proxy")
                    stream.end(INTERNAL)

    def _half_close(self, stream: Stream) -> None:
        stream.is_half_closed = True
        if stream.ended is not None:
            self.push(stream)
        elif stream.call is not None:
            stream.call.close()

    def _reset(self, number: int, code: int) -> None:
        self.write_frame(_RST_STREAM, 0, number, code.to_bytes(4, "big"))

    def _forget(self, number: int) -> None:
        self._blocked.pop(number, None)
        stream = self.streams.pop(number, None)
        if stream is not None and stream.call is not None:
            stream.call.close()


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & _PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise _Broken(_PROTOCOL_ERROR, "padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]
