"""Fits the model's free parameters to measurements, and reports errors on what was held out.

Every fit minimises a soft L1 loss of log(predicted / measured), so that errors count as ratios
and outliers count little. Held out are whole configurations (a model, a tensor-parallel degree,
a message size, a batch composition), never repetitions of what was fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from tokenyard.perf.coefficients import LinearCoefficients
from tokenyard.perf.hardware import Calibration, Collective, EngineOverhead, Gpu, Kernels, Link
from tokenyard.perf.iteration import iteration_s, layer_work, soft_roofline_s
from tokenyard.perf.models import load_llm
from tokenyard.perf.profiles import (
    CollectiveProfile,
    IterationProfile,
    KernelProfile,
    read_collective_profiles,
)
from tokenyard.perf.published import Published
from tokenyard.perf.replica import Replica
from tokenyard.types import FloatArray, IntArray

_OUTLIER_LOG_RATIO = 0.1
"""Beyond a tenth off, a measurement pulls linearly and no longer quadratically."""
_SMALLEST = 1e-12
"""In the place of zero where a logarithm has to exist."""
_LEAST_NOISE, _LEAST_SPREAD = 1e-6, 1e-8
"""Of relative errors, and of what tells columns apart: below them all is rounding."""


def mape(predicted: FloatArray, measured: FloatArray) -> float:
    """Mean absolute error relative to the measured value."""
    return float(np.abs(predicted / measured - 1).mean())


def fit_positive(
    predict: Callable[[FloatArray], FloatArray],
    measured: FloatArray,
    start: Sequence[float],
    lower: Sequence[float],
    upper: Sequence[float],
) -> FloatArray:
    """Return the positive parameters, within bounds, of the least robust error in log ratio."""

    def residual(log_parameters: FloatArray) -> FloatArray:
        return np.asarray(np.log(predict(np.exp(log_parameters)) / measured))

    fit = least_squares(
        residual,
        np.log(start),
        bounds=(np.log(lower), np.log(upper)),
        loss="soft_l1",
        f_scale=_OUTLIER_LOG_RATIO,
    )
    return np.asarray(np.exp(fit.x))


def fit_kernels(profiles: Sequence[KernelProfile], gpu: Gpu) -> Kernels:
    """Fit the roofline of the matrix products, and the fixed costs of a layer."""
    work = [_nominal_s(profile, gpu) for profile in profiles]
    compute_s, memory_s = (np.concatenate(part) for part in zip(*work, strict=True))
    linear_s = np.concatenate([profile.linear_s for profile in profiles])

    def predict(parameters: FloatArray) -> FloatArray:
        return _linear_s(_kernels(parameters, 1.0), compute_s, memory_s)

    fitted = fit_positive(
        predict, linear_s, (0.75, 0.9, 1.4, 2e-5), (0.1, 0.1, 1.0, 1e-7), (1.5, 1.5, 20.0, 1e-3)
    )
    return _kernels(fitted, _fit_elementwise_overhead_s(profiles, gpu))


def _kernels(parameters: FloatArray, elementwise_overhead_s: float) -> Kernels:
    names = ("compute_efficiency", "memory_efficiency", "sharpness", "linear_overhead_s")
    fitted = dict(zip(names, parameters.tolist(), strict=True))
    return Kernels(**fitted, elementwise_overhead_s=elementwise_overhead_s)


def _fit_elementwise_overhead_s(profiles: Sequence[KernelProfile], gpu: Gpu) -> float:
    """Fixed cost of the elementwise kernels of a layer, beside their unfused traffic, seconds."""
    traffic = np.concatenate([_elementwise_bytes(profile) for profile in profiles])
    measured = np.concatenate([profile.elementwise_s for profile in profiles])

    def predict(parameters: FloatArray) -> FloatArray:
        return np.asarray(parameters[0] + traffic / (gpu.memory_gb_per_s * 1e9 * parameters[1]))

    start, lower, upper = (1e-5, 0.8), (1e-7, 0.05), (1e-3, 10.0)
    return float(fit_positive(predict, measured, start, lower, upper)[0])


def _elementwise_bytes(profile: KernelProfile) -> FloatArray:
    """Two norms, two residuals, rotary embedding, activation: each reads and writes its own."""
    llm = load_llm(profile.llm)
    sharded = 4 * (llm.hidden_size + llm.kv_size) + 6 * llm.mlp_size
    per_token = 20 * llm.hidden_size + sharded / profile.tensor_parallel
    return per_token * profile.tokens.astype(float)


def _nominal_s(profile: KernelProfile, gpu: Gpu) -> tuple[FloatArray, FloatArray]:
    """Seconds of operations and of traffic at nominal rates, each of shape (rows,)."""
    work = layer_work(load_llm(profile.llm), profile.tensor_parallel, "fp16")
    tokens = profile.tokens.astype(float)
    operations_s = work.operations_per_token * tokens / (gpu.bf16_tflops * 1e12)
    return operations_s, work.traffic_bytes(tokens) / (gpu.memory_gb_per_s * 1e9)


def _linear_s(kernels: Kernels, compute_s: FloatArray, memory_s: FloatArray) -> FloatArray:
    return soft_roofline_s(kernels, compute_s, memory_s) + kernels.linear_overhead_s


def kernel_mape(profiles: Sequence[KernelProfile], gpu: Gpu, kernels: Kernels) -> float:
    """Mean error of the matrix products of a layer over all rows of the profiles."""
    predicted = [_linear_s(kernels, *_nominal_s(profile, gpu)) for profile in profiles]
    measured = [profile.linear_s for profile in profiles]
    return mape(np.concatenate(predicted), np.concatenate(measured))


def kernel_transfer_mape(
    profiles: Sequence[KernelProfile], gpu: Gpu, fitted_llm: str, predicted_llm: str
) -> float:
    """Mean error on one model after a fit to another."""
    kernels = fit_kernels([profile for profile in profiles if profile.llm == fitted_llm], gpu)
    held_out = [profile for profile in profiles if profile.llm == predicted_llm]
    return kernel_mape(held_out, gpu, kernels)


def kernel_cross_validated_mape(profiles: Sequence[KernelProfile], gpu: Gpu) -> float:
    """Mean error over configurations (model, degree), each predicted from all the others."""
    errors = []
    for i, held_out in enumerate(profiles):
        kernels = fit_kernels([*profiles[:i], *profiles[i + 1 :]], gpu)
        errors.append(kernel_mape([held_out], gpu, kernels))
    return float(np.mean(errors))


def fit_collective(profile: CollectiveProfile, kind: str) -> Collective:
    """Fit latency and bandwidth of one collective.

    The traffic of `all_reduce` is 2 (n - 1) / n of the message; the other kind is `send_recv`.
    """
    traffic = profile.message_bytes * _traffic_share(profile, kind)

    def predict(parameters: FloatArray) -> FloatArray:
        return np.asarray(parameters[0] + traffic / parameters[1])

    start, lower, upper = (2e-5, 1e11), (1e-7, 1e8), (1e-2, 2e12)
    latency_s, bandwidth = fit_positive(predict, profile.time_s, start, lower, upper)
    return Collective(latency_s=float(latency_s), bandwidth_bytes_per_s=float(bandwidth))


def collective_mape(profile: CollectiveProfile, kind: str, fitted: Collective) -> float:
    """Mean error over message sizes."""
    traffic = profile.message_bytes * _traffic_share(profile, kind)
    return mape(fitted.latency_s + traffic / fitted.bandwidth_bytes_per_s, profile.time_s)


def collective_held_out_mape(profile: CollectiveProfile, kind: str) -> float:
    """Mean error on message sizes that were held out: every second one, then the others."""
    halves = [
        replace(profile, message_bytes=profile.message_bytes[i::2], time_s=profile.time_s[i::2])
        for i in (0, 1)
    ]
    first, second = (fit_collective(half, kind) for half in halves)
    return (collective_mape(halves[1], kind, first) + collective_mape(halves[0], kind, second)) / 2


def _traffic_share(profile: CollectiveProfile, kind: str) -> float:
    return 2 * (profile.num_gpus - 1) / profile.num_gpus if kind == "all_reduce" else 1.0


@dataclass(frozen=True)
class MeasuredLink:
    """Which of Vidur's files measure a link."""

    node: str
    across_nodes: bool
    """Two nodes with half of the GPUs each, or all of them in one."""
    kinds: tuple[str, ...]
    """Collectives to take."""

    def read(self, folder: Path, kind: str) -> list[CollectiveProfile]:
        """Return its profiles of one collective."""
        num_nodes = 2 if self.across_nodes else 1
        profiles = read_collective_profiles(folder, self.node, kind)
        return [p for p in profiles if p.num_gpus == num_nodes * p.gpus_per_node]


