"""Carries requests: another process chooses their replicas, or a gateway here while that is away.

A carrier holds the connections of callers and of replicas, and hands bytes on between them. For
each attempt its decider (`serve_app.gateway.decider`) names a replica. Where the decider does not
answer, a gateway of the carrier's own places requests by the cluster's baseline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from serve_app.cluster import Cluster, SloClass
from serve_app.engines.base import EngineStatus, FinishReason
from serve_app.gateway.carrier_wire import (
    COUNT,
    ENDED,
    FrameKind,
    FrameProtocol,
    Hello,
    block_sizes,
    read_place,
    read_refusal,
    write_request,
)
from serve_app.gateway.engine_wire import join_json, split_json, to_json, write_status
from serve_app.gateway.exchange import Downstream, InferenceRequest
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.generation import (
    ReplicaFailed,
    ReplicaFull,
    ReplicaLacks,
    ReplicaRefused,
    RequestRejected,
    Unserved,
)
from serve_app.gateway.tracing import Tracing
from tokenyard.routing.types import OrderKey

logger = logging.getLogger(__name__)

_PING_EVERY_S = 0.5
_SILENT_S = 2.5
"""Time without a message after which the decider counts as unavailable."""
_COUNT_EVERY_S = 0.1
"""How often a decider is told how far answers are."""
_AGAIN_S = 0.2
_UNKNOWN_S = 1.0
"""Time for a replica to become known here: the decider may hear of it first."""

Find = Callable[[], Awaitable[str]]
"""Returns the path of the decider's socket, once there is a decider."""


class DeciderUnavailable(ConnectionError):
    """The decider does not answer."""


class Incompatible(ConnectionError):
    """The decider speaks another version."""


class _Call:
    """A request submitted to the decider, and its queued replies."""

    def __init__(self) -> None:
        self.stop: asyncio.Timeout | None = None
        """Ends the present attempt."""
        self.replies: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        """Messages of the decider; None: it is away."""

    def give_up(self) -> None:
        """End the present attempt."""
        if self.stop is not None and not self.stop.expired():
            self.stop.reschedule(asyncio.get_running_loop().time())


class _Link(FrameProtocol):
    """The connection to the decider."""

    def __init__(self, on_leave: Callable[[], None]) -> None:
        super().__init__()
        self.is_up = True
        self.decider: asyncio.Future[Hello] = self._loop.create_future()
        """The hello of the decider, once it has come."""
        self._on_leave = on_leave
        self._calls: dict[int, _Call] = {}
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0
        self._counts: dict[int, int] = {}
        self._counting: asyncio.TimerHandle | None = None

    def open(self) -> tuple[int, _Call]:
        """Give a request a number."""
        self._number = (self._number + 1) % (1 << 32)
        call = self._calls[self._number] = _Call()
        return self._number, call

    def close_call(self, number: int) -> None:
        """Forget a request."""
        del self._calls[number]
        self._counts.pop(number, None)

    async def ask(self, payload: bytes) -> bytes:
        """Have the decider answer an HTTP request; DeciderUnavailable: it is gone."""
        self._number = number = (self._number + 1) % (1 << 32)
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._asked[number] = answer
        try:
            self.send(FrameKind.HTTP, number, payload)
            return await answer
        finally:
            del self._asked[number]

    def count(self, number: int, num_tokens: int, is_first: bool) -> None:
        """Report a request's number of tokens; the first ones are sent soon."""
        self._counts[number] = num_tokens
        if is_first:
            self.flush_soon(is_urgent=False)
        elif self._counting is None:
            self._counting = self._loop.call_later(_COUNT_EVERY_S, self._send_counts)

    def before_flush(self) -> None:
        """Add the progress of answers to what is sent."""
        if self._counts:
            counts = b"".join([COUNT.pack(*count) for count in self._counts.items()])
            self.send(FrameKind.TOKENS, 0, counts)
            self._counts.clear()

    def take(self, kind: int, number: int, payload: bytes) -> None:
        """Handle a frame from the decider."""
        if not self.decider.done():
            if kind != FrameKind.HELLO:
                raise ValueError("the decider does not say first who it is")
            self.decider.set_result(Hello.read(payload))
            return
        call = self._calls.get(number)
        if kind == FrameKind.STOP:
            if call is not None:
                call.give_up()
        elif kind == FrameKind.LEAVE:
            self._on_leave()
        elif kind == FrameKind.HTTP_ANSWER:
            answer = self._asked.get(number)
            if answer is not None and not answer.done():
                answer.set_result(payload)
        elif call is not None:
            call.replies.put_nowait((kind, payload))

    def lost(self) -> None:
        """Wake all waiters."""
        self.is_up = False
        self.decider.cancel()
        if self._counting is not None:
            self._counting.cancel()
        for call in self._calls.values():
            call.replies.put_nowait(None)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(DeciderUnavailable())
        self._on_leave()

    def _send_counts(self) -> None:
        self._counting = None
        self.flush_soon(is_urgent=True)


