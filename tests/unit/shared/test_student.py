import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import special, stats

from tokenyard.statistics.student import quantile, two_sided_p_value

FREEDOM = st.floats(1.0, 1e4)


@given(st.floats(-1e6, 1e6), FREEDOM)
@example(1e-8, 1.0)
def test_a_p_value_is_scipys_incomplete_beta(t, freedom):
    """`stats.t.sf` itself has only eight digits close to zero."""
    squared = t * t
    if squared > freedom:
        expected = special.betainc(freedom / 2, 0.5, freedom / (freedom + squared))
    else:
        expected = special.betaincc(0.5, freedom / 2, squared / (freedom + squared))
    assert two_sided_p_value(t, freedom) == pytest.approx(expected, rel=1e-10, abs=1e-300)


@given(st.floats(-1e3, 1e3))
def test_with_one_degree_of_freedom_it_is_an_arc_tangent(t):
    expected = 1 - 2 / math.pi * math.atan(abs(t))
    assert two_sided_p_value(t, 1.0) == pytest.approx(expected, rel=1e-12, abs=1e-14)


@given(st.floats(0.5, 0.9999), FREEDOM)
def test_a_quantile_is_scipys(level, freedom):
    assert quantile(level, freedom) == pytest.approx(
        stats.t.ppf(level, freedom), rel=1e-8, abs=1e-9
    )


def test_nothing_is_infinitely_far_from_zero():
    assert two_sided_p_value(math.inf, 5) == 0.0
    assert two_sided_p_value(0.0, 5) == 1.0
