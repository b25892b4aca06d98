"""Series that remember: each value hangs on those before it."""

from __future__ import annotations

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.types import FloatArray


def autoregression(noise: FloatArray, lag_1: float, lag_2: float = 0.0) -> FloatArray:
    """Return y with y[t] = noise[t] + lag_1 y[t - 1] + lag_2 y[t - 2], along the first axis."""
    series = np.array(noise, dtype=np.float64)
    _accumulate(series.reshape(len(series), -1), lag_1, lag_2)
    return series


@compiled
def _accumulate(series: FloatArray, lag_1: float, lag_2: float) -> None:
    for t in range(1, series.shape[0]):
        for i in range(series.shape[1]):
            earlier = lag_2 * series[t - 2, i] if t > 1 else 0.0
            series[t, i] += lag_1 * series[t - 1, i] + earlier
