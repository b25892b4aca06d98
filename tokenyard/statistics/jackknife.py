"""95 % intervals over one long stream, by leaving out one block of it at a time.

A queue remembers: requests that follow each other wait for the same reasons. So the stream is cut
into `MIN_BLOCKS` blocks, as long as they can be, and the spread of what is measured without each of
them gives the interval (delete-block jackknife, Kuensch 1989). A percentile is that of the whole
stream, not of a short window.

There is no interval where the stream is shorter than that many blocks over which the series forgets
(`block_length`). Where blocks still resemble the one before, the interval is widened as for a
first-order autoregressive series; where few blocks hold most of the spread, Student's has fewer
degrees of freedom (Satterthwaite 1946).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist

import numpy as np

from tokenyard.statistics import intervals, student
from tokenyard.types import FloatArray

SETTLED_BLOCKS = 5.0
"""Blocks, weighed by how many they hold, over which the slowest hundredth of the requests must
spread: else its percentile tells of one or two bursts."""
_MOST_CORRELATION = 0.5
"""Of neighbouring blocks, beyond which nothing can be told."""
_LEAST_FREEDOM = 1.5

Measured = Callable[[FloatArray], float]
"""A measure of values, shape (n,)."""


def p99(values: FloatArray) -> float:
    """Their 99th percentile."""
    return float(np.percentile(values, 99.0))


def blocks(num_values: int) -> list[slice]:
    """Consecutive blocks of a series, as equal as they can be."""
    edges = np.linspace(0, num_values, intervals.MIN_BLOCKS + 1).astype(int).tolist()
    return [slice(*pair) for pair in pairwise(edges)]


def left_out(values: FloatArray, measured: Measured) -> FloatArray:
    """What is measured without each block, shape (MIN_BLOCKS,)."""
    estimates = [measured(np.delete(values, block)) for block in blocks(len(values))]
    return np.array(estimates)


def forgets(series: FloatArray) -> bool:
    """Whether blocks are as long as the series remembers, shape (n,)."""
    return not series.any() or len(series) >= intervals.MIN_BLOCKS * intervals.block_length(series)


def is_settled(values: FloatArray) -> bool:
    """Whether the slowest hundredth is spread over so many blocks that its percentile means much.

    Args:
        values: Response times in order of arrival, shape (n,).
    """
    slow = values > p99(values)
    counts = np.array([slow[block].sum() for block in blocks(len(values))])
    return bool(counts.any()) and float(counts.sum() ** 2 / (counts @ counts)) >= SETTLED_BLOCKS


def jackknife_interval(estimate: float, without: FloatArray) -> intervals.Interval:
    """Interval of a measure of the whole stream from what it is without each block.

    NaN where neighbouring blocks resemble each other too much for any.
    """
    num = len(without)
    if not np.isfinite(without).all():
        return intervals.Interval(estimate, math.nan, math.nan)
    deviation = (num - 1) * (without.mean() - without)
    square = float(deviation @ deviation)
    if square <= (1e-12 * abs(estimate)) ** 2:
        return intervals.Interval(estimate, estimate, estimate)
    # Corrected for its bias, which is -(1 + 4 r) / num.
    correlation = (num * float(deviation[1:] @ deviation[:-1]) / square + 1.0) / (num - 4)
    if correlation > _MOST_CORRELATION:
        return intervals.Interval(estimate, math.nan, math.nan)
    wider = (1.0 + max(correlation, 0.0)) / (1.0 - max(correlation, 0.0))
    kurtosis = num * float((deviation**4).sum()) / square**2
    freedom = min(num - 1.0, 2.0 * num / max(kurtosis - 1.0, 1e-9)) / wider
    quantile = student.quantile(0.5 + intervals.CONFIDENCE / 2, max(freedom, _LEAST_FREEDOM))
    half = quantile * math.sqrt(wider * square / (num * (num - 1)))
    return intervals.Interval(estimate, estimate - half, estimate + half)


@dataclass(frozen=True)
class JackknifeSamples(intervals.Samples):
    """Measures of one policy on one long stream; others' are paired block by block.

    `values` has what is measured without each block, `estimates` what is measured of all.
    """

    series: Mapping[str, FloatArray] = field(default_factory=dict)
    """What every measure is of, in order of arrival, shape (num_requests,)."""

    @classmethod
    def of(cls, series: Mapping[str, tuple[FloatArray, Measured]]) -> JackknifeSamples:
        """Measure series by key, each with what measures it."""
        return cls(
            {key: left_out(values, measured) for key, (values, measured) in series.items()},
            {key: measured(values) for key, (values, measured) in series.items()},
            {key: values for key, (values, _) in series.items()},
        )

    def interval(self, key: str) -> intervals.Interval:
        """A measure with its interval."""
        assert self.estimates is not None
        estimate = self.estimates[key]
        valid = self._tells(key, self.series[key])
        without = self.values[key]
        return jackknife_interval(estimate, without if valid else np.full_like(without, math.nan))

    def difference(self, other: intervals.Samples, key: str, relative: bool) -> intervals.Interval:
        """This policy's measure minus another's, as a share of the other's where relative.

        All NaN where it is a percentile that has not settled.
        """
        assert isinstance(other, JackknifeSamples)
        assert self.estimates is not None
        assert other.estimates is not None
        ours, theirs = self.estimates[key], other.estimates[key]
        change, without = ours - theirs, self.values[key] - other.values[key]
        if relative:
            change = change / theirs if theirs else math.nan
            with np.errstate(divide="ignore", invalid="ignore"):
                without = without / other.values[key]
        if key.startswith("p99") and not (self.settled(key) and other.settled(key)):
            return intervals.Interval(math.nan, math.nan, math.nan)
        apart = self.series[key] - (ours / theirs if theirs else 1.0) * other.series[key]
        if not self._tells(key, apart):
            return intervals.Interval(change, math.nan, math.nan)
        return jackknife_interval(change, without)

    def p_value(self, other: intervals.Samples, key: str) -> float:
        """Two-sided p-value that a measure is another policy's; NaN where there is no interval."""
        assert other.estimates is not None
        difference = self.difference(other, key, relative=other.estimates[key] != 0.0)
        if difference.half_width == 0.0:
            return 0.0 if difference.estimate else 1.0
        errors = (
            abs(difference.estimate)
            / difference.half_width
            * NormalDist().inv_cdf(0.5 + intervals.CONFIDENCE / 2)
        )
        return math.erfc(errors / math.sqrt(2.0))

    def settled(self, key: str) -> bool:
        """Whether a percentile of the series is more than that of one or two bursts."""
        return is_settled(self.series[key])

    def _tells(self, key: str, series: FloatArray) -> bool:
        if key.startswith("p99"):
            return self.settled(key)
        return forgets(series)
