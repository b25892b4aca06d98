"""Costs that are linear in their weights, which searches learn.

Least marginal delay, corrected (`marginal_scores`). With q the wait, t the time to the first token
after it, u the time of decoding, o what the others are delayed by (`request_delays`, in units of
the SLO), z the size of the request relative to the mean, k the share of KV memory in use and r the
replica's speed rank, the cost is

    q + t + u + o + sum over p in 0..2 of r^p * (weights[p] . f),
    f = (1, q, t, u, o, (q + t + u) (z - 1), o (z - 1), k, max(q + t + u - 1, 0), d, e).

The last two are told where the queue is ordered: d is the part of q that is for those behind whom
the request would not wait, and e the part of o that is for those who would start before it. They
are 0 where nobody looked at the queues.

A server at a constant rate has no KV memory and no second time: t is all of the service, u is 0, k
is 1 where q + t is beyond the SLO and else 0, and e is 0, as o holds only those whom the request
overtakes. There the cost without learned weights is shortest expected delay.

After these weights there may be SLO terms: two prices with three powers of the rank, a and b, and
the logarithms of five limits, v, relative to what is typical. They add

    sum over p in 0..2 of r^p * (a[p] [risky] + b[p] max((q + t) / limit_4 - 1, 0)),

with a choice risky where (q + t) > limit_0, the time per token after the first is more than
limit_1, (q + t + u) > limit_2 or z > limit_3. An SLO is met or violated, which a sum of delays
cannot express. A request that will violate its SLO on every replica should go where it delays
nobody else, and a fast replica should be loaded to just below the point where its requests start
to violate theirs.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tokenyard.compiled import compiled
from tokenyard.routing import observation as ob
from tokenyard.types import FloatArray

_TYPICAL_LIMITS = (0.2, 0.025, 0.5, 1.0, 0.2)
"""Of the first token, of each one after it, of the response (in units of the SLO), of the size
(relative to the mean), and of the first token again; where weights of zero put them."""


@compiled
def slo_limits(weights: FloatArray) -> tuple[float, float, float, float, float]:
    """Beyond what a choice is risky, by weights of shape (NUM_MARGINAL_SLO_WEIGHTS,)."""
    w = ob.NUM_MARGINAL_WEIGHTS + ob.NUM_SLO_PRICES
    return (
        _TYPICAL_LIMITS[0] * math.exp(weights[w]),
        _TYPICAL_LIMITS[1] * math.exp(weights[w + 1]),
        _TYPICAL_LIMITS[2] * math.exp(weights[w + 2]),
        _TYPICAL_LIMITS[3] * math.exp(weights[w + 3]),
        _TYPICAL_LIMITS[4] * math.exp(weights[w + 4]),
    )


@compiled
def slo_terms(
    limits: tuple[float, float, float, float, float],
    wait: float,
    prefill: float,
    decode: float,
    output_tokens: float,
    size: float,
) -> tuple[bool, float]:
    """What the SLO terms of a choice are made from: whether it is risky, and its lateness.

    Args:
        limits: Of `slo_limits`.
        wait: Until the replica could start, in units of the SLO, as are the next two.
        prefill: From then to the first token.
        decode: From the first token to the last.
        output_tokens: Output length as the router knows it, tokens.
        size: Of the request, relative to the mean.
    """
    token = decode / max(output_tokens - 1.0, 1.0)
    risky = (
        wait + prefill > limits[0]
        or token > limits[1]
        or wait + prefill + decode > limits[2]
        or size > limits[3]
    )
    return risky, max((wait + prefill) / limits[4] - 1.0, 0.0)


@compiled
def _slo_price(weights: FloatArray, risky: bool, lateness: float, rank: float) -> float:
    price = 0.0
    power = 1.0
    for p in range(ob.NUM_SCORE_POWERS):
        w = ob.NUM_MARGINAL_WEIGHTS + p
        price += power * (risky * weights[w] + lateness * weights[w + ob.NUM_SCORE_POWERS])
        power *= rank
    return price


@compiled
def looks_at_queues(weights: FloatArray) -> bool:
    """Whether weights of a cost count where a request would stand among those who wait."""
    for p in range(ob.NUM_SCORE_POWERS):
        end = (p + 1) * ob.NUM_MARGINAL_FEATURES
        for w in range(end - ob.NUM_PLACE_FEATURES, end):
            if weights[w] != 0.0:
                return True
    return False


@compiled
def marginal_features(
    row: FloatArray,
    context_tokens: float,
    output_tokens: float,
    mean_total_tokens: float,
    slo_s: float,
) -> tuple[
    float, float, float, float, float, float, float, float, float, float, float
]:  # fmt: skip
    """What the cost of one replica is made from: f of the module's docstring.

    The plain delay, which is least marginal delay's cost, is the sum of the second to the fifth.

    Args:
        row: One row of the table, shape (NUM_COLUMNS,).
        context_tokens: Prompt length, tokens.
        output_tokens: Output length as the router knows it, tokens.
        mean_total_tokens: Typical size of a request, tokens.
        slo_s: Response-time SLO, seconds.
    """
    excess = (context_tokens + output_tokens) / mean_total_tokens - 1.0
    first, decode, others = ob.request_delays(row, context_tokens, output_tokens)
    wait = row[ob.WAIT_S] / slo_s
    prefill = first / slo_s - wait
    decode /= slo_s
    others /= slo_s
    own = wait + prefill + decode
    before = 0.0
    if row[ob.ITERATION_S] > 0.0:
        outstanding = row[ob.NUM_WAITING] + row[ob.NUM_RUNNING]
        before = row[ob.NUM_BEFORE] / max(outstanding, row[ob.NUM_BEFORE] + row[ob.NUM_BEHIND], 1.0)
        limited = row[ob.KV_USED_FRACTION]
    else:
        limited = 1.0 if own > 1.0 else 0.0
    return (
        1.0, wait, prefill, decode, others, own * excess, others * excess, limited,
        max(own - 1.0, 0.0), row[ob.OVERTAKEN_S] / slo_s, others * before,
    )  # fmt: skip


@compiled
def marginal_scores(
    weights: FloatArray,
    context_tokens: float,
    output_tokens: float,
    mean_total_tokens: float,
    slo_s: float,
    columns: FloatArray,
    out: FloatArray,
) -> int:
    """Write the cost of every replica: the delay that the request adds there, corrected.

    The module's docstring has the formula. Zero weights are the rule of least marginal delay.
    Replicas that are not routable cost infinity.

    Args:
        weights: Shape (NUM_MARGINAL_WEIGHTS,), powers of the rank first, or with the SLO terms
            after them (NUM_MARGINAL_SLO_WEIGHTS,): a, b, v.
        context_tokens: Prompt length, tokens.
        output_tokens: Output length as the router knows it, tokens.
        mean_total_tokens: Typical size of a request, tokens.
        slo_s: Response-time SLO, seconds.
        columns: The table, shape (num_replicas, NUM_COLUMNS).
        out: Filled with the costs, in units of the SLO, shape (num_replicas,).

    Returns:
        Index of the cheapest replica, the first of equals.
    """
    excess = (context_tokens + output_tokens) / mean_total_tokens - 1.0
    prices_slo = weights.shape[0] > ob.NUM_MARGINAL_WEIGHTS
    limits = slo_limits(weights) if prices_slo else _TYPICAL_LIMITS
    best = 0
    for replica in range(columns.shape[0]):
        row = columns[replica]
        features = marginal_features(row, context_tokens, output_tokens, mean_total_tokens, slo_s)
        _, wait, prefill, decode, others = features[:5]
        own = wait + prefill + decode
        cost = own + others
        power = 1.0
        for p in range(ob.NUM_SCORE_POWERS):
            w = p * ob.NUM_MARGINAL_FEATURES
            correction = 0.0
            for i in range(ob.NUM_MARGINAL_FEATURES):
                correction += weights[w + i] * features[i]
            cost += power * correction
            power *= row[ob.SPEED_RANK]
        if prices_slo:
            risky, lateness = slo_terms(limits, wait, prefill, decode, output_tokens, excess + 1.0)
            cost += _slo_price(weights, risky, lateness, row[ob.SPEED_RANK])
        out[replica] = cost if row[ob.ROUTABLE] != 0.0 else math.inf
        if out[replica] < out[best]:
            best = replica
    return best


@compiled
def encode_rule(
    row: FloatArray,
    context_tokens: float,
    output_tokens: float,
    mean_total_tokens: float,
    slo_s: float,
    out: npt.NDArray[np.float32],
) -> int:
    """Write what `marginal_scores` makes the cost of one replica from, for those who learn it.

    Args:
        row: One row of the table, shape (NUM_COLUMNS,).
        context_tokens: Prompt length, tokens.
        output_tokens: Output length as the router knows it, tokens.
        mean_total_tokens: Typical size of a request, tokens.
        slo_s: Response-time SLO, seconds.
        out: The first NUM_RULE_FEATURES numbers are filled, each squashed by sign(x) log(1 + |x|):
            `marginal_features`, then the speed rank.

    Returns:
        How many numbers were beyond OBSERVATION_LIMIT and were set to it.
    """
    saturated = 0
    features = marginal_features(row, context_tokens, output_tokens, mean_total_tokens, slo_s)
    for i in range(ob.NUM_RULE_FEATURES):
        value = features[i] if i < ob.NUM_MARGINAL_FEATURES else row[ob.SPEED_RANK]
        size = math.log(1.0 + abs(value))
        if size > ob.OBSERVATION_LIMIT:
            saturated += 1
            size = ob.OBSERVATION_LIMIT
        out[i] = math.copysign(size, value)
    return saturated


@compiled
def encode_shown(
    request_features: FloatArray,
    context_tokens: float,
    output_tokens: float,
    columns: FloatArray,
    whole: bool,
    mean_total_tokens: float,
    slo_s: float,
    out: npt.NDArray[np.float32],
) -> int:
    """Write an observation; with `mean_total_tokens` above 0, what costs are made from comes last.

    Args:
        request_features: This and `whole` are those of `observation.encode`.
        context_tokens: This and what is not named here are those of `encode_rule`.
        output_tokens: Tokens.
        columns: The table, shape (num_replicas, NUM_COLUMNS).
        whole: Whether delays, tokens and memory are in it.
        mean_total_tokens: Tokens.
        slo_s: Seconds.
        out: Filled.

    Returns:
        How many numbers were beyond OBSERVATION_LIMIT and were set to it.
    """
    num = columns.shape[0] if mean_total_tokens > 0.0 else 0
    end = out.shape[0] - num * ob.NUM_RULE_FEATURES
    total_tokens = context_tokens + output_tokens
    saturated = ob.encode(request_features, context_tokens, total_tokens, columns, whole, out[:end])
    for replica in range(num):
        saturated += encode_rule(
            columns[replica], context_tokens, output_tokens, mean_total_tokens, slo_s,
            out[end + replica * ob.NUM_RULE_FEATURES :],
        )  # fmt: skip
    return saturated