class _Attempt:
    """One attempt to have a replica answer, reported to the decider."""

    __slots__ = ("_link", "_number", "downstream", "finish_reason", "is_whole", "num_tokens",
                 "order_key", "request")  # fmt: skip

    def __init__(
        self, link: _Link, number: int, request: InferenceRequest, downstream: Downstream,
        order_key: OrderKey | None,
    ) -> None:  # fmt: skip
        self._link, self._number = link, number
        self.request, self.downstream, self.order_key = request, downstream, order_key
        self.num_tokens, self.is_whole = 0, False
        self.finish_reason: FinishReason | None = None

    def note_send(self) -> None:
        """Note that the request is sent."""
        self._link.send(FrameKind.SENT, self._number, is_urgent=False)

    def take(
        self, num_tokens: int, finish_reason: FinishReason | None = None, is_whole: bool = False
    ) -> None:
        """Count tokens: see `serve_app.gateway.exchange.Attempt`."""
        if num_tokens > self.num_tokens:
            if finish_reason is None and self._link.is_up:
                self._link.count(self._number, num_tokens, is_first=not self.num_tokens)
            self.num_tokens = num_tokens
        self.finish_reason, self.is_whole = finish_reason, is_whole

    def publish(self, status: EngineStatus) -> None:
        """Report the state of the replica."""
        self._link.send(FrameKind.STATUS, self._number, write_status(status), is_urgent=False)

    def tell_end(self) -> None:
        """Report the end of the answer."""
        end = ENDED.pack(self.num_tokens, self.finish_reason == "length", self.is_whole)
        self._link.send(FrameKind.ENDED, self._number, end, is_urgent=False)

    def tell_failure(self, error: ReplicaFailed) -> None:
        """Report that the replica failed."""
        fields = [type(error).__name__, self.num_tokens, self.downstream.begun, str(error)]
        if isinstance(error, ReplicaFull):
            fields += [error.status, error.retry_after_s]
        elif isinstance(error, ReplicaLacks):
            fields.append(error.model)
        self._link.send(FrameKind.FAILED, self._number, to_json(fields))


