"""What an engine runs and on what, as cluster files have it."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tokenyard.config import FrozenModel
from tokenyard.perf.models import Precision
from tokenyard.routing.fleet import ReplicaConfig
from tokenyard.types import FloatArray

PAGE_TOKENS = 32
"""Tokens whose keys and values a sharded engine allocates, and shares, together."""


class Hardware(FrozenModel):
    """On what a model runs, by names that the performance model knows."""

    gpu: str
    """Name in the table of GPUs (`tokenyard.perf.hardware`)."""
    llm: str
    """Name in the table of models (`tokenyard.perf.models`)."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """GPUs that share every layer."""
    precision: Precision = "fp16"
    """Of its weights."""

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        self.replica  # noqa: B018  Its validation says what is wrong with the names.
        return self

    @cached_property
    def replica(self) -> ReplicaConfig:
        """What the performance model says of it."""
        return ReplicaConfig(
            name="replica",
            gpu=self.gpu,
            model=self.llm,
            tensor_parallel=self.tensor_parallel,
            precision=self.precision,
        )


class Emulation(Hardware):
    """Hardware and model that a replica stands in for."""

    time_scale: Annotated[float, Field(ge=1)] = 1.0
    """Everything takes so many times as long, for machines that could not keep the pace."""

    @cached_property
    def iteration(self) -> FloatArray:
        """Seconds per iteration, prefill token, decoding sequence and KV token, shape (4,)."""
        return self.replica.iteration * self.time_scale


class EngineConfig(FrozenModel):
    """What an engine runs, and on what."""

    model: str
    """Folder of a Hugging Face causal LM, a hub id, `default` for the embedded model, or
    `emulated` for random weights of hardly any size with its tokenizer."""
    emulates: Emulation | None = None
    """Hardware that it stands in for; None: it is as fast as it is."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that share every layer."""
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Stages that the layers are divided into."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and KV cache."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that weights and KV cache may take; without GPU, of `kv_bytes`."""
    kv_bytes: Annotated[int, Field(gt=0)] | None = None
    """KV memory of one rank, bytes; None: what `memory_fraction` of a GPU leaves, else 256 MiB."""
    max_batch: Annotated[int, Field(ge=1)] = 8
    """Most sequences in the batch."""
    token_budget: Annotated[int, Field(ge=1)] = 256
    """Most tokens computed in one iteration."""
    prefix_caching: bool = True
    """Whether prompts that begin alike share what was computed of them (`sharded`)."""
    kv_events: bool = False
    """Whether the engine publishes what its prefix cache holds, as vLLM does (`sharded`). Token ids
    of prompts can then be read by whoever reaches its machine."""
    max_model_tokens: Annotated[int, Field(ge=2)] = 2048
    """Longest prompt plus output."""
    max_waiting: Annotated[int, Field(ge=0)] = 256
    """Requests that may wait; one more is refused."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """What a rank reserves: one GPU or one CPU; `auto`: a GPU where the cluster has any."""
    rank_cpus: Annotated[float, Field(gt=0)] = 1.0
    """CPUs that a rank without GPU reserves; it computes with one thread."""
    accelerator_type: str | None = None
    """Ray's name of the GPU that ranks must get, such as `H100`; None: any."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """After so long without being ready the start is given up."""

    @property
    def num_ranks(self) -> int:
        """Processes that hold a share of the weights."""
        return self.tensor_parallel * self.pipeline_parallel
