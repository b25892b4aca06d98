"""Decides for carriers: processes that hold the connections of callers and of endpoints.

A request of a carrier is one of the gateway's as any other: admission, choice, retries, deadlines,
drain, log and metrics are here. Only what a replica answers is carried elsewhere. A carrier that
dies takes its requests with it, which end here as those of callers who have left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from serve_app.gateway.carrier_wire import (
    COUNT,
    ENDED,
    FrameKind,
    FrameProtocol,
    Hello,
    block_sizes,
    read_request,
    write_place,
    write_refusal,
)
from serve_app.gateway.engine_wire import join_json, read_status, split_json
from serve_app.gateway.exchange import Attempt, Backend
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.generation import (
    Headers,
    Refused,
    ReplicaFailed,
    ReplicaFull,
    ReplicaLacks,
    ReplicaRefused,
    ReplicaTimeout,
    ReplicaTooSmall,
    ReplicaUnreachable,
    RequestRejected,
    Unserved,
)

logger = logging.getLogger(__name__)

FAILURES = {
    kind.__name__: kind
    for kind in (
        ReplicaFailed,
        ReplicaFull,
        ReplicaLacks,
        ReplicaRefused,
        ReplicaTimeout,
        ReplicaTooSmall,
        ReplicaUnreachable,
    )
}
_HEARD_S = 0.1
"""Time for carriers to hear that they have to leave."""
_GONE_S = 2.0
"""Time for carriers to end, once everything is answered."""


class CarriedPool:
    """A pool that carriers send requests to; all but `answer` is the pool's own."""

    def __init__(self, pool: Backend) -> None:
        self._pool = pool
        self.name, self.takes_any = pool.name, pool.takes_any
        self.ray_replicas, self.host_loads = pool.ray_replicas, pool.host_loads
        self.refresh, self.by_our_clock = pool.refresh, pool.by_our_clock

    @property
    def max_model_tokens(self) -> float:
        """Longest prompt plus output that its replicas take."""
        return self._pool.max_model_tokens

    async def answer(self, replica_id: str, attempt: Attempt) -> None:
        """Have the carrier of a request ask a replica: see `Backend.answer`."""
        carried = attempt.downstream
        assert isinstance(carried, _Carried)
        await carried.forward_to_carrier(self.name, replica_id, attempt)


class _Carried:
    """A carrier's request; it stands in for the caller's connection."""

    def __init__(self, link: _Link, number: int) -> None:
        self.begun = False
        self._link, self._number = link, number
        self._attempt: Attempt | None = None
        self._end: asyncio.Future[None] | None = None
        self._headers: Headers = ()
        self.task: asyncio.Task[None] | None = None

    async def forward_to_carrier(self, pool: str, replica_id: str, attempt: Attempt) -> None:
        """Have the carrier send the request to a replica; return once it is answered."""
        self._attempt = attempt
        self._end = asyncio.get_running_loop().create_future()
        # Nothing of the call is here but what the gateway has added to it.
        trace = attempt.request.call.headers
        place = write_place(pool, replica_id, attempt.order_key, self._headers, trace)
        self._link.send(FrameKind.SEND, self._number, place)
        try:
            await self._end
        except asyncio.CancelledError:
            self._link.send(FrameKind.STOP, self._number)
            raise
        finally:
            self._attempt = self._end = None

    def note_send(self) -> None:
        """Note that the request is sent."""
        if self._attempt is not None:
            self._attempt.note_send()

    def count(self, num_tokens: int) -> None:
        """Note the number of tokens."""
        if self._attempt is not None:
            self.begun = True
            self._attempt.take(num_tokens)

    def end(self, num_tokens: int, is_cut: bool, is_whole: bool) -> None:
        """Note the end of the answer."""
        if self._attempt is not None and self._end is not None and not self._end.done():
            self._attempt.take(num_tokens, "length" if is_cut else "stop", is_whole)
            self._end.set_result(None)

    def fail(self, error: Exception) -> None:
        """Note that there is no answer."""
        if self._end is not None and not self._end.done():
            self._end.set_exception(error)

    def publish(self, status: bytes) -> None:
        """Record the state of the replica."""
        if self._attempt is not None:
            self._attempt.publish(read_status(status))

    def add_headers(self, headers: Headers) -> None:
        """Have the carrier add these to the answer's head."""
        self._headers = headers

    # Nothing of the answer itself comes here.

    async def begin(self, status: int, headers: Headers) -> None:
        raise NotImplementedError

    async def write(self, data: bytes) -> None:
        raise NotImplementedError

    def write_now(self, data: bytes, chunk: bytes | None = None) -> bool:
        raise NotImplementedError


