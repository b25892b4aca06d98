"""What carriers and their decider tell each other over a Unix socket: frames of bytes.

A frame is its payload's length, its kind and a number, which names the request. What is said in one
step of an event loop goes out in one write, and what nobody waits for goes with what comes next.

Both ends first say which version they speak (`Hello`), and ends of two versions part. All versions
have the frame's head, `FrameKind.HELLO` and JSON in it. Any other change raises `WIRE_VERSION`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from importlib.metadata import version
from typing import Any, Self, cast

import numpy as np

from serve_app.cluster import Cluster
from serve_app.engines.waiting import read_order_key, write_order_key
from serve_app.gateway.callers import ANYBODY, Caller
from serve_app.gateway.exchange import Call, Headers, InferenceRequest
from serve_app.gateway.rate_limits import OverLimit
from serve_app.gateway.replicas import Prompt
from tokenyard.routing.types import OrderKey

logger = logging.getLogger(__name__)

WIRE_VERSION = 7
"""Of all frames but `FrameKind.HELLO`. Ends of version 1 do not say theirs."""
_BEGAN_S = time.monotonic()
_RELEASE = version("tokenyard")
_HEAD = struct.Struct("<IBI")
_COUNT = struct.Struct("<II")
_ENDED = struct.Struct("<I??")
_MOST_BYTES = 64 << 20
_CALL = Call(b"", b"", b"", stream=False)
"""In place of what a caller wrote, which stays with the carrier."""
_SOON_S = 1e-3
"""For what nobody waits for."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


class FrameKind(IntEnum):
    """What a frame says."""

    HELLO = 1
    """Carrier, and back: who is there, as `Hello` lays it out."""
    ASK = 2
    """Carrier: a request, as `write_request` lays it out."""
    TOKENS = 3
    """Carrier: pairs of a request's number and its tokens so far."""
    STATUS = 4
    """Carrier: what the replica of a request told of itself, as the replica wrote it."""
    ENDED = 5
    """Carrier: a request was answered."""
    FAILED = 6
    """Carrier: JSON, a replica failed."""
    REJECTED = 7
    """Carrier: an endpoint has something against the request; its status."""
    GONE = 8
    """Carrier: who asked has left."""
    HTTP = 9
    """Carrier: a request that the decider answers itself."""
    PING = 10
    """Carrier, and back: is anybody there?"""
    SEND = 11
    """Decider: where a request goes and how it waits there, as `write_place` lays it out."""
    STOP = 12
    """Decider: an attempt is given up."""
    REFUSED = 13
    """Decider: JSON, why a request is not answered."""
    HTTP_ANSWER = 14
    """Decider: status, headers and body."""
    LEAVE = 15
    """Decider: it is about to end, and wants to be asked nothing new."""
    SENT = 16
    """Carrier: a request goes out to its replica."""


@dataclass(frozen=True)
class Hello:
    """What an end says first, and is told before anything else."""

    wire_version: int = WIRE_VERSION
    release: str = _RELEASE
    began_s: float = _BEGAN_S
    """When its process began, by the machine's monotonic clock."""
    pid: int = field(default_factory=os.getpid)
    carried_alone: int = 0
    """Of a carrier: requests that it has placed itself since it last had a decider."""
    is_next: bool = False
    """Of a decider that refuses a carrier: whether this is the one to be replaced now."""

    def write(self) -> bytes:
        """Lay it out."""
        return to_json(asdict(self))

    @classmethod
    def read(cls, payload: bytes) -> Self:
        """Read what `write` wrote, in any version; fields that are not there are an old end's.

        Raises:
            ValueError: It is something else.
        """
        found = json.loads(payload)
        if not isinstance(found, dict):
            raise ValueError("a hello is no JSON object")
        said = asdict(OF_VERSION_1) | {
            one.name: found[one.name] for one in fields(cls) if one.name in found
        }
        for name, kind in _TYPES.items():
            if type(said[name]) not in kind:
                raise ValueError(f"{name} of a hello is {said[name]!r:.100}")
        return cls(**said)

    def refusal(self, decider: Hello) -> str | None:
        """Say why this carrier and a decider cannot work together; None: they can."""
        if self.wire_version == decider.wire_version:
            return None
        older = "carrier" if self.is_older_than(decider) else "decider"
        return (
            f"carrier {self.pid} of release {self.release} speaks version {self.wire_version} of "
            f"the carriers' wire, decider {decider.pid} of release {decider.release} speaks "
            f"{decider.wire_version}: the {older} began first and has to be replaced"
        )

    def is_older_than(self, decider: Hello) -> bool:
        """Whether this carrier began first: what runs longer is not what is installed now."""
        return self.began_s <= decider.began_s


