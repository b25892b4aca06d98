"""A real but tiny engine: it batches, takes time, forgets on request, and repeats its prompt."""

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.engine_config import EngineConfig
from serve_app.engines.base import Chunk, EngineError, EngineStats

ITERATION_S = 0.004
SEQUENCE_S = 0.0005
KV_TOKENS = 20_000


@dataclass
class _Request:
    token_ids: tuple[int, ...]
    sampling: object
    queue: asyncio.Queue = field(default_factory=asyncio.Queue)
    generated: int = 0
    gone: bool = False


class TinyEngine:
    """Iterations of `ITERATION_S + SEQUENCE_S x batch`, each giving every sequence a token.

    The k-th token generated is the k-th of the prompt; where the prompt ends, so does the answer,
    unless `ignore_eos` starts it over. Where folders `started` and `aborted` lie beside its model,
    it leaves the number of its process there.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._by_id: dict[str, _Request] = {}
        self._generation = asyncio.Event()
        self.num_aborted = 0

    async def start(self) -> None:
        self._note("started")
        self._loop = asyncio.create_task(self._iterate())

    async def generate(self, request_id, token_ids, sampling, order_key=None):
        if len(token_ids) + sampling.max_tokens > self._config.max_model_tokens:
            raise EngineError("prompt and output are too long")
        if len(self._waiting) >= self._config.max_waiting > 0:
            raise EngineError("the queue is full")
        request = _Request(tuple(token_ids), sampling)
        self._by_id[request_id] = request
        self._waiting.append(request)
        self._generation.set()
        try:
            while True:
                chunk = await request.queue.get()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            await self.abort(request_id)

    async def abort(self, request_id):
        request = self._by_id.pop(request_id, None)
        if request is not None and not request.gone:
            request.gone = True
            self.num_aborted += 1
            self._note("aborted")

    def stats(self):
        held = sum(len(one.token_ids) + one.generated for one in self._running)
        return EngineStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            kv_used_fraction=min(held / KV_TOKENS, 1.0),
            kv_capacity_tokens=KV_TOKENS,
            num_preemptions=self.num_aborted,  # Seen by tests: nothing is ever preempted here.
        )

    async def check_health(self):
        if self._loop.done():
            raise EngineError("the loop has ended")

    async def drain(self):
        while self._running or self._waiting:
            await asyncio.sleep(0.01)

    async def stop(self):
        self._loop.cancel()

    def _note(self, what):
        folder = Path(self._config.model).parent / what
        if folder.is_dir():
            (folder / str(os.getpid())).touch()

    async def _iterate(self):
        while True:
            self._drop_gone()
            while self._waiting and len(self._running) < self._config.max_batch:
                self._running.append(self._waiting.pop(0))
            if not self._running:
                self._generation.clear()
                await self._generation.wait()
                continue
            await asyncio.sleep(ITERATION_S + SEQUENCE_S * len(self._running))
            for request in list(self._running):
                self._step(request)

    def _drop_gone(self):
        self._running = [one for one in self._running if not one.gone]
        self._waiting = [one for one in self._waiting if not one.gone]

    def _step(self, request):
        prompt = request.token_ids
        token = prompt[request.generated % len(prompt)]
        request.generated += 1
        reason = None
        if request.generated >= request.sampling.max_tokens:
            reason = "length"
        elif request.generated == len(prompt) and not request.sampling.ignore_eos:
            reason = "stop"
        if reason is not None:
            request.gone = True
            self._running.remove(request)
        request.queue.put_nowait(Chunk((token,), reason))
