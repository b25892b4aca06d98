"""95 % intervals: over independent streams, and over one long recorded stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tokenyard.statistics import student
from tokenyard.types import FloatArray, IntArray

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
MIN_STREAMS = 5
"""Independent values below which there is no interval: Student's rests on their spread."""
MIN_BLOCKS = 30
"""Blocks below which one stream has no interval: a percentile of resamples is too narrow then."""
_ROUNDING = 1e-13

Statistic = Callable[[FloatArray], FloatArray]
"""Takes values, shape (num_resamples, num_requests); gives one number per row."""


class Interval(NamedTuple):
    """An estimate and its 95 % interval; NaN where there is too little to say."""

    estimate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the distance of its ends."""
        return (self.high - self.low) / 2

    def over(self, scale: float) -> Interval:
        """Divide all three by a positive scale; NaN when it is 0."""
        divisor = scale if scale else math.nan
        return Interval(self.estimate / divisor, self.low / divisor, self.high / divisor)


def t_interval(values: Sequence[float] | FloatArray) -> Interval:
    """Mean of independent values and its Student interval; none of fewer than `MIN_STREAMS`."""
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean()) if len(array) else math.nan
    if len(array) < MIN_STREAMS:
        return Interval(mean, math.nan, math.nan)
    half = (
        student.quantile(0.5 + CONFIDENCE / 2, len(array) - 1)
        * float(array.std(ddof=1))
        / math.sqrt(len(array))
    )
    return Interval(mean, mean - half, mean + half)


def paired_p_value(differences: FloatArray) -> float:
    """Two-sided p-value that independent differences have a mean of zero, by Student's test.

    1 where they are all zero, 0 where they are all the same otherwise, but for rounding. NaN for
    fewer than `MIN_STREAMS`: there is no test where there is no interval.
    """
    if len(differences) < MIN_STREAMS:
        return math.nan
    if np.ptp(differences) <= _ROUNDING * np.abs(differences).max():
        return 0.0 if differences.any() else 1.0
    num = len(differences)
    t = float(differences.mean() / differences.std(ddof=1)) * math.sqrt(num)
    return student.two_sided_p_value(t, num - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct the p-values of a family of tests, in their order (Holm 1979).

    A corrected value below 0.05 is significant however many of the family's nulls are true. NaN is
    no test, and stays.
    """
    corrected, greatest = list(p_values), 0.0
    num_tests = len(p_values) - int(np.isnan(p_values).sum())
    # NaN is sorted to the end.
    for rank, index in enumerate(np.argsort(p_values, kind="stable").tolist()[:num_tests]):
        greatest = max(greatest, (num_tests - rank) * p_values[index])
        corrected[index] = min(1.0, greatest)
    return corrected


class BlockBootstrap:
    """Resamples one long stream in blocks, so that what belongs together stays together.

    Moving-block bootstrap (Kuensch 1989): blocks of consecutive requests are drawn with
    replacement from all that the stream holds, and strung together to its length. Every policy
    is resampled with the same blocks, so differences between policies are paired.
    """

    @classmethod
    def of(cls, values: FloatArray, rng: np.random.Generator) -> BlockBootstrap | None:
        """Blocks that cover the dependence of a series; None where it has under `MIN_BLOCKS`.

        Args:
            values: The series, shape (num_requests,); NaN counts as the mean.
            rng: Draws the blocks.
        """
        length = block_length(values)
        return cls(len(values), length, rng) if len(values) >= MIN_BLOCKS * length else None

    def __init__(self, num_requests: int, block_length: int, rng: np.random.Generator) -> None:
        num_blocks = math.ceil(num_requests / block_length)
        shape = (NUM_RESAMPLES, num_blocks)
        self._starts = rng.integers(num_requests - block_length + 1, size=shape)
        self._num_requests = num_requests
        self._block_length = block_length

    def _indices(self, starts: IntArray) -> IntArray:
        inside = np.arange(self._block_length)
        blocks = starts[:, :, None] + inside
        return blocks.reshape(len(starts), -1)[:, : self._num_requests]

    def resample(self, values: FloatArray, statistic: Statistic) -> FloatArray:
        """Return `statistic` of each resample of `values`, shape (NUM_RESAMPLES,)."""
        chunks = np.array_split(self._starts, 20)  # bounds the memory of long streams
        return np.concatenate([statistic(values[self._indices(chunk)]) for chunk in chunks])


