"""Step times of an engine over a grid of batches: read, compared, and fitted by kind of GPU.

The times are NVIDIA's, from the wheel aiconfigurator-core (Apache-2.0), and are not kept here:
`benchmarks/step_times/export.py` prints them in the wheel's own environment. What is fitted to them
ships as `tables/step_times.json`, one calibration per kind of GPU, for any model of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TextIO

import numpy as np
import pandas as pd

from tokenyard.perf.calibration import fit_positive
from tokenyard.perf.hardware import (
    Calibration,
    Collective,
    EngineOverhead,
    Gpu,
    Kernels,
    Link,
    load_gpu,
    load_link,
    shipped_calibration,
)
from tokenyard.perf.iteration import iteration_s
from tokenyard.perf.models import load_llm
from tokenyard.perf.replica import Replica
from tokenyard.types import BoolArray, FloatArray

Step = Literal["prefill", "decode", "mixed"]
STEPS: tuple[Step, ...] = ("prefill", "decode", "mixed")
SOURCE = "NVIDIA aiconfigurator-core 0.12.0 (Apache-2.0), vLLM, Llama-3.1 8B and 70B in 16 bit"


@dataclass(frozen=True)
class StepTimeKind:
    """A kind of GPU that the wheel measures, and how it would be described without the wheel."""

    gpu: str
    """Name in the table of GPUs."""
    modelled_kernels: str
    """Kernels that the other calibration has for it, or would assume."""
    modelled_link: str
    """Link likewise; what sends between pipeline stages take is not in the wheel, but there."""
    nearest: str
    """System that is most like it, by generation and memory."""


KINDS: Mapping[str, StepTimeKind] = MappingProxyType(
    {
        "a100_sxm": StepTimeKind("a100_80g_sxm_vllm", "a100", "nvlink_a100", "h100_sxm"),
        "l40s": StepTimeKind("l40s_vllm", "a100", "pcie4", "rtx_pro_6000_server"),
        "h100_sxm": StepTimeKind("h100_sxm_vllm", "h100", "nvlink_h100", "h200_sxm"),
        "h200_sxm": StepTimeKind("h200_sxm_vllm", "h100", "nvlink_h100", "h100_sxm"),
        "b200_sxm": StepTimeKind("b200_sxm_vllm", "h100", "nvlink_h100", "h200_sxm"),
        "rtx_pro_6000_server": StepTimeKind("rtx_pro_6000_vllm", "h100", "pcie4", "l40s"),
    }
)
"""By the wheel's name of the system."""
_LLMS = {
    "meta-llama/Meta-Llama-3.1-8B": "llama3_8b",
    "meta-llama/Meta-Llama-3.1-70B": "llama3_70b",
}
_BATCH_COLUMNS = [
    "prompts",
    "prefill_tokens",
    "cached_prompt_tokens",
    "decoding_sequences",
    "kv_tokens",
]


@dataclass(frozen=True)
class StepTimes:
    """Step times of one replica over batches."""

    system: str
    """The wheel's name of its GPUs."""
    llm: str
    tensor_parallel: int
    batches: FloatArray
    """Prompts, their tokens in the step, their tokens that are cached already, sequences that
    decode, cached tokens of those; shape (5, rows)."""
    time_s: FloatArray
    """Shape (rows,)."""

    @property
    def steps(self) -> np.ndarray:
        """Kind of every step, a `Step`, shape (rows,)."""
        _, prefill, _, decode, _ = self.batches
        return np.where(decode == 0, "prefill", np.where(prefill == 0, "decode", "mixed"))

    @property
    def is_short(self) -> BoolArray:
        """Whether a step lies within the grid of the four coefficients, shape (rows,)."""
        _, prefill, cached, decode, kv = self.batches
        return np.asarray((prefill <= 2048) & (cached == 0) & (kv <= 4096 * decode))

    def predicted_s(self, replica: Replica) -> FloatArray:
        """Return what the model says of every row, seconds, shape (rows,)."""
        prompts, prefill, cached, decode, kv = self.batches
        context = (cached + prefill / 2) / np.maximum(prompts, 1)
        return iteration_s(replica, prefill, decode, kv, context)

    def select(self, rows: BoolArray) -> StepTimes:
        """Return those rows alone."""
        return replace(self, batches=self.batches[:, rows], time_s=self.time_s[rows])

    def replica(self, calibration: Calibration, gpu: Gpu | None = None) -> Replica:
        """Return the replica as a calibration has it, on its own kind of GPU by default."""
        return Replica(
            gpu=gpu or load_gpu(KINDS[self.system].gpu),
            llm=load_llm(self.llm),
            tensor_parallel=self.tensor_parallel,
            calibration=calibration,
        )


