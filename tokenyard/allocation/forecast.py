"""What demand is expected in the slots to come: a seasonal regression, and how far it may be off.

The logarithm of demand is a profile of the day and the hour plus a deviation. The deviation of a
slot to come is predicted linearly from the latest deviations and from those around its time of day
on the two days before, one regression per horizon; its residuals give the spread. What history does
not reach counts as on the profile.

A load without a rhythm, such as a batch that is worked off, is none that training days show. So the
outlook that plans are made on weighs the regression by its errors of the last hours against those
of going on as it was (Bates and Granger 1969), and gives it up where these are far smaller. Where
demand has jumped, as when users come back after an outage, the regression learns of it slowly. The
outlook then goes by the latest demand as well.

A regression over a smooth profile does not know of jumps at about the same time of every day. Where
moments of earlier days that were like the present one forecast training days better
(`tokenyard.allocation.earlier_days`), or about as well, plans are made on what followed them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from statistics import NormalDist
from typing import Annotated, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from tokenyard.allocation.demand import CYCLES_PER_DAY, DemandStream, demand_source, harmonics
from tokenyard.allocation.earlier_days import LEVELS, NUM_AHEAD, EarlierDays, fit_earlier_days
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.config import FrozenModel
from tokenyard.types import FloatArray, IntArray

NUM_RECENT = 24
"""Latest slots that a forecast looks at: fewer do not tell noise from change."""
NUM_HORIZONS = 24
"""Slots ahead that are forecast: with 5 minutes, two hours."""
_HORIZON = 12
"""Slots that are planned ahead; twice as many change costs by less than 0.3 %."""
_JUDGED_SHARE = 0.25
"""Share of a training stream's days, the last ones, by which forecasts are compared."""
_JUDGED_SLOTS = 4_000
"""Slots of those days, at most, that are looked at."""
_AROUND = 2
"""Slots before and after the same time of an earlier day that are averaged."""
_LEVEL_SLOTS = 12
"""Slots that going on as it was averages: an hour."""
_LEAD = 5
"""Horizon whose errors are compared: half an hour ahead."""
_MEMORY = 48
"""Slots whose errors count, of which half must be there."""
_JUMP, _STAYS = 4.0, 0.8
"""Spreads of the regression by which a slot's demand is above its forecast where it has jumped, and
the share of what a forecast lacks then that is expected to stay from one slot to the next."""
_FORECAST_ANEW = _MEMORY + _LEAD + NUM_RECENT
"""Slots before the present time whose forecasts an outlook hangs on: by their errors, and jumps."""
_JUDGED_BY = _FORECAST_ANEW + _LEAD + _LEVEL_SLOTS
"""Latest slots that those hang on."""
_LOOKED_AT_BEFORE = _FORECAST_ANEW + NUM_RECENT + _AROUND
"""Slots before the present time, today and on earlier days, that an outlook hangs on."""
_LOOKED_AT = _LOOKED_AT_BEFORE + NUM_HORIZONS + _AROUND
_DOUBT, _SHARPNESS = 2.0, 4
"""How many times the squared error of going on the regression's may be, and how sharp that is."""
_SMALLEST_PER_S = 1e-6
_LEAST_SHARE = 0.25
"""Of the profile's lowest: less, as in slots without a request, counts as so much. Training days
show no less, and the logarithms of such slots would outweigh all that comes in the next hour."""
_NUM_DRAWS = 3
"""Draws of the noise over the training part that a scenario's forecaster is fitted to."""
_RIDGE = 1.0


class Outlook(NamedTuple):
    """What to plan on, before one slot or before every slot of a stream."""

    median_per_s: FloatArray
    """Shape (..., NUM_HORIZONS)."""
    spread: FloatArray
    """Standard deviations of the logarithm of demand over the median, of that shape."""


class Cases(NamedTuple):
    """Equally likely demands to plan on, before one slot or before every slot of a stream."""

    per_s: FloatArray
    """Requests per second of H slots ahead in Q cases, shape (..., H, Q)."""
    spread: FloatArray
    """Standard deviations of the logarithm of demand around each, shape (..., H)."""


