"""Student's distribution, for those who have no scipy: intervals and tests need no more of it."""

from __future__ import annotations

import math

_STEPS = 500
_PRECISION = 1e-15
_SMALLEST = 1e-300


def two_sided_p_value(t: float, freedom: float) -> float:
    """Probability that a Student variable is at least as far from zero as `t`.

    It is the regularised incomplete beta function I_x(freedom / 2, 1 / 2) at
    x = freedom / (freedom + t^2) (Abramowitz and Stegun, 26.7.1).
    """
    if math.isinf(t):
        return 0.0
    x = freedom / (freedom + t * t)
    if x < (freedom / 2 + 1) / (freedom / 2 + 2.5):
        return _incomplete_beta(freedom / 2, 0.5, x)
    # 1 - x, of which nothing cancels.
    return 1.0 - _incomplete_beta(0.5, freedom / 2, t * t / (freedom + t * t))


def quantile(level: float, freedom: float) -> float:
    """Number below which a Student variable is with a probability from 0.5 to below 1."""
    tail = 2.0 * (1.0 - level)
    low, high = 0.0, 1.0
    while two_sided_p_value(high, freedom) > tail:
        low, high = high, 2.0 * high
    while high - low > 2.0 * math.ulp(high):
        middle = (low + high) / 2
        if two_sided_p_value(middle, freedom) > tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b) for x < (a + 1) / (a + b + 2), a or b 1/2: Lentz's fraction (DLMF 8.17.22)."""
    if x <= 0.0:
        return 0.0
    ratio = _gamma_ratio(max(a, b)) / math.sqrt(math.pi)
    front = ratio * math.exp(a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1.0))
    fraction = d
    for m in range(1, _STEPS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / ((1.0 + term * d) or _SMALLEST)
            c = (1.0 + term / c) or _SMALLEST
            fraction *= c * d
        if abs(c * d - 1.0) < _PRECISION:
            break
    return front * fraction


def _gamma_ratio(a: float) -> float:
    """Gamma(a + 1/2) / Gamma(a); logarithms of large ones would leave ten digits (DLMF 5.11.13)."""
    if a < 100.0:
        return math.gamma(a + 0.5) / math.gamma(a)
    v = 1.0 / a
    return math.sqrt(a) * (1.0 - v / 8 * (1.0 - v / 16 * (1.0 + v * 5 / 8 * (1.0 - v * 21 / 160))))
