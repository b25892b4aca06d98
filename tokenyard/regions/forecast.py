"""How many tasks will come: a seasonal forecaster, and one that is wrong as much as one likes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tokenyard.regions.demand import RegionStream, sample_rates
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.servers import make_cluster
from tokenyard.statistics.recursion import autoregression
from tokenyard.types import FloatArray, IntArray

_SMALL = 1.0
"""The small number of Eq 12, tasks."""
NUM_TRAINING_DAYS = 20
_SMOOTHING_S = 900.0
"""Profiles are means over what is so near or nearer: half an hour."""


class DemandForecaster(Protocol):
    """Forecasts the tasks of the slots to come."""

    def forecast_all(self, stream: RegionStream) -> FloatArray:
        """Forecast from every slot of an episode, each by what was known when it began.

        Returns:
            Tasks, shape (slots, slots ahead, regions); the first ahead is the slot itself.
        """


@dataclass(frozen=True, eq=False)
class SeasonalForecaster:
    """What is usual at the time of the day, times how unusual the last slots were.

    The factor is a mean of the last slots in which later ones count more; it fades with the slots
    ahead, as bursts end.
    """

    profile: FloatArray
    """Usual tasks per slot, shape (slots of a day, regions)."""
    memory: float
    """Share of the weight that a slot keeps when it is one older."""
    fading: float
    """Share of the logarithm of the factor that is left one slot further ahead."""
    num_ahead: int
    margin: float = 1.0
    """What forecasts are multiplied by: the quantile of actual over expected that is wanted."""

    def forecast_all(self, stream: RegionStream) -> FloatArray:
        """See `DemandForecaster`."""
        day = len(self.profile)
        slots = stream.start_slot + np.arange(stream.num_slots + self.num_ahead)
        usual = self.profile[slots % day]
        seen = _decaying_sums(np.asarray(stream.counts, np.float64), self.memory)
        expected = _decaying_sums(usual[: stream.num_slots], self.memory)
        # Two slots' worth of the usual stand in for a past that is not there yet.
        prior = 2.0 * usual[: stream.num_slots]
        unusual = np.log((seen + prior) / (expected + prior))
        ahead = np.arange(self.num_ahead)
        index = np.arange(stream.num_slots)[:, None] + ahead
        factor = np.exp(unusual[:, None, :] * self.fading ** ahead[:, None])
        return np.asarray(self.margin * usual[index] * factor)


def _decaying_sums(values: FloatArray, memory: float) -> FloatArray:
    """Row t is the sum over earlier rows s of values[s] * memory^(t - 1 - s)."""
    before = np.vstack([np.zeros_like(values[:1]), values[:-1]])
    return autoregression(before, memory)


@dataclass(frozen=True, eq=False)
class NoisyOracle:
    """The truth times exp(N(0, sd)), independent over slots, regions and slots ahead."""

    sd: float
    num_ahead: int
    seed: int = 0

    def forecast_all(self, stream: RegionStream) -> FloatArray:
        """See `DemandForecaster`; beyond the end the last slot is taken again."""
        index = np.arange(stream.num_slots)[:, None] + np.arange(self.num_ahead)
        truth = stream.counts[np.minimum(index, stream.num_slots - 1)].astype(np.float64)
        noise = np.random.default_rng([self.seed, stream.start_slot]).normal(0, 1, truth.shape)
        return np.asarray(truth * np.exp(self.sd * noise))


def prediction_accuracy(forecast: FloatArray, actual: FloatArray | IntArray) -> float:
    """exp(-mean |forecast - actual| / (actual + 1)): Eq 12, with the mean over regions too."""
    error = np.abs(forecast - actual) / (actual + _SMALL)
    return float(np.exp(-error.mean()))


def sd_for_accuracy(wanted: float, streams: Sequence[RegionStream]) -> float:
    """Standard deviation of `NoisyOracle` that gives a prediction accuracy, by bisection.

    Raises:
        ValueError: Not between 0 and 1.
    """
    if not 0 < wanted <= 1:
        raise ValueError(f"prediction accuracy {wanted} must be in (0, 1]")
    low, high = 0.0, 6.0
    for _ in range(25):
        middle = (low + high) / 2
        got = np.mean(
            [
                prediction_accuracy(
                    NoisyOracle(middle, 1).forecast_all(stream)[:, 0], stream.counts
                )
                for stream in streams
            ]
        )
        low, high = (middle, high) if got > wanted else (low, middle)
    return (low + high) / 2


def training_counts(scenario: RegionScenario, seed: int, num_days: int) -> FloatArray:
    """Counts of whole days that no test stream holds, shape (days, slots of a day, regions)."""
    cluster = make_cluster(scenario)
    rng = np.random.default_rng([seed, 9])
    days = [
        rng.poisson(sample_rates(scenario, cluster, 0, scenario.slots_per_day, rng))
        for _ in range(num_days)
    ]
    return np.asarray(days, dtype=np.float64)


def fit_seasonal(
    scenario: RegionScenario,
    seed: int = 0,
    quantile: float | None = None,
    num_days: int = NUM_TRAINING_DAYS,
) -> SeasonalForecaster:
    """Fit profile, memory and fading to training days.

    A forecast is the given quantile of the count one slot ahead; None: its mean.
    """
    days = training_counts(scenario, seed, num_days)
    mean = days.mean(axis=0)
    half = round(_SMOOTHING_S / scenario.slot_s)
    wrapped = np.pad(mean, ((half, half), (0, 0)), mode="wrap")
    # A convolution would round differently on other processors, and plans depend on every digit.
    profile = sliding_window_view(wrapped, 2 * half + 1, axis=0).mean(axis=-1)
    streams = [_as_stream(day) for day in days[: max(2, num_days // 6)]]
    num_ahead = scenario.forecast_slots

    def error(memory: float, fading: float) -> float:
        model = SeasonalForecaster(profile, memory, fading, num_ahead)
        return float(np.mean([_forecast_error(model.forecast_all(s), s) for s in streams]))

    grid = [(m, f) for m in (0.4, 0.6, 0.8) for f in (0.85, 0.92, 1.0)]
    memory, fading = min(grid, key=lambda pair: error(*pair))
    fitted = SeasonalForecaster(profile, memory, fading, num_ahead)
    if quantile is None:
        return fitted
    ratios = np.concatenate(
        [(stream.counts / fitted.forecast_all(stream)[:, 0]).ravel() for stream in streams]
    )
    margin = float(np.quantile(ratios, quantile))
    return SeasonalForecaster(profile, memory, fading, num_ahead, margin)


def _as_stream(day: FloatArray) -> RegionStream:
    none = np.zeros((0, 0))
    return RegionStream(none, none.astype(np.int64), day.astype(np.int64), none, 0)


def _forecast_error(forecast: FloatArray, stream: RegionStream) -> float:
    """Mean squared error over all slots ahead, in units of a Poisson variance."""
    slots = len(forecast)
    ahead = min(forecast.shape[1], slots - 1)
    last = slots - ahead
    index = np.arange(last)[:, None] + np.arange(ahead)
    actual = stream.counts[index]
    return float(((forecast[:last, :ahead] - actual) ** 2 / (actual.mean(axis=(0, 1)) + 1)).mean())
