import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tokenyard.statistics.student import quantile, two_sided_p_value

FREEDOM = st.floats(1.0, 1e4)


@given(st.floats(-1e6, 1e6), FREEDOM)
def test_a_p_value_is_scipys(t, freedom):
    assert two_sided_p_value(t, freedom) == pytest.approx(
        2 * stats.t.sf(abs(t), freedom), rel=1e-10, abs=1e-300
    )


@given(st.floats(0.5, 0.9999), FREEDOM)
def test_a_quantile_is_scipys(level, freedom):
    assert quantile(level, freedom) == pytest.approx(
        stats.t.ppf(level, freedom), rel=1e-8, abs=1e-9
    )


def test_nothing_is_infinitely_far_from_zero():
    assert two_sided_p_value(math.inf, 5) == 0.0
    assert two_sided_p_value(0.0, 5) == 1.0
