"""Demand to come, from what followed moments of earlier days that were like the present one.

An analogue ensemble (Delle Monache et al. 2013, "Probabilistic weather prediction with an analog
ensemble"): every moment of an earlier day, at about this time or, less likely, at any other, is
weighed by how alike the demand before it is, and what followed it is one possible future. Other
than a regression it says of a jump that it comes now or in some minutes, and nothing in between.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from tokenyard.allocation.demand import DemandStream
from tokenyard.config import FrozenModel
from tokenyard.types import FloatArray, IntArray

NUM_AHEAD = 6
"""Slots ahead that are told."""
NUM_CASES = 9
"""Equally likely demands that stand for each of them."""
NUM_ALIKE = 6
"""Latest slots that are compared."""
_NUM_MOMENTS = 100
"""Moments, those of most weight, whose futures count."""
_SHIFT_S, _LONGEST_SHIFT_S = 240.0, 300.0
"""Spread, and limit, of how much earlier or later in the day the same thing happens."""
_OTHER_TIMES, _OTHER_TIME_WEIGHT = 72, 0.005
"""Times of the day that are looked at besides, and the weight of each beside the same time's."""
_LEAST_NOISE = 0.03
_LEAST_PER_S = 1e-6
_LEAST_DAYS = 4
_NORMAL_QUARTILE = 0.6745
_BATCH = 1_000

LEVELS: FloatArray = (np.arange(NUM_CASES) + 0.5) / NUM_CASES


class EarlierDays(FrozenModel):
    """Days of demand, and how much of a change from slot to slot is noise."""

    slots_per_day: int
    log_demand: tuple[float, ...]
    """Logarithm of requests per second, whole days from midnight on."""
    noise: float
    """Standard deviation of the logarithm of demand around its course."""

    def cases(self, demand_per_s: Sequence[float], end_slot: int) -> FloatArray:
        """Return equally likely demands of the next slots, rising, shape (NUM_AHEAD, NUM_CASES).

        Args:
            demand_per_s: Demand of past slots, the latest last.
            end_slot: Slot of the day that comes next.
        """
        latest = np.array(demand_per_s[-NUM_ALIKE:], float)
        latest = np.concatenate([np.full(NUM_ALIKE - len(latest), latest[0]), latest])
        return np.asarray(self._cases(latest[None], np.array([end_slot]))[0])

    def cases_all(self, stream: DemandStream, at: IntArray | None = None) -> FloatArray:
        """Return what `cases` says before slots, all by default, shape (slots, AHEAD, CASES)."""
        padded = np.concatenate([np.full(NUM_ALIKE, stream.per_s[0]), stream.per_s])
        at = np.arange(len(stream.per_s)) if at is None else at
        latest = padded[at[:, None] + np.arange(NUM_ALIKE)]
        parts = range(0, len(at), _BATCH)
        return np.concatenate(
            [
                self._cases(latest[i : i + _BATCH], stream.start_slot + at[i : i + _BATCH])
                for i in parts
            ]
        )

    def _cases(self, latest: FloatArray, slots: IntArray) -> FloatArray:
        shifts, prior = self._candidates
        days, day = self._days, self.slots_per_day
        starts = day * np.arange(len(days) // day)
        at = (slots % day)[:, None, None] + starts[:, None] + shifts
        at = np.clip(at.reshape(len(slots), -1), NUM_ALIKE, len(days) - NUM_AHEAD)
        log = np.log(np.maximum(latest, _LEAST_PER_S))
        distance = np.zeros(at.shape)
        for lag in range(1, NUM_ALIKE + 1):
            distance += np.square(log[:, -lag, None] - days[at - lag])
        weight = np.tile(prior, len(starts)) - distance / (8 * self.noise**2)
        if at.shape[1] > _NUM_MOMENTS:
            kept = np.argpartition(weight, -_NUM_MOMENTS, axis=1)[:, -_NUM_MOMENTS:]
            at, weight = (np.take_along_axis(values, kept, 1) for values in (at, weight))
        weight = np.exp(weight - weight.max(axis=1, keepdims=True))
        weight /= weight.sum(axis=1, keepdims=True)
        cases = np.zeros((len(slots), NUM_AHEAD, NUM_CASES))
        for ahead in range(NUM_AHEAD):
            followed = days[at + ahead]
            order = np.argsort(followed, axis=1)
            reached = np.cumsum(np.take_along_axis(weight, order, 1), axis=1)
            first = (reached[:, None, :] < LEVELS[:, None]).sum(axis=2)
            first = np.minimum(first, at.shape[1] - 1)
            chosen = np.take_along_axis(order, first, 1)
            cases[:, ahead] = np.take_along_axis(followed, chosen, 1)
        return np.exp(cases)

    @functools.cached_property
    def _days(self) -> FloatArray:
        return np.array(self.log_demand)

    @functools.cached_property
    def _candidates(self) -> tuple[IntArray, FloatArray]:
        """Slots that moments are later than the present time of the day, and their log weights."""
        slot_s = 86_400 / self.slots_per_day
        longest = round(_LONGEST_SHIFT_S / slot_s)
        near = np.arange(-longest, longest + 1)
        other = np.arange(1, _OTHER_TIMES) * self.slots_per_day // _OTHER_TIMES
        prior = -0.5 * np.square(near * slot_s / _SHIFT_S)
        return (
            np.concatenate([near, other]),
            np.concatenate([prior, np.full(len(other), np.log(_OTHER_TIME_WEIGHT))]),
        )


def fit_earlier_days(stream: DemandStream, slots_per_day: int) -> EarlierDays | None:
    """Keep the whole days of a stream; None where there are too few."""
    first = -stream.start_slot % slots_per_day
    num_days = (len(stream.per_s) - first) // slots_per_day
    if num_days < _LEAST_DAYS:
        return None
    days = np.log(np.maximum(stream.per_s[first:][: num_days * slots_per_day], _LEAST_PER_S))
    # Most slots are no jumps: the median change is noise, twice.
    change = float(np.median(np.abs(np.diff(days)))) / _NORMAL_QUARTILE / np.sqrt(2)
    return EarlierDays(
        slots_per_day=slots_per_day,
        log_demand=tuple(np.round(days, 3).tolist()),
        noise=max(change, _LEAST_NOISE),
    )
