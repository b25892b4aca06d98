"""A request on its way through the gateway: what is asked, who answers, and who is answered."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from serve_app.engines.base import FinishReason
from serve_app.gateway.generation import GenerationChunk, GenerationRequest
from serve_app.gateway.replicas import EngineStatus

Headers = Sequence[tuple[bytes, bytes]]
_GENERATING = (b"/v1/chat/completions", b"/v1/completions", b"/v1/responses")


@dataclass(frozen=True, slots=True)
class Call:
    """A request as its caller wrote it, for endpoints."""

    path: bytes
    """With its query."""
    headers: bytes
    """Lines of those that are handed on, each with its end; without the body's length."""
    body: bytes
    stream: bool
    """Whether events are asked for."""

    @property
    def generates(self) -> bool:
        """Whether a model writes the answer, token by token."""
        return self.path.partition(b"?")[0] in _GENERATING


class AnswerWriter(Protocol):
    """Lays the answer of an engine out as the caller asked for it."""

    headers: Headers

    def add(self, chunk: GenerationChunk) -> bytes:
        """Take what the answer grew by; return what is to be sent now, which may be nothing."""
        ...

    def finish(self) -> bytes:
        """Return what is to be sent at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Generation:
    """A request as an engine of ours takes it."""

    request: GenerationRequest
    writer: AnswerWriter


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request, as far as the gateway has to know it."""

    request_id: str
    token_ids: Sequence[int]
    """Of the prompt; of endpoints that tokenise themselves, an estimate."""
    max_tokens: int
    """Longest answer; 0: it does not say, or there are no tokens in answers to it."""
    call: Call | None = None
    """For endpoints; None: they cannot answer it."""
    generation: Generation | None = None
    """For engines of ours; None: they cannot answer it."""

    def is_for(self, backend: Backend) -> bool:
        """Whether the replicas of a pool can answer it."""
        return (self.call if backend.takes_calls else self.generation) is not None


class Backend(Protocol):
    """A pool, as far as requests know it."""

    takes_calls: bool
    """Whether its replicas are sent what the caller wrote, and not a generation."""


class Downstream(Protocol):
    """Whoever asked."""

    begun: bool
    """Whether the answer has begun: from then on it cannot be another."""

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head of the answer."""
        ...

    async def write(self, data: bytes) -> None:
        """Send some of the body; waits while the caller reads more slowly than it comes."""
        ...


class Attempt(Protocol):
    """One try to have a replica answer a request."""

    request: InferenceRequest
    downstream: Downstream

    def take(
        self,
        num_tokens: int,
        finish_reason: FinishReason | None = None,
        status: EngineStatus | None = None,
        is_whole: bool = False,
    ) -> None:
        """Note what has come.

        Args:
            num_tokens: Tokens of the answer so far.
            finish_reason: Set once, at the end.
            status: State of the replica, where it tells.
            is_whole: Whether all came at once, so that nobody knows when the first token was there.
        """
        ...


async def relay(chunks: AsyncGenerator[GenerationChunk, None], attempt: Attempt) -> None:
    """Write what an engine of ours generates to whoever asked."""
    assert attempt.request.generation is not None
    writer, downstream = attempt.request.generation.writer, attempt.downstream
    async with aclosing(chunks):
        async for chunk in chunks:
            attempt.take(chunk.num_tokens, chunk.finish_reason, chunk.status)
            data = writer.add(chunk)
            if not data:
                continue
            if not downstream.begun:
                await downstream.begin(200, writer.headers)
            await downstream.write(data)
    if not downstream.begun:
        await downstream.begin(200, writer.headers)
    await downstream.write(writer.finish())
