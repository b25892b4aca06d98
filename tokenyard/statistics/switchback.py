"""Is a policy better than another, where the two decide in turns?

Requests of two policies that decide at the same time wait in the same queues, so each is blamed for
what the other does. In turns nobody is (switchback experiments: Bojinov, Simchi-Levi and Zhao
2023, Management Science 69). Stretches of time come in pairs, one of each policy, in random order.
If the two are the same, the sign of the difference within a pair is a coin toss, however traffic
bursts, drifts, and whatever the size of the difference. `bet` bets on that sign. Its
capital is a test martingale: the chance that it ever exceeds 1 / alpha is at most alpha (Ville's
inequality; Ramdas et al. 2023, arXiv:2210.01948), so it may be looked at after every pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Literal

from tokenyard.statistics.intervals import MIN_BLOCKS, Interval, t_interval
from tokenyard.statistics.sequential import DEFAULT_ALPHA

SETTLE_SHARE = 0.25
"""Share of a stretch, at its beginning, whose requests meet the other policy's queues."""
_STAKES = (0.3, 0.6, 0.9)
"""Shares of the capital that are bet on a pair of usual difference, each with a third of it."""


def bet(differences: Sequence[float]) -> float:
    """Capital, of 1, after betting on each difference being above 0.

    The stake follows the size of the difference, which under the null hypothesis says nothing about
    its sign.
    """
    capitals = [1.0] * len(_STAKES)
    sizes: list[float] = []
    for difference in differences:
        if not difference:
            continue
        sizes.append(abs(difference))
        relative = min(sizes[-1] / median(sizes), 1.0)
        capitals = [
            capital * (1.0 + math.copysign(stake * relative, difference))
            for capital, stake in zip(capitals, _STAKES, strict=True)
        ]
    return sum(capitals) / len(capitals)


def verdict(
    gains: Sequence[float], alpha: float, alpha_worse: float
) -> Literal["better", "worse"] | None:
    """Say whether a policy is better than another, or worse; None: it cannot be told yet.

    Args:
        gains: Of each pair, above 0 where the policy was better, shape (num_pairs,).
        alpha: Chance, at most, to call a policy better that makes no difference.
        alpha_worse: The same for worse.
    """
    if bet([-gain for gain in gains]) >= 1.0 / alpha_worse:
        return "worse"
    return "better" if bet(gains) >= 1.0 / alpha else None


def conclusion(
    gains: Sequence[float], attained: Sequence[float], alpha: float
) -> Literal["better", "worse"] | None:
    """Say what a trial comes to after its last pair; None: it goes on.

    Fewer answers within the SLO are worse whatever the gain is, and so is a last pair in which the
    policy took twice as long.

    Args:
        gains: Of each pair, logarithm of the other policy's time over this one's.
        attained: Of each pair, this policy's SLO attainment minus the other's.
        alpha: Chance, at most, to call a policy better that makes no difference.
    """
    if gains and gains[-1] < -math.log(2.0):
        return "worse"
    if verdict(attained, alpha, DEFAULT_ALPHA) == "worse":
        return "worse"
    return verdict(gains, alpha, DEFAULT_ALPHA)


def mean_gain(gains: Sequence[float]) -> Interval:
    """Mean of the pairs' gains with its 95 % interval; NaN for fewer than 30 stretches."""
    interval = t_interval(gains) if gains else Interval(math.nan, math.nan, math.nan)
    if 2 * len(gains) < MIN_BLOCKS:
        return Interval(interval.estimate, math.nan, math.nan)
    return interval