def read_step_times(csv: TextIO) -> list[StepTimes]:
    """Read what the export printed; keep the batches that the replica's KV cache can hold.

    Raises:
        ValueError: A system or a model that is not compared here.
    """
    frame = pd.read_csv(csv)
    unknown = (set(frame["system"]) - set(KINDS)) | (set(frame["model"]) - set(_LLMS))
    if unknown:
        raise ValueError(f"unknown {sorted(unknown)}; known are {[*KINDS, *_LLMS]}")
    times = []
    for key, group in frame.groupby(["system", "model", "tensor_parallel"], sort=False):
        system, model, degree = key
        batches = group[_BATCH_COLUMNS].to_numpy(float).T
        time_s = group["time_ms"].to_numpy(float) * 1e-3
        one = StepTimes(str(system), _LLMS[str(model)], int(str(degree)), batches, time_s)
        times.append(one.select(batches[[1, 2, 4]].sum(axis=0) <= _kv_capacity_tokens(one)))
    return [one for one in times if one.time_s.size]


def _kv_capacity_tokens(times: StepTimes) -> int:
    gpu, calibration = modelled(times.system)
    return times.replica(calibration, gpu).kv_capacity_tokens


def modelled(system: str) -> tuple[Gpu, Calibration]:
    """Return a system's GPU and calibration as they are without step times.

    Where the other calibration does not know a kind, it has another's efficiencies at its own
    nominal rates, as H200 and L4 have there.
    """
    kind = KINDS[system]
    assumed = {"kernels": kind.modelled_kernels, "link": kind.modelled_link}
    return load_gpu(kind.gpu).model_copy(update=assumed), shipped_calibration()


def split_third(
    times: Sequence[StepTimes], seed: int = 0
) -> tuple[list[StepTimes], list[StepTimes]]:
    """Divide the steps of one kind of GPU at random: a third to fit, two thirds held out."""
    sizes = [one.time_s.size for one in times]
    fitted = np.random.default_rng(seed).permutation(sum(sizes)) % 3 == 0
    parts = np.split(fitted, np.cumsum(sizes)[:-1])
    pairs = list(zip(times, parts, strict=True))
    return [one.select(part) for one, part in pairs], [one.select(~part) for one, part in pairs]


def fit_step_times(times: Sequence[StepTimes], attention_overhead: bool = True) -> Calibration:
    """Fit kernels, all-reduces and engine of one kind of GPU to its steps.

    Args:
        times: Steps of one system, over models and degrees.
        attention_overhead: Whether attention has a fixed cost of its own; else it has none.
    """
    system = times[0].system
    degrees = sorted({one.tensor_parallel for one in times} - {1})
    start, lower, upper = (list(side) for side in _ENGINE_BOUNDS)
    if not attention_overhead:
        start[-1], lower[-1], upper[-1] = 1e-11, 1e-12, 1e-10
    for side, (latency_s, bandwidth) in zip((start, lower, upper), _LINK_BOUNDS, strict=True):
        side += [latency_s, bandwidth] * len(degrees)

    def predict(parameters: FloatArray) -> FloatArray:
        calibration = _calibration(system, degrees, parameters)
        return np.concatenate([one.predicted_s(one.replica(calibration)) for one in times])

    measured = np.concatenate([one.time_s for one in times])
    return _calibration(system, degrees, fit_positive(predict, measured, start, lower, upper))