OF_VERSION_1 = Hello(1, "unknown", 0.0, 0)
"""What an end says that says nothing of it."""
_TYPES = {
    "wire_version": (int,), "release": (str,), "began_s": (float, int), "pid": (int,),
    "carried_alone": (int,), "is_next": (bool,),
}  # fmt: skip


class FrameProtocol(asyncio.Protocol):
    """One end of a connection; subclasses say what they do with frames."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._unsent: list[bytes] = []
        self._flushing: asyncio.Handle | None = None
        self._flushing_later: asyncio.TimerHandle | None = None
        self.heard_s = self._loop.time()
        """When something came last, by the loop's clock."""

    def take(self, kind: int, number: int, payload: bytes) -> None:
        """Handle a frame."""
        raise NotImplementedError

    def lost(self) -> None:
        """Note that the other end is gone."""
        raise NotImplementedError

    def send(
        self, kind: FrameKind, number: int, payload: bytes = b"", is_urgent: bool = True
    ) -> None:
        """Send a frame at the end of this step of the loop, or, not urgent, a moment later."""
        self._unsent.append(_HEAD.pack(len(payload), kind, number))
        if payload:
            self._unsent.append(payload)
        self.flush_soon(is_urgent)

    def flush_soon(self, is_urgent: bool) -> None:
        """Send what there is at the end of this step of the loop, or a moment later."""
        if self._flushing is not None:
            return
        if is_urgent:
            self._flushing = self._loop.call_soon(self._flush)
        elif self._flushing_later is None:
            # It stays where something urgent comes before it: to cancel one costs as much.
            self._flushing_later = self._loop.call_later(_SOON_S, self._flush_later)

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def part(self) -> None:
        """Send what there is, and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def before_flush(self) -> None:
        """Add what is to be sent with the rest."""

    def _flush_later(self) -> None:
        self._flushing_later = None
        self._flush()

    def _flush(self) -> None:
        self._flushing = None
        self.before_flush()
        if self._transport is not None and self._unsent and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Handle all frames that are whole."""
        self.heard_s = self._loop.time()
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= _HEAD.size:
            size, kind, number = _HEAD.unpack_from(data, at)
            start = at + _HEAD.size
            if size > _MOST_BYTES:
                logger.error("a frame of %d bytes between carrier and decider", size)
                self.close()
                return
            if start + size > end:
                break
            at = start + size
            try:
                self.take(kind, number, data[start:at])
            except Exception:
                # Of its own version nothing else is to be expected of this end any more.
                logger.exception("a frame of kind %d between carrier and decider", kind)
                self.close()
                return
        self._rest = data[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell what is built on this."""
        for one in (self._flushing, self._flushing_later):
            if one is not None:
                one.cancel()
        self.lost()


def block_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Sizes of the blocks by whose names pools' prefix caches are known, tokens."""
    sizes = {own_pool.prefix_block_tokens for own_pool in cluster.own_pools}
    sizes |= {external_pool.prefix_block_tokens for external_pool in cluster.external_pools}
    return tuple(sorted(sizes - {0}))


def write_request(
    request: InferenceRequest, class_name: str, prompt: Prompt, block_sizes: Sequence[int]
) -> bytes:
    """Lay out what a decider has to know of a request.

    Args:
        request: The request.
        class_name: Its class.
        prompt: Its prompt, of which only the names of its blocks are told.
        block_sizes: Sizes of blocks that pools have, tokens.
    """
    blocks = [prompt.blocks(size) for size in block_sizes]
    told = _encode(
        [
            request.request_id, class_name, len(request.token_ids), request.max_tokens,
            request.for_engines, [len(block) for block in blocks], request.model, request.tenant,
            *_told(request),
        ]
    ).encode()  # fmt: skip
    names = (block.tobytes() for block in blocks)
    return b"".join((len(told).to_bytes(4, "little"), told, *names))


def read_request(payload: bytes, block_sizes: Sequence[int]) -> tuple[InferenceRequest, str]:
    """Read what `write_request` wrote; return the request and the name of its class."""
    start = 4 + int.from_bytes(payload[:4], "little")
    (
        request_id, class_name, num_tokens, max_tokens, for_engines, counts, model, tenant, *told,
    ) = json.loads(payload[4:start])  # fmt: skip
    *known, trace = told or ("",)
    caller = Caller(*known) if any(known) else ANYBODY
    # A copy may be written to: what is compiled would be compiled anew for other arrays.
    names, blocks, end = np.frombuffer(payload[start:], np.int64).copy(), {}, 0
    for size, count in zip(block_sizes, counts, strict=True):
        blocks[size] = names[end : end + count]
        end += count
    prompt = Prompt(range(num_tokens), blocks)
    return (
        InferenceRequest(
            request_id,
            prompt.token_ids,
            max_tokens,
            _CALL,
            for_engines,
            prompt,
            model,
            tenant,
            caller,
            trace.encode("latin-1"),
        ),
        class_name,
    )


def _told(request: InferenceRequest) -> tuple[str, ...]:
    """What a decider has to know of a caller: what it may ask was looked up before."""
    caller = request.caller
    if caller is ANYBODY and not request.trace:
        return ()
    return caller.tenant, caller.key, caller.address, request.trace.decode("latin-1")


def write_place(
    pool: str, replica_id: str, order_key: OrderKey | None = None, headers: Headers = (),
    trace: bytes = b"",
) -> bytes:  # fmt: skip
    """Lay out where a request goes.

    Args:
        pool: Name of the pool.
        replica_id: Of its replica.
        order_key: By what key it waits there; None: by none.
        headers: What the head of its answer gets.
        trace: Line of a header that its own head gets, or nothing.
    """
    key = "" if order_key is None else write_order_key(order_key)
    place = f"{pool}\n{replica_id}\n{key}".encode()
    if not headers and not trace:
        return place
    parts = (trace.strip(), *(part for header in headers for part in header))
    return b"\n".join((place, *parts))


def read_place(payload: bytes) -> tuple[str, str, OrderKey | None, Headers, bytes]:
    """Read what `write_place` wrote; return its arguments."""
    pool, replica_id, key, *more = payload.split(b"\n")
    trace, *parts = more or (b"",)
    headers = list(zip(parts[::2], parts[1::2], strict=True))
    line = trace + b"\r\n" if trace else b""
    order_key = read_order_key(key.decode()) if key else None
    return pool.decode(), replica_id.decode(), order_key, headers, line


def write_refusal(
    kind: str, reason: str, status: int, retry_after_s: int, over: OverLimit | None
) -> bytes:
    """Lay out why a request is not answered.

    Args:
        kind: `refused`, `draining`, `unanswerable` or `unserved`.
        reason: In a sentence.
        status: Of HTTP.
        retry_after_s: When to come back, where it is refused.
        over: The caller's limit, where that is why.
    """
    told: list[Any] = [kind, reason, status, retry_after_s]
    if over is not None:
        names = [[one.decode() for one in header] for header in over.headers]
        told += [over.code, over.kind, names]
    return to_json(told)


def read_refusal(payload: bytes) -> tuple[str, str, int, int, OverLimit | None]:
    """Read what `write_refusal` wrote."""
    kind, reason, status, retry_after_s, *told = json.loads(payload)
    if not told:
        return kind, reason, status, retry_after_s, None
    code, type_name, names = told
    headers = [(name.encode(), value.encode()) for name, value in names]
    over = OverLimit(reason, retry_after_s, code, type_name, headers)
    return kind, reason, status, retry_after_s, over


def write_counts(tokens: dict[int, int]) -> bytes:
    """Lay out how many tokens of which requests have come so far."""
    return b"".join([_COUNT.pack(number, count) for number, count in tokens.items()])


def read_counts(payload: bytes) -> Iterator[tuple[int, int]]:
    """Read what `write_counts` wrote."""
    return _COUNT.iter_unpack(payload)


def write_end(num_tokens: int, is_cut: bool, is_whole: bool) -> bytes:
    """Lay out how an answer ended.

    Args:
        num_tokens: Tokens that it has.
        is_cut: Whether it ended at its greatest length.
        is_whole: Whether all came at once.
    """
    return _ENDED.pack(num_tokens, is_cut, is_whole)


def read_end(payload: bytes) -> tuple[int, bool, bool]:
    """Read what `write_end` wrote."""
    return _ENDED.unpack(payload)


def write_http(head: dict[str, Any], body: bytes) -> bytes:
    """Lay out a request or an answer that goes by HTTP elsewhere."""
    told = _encode(head).encode()
    return b"".join((len(told).to_bytes(4, "little"), told, body))


def read_http(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Read what `write_http` wrote."""
    start = 4 + int.from_bytes(payload[:4], "little")
    head: dict[str, Any] = json.loads(payload[4:start])
    return head, payload[start:]


def to_json(value: Any) -> bytes:
    """Lay out a small thing."""
    return _encode(value).encode()
