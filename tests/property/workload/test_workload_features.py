"""Request features: the same in training and in serving, and equal to pandas' definitions."""

from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenyard.workload.features import (
    FEATURE_NAMES,
    NUM_REQUEST_FEATURES,
    FeatureTracker,
    RobustScaler,
    request_features,
)

COLUMN = {name: i for i, name in enumerate(FEATURE_NAMES)}
starts = st.none() | st.datetimes(
    datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)
)


@st.composite
def streams(draw):
    """Arrival times, contexts and predicted totals."""
    size = draw(st.integers(1, 45))
    gap_s = draw(st.sampled_from([0.01, 100.0, 5e5]))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    contexts = rng.integers(0, draw(st.sampled_from([1, 100, 10**6])), size) + 1
    return np.cumsum(rng.exponential(gap_s, size)), contexts, contexts + rng.exponential(30, size)


@given(streams(), starts)
def test_one_by_one_and_all_at_once_are_the_same_numbers(stream, started_at):
    tracker = FeatureTracker(started_at)
    rows = [
        tracker.push(arrival_s, int(context), total)
        for arrival_s, context, total in zip(*stream, strict=True)
    ]

    assert rows[0].shape == (NUM_REQUEST_FEATURES,)
    np.testing.assert_array_equal(np.float32(rows), request_features(*stream, started_at))


@given(streams(), starts.filter(bool))
def test_the_calendar_is_that_of_pandas(stream, started_at):
    features = request_features(*stream, started_at)

    # Both sides in double precision seconds, as the features are defined on.
    clock = pd.to_datetime(pd.Series(started_at.timestamp() + stream[0]), unit="s", utc=True).dt
    for name, expected in {
        "hour": clock.hour,
        "day_of_week": clock.day_of_week,
        "day_of_month": clock.day,
        "iso_week": clock.isocalendar().week,
    }.items():
        np.testing.assert_array_equal(features[:, COLUMN[name]], expected.to_numpy(float))


@given(streams())
def test_rolling_and_lag_features_are_those_of_pandas_before_the_current_request(stream):
    features = request_features(*stream)

    past = pd.Series(stream[2]).shift(1)
    for k in (5, 10, 20):
        window = past.rolling(k, min_periods=1)
        mean = window.mean().fillna(0)
        deviation = window.apply(np.std, raw=False).fillna(0)
        np.testing.assert_allclose(features[:, COLUMN[f"mean{k}"]], mean, rtol=1e-5)
        np.testing.assert_allclose(
            features[:, COLUMN[f"std{k}"]], deviation, rtol=1e-4, atol=1e-6 * mean.max()
        )
    assert features[1:, COLUMN["lag1_context"]].tolist() == stream[1][:-1].tolist()
    np.testing.assert_allclose(features[:, COLUMN["lag1_total"]], past.fillna(0), rtol=1e-6)


@given(streams(), st.data())
def test_later_requests_never_change_earlier_features(stream, data):
    cut = data.draw(st.integers(1, len(stream[0])))

    np.testing.assert_array_equal(
        request_features(*stream)[:cut], request_features(*(column[:cut] for column in stream))
    )


def test_a_trace_without_calendar_has_zero_calendar_features():
    features = request_features(np.array([0.0, 1e6]), np.array([1, 2]), np.array([1.0, 2.0]))

    assert not features[:, :4].any()


def test_a_start_without_time_zone_is_refused():
    with pytest.raises(ValueError, match="time zone"):
        FeatureTracker(datetime(2024, 1, 1))


@given(st.integers(0, 99))
def test_scaling_centres_half_of_the_data_within_one_unit(seed):
    rng = np.random.default_rng(seed)
    features = rng.lognormal(3, 2, (400, 3))
    features[:, 2] = 7.0
    scaler = RobustScaler.fit(features)

    scaled = scaler.transform(features)
    quartiles = np.quantile(scaled, (0.25, 0.5, 0.75), axis=0)
    np.testing.assert_allclose(quartiles[1], 0, atol=1e-12)
    np.testing.assert_allclose((quartiles[2] - quartiles[0])[:2], 1)
    assert not scaled[:, 2].any()
