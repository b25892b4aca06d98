"""A rank of the sharded engine in this process: what its actor does, without Ray."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.shapes import SHAPES, Shape
from serve_app.engine_config import EngineConfig
from serve_app.engines.base import EngineError, Sampling
from serve_app.engines.sharded import rank
from serve_app.engines.sharded.messages import RequestNames, request_id_in


def save_models(folder: Path, names: Iterable[str], dtype: torch.dtype, device: str) -> None:
    """Write models of `SHAPES`, of random weights, that are not in the folder yet."""
    for name in names:
        if not (folder / name).is_dir():
            torch.manual_seed(0)
            with torch.device(device):
                model = LlamaForCausalLM(_config(SHAPES[name])).to(dtype)
            model.save_pretrained(folder / f"{name}.partial")
            (folder / f"{name}.partial").rename(folder / name)
            free()


def _config(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        tie_word_embeddings=shape.tied_embeddings,
        max_position_embeddings=8192,
        # Large weights, or every token would be as likely as any other.
        initializer_range=1.6 * shape.hidden_size**-0.5,
    )


def free() -> None:
    """Give back the memory of what is no longer used."""
    gc.collect()
    torch.cuda.empty_cache()


class NotingManager(rank.LockstepManager):
    """Continuous batching that notes every iteration."""

    iterations: list[tuple[int, int, int, float]]
    """Prefill tokens, decoding sequences, KV tokens read, seconds."""

    def _generation_step(self) -> None:
        super()._generation_step()
        self._computed = rank.composition(self.batch_processor.inputs_and_outputs)

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        num_batches = self.current_batch
        going_on = super()._generation_loop_body(batch_processor, bootstrapping)
        if self.current_batch > num_batches:
            self.iterations.append((*self._computed, time.perf_counter() - self._begun_s))
        return going_on


class RankEngine:
    """Generates until it is stopped, for one event loop."""

    def __init__(self, model: Any, config: EngineConfig) -> None:
        """Allocate the cache and begin to take requests.

        Raises:
            EngineError: There is no memory for it.
        """
        self.outbox = rank.Outbox(asyncio.get_running_loop())
        self.manager = NotingManager(model, config, self.outbox)
        self.manager.iterations = []
        self._names = RequestNames()
        self.manager.start()

    def submit(self, request_id: str, token_ids: list[int], num_new: int) -> None:
        """Queue a request, whose tokens are the likeliest ones."""
        name = self._names.new(request_id, None)
        self.manager.submit(name, token_ids, Sampling(num_new, ignore_eos=True))

    def stop(self) -> None:
        """End the generation, and free the cache."""
        self.manager.stop(block=True, timeout=30.0, hard_stop=True)
        del self.manager  # It holds the cache.
        free()


@dataclass
class Answers:
    """What came of requests, and what the engine told meanwhile."""

    tokens: list[list[int]]
    """Generated, by request."""
    kv_capacity_tokens: int
    most_running: int = 0
    num_preemptions: int = 0
    gpu_used_fraction: float = 0.0
    """Of the card's memory, whoever uses it, when all was answered."""


async def answer(
    model: Any, config: EngineConfig, prompts: Sequence[list[int]], num_new: int
) -> Answers:
    """Answer prompts that come at once, greedily, each with `num_new` tokens.

    Raises:
        EngineError: The engine could not start, or a request failed.
    """
    engine = RankEngine(model, config)
    try:
        found = Answers([[] for _ in prompts], engine.manager.limits.kv_capacity_tokens)
        for number, prompt in enumerate(prompts):
            engine.submit(str(number), prompt, num_new)
        while any(len(tokens) < num_new for tokens in found.tokens):
            _take(await engine.outbox.take(1.0), found)
        if torch.cuda.is_available():
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            found.gpu_used_fraction = 1 - free_bytes / total_bytes
        return found
    finally:
        engine.stop()


def _take(report: Any, found: Answers) -> None:
    for progress in report.progress:
        if progress.token_id is None:
            raise EngineError(f"request {progress.request_id} failed: {progress.error}")
        found.tokens[int(request_id_in(progress.request_id))].append(progress.token_id)
    if report.stats is not None:
        found.most_running = max(found.most_running, report.stats.num_running)
        found.num_preemptions = report.stats.num_preemptions
