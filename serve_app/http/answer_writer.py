"""Writes what an engine generates as OpenAI's JSON, whole or as events."""

from __future__ import annotations

import json
import time
from typing import Any

from serve_app.engines.base import Generation
from serve_app.engines.texts import TextChunk
from serve_app.http.openai_schema import (
    AssistantMessage,
    ChatAnswer,
    ChatChoice,
    CompletionAnswer,
    CompletionChoice,
    Usage,
)

_JSON_HEADERS = [(b"content-type", b"application/json")]
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"
_GOES_ON = '"finish_reason":null,"logprobs":null}'
"""End of the choice of each event but the last."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


class AnswerWriter:
    """Formats one answer as its caller asked for it."""

    def __init__(self, generation: Generation, request_id: str) -> None:
        self._include_usage = generation.include_usage
        self._continuous = generation.continuous_usage
        self._prompt_tokens = len(generation.token_ids)
        self._head = {"id": request_id, "created": int(time.time()), "model": generation.model}
        self.streams, self._texts = generation.stream, list[str]()
        self._is_chat = generation.is_chat
        if self.streams:
            kind = "chat.completion.chunk" if self._is_chat else "text_completion"
            opening = _encode({**self._head, "object": kind})
            self._opening = f'data: {opening[:-1]},"choices":['
        self._last: TextChunk | None = None
        names = EVENT_HEADERS if self.streams else _JSON_HEADERS
        self.headers = [*names, (b"x-request-id", request_id.encode())]

    def add(self, chunk: TextChunk) -> bytes:
        """Take a piece of the answer; return its event, if there is one."""
        is_first, self._last = self._last is None, chunk
        if not self.streams:
            self._texts.append(chunk.text)
            return b""
        if not (is_first or chunk.text or chunk.finish_reason is not None):
            return b""
        return f"{self._opening}{self._choice(chunk, is_first)}]{self._used(chunk)}}}\n\n".encode()

    def finish(self) -> bytes:
        """Return the last events, or the whole answer."""
        last = self._last
        assert last is not None
        if not self.streams:
            return self._whole(last).model_dump_json(exclude_none=True).encode()
        if not self._include_usage:
            return _DONE
        usage = self._usage(last).model_dump_json()
        return f'{self._opening}],"usage":{usage}}}\n\n'.encode() + _DONE

    def _used(self, chunk: TextChunk) -> str:
        """The usage so far, in events that report it."""
        if self._include_usage and not self._continuous:
            return ',"usage":null'
        # The last event always tells: an event is not a token, and whoever counts has to know.
        if self._continuous or chunk.finish_reason is not None:
            return f',"usage":{self._usage(chunk).model_dump_json()}'
        return ""

    def _usage(self, chunk: TextChunk) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=chunk.num_tokens,
            total_tokens=self._prompt_tokens + chunk.num_tokens,
        )

    def _whole(self, last: TextChunk) -> ChatAnswer | CompletionAnswer:
        text, reason, usage = "".join(self._texts), _reason(last), self._usage(last)
        if self._is_chat:
            said = ChatChoice(message=AssistantMessage(content=text), finish_reason=reason)
            return ChatAnswer(**self._head, choices=[said], usage=usage)
        choice = CompletionChoice(text=text, finish_reason=reason)
        return CompletionAnswer(**self._head, choices=[choice], usage=usage)

    def _choice(self, chunk: TextChunk, is_first: bool) -> str:
        reason = _reason(chunk)
        end = _GOES_ON if reason is None else f'"finish_reason":"{reason}","logprobs":null}}'
        if not self._is_chat:
            return f'{{"index":0,"text":{_encode(chunk.text)},{end}'
        said = f'"content":{_encode(chunk.text)}' if chunk.text or is_first else ""
        who = '"role":"assistant",' if is_first else ""
        return f'{{"index":0,"delta":{{{who}{said}}},{end}'


def _reason(chunk: TextChunk) -> Any:
    return "stop" if chunk.finish_reason == "abort" else chunk.finish_reason
