"""What another policy would have earned, from what one policy's logged decisions earned.

Inverse propensity scoring (Horvitz and Thompson 1952), its self-normalised form (Swaminathan and
Joachims 2015, NIPS) and the doubly robust estimator (Dudik, Langford and Li 2011,
arXiv:1103.4601). All three judge decisions one by one: what a decision does to the waiting of
other requests is not in them, so they answer "what if this request alone had gone elsewhere",
which is not what the policy would do to the whole cluster. Run it on the replicas of
`tokenyard.routing.log_replay` for that.
"""

from __future__ import annotations

import numpy as np

from tokenyard.statistics.intervals import Interval, t_interval
from tokenyard.types import BoolArray, FloatArray

NUM_BLOCKS = 20
"""Consecutive decisions are alike; means of this many blocks are taken to be independent."""


def ips_values(outcome: FloatArray, propensity: FloatArray, same: BoolArray) -> FloatArray:
    """What every logged decision says of the candidate's mean outcome; their mean is unbiased.

    Args:
        outcome: Of every decision, shape (num_decisions,).
        propensity: Probability with which its replica was chosen, in (0, 1], same shape.
        same: Whether the candidate would have chosen that replica, same shape.

    Raises:
        ValueError: A propensity is not in (0, 1].
    """
    return _weights(propensity, same) * outcome


def doubly_robust_values(
    outcome: FloatArray,
    propensity: FloatArray,
    same: BoolArray,
    expected_logged: FloatArray,
    expected_candidate: FloatArray,
) -> FloatArray:
    """As `ips_values`, with a model of the outcome whose errors alone are weighted.

    Args:
        outcome: Of every decision, shape (num_decisions,).
        propensity: Probability with which its replica was chosen.
        same: Whether the candidate would have chosen that replica.
        expected_logged: The model's outcome of the replica that was chosen.
        expected_candidate: The model's outcome of the candidate's choice.
    """
    return expected_candidate + _weights(propensity, same) * (outcome - expected_logged)


def mean_interval(values: FloatArray, num_blocks: int = NUM_BLOCKS) -> Interval:
    """Mean of what consecutive decisions say, with an interval over blocks of them."""
    return t_interval(_block_means(values, num_blocks))


def ips_gain(outcome: FloatArray, propensity: FloatArray, same: BoolArray) -> Interval:
    """Mean outcome under the candidate minus that of what was done; see `ips_values`."""
    return mean_interval(ips_values(outcome, propensity, same) - outcome)


def snips_gain(outcome: FloatArray, propensity: FloatArray, same: BoolArray) -> Interval:
    """As `ips_gain`, over the sum of the weights in place of the number of decisions.

    The interval is the delete-one-block jackknife's, since a ratio is no mean.
    """
    weight, num_blocks = _weights(propensity, same), NUM_BLOCKS
    parts = [
        np.array([(w * y).sum(), w.sum(), y.sum(), len(y)])
        for w, y in zip(
            np.array_split(weight, num_blocks), np.array_split(outcome, num_blocks), strict=True
        )
    ]
    table = np.array(parts)
    whole = _ratio_gain(table.sum(axis=0))
    pseudo = np.array(
        [
            num_blocks * whole - (num_blocks - 1) * _ratio_gain(np.delete(table, one, 0).sum(0))
            for one in range(num_blocks)
        ]
    )
    spread = t_interval(pseudo)
    return Interval(
        whole, whole + spread.low - spread.estimate, whole + spread.high - spread.estimate
    )


def doubly_robust_gain(
    outcome: FloatArray,
    propensity: FloatArray,
    same: BoolArray,
    expected_logged: FloatArray,
    expected_candidate: FloatArray,
    num_blocks: int = NUM_BLOCKS,
) -> Interval:
    """Mean outcome under the candidate minus what was done; see `doubly_robust_values`."""
    values = doubly_robust_values(outcome, propensity, same, expected_logged, expected_candidate)
    return mean_interval(values - outcome, num_blocks)


def calibrated(model: FloatArray, outcome: FloatArray) -> FloatArray:
    """Coefficients (intercept, slope) that bring a model's outcomes nearest to those seen."""
    design = np.stack([np.ones_like(model), model], axis=1)
    return np.asarray(np.linalg.lstsq(design, outcome, rcond=None)[0], dtype=np.float64)


def _weights(propensity: FloatArray, same: BoolArray) -> FloatArray:
    if not ((propensity > 0.0) & (propensity <= 1.0)).all():
        raise ValueError("propensities must lie in (0, 1]: leave decisions without one out")
    weight: FloatArray = same / propensity
    return weight


def _block_means(values: FloatArray, num_blocks: int) -> FloatArray:
    blocks = np.array_split(values, min(num_blocks, len(values)))
    return np.array([block.mean() for block in blocks])


def _ratio_gain(sums: FloatArray) -> float:
    weighted, weights, outcomes, count = sums
    return float(weighted / weights - outcomes / count) if weights else float("nan")
