"""Gateways and pickers before the same replicas tell each other what they send.

Each publishes what it has sent, the first token of each answer, and its end. The others count that
as in flight at the same replica, and its prompt as cached there. Messages may come late or not at
all: now and then each names everything it has open, with its tokens so far, and what is not named
is over. With that it tells how long iterations took, so that all learn speeds from all answers. A
peer that says nothing has nothing open, as far as it is counted; replicas still publish what they
have.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from serve_app.endpoints import PeerSettings
from serve_app.gateway.replicas import Prompt, ReplicaState, ReplicaTable

if TYPE_CHECKING:
    import zmq
    import zmq.asyncio

logger = logging.getLogger(__name__)

KEY_VARIABLE = "TOKENYARD_PEERS_KEY"
"""Environment variable with the secret that peers share."""
_FLUSH_S = 0.005
_ALL_S, _SILENT_S = 0.5, 2.0
"""How often all that is open is named, and after how long a peer counts as gone."""
_GRACE_S = 1.0
"""Age from which on what a peer does not name is over: what is newer may not be named yet."""
_MAX_BYTES, _LINGER_MS = 64 << 20, 500
_DIGEST_BYTES = 32


class Peers:
    """What this process tells, and what the others have open."""

    def __init__(
        self, settings: PeerSettings, key: str | None, table: ReplicaTable,
        clock_s: Callable[[], float],
    ) -> None:  # fmt: skip
        """Nothing is heard or told before `start`.

        Raises:
            ValueError: There is no key, and an address is not of this machine.
        """
        if not key and not all(map(_is_local, (settings.listen, *settings.connect))):
            raise ValueError(f"peers on other machines need a secret: set {KEY_VARIABLE}")
        self._settings, self._key = settings, (key or "").encode()
        self._table, self._clock_s = table, clock_s
        self._name = secrets.token_hex(8)
        self._events: list[list[Any]] = []
        self._open: dict[str, ReplicaState] = {}
        """Where each request of this process is, by its id."""
        self._flushing: asyncio.TimerHandle | None = None
        self._others: dict[str, dict[str, tuple[ReplicaState, float]]] = {}
        """What each peer has open: at which replica, and since when."""
        self._heard_s: dict[str, float] = {}
        self._publish: Callable[[bytes], object] | None = None
        """Sends a message to all peers; None: not started, or stopped."""
        self._sockets: list[zmq.SyncSocket | zmq.asyncio.Socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin.

        Raises:
            OSError: An address cannot be used.
        """
        import zmq

        try:
            self._connect()
        except zmq.ZMQError as error:
            raise OSError(f"gateway.peers: {self._settings.listen}: {error}") from None

    def _connect(self) -> None:
        import zmq.asyncio

        publisher: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        publisher.setsockopt(zmq.LINGER, _LINGER_MS)
        self._sockets.append(publisher)
        publisher.bind(self._settings.listen)
        # Who does not listen, or too slowly, misses it: nothing waits here.
        self._publish = partial(publisher.send, flags=zmq.NOBLOCK)
        heard = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._sockets.append(heard)
        heard.setsockopt(zmq.LINGER, 0)
        heard.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
        heard.setsockopt(zmq.SUBSCRIBE, b"")
        for address in self._settings.connect:
            heard.connect(address)
        self._tasks = [
            asyncio.create_task(self._listen(heard)), asyncio.create_task(self._name_all()),
        ]  # fmt: skip

    def stop(self) -> None:
        """Say that nothing is open any more, and end."""
        for task in self._tasks:
            task.cancel()
        self._send_events([["gone"]])
        self._publish = None
        # Here: a task that is cancelled before it begins closes nothing.
        while self._sockets:
            self._sockets.pop().close()

    @property
    def num_heard(self) -> int:
        """Peers that have said something lately."""
        return len(self._heard_s)

    def send(
        self, replica: ReplicaState, request_id: str, prompt: Prompt, match_tokens: int,
        output_tokens: float,
    ) -> None:  # fmt: skip
        """Tell what is sent: see `ReplicaState.send`."""
        blocks = prompt.blocks(replica.block_tokens).tolist()
        self._open[request_id] = replica
        self._tell(
            "send", request_id, replica.replica_id, prompt.num_tokens, len(prompt.token_ids),
            match_tokens, output_tokens, blocks,
        )  # fmt: skip

    def begin(self, request_id: str) -> None:
        """Tell the first token of an answer."""
        self._tell("begin", request_id)

    def close(self, request_id: str) -> None:
        """Tell the end of a request."""
        if request_id in self._open:
            del self._open[request_id]
            self._tell("end", request_id)

    def _tell(self, *event: Any) -> None:
        self._events.append([*event])
        if self._flushing is None and self._publish is not None:
            loop = asyncio.get_running_loop()
            self._flushing = loop.call_later(_FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flushing = None
        events, self._events = self._events, []
        self._send_events(events)

    def _send_events(self, events: list[list[Any]]) -> None:
        if self._publish is not None and events:
            text = json.dumps([self._name, events], separators=(",", ":")).encode()
            self._publish(self._sign(text) + text)

    def _sign(self, text: bytes) -> bytes:
        return hmac.digest(self._key, text, hashlib.sha256)

    async def _name_all(self) -> None:
        while True:
            self.name_all()
            await asyncio.sleep(_ALL_S)

    def name_all(self) -> None:
        """Tell all that is open, and forget what peers have open that say nothing any more."""
        self._flush()
        num_generated = {
            request_id: replica.in_flight.num_generated(request_id)
            for request_id, replica in self._open.items()
        }
        learned = {
            replica_id: equations
            for replica_id, replica in self._table.replicas.items()
            if (meter := replica.in_flight.meter) and (equations := meter.take_settled())
        }
        self._send_events([["all", num_generated], ["learned", learned]])
        now_s = self._clock_s()
        for name, heard_s in (*self._heard_s.items(),):
            if now_s - heard_s > _SILENT_S:
                logger.warning("a peer says nothing any more: %s", name)
                self._keep(name, set(), now_s)
                del self._heard_s[name], self._others[name]

    async def _listen(self, heard: zmq.asyncio.Socket) -> None:
        while True:
            self.take(await heard.recv())

    def take(self, message: bytes) -> None:
        """Take a message of a peer; one that is not, or cannot be read, is left out."""
        digest, text = message[:_DIGEST_BYTES], message[_DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._sign(text)):
            return
        try:
            name, events = json.loads(text)
            if name == self._name:
                return
            now_s = self._clock_s()
            if name not in self._heard_s:
                logger.info("a peer is here: %s", name)
            self._heard_s[name] = now_s
            opened = self._others.setdefault(name, {})
            for kind, *fields in events:
                self._note(opened, name, kind, fields, now_s)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            logger.warning("a message of a peer cannot be read: %s", type(error).__name__)

    def _note(
        self, opened: dict[str, tuple[ReplicaState, float]], name: str, kind: str,
        fields: list[Any], now_s: float,
    ) -> None:  # fmt: skip
        if kind == "gone":
            return self._keep(name, set(), now_s)
        if kind == "all":
            num_generated: dict[str, int] = dict(fields[0])
            for known_id in opened.keys() & num_generated:
                opened[known_id][0].in_flight.receive(known_id, int(num_generated[known_id]))
            return self._keep(name, {*num_generated}, now_s - _GRACE_S)
        if kind == "learned":
            for replica_id, equations in dict(fields[0]).items():
                known = self._table.replicas.get(replica_id)
                if known is not None and (meter := known.in_flight.meter) is not None:
                    for equation in equations:
                        meter.hear(equation)
            return None
        request_id = str(fields[0])
        if kind == "send":
            _, replica_id, num_tokens, num_ids, match_tokens, output_tokens, blocks = fields
            replica = self._table.replicas.get(replica_id)
            if replica is not None and request_id not in opened:
                names = np.array(blocks, dtype=np.int64)
                replica.count_peers(
                    request_id, int(num_tokens), int(num_ids), int(match_tokens),
                    float(output_tokens), names, now_s,
                )  # fmt: skip
                opened[request_id] = replica, now_s
        elif request_id in opened:
            replica, _ = opened[request_id]
            if kind == "begin":
                replica.in_flight.receive(request_id, 1)
            elif kind == "end":
                del opened[request_id]
                replica.in_flight.close(request_id, now_s)

    def _keep(self, name: str, still_open: set[str], before_s: float) -> None:
        """Close what a peer opened before a time and does not name any more."""
        opened = self._others.get(name, {})
        for request_id, (replica, since_s) in (*opened.items(),):
            if request_id not in still_open and since_s <= before_s:
                del opened[request_id]
                replica.in_flight.close(request_id, self._clock_s())


def _is_local(address: str) -> bool:
    """Whether only this machine reaches an address of ZeroMQ."""
    if address.startswith(("ipc://", "inproc://")):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
