"""Fit a `WorkloadModel` to a trace: EM for the arrivals, quantile tables for the lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, xlogy

from tokenyard.compiled import compiled_with_arrays
from tokenyard.types import FloatArray, IntArray
from tokenyard.workload.model import LengthTables, Mmpp, WorkloadModel
from tokenyard.workload.trace import Trace

# Uniform up to 0.9 and denser above: uniform knots alone overstate the mean of a heavy tail.
_TAIL = (0.92, 0.94, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995, 0.999, 1.0)
CONTEXT_PROBABILITIES = (*np.linspace(0, 0.9, 38).round(6).tolist(), *_TAIL)
GENERATED_PROBABILITIES = (*np.linspace(0, 0.9, 16).round(6).tolist(), *_TAIL)
NUM_CONTEXT_BINS = 16
MAX_STATES = 6
"""Of the arrivals of a trace of one's own; as many are taken as the data speak for."""

_MOST_STEPS = 50_000
"""Of the arrival chain of a trace of one's own, which takes minutes to fit then: a longer trace has
longer steps."""

# Moves that are assumed but not seen: a state that nothing visits keeps defined probabilities.
_PSEUDO_COUNT = 1e-6


@dataclass(frozen=True)
class MmppFit:
    """A fitted arrival process, and how well it explains the counts."""

    mmpp: Mmpp
    log_likelihood: float
    num_steps: int

    @property
    def bic(self) -> float:
        """Bayesian information criterion; lower is better (Schwarz 1978)."""
        num_states = len(self.mmpp.rates_per_s)
        num_parameters = num_states * (num_states - 1) + num_states + num_states - 1
        return num_parameters * math.log(self.num_steps) - 2 * self.log_likelihood


def fit_workload(
    trace: Trace, name: str, provenance: str, dt_s: float, num_states: int
) -> WorkloadModel:
    """Fit arrivals and lengths to all of `trace`; pass its training part only.

    Args:
        trace: The requests to imitate.
        name: Name of the model.
        provenance: Source file, rows used, licence and citation.
        dt_s: Step of the arrival chain, seconds.
        num_states: States of the arrival chain.
    """
    return _model(trace, name, provenance, fit_mmpp(trace.arrival_s, dt_s, num_states).mmpp)


def _model(trace: Trace, name: str, provenance: str, arrivals: Mmpp) -> WorkloadModel:
    return WorkloadModel(
        name=name,
        provenance=provenance,
        num_requests=trace.num_requests,
        mean_context_tokens=round(float(trace.context_tokens.mean()), 3),
        mean_generated_tokens_overall=round(float(trace.generated_tokens.mean()), 3),
        arrivals=arrivals,
        lengths=fit_lengths(trace),
    )


def fit_own(trace: Trace, name: str, provenance: str, dt_s: float) -> WorkloadModel:
    """Fit a trace of one's own, with as many arrival states as the data speak for (BIC).

    Args: as of `fit_workload`; steps are longer where they would be more than `_MOST_STEPS`.

    Raises:
        ValueError: The trace says too little, or the step is no time.
    """
    if not (dt_s > 0 and math.isfinite(dt_s)):
        raise ValueError(f"a step of {dt_s:g} s must be positive")
    if not trace.duration_s > 0:
        raise ValueError(f"{trace.num_requests} requests at one instant have no arrival process")
    if not trace.total_tokens.any():
        raise ValueError("no request of the trace has a token: what would take time?")
    dt_s = max(dt_s, trace.duration_s / _MOST_STEPS)
    steps = int(trace.duration_s / dt_s) + 1
    fits = [fit_mmpp(trace.arrival_s, dt_s, k) for k in range(1, min(MAX_STATES, steps) + 1)]
    return _model(trace, name, provenance, min(fits, key=lambda fit: fit.bic).mmpp)


