"""One rank of a group: it holds a share of the model and takes part in every iteration.

All ranks run transformers' continuous batching in lockstep. Rank 0 alone has requests; what it
takes up, it tells the others, who then schedule the same batch, compute their share of it and draw
the same tokens. Imported in the ranks' processes only.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import os
import sys
import threading
import time
from bisect import insort
from datetime import timedelta
from heapq import heappop, heappush
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig, mixin, pipeline_parallel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache_allocators.full_attention import (
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.initialization import (
    update_cb_config_after_cache_creation,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler
from transformers.generation.continuous_batching.utils import find_head_dim
from transformers.generation.logits_process import LogitsProcessorList

from serve_app.engine_config import PAGE_TOKENS, EngineConfig
from serve_app.engines.base import EngineError, EngineStats, Sampling
from serve_app.engines.emulation import Pace
from serve_app.engines.kv_events import BlockEvent
from serve_app.engines.models import find_model
from serve_app.engines.sharded import attention
from serve_app.engines.sharded.messages import GroupLimits, Progress, RankReport, order_key_in
from serve_app.engines.sharded.packing import make_packable, pack_linears
from serve_app.engines.sharded.prefix_cache import StageCache
from serve_app.engines.sharded.sampling import GumbelDraws

# torch marks what may be missing on some platforms as not exported.
dist: Any = torch.distributed

DEFAULT_KV_BYTES = 256 << 20
_COLLECTIVE_TIMEOUT = timedelta(seconds=300)
_SWITCH_S = 2e-4
"""Time for which a thread of a rank keeps the interpreter while the one that computes wants it."""
_TRASH_BLOCKS = 2
"""Blocks that the paged cache allocates on top, for padding."""
_GPU_WORKSPACE_FRACTION = 0.1
"""Share of the GPU memory beside the weights that is kept for activations and logits."""


def open_store(host: str, num_ranks: int) -> tuple[Any, int]:
    """Open the store where ranks meet; return it and its port, which the system chooses."""
    store = dist.TCPStore(host, 0, num_ranks, is_master=True, wait_for_workers=False)
    return store, store.port


def meet(place: tuple[str, int], num_ranks: int) -> Any:
    """Connect to the store of rank 0."""
    return dist.TCPStore(*place, num_ranks, is_master=False)


def join_group(rank: int, num_ranks: int, store: Any) -> None:
    """Become rank `rank`: NCCL between GPUs, gloo between CPUs.

    transformers takes the process group that it finds.
    """
    # Every rank sees one GPU alone, so on its node it is always number 0.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK="0")
    # Continuous batching wants this before the group exists; no graphs are mixed here.
    os.environ["NCCL_GRAPH_MIXING_SUPPORT"] = "0"
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(0)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=num_ranks, timeout=_COLLECTIVE_TIMEOUT
    )


def _yield_to_the_gateway() -> None:
    """Let waking ranks preempt nobody: a decision takes far less time than an iteration."""
    if hasattr(os, "SCHED_BATCH"):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def load_share(config: EngineConfig) -> Any:
    """Load this rank's share of the model."""
    if not torch.cuda.is_available():
        # More threads than cores only wait for each other at every layer.
        torch.set_num_threads(1)
        # The thread that computes needs the interpreter for a moment at every operator.
        sys.setswitchinterval(_SWITCH_S)
        _yield_to_the_gateway()
    _repair_transformers()
    divided = None
    if config.num_ranks > 1:
        divided = DistributedConfig(
            tp_size=config.tensor_parallel, pp_size=config.pipeline_parallel
        )
    model = AutoModelForCausalLM.from_pretrained(
        find_model(config.model),
        dtype=getattr(torch, config.dtype),
        attn_implementation="sdpa",
        distributed_config=divided,
        device_map=None if divided or not torch.cuda.is_available() else "cuda",
    ).eval()
    if model.device.type == "cpu":
        pack_linears(model)
    return model


