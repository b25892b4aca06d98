"""What the first paper's agent sees of a request: calendar, sizes, and the sizes just before it.

Abbaraju, section III: time features, token counts, rolling statistics over the last 5, 10 and 20
requests, lag-1 features, robust scaling. Deviation: sizes are those the router is told
(`predicted_total_tokens`), and windows end before the current request, so that no true output
length leaks. One function fills a row; training calls it on whole streams, serving one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tokenyard.compiled import compiled_with_arrays
from tokenyard.types import FloatArray, IntArray

FEATURE_NAMES = (
    "hour",
    "day_of_week",
    "day_of_month",
    "iso_week",
    "total",
    "context",
    "generated",
    "mean5",
    "std5",
    "mean10",
    "std10",
    "mean20",
    "std20",
    "lag1_total",
    "lag1_context",
    "lag1_generated",
)
"""Order of the columns. Hours count from 0, days of the week from Monday = 0 and ISO weeks from
1, all in UTC; sizes are tokens; standard deviations are those of the window's requests (divided
by their number). What does not exist yet, and the calendar of a trace without one, is 0."""

NUM_REQUEST_FEATURES = len(FEATURE_NAMES)

_LONGEST_WINDOW = 20
_HOUR_S = 3600


def request_features(
    arrival_s: FloatArray,
    context_tokens: IntArray,
    predicted_total: FloatArray,
    started_at: datetime | None = None,
) -> npt.NDArray[np.float32]:
    """Compute the features of a whole stream.

    Args:
        arrival_s: Times of arrival since `started_at`, seconds, shape (n,).
        context_tokens: Prompt lengths, tokens, shape (n,).
        predicted_total: Context plus predicted output, tokens, shape (n,).
        started_at: Calendar time of second 0; None leaves the calendar features 0.

    Returns:
        One row per request, columns as `FEATURE_NAMES`, shape (n, 16).
    """
    rows = np.zeros((len(arrival_s), NUM_REQUEST_FEATURES), np.float32)
    contexts = np.asarray(context_tokens, np.float64)
    totals = np.asarray(predicted_total, np.float64)
    _fill_rows(rows, contexts, totals)
    if started_at is not None and len(rows):
        # The calendar costs as much as the rest: once per hour is enough.
        hours = (_epoch_s(started_at) + np.asarray(arrival_s, np.float64)) // _HOUR_S
        begins = np.flatnonzero(np.diff(hours, prepend=-1.0))
        calendar = [_calendar(hour * _HOUR_S) for hour in hours[begins]]
        rows[:, :4] = np.repeat(calendar, np.diff(begins, append=len(rows)), axis=0)
    return rows


class FeatureTracker:
    """The same features one request at a time, for serving."""

    def __init__(self, started_at: datetime | None = None) -> None:
        """Begin without history; `started_at` is the calendar time of second 0."""
        self._epoch_s = _epoch_s(started_at)
        self._contexts = np.zeros(0)
        self._totals = np.zeros(0)

    def push(
        self, arrival_s: float, context_tokens: int, predicted_total_tokens: float
    ) -> FloatArray:
        """Return the features of one request, shape (16,), and remember its size."""
        latest = slice(-_LONGEST_WINDOW - 1, None)
        self._contexts = np.append(self._contexts, float(context_tokens))[latest]
        self._totals = np.append(self._totals, float(predicted_total_tokens))[latest]
        row = np.zeros(NUM_REQUEST_FEATURES)
        row[:4] = _calendar(self._epoch_s + arrival_s)
        _fill_row(row, self._contexts, self._totals, len(self._totals) - 1)
        return row


@dataclass(frozen=True, eq=False)
class RobustScaler:
    """Centre by the median and divide by the interquartile range; fit it on training data only."""

    center: FloatArray
    """Median of each feature, shape (features,)."""
    scale: FloatArray
    """Interquartile range of each feature, 1 where that is 0, shape (features,)."""

    @classmethod
    def fit(cls, features: npt.ArrayLike) -> Self:
        """Measure both on rows of features, shape (n, features)."""
        low, center, high = np.quantile(np.asarray(features, np.float64), (0.25, 0.5, 0.75), axis=0)
        spread = high - low
        return cls(center, np.where(spread > 0, spread, 1.0))

    def transform(self, features: npt.ArrayLike) -> FloatArray:
        """Scale features of shape (..., features)."""
        scaled: FloatArray = (np.asarray(features, np.float64) - self.center) / self.scale
        return scaled


def _epoch_s(started_at: datetime | None) -> float:
    """Return seconds since 1970-01-01 UTC; NaN for None."""
    if started_at is None:
        return math.nan
    if started_at.tzinfo is None:
        raise ValueError(f"started_at {started_at} has no time zone; give it UTC")
    return started_at.timestamp()


def _calendar(clock_s: float) -> tuple[int, int, int, int]:
    """Return hour, day of week, day of month and ISO week of a time since 1970, UTC."""
    if math.isnan(clock_s):
        return 0, 0, 0, 0
    # Whole hours, as a fraction of a second could be rounded up to the next one.
    clock = datetime.fromtimestamp(clock_s // _HOUR_S * _HOUR_S, UTC)
    return clock.hour, clock.weekday(), clock.day, clock.isocalendar().week


@compiled_with_arrays
def _fill_rows(rows: npt.NDArray[np.float32], contexts: FloatArray, totals: FloatArray) -> None:
    for i in range(len(rows)):
        _fill_row(rows[i], contexts, totals, i)


@compiled_with_arrays
def _fill_row(
    row: npt.NDArray[np.floating[Any]], contexts: FloatArray, totals: FloatArray, i: int
) -> None:
    """Fill all but the calendar of request `i` from the sizes up to and including its own."""
    row[4] = totals[i]
    row[5] = contexts[i]
    row[6] = totals[i] - contexts[i]
    _fill_rolling(row[7:13], totals[:i])
    previous = i - 1
    row[13] = totals[previous] if i > 0 else 0.0
    row[14] = contexts[previous] if i > 0 else 0.0
    row[15] = totals[previous] - contexts[previous] if i > 0 else 0.0


@compiled_with_arrays
def _fill_rolling(row: npt.NDArray[np.floating[Any]], past: FloatArray) -> None:
    """Fill mean and deviation of the last 5, 10 and 20 of `past`, from the newest backwards."""
    row[:] = 0.0
    if len(past) == 0:
        return
    # Measured from one of the values, the squares cannot cancel, and equal values give exactly 0.
    origin = past[-1]
    total = 0.0
    squares = 0.0
    column = 0
    for k in range(1, min(len(past), _LONGEST_WINDOW) + 1):
        deviation = past[len(past) - k] - origin
        total += deviation
        squares += deviation * deviation
        if k in (5, 10, 20) or k == len(past):
            mean = total / k
            row[column] = origin + mean
            row[column + 1] = math.sqrt(max(squares / k - mean * mean, 0.0))
            column += 2
    # Windows longer than the past hold all of it.
    for later in range(column, 6):
        row[later] = row[later - 2]
