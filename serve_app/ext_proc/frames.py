"""Frames of HTTP/2 (RFC 9113): how they are cut out of bytes, and what each may look like."""

from __future__ import annotations

from asyncio import WriteTransport
from collections.abc import Callable, Iterator
from struct import Struct

from hpack import Decoder, HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9
END_STREAM, END_HEADERS, PADDED, HAS_PRIORITY, ACK = 1, 4, 8, 32, 1
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 2, 3, 4
MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 5, 6
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 9, 11
LONGEST_FRAME = 1 << 14
"""Longest frame that may be sent to who has not said otherwise."""
MAX_WINDOW = (1 << 31) - 1
MAX_HEADER_BYTES = 64 << 10
"""Of a head, as it is sent and as it is read."""

_FRAME_HEAD = Struct(">LBL")
_LENGTHS = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_OF_CONNECTION = frozenset((SETTINGS, PING, GOAWAY))


class BrokenProtocol(Exception):
    """The other side violates the protocol: the connection ends."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class FrameReader:
    """Cuts what a client sends into frames."""

    def __init__(self) -> None:
        self._buffer = b""
        self._has_preface = self._has_settings = False
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._head: tuple[int, int, bytearray] | None = None
        """Flags, stream and fragments of a head that is not complete."""

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield kind, flags, stream and payload of all frames that are complete.

        A head is one frame, and BrokenProtocol says what is none.
        """
        buffer, at = self._buffer + data, 0
        if not self._has_preface:
            if not buffer.startswith(PREFACE[: len(buffer)]):
                raise BrokenProtocol(PROTOCOL_ERROR, "no HTTP/2")
            if len(buffer) >= len(PREFACE):
                self._has_preface, at = True, len(PREFACE)
        while self._has_preface and len(buffer) - at >= 9:
            word, flags, number = _FRAME_HEAD.unpack_from(buffer, at)
            length, kind, number = word >> 8, word & 255, number & MAX_WINDOW
            if length > LONGEST_FRAME:
                raise BrokenProtocol(FRAME_SIZE_ERROR, "a frame is too long")
            end = at + 9 + length
            if end > len(buffer):
                break
            payload = buffer[at + 9 : end]
            at = end
            if kind != DATA or self._head is not None:
                self._check(kind, flags, number, payload)
            if kind == HEADERS or kind == CONTINUATION:
                if (head := self._join(kind, flags, number, payload)) is not None:
                    yield head
            else:
                yield kind, flags, number, payload
        self._buffer = buffer[at:]

    def _check(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Refuse a frame of a wrong length, or in a wrong place."""
        if (self._head is not None) != (kind == CONTINUATION):
            raise BrokenProtocol(PROTOCOL_ERROR, "a head does not go on, or has not begun")
        if not self._has_settings and (kind != SETTINGS or flags & ACK):
            raise BrokenProtocol(PROTOCOL_ERROR, "the first frame is not settings")
        self._has_settings = True
        if len(payload) != _LENGTHS.get(kind, len(payload)):
            raise BrokenProtocol(FRAME_SIZE_ERROR, "a frame has another length than its kind")
        if kind == SETTINGS and (len(payload) % 6 or (flags & ACK and payload)):
            raise BrokenProtocol(FRAME_SIZE_ERROR, "settings have six bytes each")
        if (kind in _OF_CONNECTION and number) or (kind == PRIORITY and not number):
            raise BrokenProtocol(PROTOCOL_ERROR, "a frame is on a stream that is not for its kind")
        if kind == WINDOW_UPDATE and not int.from_bytes(payload, "big") & MAX_WINDOW:
            raise BrokenProtocol(PROTOCOL_ERROR, "a window grows by nothing")
        if kind == PUSH:
            raise BrokenProtocol(PROTOCOL_ERROR, "a client pushes")

    def _join(
        self, kind: int, flags: int, number: int, payload: bytes
    ) -> tuple[int, int, int, bytes] | None:
        """Add a fragment to a head; return the head where that was the last."""
        if kind == HEADERS:
            payload = unpadded(flags, payload)
            if flags & HAS_PRIORITY and len(payload) < 5:
                raise BrokenProtocol(FRAME_SIZE_ERROR, "a priority has five bytes")
            self._head = flags, number, bytearray(payload[5 * bool(flags & HAS_PRIORITY) :])
        assert self._head is not None
        first_flags, begun, block = self._head
        if number != begun:
            raise BrokenProtocol(PROTOCOL_ERROR, "a head goes on elsewhere")
        if kind == CONTINUATION:
            block += payload
        if len(block) > MAX_HEADER_BYTES:
            raise BrokenProtocol(ENHANCE_YOUR_CALM, "a head is too long")
        if not flags & END_HEADERS:
            return None
        self._head = None
        return HEADERS, first_flags, number, bytes(block)

    def fields_of(self, block: bytes) -> dict[bytes, bytes]:
        """Decode a head; each one, as it says what names mean in later ones."""
        try:
            return dict(self._decoder.decode(block, raw=True))
        except HPACKError as error:
            # Its text may hold all of the head.
            reason = f"a head cannot be read: {type(error).__name__}"
            raise BrokenProtocol(COMPRESSION_ERROR, reason) from None


class FrameWriter:
    """Gathers the frames of one turn of the event loop, and writes them at once."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Write at the end of this turn, by `call_soon` of the loop."""
        self._call_soon = call_soon
        self._frames: list[bytes] = []
        self.transport: WriteTransport
        self.is_held = False
        """Whether `flush` is called in this turn anyway."""

    def write(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Write a frame."""
        if not (self._frames or self.is_held):
            self._call_soon(self.flush)
        head = len(payload) << 48 | kind << 40 | flags << 32 | number
        self._frames.append(head.to_bytes(9, "big"))
        self._frames.append(payload)

    def reset(self, number: int, code: int) -> None:
        """End a stream."""
        self.write(RST_STREAM, 0, number, code.to_bytes(4, "big"))

    def allow(self, number: int, num_bytes: int) -> None:
        """Let the other side send more, on a stream or on all (0)."""
        self.write(WINDOW_UPDATE, 0, number, num_bytes.to_bytes(4, "big"))

    def leave(self, last_stream: int, code: int) -> None:
        """Say that streams after one are not taken."""
        self.write(GOAWAY, 0, 0, (last_stream << 32 | code).to_bytes(8, "big"))

    def flush(self) -> None:
        """Hand on what was written; nothing where the connection is being closed."""
        if self._frames and not self.transport.is_closing():
            written, self._frames = self._frames, []
            self.transport.write(b"".join(written))


def unpadded(flags: int, payload: bytes) -> bytes:
    """Return what is in a frame of data or of a head."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise BrokenProtocol(PROTOCOL_ERROR, "padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]


def settings_of(payload: bytes) -> dict[int, int]:
    """Return the settings of a frame, the last of each."""
    settings: dict[int, int] = {}
    for at in range(0, len(payload), 6):
        name = int.from_bytes(payload[at : at + 2], "big")
        settings[name] = value = int.from_bytes(payload[at + 2 : at + 6], "big")
        if name == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise BrokenProtocol(FLOW_CONTROL_ERROR, "a window is too large")
        if name == MAX_FRAME_SIZE and not LONGEST_FRAME <= value < 1 << 24:
            raise BrokenProtocol(PROTOCOL_ERROR, "a frame size is out of bounds")
        if name == ENABLE_PUSH and value > 1:
            raise BrokenProtocol(PROTOCOL_ERROR, "a switch is neither on nor off")
    return settings


def encoded_settings(settings: dict[int, int]) -> bytes:
    """Return the payload of a frame of settings."""
    return b"".join(
        name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in settings.items()
    )
