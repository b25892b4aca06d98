"""Optional rhythm of day and week: invented, since the published hours show none."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import numpy as np
from pydantic import AwareDatetime, Field

from tokenyard.config import FrozenModel
from tokenyard.types import FloatArray

HOUR_S = 3600.0
HOURS_PER_WEEK = 168


class Diurnal(FrozenModel):
    """How the arrival rate moves over the hours of a week, around an unchanged weekly mean.

    Within a day the rate follows a cosine; Saturday and Sunday are scaled by `weekend_factor`.
    The rate is constant within each hour.
    """

    day_amplitude: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Height of the daily wave as a fraction of the day's mean rate."""
    peak_hour: Annotated[float, Field(ge=0, lt=24)] = 14.0
    """Hour of the day, in the time zone of `started_at`, at which the rate is highest."""
    weekend_factor: Annotated[float, Field(gt=0)] = 0.6
    """Rate of a weekend day over the rate of a working day."""
    started_at: AwareDatetime = datetime(2024, 1, 1, tzinfo=UTC)
    """Calendar time of second 0 of the trace; the default is midnight on a Monday."""

    def hourly_factors(self) -> FloatArray:
        """Return the rate over the mean rate from Monday 0:00 on; mean 1, shape (168,)."""
        hours = np.arange(HOURS_PER_WEEK)
        wave = np.cos(2 * np.pi * (hours % 24 + 0.5 - self.peak_hour) / 24)
        weekend = np.where(hours // 24 >= 5, self.weekend_factor, 1.0)
        factors: FloatArray = (1 + self.day_amplitude * wave) * weekend
        factors /= factors.mean()
        return factors

    def warp(self, arrival_s: FloatArray) -> FloatArray:
        """Move arrivals of constant long-run rate to where the modulated rate puts them.

        The time change inverts the integral of `hourly_factors` from `started_at` on (Cinlar
        1975, theorem 4.7.4), so bursts keep their shape and only their clock runs unevenly.
        """
        start = self.started_at
        start_s = ((start.weekday() * 24 + start.hour) * 60 + start.minute) * 60.0 + start.second
        week_s = HOURS_PER_WEEK * HOUR_S
        clock_s = np.arange(HOURS_PER_WEEK + 1) * HOUR_S
        expected_s = np.concatenate(([0.0], np.cumsum(self.hourly_factors() * HOUR_S)))
        # One week of clock holds one week of expected time, so whole weeks pass unchanged.
        target_s = np.interp(start_s, clock_s, expected_s) + arrival_s
        weeks, rest_s = np.divmod(target_s, week_s)
        warped_s: FloatArray = weeks * week_s + np.interp(rest_s, expected_s, clock_s) - start_s
        return warped_s
