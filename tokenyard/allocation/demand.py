"""Requests per second, slot by slot: from the CPU trace, from recorded LLM requests, or generated.

The trace of CPU use (Azure, 30 days in slots of 5 minutes, CC-BY 4.0) is a fleet's aggregate: only
its shape is used, min-max normalised. Days 1 to 20 are for training, 21 to 30 for tests. Policies
learn from days 1 to 14, and the six that follow choose among them. The generator is fitted to the
training days and ships as parameters: the logarithm of demand is a profile of the day and of the
hour (jobs start on the hour), a level per day, and a second-order autoregression.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from tokenyard.allocation.plans import plan_table
from tokenyard.allocation.recurring import RECURRING_KINDS, recurring_demand
from tokenyard.allocation.scenario import AllocationScenario, Demand
from tokenyard.config import FrozenModel
from tokenyard.statistics.recursion import autoregression
from tokenyard.types import FloatArray
from tokenyard.workload.paths import data_folders, find_trace

if TYPE_CHECKING:
    import pandas as pd

VM_CPU_FILE = "azure_vm_cpu.csv"
TRACE_SLOTS_PER_DAY = 288
TRAIN_DAYS, TEST_DAYS, HISTORY_DAYS = 20, 10, 2
CYCLES_PER_DAY = (*range(1, 7), *range(24, 145, 24))
"""Frequencies of the profile: six harmonics of the day, and six of the hour."""
_PARAMETERS = "demand_generator.json"
_PROVENANCE = (
    "Azure VM CPU trace (2017, CC-BY 4.0), average over the fleet, min-max normalised, days 1-20"
)
_MOST_OF_TRACE = 1.2
"""Generated values above this multiple of the trace's highest are cut there."""

_LEARNED_SHARE = 0.7
"""Of a trace's training part, from its beginning on."""
_TRAINING, _EVALUATION = 0, 2
"""Parts of the seeds of noise, so that no seed of one gives the noise of another."""