def _repair_transformers() -> None:
    """Replace two functions of transformers 5.23 that have faults, in this process.

    Tensor together with pipeline parallelism: the plan names modules that other stages hold and
    that were replaced by an identity here (KeyError on embed_tokens). Those rules are dropped.

    Pipeline stages bind their arguments to the signature of `forward`, which puts everything that
    it takes by ** (for continuous batching that is the cache) one level too deep. It is lifted.
    """
    shard = mixin.apply_tensor_parallelism
    bind = pipeline_parallel._bind_forward_kwargs
    if getattr(shard, "mended", False):
        return

    def shard_what_is_here(model: Any, mesh: Any, plan: dict[str, str]) -> Any:
        here = {
            name
            for name, module in model.named_modules()
            if not isinstance(module, pipeline_parallel.PipelineIdentityLayer)
        }
        here |= {name for name, _ in model.named_parameters()}
        make_packable(model)
        return shard(model, mesh, {name: style for name, style in plan.items() if name in here})

    def bind_flat(signature: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = bind(signature, args, kwargs)
        more = bound.pop("kwargs", {})
        return {**bound, **more}

    shard_what_is_here.mended = True  # type: ignore[attr-defined]
    mixin.apply_tensor_parallelism = shard_what_is_here
    pipeline_parallel._bind_forward_kwargs = bind_flat


def all_logits(model: Any, token_ids: list[int]) -> list[list[float]]:
    """Return the logits of every position, shape (tokens, vocabulary); all ranks must call it."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids], device=model.device)).logits
    rows: list[list[float]] = logits[0].float().cpu().tolist()
    return rows


class Outbox(OutputRouter):
    """Collects the outputs of an iteration on rank 0 into one report."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._filled = asyncio.Event()
        self._guard = threading.Lock()
        self._fresh: list[Progress] = []
        """Progress of the present iteration: it goes out together with its stats."""
        self._progress: list[Progress] = []
        self._stats: EngineStats | None = None
        self._blocks: list[BlockEvent] = []
        self._death: str | None = None

    def deliver(self, output: GenerationOutput) -> None:
        """Take one output; transformers calls it for requests that failed."""
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        """Take the outputs of an iteration: each request has one new token, its last."""
        self._fresh += [
            Progress(
                output.request_id,
                None if output.error else output.generated_tokens[-1],
                output.is_finished(),
                output.error,
            )
            for output in outputs
        ]

    def publish(self, stats: EngineStats, blocks: list[BlockEvent]) -> None:
        """Wake the reader, and give it the present state and how the prefix cache has changed."""
        if stats == self._stats and not self._fresh and not blocks:
            return
        self._put(stats, None, blocks)

    def die(self, reason: str) -> None:
        """Tell the reader why nothing more will come."""
        self._put(self._stats, reason, [])

    def _put(self, stats: EngineStats | None, death: str | None, blocks: list[BlockEvent]) -> None:
        with self._guard:
            self._progress += self._fresh
            self._blocks += blocks
            self._stats, self._death = stats, death
        self._fresh = []
        self._loop.call_soon_threadsafe(self._filled.set)

    async def take(self, timeout_s: float) -> RankReport:
        """Return what has come since the last call, at the latest after `timeout_s`.

        Raises:
            EngineError: Everything was taken, and nothing more will come.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._filled.wait(), timeout_s)
        self._filled.clear()
        with self._guard:
            progress, self._progress = self._progress, []
            blocks, self._blocks = self._blocks, []
            stats, death = self._stats, self._death
        if death is not None and not progress:
            raise EngineError(death)
        if death is not None:
            self._filled.set()
        return RankReport(progress, stats, blocks)


class _Nowhere(OutputRouter):
    """Discards the followers' outputs, which are equal to those of rank 0."""

    def deliver(self, output: GenerationOutput) -> None:
        pass

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        pass


class LockstepHelper(DistributedHelper):
    """Makes all ranks follow rank 0; the original only unites the ranks of one tensor group."""

    def __init__(self) -> None:
        self.dist_on = dist.is_initialized()
        self.device_mesh = None
        self.tp_plan: dict[str, str] = {}
        self.global_rank = dist.get_rank() if self.dist_on else 0
        self.world_size = dist.get_world_size() if self.dist_on else 1
        self.tp_size = self.world_size
        self.tp_local_rank = self.global_rank
        self.tp_root_global_rank = 0
        self.is_tp_driver = self.global_rank == 0
        self.dp_rank, self.dp_size = 0, 1
        self.tp_group = dist.group.WORLD if self.dist_on else None
        self.cpu_comm_group = None
        if self.dist_on:
            self.cpu_comm_group = dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT)
        self._cpu_int_acc = torch.zeros(4, dtype=torch.int64)
        self.now_s = 0.0
        """Unix time when rank 0 began the iteration, seconds: the same on all ranks."""

    def tp_all_reduce_state(
        self, payload_size: int, stop_status: int, pause_requested: int = 0
    ) -> tuple[int, int, int]:
        """Do what the original does, and send all ranks rank 0's time.

        Ranks must agree on who is late, and clocks of hosts differ.
        """
        clock_ns = time.time_ns() if self.is_tp_driver else 0
        values = [payload_size, stop_status, pause_requested, clock_ns]
        if self.tp_size > 1:
            self._cpu_int_acc[:] = torch.tensor(values)
            dist.all_reduce(self._cpu_int_acc, op=dist.ReduceOp.MAX, group=self.cpu_comm_group)
            values = self._cpu_int_acc.tolist()
        payload_size, stop_status, pause_requested, clock_ns = values
        self.now_s = clock_ns / 1e9
        return payload_size, stop_status, pause_requested

    def are_kv_heads_tp_ed(self) -> bool:
        """False: the cache is given the heads of this rank, which are already divided."""
        return False


