import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenyard.statistics.pareto import front, hypervolume

POINTS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=12).map(
    lambda some: np.array(some, float)
)


@given(points=POINTS)
def test_the_hypervolume_counts_the_unit_squares_below_some_point(points):
    covered = sum(
        bool(((points[:, 0] > x) & (points[:, 1] > y)).any()) for x in range(8) for y in range(8)
    )
    assert hypervolume(points, np.zeros(2)) == pytest.approx(covered)


@given(points=POINTS)
def test_no_point_beats_one_of_the_front_and_the_front_beats_all_others(points):
    best = front(points)
    for one in points:
        assert (best >= one).all(axis=1).any()
    for one in best:
        assert not ((points >= one).all(axis=1) & (points > one).any(axis=1)).any()


def test_what_does_not_dominate_the_reference_adds_nothing():
    assert hypervolume(np.array([[1.0, -5.0]]), np.array([0.0, -4.0])) == 0.0