_BOTH = ("all_reduce", "send_recv")
MEASURED_LINKS = {
    "nvlink_a100": MeasuredLink("a100_dgx", False, _BOTH),
    "nvlink_h100": MeasuredLink("h100_dgx", False, _BOTH),
    # The send_recv files of the two pairwise nodes are one and the same: not taken.
    "nvlink_a100_pairs": MeasuredLink("a100_pairwise_nvlink", False, ("all_reduce",)),
    "nvlink_h100_pairs": MeasuredLink("h100_pairwise_nvlink", False, ("all_reduce",)),
    "two_nodes_a100": MeasuredLink("a100_dgx", True, _BOTH),
    "two_nodes_h100": MeasuredLink("h100_dgx", True, ("send_recv",)),
}


def fit_link(folder: Path, measured: MeasuredLink) -> Link:
    """Fit every collective of one link."""
    fitted = {
        kind: {p.num_gpus: fit_collective(p, kind) for p in measured.read(folder, kind)}
        for kind in measured.kinds
    }
    where = "two nodes" if measured.across_nodes else "one node"
    return Link(
        source=f"measured, Vidur data/profiling {measured.node}, {where}",
        all_reduce=fitted.get("all_reduce", {}),
        send_recv=fitted.get("send_recv", {}).get(2),
    )


