"""The test that stops a worse canary: what it guarantees, and how soon it stops."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from tokenyard.statistics.sequential import SequentialTest

SHARE = 0.2
TOKENS = st.none() | st.integers(0, 10_000)


def stopped_after(champion_goodput, canary_goodput, num_requests, seed):
    """Canary requests until it is stopped; infinity: never."""
    rng, test = np.random.default_rng(seed), SequentialTest(SHARE)
    for _ in range(num_requests):
        canary = rng.random() < SHARE
        goodput = canary_goodput if canary else champion_goodput
        if test.record(canary, rng.random() < goodput):
            return test.num_canary
    return math.inf


@pytest.mark.slow
def test_a_worse_canary_is_stopped_and_an_equal_one_is_let_be():
    worse = [stopped_after(0.90, 0.85, 5000, seed) for seed in range(100)]
    equal = [stopped_after(0.90, 0.90, 5000, seed) for seed in range(100)]
    assert np.mean([after <= 1000 for after in worse]) >= 0.93
    assert np.mean([after < math.inf for after in equal]) <= 0.10  # 0.05, and the luck of 100.


def test_a_canary_under_which_nothing_works_is_stopped_at_once():
    assert max(stopped_after(0.90, 0.0, 1000, seed) for seed in range(50)) <= 12


def test_a_better_canary_is_never_stopped():
    assert {stopped_after(0.85, 0.95, 4000, seed) for seed in range(20)} == {math.inf}


@pytest.mark.slow
def test_what_is_a_violation_whoever_decides_hides_less_where_sizes_are_known():
    """Long answers violate their SLO anyway; of the short ones the canary doubles the
    violations."""

    def stopped(seed, sizes_are_known):
        rng, test = np.random.default_rng(seed), SequentialTest(SHARE)
        for _ in range(3000):
            canary, long = rng.random() < SHARE, rng.random() < 0.3
            bad = rng.random() < (0.95 if long else 0.08 if canary else 0.04)
            if test.record(
                canary, not bad, 100, (1000 if long else 50) if sizes_are_known else None
            ):
                return True
        return False

    known, unknown = (np.mean([stopped(s, given) for s in range(60)]) for given in (True, False))
    assert known > unknown + 0.2


@pytest.mark.slow
def test_bursts_that_hit_both_do_not_count_against_the_canary():
    """All requests of a burst are bad, whoever decided."""

    def stopped(seed):
        rng, test = np.random.default_rng(seed), SequentialTest(SHARE)
        good = np.repeat(rng.random(100) < 0.7, 50)
        return any(test.record(rng.random() < SHARE, bool(one)) for one in good)

    assert np.mean([stopped(seed) for seed in range(100)]) <= 0.07


@settings(max_examples=scaled(50))
@given(
    share=st.floats(0.01, 0.5),
    past=st.lists(st.tuples(st.booleans(), st.booleans(), TOKENS, TOKENS), max_size=60),
    good=st.booleans(),
    sizes=st.tuples(TOKENS, TOKENS),
)
def test_the_capital_is_a_martingale_whatever_happened_before(share, past, good, sizes):
    """Over whose the next request is, with the share as its probability, nothing is won."""

    def capital_after(canary):
        test = SequentialTest(share)
        for one in (*past, (canary, good, *sizes)):
            test.record(*one)
        return math.exp(test.log_capital)

    before = SequentialTest(share)
    for one in past:
        before.record(*one)
    expected = share * capital_after(True) + (1 - share) * capital_after(False)
    assert expected == pytest.approx(math.exp(before.log_capital), rel=1e-9)


@pytest.mark.parametrize(("share", "alpha"), [(0.0, 0.05), (1.0, 0.05), (0.2, 0.0), (0.2, 1.0)])
def test_shares_and_levels_outside_are_refused(share, alpha):
    with pytest.raises(ValueError, match="must lie inside"):
        SequentialTest(share, alpha)
