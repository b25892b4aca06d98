"""The statistics of the results page, against cases with a known answer."""

import numpy as np
import pytest
from scipy.stats import ks_2samp

from tokenyard.workload.comparison import (
    count_autocorrelation,
    describe,
    index_of_dispersion,
    ks_distance,
)
from tokenyard.workload.trace import Trace


def test_the_distance_is_that_of_scipy_with_and_without_ties():
    rng = np.random.default_rng(0)
    for a, b in (
        (rng.normal(size=300), rng.normal(0.3, 1, 200)),
        (rng.integers(0, 5, 300), rng.integers(0, 6, 100)),
    ):
        assert ks_distance(a, b) == pytest.approx(ks_2samp(a, b).statistic)


def test_a_clock_has_no_dispersion_and_a_poisson_process_has_one():
    ticks = np.arange(10_000) / 8  # eighths are exact
    poisson = np.cumsum(np.random.default_rng(0).exponential(0.1, 100_000))

    assert index_of_dispersion(ticks, 1.0) == 0
    assert index_of_dispersion(poisson, 1.0) == pytest.approx(1, abs=0.05)


def test_counts_that_alternate_are_anticorrelated_at_lag_one_and_correlated_at_lag_two():
    # Two arrivals in even seconds, one in odd ones.
    arrival_s = np.sort(np.concatenate((np.arange(100) + 0.5, np.arange(0, 100, 2) + 0.6)))

    assert count_autocorrelation(arrival_s, 1.0, 1) == pytest.approx(-1)
    assert count_autocorrelation(arrival_s, 1.0, 2) == pytest.approx(1)


def test_too_few_windows_give_no_number():
    assert np.isnan(index_of_dispersion(np.array([0.0, 0.5]), 1.0))
    assert np.isnan(count_autocorrelation(np.arange(5.0), 1.0, 60))


def test_a_trace_has_no_distance_to_itself():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 99, (2, 300))
    trace = Trace(np.cumsum(rng.exponential(1, 300)), lengths[0], lengths[1])

    described = describe(trace, trace)
    assert [value for key, value in described.items() if key.startswith("ks")] == [0, 0, 0, 0]
    assert described["rate_per_s"] == pytest.approx(1, rel=0.2)
