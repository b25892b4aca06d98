"""What replicas say of the blocks in their prefix caches, as vLLM and SGLang publish it.

A replica publishes batches of events over ZeroMQ, each with its number, and sends those of the past
again to whoever asks. `BlockEvents` turns them into the blocks that the replica has, as long as no
batch is missing since the replica began or cleared its cache. `EventSubscriber` is the connection.

Where batches are lost for good, the gateway believes what it sends, as it does without events. What
was known is forgotten where a connection ends: a replica that comes back has nothing cached, and
one that was only out of reach sends its past again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, FiniteFloat

from serve_app.endpoints import KvEvents
from serve_app.gateway.replicas import ReplicaState
from tokenyard.config import FrozenModel
from tokenyard.routing.prefix_index import REMOVED, STORED, WHOLE_PROMPT, block_names

if TYPE_CHECKING:
    import zmq.asyncio

logger = logging.getLogger(__name__)

_WHOLE_CONTEXT = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of attention whose blocks serve any prompt that begins alike."""
_MAX_BYTES, _MAX_QUEUED = 4 << 20, 10_000
_LAST, _END = 2**63 - 2, (-1).to_bytes(8, "big", signed=True)
_ANSWER_S, _ASK_EVERY_S, _AGAIN_S = 5.0, 1.0, 0.1
_HEARTBEAT_MS, _SILENT_MS = 1000, 3000


class _Event(FrozenModel):
    """An event that is kept; a version may have more fields, or fewer."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: Literal["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    block_hashes: list[int | bytes] = Field(default_factory=list)
    parent_block_hash: int | bytes | None = None
    token_ids: list[int] = Field(default_factory=list)
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Batch(FrozenModel):
    """Events that were published together."""

    model_config = ConfigDict(extra="ignore", strict=True)
    ts: FiniteFloat
    events: list[_Event]


_FIELDS = {
    "BlockStored": tuple(_Event.model_fields),
    "BlockRemoved": ("type", "block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": ("type",),
}
"""Names of fields that come without, in their order."""


def adapter_number(name: str) -> int:
    """What blocks of an adapter's prompts go on from: `block_names` takes it as the parent."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


