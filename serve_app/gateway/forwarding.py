"""A request handed on to an endpoint with OpenAI's API, and its answer handed back.

What a caller wrote goes to an endpoint as it is, and so does the answer come back. The gateway
knows no more of either than it needs.
"""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple

from serve_app.cluster import Deadlines
from serve_app.engines.base import EngineStatus
from serve_app.gateway import sse
from serve_app.gateway.clocks import steady_unix_s
from serve_app.gateway.engine_wire import read_status
from serve_app.gateway.exchange import Attempt, Call
from serve_app.gateway.faults import EndpointError, Fault, retry_after_s
from serve_app.gateway.generation import (
    Headers,
    ReplicaFailed,
    ReplicaFull,
    ReplicaLacks,
    ReplicaTimeout,
    ReplicaUnreachable,
    RequestRejected,
)
from serve_app.gateway.upstream import (
    ConnectFailed,
    Connection,
    Origin,
    UpstreamClient,
    UpstreamError,
)

_MAX_HELD_BYTES = 1 << 20
"""Longest part of an answer that is held; after it no other endpoint can answer."""
_ALIVE_S = 5.0
"""Time for which an endpoint counts as alive that has answered its scraper, whatever it said."""
_EVENTS = b"text/event-stream"
_JSON: Headers = ((b"content-type", b"application/json"),)
_HANDED_BACK = frozenset(
    (
        b"cache-control", b"content-encoding", b"content-length", b"content-type", b"retry-after",
        b"traceparent", b"x-accel-buffering", b"x-request-id",
    )
)  # fmt: skip
_HANDED_BACK_PREFIXES = (b"openai-", b"x-ratelimit-")


class _ReplicaId(NamedTuple):
    unique_id: str


class EndpointAsRayReplica:
    """An endpoint, as Ray's router expects a replica."""

    availability_zone = None
    node_id = ""
    multiplexed_model_ids: frozenset[str] = frozenset()

    def __init__(self, replica_id: str, origin: Origin, max_ongoing: int, key: bytes = b"") -> None:
        self.replica_id = _ReplicaId(replica_id)
        self.origin, self.key = origin, key
        self.max_ongoing_requests = max_ongoing
        self.status = EngineStatus(0, 0, 0.0, 0.0)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """Return the requests that it has reported."""
        return self.status.num_waiting + self.status.num_running


class Forwarder:
    """Has the endpoints of one pool answer, within the pool's deadlines."""

    status_header = b""
    """Header with the state of a replica; empty: there is none."""

    def __init__(
        self, which: str, deadlines: Deadlines, prefill_token_s: float = 0.0, at_once: bool = False
    ) -> None:
        """Take the settings of a pool.

        `which` is an endpoint as callers may know it, and does not say where it is. The first token
        has `prefill_token_s` in addition for each token of the prompt. `at_once`: a stream is
        handed on from its head on, rather than its first token.
        """
        self.which = which
        self.client = UpstreamClient(deadlines.connect_s)
        self._deadlines, self._prefill_token_s = deadlines, prefill_token_s
        self._at_once = at_once

    async def forward(self, origin: Origin, headers: bytes, body: bytes, attempt: Attempt) -> None:
        """Have one endpoint answer: see `Backend.answer`.

        `headers` are the lines of the request's head, each with its end, without the body's length.
        """
        call = attempt.request.call
        head = origin.head(call.method, call.path, headers, len(body))
        timer = ResponseTimer(self._deadlines, attempt, self._prefill_token_s)
        connection = None
        try:
            connection = await self.client.send(origin, head, body, timer.watch)
            timer.has_head = True
            if not 200 <= connection.status < 300:
                raise await self._refused(connection)
            answered = dict(connection.headers)
            if self.status_header in answered:
                attempt.publish(read_status(answered[self.status_header]))
            if sends_events(connection.headers, call) and b"content-encoding" not in answered:
                await _hand_on_events(connection, attempt, timer, self._at_once)
            else:
                await self._hand_on_whole(connection, attempt, timer)
        except _TooLate as error:
            raise ReplicaTimeout(f"{self.which} {error}") from None
        except ConnectFailed as error:
            raise ReplicaUnreachable(f"{self.which} {error}") from None
        except UpstreamError as error:
            raise ReplicaFailed(f"{self.which} {error}") from None
        except sse.ErrorEvent as error:
            raise self._failure_of(error) from None
        finally:
            timer.stop()
            if connection is not None:
                self.client.release(connection)

    async def _refused(self, connection: Connection) -> ReplicaFailed | RequestRejected:
        """Read an answer that is an error, and return the failure that it means."""
        text = bytearray()
        while len(text) <= _MAX_HELD_BYTES and (piece := await connection.read()):
            text += piece
        return self._refusal(connection, bytes(text))

    def _failure_of(self, error: sse.ErrorEvent) -> ReplicaFailed | RequestRejected:
        """Return the failure that an error at the end of a begun answer means."""
        return failure_of_event(self.which, error)

    def _refusal(self, connection: Connection, text: bytes) -> ReplicaFailed | RequestRejected:
        """Return the failure that an error status means."""
        return failure_of(self.which, connection.status, _handed_back(connection.headers), text)

    async def _hand_on_whole(
        self, connection: Connection, attempt: Attempt, timer: ResponseTimer
    ) -> None:
        """Hand on an answer once it is complete, or is too long to be held."""
        downstream, held, tail = attempt.downstream, bytearray(), b""
        # Events that are encoded come one by one, and nobody here can read them.
        most_held = 0 if sends_events(connection.headers, attempt.request.call) else _MAX_HELD_BYTES
        while piece := await connection.read():
            tail = (tail + piece)[-sse.PEEK_BYTES :]
            if downstream.begun:
                await downstream.write(piece)
            else:
                held += piece
                if len(held) > most_held:
                    timer.begin()
                    await downstream.begin(connection.status, _handed_back(connection.headers))
                    await downstream.write(bytes(held))
            timer.wait_again()
        num_tokens, reason, usage = sse.peek_whole(tail)
        if attempt.request.learn is not None:
            attempt.request.learn(sse.prompt_tokens_of(usage))
        if attempt.request.hear is not None and (name := sse.id_in(held)):
            attempt.request.hear(connection.origin.url, name)
        attempt.take(num_tokens, reason, is_whole=True)
        if not downstream.begun:
            await hand_on_held(connection, attempt, bytes(held))


