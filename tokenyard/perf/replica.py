"""A replica: one copy of a model on one or more GPUs; and what fits into its memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenyard.perf.hardware import (
    Calibration,
    Collective,
    Gpu,
    Kernels,
    Link,
    calibration_of,
    load_gpu,
    load_link,
    shipped_calibration,
)
from tokenyard.perf.models import Llm, Precision, load_llm

RESERVED_BYTES_PER_GPU = 2e9
"""Activations, CUDA context and communication buffers of one GPU; assumed."""
MAX_SEQUENCES = 256
"""Sequences that an engine decodes at once at most (vLLM: max_num_seqs)."""


@dataclass(frozen=True)
class Replica:
    """One copy of a model: on what, split how, stored in what precision.

    Raises:
        ValueError: The split does not divide the model, or the hardware lacks what is asked of it.
    """

    gpu: Gpu
    llm: Llm
    tensor_parallel: int = 1
    """GPUs that share every layer."""
    pipeline_parallel: int = 1
    """Groups of GPUs that each hold a run of consecutive layers."""
    precision: Precision = "fp16"
    memory_fraction: float = 0.9
    """Share of device memory that the engine may fill (vLLM: gpu_memory_utilization)."""
    link_name: str | None = None
    """Link between its GPUs; None: that of the GPU kind."""
    calibration: Calibration = field(default_factory=shipped_calibration, repr=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        t, p, llm = self.tensor_parallel, self.pipeline_parallel, self.llm
        if t < 1 or llm.num_heads % t:
            raise ValueError(f"tensor_parallel {t} must divide the {llm.num_heads} heads")
        if not 1 <= p <= llm.num_layers:
            raise ValueError(f"pipeline_parallel {p} must be from 1 to {llm.num_layers} layers")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction {self.memory_fraction} must be in (0, 1]")
        if self.precision == "fp8" and self.gpu.fp8_tflops is None:
            raise ValueError(f"{self.gpu.name} has no FP8; choose precision fp16")
        if t > 1 and t not in self.link.all_reduce:
            known = sorted(self.link.all_reduce)
            raise ValueError(f"all-reduce of {t} GPUs was not measured; choose one of {known}")
        if p > 1 and self.link.send_recv is None:
            raise ValueError(f"no send time is known for link {self.link_name or self.gpu.link!r}")

    @property
    def num_gpus(self) -> int:
        """GPUs of the replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def micro_batches(self) -> int:
        """Parts that an iteration's batch is split into, so that no pipeline stage waits."""
        return self.pipeline_parallel if self.calibration.engine.overlaps_stages else 1

    @property
    def kernels(self) -> Kernels:
        """Fitted kernel parameters of its GPUs."""
        return self.calibration.kernels[self.gpu.kernels]

    @property
    def link(self) -> Link:
        """Link between its GPUs, those that share a layer and those of consecutive stages."""
        return load_link(self.link_name or self.gpu.link, self.calibration)

    @property
    def all_reduce(self) -> Collective:
        """Cost of its all-reduce; only with tensor_parallel above 1."""
        return self.link.all_reduce[self.tensor_parallel]

    @property
    def flops_per_s(self) -> float:
        """Nominal rate of one GPU in the replica's precision, operations per second."""
        tflops = self.gpu.fp8_tflops if self.precision == "fp8" else self.gpu.bf16_tflops
        assert tflops is not None
        return tflops * 1e12

    @property
    def memory_bytes_per_s(self) -> float:
        """Nominal memory bandwidth of one GPU."""
        return self.gpu.memory_gb_per_s * 1e9

    @property
    def kv_shards(self) -> int:
        """GPUs among which the KV cache of a layer is split; beyond the KV heads it is copied."""
        return min(self.tensor_parallel, self.llm.num_kv_heads)

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights; 0 where the weights do not fit.

        (GPUs x (memory x fraction - 2 GB) - weights) / bytes per token, the bytes multiplied where
        KV heads are copied.
        """
        usable = self.gpu.memory_gb * 1e9 * self.memory_fraction - RESERVED_BYTES_PER_GPU
        free = self.num_gpus * usable - self.llm.weight_bytes(self.precision)
        copies = self.tensor_parallel / self.kv_shards
        return max(0, int(free / (self.llm.kv_bytes_per_token(self.precision) * copies)))

    @property
    def usd_per_hour(self) -> float:
        """Price of all its GPUs."""
        return self.num_gpus * self.gpu.usd_per_hour

    def max_sequences(
        self, context_tokens: float, generated_tokens: float, limit: int = MAX_SEQUENCES
    ) -> int:
        """Sequences of these mean lengths that are decoded at once; 0: out of memory.

        A sequence holds on average its context and half of its output.
        """
        return min(limit, int(self.kv_capacity_tokens / (context_tokens + generated_tokens / 2)))


def make_replica(
    gpu: str,
    llm: str,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    precision: Precision = "fp16",
    calibration: Calibration | None = None,
    memory_fraction: float = 0.9,
) -> Replica:
    """Build a replica from names.

    Raises:
        ValueError: An unknown name, or a replica that cannot be built.
    """
    kind = load_gpu(gpu)
    known = calibration or calibration_of(kind)
    split = tensor_parallel, pipeline_parallel
    return Replica(kind, load_llm(llm), *split, precision, memory_fraction, calibration=known)