def percentile_interval(estimate: float, resampled: FloatArray) -> Interval:
    """Interval between the outer percentiles of resampled estimates."""
    low, high = np.nanpercentile(resampled, [50 - 50 * CONFIDENCE, 50 + 50 * CONFIDENCE])
    return Interval(estimate, float(low), float(high))


@dataclass(frozen=True)
class Samples:
    """Measures of one policy by whatever is paired with other policies', with their intervals."""

    values: Mapping[str, FloatArray]
    """By key, shape (num_units,): one value per independent stream or day, or per resample.

    Empty where one stream has too few blocks to be resampled: then there is no interval.
    """
    estimates: Mapping[str, float] | None = None
    """What `values` are resamples of, by key; None: `values` are independent of each other."""

    def interval(self, key: str) -> Interval:
        """A measure: Student's interval of independent values, percentiles of resamples."""
        if self.estimates is None:
            return t_interval(self.values[key])
        if not self.values:
            return Interval(self.estimates[key], math.nan, math.nan)
        return percentile_interval(self.estimates[key], self.values[key])

    def difference(self, other: Samples, key: str, relative: bool) -> Interval:
        """This policy's measure minus another's, over the other's mean where relative."""
        if self.estimates is None or other.estimates is None:
            ours, theirs = self.values[key], other.values[key]
            interval = t_interval(ours - theirs)
            return interval.over(abs(float(theirs.mean()))) if relative else interval
        before = other.estimates[key]
        change = self.estimates[key] - before
        if relative:
            change = change / before if before else math.nan
        if not self.values:
            return Interval(change, math.nan, math.nan)
        ours, theirs = self.values[key], other.values[key]
        return percentile_interval(change, (ours - theirs) / (theirs if relative else 1.0))

    def p_value(self, other: Samples, key: str) -> float:
        """Two-sided p-value that a measure is another policy's; NaN where there is no interval.

        Student's of independent values; of resamples twice the share on the other side of zero.
        """
        if not self.values or not other.values:
            return math.nan
        differences = self.values[key] - other.values[key]
        if self.estimates is not None:
            beyond = min((differences <= 0).mean(), (differences >= 0).mean())
            return float(min(1.0, max(2.0 * beyond, 1.0 / len(differences))))
        return paired_p_value(differences)


def block_length(values: FloatArray) -> int:
    """Length of bootstrap blocks that covers the dependence of a series, requests.

    Twice the lag from which on the autocorrelation is no more than noise (the bandwidth rule of
    Politis and White 2004, "Automatic Block-Length Selection for the Dependent Bootstrap",
    section 3.2), so that most of what is dependent falls into one block; at least n^(1/3), at most
    the series. Their length of least error is shorter, and its intervals are too narrow on series
    that are as persistent as a queue: wide and honest is preferred here.

    Args:
        values: The series, shape (num_requests,); NaN counts as the mean.
    """
    n = len(values)
    centred = np.where(np.isnan(values), 0.0, values - np.nanmean(values))
    lag = _dies_out_at(_autocorrelation(centred)) if centred.any() else 1
    wanted = max(2 * lag, math.ceil(float(np.cbrt(n))))
    return min(wanted, n)


def _autocorrelation(centred: FloatArray) -> FloatArray:
    n = len(centred)
    spectrum = np.abs(np.fft.rfft(centred, 2 * n)) ** 2
    covariance = np.fft.irfft(spectrum)[:n]
    return np.asarray(covariance / covariance[0])


def _dies_out_at(correlation: FloatArray) -> int:
    """Lag from which on several autocorrelations in a row are no more than noise."""
    n = len(correlation)
    noise = 2.0 * math.sqrt(math.log10(n) / n)
    in_a_row = max(5, math.ceil(math.sqrt(math.log10(n))))
    small = np.abs(correlation[1:]) < noise
    if len(small) < in_a_row:
        return n
    quiet = np.convolve(small, np.ones(in_a_row), "valid") == in_a_row
    return int(quiet.argmax()) + 1 if quiet.any() else n
