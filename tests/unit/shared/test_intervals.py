from __future__ import annotations

import math

import numpy as np
import pytest

from tokenyard.statistics.intervals import (
    MIN_STREAMS,
    BlockBootstrap,
    Interval,
    Samples,
    block_length,
    holm,
    paired_p_value,
    percentile_interval,
    t_interval,
)


def means(values):
    return values.mean(axis=1)


def autoregressive(coefficient: float, n: int, rng: np.random.Generator):
    values, noise = np.zeros(n), rng.normal(size=n)
    for i in range(1, n):
        values[i] = coefficient * values[i - 1] + noise[i]
    return values


def test_the_student_interval_is_that_of_the_textbook():
    # Student's quantile for 4 degrees of freedom is 2.776.
    interval = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * math.sqrt(5 / 2) / math.sqrt(5)
    assert interval == pytest.approx((3.0, 3.0 - half, 3.0 + half), rel=1e-6)


@pytest.mark.parametrize("num_streams", [1, 2, 4])
def test_few_streams_give_no_interval(num_streams):
    interval = t_interval([7.0] * num_streams)
    assert interval.estimate == 7.0
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


def test_nothing_is_relative_to_zero():
    assert all(math.isnan(x) for x in Interval(1.0, 0.5, 1.5).over(0.0))


def test_without_dependence_the_bootstrap_agrees_with_student():
    values = np.random.default_rng(1).exponential(size=3000)
    bootstrap = BlockBootstrap(3000, block_length(values), np.random.default_rng(2))
    found = percentile_interval(float(values.mean()), bootstrap.resample(values, means))
    expected = t_interval(values)
    assert found.high - found.low == pytest.approx(expected.high - expected.low, rel=0.15)


def test_dependence_widens_the_interval_towards_its_true_width():
    rng = np.random.default_rng(3)
    values = autoregressive(0.9, 4000, rng)
    bootstrap = BlockBootstrap(4000, block_length(values), rng)
    interval = percentile_interval(float(values.mean()), bootstrap.resample(values, means))
    true_half = 1.96 / (1 - 0.9) / math.sqrt(4000)
    assert (interval.high - interval.low) / 2 == pytest.approx(true_half, rel=0.3)


def test_a_stream_that_is_one_long_backlog_gives_no_interval():
    backlog = np.cumsum(np.random.default_rng(4).normal(size=4000))
    assert BlockBootstrap.of(backlog, np.random.default_rng(5)) is None
    short_memory = autoregressive(0.9, 4000, np.random.default_rng(6))
    assert BlockBootstrap.of(short_memory, np.random.default_rng(5)) is not None
    one, other = Samples({}, {"cost": 3.0}), Samples({}, {"cost": 2.0})
    for interval in (one.difference(other, "cost", True), one.interval("cost")):
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)
    assert one.difference(other, "cost", relative=True).estimate == 0.5
    assert one.difference(other, "cost", relative=False).estimate == 1.0
    assert math.isnan(one.difference(Samples({}, {"cost": 0.0}), "cost", relative=True).estimate)


def test_blocks_grow_with_dependence_and_stay_below_the_series():
    rng = np.random.default_rng(4)
    lengths = [block_length(autoregressive(c, 4000, rng)) for c in (0.0, 0.9, 0.99)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[1] < lengths[2] < 4000
    assert 400 < block_length(np.cumsum(rng.normal(size=4000))) <= 4000


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0], [3.0] * 50, [math.nan, 1.0, 2.0]])
def test_short_and_constant_series_have_a_block_length(values):
    assert 1 <= block_length(np.array(values)) <= len(values)


def test_all_policies_are_resampled_with_the_same_blocks():
    values = np.random.default_rng(5).normal(size=500)
    bootstrap = BlockBootstrap(500, 20, np.random.default_rng(6))
    ours = bootstrap.resample(values + 1.0, means)
    assert ours - bootstrap.resample(values, means) == pytest.approx(np.ones(2000))


def test_holm_corrects_by_rank_keeps_the_order_and_never_exceeds_one():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    # What is no test is not in the family.
    assert holm([math.nan, 0.01, 0.04])[1:] == pytest.approx([0.02, 0.04])
    assert math.isnan(holm([math.nan, 0.01])[0])


def test_equal_values_differ_in_nothing_and_large_differences_are_unlikely():
    assert paired_p_value(np.zeros(5)) == 1.0
    assert paired_p_value(np.array([0.1, np.nextafter(0.1, 1.0), 0.1, 0.1, 0.1])) == 0.0
    assert paired_p_value(np.array([1.0, 1.1, 0.9, 1.0, 1.0])) < 1e-3
    assert paired_p_value(np.array([1.0, -1.0, 2.0, -2.0, 0.0])) == pytest.approx(1.0)


@pytest.mark.parametrize("num", [1, 2, MIN_STREAMS - 1])
def test_too_few_differences_are_no_test(num):
    """One value is all the same; its p-value of 0 would be the surest finding of all."""
    assert np.isnan(paired_p_value(np.full(num, 3.0)))
    assert np.isnan(paired_p_value(np.arange(1.0, num + 1.0)))
