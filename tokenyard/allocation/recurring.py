"""Demand that recurs and jumps: what is added to a base at times of the day, never twice alike.

A kind of demand is a list of events. Each day every event is shifted and resized at random, partly
together with the others of that day, so that earlier days tell what comes without being repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from tokenyard.types import FloatArray

RecurringKind = Literal["schedule", "steps", "ramp", "bursts", "flat"]
"""`schedule`: sixteen jobs a day; `steps`: shifts of hours; `ramp`: slow rises; `bursts`: short
events at random times, new on every day; `flat`: none."""
RECURRING_KINDS: tuple[RecurringKind, ...] = get_args(RecurringKind)
_BASE: dict[RecurringKind, float] = {
    "schedule": 0.15, "steps": 0.2, "ramp": 0.1, "bursts": 0.25, "flat": 0.5,
}  # fmt: skip
_BURSTS_PER_DAY, _BURST_S = 12, 900.0
_DAY_SHIFT_S, _EVENT_SHIFT_S = 240.0, 120.0
"""Standard deviations of the shift of all events of a day, and of each of them."""
_DAY_SIZE, _EVENT_SIZE = 0.06, 0.1
"""Standard deviations of the logarithm of the factor on sizes, in the same way."""
_MOST = 1.2
_HOUR_S = 3600.0


class _Event(NamedTuple):
    start_s: float
    """Time of the day."""
    duration_s: float
    size: float
    rise_s: float = 1.0
    """Time that it takes to rise, and to fall."""


_EVENTS: dict[RecurringKind, Sequence[_Event]] = {
    "schedule": [_Event((k + 0.25) * 1.5 * _HOUR_S, 0.5 * _HOUR_S, 0.75) for k in range(16)],
    "steps": [
        _Event(1.0 * _HOUR_S, 1.5 * _HOUR_S, 0.6),
        _Event(7.0 * _HOUR_S, 5.0 * _HOUR_S, 0.35),
        _Event(9.0 * _HOUR_S, 2.0 * _HOUR_S, 0.3),
        _Event(13.5 * _HOUR_S, 4.5 * _HOUR_S, 0.6),
        _Event(20.0 * _HOUR_S, 2.5 * _HOUR_S, 0.3),
    ],
    "ramp": [
        _Event(6.0 * _HOUR_S, 8.0 * _HOUR_S, 0.8, 2.5 * _HOUR_S),
        _Event(17.0 * _HOUR_S, 5.0 * _HOUR_S, 0.5, 1.5 * _HOUR_S),
    ],
    "bursts": [],
    "flat": [],
}


def recurring_demand(
    kind: RecurringKind, num_days: int, slots_per_day: int, rng: np.random.Generator
) -> FloatArray:
    """Draw days of one kind, shape (num_days * slots_per_day,), values in [0, 1.2]."""
    slot_s = 86_400 / slots_per_day
    time_s = slot_s * (np.arange(num_days * slots_per_day) + 0.5)
    values = np.full(len(time_s), _BASE[kind])
    # The day before begins what lasts past midnight.
    for day in range(-1, num_days):
        events = _EVENTS[kind] if kind != "bursts" else _bursts(rng)
        shift_s = rng.normal(0.0, _DAY_SHIFT_S) + rng.normal(0.0, _EVENT_SHIFT_S, len(events))
        size = np.exp(rng.normal(0.0, _DAY_SIZE) + rng.normal(0.0, _EVENT_SIZE, len(events)))
        for event, shift, factor in zip(events, shift_s, size, strict=True):
            since = time_s - (day * 86_400 + event.start_s + shift)
            shape = np.minimum(since, event.duration_s - since) / event.rise_s
            values += event.size * factor * np.clip(shape, 0.0, 1.0)
    return np.asarray(np.clip(values, 0.0, _MOST))


def _bursts(rng: np.random.Generator) -> list[_Event]:
    count = rng.poisson(_BURSTS_PER_DAY)
    starts, durations = rng.uniform(0.0, 86_400, count), rng.exponential(_BURST_S, count)
    sizes = rng.uniform(0.2, 0.8, count)
    return [_Event(*row) for row in zip(starts, durations, sizes, strict=True)]