def fit_lengths(trace: Trace) -> LengthTables:
    """Tabulate the quantiles of contexts, and of outputs within bins of equally many contexts."""
    inner = np.linspace(0, 1, NUM_CONTEXT_BINS + 1)[1:-1]
    # A context length that fills more than one bin leaves fewer bins.
    edges = np.unique(np.quantile(trace.context_tokens, inner, method="lower"))
    edges = edges[edges < trace.context_tokens.max()]
    bins = np.searchsorted(edges, trace.context_tokens)
    groups = [trace.generated_tokens[bins == i] for i in range(len(edges) + 1)]
    return LengthTables(
        context_probabilities=CONTEXT_PROBABILITIES,
        context_tokens=_quantiles(trace.context_tokens, CONTEXT_PROBABILITIES),
        bin_edges_tokens=tuple(edges.astype(float).tolist()),
        generated_probabilities=GENERATED_PROBABILITIES,
        generated_tokens=tuple(_quantiles(group, GENERATED_PROBABILITIES) for group in groups),
        mean_generated_tokens=tuple(round(float(group.mean()), 3) for group in groups),
    )


def _quantiles(values: IntArray, probabilities: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(np.quantile(values, probabilities).round(2).tolist())


def fit_mmpp(
    arrival_s: FloatArray,
    dt_s: float,
    num_states: int,
    num_restarts: int = 8,
    tolerance: float = 1e-7,
) -> MmppFit:
    """Fit the chain to the counts per step by Baum-Welch, then the gaps to what it explains.

    Args:
        arrival_s: Arrival times, seconds, shape (n,).
        dt_s: Step of the chain, seconds.
        num_states: States of the chain.
        num_restarts: Random starting points; the most likely result is kept.
        tolerance: Relative gain in log-likelihood at which to stop.

    Raises:
        ValueError: All requests arrive at once, or within fewer steps than there are states.
    """
    if not (len(arrival_s) > 1 and arrival_s[-1] > arrival_s[0]):
        raise ValueError(f"{len(arrival_s)} requests at one instant have no arrival process")
    counts = np.bincount((arrival_s / dt_s).astype(np.int64)).astype(np.float64)
    if len(counts) < num_states:
        raise ValueError(f"{len(counts)} steps of {dt_s} s cannot tell {num_states} states apart")
    rng = np.random.default_rng(0)
    chains = [_fit_chain(counts, num_states, tolerance, rng) for _ in range(num_restarts)]
    best = max(chains, key=lambda chain: chain.log_likelihood)
    return MmppFit(_as_mmpp(best, arrival_s, dt_s), best.log_likelihood, len(counts))


class _Chain(NamedTuple):
    log_likelihood: float
    means: FloatArray
    """Mean count per step in each state, shape (states,)."""
    transition: FloatArray
    posterior: FloatArray
    """Probability of each state at each step, shape (steps, states)."""


def _fit_chain(
    counts: FloatArray, num_states: int, tolerance: float, rng: np.random.Generator
) -> _Chain:
    """Baum-Welch with Poisson emissions from one random start.

    Rabiner 1989, section III, scaled as in V.A. One transition is added to his: from the last
    step back to the first. Closing the trace into a ring makes each state be entered as often as
    it is left, so that the long-run shares are those seen, and the long-run rate is the trace's.
    """
    means = np.quantile(counts, np.sort(rng.random(num_states))) + rng.random(num_states)
    transition = np.full((num_states, num_states), 0.1 / num_states) + 0.9 * np.eye(num_states)
    start = np.full(num_states, 1 / num_states)
    previous = -math.inf
    while True:
        log_emission = xlogy(counts[:, None], means) - means - gammaln(counts + 1)[:, None]
        peak = log_emission.max(axis=1)
        emission = np.exp(log_emission - peak[:, None])
        posterior, moves, log_scale = _smooth(emission, transition, start)
        log_likelihood = float(log_scale + peak.sum())
        if log_likelihood - previous < tolerance * abs(log_likelihood):
            return _Chain(log_likelihood, means, transition, posterior)
        previous = log_likelihood
        means = counts @ posterior / (posterior.sum(axis=0) + _PSEUDO_COUNT)
        moves += np.outer(posterior[-1], posterior[0]) + _PSEUDO_COUNT
        transition = moves / moves.sum(axis=1, keepdims=True)
        start = (posterior[0] + _PSEUDO_COUNT) / (1 + num_states * _PSEUDO_COUNT)


@compiled_with_arrays
def _smooth(
    emission: FloatArray, transition: FloatArray, start: FloatArray
) -> tuple[FloatArray, FloatArray, float]:
    """Forward-backward pass, scaled at every step.

    Returns:
        Posterior of the states, shape (steps, states); expected number of moves between each
        pair, shape (states, states); logarithm of the likelihood.
    """
    num_steps, num_states = emission.shape
    forward = np.empty((num_steps, num_states))
    scale = np.empty(num_steps)
    belief = start
    for t in range(num_steps):
        joint = belief * emission[t]
        scale[t] = joint.sum()
        forward[t] = joint / scale[t]
        belief = forward[t] @ transition
    posterior = np.empty((num_steps, num_states))
    posterior[-1] = forward[-1]
    moves = np.zeros((num_states, num_states))
    backward = np.ones(num_states)
    for t in range(num_steps - 2, -1, -1):
        future = emission[t + 1] * backward / scale[t + 1]
        for i in range(num_states):
            moves[i] += forward[t, i] * transition[i] * future
        backward = transition @ future
        posterior[t] = forward[t] * backward
    return posterior, moves, np.log(scale).sum()


def _as_mmpp(chain: _Chain, arrival_s: FloatArray, dt_s: float) -> Mmpp:
    """Sort states by rate, and round to what a person can read.

    Moves keep more digits: a state that lasts for days is left once in a million steps.
    """
    order = np.argsort(chain.means)
    transition = chain.transition[np.ix_(order, order)].round(12)
    transition[np.diag_indices_from(transition)] += 1 - transition.sum(axis=1)
    return Mmpp(
        dt_s=dt_s,
        rates_per_s=tuple((chain.means[order] / dt_s).round(6).tolist()),
        transition=tuple(tuple(row) for row in transition.round(12).tolist()),
        stationary=tuple(_stationary(transition).round(9).tolist()),
        gap_probabilities=CONTEXT_PROBABILITIES,
        gaps=_fit_gaps(arrival_s, chain.posterior @ chain.means, dt_s),
    )


def _stationary(transition: FloatArray) -> FloatArray:
    """Solve p = p A with sum(p) = 1 for the long-run shares, shape (states,)."""
    num_states = len(transition)
    equations = np.vstack([transition.T - np.eye(num_states), np.ones(num_states)])
    shares = np.linalg.lstsq(equations, np.append(np.zeros(num_states), 1.0))[0]
    shares = np.abs(shares)  # a share of 0 may come out as -1e-17
    return np.asarray(shares / shares.sum(), np.float64)


def _fit_gaps(arrival_s: FloatArray, expected_counts: FloatArray, dt_s: float) -> tuple[float, ...]:
    """Tabulate gaps between arrivals on the clock on which their rate is 1.

    Args:
        arrival_s: Arrival times, seconds, shape (n,).
        expected_counts: Smoothed mean count of each step, shape (steps,).
        dt_s: Length of a step, seconds.

    Returns:
        Quantiles at `CONTEXT_PROBABILITIES`, scaled so that the mean of the table is 1.
    """
    integral = np.concatenate(([0.0], np.cumsum(expected_counts)))
    gaps = np.diff(np.interp(arrival_s, np.arange(len(integral)) * dt_s, integral))
    quantiles = np.quantile(gaps, CONTEXT_PROBABILITIES)
    mean = np.trapezoid(quantiles, CONTEXT_PROBABILITIES)
    return tuple((quantiles / mean).round(6).tolist())