def failure_of(
    which: str, status: int, headers: Headers, body: bytes
) -> ReplicaFailed | RequestRejected:
    """Return the failure that an answer with an error status means; `which` names the endpoint."""
    error = EndpointError.of_answer(status, body)
    return _failure(which, error, headers, body, f"answered {status}")


def failure_of_event(which: str, error: sse.ErrorEvent) -> ReplicaFailed | RequestRejected:
    """Return the failure that an error at the end of a begun answer means."""
    body = json.dumps(error.event).encode()
    return _failure(which, EndpointError.of(error.event), _JSON, body, f"failed: {error}")


def _failure(
    which: str, error: EndpointError, headers: Headers, body: bytes, what: str
) -> ReplicaFailed | RequestRejected:
    if error.fault is Fault.ENDPOINT:
        # Its message may name what is behind it.
        return ReplicaFailed(f"{which} {what}")
    what = f"{which} {what}" + f": {error.message}" * bool(error.message)
    if error.fault is Fault.ROOM:
        after = next((value for name, value in headers if name == b"retry-after"), None)
        limits = [header for header in headers if header[0].startswith(b"x-ratelimit-")]
        status = 429 if error.status == 429 else 503
        return ReplicaFull(what, status, retry_after_s(after, steady_unix_s()), limits)
    rejection = RequestRejected(error.status, headers, body)
    if error.fault is Fault.LACKS:
        return ReplicaLacks(what, "" if error.is_about_model else None, rejection)
    return rejection


async def hand_on_held(connection: Connection, attempt: Attempt, body: bytes) -> None:
    """Hand on a complete answer, with its length."""
    headers = [*_handed_back(connection.headers)]
    if not any(name == b"content-length" for name, _ in headers):
        headers.append((b"content-length", b"%d" % len(body)))
    await attempt.downstream.begin(connection.status, headers)
    await attempt.downstream.write(body)


def sends_events(headers: Headers, call: Call) -> bool:
    """Whether an answer is a stream of events; where it does not say, whether the request asked."""
    kind = next((value for name, value in headers if name == b"content-type"), None)
    return call.stream if kind is None else kind.lower().startswith(_EVENTS)


def _handed_back(headers: Headers) -> Headers:
    return [
        (name, value)
        for name, value in headers
        if name in _HANDED_BACK or name.startswith(_HANDED_BACK_PREFIXES)
    ]


