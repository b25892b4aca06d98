"""How long one iteration takes: the forward pass of a batch of prompts and decoding sequences.

Linear layers follow a soft roofline (time of operations and time of memory traffic in a p-norm),
elementwise kernels and the reading of the KV cache are bound by memory, attention of prompts by
operations, collectives follow the alpha-beta model. Times add up: nothing overlaps.

A pipeline of p stages splits the batch into p micro-batches; an iteration is then one round, in
which every sequence gets its next token: p times the slowest stage. An engine whose stages take
turns has one micro-batch, and p times the slowest stage is then the time of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from tokenyard.perf.hardware import Collective, Kernels
from tokenyard.perf.models import ACTIVATION_BYTES, Llm, Precision, stored_bytes
from tokenyard.perf.replica import Replica
from tokenyard.types import FloatArray

Numbers = npt.ArrayLike


@dataclass(frozen=True)
class IterationTime:
    """Parts of the time of iterations, seconds, each of the batches' common shape."""

    linear_s: FloatArray
    """Matrix products of the layers."""
    elementwise_s: FloatArray
    """Norms, activation, residual."""
    attention_s: FloatArray
    """Attention of prompts: its operations and its fixed cost."""
    kv_s: FloatArray
    """Attention of decoding sequences: reading their KV cache, and its fixed cost."""
    head_s: FloatArray
    """LM head, one row per sequence."""
    all_reduce_s: FloatArray
    """Collectives of tensor parallelism, two per layer."""
    send_s: FloatArray
    """Transfers between pipeline stages."""
    overhead_s: FloatArray
    """Fixed cost of the engine."""

    @property
    def total_s(self) -> FloatArray:
        """The whole iteration: all parts one after the other, seconds."""
        return np.asarray(sum(getattr(self, part.name) for part in fields(self)))


def iteration_s(
    replica: Replica,
    prefill_tokens: Numbers,
    decoding_sequences: Numbers,
    kv_tokens: Numbers,
    prefill_context_tokens: Numbers | None = None,
) -> FloatArray:
    """Return the time of one iteration, seconds; 0 for an empty batch.

    `kv_tokens` are cached tokens of all decoding sequences together. A prompt token attends to
    `prefill_context_tokens` on average; None: half of `prefill_tokens`, as for one whole prompt.
    """
    parts = iteration_parts(
        replica, prefill_tokens, decoding_sequences, kv_tokens, prefill_context_tokens
    )
    return parts.total_s


def iteration_parts(
    replica: Replica,
    prefill_tokens: Numbers,
    decoding_sequences: Numbers,
    kv_tokens: Numbers,
    prefill_context_tokens: Numbers | None = None,
) -> IterationTime:
    """Return the time of one iteration by part; arguments as in `iteration_s`."""
    num_stages, parts = replica.pipeline_parallel, replica.micro_batches
    if prefill_context_tokens is None:
        prefill_context_tokens = np.asarray(prefill_tokens, float) / 2
    prefill, decode, kv, context = np.broadcast_arrays(
        *(np.asarray(x, float) for x in (prefill_tokens, decoding_sequences, kv_tokens)),
        np.asarray(prefill_context_tokens, float),
    )
    stage = _stage(replica, prefill / parts, decode / parts, kv / parts, context)
    busy = prefill + decode > 0
    return IterationTime(
        *(np.where(busy, num_stages * getattr(stage, part.name), 0.0) for part in fields(stage))
    )


def _stage(
    replica: Replica, prefill: FloatArray, decode: FloatArray, kv: FloatArray, context: FloatArray
) -> IterationTime:
    """Time of the last stage, which has the LM head, for one micro-batch."""
    num_layers = replica.llm.num_layers / replica.pipeline_parallel
    tokens = prefill + decode
    engine = replica.calibration.engine
    return IterationTime(
        linear_s=num_layers * _linear_s(replica, tokens),
        elementwise_s=num_layers * _elementwise_s(replica, tokens),
        attention_s=num_layers * _attention_s(replica, prefill, context),
        kv_s=num_layers * _kv_s(replica, decode, kv),
        head_s=_head_s(replica, decode + np.minimum(prefill, 1)),
        all_reduce_s=num_layers * 2 * _all_reduce_s(replica, tokens),
        send_s=_send_s(replica, tokens),
        overhead_s=np.full_like(tokens, engine.iteration_overhead_s),
    )


def _linear_s(replica: Replica, tokens: FloatArray) -> FloatArray:
    fixed_s = replica.kernels.linear_overhead_s * replica.calibration.engine.overhead_scale
    work = layer_work(replica.llm, replica.tensor_parallel, replica.precision)
    operations, traffic = work.operations_per_token * tokens, work.traffic_bytes(tokens)
    return fixed_s + _roofline_s(replica, operations, traffic, replica.flops_per_s)