def fit_engine(figures: Sequence[Published], calibration: Calibration) -> EngineOverhead:
    """Fit what the engine adds, kernels and links being given, to figures of whole engines.

    Figures of one model leave a direction open: `iteration_overhead_s` may grow where
    `overhead_scale` falls, and its iterations take as long.
    """
    measured = np.array([figure.published for figure in figures])

    def predict(parameters: FloatArray) -> FloatArray:
        return predicted(figures, with_engine(calibration, _engine(parameters)))

    fitted = fit_positive(
        predict, measured, (0.8, 0.6, 1e-3, 1.0), (0.2, 0.1, 1e-6, 0.1), (1.0, 1.0, 0.1, 10.0)
    )
    return _engine(fitted)


def _engine(parameters: FloatArray) -> EngineOverhead:
    names = ("kv_efficiency", "attention_efficiency", "iteration_overhead_s", "overhead_scale")
    return EngineOverhead(**dict(zip(names, parameters.tolist(), strict=True)))


def with_engine(calibration: Calibration, engine: EngineOverhead) -> Calibration:
    """Return the calibration with another engine."""
    return calibration.model_copy(update={"engine": engine})


def predicted(figures: Sequence[Published], calibration: Calibration) -> FloatArray:
    """Return what the model says of each figure, shape (figures,)."""
    return np.array([figure.predict(calibration) for figure in figures])


def fit_iterations(profile: IterationProfile) -> LinearCoefficients:
    """Fit the four coefficients of an iteration to measured ones, robustly, none negative."""
    design = np.vstack([np.ones_like(profile.time_s), profile.batches])
    # In units of its own mean share of the time, every coefficient is of the order of one; what
    # is in no batch gets none.
    share = (design / profile.time_s).mean(axis=1)
    unit = np.divide(1, share, out=np.zeros(4), where=share > 0)
    fit = least_squares(
        lambda shares: np.log((shares * unit) @ design / profile.time_s),
        np.full(4, 0.25),
        bounds=(_SMALLEST, np.inf),
        loss="soft_l1",
        f_scale=_OUTLIER_LOG_RATIO,
    )
    fitted = fit.x * unit
    return LinearCoefficients.from_fit(fitted, np.abs(fitted @ design / profile.time_s - 1))