class OrderScheduler(FIFOScheduler):
    """Lets requests wait by their order keys, and counts those evicted from the cache.

    One that was pushed out has to start again, and goes back to its place: it has begun in time.
    """

    num_preemptions = 0

    def __init__(self, helper: LockstepHelper, *args: Any, **options: Any) -> None:
        self._helper = helper
        super().__init__(*args, **options)

    def reset(self) -> None:
        """Empty the queue."""
        super().reset()
        self._late: list[tuple[float, str]] = []
        """A heap: when who is late, as far as they have not begun by then."""
        self._set_back: set[str] = set()
        """Requests that wait by their later key."""

    def add_waiting_request(self, state: RequestState) -> None:
        """Queue a request; an evicted one has its output appended to the prompt."""
        name = state.request_id
        has_begun = state._true_initial_tokens > 0
        self.num_preemptions += has_begun
        self._set_back.discard(name)
        late_at_s = order_key_in(name).late_at_s
        if late_at_s < math.inf and not has_begun:
            heappush(self._late, (late_at_s, name))
        self.waiting_requests[name] = state
        insort(self.waiting_requests_order, name, key=self._key_s)

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Forget cancelled requests, and admit others at once; the original waits for an end."""
        cancelled: list[RequestState] = super().clear_cancelled_requests()
        self.block_new_requests &= not cancelled
        return cancelled

    def _try_to_meet_safety_margin(self) -> bool:
        """Whether enough memory is free; unused blocks are, and stay until they are needed."""
        self.cache.pool.try_to_free_sectors()
        return bool(self.cache.compute_free_capacity() >= self.safety_margin)

    def _get_waiting_candidates(self) -> list[RequestState]:
        """Return waiting requests, after late ones have gone back in the line.

        All of them, not the first alone: one that does not fit is passed over.
        """
        while self._late and self._late[0][0] < self._helper.now_s:
            name = heappop(self._late)[1]
            state = self.waiting_requests.get(name)
            if state is not None and not state._true_initial_tokens:
                self.waiting_requests_order.remove(name)
                self._set_back.intersection_update(self.waiting_requests)
                self._set_back.add(name)
                insort(self.waiting_requests_order, name, key=self._key_s)
        candidates: list[RequestState] = super()._get_waiting_candidates()
        return candidates

    def _key_s(self, name: str) -> float:
        key = order_key_in(name)
        return key.late_key_s if name in self._set_back else key.key_s


class _ImmediateFuture(threading.Event):
    """Sends an idle follower straight to the next message of rank 0, which it waits for anyway."""

    def wait(self, timeout: float | None = None) -> bool:
        return True


class LockstepManager(ContinuousBatchingManager):
    """transformers' continuous batching, for any division into tensor ranks and stages."""

    def __init__(self, model: Any, config: EngineConfig, outbox: Outbox) -> None:
        """Size the cache; every rank has to make this call."""
        batching = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            max_batch_tokens=config.token_budget,
            max_requests_per_batch=config.max_batch,
            allow_block_sharing=config.prefix_caching,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
            cpu_group_timeout=_COLLECTIVE_TIMEOUT.total_seconds(),
            num_blocks=1,
        )
        eos = model.generation_config.eos_token_id
        super().__init__(model, GenerationConfig(do_sample=False, eos_token_id=eos), batching)
        self._outbox = outbox
        self.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList())
        self.logit_processor.logits_processor.append(GumbelDraws())
        self.logit_processor.tensors_required = 1
        self.logit_processor.do_processing = True
        self.logit_processor._retrieve_processors_kwargs()
        self.distributed_helper.destroy_cpu_comm_group()
        self.distributed_helper: DistributedHelper = LockstepHelper()
        self.is_tp_driver = self.distributed_helper.is_tp_driver
        if self.is_tp_driver:
            self.output_router = outbox
        else:
            self.output_router = _Nowhere()
            self._wake_up_loop = _ImmediateFuture()
        self._stage, self._first_layer = _stage_config(model, config)
        self._has_events = config.kv_events and self.is_tp_driver
        self._pace = None
        if config.emulates is not None and self.is_tp_driver:  # The others wait for rank 0 anyway.
            self._pace = Pace(config.emulates.iteration)
        self.num_blocks = self._agreed_blocks(config)
        self.continuous_batching_config.num_blocks = self.num_blocks
        eos_ids = [eos] if isinstance(eos, int) else list(eos or ())
        self.limits = GroupLimits(
            kv_capacity_tokens=self.num_blocks * PAGE_TOKENS, eos_token_ids=frozenset(eos_ids)
        )

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Attend sequence by sequence; the original lets all attend to all, behind a mask."""
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds == {"full_attention"}:
            model.set_attn_implementation(attention.NAME)
        else:
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)

    def submit(self, request_id: str, token_ids: list[int], sampling: Sampling) -> None:
        """Queue a request; called on rank 0 only."""
        # All ranks must draw alike, so a seed there must be.
        seed = int.from_bytes(os.urandom(8), "little") if sampling.seed is None else sampling.seed
        taken = self.add_request(
            token_ids,
            request_id=request_id,
            max_new_tokens=sampling.max_tokens,
            streaming=True,
            eos_token_id=-1 if sampling.ignore_eos else sorted(self.limits.eos_token_ids),
            temperature=float(sampling.temperature),
            top_p=float(sampling.top_p),
            seed=seed,
        )
        if taken is None:
            raise EngineError("the generation loop has ended")

    def _agreed_blocks(self, config: EngineConfig) -> int:
        """The number of blocks that fit on every rank."""
        page = FullAttentionCacheAllocator.get_bytes_per_page(
            self._stage.num_key_value_heads,
            find_head_dim(self._stage),
            self.model.dtype,
            PAGE_TOKENS,
        )
        block_bytes = page * self._stage.num_hidden_layers
        budget_bytes = _kv_budget_bytes(config, self._stage.num_hidden_layers)
        num_blocks = int(budget_bytes // block_bytes) - _TRASH_BLOCKS
        agreed = torch.tensor([num_blocks])
        agreed = self.distributed_helper.tp_all_reduce_min(agreed, on_cpu=True)
        if (num_blocks := int(agreed.item())) < 1:
            raise EngineError(
                f"no memory is left for keys and values: {PAGE_TOKENS} tokens take {block_bytes} "
                f"bytes of a rank, {1 + _TRASH_BLOCKS} times that is the least"
            )
        return num_blocks

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        """Do what the original does, with this rank's share of the cache."""
        batching = self.continuous_batching_config
        cache = StageCache(
            config=self._stage,
            continuous_batching_config=batching,
            device=self.model.device,
            distributed_helper=self.distributed_helper,
            dtype=self.model.dtype,
            model_supports_logits_to_keep=True,
        )
        cache.first_layer = self._first_layer
        if self._has_events:
            cache.take_events()
        update_cb_config_after_cache_creation(
            cb_config=batching, num_blocks=cache.num_blocks, max_batch_tokens=cache.max_batch_tokens
        )
        # Without the decode path the block tables of flash attention are not needed.
        batching.max_blocks_per_request = 0
        scheduler = OrderScheduler(
            self.distributed_helper,
            cache=cache,
            safety_margin=batching.safety_margin,
            max_requests_per_batch=batching.max_requests_per_batch,
        )
        return ContinuousBatchProcessor(
            cache=cache,
            config=self.model.config.get_text_config(),
            generation_config=self.generation_config,
            continuous_batching_config=batching,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue if self.is_tp_driver else None,
            cancel_queue=self.cancel_queue if self.is_tp_driver else None,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )

    def _run_generation_loop(self) -> None:
        super()._run_generation_loop()
        error = self.background_thread_status.fatal_error
        self._outbox.die(f"the generation loop ended: {error or 'it was stopped'}")

    def _generation_loop_body(
        self, batch_processor: ContinuousBatchProcessor, bootstrapping: bool
    ) -> bool:
        self._begun_s = self._pace.begin() if self._pace else time.perf_counter()
        going_on: bool = super()._generation_loop_body(batch_processor, bootstrapping)
        if self.is_tp_driver:
            blocks = batch_processor.cache.take_events() if self._has_events else []
            self._outbox.publish(self._stats(batch_processor), blocks)
        return going_on

    def _generation_step(self) -> None:
        stream = self.batch_processor.inputs_and_outputs.compute_stream
        if stream is not None:  # The batch was written on another one, for which nothing waits yet.
            stream.wait_stream(torch.cuda.current_stream())
        super()._generation_step()
        if self._pace is not None:
            self._pace.hold(self._begun_s, *composition(self.batch_processor.inputs_and_outputs))

    def _stats(self, batch_processor: ContinuousBatchProcessor) -> EngineStats:
        scheduler, cache = batch_processor.scheduler, batch_processor.cache
        return EngineStats(
            num_waiting=len(scheduler.waiting_requests) + self.input_queue.qsize(),
            num_running=len(scheduler.active_requests),
            kv_used_fraction=1 - cache.compute_free_capacity(),
            kv_capacity_tokens=self.limits.kv_capacity_tokens,
            num_preemptions=scheduler.num_preemptions,
        )