class Carrier:
    """Serves requests as a gateway does; a decider chooses their replicas."""

    def __init__(self, alone: Gateway, find: Find) -> None:
        """Know no decider yet; `alone` serves while it is away, and its pools send all requests."""
        self.alone, self._find = alone, find
        self.in_flight = 0
        self.hello = Hello()
        self.outdated: str | None = None
        """Why it has to be replaced: a decider that began later speaks another version."""
        self._block_sizes = block_sizes(alone.cluster)
        self._link: _Link | None = None
        self._num_alone = 0
        self._seeking: asyncio.Task[None] | None = None
        self._found = asyncio.Event()

    @property
    def cluster(self) -> Cluster:
        """The cluster that is served."""
        return self.alone.cluster

    @property
    def tracing(self) -> Tracing | None:
        """Makes spans of requests; None: tracing is off."""
        return self.alone.tracing

    async def start(self) -> None:
        """Find the decider, and look for it again whenever it is away."""
        self._seeking = asyncio.create_task(self._keep_linked())
        await self._found.wait()

    async def stop(self) -> None:
        """Stop deciding, and leave the decider."""
        if self._seeking is not None:
            self._seeking.cancel()
        if self._link is not None:
            # What it has to know is on its way.
            await asyncio.sleep(0.01)
            self._link.close()

    async def serve(
        self, request: InferenceRequest, service_class: SloClass, downstream: Downstream
    ) -> None:
        """Answer a request: see `Gateway.serve`."""
        self.in_flight += 1
        try:
            link = self._link
            if link is not None:
                if await self._follow(link, request, service_class, downstream):
                    return
                if downstream.begun:
                    raise Unserved("its replica failed, and nobody could say where else to go")
            self._num_alone += 1
            await self.alone.serve(request, service_class, downstream)
        finally:
            self.in_flight -= 1

    async def ask(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Have the decider answer a request for one of its own routes; return head and body.

        Raises:
            DeciderUnavailable: There is no decider.
        """
        if self._link is None:
            raise DeciderUnavailable
        return split_json(await self._link.ask(join_json(head, body)))

    async def _follow(
        self, link: _Link, request: InferenceRequest, service_class: SloClass,
        downstream: Downstream,
    ) -> bool:  # fmt: skip
        """Do what the decider says with a request; False: the decider is away."""
        payload = write_request(request, service_class.name, self._block_sizes)
        number, call = link.open()
        link.send(FrameKind.ASK, number, payload)
        try:
            while (reply := await call.replies.get()) is not None:
                kind, payload = reply
                if kind == FrameKind.REFUSED:
                    raise read_refusal(payload)
                pool, replica_id, order_key, headers, trace = read_place(payload)
                traced = request.traced(trace) if trace else request
                attempt = _Attempt(link, number, traced, downstream, order_key)
                if headers:
                    downstream.add_headers(headers)
                if await self._attempt(call, pool, replica_id, attempt):
                    attempt.tell_end()
                    return True
            return False
        except RequestRejected as error:
            link.send(FrameKind.REJECTED, number, error.status.to_bytes(2, "little"))
            raise
        except BaseException:
            # Its caller has left, or something is wrong here: the decider must not wait for it.
            link.send(FrameKind.GONE, number)
            raise
        finally:
            link.close_call(number)

    async def _attempt(self, call: _Call, pool: str, replica_id: str, attempt: _Attempt) -> bool:
        """Have a replica answer; False: it did not, or the attempt was given up."""
        call.stop = stop = asyncio.timeout(None)
        try:
            async with stop:
                await self._until_known(replica_id)
                await self.alone.backends[pool].answer(replica_id, attempt)
            return True
        except TimeoutError:
            if not stop.expired():
                raise
        except ReplicaFailed as error:
            attempt.tell_failure(error)
        finally:
            call.stop = None
        return False

    async def _until_known(self, replica_id: str) -> None:
        """Wait a moment for a replica that the decider knows and this process does not yet."""
        now_s = self.alone.refresh()
        replicas, until_s = self.alone.table.replicas, now_s + _UNKNOWN_S
        while replica_id not in replicas:
            if now_s > until_s:
                raise ReplicaRefused("a replica is not known to its carrier")
            await asyncio.sleep(0.02)
            now_s = self.alone.refresh()

    async def _keep_linked(self) -> None:
        last_reason = ""
        while True:
            try:
                await self._connect(await self._find())
                last_reason = ""
            except OSError as error:
                if str(error) != last_reason:
                    last_reason = str(error)
                    logger.warning("no decider: %s", error)
            await asyncio.sleep(_AGAIN_S)

    async def _connect(self, path: str) -> None:
        """Use a decider until it is away; Incompatible: it speaks another version."""
        loop, left = asyncio.get_running_loop(), asyncio.Event()

        def on_leave() -> None:
            if not left.is_set():
                self._link = None
                left.set()

        _, link = await loop.create_unix_connection(lambda: _Link(on_leave), path)
        num_alone = self._num_alone
        try:
            await self._meet(link, num_alone)
        except BaseException:
            link.close()
            raise
        self._num_alone -= num_alone
        if not left.is_set():
            self._link = link
            self._found.set()
        while not left.is_set():
            link.send(FrameKind.PING, 0, is_urgent=False)
            await asyncio.sleep(_PING_EVERY_S)
            if loop.time() - link.heard_s > _SILENT_S:
                logger.warning("the decider does not answer")
                link.close()
        logger.warning("the decider is away: requests are placed by the baseline meanwhile")

    async def _meet(self, link: _Link, num_alone: int) -> None:
        """Exchange greetings, and report what was decided alone; raises what `_connect` raises."""
        own = replace(self.hello, carried_alone=num_alone)
        link.send(FrameKind.HELLO, 0, own.write())
        link.send(FrameKind.PING, 0)
        await asyncio.wait([link.decider], timeout=_SILENT_S)
        if not link.decider.done() or link.decider.cancelled():
            raise ConnectionError("it does not say who it is")
        decider = link.decider.result()
        refusal = own.refusal(decider)
        if refusal is not None:
            if decider.is_next and own.is_older_than(decider):
                self.outdated = refusal
            raise Incompatible(refusal)


RequestServer = Gateway | Carrier
"""Has requests answered."""