class _Link(FrameProtocol):
    """The connection to one carrier."""

    def __init__(self, decider: Decider) -> None:
        super().__init__()
        self._decider = decider
        self._is_joined = False
        self._carried: dict[int, _Carried] = {}
        self._answering: set[asyncio.Task[None]] = set()

    def take(self, kind: int, number: int, payload: bytes) -> None:
        """Handle a frame from the carrier; its hello is the first."""
        if not self._is_joined:
            if kind == FrameKind.HELLO:
                self._is_joined = self._decider.meet(self, Hello.read(payload))
        elif kind == FrameKind.ASK:
            self._open(number, payload)
        elif kind == FrameKind.TOKENS:
            for request_number, count in COUNT.iter_unpack(payload):
                if carried := self._carried.get(request_number):
                    carried.count(count)
        elif kind == FrameKind.HTTP:
            task = self._loop.create_task(self._answer(number, *split_json(payload)))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif kind == FrameKind.PING:
            self.send(FrameKind.PING, number)
        elif carried := self._carried.get(number):
            self._take_outcome(kind, carried, payload)

    def lost(self) -> None:
        """Give up the requests of the carrier."""
        self._decider.leave(self)
        for carried in (*self._carried.values(),):
            if carried.task is not None:
                carried.task.cancel()
        for task in self._answering:
            task.cancel()

    def _take_outcome(self, kind: int, carried: _Carried, payload: bytes) -> None:
        if kind == FrameKind.SENT:
            carried.note_send()
        elif kind == FrameKind.ENDED:
            carried.end(*ENDED.unpack(payload))
        elif kind == FrameKind.STATUS:
            carried.publish(payload)
        elif kind == FrameKind.FAILED:
            name, num_tokens, carried.begun, *args = json.loads(payload)
            if num_tokens:
                carried.count(num_tokens)
            carried.fail(FAILURES[name](*args))
        elif kind == FrameKind.REJECTED:
            carried.fail(RequestRejected(int.from_bytes(payload, "little"), (), b""))
        elif kind == FrameKind.GONE and carried.task is not None:
            carried.task.cancel()

    def _open(self, number: int, payload: bytes) -> None:
        if number in self._carried:
            raise ValueError(f"request {number} of a carrier is here already")
        carried = self._carried[number] = _Carried(self, number)
        carried.task = self._loop.create_task(self._serve(number, carried, payload))
        # Also where it is cancelled before it begins: who asked may have left by the same read.
        carried.task.add_done_callback(lambda _: self._carried.pop(number))

    async def _serve(self, number: int, carried: _Carried, payload: bytes) -> None:
        gateway = self._decider.gateway
        try:
            request, class_name = read_request(payload, self._decider.block_sizes)
            service_class = gateway.cluster.service_class(class_name)
            assert service_class is not None
            await gateway.serve(request, service_class, carried)
        except (Refused, Unserved) as error:
            self.send(FrameKind.REFUSED, number, write_refusal(error))
        except (RequestRejected, asyncio.CancelledError):
            pass  # The carrier knows: it said so, or is gone.
        except Exception:
            # Whatever is wrong here, the carrier's caller must not wait for ever.
            logger.exception("request %d of a carrier", number)
            self.send(FrameKind.REFUSED, number, write_refusal(Unserved("the gateway failed")))

    async def _answer(self, number: int, head: dict[str, Any], body: bytes) -> None:
        answer = await _ask(self._decider.api, head, body)
        self.send(FrameKind.HTTP_ANSWER, number, join_json(*answer))


