"""Intervals over one long stream: they cover what is true, or say that nothing can be told."""

import numpy as np
import pytest
from scipy.signal import lfilter

from tokenyard.statistics.intervals import MIN_BLOCKS
from tokenyard.statistics.jackknife import (
    JackknifeSamples,
    blocks,
    forgets,
    is_settled,
    jackknife_interval,
    left_out,
    p99,
)

REPETITIONS = 200
WARM_UP = 1000


def waits(gaps_s, services_s):
    """Response times of a queue with one server, first come, first served (Lindley)."""
    steps = services_s[:-1] - gaps_s[1:]
    walk = np.concatenate([[0.0], np.cumsum(steps)])
    return walk - np.minimum.accumulate(np.minimum(walk, 0.0)) + services_s


def queues(load):
    """Two servers of different speed that are sent the same requests."""
    fast = 0.9

    def draw(num, rng):
        gaps, services = rng.exponential(1.0 / load, num), rng.exponential(1.0, num)
        return waits(gaps, services), waits(gaps, fast * services)

    mean = (1 - fast * load) / (fast * (1 - load)) - 1.0
    # Both percentiles are in proportion to the means: response times are exponential.
    return draw, {"mean_s": mean, "p99_s": mean}


def autoregressive(coefficient):
    """Two lognormal series whose ratio is 1.1 at every percentile."""

    def draw(num, rng):
        noise = rng.normal(size=(2, num)) * np.sqrt(1 - coefficient**2)
        shared, own = lfilter([1.0], [1.0, -coefficient], noise, axis=1)
        return 1.1 * np.exp(0.4 * shared + 0.3 * own), np.exp(0.5 * shared)

    return draw, {"mean_s": 0.1, "p99_s": 0.1}


def coverage(draw, truth, num):
    """Share of repetitions with an interval, and of these the share that covers the truth."""
    rng = np.random.default_rng(17)
    told, covers = dict.fromkeys(truth, 0), dict.fromkeys(truth, 0)
    for _ in range(REPETITIONS):
        ours, theirs = (
            JackknifeSamples.of({"mean_s": (one[WARM_UP:], np.mean), "p99_s": (one[WARM_UP:], p99)})
            for one in draw(num + WARM_UP, rng)
        )
        for key, true in truth.items():
            found = ours.difference(theirs, key, relative=True)
            told[key] += not np.isnan(found.low)
            covers[key] += found.low <= true <= found.high
    return {key: (told[key] / REPETITIONS, covers[key] / max(told[key], 1)) for key in truth}


@pytest.mark.parametrize(
    ("series", "num", "least_told"),
    [
        (autoregressive(0.5), 1000, {"mean_s": 0.9, "p99_s": 0.0}),
        (autoregressive(0.9), 2600, {"mean_s": 0.9, "p99_s": 0.2}),
        (autoregressive(0.9), 10_000, {"mean_s": 0.95, "p99_s": 0.95}),
        (queues(0.5), 2600, {"mean_s": 0.9, "p99_s": 0.0}),
        (queues(0.6), 10_000, {"mean_s": 0.9, "p99_s": 0.7}),
        (queues(0.8), 10_000, {"mean_s": 0.8, "p99_s": 0.0}),
    ],
)
def test_an_interval_covers_the_true_difference_in_nine_of_ten_repetitions(series, num, least_told):
    found = coverage(*series, num)
    for key, (told, covers) in found.items():
        assert told >= least_told[key], (key, found)
        if told >= 0.2:
            assert covers >= 0.9, (key, found)


@pytest.mark.parametrize(("load", "num"), [(0.8, 1000), (0.9, 2600), (0.95, 10_000)])
def test_where_the_queue_remembers_longer_than_a_block_next_to_nothing_is_told(load, num):
    for told, _ in coverage(*queues(load), num).values():
        assert told <= 0.25


def test_blocks_are_consecutive_and_hold_all():
    cut = blocks(1003)
    assert len(cut) == MIN_BLOCKS
    assert [one.start for one in cut[1:]] == [one.stop for one in cut[:-1]]
    assert (cut[0].start, cut[-1].stop) == (0, 1003)


def test_independent_values_have_the_interval_of_the_mean():
    values = np.random.default_rng(1).normal(3.0, 1.0, 3000)
    found = jackknife_interval(float(values.mean()), left_out(values, np.mean))
    assert found.low < 3.0 < found.high
    assert found.half_width == pytest.approx(2.05 / np.sqrt(3000), rel=0.4)


def test_a_trend_has_no_interval_and_a_constant_one_of_no_width():
    trend = np.arange(3000.0)
    assert not forgets(trend)
    assert np.isnan(jackknife_interval(trend.mean(), left_out(trend, np.mean)).low)
    level = np.full(3000, 2.0)
    assert jackknife_interval(2.0, left_out(level, np.mean)) == (2.0, 2.0, 2.0)


def test_a_percentile_of_one_burst_is_not_settled_and_has_no_difference():
    rng = np.random.default_rng(1)
    even = rng.exponential(1.0, 3000)
    burst = even.copy()
    burst[1200:1240] += 50.0
    assert is_settled(even)
    assert not is_settled(burst)
    ours, theirs = (JackknifeSamples.of({"p99_s": (one, p99)}) for one in (even, burst))
    assert np.isnan(ours.difference(theirs, "p99_s", relative=True)).all()
    assert np.isnan(ours.p_value(theirs, "p99_s"))


def test_a_policy_beside_itself_differs_by_nothing_and_a_better_one_for_certain():
    rng = np.random.default_rng(2)
    theirs = rng.exponential(1.0, 3000)
    ours = theirs * rng.uniform(0.8, 1.0, 3000)
    before, after = (JackknifeSamples.of({"mean_s": (one, np.mean)}) for one in (theirs, ours))
    assert before.difference(before, "mean_s", relative=True) == (0.0, 0.0, 0.0)
    assert before.p_value(before, "mean_s") == 1.0
    change = after.difference(before, "mean_s", relative=True)
    assert change.low < -0.1 < change.high < 0.0
    assert after.p_value(before, "mean_s") < 0.001
    assert before.interval("mean_s").low < theirs.mean() < before.interval("mean_s").high
