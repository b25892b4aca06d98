"""Reading server-sent events of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from serve_app.engines.base import FinishReason
from serve_app.gateway.generation import GenerationChunk

MAX_LINE_BYTES = 16 << 20
"""Longest event that is read."""


class BadEvent(ValueError):
    """An event that is not one of OpenAI's; the text says what it lacks."""


async def split_lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    r"""Split a stream at `\n` and `\r\n` only: other ends of lines may stand inside JSON.

    Raises:
        BadEvent: A line is longer than `MAX_LINE_BYTES`.
    """
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        *lines, last = rest.split(b"\n")
        rest = bytearray(last)
        for line in lines:
            yield bytes(line.removesuffix(b"\r"))
        if len(rest) > MAX_LINE_BYTES:
            raise BadEvent(f"a line is longer than {MAX_LINE_BYTES} bytes")
    if rest:
        yield bytes(rest)


async def read_chunks(pieces: AsyncIterator[bytes]) -> AsyncGenerator[GenerationChunk, None]:
    """Read a stream of completions; without usage in them every event counts as a token.

    Raises:
        BadEvent: An event is not one of OpenAI's, or it says that the server failed.
    """
    reader = _Reader()
    async with aclosing(split_lines(pieces)) as lines:
        async for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            chunk = reader.read(data)
            if chunk is not None:
                yield chunk
    if reader.finish_reason is not None:
        yield GenerationChunk("", reader.num_tokens, reader.finish_reason)


class _Reader:
    """Makes chunks of events, one after another."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def read(self, data: bytes) -> GenerationChunk | None:
        """Read an event; None: the answer has not grown."""
        try:
            event = json.loads(data)
            if event.get("error"):
                raise BadEvent("it answered with an error event")
            return self._read(event)
        except (ValueError, AttributeError, TypeError, LookupError, RecursionError) as error:
            if isinstance(error, BadEvent):
                raise
            raise BadEvent(f"it sent an event that cannot be read: {error!r:.100}") from None

    def _read(self, event: dict[str, Any]) -> GenerationChunk | None:
        usage, choices = event.get("usage"), event.get("choices")
        text, num_before, grows = "", self.num_tokens, False
        if choices:
            choice = choices[0]
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            # A model that reasons or calls tools is at work, though that is not handed on.
            grows = bool(text) or any(delta[key] for key in delta if key != "role")
            if choice.get("finish_reason"):
                self.finish_reason = "length" if choice["finish_reason"] == "length" else "stop"
        self.num_tokens = int(usage["completion_tokens"]) if usage else num_before + grows
        if not grows and self.num_tokens <= num_before:
            return None
        return GenerationChunk(str(text), self.num_tokens)
