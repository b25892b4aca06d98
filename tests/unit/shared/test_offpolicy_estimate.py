"""Estimators against bandits whose answer can be written down."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from tokenyard.statistics import off_policy as estimate


def a_log(num, explore, candidate, rng, noise=0.1):
    """Two arms, of which the log prefers the first; the second is better by one."""
    explored = rng.random(num) < explore
    drawn = rng.integers(2, size=num)
    action = np.where(explored, drawn, 0)
    propensity = np.where(action == 0, 1 - explore / 2, explore / 2)
    outcome = action + rng.normal(scale=noise, size=num)
    return outcome, propensity, action == candidate, action


@pytest.mark.parametrize("candidate", [0, 1])
def test_all_estimators_find_what_the_other_arm_earns(candidate):
    rng = np.random.default_rng(1)
    outcome, propensity, same, action = a_log(40_000, 0.1, candidate, rng)
    truth = candidate - 0.05  # The log itself draws the better arm now and then.
    model = 0.8 * action, np.full(len(action), 0.8 * candidate)
    for found in (
        estimate.ips_gain(outcome, propensity, same),
        estimate.snips_gain(outcome, propensity, same),
        estimate.doubly_robust_gain(outcome, propensity, same, *model),
    ):
        assert found.low <= truth <= found.high
        assert found.estimate == pytest.approx(truth, abs=0.1)


def test_a_model_that_is_right_leaves_only_the_noise():
    rng = np.random.default_rng(2)
    outcome, propensity, same, action = a_log(4_000, 0.02, 1, rng)
    plain = estimate.ips_gain(outcome, propensity, same)
    robust = estimate.doubly_robust_gain(
        outcome, propensity, same, action.astype(float), np.ones(len(action))
    )
    assert robust.high - robust.low < 0.5 * (plain.high - plain.low)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    covered = 0
    for seed in range(100):
        outcome, propensity, same, _ = a_log(2_000, 0.2, 1, np.random.default_rng(seed), 1.0)
        found = estimate.snips_gain(outcome, propensity, same)
        covered += found.low <= 0.9 <= found.high
    assert covered >= 88


@settings(max_examples=scaled(30))
@given(st.integers(0, 1000), st.floats(0.01, 1.0))
def test_the_policy_itself_gains_nothing(seed, explore):
    """Where the candidate does what was done with certainty, nothing changes."""
    rng = np.random.default_rng(seed)
    outcome = rng.normal(size=200)
    ones = np.ones(200)
    for gain in (estimate.ips_gain, estimate.snips_gain):
        assert gain(outcome, ones, ones.astype(bool)).estimate == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("wrong", [0.0, 1.5, float("nan")])
def test_propensities_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="propensities"):
        estimate.ips_gain(np.zeros(40), np.full(40, wrong), np.ones(40, dtype=bool))
