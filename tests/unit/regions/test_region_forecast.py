import numpy as np
import pytest
from unit.region_builders import a_scenario, a_stream

from tokenyard.regions.forecast import (
    NoisyOracle,
    SeasonalForecaster,
    fit_seasonal,
    prediction_accuracy,
    sd_for_accuracy,
)

SCENARIO = a_scenario(num_slots=120)


def test_the_seasonal_forecast_uses_nothing_of_the_slot_that_it_forecasts():
    forecaster = fit_seasonal(SCENARIO, num_days=4)
    stream = a_stream(SCENARIO)
    before = forecaster.forecast_all(stream)
    stream.counts[50:] *= 7
    after = forecaster.forecast_all(stream)
    assert np.array_equal(before[:51], after[:51])
    assert not np.array_equal(before[51], after[51])


def test_the_seasonal_forecast_is_better_than_the_last_slot_and_its_quantile_is_higher():
    stream = a_stream(SCENARIO)
    forecaster = fit_seasonal(SCENARIO, num_days=4)
    forecast = forecaster.forecast_all(stream)[1:, 0]
    naive = stream.counts[:-1].astype(float)
    actual = stream.counts[1:]
    assert np.square(forecast - actual).mean() < np.square(naive - actual).mean()
    high = fit_seasonal(SCENARIO, num_days=4, quantile=0.9).forecast_all(stream)[1:, 0]
    assert 0.8 < (actual <= high).mean() < 0.98


@pytest.mark.parametrize("slot_s", [300.0, 3600.0, 5400.0, 14400.0])
def test_the_profile_is_of_a_day_however_long_slots_are(slot_s):
    scenario = a_scenario(slot_s=slot_s, num_slots=10)
    forecaster, usual = fit_seasonal(scenario), fit_seasonal(SCENARIO)
    assert len(forecaster.profile) == scenario.slots_per_day
    # Half an hour of smoothing leaves the waves of a day their height.
    height, of_usual = (
        np.ptp(one.profile, axis=0) / one.profile.mean(axis=0) for one in (forecaster, usual)
    )
    assert (height > 0.5 * of_usual).all()
    assert np.isfinite(forecaster.forecast_all(a_stream(scenario))).all()


def test_a_flat_profile_without_news_is_forecast_as_it_is():
    stream = a_stream(SCENARIO)
    stream.counts[:] = 10
    flat = SeasonalForecaster(np.full((1920, 4), 10.0), 0.5, 0.9, 3)
    assert flat.forecast_all(stream) == pytest.approx(np.full((120, 3, 4), 10.0))


@pytest.mark.parametrize("wanted", [0.3, 0.7])
def test_injected_error_reaches_the_accuracy_that_is_asked_for(wanted):
    stream = a_stream(SCENARIO)
    sd = sd_for_accuracy(wanted, [stream])
    forecasts = NoisyOracle(sd, 1).forecast_all(stream)[:, 0]
    assert prediction_accuracy(forecasts, stream.counts) == pytest.approx(wanted, abs=0.01)
    with pytest.raises(ValueError, match="must be in"):
        sd_for_accuracy(0.0, [stream])