def composition(batch: ContinuousBatchingIOs) -> tuple[int, int, int]:
    """Return prefill tokens, decoding sequences and KV tokens read of the last iteration."""
    prefill_tokens = sequences = kv_tokens = 0
    for future in batch.requests_in_batch:
        # Its status says decoding as soon as the last of its prompt is scheduled.
        if future.state.generated_tokens:
            sequences += 1
        else:
            prefill_tokens += future.query_length
        kv_tokens += future.state.position_offset - future.query_length
    return prefill_tokens, sequences, kv_tokens


def _stage_config(model: Any, config: EngineConfig) -> tuple[Any, int]:
    """Return the configuration of the layers that this rank caches, and the first of them."""
    stage = copy.deepcopy(model.config.get_text_config())
    heads = getattr(stage, "num_key_value_heads", None) or stage.num_attention_heads
    stage.num_key_value_heads = heads // config.tensor_parallel
    first, last = 0, stage.num_hidden_layers
    if config.pipeline_parallel > 1:
        place = model._pp_stage
        first, last = place.layer_range_for_rank(place.pp_rank, stage.num_hidden_layers)
    kinds = getattr(stage, "layer_types", None)
    stage.num_hidden_layers = last - first
    if kinds:
        stage.layer_types = kinds[first:last]
    return stage, first


def _kv_budget_bytes(config: EngineConfig, num_layers: int) -> float:
    if not torch.cuda.is_available():
        return config.memory_fraction * (config.kv_bytes or DEFAULT_KV_BYTES)
    if config.kv_bytes is not None:
        return float(config.kv_bytes)
    free, total = torch.cuda.mem_get_info()
    left = config.memory_fraction * total - (total - free)
    # A layer copies what the batch reads of its cache, at most all of it and its padding.
    copied = attention.MOST_PADDING / num_layers
    return left * (1 - _GPU_WORKSPACE_FRACTION) / (1 + copied)
