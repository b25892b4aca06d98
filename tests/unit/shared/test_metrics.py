from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tokenyard import metrics

NAN = math.nan
responses = arrays(np.float64, st.integers(1, 300), elements=st.floats(0.001, 1e4))


def test_violations_and_goodput_count_dropped_requests_as_offered():
    response_s = np.array([1.0, 2.0, 2.1, NAN])
    assert metrics.slo_violation_fraction(metrics.violations(response_s, 2.0)) == 0.5
    assert metrics.dropped_fraction(response_s) == 0.25
    assert (
        metrics.goodput_per_s(np.array([0.0, 1.0, 2.0, 4.0]), metrics.violations(response_s, 2.0))
        == 2 / 4
    )


def test_what_was_dropped_has_waited_until_the_run_ended():
    arrival_s, response_s = np.array([0.0, 1.0, 2.0, 4.0]), np.array([1.0, NAN, 3.0, NAN])
    offered_s = metrics.offered_s(response_s, arrival_s, response_s)
    assert offered_s.tolist() == [1.0, 4.0, 3.0, 3.0]
    ttft_s = metrics.offered_s(np.array([0.5, NAN, 1.0, 0.2]), arrival_s, response_s)
    assert ttft_s.tolist() == [0.5, 4.0, 1.0, 0.2]


def test_where_all_are_dropped_the_last_arrival_ends_the_run():
    dropped, arrival_s = np.array([NAN, NAN]), np.array([1.0, 3.0])
    assert metrics.offered_s(dropped, arrival_s, dropped).tolist() == [2.0, 0.0]


def test_cvar_is_the_mean_of_the_slowest_hundredth():
    assert metrics.cvar99_s(np.arange(1.0, 201.0)) == 199.5


def test_without_data_there_is_no_number():
    none, dropped = np.array([]), np.array([NAN, NAN])
    assert math.isnan(metrics.mean(none))
    assert math.isnan(metrics.percentile(none, 99))
    assert math.isnan(metrics.cvar99_s(none))
    assert math.isnan(metrics.slo_violation_fraction(metrics.violations(none, 2.0)))
    assert math.isnan(metrics.dropped_fraction(none))
    assert math.isnan(metrics.goodput_per_s(np.array([3.0]), np.array([False])))
    assert metrics.slo_violation_fraction(metrics.violations(dropped, 2.0)) == 1.0


def test_the_score_adds_up_as_printed():
    # mean 2, the slowest hundredth is the slowest of three, one of three late
    assert metrics.score(
        np.array([1.0, 1.0, 4.0]), np.array([False, False, True])
    ) == pytest.approx(-(2 + 0.4 + 2 / 3))


@given(response_s=responses, draws=st.data())
def test_dropping_a_request_never_looks_like_serving_it(response_s, draws):
    """In no measure, unless it was the very last to complete, and so ended the run itself."""
    gaps_s = draws.draw(arrays(float, len(response_s), elements=st.floats(0, 10)))
    arrival_s = np.cumsum(gaps_s)
    which = draws.draw(st.integers(0, len(response_s) - 1))
    assume(which != np.argmax(arrival_s + response_s))
    dropped = response_s.copy()
    dropped[which] = NAN
    offered_s = metrics.offered_s(dropped, arrival_s, dropped)
    for measure in (metrics.mean, metrics.cvar99_s, lambda x: metrics.percentile(x, 99)):
        assert measure(offered_s) >= measure(response_s) - 1e-9
    scores = [
        metrics.score(times_s, metrics.violations(served_s, 2.0))
        for times_s, served_s in ((offered_s, dropped), (response_s, response_s))
    ]
    assert scores[0] <= scores[1] + 1e-9


@given(response_s=responses)
def test_tail_measures_are_ordered(response_s):
    p99 = metrics.percentile(response_s, 99)
    assert metrics.percentile(response_s, 50) <= p99 + 1e-9
    assert p99 <= metrics.cvar99_s(response_s) * (1 + 1e-9)


def test_shares_leave_out_what_was_dropped():
    shares = metrics.server_shares(np.array([0, 0, 2, -1]), 4)
    assert shares.tolist() == [0.5, 0.0, 0.25, 0.0]


def test_balance_is_one_when_work_goes_by_capacity_and_falls_when_a_server_idles():
    tokens, capacity = np.array([300.0, 500.0, 700.0]), np.array([3000.0, 5000.0, 7000.0])
    assert metrics.load_balance(tokens, np.array([0, 1, 2]), capacity) == pytest.approx(1.0)
    assert metrics.load_balance(tokens, np.array([0, 0, 0]), capacity) < 0
    assert math.isnan(metrics.load_balance(tokens, np.array([-1, -1, -1]), capacity))


