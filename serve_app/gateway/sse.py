r"""A peek at answers that are handed on as they are: how many tokens, and how they end.

Events end at `\n` or `\r\n` only: other ends of lines may stand inside JSON. In JSON a quotation
mark inside a text is escaped, so that the names below are found outside of texts only.
"""

from __future__ import annotations

import json
import re
from typing import Any

from serve_app.engines.base import FinishReason

_MAX_LINE_BYTES = 16 << 20
_MOST_TOKENS = 10**9
_USED = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})\b')
_CUT = re.compile(rb'"finish_reason"\s*:\s*"length"|"status"\s*:\s*"incomplete"')
PEEK_BYTES = 64 << 10
"""Of the end of an answer that came at once, where it says how long it is."""


class BadEvent(ValueError):
    """An event that is not one of OpenAI's; the text says what it lacks."""


class ErrorEvent(BadEvent):
    """An event that says that the server failed."""

    def __init__(self, event: dict[str, Any]) -> None:
        """Keep what it says; the text does not, since it may name what is behind the server."""
        super().__init__("it answered with an error event")
        self.event = event
        error = event.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        self.message = message if isinstance(message, str) else "no reason given"
        self.before = b""
        """Whole lines that came with it, and before it."""


class EventPeek:
    """Follows a stream of events: until its first token each of them, and then those that matter.

    Without usage in them every event with something in it counts as a token.
    """

    def __init__(self) -> None:
        """Expect the first event."""
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._tail = bytearray()
        self._is_done = False

    @property
    def has_ended(self) -> bool:
        """Whether the answer has come to its end."""
        return self._is_done or self.finish_reason is not None

    def feed(self, data: bytes) -> bytes:
        """Take what came; return the lines of it that are whole.

        Raises:
            ErrorEvent: An event says that the server failed.
            BadEvent: An event cannot be read and is before the first token, or a line is longer
                than 16 MiB.
        """
        end = data.rfind(b"\n") + 1
        if not end:
            self._hold(data)
            return b""
        lines = data if end == len(data) else data[:end]
        if self._tail:
            lines = bytes(self._tail) + lines
            self._tail.clear()
        if end < len(data):
            self._tail += data[end:]
        self._look(lines)
        return lines

    def count_plain(self, data: bytes) -> int:
        """Tokens in what came, if it is whole lines after the first token and nothing else.

        0: it is not, or may be something else. Nothing is noted of it: `feed` it otherwise.
        """
        if self._tail or not self.num_tokens or data[-1:] != b"\n" or _may_matter(data):
            return 0
        return _num_events(data)

    def rest(self) -> bytes:
        """Return what came after the last whole line, once there is no more."""
        rest = bytes(self._tail)
        if rest:
            self._look(rest)
        return rest

    def _hold(self, data: bytes) -> None:
        self._tail += data
        if len(self._tail) > _MAX_LINE_BYTES:
            raise BadEvent(f"it sent a line longer than {_MAX_LINE_BYTES} bytes")

    def _look(self, lines: bytes) -> None:
        if self.num_tokens and not _may_matter(lines):
            self.num_tokens += _num_events(lines)
            return
        at = 0
        for line in lines.split(b"\n"):
            if line.startswith(b"data:"):
                try:
                    self._read(line[5:].strip())
                except ErrorEvent as error:
                    error.before = lines[:at]
                    raise
            at += len(line) + 1

    def _read(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = json.loads(data)
            if event.get("error"):
                raise ErrorEvent(event)
            self._note(event)
        except (ValueError, AttributeError, TypeError, LookupError, RecursionError) as error:
            if isinstance(error, BadEvent):
                raise
            if not self.num_tokens:
                text = f"it sent an event that cannot be read: {error!r:.100}"
                raise BadEvent(text) from None
            self.num_tokens += 1

    def _note(self, event: dict[str, Any]) -> None:
        grows, kind = False, event.get("type") or ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            # A model that reasons or calls tools is at work.
            grows |= bool(choice.get("text")) or any(delta[key] for key in delta if key != "role")
            if choice.get("finish_reason"):
                self.finish_reason = "length" if choice["finish_reason"] == "length" else "stop"
        answer = event.get("response") or event
        if kind in ("response.completed", "response.incomplete"):
            self.finish_reason = "stop" if kind == "response.completed" else "length"
        usage = answer.get("usage")
        if usage:
            used = usage.get("completion_tokens")
            used = usage["output_tokens"] if used is None else used
            # Metrics and decisions are told of it: no number is too large or negative there.
            self.num_tokens = int(min(max(used, 0), _MOST_TOKENS))
        else:
            self.num_tokens += grows or kind.endswith(".delta")


def _num_events(lines: bytes) -> int:
    """Events in whole lines."""
    return lines.count(b"\ndata:") + lines.startswith(b"data:")


def _may_matter(lines: bytes) -> bool:
    """Whether events may be anything but one more token each: a chain, since each token asks."""
    return (
        b'"finish_reason":"' in lines
        or b'"finish_reason": "' in lines
        or b'"usage":{' in lines
        or b'"usage": {' in lines
        or b"[DONE]" in lines
        or b'{"error"' in lines
        or b'"response":{' in lines
        or b'"response": {' in lines
    )


def peek_whole(body: bytes) -> tuple[int, FinishReason]:
    """Return the tokens that an answer which came at once says it has, and how it ended.

    Args:
        body: Of a long one, its last part. 0 tokens: it does not say.
    """
    used = _USED.findall(body)
    reason: FinishReason = "length" if _CUT.search(body) else "stop"
    return int(used[-1]) if used else 0, reason


def last_part(tail: bytes, piece: bytes) -> bytes:
    """Return as much of the end of an answer as `peek_whole` needs."""
    return (tail + piece)[-PEEK_BYTES:]