class BlockEvents:
    """Batches of one replica, in the order of their numbers."""

    def __init__(self, replica: ReplicaState) -> None:
        """The replica is told what changes."""
        self._replica = replica
        self.problem: str | None = None
        """Why the last batch or event that was left out could not be used."""
        self.next = 0
        """Number of the batch that comes next."""
        self.is_complete = False
        """Whether all blocks are known."""
        self._last_s = -math.inf
        self._blocks: dict[tuple[Any, Any], tuple[int, int]] = {}
        """Names of blocks, and of how many copies vLLM told, by group and the replica's hash."""

    def begin(self) -> None:
        """Forget everything: the replica may be another."""
        self.next, self._last_s = 0, -math.inf
        self._set_complete(False)

    def take(self, number: int, payload: bytes, is_all: bool = False) -> bool:
        """Take a batch; False: others before it are missing, and it was not taken.

        `is_all`: those will not come any more.
        """
        batch, why = None, ""
        try:
            batch = _read_batch(payload)
        except ValueError as error:
            why = str(error)
        time_s = self._last_s if batch is None else batch.ts
        if number < self.next and time_s > self._last_s:
            self.begin()  # It counts from 0 again: what is only sent again is not newer.
        if number < self.next or number > _LAST:
            return True
        if number > self.next:
            if not is_all:
                return False
            self._lose(f"batches {self.next} to {number - 1} are lost")
        elif number == 0:
            self._set_complete(True)
        self.next, self._last_s = number + 1, time_s
        if batch is None:
            self._lose(why)
        for event in () if batch is None else batch.events:
            self._apply(event)
        return True

    def end_replay(self) -> None:
        """Note that the replica has sent all again that it has."""
        if self.next == 0:
            self._set_complete(True)  # It has published nothing yet.

    def _lose(self, problem: str) -> None:
        self.problem = problem
        self._set_complete(False)

    def _set_complete(self, is_complete: bool) -> None:
        if is_complete:
            self.problem = None
        if is_complete or self.is_complete:
            self._blocks.clear()
            self.is_complete = is_complete
            self._replica.follow_events(is_complete)

    def _apply(self, event: _Event) -> None:
        if event.type == "AllBlocksCleared":
            return self._set_complete(True)
        if not self.is_complete or (event.medium or "GPU").upper() != "GPU":
            return
        keys = [(event.group_idx, block_hash) for block_hash in event.block_hashes]
        if event.type == "BlockStored" and not self._fits(event):
            return
        if event.type == "BlockRemoved":
            return self._replica.hold(REMOVED, np.array(self._last_copies(keys), dtype=np.int64))
        start, copies = WHOLE_PROMPT, 1
        if event.parent_block_hash is not None:
            start, copies = self._blocks.get((event.group_idx, event.parent_block_hash), (0, 0))
        elif event.lora_name is not None:
            start = adapter_number(event.lora_name)
        if not copies:
            return  # It goes on from an image, or the like.
        names = block_names(event.token_ids, self._replica.block_tokens, start)
        for key, name in zip(keys, names.tolist(), strict=True):
            known, copies = self._blocks.get(key, (name, 0))
            if known != name:
                return self._lose("its hashes are not of all tokens up to a block's end")
            self._blocks[key] = name, copies + 1
        self._replica.hold(STORED, names)

    def _last_copies(self, keys: list[tuple[Any, Any]]) -> list[int]:
        """Take a copy of each block away; return the names of those that have none left."""
        gone = []
        for key in keys:
            name, copies = self._blocks.pop(key, (0, 0))
            if copies > 1:
                self._blocks[key] = name, copies - 1
            elif copies:
                gone.append(name)
        return gone

    def _fits(self, event: _Event) -> bool:
        """Whether blocks are of a prompt's tokens alone, and of the pool's size."""
        if event.kv_cache_spec_kind not in _WHOLE_CONTEXT:
            return False
        if event.block_size != self._replica.block_tokens:
            self._lose(
                f"its blocks have {event.block_size} tokens, not {self._replica.block_tokens}"
            )
            return False
        # Images and salts are in extra keys; an adapter's name may be, and has its own field.
        lora = event.lora_name
        return (
            len(event.token_ids) == len(event.block_hashes) * self._replica.block_tokens
            and (event.lora_id is None or lora is not None)
            and all(not keys or keys == [lora] for keys in event.extra_keys or ())
        )


def _read_batch(payload: bytes) -> _Batch:
    """Read a batch; ValueError: it cannot be read."""
    import msgpack

    if len(payload) > _MAX_BYTES:
        raise ValueError(f"a batch has {len(payload)} bytes")
    try:
        batch = _named(("ts", "events"), msgpack.unpackb(payload))
        events = [_named(("type",), event) for event in batch["events"]]
        known = [event for event in events if event["type"] in _FIELDS]
        return _Batch.model_validate({**batch, "events": known})
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"a batch cannot be read: {type(error).__name__}") from None


def _named(names: Sequence[str], values: Any) -> Mapping[str, Any]:
    """Give fields that came without names theirs."""
    if isinstance(values, Mapping):
        return values
    return dict(zip(_FIELDS.get(values[0], names), values, strict=False))


