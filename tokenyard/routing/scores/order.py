"""How much later than its arrival a request takes its place in a queue: orders by size, compiled.

Each of the three is a rule of `tokenyard.routing.policies.order`. Here all are numbers, which add
up, so that a kernel may run them and a search may find them.
"""

from __future__ import annotations

import math

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.routing import observation as ob
from tokenyard.types import FloatArray

SERVICE_WEIGHT, PREFILL_WEIGHT, BOOST_S, NUM_ORDER_WEIGHTS = range(4)
"""Knobs of `sjf`, `wspt` and `boost`."""
FIRST_COME: FloatArray = np.zeros(NUM_ORDER_WEIGHTS)
"""Weights that order nothing."""
BOOST_RANGE = 1000.0
"""Requests that take less than the knob over this are not told apart."""


@compiled
def is_first_come(weights: FloatArray) -> bool:
    """Whether these weights order nothing."""
    first_come: bool = (
        weights[SERVICE_WEIGHT] == 0.0 and weights[PREFILL_WEIGHT] == 0.0
        and weights[BOOST_S] == 0.0
    )  # fmt: skip
    return first_come


@compiled
def boost_delay_s(boost_s: float, size_s: float) -> float:
    """Delay of a request of some size under a boost (`policies.order.Boost`), seconds.

    Args:
        boost_s: The knob, at least 0; 0 delays nobody.
        size_s: Time that the request takes.
    """
    if size_s * BOOST_RANGE <= boost_s or boost_s == 0.0:
        return 0.0
    share = math.expm1(-size_s / boost_s) / math.expm1(-1.0 / BOOST_RANGE)
    return boost_s * math.log(share)


@compiled
def order_delay_s(
    weights: FloatArray, context_tokens: float, output_tokens: float, row: FloatArray
) -> float:
    """What the orders add to the arrival of a request at a replica, seconds.

    Args:
        weights: Of the time from its start to its end, of that of its prompt, and the boost by the
            latter, shape (NUM_ORDER_WEIGHTS,), all at least 0.
        context_tokens: Prompt length, tokens.
        output_tokens: Output length as the router knows it, tokens.
        row: One row of the table, shape (NUM_COLUMNS,).
    """
    if row[ob.ITERATION_S] > 0.0:
        first_s, decode_s, _ = ob.batching_delays(row, context_tokens, output_tokens)
        service_s = first_s - row[ob.WAIT_S] + decode_s
        missing = context_tokens - min(row[ob.MATCH_TOKENS], context_tokens)
        prefill_s = missing * row[ob.PREFILL_TOKEN_S]
    else:
        service_s = prefill_s = (context_tokens + output_tokens) / row[ob.TOKENS_PER_S]
    delay_s: float = weights[SERVICE_WEIGHT] * service_s + weights[PREFILL_WEIGHT] * prefill_s
    return delay_s + boost_delay_s(weights[BOOST_S], prefill_s)


@compiled
def fill_order_delays(
    weights: FloatArray,
    context_tokens: float,
    output_tokens: float,
    columns: FloatArray,
    out: FloatArray,
) -> None:
    """Write `order_delay_s` at every row of a table into `out`, shape (num_rows,)."""
    for i in range(columns.shape[0]):
        out[i] = order_delay_s(weights, context_tokens, output_tokens, columns[i])