class DemandGenerator(FrozenModel):
    """Normalised demand, in the units of the min-max normalised trace."""

    provenance: str
    floor: Annotated[float, Field(gt=0)]
    """Added before the logarithm is taken, so that the lowest value has one."""
    profile: Annotated[tuple[float, ...], Field(min_length=1)]
    """Weights of `harmonics` in the logarithm."""
    day_std: Annotated[float, Field(ge=0)]
    """Standard deviation of a day's level."""
    autoregression: tuple[float, float]
    """Coefficients of the last and the last but one residual."""
    innovation_std: Annotated[float, Field(ge=0)]

    def sample(self, num_slots: int, rng: np.random.Generator, day_slots: int) -> FloatArray:
        """Draw demand from midnight on, shape (num_slots,), values in [0, 1.2]."""
        num_days = -(-num_slots // day_slots) + 1
        levels = rng.normal(0.0, self.day_std, num_days)
        # The level changes gradually over the day instead of jumping at midnight.
        day = np.arange(num_slots) / day_slots
        level = np.interp(day, np.arange(num_days), levels)
        lag_1, lag_2 = self.autoregression
        noise = rng.normal(0.0, self.innovation_std, num_slots + day_slots)
        residual = autoregression(noise, lag_1, lag_2)
        log = harmonics(day) @ np.array(self.profile) + level + residual[day_slots:]
        return np.asarray(np.clip(np.exp(log) - self.floor, 0.0, _MOST_OF_TRACE))


def harmonics(day: FloatArray) -> FloatArray:
    """Return a constant, and cosines and sines of `CYCLES_PER_DAY` at days; shape (n, 25)."""
    angle = 2 * np.pi * np.outer(day, CYCLES_PER_DAY)
    return np.hstack([np.ones((len(day), 1)), np.cos(angle), np.sin(angle)])


def fit_generator(train: FloatArray, provenance: str, floor: float = 0.05) -> DemandGenerator:
    """Fit the generator to whole days of the normalised trace, shape (days x 288,)."""
    log = np.log(train + floor)
    design = harmonics(np.arange(len(log)) / TRACE_SLOTS_PER_DAY)
    profile = np.linalg.lstsq(design, log, rcond=None)[0]
    residual = log - design @ profile
    levels = residual.reshape(-1, TRACE_SLOTS_PER_DAY).mean(axis=1)
    rest = residual - np.repeat(levels, TRACE_SLOTS_PER_DAY)
    past = np.column_stack([rest[1:-1], rest[:-2]])
    coefficients = np.linalg.lstsq(past, rest[2:], rcond=None)[0]
    return DemandGenerator(
        provenance=provenance,
        floor=floor,
        profile=tuple(profile.tolist()),
        day_std=float(levels.std(ddof=1)),
        autoregression=(float(coefficients[0]), float(coefficients[1])),
        innovation_std=float((rest[2:] - past @ coefficients).std()),
    )


def fit_shipped_generator() -> DemandGenerator:
    """Fit the generator that ships to the training days of the trace of CPU use.

    Raises:
        ValueError: The trace's file was not found.
    """
    frame = read_vm_cpu()
    if frame is None:
        raise ValueError(f"no file {VM_CPU_FILE} was found (TOKENYARD_DATA)")
    days = normalised(frame["avg"].to_numpy())[: TRAIN_DAYS * TRACE_SLOTS_PER_DAY]
    return fit_generator(days, _PROVENANCE)


@functools.cache
def shipped_generator() -> DemandGenerator:
    """Return the generator that ships with the package."""
    text = (resources.files("tokenyard.allocation") / _PARAMETERS).read_text(encoding="utf-8")
    return DemandGenerator.model_validate_json(text)


@functools.cache
def read_vm_cpu() -> pd.DataFrame | None:
    """Read the trace's columns `min`, `max` and `avg`; None where no folder has the file.

    Raises:
        ValueError: The file lacks a column, or a value is no number.
    """
    paths = (folder / VM_CPU_FILE for folder in data_folders())
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    import pandas as pd

    frame = pd.read_csv(path)
    missing = {"min cpu", "max cpu", "avg cpu"} - set(frame.columns)
    if missing:
        raise ValueError(f"{path}: columns {sorted(missing)} are missing")
    values = frame[["min cpu", "max cpu", "avg cpu"]].astype(float)
    if not np.isfinite(values.to_numpy()).all():
        raise ValueError(f"{path}: a value is no number")
    return values.set_axis(["min", "max", "avg"], axis=1)


def normalised(values: FloatArray) -> FloatArray:
    """Min-max normalise, shape (n,)."""
    return np.asarray((values - values.min()) / (values.max() - values.min()))


@dataclass(frozen=True, eq=False)
class DemandStream:
    """Demand of consecutive slots, those before `first` being history that is not decided on."""

    per_s: FloatArray
    """Requests per second, shape (history + slots,)."""
    first: int
    """First slot that is decided."""
    start_slot: int
    """Slot of the day at `per_s[0]`."""

    @property
    def num_slots(self) -> int:
        """Slots that are decided."""
        return len(self.per_s) - self.first


class DemandSource:
    """Where the demand of a scenario comes from, for training and for tests."""

    def __init__(self, demand: Demand, pool_per_s: float, slot_s: float) -> None:
        """Find the trace; `pool_per_s` is what the pool can serve within the SLO.

        Raises:
            ValueError: A recorded hour is asked for and its file is not there.
        """
        self._demand, self._pool_per_s = demand, pool_per_s
        self.slots_per_day = max(1, round(86_400 / slot_s))
        self._trace = self._find(slot_s)

    def _find(self, slot_s: float) -> FloatArray | None:
        name = self._demand.source
        if name == "generator" or name in RECURRING_KINDS:
            return None
        if name == "vm_cpu":
            frame = read_vm_cpu()
            if frame is None or slot_s != 86_400 / TRACE_SLOTS_PER_DAY:
                return None
            return normalised(frame["avg"].to_numpy())
        path = find_trace(name)
        if path is None:
            raise ValueError(f"no file of trace {name!r} was found (TOKENYARD_DATA)")
        from tokenyard.workload.readers import read_trace

        trace, _ = read_trace(path, "skip")
        counts = np.bincount((trace.arrival_s // slot_s).astype(int)).astype(float)
        if len(counts) < 10:
            raise ValueError(f"trace {name!r} has {len(counts)} slots of {slot_s} s; shorten them")
        return normalised(counts[:-1])

    @property
    def origin(self) -> str:
        """Where the demand comes from, in words."""
        if self._demand.source in RECURRING_KINDS:
            return f"days of kind {self._demand.source!r}, all drawn"
        if self._trace is None:
            return "generator fitted to days 1-20 of the Azure VM CPU trace"
        if self._demand.source == "vm_cpu":
            return "Azure VM CPU trace: training on days 1-20, tests on days 21-30"
        return f"requests of {self._demand.source}: training on the first two thirds"

    def _split(self) -> int:
        assert self._trace is not None
        if self._demand.source == "vm_cpu":
            return TRAIN_DAYS * TRACE_SLOTS_PER_DAY
        return len(self._trace) * 2 // 3

    def _learned(self) -> int:
        """End of what policies learn from; the rest of the training part chooses among them."""
        return int(self._split() * _LEARNED_SHARE)

    def train(
        self, seed: int = 0, num_days: int = TRAIN_DAYS, is_learned: bool = False
    ) -> DemandStream:
        """Demand of the training part with fresh noise.

        `is_learned`: of a trace only what policies learn from, without what chooses among them.
        """
        rng = np.random.default_rng([seed, _TRAINING])
        if self._trace is not None:
            end = self._learned() if is_learned else self._split()
            return DemandStream(self._scaled(self._trace[:end], rng), 0, 0)
        return DemandStream(self._scaled(self._generated(num_days, rng), rng), 0, 0)

    def validation(self, seed: int) -> DemandStream:
        """Demand of the training part that no policy learns from, after two days of history."""
        if self._trace is None:
            return self.train(seed)
        rng = np.random.default_rng([seed, _TRAINING])
        return self._part(self._learned(), self._split(), rng)

    def test(self, seed: int = 0, num_days: int | None = None) -> DemandStream:
        """Demand of the test part after two days of history; of recurring kinds 30 days.

        Seeds differ in the noise; of the generator in everything.
        """
        rng = np.random.default_rng([seed, _EVALUATION])
        if self._trace is None:
            usual = 3 * TEST_DAYS if self._demand.source in RECURRING_KINDS else TEST_DAYS
            values = self._generated(HISTORY_DAYS + (num_days or usual), rng)
            return DemandStream(self._scaled(values, rng), HISTORY_DAYS * self.slots_per_day, 0)
        return self._part(self._split(), len(self._trace), rng)

    def episode(self, num_slots: int, rng: np.random.Generator) -> DemandStream:
        """A random stretch of the learned part with fresh noise, history before it."""
        history = HISTORY_DAYS * self.slots_per_day
        length = history + num_slots
        if self._trace is None:
            start = int(rng.integers(self.slots_per_day))
            values = self._generated(-(-(start + length) // self.slots_per_day), rng)
            return DemandStream(self._scaled(values[start : start + length], rng), history, start)
        start = int(rng.integers(max(1, self._learned() - length)))
        values = self._trace[start : min(start + length, self._learned())]
        # A recorded hour may be shorter than an episode: it comes again.
        return DemandStream(
            self._scaled(np.resize(values, length), rng), history, start % self.slots_per_day
        )

    def _part(self, first: int, end: int, rng: np.random.Generator) -> DemandStream:
        """Slots of the trace with fresh noise, after two days of history."""
        assert self._trace is not None
        start = max(0, first - HISTORY_DAYS * self.slots_per_day)
        values = self._scaled(self._trace[start:end], rng)
        return DemandStream(values, first - start, start % self.slots_per_day)

    def _generated(self, num_days: int, rng: np.random.Generator) -> FloatArray:
        day = self.slots_per_day
        if self._demand.source in RECURRING_KINDS:
            return recurring_demand(self._demand.source, num_days, day, rng)
        return shipped_generator().sample(num_days * day, rng, day)

    def _scaled(self, values: FloatArray, rng: np.random.Generator) -> FloatArray:
        low, high = self._demand.low, self._demand.high
        noise = np.exp(rng.normal(0.0, self._demand.noise, len(values)))
        return np.asarray(self._pool_per_s * (low + (high - low) * values) * noise)


def demand_source(scenario: AllocationScenario) -> DemandSource:
    """Return the demand of a scenario, scaled to its pool.

    Raises:
        ValueError: The scenario names a recorded hour whose file is not there.
    """
    pool_per_s = plan_table(scenario).pool_goodput_capacity_per_s
    return DemandSource(scenario.demand, pool_per_s, scenario.slot_s)