async def _ask(api: ASGIApp, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Have an ASGI application answer a request that a carrier received; return head and body."""
    started: dict[str, Any] = {}
    content, unread = bytearray(), [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # Cancelled where the carrier is gone.
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started["status"] = message["status"]
            started["headers"] = [
                [name.decode("latin-1"), value.decode("latin-1")]
                for name, value in message["headers"]
            ]
        else:
            content.extend(message.get("body", b""))

    try:
        await api(_scope_of(head), receive, send)
    except Exception:
        # As a server does: what was sent until then is the answer.
        logger.exception("a request that came to a carrier")
    return started or {"status": 500, "headers": []}, bytes(content)


def _scope_of(head: dict[str, Any]) -> Scope:
    """Make the ASGI scope of a request that a carrier received."""
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "root_path": "",
        "scheme": "http", "state": {}, **head,
        "headers": [(name.encode("latin-1"), value.encode("latin-1"))
                    for name, value in head["headers"]],
        "query_string": head["query_string"].encode("latin-1"),
        "raw_path": head["path"].encode(),
    }  # fmt: skip


class Decider:
    """Listens for carriers on this machine, on a Unix socket that only this user may use."""

    def __init__(self, gateway: Gateway, api: ASGIApp) -> None:
        """Decide for a gateway of `CarriedPool`s; `api` answers what carriers pass on."""
        self.gateway, self.api = gateway, api
        self.block_sizes = block_sizes(gateway.cluster)
        self.hello = Hello()
        self.outdated: str | None = None
        """Why it has to be replaced: a carrier that began later speaks another version."""
        self._links: set[_Link] = set()
        self._refused: list[int] = []
        """Process ids of carriers of another version, the first one first."""
        self._server: asyncio.Server | None = None
        self._folder: str | None = None

    @property
    def path(self) -> str:
        """The path of its socket."""
        assert self._folder is not None
        return str(Path(self._folder) / "decider")

    async def start(self) -> None:
        """Listen."""
        self._folder = tempfile.mkdtemp(prefix="tokenyard-")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Link(self), self.path)

    @property
    def is_up(self) -> bool:
        """Whether it listens."""
        return self._server is not None and self._server.is_serving()

    async def resign(self) -> None:
        """Send carriers to another decider, or to none; requests in progress go on."""
        for link in self._links:
            link.send(FrameKind.LEAVE, 0)
        await asyncio.sleep(_HEARD_S)

    async def stop(self) -> None:
        """Wait a moment for carriers to end, then close their connections."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GONE_S):
                while self._links:
                    await asyncio.sleep(0.05)
        if self._server is not None:
            self._server.close()
        for link in (*self._links,):
            link.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def meet(self, link: _Link, carrier: Hello) -> bool:
        """Accept a carrier of this version, and refuse any other; both log why.

        Of older carriers one is replaced at once, and the others when that one is back: somebody
        has to listen meanwhile.
        """
        refusal = carrier.refusal(self.hello)
        if refusal is None:
            link.send(FrameKind.HELLO, 0, self.hello.write())
            self._join(link, carrier)
            return True
        if carrier.pid not in self._refused:
            self._refused.append(carrier.pid)
            logger.warning("%s", refusal)
        if not carrier.is_older_than(self.hello):
            self.outdated = refusal
        is_next = bool(self._links) or carrier.pid == self._refused[0]
        link.send(FrameKind.HELLO, 0, replace(self.hello, is_next=is_next).write())
        link.part()
        return False

    def _join(self, link: _Link, carrier: Hello) -> None:
        """Register a carrier, with what it did while it had no decider."""
        self._links.add(link)
        self.gateway.metrics.carriers.set(len(self._links))
        self.gateway.metrics.carried_alone.inc(carrier.carried_alone)
        logger.info("carrier %d is here, %d in all", carrier.pid, len(self._links))

    def leave(self, link: _Link) -> None:
        """Remove a carrier."""
        self._links.discard(link)
        self.gateway.metrics.carriers.set(len(self._links))
