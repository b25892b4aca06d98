from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tokenyard import metrics

NAN = math.nan
responses = arrays(np.float64, st.integers(1, 300), elements=st.floats(0.001, 1e4))


def test_violations_and_goodput_count_dropped_requests_as_offered():
    response_s = np.array([1.0, 2.0, 2.1, NAN])
    assert metrics.slo_violation_fraction(metrics.missed(response_s, 2.0)) == 0.5
    assert metrics.dropped_fraction(response_s) == 0.25
    assert (
        metrics.goodput_per_s(np.array([0.0, 1.0, 2.0, 4.0]), metrics.missed(response_s, 2.0))
        == 2 / 4
    )


def test_times_are_of_completed_requests():
    response_s = np.array([1.0, NAN, 3.0])
    assert metrics.mean_response_s(response_s) == 2.0
    assert metrics.percentile_response_s(response_s, 50) == 2.0
    assert metrics.cvar99_response_s(response_s) == 3.0


def test_cvar_is_the_mean_of_the_slowest_hundredth():
    assert metrics.cvar99_response_s(np.arange(1.0, 201.0)) == 199.5


def test_without_data_there_is_no_number():
    none, dropped = np.array([]), np.array([NAN, NAN])
    for response_s in (none, dropped):
        assert math.isnan(metrics.mean_response_s(response_s))
        assert math.isnan(metrics.percentile_response_s(response_s, 99))
        assert math.isnan(metrics.cvar99_response_s(response_s))
    assert math.isnan(metrics.slo_violation_fraction(metrics.missed(none, 2.0)))
    assert math.isnan(metrics.dropped_fraction(none))
    assert math.isnan(metrics.goodput_per_s(np.array([3.0]), np.array([False])))
    assert metrics.slo_violation_fraction(metrics.missed(dropped, 2.0)) == 1.0
    assert metrics.score(dropped, metrics.missed(dropped, 2.0)) == -math.inf


def test_the_score_adds_up_as_printed():
    # mean 2, the slowest hundredth is the slowest of three, one of three late
    assert metrics.score(
        np.array([1.0, 1.0, 4.0]), np.array([False, False, True])
    ) == pytest.approx(-(2 + 0.4 + 2 / 3))


@given(response_s=responses, dropped=st.data())
def test_dropping_a_request_never_improves_the_score(response_s, dropped):
    which = dropped.draw(st.integers(0, len(response_s) - 1))
    charged = response_s.copy()
    charged[which] = NAN
    assert metrics.score(charged, metrics.missed(charged, 2.0)) <= metrics.score(
        response_s, metrics.missed(response_s, 2.0)
    ) + 1e-9 or (
        # Where the slowest itself is dropped, the next slowest stands in for it.
        response_s[which] == response_s.max()
    )


@given(response_s=responses)
def test_tail_measures_are_ordered(response_s):
    p99 = metrics.percentile_response_s(response_s, 99)
    assert metrics.percentile_response_s(response_s, 50) <= p99 + 1e-9
    assert p99 <= metrics.cvar99_response_s(response_s) * (1 + 1e-9)


def test_shares_leave_out_what_was_dropped():
    shares = metrics.server_shares(np.array([0, 0, 2, -1]), 4)
    assert shares.tolist() == [0.5, 0.0, 0.25, 0.0]


def test_balance_is_one_when_work_goes_by_capacity_and_falls_when_a_server_idles():
    tokens, capacity = np.array([300.0, 500.0, 700.0]), np.array([3000.0, 5000.0, 7000.0])
    assert metrics.load_balance(tokens, np.array([0, 1, 2]), capacity) == pytest.approx(1.0)
    assert metrics.load_balance(tokens, np.array([0, 0, 0]), capacity) < 0
    assert math.isnan(metrics.load_balance(tokens, np.array([-1, -1, -1]), capacity))