@dataclass(frozen=True)
class LayerWork:
    """What the four matrix products of a layer ask of each GPU."""

    operations_per_token: float
    weight_bytes: float
    activation_bytes_per_token: float

    def traffic_bytes(self, tokens: FloatArray) -> FloatArray:
        """Bytes moved for so many tokens: the weights once, the activations of each."""
        return self.weight_bytes + self.activation_bytes_per_token * tokens


def layer_work(llm: Llm, tensor_parallel: int, precision: Precision) -> LayerWork:
    """Return the work of one layer on one GPU.

    Activations go in and out of the projection to queries, keys and values; of the attention's
    output; of gate and up together; and of down.
    """
    h, t = llm.hidden_size, tensor_parallel
    sharded = 2 * h + 2 * llm.kv_size + 3 * llm.mlp_size
    return LayerWork(
        operations_per_token=2 * llm.layer_parameters / t,
        weight_bytes=llm.layer_parameters / t * stored_bytes(precision),
        activation_bytes_per_token=ACTIVATION_BYTES * (4 * h + sharded / t),
    )


def _roofline_s(
    replica: Replica, operations: FloatArray, traffic_bytes: FloatArray, flops_per_s: float
) -> FloatArray:
    bytes_per_s = replica.memory_bytes_per_s
    return soft_roofline_s(replica.kernels, operations / flops_per_s, traffic_bytes / bytes_per_s)


def soft_roofline_s(
    kernels: Kernels, nominal_compute_s: FloatArray, nominal_memory_s: FloatArray
) -> FloatArray:
    """P-norm of the times that operations and traffic take at the attained rates, seconds."""
    p = kernels.sharpness
    compute_s = nominal_compute_s / kernels.compute_efficiency
    memory_s = nominal_memory_s / kernels.memory_efficiency
    return np.asarray((compute_s**p + memory_s**p) ** (1 / p))


def _elementwise_s(replica: Replica, tokens: FloatArray) -> FloatArray:
    """Two residual additions fused with norms (16 h bytes per token), one activation (6 f / t)."""
    llm, kernels = replica.llm, replica.kernels
    fixed_s = kernels.elementwise_overhead_s * replica.calibration.engine.overhead_scale
    traffic = (16 * llm.hidden_size + 6 * llm.mlp_size / replica.tensor_parallel) * tokens
    return fixed_s + traffic / (replica.memory_bytes_per_s * kernels.memory_efficiency)


def _attention_s(replica: Replica, prefill: FloatArray, context: FloatArray) -> FloatArray:
    """4 h operations per pair of a prompt token and one it attends to, in 16 bit."""
    engine = replica.calibration.engine
    operations = 4 * replica.llm.hidden_size * prefill * context
    rate = replica.tensor_parallel * replica.gpu.bf16_tflops * 1e12 * engine.attention_efficiency
    return np.asarray(operations / rate + engine.attention_overhead_s * (prefill > 0))


def _kv_s(replica: Replica, decode: FloatArray, kv_tokens: FloatArray) -> FloatArray:
    engine = replica.calibration.engine
    bytes_per_token = replica.llm.kv_bytes_per_token(replica.precision) / replica.llm.num_layers
    rate = replica.kv_shards * replica.memory_bytes_per_s * engine.kv_efficiency
    return np.asarray(
        bytes_per_token * kv_tokens / rate + engine.attention_overhead_s * (decode > 0)
    )


def _head_s(replica: Replica, rows: FloatArray) -> FloatArray:
    parameters = replica.llm.head_parameters / replica.tensor_parallel
    traffic = np.full_like(rows, ACTIVATION_BYTES * parameters)
    return _roofline_s(replica, 2 * parameters * rows, traffic, replica.gpu.bf16_tflops * 1e12)


def _all_reduce_s(replica: Replica, tokens: FloatArray) -> FloatArray:
    t = replica.tensor_parallel
    if t == 1:
        return np.zeros_like(tokens)
    return all_reduce_s(replica.all_reduce, t, ACTIVATION_BYTES * replica.llm.hidden_size * tokens)


def all_reduce_s(collective: Collective, num_gpus: int, message_bytes: FloatArray) -> FloatArray:
    """Alpha-beta time of a ring all-reduce: latency + 2 (n - 1) / n x bytes / bandwidth."""
    traffic = 2 * (num_gpus - 1) / num_gpus * message_bytes
    return collective.latency_s + traffic / collective.bandwidth_bytes_per_s


def _send_s(replica: Replica, tokens: FloatArray) -> FloatArray:
    if replica.pipeline_parallel == 1:
        return np.zeros_like(tokens)
    link = replica.link.send_recv
    assert link is not None
    message_bytes = ACTIVATION_BYTES * replica.llm.hidden_size * tokens
    return link.latency_s + message_bytes / link.bandwidth_bytes_per_s
