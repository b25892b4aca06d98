"""The optional rhythm of day and week moves arrivals and keeps the weekly mean."""

from datetime import UTC, datetime

import numpy as np
import pytest
from pydantic import ValidationError

from tokenyard.workload.diurnal import Diurnal

HOUR_S = 3600.0
WEEK_S = 168 * HOUR_S


def evenly_spaced(num_weeks):
    return np.linspace(0, num_weeks * WEEK_S, num_weeks * 16_800, endpoint=False)


def hourly_counts(arrival_s):
    return np.bincount((arrival_s // HOUR_S).astype(int))


def test_the_rate_peaks_at_the_peak_hour_of_every_working_day():
    counts = hourly_counts(Diurnal(peak_hour=14.5, day_amplitude=0.5).warp(evenly_spaced(1)))

    by_day = counts.reshape(7, 24)
    assert (by_day.argmax(axis=1) == 14).all()
    assert by_day[0].max() / by_day[0].min() == pytest.approx(3, rel=0.05)


def test_weekend_days_are_scaled_against_working_days():
    counts = hourly_counts(Diurnal(weekend_factor=0.25).warp(evenly_spaced(1)))

    per_day = counts.reshape(7, 24).sum(axis=1)
    assert per_day[5:].mean() / per_day[:5].mean() == pytest.approx(0.25, rel=0.02)


def test_the_calendar_of_the_first_second_sets_the_phase():
    saturday = datetime(2024, 1, 6, tzinfo=UTC)
    rhythm = Diurnal(day_amplitude=0, weekend_factor=0.5, started_at=saturday)

    per_day = hourly_counts(rhythm.warp(evenly_spaced(1))).reshape(7, 24).sum(axis=1)
    assert (per_day[:2] < 0.6 * per_day[2:].mean()).all()


def test_whole_weeks_of_arrivals_take_whole_weeks():
    warped_s = Diurnal(started_at=datetime(2024, 2, 29, 17, 45, 12, tzinfo=UTC)).warp(
        np.array([0, WEEK_S, 3 * WEEK_S])
    )

    np.testing.assert_allclose(warped_s, [0, WEEK_S, 3 * WEEK_S], atol=1e-6)


def test_no_amplitude_and_no_weekend_change_nothing():
    arrival_s = evenly_spaced(2)

    flat = Diurnal(day_amplitude=0, weekend_factor=1)
    np.testing.assert_allclose(flat.warp(arrival_s), arrival_s, atol=1e-6)


def test_a_start_without_time_zone_is_refused():
    with pytest.raises(ValidationError, match="timezone"):
        Diurnal(started_at=datetime(2024, 1, 1))
