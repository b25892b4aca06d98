"""Text from an engine: its tokens decoded, up to a stop string, with a limit on the batch."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from serve_app.engines.admission import BatchLimit
from serve_app.engines.base import (
    Chunk,
    Engine,
    EngineError,
    EngineFull,
    EngineStatus,
    FinishReason,
    Sampling,
)
from serve_app.engines.tokenizer import Detokenizer, StopFinder, Tokenizer
from tokenyard.routing.types import OrderKey


# Not frozen: that takes twice as long to make, and every token makes one.
@dataclass(slots=True)
class TextChunk:
    """A piece of an answer."""

    text: str
    num_tokens: int
    """Tokens generated so far, all chunks together."""
    finish_reason: FinishReason | None = None
    """Set in the last chunk."""


class TextEngine:
    """A started engine with its tokenizer; it counts what it answers."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, max_batch: int, max_waiting: int, most: int
    ) -> None:
        """Answer with a started engine, which holds at most `most` requests."""
        self._engine, self._tokenizer = engine, tokenizer
        self._slots = BatchLimit(max_batch)
        self._max_waiting, self._most = max_waiting, most
        self._num_held = 0
        self._draining = False

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: Sampling,
        stop: tuple[str, ...],
        order_key: OrderKey | None = None,
    ) -> AsyncGenerator[TextChunk, None]:
        """Stream the answer to a request up to a stop string; closing the stream early aborts it.

        Raises:
            EngineError: As `Engine.generate`, or the engine is about to stop.
        """
        self._check_room()
        done = False
        async with self._place(order_key):
            chunks = self._engine.generate(request_id, token_ids, sampling, order_key)
            try:
                # Closed here: else the engine goes on after a stop string until somebody tidies up.
                async with aclosing(chunks):
                    async for chunk in read_texts(chunks, self._tokenizer, stop):
                        done = chunk.finish_reason is not None
                        yield chunk
            finally:
                if not done:
                    await self._engine.abort(request_id)

    @asynccontextmanager
    async def _place(self, order_key: OrderKey | None) -> AsyncGenerator[None, None]:
        """Hold a place in the batch; requests wait for it by their order keys."""
        self._num_held += 1
        try:
            await self._slots.enter(order_key)
            try:
                yield
            finally:
                self._slots.leave()
        finally:
            self._num_held -= 1

    def _check_room(self) -> None:
        if self._draining:
            raise EngineError("the replica is about to stop")
        # Those on their way to a free slot wait for nothing, though the engine may count them.
        if self._num_held >= min(self._slots.limit + self._max_waiting, self._most):
            raise EngineFull(f"{self._num_held} requests are being answered already")

    def limit_batch(self, max_batch: int) -> None:
        """Run that many sequences at once, at most the engine's own limit; running ones go on."""
        self._slots.resize(max_batch)

    def status(self) -> EngineStatus:
        """Return the present state."""
        stats = self._engine.stats()
        return EngineStatus(
            num_waiting=stats.num_waiting + self._slots.num_waiting,
            num_running=stats.num_running,
            kv_used_fraction=stats.kv_used_fraction,
            observed_at_s=time.time(),
            accepting=stats.accepting and not self._draining,
            max_batch=self._slots.limit,
        )

    async def drain(self) -> None:
        """Take no more requests; return once all are answered."""
        self._draining = True
        await self._slots.emptied()
        await self._engine.drain()


async def read_texts(
    chunks: AsyncIterator[Chunk], tokenizer: Tokenizer, stop: tuple[str, ...]
) -> AsyncGenerator[TextChunk, None]:
    """Turn an engine's tokens into text, up to the first stop string."""
    texts, stops = Detokenizer(tokenizer), StopFinder(stop)
    num_tokens = 0
    async for chunk in chunks:
        num_tokens += len(chunk.token_ids)
        text = stops.push(texts.push(chunk.token_ids))
        reason = chunk.finish_reason
        if reason is not None and not stops.found:
            text += stops.push(texts.finish())
            text += stops.finish()
        if stops.found:
            reason = "stop"
        yield TextChunk(text, num_tokens, reason)
        if reason is not None:
            return
    raise EngineError("the engine's answer ended without a reason")