async def _hand_on_events(
    connection: Connection, attempt: Attempt, timer: ResponseTimer, at_once: bool
) -> None:
    """Hand on a stream from its first token; before that, another endpoint could still answer."""
    peek, downstream, held, rest = sse.EventPeek(), attempt.downstream, bytearray(), b""

    def take(piece: bytes, chunk: bytes | None) -> bool:
        """Hand on plain tokens if that need not wait; this avoids waking a task for them."""
        num_tokens = peek.count_plain(piece)
        if not num_tokens or not downstream.write_now(piece, chunk):
            return False
        peek.num_tokens += num_tokens
        attempt.take(peek.num_tokens)
        timer.wait_again()
        return True

    hear = attempt.request.hear
    if at_once:
        await downstream.begin(connection.status, _handed_back(connection.headers))
    try:
        while piece := await connection.read(take if downstream.begun else None):
            try:
                lines = peek.feed(piece)
            except sse.ErrorEvent as error:
                if downstream.begun and error.before:
                    attempt.take(peek.num_tokens)
                    await downstream.write(error.before)
                raise
            if hear is not None and peek.answer_id:
                hear(connection.origin.url, peek.answer_id)
                hear = None
            if not downstream.begun:
                held += lines
                lines = bytes(held) if peek.num_tokens or len(held) > _MAX_HELD_BYTES else b""
                if lines:
                    await downstream.begin(connection.status, _handed_back(connection.headers))
            if peek.num_tokens:
                timer.begin()
                attempt.take(peek.num_tokens)
            if lines:
                await downstream.write(lines)
            timer.wait_again()
        rest = peek.rest()
    except (UpstreamError, _TooLate):
        if not peek.is_complete:
            raise
    is_cut = connection.ends_by_close and peek.is_known
    if not (peek.has_ended or (peek.num_tokens and not is_cut)):
        raise UpstreamError("ended its answer without a reason")
    attempt.take(peek.num_tokens, None if peek.has_failed else peek.finish_reason or "stop")
    if attempt.request.learn is not None:
        attempt.request.learn(sse.prompt_tokens_of(peek.usage))
    if not downstream.begun:
        await downstream.begin(connection.status, _handed_back(connection.headers))
        rest = bytes(held) + rest
    if rest:
        await downstream.write(rest)


class _TooLate(Exception):
    """A deadline has passed; the text says which."""


_LATE = {
    "first_byte_s": "did not begin to answer in {:g} s",
    "first_token_s": "sent no token in {:g} s",
    "whole_s": "sent no answer in {:g} s",
    "between_tokens_s": "sent no other token in {:g} s",
    "total_s": "was not done in {:g} s",
}


class ResponseTimer:
    """Watches the deadlines of one request.

    It looks now and then what is due, so that a token costs nothing.

    Time that the caller takes is not the endpoint's. An endpoint that is late, but answers whoever
    asks for its metrics, is at work: elsewhere the request would begin anew.
    """

    def __init__(self, deadlines: Deadlines, attempt: Attempt, prefill_token_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._started_s = self._since_s = self._loop.time()
        self._limits_s, self._attempt, request = deadlines, attempt, attempt.request
        prefill_s = prefill_token_s * len(request.token_ids)
        self._first_s = deadlines.first_token_s + prefill_s // 1  # Errors name it: no fractions.
        self._whole_s: float | None = None
        """Time for an answer that comes at once; None: it is a stream."""
        if not request.call.stream:
            self._whole_s = self._first_s + deadlines.whole_per_token_s * request.max_tokens
            if request.call.generates and not request.max_tokens:
                self._whole_s = deadlines.total_s  # It may be as long as the model goes on.
        self.has_head = self._has_begun = False
        self._connection: Connection | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, connection: Connection) -> None:
        """Time a connection, from when the request is sent over it."""
        self._attempt.note_send()
        self._connection = connection
        if self._timer is None:
            self._timer = self._loop.call_at(self._due()[0], self._look)

    def begin(self) -> None:
        """Note the first token."""
        if not self._has_begun:
            self._has_begun = True
            self.wait_again()
            self.stop()
            self._timer = self._loop.call_at(self._due()[0], self._look)

    def wait_again(self) -> None:
        """Restart the time that the endpoint may be silent."""
        self._since_s = self._loop.time()

    def stop(self) -> None:
        """Stop timing."""
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> tuple[float, str, float]:
        """Return the next deadline by the loop's clock, its name and its length, seconds."""
        limits, started_s = self._limits_s, self._started_s
        due = [(started_s + limits.total_s, "total_s", limits.total_s)]
        if self._has_begun:
            between_s = limits.between_tokens_s
            return min(*due, (self._since_s + between_s, "between_tokens_s", between_s))
        if limits.first_byte_s is not None and not self.has_head:
            due.append((started_s + limits.first_byte_s, "first_byte_s", limits.first_byte_s))
        if self._whole_s is None:
            # Signs without a token, such as comments, are signs of life.
            due.append((self._since_s + self._first_s, "first_token_s", self._first_s))
        else:
            due.append((started_s + self._whole_s, "whole_s", self._whole_s))
        return min(due)

    def _look(self) -> None:
        at_s, name, limit_s = self._due()
        now_s, connection = self._loop.time(), self._connection
        assert connection is not None
        next_s, is_late = at_s, now_s >= at_s and name in ("first_token_s", "whole_s")
        if is_late and now_s - connection.origin.scraped_s < _ALIVE_S:
            name, limit_s = "total_s", self._limits_s.total_s
            at_s, next_s = self._started_s + limit_s, now_s + 1.0
        if now_s < at_s:
            self._timer = self._loop.call_at(min(at_s, next_s), self._look)
        elif not connection.is_waiting:
            self._timer = self._loop.call_later(min(limit_s, 1.0), self._look)
        else:
            connection.fail(_TooLate(_LATE[name].format(limit_s)))