class EventSubscriber:
    """Connects to one replica, again and again, and asks for what it has missed."""

    def __init__(self, settings: KvEvents, host: str, replica: ReplicaState) -> None:
        """Begin, on the event loop; `host` stands for `*` in addresses."""
        self._name, self._topic = replica.replica_id, settings.topic.encode()
        host = f"[{host}]" if ":" in host else host
        self._address = settings.endpoint.replace("*", host)
        self._replay_address = (settings.replay_endpoint or "").replace("*", host)
        self._events = BlockEvents(replica)
        self._told: tuple[bool, str | None] = (False, None)
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._run())

    def stop(self) -> None:
        """End, and believe nothing of the replica any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self._events.begin()

    async def _run(self) -> None:
        while True:
            try:
                await self._connect()
            except Exception as error:
                # Whatever one replica does, it is asked again, or what is known of it would stay.
                self._events.problem = str(error) or f"no answer from {self._address}"
            self._events.begin()
            self._tell()
            await asyncio.sleep(_AGAIN_S)

    def _tell(self) -> None:
        """Log what is believed, where it is otherwise than before."""
        is_complete, problem = self._events.is_complete, self._events.problem
        if (is_complete, problem) != self._told:
            self._told = is_complete, problem
            counts = "what it says is stored" if is_complete else "what was sent there"
            why = "" if problem is None else f" ({problem})"
            logger.info("endpoint %s: %s counts as cached%s", self._name, counts, why)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        import zmq.asyncio

        socket = zmq.asyncio.Context.instance().socket(kind)
        options = {
            zmq.LINGER: 0, zmq.MAXMSGSIZE: _MAX_BYTES, zmq.RCVHWM: _MAX_QUEUED, zmq.IPV6: 1,
            zmq.HEARTBEAT_IVL: _HEARTBEAT_MS, zmq.HEARTBEAT_TIMEOUT: _SILENT_MS,
        }  # fmt: skip
        for option, value in options.items():
            socket.setsockopt(option, value)
        return socket

    async def _connect(self) -> None:
        """Connect, and follow the events until the connection ends."""
        import zmq

        begun, ended = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
        with self._socket(zmq.SUB) as heard, _monitor(heard, begun | ended) as monitor:
            heard.setsockopt(zmq.SUBSCRIBE, self._topic)
            heard.connect(self._address)
            async with asyncio.timeout(_ANSWER_S):
                await _wait_for(monitor, begun)
            tasks = [
                asyncio.create_task(_wait_for(monitor, ended)),
                asyncio.create_task(self._follow(heard)),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()

    async def _follow(self, heard: zmq.asyncio.Socket) -> None:
        """Take what comes, and what has come before."""
        import zmq

        with self._socket(zmq.DEALER) as dealer:
            if self._replay_address:
                dealer.connect(self._replay_address)
            await self._replay(dealer)
            while True:
                if not await heard.poll(_ASK_EVERY_S * 1000):
                    await self._replay(dealer)  # The last one may be lost.
                    continue
                frames = await heard.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == len(_END):
                    number = int.from_bytes(frames[1], "big")
                    if not self._events.take(number, frames[2]):
                        await self._replay(dealer)
                        self._events.take(number, frames[2], is_all=True)
                self._tell()
                await asyncio.sleep(0)

    async def _replay(self, dealer: zmq.asyncio.Socket) -> None:
        """Ask for what is missing, and take it; TimeoutError: there is no answer."""
        if not self._replay_address:
            return
        await dealer.send_multipart([b"", self._events.next.to_bytes(len(_END), "big")])
        while True:
            if not await dealer.poll(_ANSWER_S * 1000):
                raise TimeoutError(f"no answer from {self._replay_address}")
            frames = await dealer.recv_multipart()
            if len(frames) < 2 or frames[-2] == _END:
                break
            self._events.take(int.from_bytes(frames[-2], "big"), frames[-1], is_all=True)
            await asyncio.sleep(0)
        self._events.end_replay()
        self._tell()


@contextmanager
def _monitor(socket: zmq.asyncio.Socket, events: int) -> Iterator[zmq.asyncio.Socket]:
    """Yield where a socket's events come; one that nobody could take would stop all of ZeroMQ."""
    with socket.get_monitor_socket(events) as monitor:
        try:
            yield monitor
        finally:
            socket.disable_monitor()


async def _wait_for(monitor: zmq.asyncio.Socket, event: int) -> None:
    from zmq.utils.monitor import parse_monitor_message

    seen = None
    while seen != event:
        seen = parse_monitor_message(await monitor.recv_multipart())["event"]
