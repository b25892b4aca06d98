r"""A peek at answers that are handed on unchanged: how many tokens, and how they end.

Lines end at `\n`, `\r\n` or `\r`. In JSON a quotation mark inside a text is escaped, so that the
names below are found outside of texts only. What cannot be read is somebody else's to understand:
it counts as a token, and is handed on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from serve_app.engines.base import FinishReason

_MAX_EVENT_BYTES = 16 << 20
_MOST_TOKENS = 10**9
_USED = re.compile(
    rb'"((?:completion|output|prompt|(?:cache_(?:read|creation)_)?input)_tokens)"\s*:\s*(\d{1,9})\b'
)
_RESPONSE_ID, _ID = (re.compile(rb'"id"\s*:\s*"(%b[^"]+)"' % prefix) for prefix in (rb"resp", b""))
_INPUTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
"""Anthropic's usage leaves out of the first what a cache held, or was given."""
_CUT = re.compile(
    rb'"finish_reason"\s*:\s*"length"|"status"\s*:\s*"incomplete"|"stop_reason"\s*:\s*"max_tokens"'
)
PEEK_BYTES = 64 << 10
"""Bytes at the end of a whole answer, where its usage stands."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CUT_OFF = ("length", "max_tokens")
"""Reasons for which an answer ends before the model would end it."""
_KINDS = ("response.", "message_", "content_block_", "ping")
"""How the types of events of OpenAI's responses and of Anthropic's messages begin."""
_ENDS: dict[str, FinishReason | None] = {
    "response.completed": "stop", "response.incomplete": "length", "response.failed": None,
    "response.cancelled": None, "message_stop": "stop",
}  # fmt: skip
"""Those of the last one; None: the answer is no whole one."""


class ErrorEvent(Exception):
    """An event that says that the server failed, or that it rejects the request."""

    def __init__(self, event: Any) -> None:
        super().__init__("it answered with an error event")
        self.event: dict[str, Any] = event if isinstance(event, dict) else {"error": event}
        self.before = b""
        """Whole events that came with it, and before it."""


class EventPeek:
    """Follows a stream: reads every event up to the first token, then only those that matter.

    Where events report no usage, every event with content counts as a token.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.answer_id = ""
        self.usage: dict[str, Any] = {}
        """The usage that the answer has reported."""
        self.finish_reason: FinishReason | None = None
        self.has_failed = False
        """Whether the answer has ended, and said itself that it is no whole one."""
        self.is_known = False
        """Whether any event was one of OpenAI's or Anthropic's."""
        self._is_done = False
        self._choices: dict[Any, bool] = {}
        """Whether each choice has ended, by its index."""
        self._tail = bytearray()
        self._name, self._data = b"", bytearray()
        """Name and data of an incomplete event whose first line means nothing by itself."""
        self._follows_cr = self._is_odd = self._is_plain = False

    @property
    def has_ended(self) -> bool:
        """Whether the answer has ended, or one of its choices has."""
        return self._is_done or self.finish_reason is not None

    @property
    def is_complete(self) -> bool:
        """Whether no further part of the answer can follow."""
        return self._is_done or (self.finish_reason is not None and all(self._choices.values()))

    def feed(self, data: bytes) -> bytes:
        """Take bytes; return the complete lines among them. An error event is raised."""
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end:
            self._tail += data
            if len(self._tail) <= _MAX_EVENT_BYTES:
                return b""
            self._take_unknown()
            lines, self._tail = bytes(self._tail), bytearray()
            return lines
        lines = data if end == len(data) else data[:end]
        if self._tail:
            lines, self._tail = bytes(self._tail) + lines, bytearray()
        if end < len(data):
            self._tail += data[end:]
        self._look(lines)
        return lines

    def count_plain(self, data: bytes) -> int:
        """Tokens in bytes that are complete lines of nothing but tokens, after the first token.

        0: it is not, or may be something else. Nothing is noted of it: `feed` it otherwise.
        """
        if self._tail or not self._is_plain or data[-1:] != b"\n":
            return 0
        return _count_plain(data) or 0

    def rest(self) -> bytes:
        """Return the bytes after the last complete line, at the end."""
        rest, self._tail = bytes(self._tail), bytearray()
        self._look(rest)
        if self._data:
            self._end_event()
        return rest

    def _take_unknown(self) -> None:
        self.num_tokens += 1
        self._is_odd, self._is_plain = True, False

    def _look(self, lines: bytes) -> None:
        if self._is_plain and (num_tokens := _count_plain(lines)) is not None:
            self.num_tokens += num_tokens
            return
        at = start = int(self._follows_cr and lines.startswith(b"\n"))
        for line in lines[at:].splitlines(keepends=True):
            try:
                self._take_line(line.rstrip(b"\r\n").removeprefix(_BYTE_ORDER_MARK))
            except ErrorEvent as error:
                error.before = lines[:start]
                raise
            at += len(line)
            if not (self._data or self._name):
                start = at
        self._follows_cr = lines.endswith(b"\r")
        self._is_odd |= b"\r" in lines.replace(b"\r\n", b"")
        self._is_plain = self.num_tokens > 0 and not (self._is_odd or self.has_ended)

    def _take_line(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.strip()
        if not line:
            if self._data:
                self._end_event()
            self._name = b""
        elif name == b"event":
            self._name = value
        elif name in (b"data", b"error"):  # llama.cpp has both.
            self._name = self._name if name == b"data" else name
            if value == b"[DONE]":
                self._is_done = True
            elif self._data or not self._is_read(value):
                # It says something together with other lines only.
                self._data += value + b"\n"
                if len(self._data) > _MAX_EVENT_BYTES:
                    self._end_event()
        elif name not in (b"", b"id", b"retry"):
            self._take_unknown()

    def _end_event(self) -> None:
        """Read an event that has several lines of data."""
        data, self._data = bytes(self._data), bytearray()
        self._is_odd = True
        if not self._is_read(data):
            if self._name == b"error":
                raise ErrorEvent(data.decode(errors="replace").strip())
            self._take_unknown()
        self._name = b""

    def _is_read(self, data: bytes) -> bool:
        """Read an event; False: it is no JSON."""
        if not data:
            return True
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            return False
        try:
            self._note(event)
        except (ValueError, AttributeError, TypeError, LookupError):
            self._take_unknown()
        return True

    def _note(self, event: Any) -> None:
        if self._name == b"error":
            raise ErrorEvent(event)
        kind, choices = event.get("type") or "", event.get("choices")
        has_error = event.get("error") and not kind.startswith("response.")
        if has_error or "error" in (kind, event.get("object")):
            raise ErrorEvent(event)
        is_known = kind.startswith(_KINDS) if kind else "usage" in event
        grows = choices is None and (not is_known or kind.endswith((".delta", "_block_delta")))
        self.is_known |= is_known or choices is not None
        for choice in choices or ():
            delta = choice.get("delta") or {}
            # A model that reasons or calls tools is at work.
            grows |= bool(choice.get("text")) or any(delta[key] for key in delta if key != "role")
            index, reason = choice.get("index", 0), choice.get("finish_reason")
            self._choices[index] = bool(reason) or self._choices.get(index, False)
            if reason:
                self.finish_reason = "length" if reason in _CUT_OFF else "stop"
        if kind == "message_delta":
            if reason := event["delta"].get("stop_reason"):
                self.finish_reason = "length" if reason in _CUT_OFF else "stop"
        elif kind in _ENDS:
            self._is_done, self.has_failed = True, _ENDS[kind] is None
            self.finish_reason = self.finish_reason or _ENDS[kind]
        answer = event.get("response") or event
        if not self.answer_id and isinstance(name := answer.get("id"), str):
            self.answer_id = name
        usage = answer.get("usage") or {}
        if kind == "message_start":
            self.usage.update(event["message"].get("usage") or {})
        self.usage.update(usage)
        used = usage.get("completion_tokens")
        used = usage.get("output_tokens") if used is None else used
        if used is None:
            self.num_tokens += grows
        else:
            # Metrics and decisions are told of it: no number is too large or negative there.
            self.num_tokens = int(min(max(used, 0), _MOST_TOKENS))


def _count_plain(lines: bytes) -> int | None:
    """Events in complete lines; None: they may be more than one token each."""
    # Written out, since it runs for every token.
    if (
        b'"finish_reason":"' in lines
        or b'"finish_reason": "' in lines
        or b'"usage":{' in lines
        or b'"usage": {' in lines
        or b"[DONE]" in lines
        or b"error" in lines
        or b'"response":{' in lines
        or b'"response": {' in lines
    ):
        return None
    return lines.count(b"\ndata:") + lines.startswith(b"data:")


def peek_whole(body: bytes) -> tuple[int, FinishReason, dict[str, int]]:
    """Return the number of tokens of a whole answer, how it ended, and its fields.

    The last part of a long body is enough; 0 tokens: it does not say.
    """
    counts = _USED.findall(body, max(body.rfind(b'"usage"'), 0))
    usage = {name.decode(): int(number) for name, number in counts}
    reason: FinishReason = "length" if _CUT.search(body) else "stop"
    return usage.get("completion_tokens", usage.get("output_tokens", 0)), reason, usage


def id_in(body: bytes | bytearray) -> str:
    """Return the id of a whole response; empty: it has none."""
    match = _RESPONSE_ID.search(body) or _ID.search(body)
    return match[1].decode("latin-1") if match else ""


def prompt_tokens_of(usage: Mapping[str, Any]) -> int:
    """Tokens of the prompt; 0: the answer does not say."""
    if type(count := usage.get("prompt_tokens")) is int:
        return count
    return sum([count for name in _INPUTS if type(count := usage.get(name)) is int])
