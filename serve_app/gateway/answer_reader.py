"""Follows an answer that a proxy carries: its tokens, how it ends, and whose fault an error is."""

from __future__ import annotations

from serve_app.gateway import sse
from serve_app.gateway.exchange import Attempt
from serve_app.gateway.forwarding import failure_of, failure_of_event, sends_events
from serve_app.gateway.generation import Headers, ReplicaFailed, ReplicaLacks

_MAX_ERROR_BYTES = 1 << 20


class AnswerReader:
    """Reads the answer of one replica, piece by piece, and tells the attempt."""

    def __init__(self, attempt: Attempt, replica_id: str, status: int, headers: Headers) -> None:
        """Begin with the head; the names of headers are in small letters."""
        self._attempt, self._replica_id = attempt, replica_id
        self._status, self._headers = status, headers
        self._which = "an endpoint behind the proxy"
        is_encoded = any(name == b"content-encoding" for name, _ in headers)
        has_events = sends_events(headers, attempt.request.call) and not is_encoded
        self._events = sse.EventPeek() if has_events and self._is_well else None
        self._begin, self._tail = bytearray(), b""
        """The beginning and the end of an answer that is no stream."""

    @property
    def _is_well(self) -> bool:
        return 200 <= self._status < 300

    def feed(self, piece: bytes) -> None:
        """Take a piece of the body.

        Raises:
            ReplicaFailed: An error event says so.
            RequestRejected: An error event rejects the request.
        """
        if self._events is None:
            self._tail = (self._tail + piece)[-sse.PEEK_BYTES :]
            if len(self._begin) < _MAX_ERROR_BYTES:
                self._begin += piece
            return
        num_plain = self._events.count_plain(piece)
        if num_plain:
            self._events.num_tokens += num_plain
        else:
            try:
                self._events.feed(piece)
            except sse.ErrorEvent as error:
                if self._events.num_tokens:
                    self._attempt.take(self._events.num_tokens)
                raise failure_of_event(self._which, error) from None
            if self._attempt.request.hear is not None and self._events.answer_id:
                self._attempt.request.hear(self._replica_id, self._events.answer_id)
                self._attempt.request.hear = None
        if self._events.num_tokens:
            self._attempt.take(self._events.num_tokens)

    def end(self) -> None:
        """Take the end of the body.

        Raises:
            ReplicaFailed: The answer is an error of the replica, or ended too early.
            RequestRejected: The answer rejects the request.
        """
        if not self._is_well:
            raise failure_of(self._which, self._status, self._headers, bytes(self._begin))
        request = self._attempt.request
        if self._events is None:
            num_tokens, reason, usage = sse.peek_whole(self._tail)
            if request.hear is not None and (name := sse.id_in(self._begin)):
                request.hear(self._replica_id, name)
            self._attempt.take(num_tokens, reason, is_whole=True)
        else:
            peek = self._events
            try:
                peek.rest()
            except sse.ErrorEvent as error:
                raise failure_of_event(self._which, error) from None
            usage = peek.usage
            if not (peek.has_ended or peek.num_tokens):
                raise ReplicaFailed(f"{self._which} ended its answer without a reason")
            reason_or_none = None if peek.has_failed else peek.finish_reason or "stop"
            self._attempt.take(peek.num_tokens, reason_or_none)
        if request.learn is not None:
            request.learn(sse.prompt_tokens_of(usage))

    def end_unseen(self) -> None:
        """Take the end of an answer whose body nobody has shown; its tokens stay unknown."""
        if not self._is_well:
            failure = failure_of(self._which, self._status, self._headers, b"")
            # Its body would say what is not found: a route, or what the request names.
            raise failure.rejection if isinstance(failure, ReplicaLacks) else failure
        self._attempt.take(0, "stop", is_whole=True)
