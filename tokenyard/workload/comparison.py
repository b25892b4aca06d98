"""What the results page compares between a trace and its imitation."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from tokenyard.types import FloatArray
from tokenyard.workload.trace import Trace


def ks_distance(a: ArrayLike, b: ArrayLike) -> float:
    """Largest gap between two samples' distribution functions, in [0, 1] (Kolmogorov-Smirnov)."""
    first, second = np.sort(np.asarray(a)), np.sort(np.asarray(b))
    points = np.concatenate((first, second))
    below_first = np.searchsorted(first, points, side="right") / len(first)
    below_second = np.searchsorted(second, points, side="right") / len(second)
    return float(np.abs(below_first - below_second).max())


def window_counts(arrival_s: FloatArray, window_s: float) -> FloatArray:
    """Count arrivals in consecutive windows from second 0; the last, partial one is left out.

    Args:
        arrival_s: Times of arrival, seconds, ascending, shape (n,).
        window_s: Length of a window, seconds.

    Returns:
        Counts, shape (windows,); empty where the arrivals span less than one window.
    """
    num_windows = int(arrival_s[-1] // window_s) if len(arrival_s) else 0
    edges = np.searchsorted(arrival_s, np.arange(num_windows + 1) * window_s)
    return np.diff(edges).astype(np.float64)


def index_of_dispersion(arrival_s: FloatArray, window_s: float) -> float:
    """Variance over mean of the counts per window (Cox and Lewis 1966); 1 for a Poisson process.

    Returns:
        The index; NaN with fewer than two windows.
    """
    counts = window_counts(arrival_s, window_s)
    return float(counts.var(ddof=1) / counts.mean()) if len(counts) > 1 else np.nan


def count_autocorrelation(arrival_s: FloatArray, window_s: float, lag: int) -> float:
    """Correlation of the counts per window with those `lag` windows later.

    Returns:
        The correlation, in [-1, 1]; NaN with fewer than `lag` + 2 windows or constant counts.
    """
    counts = window_counts(arrival_s, window_s)
    early, late = counts[:-lag], counts[lag:]
    if len(early) < 2 or early.std() == 0 or late.std() == 0:
        return np.nan
    return float(np.corrcoef(early, late)[0, 1])


def describe(trace: Trace, reference: Trace) -> dict[str, float]:
    """Measure how `trace` arrives, and how far its distributions are from those of `reference`.

    Returns:
        Rate; mean lengths; correlation of a request's total tokens with the next one's; index of
        dispersion over 1, 10 and 60 s; autocorrelation of the counts per second at lags 1, 5, 20
        and 60; distances of gaps between arrivals and of lengths.
    """
    arrival_s = trace.arrival_s
    return {
        "rate_per_s": trace.mean_rate_per_s,
        "mean_context_tokens": float(trace.context_tokens.mean()),
        "mean_generated_tokens": float(trace.generated_tokens.mean()),
        "size_correlation": float(
            np.corrcoef(trace.total_tokens[:-1], trace.total_tokens[1:])[0, 1]
        ),
        **{f"dispersion_{w}s": index_of_dispersion(arrival_s, w) for w in (1, 10, 60)},
        **{f"autocorrelation_{k}s": count_autocorrelation(arrival_s, 1, k) for k in (1, 5, 20, 60)},
        "ks_gap": ks_distance(np.diff(arrival_s), np.diff(reference.arrival_s)),
        "ks_context": ks_distance(trace.context_tokens, reference.context_tokens),
        "ks_generated": ks_distance(trace.generated_tokens, reference.generated_tokens),
        "ks_total": ks_distance(trace.total_tokens, reference.total_tokens),
    }