def undetermined(profile: IterationProfile, fitted: LinearCoefficients) -> list[str]:
    """Names of the coefficients that the iterations do not tell from zero.

    Either the engine spends nothing there, or no iteration shows it apart from the others.
    """
    design = np.vstack([np.ones_like(profile.time_s), profile.batches]) / profile.time_s
    size = np.linalg.norm(design, axis=1)
    scaled = design / np.where(size > 0, size, 1)[:, None]
    squares, directions = np.linalg.eigh(scaled @ scaled.T)
    spread = np.sqrt(np.maximum(squares, _LEAST_SPREAD**2))
    # The median, as outliers are no noise.
    noise = max(1.5 * float(np.median(np.abs(fitted.values @ design - 1))), _LEAST_NOISE)
    error = noise * np.linalg.norm(directions / spread, axis=1)
    known = fitted.values * size > 2 * error
    names = [field.name for field in fields(fitted)]
    return [name for name, is_known in zip(names, known.tolist(), strict=False) if not is_known]


def fit_replica(profile: IterationProfile, replica: Replica) -> Calibration:
    """Fit the kernels and the engine of a replica on one GPU to its own iterations.

    Fixed costs of layers and of the iteration cannot be told apart by one model's times: the fit is
    good for that model, and for no other. Prompt tokens of an iteration are taken as one prompt.
    """
    known = replica.calibration

    def calibration(parameters: FloatArray) -> Calibration:
        kernels = _kernels(parameters[:4], replica.kernels.elementwise_overhead_s)
        fitted = {**known.kernels, replica.gpu.kernels: kernels}
        engine = _engine(np.append(parameters[4:], known.engine.overhead_scale))
        return with_engine(known.model_copy(update={"kernels": fitted}), engine)

    def predict(parameters: FloatArray) -> FloatArray:
        return iteration_s(replace(replica, calibration=calibration(parameters)), *profile.batches)

    start = (0.75, 0.9, 1.4, 2e-5, 0.8, 0.6, 1e-3)
    lower = (0.02, 0.02, 1.0, 1e-7, 0.02, 0.02, 1e-6)
    upper = (1.5, 1.5, 20.0, 1e-2, 1.5, 1.5, 1.0)
    return calibration(fit_positive(predict, profile.time_s, start, lower, upper))


def held_out_third(profile: IterationProfile) -> tuple[IterationProfile, IterationProfile]:
    """Divide iterations into two thirds to fit and one to predict, by batch composition.

    Raises:
        ValueError: There are fewer than three compositions.
    """
    held_out = _folds(profile, 3) == 0
    return _select(profile, ~held_out), _select(profile, held_out)


def iterations_held_out_mape(profile: IterationProfile, num_folds: int = 5) -> float:
    """Mean error on batch compositions that were held out, each in one of the folds.

    Raises:
        ValueError: There are fewer compositions than folds.
    """
    fold = _folds(profile, num_folds)
    errors = np.empty(len(profile.time_s))
    for i in range(num_folds):
        held_out = fold == i
        fitted = fit_iterations(_select(profile, ~held_out))
        time_s = fitted.time_s(*profile.batches[:, held_out])
        errors[held_out] = np.abs(time_s / profile.time_s[held_out] - 1)
    return float(errors.mean())


def _folds(profile: IterationProfile, num_folds: int) -> IntArray:
    """Fold of every row, shape (rows,); equal batch compositions are in one."""
    _, index = np.unique(profile.batches, axis=1, return_inverse=True)
    num_compositions = int(index.max()) + 1
    if num_compositions < num_folds:
        raise ValueError(
            f"{num_compositions} batch compositions cannot be held out in {num_folds} folds; "
            "measure more"
        )
    order = np.random.default_rng(0).permutation(num_compositions)
    return np.asarray(order[index.reshape(-1)] % num_folds, np.int64)


def _select(profile: IterationProfile, rows: np.ndarray) -> IterationProfile:
    return IterationProfile(profile.batches[:, rows], profile.time_s[rows])