# Compute, memory, sharpness, fixed cost of a layer; KV, attention, fixed cost of an iteration and
# of an attention: where the fit begins, and its bounds.
_ENGINE_BOUNDS = (
    (0.75, 0.8, 1.5, 1e-5, 0.8, 0.6, 5e-4, 2e-6),
    (0.05, 0.05, 1.0, 1e-8, 0.05, 0.05, 1e-6, 1e-8),
    (1.5, 1.5, 20.0, 1e-3, 1.5, 1.5, 1e-1, 1e-3),
)
_LINK_BOUNDS = ((1e-5, 1e11), (1e-7, 1e8), (1e-2, 3e12))
"""Latency and bandwidth of an all-reduce, likewise."""


def _calibration(system: str, degrees: Sequence[int], parameters: FloatArray) -> Calibration:
    compute, memory, sharpness, layer_s, kv, attention, iteration, launch = parameters[:8].tolist()
    gpu = load_gpu(KINDS[system].gpu)
    return Calibration(
        provenance=f"{SOURCE}, {system}; fitted by benchmarks/step_times to a third of the steps",
        kernels={
            # Steps do not tell the fixed costs of a layer apart: half of them each.
            gpu.kernels: Kernels(
                compute_efficiency=compute,
                memory_efficiency=memory,
                sharpness=sharpness,
                linear_overhead_s=layer_s / 2,
                elementwise_overhead_s=layer_s / 2,
            )
        },
        links={gpu.link: _link(system, degrees, parameters[8:])},
        engine=EngineOverhead(
            kv_efficiency=kv,
            attention_efficiency=attention,
            iteration_overhead_s=iteration,
            overhead_scale=1.0,
            attention_overhead_s=launch,
        ),
    )


def _link(system: str, degrees: Sequence[int], parameters: FloatArray) -> Link:
    modelled_link = KINDS[system].modelled_link
    return Link(
        source=f"all-reduce fitted to step times of {system}; sends as {modelled_link}",
        all_reduce={
            degree: Collective(latency_s=float(latency_s), bandwidth_bytes_per_s=float(bandwidth))
            for degree, (latency_s, bandwidth) in zip(
                degrees, parameters.reshape(-1, 2), strict=True
            )
        },
        send_recv=load_link(modelled_link, shipped_calibration()).send_recv,
    )


def mean_calibration(kernels: str, known: Iterable[Calibration]) -> Calibration:
    """Return a calibration for one GPU of a kind that nobody measured: the others' geometric mean.

    Args:
        kernels: Name of its kernels.
        known: Calibrations of the other kinds, with the kernels of one each.
    """
    known = list(known)
    of_kernels = [next(iter(one.kernels.values())) for one in known]
    return Calibration(
        provenance="geometric mean of other kinds",
        kernels={kernels: Kernels.model_validate(_geometric_mean(of_kernels))},
        links={},
        engine=EngineOverhead.model_validate(_geometric_mean([one.engine for one in known])),
    )


def _geometric_mean(models: Sequence[Kernels] | Sequence[EngineOverhead]) -> dict[str, float]:
    values = [one.model_dump(exclude={"overlaps_stages"}) for one in models]
    return {
        key: float(np.exp(np.mean([np.log(value[key]) for value in values]))) for key in values[0]
    }


@dataclass(frozen=True)
class StepErrors:
    """How far predicted steps are from theirs."""

    median_error_fraction: float
    """Median of |predicted / theirs - 1|."""
    p90_error_fraction: float
    """Nine in ten are no further off."""
    bias_fraction: float
    """Median of predicted / theirs - 1: above 0 is too slow."""

    @classmethod
    def of(cls, ratio: FloatArray) -> StepErrors:
        """Sum up ratios of predicted to theirs, one or more."""
        error = np.abs(ratio - 1)
        median, p90 = np.quantile(error, (0.5, 0.9)).tolist()
        return cls(median, p90, float(np.median(ratio)) - 1)


def step_ratios(
    times: Sequence[StepTimes], calibration: Calibration, gpu: Gpu | None = None
) -> dict[str, FloatArray]:
    """Return predicted over theirs by kind of step, and of `all`, shape (steps,) each."""
    of_times = [one.predicted_s(one.replica(calibration, gpu)) / one.time_s for one in times]
    ratio, steps = np.concatenate(of_times), np.concatenate([one.steps for one in times])
    return {"all": ratio, **{step: ratio[steps == step] for step in STEPS}}
