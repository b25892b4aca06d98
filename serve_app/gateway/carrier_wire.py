"""Messages between carriers and their decider, over a Unix socket: frames of bytes.

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
from collections.abc import Sequence
from dataclasses import asdict, field
from enum import IntEnum
from importlib.metadata import version
from typing import Any, cast

import numpy as np
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from serve_app.cluster import Cluster
from serve_app.engines.waiting import read_order_key, write_order_key
from serve_app.gateway.callers import ANYBODY, Caller
from serve_app.gateway.engine_wire import join_json, split_json, to_json
from serve_app.gateway.exchange import Call, InferenceRequest
from serve_app.gateway.generation import Draining, Headers, Refused, Unanswerable, Unserved
from serve_app.gateway.rate_limits import OverLimit
from serve_app.gateway.replicas import Prompt
from tokenyard.routing.types import OrderKey

logger = logging.getLogger(__name__)

WIRE_VERSION = 8
"""Version of all frames but `FrameKind.HELLO`."""
_BEGAN_S = time.monotonic()
_RELEASE = version("tokenyard")
_HEAD = struct.Struct("<IBI")
COUNT = struct.Struct("<II")
"""Number of a request, and how many of its tokens have come so far."""
ENDED = struct.Struct("<I??")
"""Tokens of an answer, whether it was cut at its greatest length, and whether all came at once."""
_MOST_BYTES = 64 << 20
_CALL = Call(b"", b"", b"", stream=False)
"""Stands in for what a caller wrote, which stays with the carrier."""
_SOON_S = 1e-3
"""Delay of frames that nobody waits for."""
_REFUSALS = {kind.__name__: kind for kind in (Refused, Draining, Unanswerable, Unserved)}


class FrameKind(IntEnum):
    """The meaning of a frame."""

    HELLO = 1
    """Carrier, and back: who is there, as `Hello` lays it out."""
    ASK = 2
    """Carrier: a request, as `write_request` lays it out."""
    TOKENS = 3
    """Carrier: `COUNT` of requests."""
    STATUS = 4
    """Carrier: what the replica of a request told of itself, as the replica wrote it."""
    ENDED = 5
    """Carrier: a request was answered: `ENDED`."""
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
    """Decider: why a request is not answered, as `write_refusal` lays it out."""
    HTTP_ANSWER = 14
    """Decider: status, headers and body, as `join_json` lays them out."""
    LEAVE = 15
    """Decider: it is about to end, and wants to be asked nothing new."""
    SENT = 16
    """Carrier: a request goes out to its replica."""


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Hello:
    """The first message of each end."""

    wire_version: int = WIRE_VERSION
    release: str = _RELEASE
    began_s: float = _BEGAN_S
    """When its process began, by the machine's monotonic clock."""
    pid: int = field(default_factory=os.getpid)
    carried_alone: int = 0
    """Requests that a carrier has placed itself since it last had a decider."""
    is_next: bool = False
    """Whether a carrier that is refused is the next one to be replaced."""

    def write(self) -> bytes:
        """Encode it."""
        return to_json(asdict(self))

    @staticmethod
    def read(payload: bytes) -> Hello:
        """Decode what `write` wrote, also by a later release; anything else is a ValueError."""
        return _HELLO.validate_json(payload)

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
        """Whether this carrier began first: what is installed now may be newer than its code."""
        return self.began_s <= decider.began_s


_HELLO = TypeAdapter(Hello)


class FrameProtocol(asyncio.Protocol):
    """One end of a connection; subclasses handle frames."""

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
        """Handle the loss of the other end."""
        raise NotImplementedError

    def send(
        self, kind: FrameKind, number: int, payload: bytes = b"", is_urgent: bool = True
    ) -> None:
        """Send a frame at the end of this step of the loop; where not urgent, a moment later."""
        self._unsent.append(_HEAD.pack(len(payload), kind, number))
        if payload:
            self._unsent.append(payload)
        self.flush_soon(is_urgent)

    def flush_soon(self, is_urgent: bool) -> None:
        """Send the buffer at the end of this step of the loop, or a moment later."""
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
        """Send the buffer, and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def before_flush(self) -> None:
        """Add frames to those about to be sent."""

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
        """Handle all complete frames."""
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
        """Tell the subclass."""
        for handle in (self._flushing, self._flushing_later):
            if handle is not None:
                handle.cancel()
        self.lost()


def block_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Block sizes, tokens, of the pools' prefix caches."""
    return tuple(sorted({pool.prefix_block_tokens for pool in cluster.pools} - {0}))