def test_a_request_of_one_output_token_has_no_time_per_token():
    response_s, ttft_s = np.array([5.0, 2.0, NAN]), np.array([1.0, 2.0, 1.0])
    tpot_s = metrics.tpot_s(response_s, ttft_s, np.array([5.0, 1.0, 9.0]))
    np.testing.assert_array_equal(tpot_s, [1.0, NAN, NAN])
    assert metrics.mean(tpot_s) == 1.0


def test_a_share_of_nothing_is_no_number():
    assert metrics.fraction(3, 4) == 0.75
    assert math.isnan(metrics.fraction(0, 0))


def test_half_of_a_bin_is_its_middle_on_the_logarithmic_scale():
    counts = np.array([0.0, 2.0, 2.0, 0.0])
    percentile = [metrics.binned_percentile_s(counts, p, 1.0, 1.0) for p in (25, 50, 75, 100)]
    assert percentile == pytest.approx(np.exp([1.5, 2.0, 2.5, 3.0]))
    assert math.isnan(metrics.binned_percentile_s(np.zeros(4), 50, 1.0, 1.0))


@given(
    times_s=arrays(np.float64, st.integers(1, 300), elements=st.floats(1e-3, 10.0)),
    percent=st.floats(0, 100),
)
def test_a_percentile_from_bins_is_off_by_no_more_than_a_bin(times_s, percent):
    bins_per_e = 8.0
    counts, _ = np.histogram(np.log(times_s / 1e-4) * bins_per_e, np.arange(97))
    found = metrics.binned_percentile_s(counts.astype(float), percent, 1e-4, bins_per_e)
    exact = np.percentile(times_s, percent, method="inverted_cdf")
    assert abs(math.log(found / exact)) <= 1 / bins_per_e + 1e-9


def gaps(asks, weights=(1.0, 1.0)):
    """Gaps of (arrival, first token, completion, tokens, tenant), with one token of output."""
    arrival_s, first_s, end_s, tokens, tenant = (
        np.array(x, float) for x in zip(*asks, strict=True)
    )
    both = np.stack([tokens - 1.0, np.ones_like(tokens)], axis=1)
    return metrics.service_gaps_tokens_per_s(
        arrival_s, first_s - arrival_s, end_s - arrival_s, both, tenant.astype(int),
        np.array(weights),
    ).tolist()  # fmt: skip


def test_a_tenant_that_waits_while_another_is_served_more_is_treated_unfairly():
    # In the first minute one is served 600 tokens, the other asks for 900 and gets none.
    asks = [(0, 5, 5, 600, 0), (0, 70, 70, 900, 1), (120, 121, 121, 10, 0)]
    # In the second the first asks for nothing.
    assert gaps(asks) == [10.0, 0.0]
    # It cannot lack more than it asked for.
    asks[1] = (0, 70, 70, 300, 1)
    assert gaps(asks) == [5.0, 0.0]


def test_a_tenant_that_is_served_all_it_asks_for_is_treated_fairly_however_little_that_is():
    asks = [(0, 5, 5, 6000, 0), (0, 5, 5, 60, 1), (60, 61, 61, 10, 0)]
    assert gaps(asks) == [0.0]


def test_a_tenant_of_more_weight_is_entitled_to_more():
    asks = [(0, 5, 5, 600, 0), (0, 5, 5, 600, 1), (0, 90, 90, 600, 1), (60, 61, 61, 10, 0)]
    assert gaps(asks) == [0.0]
    # At three times the weight its 600 count as 400, those of the other as 1200.
    assert gaps(asks, (1.0, 3.0)) == pytest.approx([400 / 60])


def test_tokens_are_served_as_they_are_generated():
    found = metrics.service_gaps_tokens_per_s(
        arrival_s=np.array([0.0, 0.0, 120.0]),
        ttft_s=np.array([0.0, 119.0, 1.0]),
        response_s=np.array([120.0, 120.0, 2.0]),
        tokens=np.array([[0.0, 1200.0], [1200.0, 1.0], [1.0, 1.0]]),
        tenant=np.array([0, 1, 0]),
        weights=np.array([1.0, 1.0]),
    )
    # Half of the first's tokens in each minute; the second catches up in the second one, in which
    # the first lacks nothing.
    assert found == pytest.approx([600 / 60, 0.0])
