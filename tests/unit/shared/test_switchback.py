"""Two policies in turns: how often the test is wrong, and how soon it is right."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenyard.statistics.switchback import bet, conclusion, mean_gain, verdict


def drifting(rng, num_pairs, gain):
    """Gains of pairs in bursts: differences of very unequal size, and signs by chance."""
    sizes = np.exp(np.cumsum(rng.normal(0.0, 0.4, num_pairs))) * rng.standard_t(2, num_pairs)
    return (gain + 0.1 * sizes * rng.choice([-1.0, 1.0], num_pairs)).tolist()


def ever(gains, wanted, alpha):
    return any(verdict(gains[:n], alpha, alpha) == wanted for n in range(1, len(gains) + 1))


@pytest.mark.parametrize("wanted", ["better", "worse"])
def test_a_policy_that_makes_no_difference_is_rarely_told_apart_however_often_one_looks(wanted):
    rng, alpha = np.random.default_rng(7), 0.05
    wrong = np.mean([ever(drifting(rng, 60, 0.0), wanted, alpha) for _ in range(600)])
    assert wrong <= alpha + 2.0 * math.sqrt(alpha * (1 - alpha) / 600)


def test_a_clear_gain_is_told_within_ten_pairs_and_a_clear_loss_too():
    rng = np.random.default_rng(8)
    for sign, wanted in ((1.0, "better"), (-1.0, "worse")):
        gains = [(sign * rng.normal(0.1, 0.03, 10)).tolist() for _ in range(100)]
        assert np.mean([ever(each, wanted, 0.05) for each in gains]) > 0.9


def test_fewer_answers_in_time_are_worse_whatever_the_gain_and_twice_the_time_is_worse_at_once():
    gains, missed = [0.1] * 12, [-0.02] * 12
    assert conclusion(gains, [0.0] * 12, 0.05) == "better"
    assert conclusion(gains, missed, 0.05) == "worse"
    assert conclusion([0.1, -0.7], [0.0, 0.0], 0.05) == "worse"
    assert conclusion([], [], 0.05) is None


@given(st.lists(st.floats(-1e6, 1e6), max_size=40))
def test_capital_is_positive_and_its_mean_over_signs_stays_one(differences):
    assert bet(differences) > 0.0
    # The last bet is fair: over both signs of its difference the capital keeps its mean.
    if differences and differences[-1]:
        other = [*differences[:-1], -differences[-1]]
        before = bet(differences[:-1])
        assert (bet(differences) + bet(other)) / 2 == pytest.approx(before, rel=1e-9)


def test_there_is_no_interval_of_fewer_than_thirty_stretches():
    assert math.isnan(mean_gain([]).estimate)
    assert math.isnan(mean_gain([0.1] * 14).low)
    gain = mean_gain([0.1, 0.2, 0.15] * 5)
    assert gain.low < gain.estimate < gain.high