class Forecaster(FrozenModel):
    """Medians and spreads of the demand of the coming slots."""

    slots_per_day: Annotated[int, Field(ge=1)]
    profile: tuple[float, ...]
    """Weights of `tokenyard.allocation.demand.harmonics` in the logarithm of demand."""
    weights: tuple[tuple[float, ...], ...]
    """Per horizon: weights of the latest deviations (latest first), of yesterday, of the day
    before, and a constant."""
    spread: tuple[float, ...]
    """Per horizon: standard deviation of the logarithm of demand over forecast."""
    # Left out where there are none: hashes of older policies hold a forecaster without the field.
    earlier_days: Annotated[EarlierDays | None, Field(exclude_if=lambda days: days is None)] = None
    """What plans are made on, in place of the regression."""

    @model_validator(mode="after")
    def _is_of_this_design(self) -> Self:
        shape = (len(self.profile), len(self.weights), {len(row) for row in self.weights})
        wanted = (1 + 2 * len(CYCLES_PER_DAY), NUM_HORIZONS, {NUM_RECENT + 3})
        if shape != wanted or len(self.spread) != NUM_HORIZONS:
            raise ValueError(
                f"profile, horizons and inputs number {shape}, this version's forecaster has "
                f"{wanted}: fit it anew"
            )
        return self

    def forecast(self, demand_per_s: Sequence[float], end_slot: int) -> FloatArray:
        """Return the median demand of the next slots, shape (NUM_HORIZONS,).

        Args:
            demand_per_s: Demand of past slots, the latest last, shape (n,).
            end_slot: Slot of the day that comes next.
        """
        before = np.array([len(demand_per_s)])
        return np.asarray(self._forecast_before(demand_per_s, end_slot, before)[0])

    def _forecast_before(
        self, demand_per_s: Sequence[float], end_slot: int, at: IntArray
    ) -> FloatArray:
        """Forecast before each of the latest slots `at`, shape (len(at), NUM_HORIZONS)."""
        num, day = len(demand_per_s), self.slots_per_day
        short, places = day, np.arange(num)
        if day > _LOOKED_AT:
            # For days of many slots, gather only the slots that the inputs use.
            short = _LOOKED_AT
            days = [np.arange(short) - k * day for k in (2, 1, 0)]
            places = num - _LOOKED_AT_BEFORE + np.concatenate(days)
            places = places[: 2 * short + _LOOKED_AT_BEFORE]
        is_past = places >= 0
        demand = np.array([demand_per_s[place] for place in places[is_past]])
        deviation = np.zeros(len(places))
        deviation[is_past] = self._log(demand) - self._profile_at(end_slot - num + places[is_past])
        inputs = _inputs(deviation, at - num + len(places), short)
        return self._predict(inputs, end_slot - num + at)

    def forecast_all(self, stream: DemandStream) -> FloatArray:
        """Return what `forecast` says before every slot of a stream, shape (slots, NUM_HORIZONS).

        Slot t is forecast from those before it.
        """
        slots = stream.start_slot + np.arange(len(stream.per_s))
        deviation = self._log(stream.per_s) - self._profile_at(slots)
        inputs = _inputs(deviation, np.arange(len(deviation)), self.slots_per_day)
        return self._predict(inputs, slots)

    def outlook(self, demand_per_s: Sequence[float], end_slot: int) -> Outlook:
        """Return what to plan on before the next slot; arguments as for `forecast`."""
        num = len(demand_per_s)
        at = np.arange(max(num - _FORECAST_ANEW, 0), num + 1)
        medians = self._forecast_before(demand_per_s, end_slot, at)
        log = self._log(np.array(demand_per_s[-_JUDGED_BY:]))
        medians, spreads = self._weighed(log, medians, at - num + len(log))
        return Outlook(medians[-1], spreads[-1])

    def outlook_all(self, stream: DemandStream) -> Outlook:
        """Return what `outlook` says before every slot of a stream."""
        at = np.arange(len(stream.per_s))
        return self._weighed(self._log(stream.per_s), self.forecast_all(stream), at)

    def cases(self, demand_per_s: Sequence[float], end_slot: int) -> Cases:
        """Return the cases to plan on before the next slot; arguments as for `forecast`."""
        if self.earlier_days is not None:
            return Cases(self.earlier_days.cases(demand_per_s, end_slot), np.zeros(NUM_AHEAD))
        return _one_case(self.outlook(demand_per_s, end_slot))

    def cases_all(self, stream: DemandStream) -> Cases:
        """Return what `cases` says before every slot of a stream from its first on."""
        if self.earlier_days is not None:
            cases = self.earlier_days.cases_all(stream, np.arange(stream.first, len(stream.per_s)))
            return Cases(cases, np.zeros(cases.shape[:2]))
        median_per_s, spread = self.outlook_all(stream)
        return _one_case(Outlook(median_per_s[stream.first :], spread[stream.first :]))

    def _weighed(self, log: FloatArray, medians: FloatArray, at: IntArray) -> Outlook:
        """Average forecasts made before the consecutive slots `at` with the recent level."""
        summed = np.concatenate([[0.0], np.cumsum(log)])
        low = np.maximum(at - _LEVEL_SLOTS, 0)
        level = (summed[at] - summed[low]) / np.maximum(at - low, 1)
        # Errors of forecasts made `_LEAD` slots ahead; the last slot's error is not known yet.
        about = at[_LEAD:-1]
        own = np.square(log[about] - np.log(medians[: len(about), _LEAD]))
        steady = np.square(log[about] - level[: len(about)])
        reached = about >= _LEAD + _LEVEL_SLOTS
        sums = [
            np.concatenate([[0.0], np.cumsum(values * reached)])
            for values in (own, steady, np.ones(len(about)))
        ]
        high = np.clip(at - at[0] - _LEAD, 0, len(about))
        since = np.maximum(high - _MEMORY, 0)
        own_sum, steady_sum, count = (summed[high] - summed[since] for summed in sums)
        steady_error = steady_sum / np.maximum(count, 1.0) + 1e-9
        ratio = own_sum / np.maximum(count, 1.0) / (_DOUBT * steady_error)
        weight = np.where(count < _MEMORY // 2, 1.0, 1.0 / (1.0 + ratio**_SHARPNESS))
        own_share, steady_share = weight[:, None], 1.0 - weight[:, None]
        mixed = own_share * np.log(medians) + steady_share * level[:, None]
        spread = own_share * self._spread + steady_share * np.sqrt(steady_error)[:, None]
        return Outlook(np.exp(self._after_jumps(mixed, log[np.maximum(at - 1, 0)])), spread)

    def _after_jumps(self, mixed: FloatArray, latest: FloatArray) -> FloatArray:
        """Expect more where demand has jumped, until that is all that the regression looks back at.

        `mixed` are logarithms of medians before consecutive slots, shape (n, NUM_HORIZONS);
        `latest` those of the demand of the slots before, shape (n,).
        """
        has_jumped = latest[1:] - mixed[:-1, 0] > _JUMP * self._spread[0]
        jumps = np.cumsum(np.concatenate([np.zeros(1 + NUM_RECENT, np.int64), has_jumped]))
        is_recent = jumps[NUM_RECENT:] > jumps[:-NUM_RECENT]
        missing = np.maximum(latest[:, None] - mixed, 0.0) * _STAYS ** np.arange(NUM_HORIZONS)
        return np.where(is_recent[:, None], mixed + missing, mixed)

    @functools.cached_property
    def _weights(self) -> FloatArray:
        return np.array(self.weights)

    @functools.cached_property
    def _spread(self) -> FloatArray:
        return np.array(self.spread)

    @functools.cached_property
    def _day(self) -> FloatArray:
        day = np.arange(self.slots_per_day) / self.slots_per_day
        return np.asarray(harmonics(day) @ np.array(self.profile))

    def _log(self, demand_per_s: FloatArray) -> FloatArray:
        least_per_s = _LEAST_SHARE * np.exp(self._day.min())
        return np.asarray(np.log(np.maximum(demand_per_s, least_per_s)))

    def _profile_at(self, slots: IntArray) -> FloatArray:
        return np.asarray(self._day[slots % self.slots_per_day])

    def _predict(self, inputs: FloatArray, slots: IntArray) -> FloatArray:
        deviation = np.einsum("thk,hk->th", inputs, self._weights)
        ahead = slots[:, None] + np.arange(NUM_HORIZONS)
        profile = self._profile_at(ahead.ravel()).reshape(ahead.shape)
        return np.asarray(np.exp(profile + deviation))


class StreamForecasts:
    """What a forecaster says in the course of a known stream, worked out for all slots at once."""

    def __init__(self, forecaster: Forecaster, stream: DemandStream) -> None:
        self._forecaster, self._stream = forecaster, stream

    def forecast(self, demand_per_s: Sequence[float], end_slot: int) -> FloatArray:
        """`Forecaster.forecast`."""
        place = end_slot - self._stream.start_slot
        # Before the first slot nothing is known; a policy is then shown that slot's own demand.
        return self._medians[place] if place else self._forecaster.forecast(demand_per_s, end_slot)

    def cases(self, demand_per_s: Sequence[float], end_slot: int) -> Cases:
        """`Forecaster.cases`."""
        place = end_slot - self._stream.start_slot - self._stream.first
        if place <= 0:
            return self._forecaster.cases(demand_per_s, end_slot)
        return Cases(self._cases.per_s[place], self._cases.spread[place])

    @functools.cached_property
    def _medians(self) -> FloatArray:
        return self._forecaster.forecast_all(self._stream)

    @functools.cached_property
    def _cases(self) -> Cases:
        return Cases(*map(np.ascontiguousarray, self._forecaster.cases_all(self._stream)))


def _one_case(outlook: Outlook) -> Cases:
    return Cases(outlook.median_per_s[..., :_HORIZON, None], outlook.spread[..., :_HORIZON])


def fit_forecaster(streams: list[DemandStream], slots_per_day: int) -> Forecaster:
    """Fit all horizons by ridge regression on training streams, and keep earlier days if better."""
    designs, logs = [], []
    for stream in streams:
        slots = stream.start_slot + np.arange(len(stream.per_s))
        designs.append(harmonics(slots / slots_per_day))
        logs.append(np.log(np.maximum(stream.per_s, _SMALLEST_PER_S)))
    profile = np.linalg.lstsq(np.vstack(designs), np.concatenate(logs), rcond=None)[0]
    deviations = [log - design @ profile for log, design in zip(logs, designs, strict=True)]
    inputs = [_inputs(d, np.arange(len(d)), slots_per_day) for d in deviations]
    weights, spread = [], []
    for h in range(NUM_HORIZONS):
        x = np.vstack([rows[: len(rows) - h, h] for rows in inputs])
        y = np.concatenate([d[h:] for d in deviations])
        solved = np.linalg.solve(x.T @ x + _RIDGE * np.eye(x.shape[1]), x.T @ y)
        weights.append(tuple(solved.tolist()))
        spread.append(float((y - x @ solved).std()))
    regression = Forecaster(
        slots_per_day=slots_per_day,
        profile=tuple(profile.tolist()),
        weights=tuple(weights),
        spread=tuple(spread),
    )
    tell = _earlier_days_tell(regression, streams[0])
    days = fit_earlier_days(streams[0], slots_per_day) if tell else None
    # A new one: a copy would take over what is cached.
    return Forecaster(**dict(regression) | {"earlier_days": days})


def _earlier_days_tell(regression: Forecaster, stream: DemandStream) -> bool:
    """Whether the first days of a stream forecast its last ones better than a regression does."""
    day, num = regression.slots_per_day, len(stream.per_s)
    cut = num - round(num // day * _JUDGED_SHARE) * day
    earlier = fit_earlier_days(DemandStream(stream.per_s[:cut], 0, stream.start_slot), day)
    if earlier is None or cut == num:
        return False
    judged = DemandStream(stream.per_s[cut:], 0, (stream.start_slot + cut) % day)
    at = np.arange(0, num - cut - NUM_AHEAD, 1 + (num - cut) // _JUDGED_SLOTS)
    truth = np.log(np.maximum(judged.per_s, _SMALLEST_PER_S)[at[:, None] + np.arange(NUM_AHEAD)])
    begin = max(0, cut - history_slots(day))
    recent = DemandStream(stream.per_s[begin:], 0, (stream.start_slot + begin) % day)
    outlook = regression.outlook_all(recent)
    median, spread = (values[cut - begin + at, :NUM_AHEAD, None] for values in outlook)
    lognormal = np.log(median) + spread * [NormalDist().inv_cdf(level) for level in LEVELS]
    cases = np.log(earlier.cases_all(judged, at))
    return _pinball(cases, truth) < _pinball(lognormal, truth)


def _pinball(quantiles: FloatArray, truth: FloatArray) -> float:
    """Mean pinball loss of quantiles at `LEVELS`, shape (..., NUM_CASES)."""
    above = truth[..., None] - quantiles
    return float(np.maximum(LEVELS * above, (LEVELS - 1.0) * above).mean())


def history_slots(slots_per_day: int) -> int:
    """Slots of demand that an outlook looks back at: two days, and those that it is judged by."""
    return 2 * slots_per_day + _LOOKED_AT_BEFORE


def _inputs(deviation: FloatArray, at: IntArray, slots_per_day: int) -> FloatArray:
    """Inputs before the slots `at`, shape (len(at), NUM_HORIZONS, NUM_RECENT + 3)."""
    # Zeros stand for the two days and a bit before the first value.
    pad = 2 * slots_per_day + _AROUND
    padded = np.concatenate([np.zeros(pad), deviation])
    summed = np.concatenate([[0.0], np.cumsum(padded)])
    here = at + pad
    inputs = np.ones((len(at), NUM_HORIZONS, NUM_RECENT + 3))
    latest = here[:, None] - 1 - np.arange(NUM_RECENT)
    inputs[:, :, :NUM_RECENT] = padded[latest][:, None, :]
    for day in (1, 2):
        centre = here[:, None] + np.arange(NUM_HORIZONS) - day * slots_per_day
        low = np.maximum(centre - _AROUND, 0)
        high = np.minimum(centre + _AROUND + 1, here[:, None])
        count = np.maximum(high - low, 1)
        inputs[:, :, NUM_RECENT + day - 1] = (summed[high] - summed[np.minimum(low, high)]) / count
    return inputs


@functools.cache
def scenario_forecaster(scenario: AllocationScenario) -> Forecaster:
    """Fit the forecaster to the training part of a scenario; equal scenarios share one."""
    source = demand_source(scenario)
    streams = [source.train(seed) for seed in range(_NUM_DRAWS)]
    return fit_forecaster(streams, scenario.slots_per_day)
