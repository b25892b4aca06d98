"""The synthetic workload: a small file of parameters, and the generator that it drives.

Arrivals follow a Markov-modulated process (MMPP, Fischer and Meier-Hellstern 1993) whose state
moves as a discrete chain, because the public traces are bursty and a Poisson stream with their
lengths is a different and much easier problem. One thing is added to the textbook's: gaps within
a state are drawn from a fitted table instead of the exponential distribution, since requests of
the code trace often come in groups a few milliseconds wide. Lengths are independent from request
to request, as in the traces; the output's distribution depends on the context's bin.
"""

from __future__ import annotations

from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from tokenyard.config import FrozenModel
from tokenyard.types import FloatArray, IntArray
from tokenyard.workload.diurnal import Diurnal
from tokenyard.workload.sampling import draw_lengths, draw_mmpp_arrivals
from tokenyard.workload.trace import Trace

__all__ = ["Diurnal", "LengthTables", "Mmpp", "WorkloadModel", "load_model", "poisson_arrivals"]

_Row = tuple[float, ...]


class Mmpp(FrozenModel):
    """Markov-modulated arrival process as a discrete chain of K states."""

    dt_s: Annotated[float, Field(gt=0)]
    """Step of the chain, seconds; the rate is constant within a step."""
    rates_per_s: Annotated[_Row, Field(min_length=1)]
    """Arrival rate in each state, requests per second, ascending."""
    transition: tuple[_Row, ...]
    """Probability of the next step's state (column) given this one's (row), K rows of K."""
    stationary: _Row
    """Long-run share of steps in each state; also the distribution of the first one."""
    gap_probabilities: _Row
    gaps: _Row
    """Quantiles, at `gap_probabilities`, of the integral of the rate between two arrivals; mean
    1. The exponential distribution of mean 1 would make this a Poisson process in each state."""

    @model_validator(mode="after")
    def _is_a_chain(self) -> Self:
        num_states = len(self.rates_per_s)
        rows = (*self.transition, self.stationary)
        if len(self.transition) != num_states or any(len(row) != num_states for row in rows):
            raise ValueError(f"transition and stationary must have {num_states} states each")
        if any(min(row) < 0 or abs(sum(row) - 1) > 1e-6 for row in rows):
            raise ValueError("each row of transition, and stationary, must sum to 1")
        if min(self.rates_per_s) < 0 or not self.mean_rate_per_s > 0:
            raise ValueError("rates must not be negative, and some must be positive")
        _check_dynamics(
            *(np.array(x) for x in (self.transition, self.stationary, self.rates_per_s))
        )
        _check_quantiles(self.gap_probabilities, self.gaps)
        if abs(np.trapezoid(self.gaps, self.gap_probabilities) - 1) > 1e-4:
            raise ValueError("the mean of the gaps must be 1")
        return self

    @property
    def mean_rate_per_s(self) -> float:
        """Long-run arrival rate, requests per second."""
        return float(np.dot(self.stationary, self.rates_per_s))

    @cached_property
    def arrays(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """Cumulative transition rows, cumulative stationary shares, rates, gap table."""
        return (
            np.cumsum(np.array(self.transition), axis=1),
            np.cumsum(self.stationary),
            np.array(self.rates_per_s),
            np.array(self.gap_probabilities),
            np.array(self.gaps),
        )


class LengthTables(FrozenModel):
    """Quantiles of the context, and of the output given the context's bin.

    Between knots the quantile function is linear. The knots are denser in the upper tail, which
    holds much of the mean.
    """

    context_probabilities: _Row
    context_tokens: _Row
    """Context quantiles at `context_probabilities`, tokens."""
    bin_edges_tokens: _Row
    """Upper ends, inclusive, of all context bins but the last, which has none."""
    generated_probabilities: _Row
    generated_tokens: tuple[_Row, ...]
    """Output quantiles at `generated_probabilities`, tokens, one row per context bin."""
    mean_generated_tokens: _Row
    """Mean output of each context bin, tokens."""

    @model_validator(mode="after")
    def _are_quantiles(self) -> Self:
        num_bins = len(self.bin_edges_tokens) + 1
        if {len(self.generated_tokens), len(self.mean_generated_tokens)} != {num_bins}:
            raise ValueError(f"outputs must have {num_bins} rows: one per context bin")
        _check_quantiles(self.context_probabilities, self.context_tokens)
        for row in self.generated_tokens:
            _check_quantiles(self.generated_probabilities, row)
        return self

    @cached_property
    def arrays(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """The first five fields, in their order, as arrays."""
        context = np.array(self.context_probabilities), np.array(self.context_tokens)
        generated = np.array(self.generated_probabilities), np.array(self.generated_tokens)
        return *context, np.array(self.bin_edges_tokens), *generated


class WorkloadModel(FrozenModel):
    """Everything the generator knows; as JSON, the parameter file."""

    name: str
    provenance: str
    """Source file, rows used, licence and citation."""
    num_requests: int
    """Requests that the parameters were fitted to."""
    mean_context_tokens: float
    mean_generated_tokens_overall: float
    arrivals: Mmpp
    lengths: LengthTables

    def sample_lengths(self, n: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Draw the context and generated tokens of `n` independent requests, shape (n,) each."""
        context_tokens = np.empty(n, np.int64)
        generated_tokens = np.empty(n, np.int64)
        uniforms = rng.random((2, n))
        draw_lengths(uniforms, *self.lengths.arrays, context_tokens, generated_tokens)
        return context_tokens, generated_tokens

    def sample_mmpp_arrivals(
        self, num_requests: int, rate_per_s: float | None, rng: np.random.Generator
    ) -> FloatArray:
        """Draw arrival times of the bursty process, seconds, increasing, shape (num_requests,).

        It starts from its long-run distribution. Time is rescaled to the long-run mean rate, around
        which that of one finite stream varies; None keeps the fitted time scale.
        """
        arrival_s = np.empty(num_requests)
        draw_mmpp_arrivals(*self.arrivals.arrays, self.arrivals.dt_s, arrival_s, rng)
        if rate_per_s is not None:
            _check_rate(rate_per_s)
            arrival_s *= self.arrivals.mean_rate_per_s / rate_per_s
        return arrival_s

    def generate(
        self,
        num_requests: int,
        rng: np.random.Generator,
        rate_per_s: float | None = None,
        diurnal: Diurnal | None = None,
    ) -> Trace:
        """Draw a whole trace: bursty arrivals, optionally with day and week, and lengths.

        Arrivals and lengths have a stream of random numbers each, spawned from `rng`, so that
        another rate or a diurnal rhythm leaves the lengths as they were.
        """
        arrival_rng, length_rng = rng.spawn(2)
        arrival_s = self.sample_mmpp_arrivals(num_requests, rate_per_s, arrival_rng)
        context_tokens, generated_tokens = self.sample_lengths(num_requests, length_rng)
        return Trace(
            arrival_s=diurnal.warp(arrival_s) if diurnal else arrival_s,
            context_tokens=context_tokens,
            generated_tokens=generated_tokens,
            started_at=diurnal.started_at if diurnal else None,
        )

    def mean_generated_tokens(self, context_tokens: IntArray | FloatArray) -> FloatArray:
        """Predict outputs by the mean of the context's bin, tokens, shape of `context_tokens`."""
        bins = np.searchsorted(self.lengths.arrays[2], context_tokens)
        return np.array(self.lengths.mean_generated_tokens)[bins]


def poisson_arrivals(num_requests: int, rate_per_s: float, rng: np.random.Generator) -> FloatArray:
    """Draw Poisson arrival times, seconds, increasing, shape (num_requests,)."""
    _check_rate(rate_per_s)
    return np.cumsum(rng.standard_exponential(num_requests)) / rate_per_s


def model_names() -> list[str]:
    """Names of the workload models that ship with the package, sorted."""
    files = (resources.files("tokenyard.workload") / "models").iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


def load_model(name: str) -> WorkloadModel:
    """Read a shipped workload model by name, or one of your own (.json) by path.

    Raises:
        ValueError: No model of that name ships with the package, or the file does not hold one.
    """
    if name.endswith(".json"):
        try:
            return WorkloadModel.model_validate_json(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"workload model {name}: {error.strerror}") from None
    if name not in model_names():
        raise ValueError(
            f"unknown workload model {name!r}; choose one of {model_names()}, or give the .json "
            "file that pipelines/fit_workload.py wrote"
        )
    file = resources.files("tokenyard.workload") / "models" / f"{name}.json"
    return WorkloadModel.model_validate_json(file.read_text(encoding="utf-8"))


def _check_dynamics(transition: FloatArray, stationary: FloatArray, rates: FloatArray) -> None:
    if np.abs(stationary @ transition - stationary).max() > 1e-4:
        raise ValueError(f"{stationary.tolist()} is not the stationary distribution of transition")
    reachable = np.linalg.matrix_power(np.eye(len(rates)) + transition, len(rates))
    if not (reachable @ rates > 0).all():
        raise ValueError("from some state no arrival can ever come; remove it")


def _check_quantiles(probabilities: _Row, quantiles: _Row) -> None:
    if len(probabilities) != len(quantiles) or probabilities[0] != 0 or probabilities[-1] != 1:
        raise ValueError("a quantile table needs one value per probability, from 0 to 1")
    if (np.diff(probabilities) <= 0).any() or (np.diff(quantiles) < 0).any() or quantiles[0] < 0:
        raise ValueError("probabilities must increase, and quantiles from 0 on not decrease")


def _check_rate(rate_per_s: float) -> None:
    if not rate_per_s > 0:
        raise ValueError(f"rate {rate_per_s} requests/s must be positive")
