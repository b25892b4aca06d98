"""GPUs, the links between them, and what was fitted to measurements of both; package data."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Any, Self, TypeVar

import yaml
from pydantic import Field, TypeAdapter, model_validator

from tokenyard.config import FrozenModel

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1.5)]
"""Attained over nominal. A little above 1 is a nominal rate that is too low, and no error."""


class Gpu(FrozenModel):
    """One kind of GPU. Rates are nominal; what is attained stands in `Kernels`."""

    name: str
    bf16_tflops: Positive
    """Dense BF16 and FP16 rate, 1e12 operations per second."""
    fp8_tflops: Positive | None
    """Dense FP8 rate; None where the hardware has no FP8."""
    memory_gb_per_s: Positive
    """HBM bandwidth, 1e9 bytes per second."""
    memory_gb: Positive
    """Device memory, 1e9 bytes."""
    tdp_w: Positive
    idle_w: Positive
    usd_per_hour: Positive
    """Price of one GPU; configuration rather than fact."""
    link: str
    """Name of the link that joins the GPUs of one node."""
    kernels: str
    """Name of the fitted kernel parameters that describe it."""
    sources: Mapping[str, str]
    """Where each constant comes from, by field name; `assumed` where it is."""

    @model_validator(mode="after")
    def _every_constant_has_a_source(self) -> Self:
        constants = set(type(self).model_fields) - {"name", "sources"}
        if set(self.sources) != constants:
            raise ValueError(f"{self.name}: sources must name exactly {sorted(constants)}")
        return self


class Collective(FrozenModel):
    """Time of one transfer: latency + traffic / bandwidth (the alpha-beta model)."""

    latency_s: Positive
    bandwidth_bytes_per_s: Positive


class Link(FrozenModel):
    """What joins the GPUs of a replica."""

    source: str
    all_reduce: Mapping[int, Collective]
    """By the number of GPUs; bandwidth is of the bus, of which a ring of n moves 2 (n - 1) / n."""
    send_recv: Collective | None
    """From one GPU to another, for pipelines; None: not measured."""


class Kernels(FrozenModel):
    """Soft roofline of one GPU kind, and the fixed costs of a layer (`iteration`)."""

    compute_efficiency: Share
    """Attained share of the nominal operations per second in large matrix products."""
    memory_efficiency: Share
    """Attained share of the nominal memory bandwidth."""
    sharpness: Annotated[float, Field(ge=1, le=20)]
    """How abruptly the roofline turns: 1 adds both times, infinity takes the longer."""
    linear_overhead_s: Positive
    """Fixed cost of the four matrix products of a layer."""
    elementwise_overhead_s: Positive
    """Fixed cost of norms, rotary embedding, activation and residual of a layer."""


class EngineOverhead(FrozenModel):
    """What a serving engine adds to its kernels."""

    kv_efficiency: Share
    """Attained share of memory bandwidth when decoding reads the KV cache."""
    attention_efficiency: Share
    """Attained share of operations per second in the attention of prompts."""
    iteration_overhead_s: Annotated[float, Field(ge=0)]
    """Fixed cost of an iteration: scheduling, sampling, detokenising."""
    overhead_scale: Positive
    """Factor on the fixed costs of a layer."""
    attention_overhead_s: Annotated[float, Field(ge=0)] = 0.0
    """Fixed cost, in every layer, of the attention of prompts, and as much of that of decoding."""
    overlaps_stages: bool = True
    """Whether pipeline stages compute different micro-batches at a time; else they take turns."""


class Calibration(FrozenModel):
    """Everything that was fitted; `pipelines/calibrate.py` writes it."""

    provenance: str
    kernels: Mapping[str, Kernels]
    links: Mapping[str, Link]
    engine: EngineOverhead


@functools.cache
def shipped_calibration(file: str = "fitted.json") -> Calibration:
    """Return parameters that ship with the package: `fitted.json` of GPUs, else a table's name."""
    return Calibration.model_validate_json(read_table(file))


@functools.cache
def step_time_calibrations() -> Mapping[str, Calibration]:
    """Return what was fitted to NVIDIA's step times, by name of the kernels."""
    return TypeAdapter(dict[str, Calibration]).validate_json(read_table("step_times.json"))


def calibration_of(gpu: Gpu) -> Calibration:
    """Return the shipped parameters that know a kind's kernels: of GPUs, or of CPU ranks."""
    of_steps = step_time_calibrations()
    if gpu.kernels in of_steps:
        return of_steps[gpu.kernels]
    of_gpus = shipped_calibration()
    return of_gpus if gpu.kernels in of_gpus.kernels else shipped_calibration("cpu_ranks.json")


def load_gpu(name: str) -> Gpu:
    """Return one GPU kind.

    Raises:
        ValueError: No GPU of that name is in the table.
    """
    return entry(Gpu, "gpus.yaml", name, {"name": name})


def load_link(name: str, calibration: Calibration) -> Link:
    """Return one link: measured where `calibration` has it, else assumed.

    Raises:
        ValueError: No link of that name is known.
    """
    if name in calibration.links:
        return calibration.links[name]
    assumed = _entries("links.yaml")
    if name not in assumed:
        known = sorted([*calibration.links, *assumed])
        raise ValueError(f"unknown link {name!r}; choose one of {known}")
    return Link.model_validate(assumed[name])


def read_table(file: str) -> str:
    """Return the text of one file of package data."""
    return (resources.files("tokenyard.perf") / "tables" / file).read_text(encoding="utf-8")


_Entry = TypeVar("_Entry", bound=FrozenModel)


def entry(kind: type[_Entry], file: str, name: str, more: Mapping[str, Any]) -> _Entry:
    """Return the entry `name` of a YAML table.

    Raises:
        ValueError: The table has no such entry.
    """
    entries = _entries(file)
    if name not in entries:
        what = file.removesuffix("s.yaml")
        raise ValueError(f"unknown {what} {name!r}; choose one of {sorted(entries)}")
    return kind.model_validate({**entries[name], **more})


@functools.cache
def _entries(file: str) -> dict[str, Any]:
    return dict(yaml.safe_load(read_table(file)))