def write_request(request: InferenceRequest, class_name: str, block_sizes: Sequence[int]) -> bytes:
    """Encode a request for the decider, with the names of its prompt's blocks."""
    prompt, caller = request.prompt or Prompt(request.token_ids), request.caller
    blocks = [prompt.blocks(size) for size in block_sizes]
    fields = [
        request.request_id, class_name, len(request.token_ids), request.max_tokens,
        request.for_engines, [len(block) for block in blocks], request.model, request.tenant,
    ]  # fmt: skip
    if caller is not ANYBODY or request.trace:
        # What the caller may ask for was looked up before.
        trace = request.trace.decode("latin-1")
        fields += [caller.tenant, caller.key, caller.address, trace]
    return join_json(fields, b"".join([block.tobytes() for block in blocks]))


def read_request(payload: bytes, block_sizes: Sequence[int]) -> tuple[InferenceRequest, str]:
    """Decode what `write_request` wrote; return the request and the name of its class."""
    fields, names_of_blocks = split_json(payload)
    (
        request_id, class_name, num_tokens, max_tokens, for_engines, counts, model, tenant, *more,
    ) = fields  # fmt: skip
    *of_caller, trace = more or ("",)
    caller = Caller(*of_caller) if any(of_caller) else ANYBODY
    # A copy may be written to: what is compiled would be compiled anew for other arrays.
    names, blocks, end = np.frombuffer(names_of_blocks, np.int64).copy(), {}, 0
    for size, count in zip(block_sizes, counts, strict=True):
        blocks[size] = names[end : end + count]
        end += count
    prompt = Prompt(range(num_tokens), blocks)
    request = InferenceRequest(
        request_id, prompt.token_ids, max_tokens, _CALL, for_engines, prompt, model, tenant, caller,
        trace=trace.encode("latin-1"),
    )  # fmt: skip
    return request, class_name


def write_place(
    pool: str, replica_id: str, order_key: OrderKey | None = None, headers: Headers = (),
    trace: bytes = b"",
) -> bytes:  # fmt: skip
    """Encode where a request goes, and the key by which it waits there.

    `headers` are added to the head of its answer, and the line `trace` to its own.
    """
    key = "" if order_key is None else write_order_key(order_key)
    place = f"{pool}\n{replica_id}\n{key}".encode()
    if not headers and not trace:
        return place
    parts = (trace.strip(), *(part for header in headers for part in header))
    return b"\n".join((place, *parts))


def read_place(payload: bytes) -> tuple[str, str, OrderKey | None, Headers, bytes]:
    """Decode what `write_place` wrote into its arguments."""
    pool, replica_id, key, *more = payload.split(b"\n")
    trace, *parts = more or (b"",)
    headers = list(zip(parts[::2], parts[1::2], strict=True))
    line = trace + b"\r\n" if trace else b""
    order_key = read_order_key(key.decode()) if key else None
    return pool.decode(), replica_id.decode(), order_key, headers, line


def write_refusal(error: Refused | Unserved) -> bytes:
    """Encode why a request is not answered."""
    args: list[Any] = [str(error)]
    if isinstance(error, Refused):
        limit = None if error.over is None else asdict(error.over)
        if limit is not None:
            limit["headers"] = [[part.decode() for part in pair] for pair in limit["headers"]]
        args += [error.retry_after_s, limit, error.status]
    elif isinstance(error, Unanswerable):
        args.append(error.status)
    return to_json([type(error).__name__, *args])


def read_refusal(payload: bytes) -> Refused | Unserved:
    """Decode what `write_refusal` wrote."""
    name, *args = json.loads(payload)
    if name == Refused.__name__ and args[2] is not None:
        headers = [(key.encode(), value.encode()) for key, value in args[2].pop("headers")]
        args[2] = OverLimit(headers=headers, **args[2])
    return _REFUSALS[name](*args)
