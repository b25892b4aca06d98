"""The engine interface over vLLM's AsyncLLM, for GPUs.

Run with vLLM 0.29 on CPUs, never with GPUs. vLLM is imported when an engine starts; it is the extra
`vllm`. It places its own workers: on one node as processes, on several as Ray actors in the
placement group of the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from serve_app.engine_config import EngineConfig
from serve_app.engines.admission import Admission, reason_line
from serve_app.engines.base import IDLE, Chunk, EngineError, EngineStats, FinishReason, Sampling
from serve_app.engines.models import ModelShape, check_plan, find_model, read_shape
from serve_app.engines.waiting import ArrivalKeys, priority_of
from tokenyard.routing.types import OrderKey


class VllmEngine:
    """An engine over vLLM."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._llm: Any = None
        self._admission = Admission(config.max_batch, config.max_waiting)
        self._gauge = _Gauge()
        self._kv_capacity_tokens = 0.0
        self._arrivals = ArrivalKeys()

    async def start(self) -> None:
        """Load the weights and be ready, within `start_timeout_s`: see `Engine.start`."""
        folder = await asyncio.to_thread(find_model, self.config.model)
        shape = read_shape(folder)
        check_plan(shape, self.config)
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                self._llm = await asyncio.to_thread(_load, self.config, str(folder), self._gauge)
        except ImportError:
            raise EngineError("vLLM is not installed: pip install 'tokenyard[vllm]'") from None
        except TimeoutError:
            raise EngineError(
                f"vLLM was not ready within {self.config.start_timeout_s:g} s"
            ) from None
        except Exception as error:
            raise EngineError(f"vLLM could not start: {reason_line(error)}") from error
        self._open(shape)

    def _open(self, shape: ModelShape) -> None:
        cache = self._llm.vllm_config.cache_config
        self._kv_capacity_tokens = float(cache.num_gpu_blocks * cache.block_size)
        longest = min(self.config.max_model_tokens, shape.max_positions, self._kv_capacity_tokens)
        self._admission.open(int(longest), shape.vocab_size)

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: Sampling,
        order_key: OrderKey | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Generate: see `Engine.generate`."""
        num_running = self._gauge.stats.num_running_if_full
        self._admission.check(request_id, token_ids, sampling, num_running)
        self._admission.enter(request_id)
        try:
            prompt = {"prompt_token_ids": list(token_ids)}
            # vLLM is told once, so who is late stays where it is.
            key_s = self._arrivals.key(order_key).key_s
            outputs = self._llm.generate(
                prompt, _sampling_params(sampling), request_id,
                priority=priority_of(key_s),
            )  # fmt: skip
            async with aclosing(outputs):
                async for output in outputs:
                    step = output.outputs[0]
                    yield Chunk(tuple(step.token_ids), _finish_reason(step.finish_reason))
        except (EngineError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            raise EngineError(f"vLLM failed: {reason_line(error)}") from error
        finally:
            self._admission.leave(request_id)

    async def abort(self, request_id: str) -> None:
        """Forget a request; unknown ones are ignored."""
        if request_id in self._admission:
            await self._llm.abort(request_id)

    def stats(self) -> EngineStats:
        """Tell the state as of now, without waiting."""
        counted = self._gauge.stats
        num_waiting = max(0, len(self._admission) - counted.num_running)
        return replace(
            counted, num_waiting=num_waiting, kv_capacity_tokens=self._kv_capacity_tokens
        )

    async def check_health(self) -> None:
        """Return if vLLM's processes live: see `Engine.check_health`."""
        if self._llm is None:
            raise EngineError("the engine is not running")
        try:
            await self._llm.check_health()
        except Exception as error:
            raise EngineError(f"vLLM has died: {reason_line(error)}") from error

    async def drain(self) -> None:
        """Return once everything that was accepted has been answered."""
        await self._admission.emptied()

    async def stop(self) -> None:
        """Free the processes and their memory."""
        self._admission.close("the engine was stopped")
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)


def _load(config: EngineConfig, folder: str, gauge: _Gauge) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    arguments = AsyncEngineArgs(
        model=folder,
        dtype=config.dtype,
        tensor_parallel_size=config.tensor_parallel,
        pipeline_parallel_size=config.pipeline_parallel,
        gpu_memory_utilization=config.memory_fraction,
        kv_cache_memory_bytes=config.kv_bytes,
        max_num_seqs=config.max_batch,
        scheduling_policy="priority",
        max_num_batched_tokens=config.token_budget,
        max_model_len=config.max_model_tokens,
        enable_chunked_prefill=True,
        # Without GPU graphs to capture, compilation takes minutes and gains little.
        enforce_eager=config.device == "cpu",
        disable_log_stats=True,
    )

    class Recorder(StatLoggerBase):
        """Passes on the counts of vLLM."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            gauge.note(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return AsyncLLM.from_engine_args(arguments, stat_loggers=[Recorder])


class _Gauge:
    """The latest counts of vLLM's scheduler."""

    def __init__(self) -> None:
        self.stats = IDLE

    def note(self, scheduler: Any, iteration: Any) -> None:
        """Take the counts of one iteration."""
        if scheduler is not None:
            self.stats = replace(
                self.stats, num_running=scheduler.num_running_reqs,
                num_waiting=scheduler.num_waiting_reqs, kv_used_fraction=scheduler.kv_cache_usage,
            )  # fmt: skip
        if iteration is not None:
            num_preemptions = self.stats.num_preemptions + iteration.num_preempted_reqs
            self.stats = replace(self.stats, num_preemptions=num_preemptions)


def _sampling_params(sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
    )


def _finish_reason(reason: str | None) -> FinishReason | None:
    """Map vLLM's finish reasons to ours; those of failures raise an EngineError."""
    if reason in (None, "stop", "length", "abort"):
        return cast("FinishReason | None", reason)
    raise EngineError(f"vLLM ended the request with {reason!r}")
