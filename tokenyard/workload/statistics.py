"""What the results page compares between a trace and its imitation."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from tokenyard.types import FloatArray


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
