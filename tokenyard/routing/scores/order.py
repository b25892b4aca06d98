"""How much later than its arrival a request takes its place in a queue: orders by size, compiled.

Each of the first three is a rule of `tokenyard.routing.policies.order`. Here all are numbers, which
add up, so that a kernel may run them and a search may find them.
"""

from __future__ import annotations

import math

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.routing import observation as ob
from tokenyard.types import FloatArray

SERVICE_WEIGHT, PREFILL_WEIGHT, BOOST_S, SET_BACK_WAITS, NUM_ORDER_WEIGHTS = range(5)
"""Knobs of `sjf`, `wspt` and `boost`, and how many waits those who are late go back."""
FIRST_COME: FloatArray = np.zeros(NUM_ORDER_WEIGHTS)
"""Weights that order nothing."""
BOOST_RANGE = 1000.0
"""Requests that take less than the knob over this are not told apart."""


@compiled
def is_first_come(weights: FloatArray) -> bool:
    """Whether these weights order nothing."""
    for weight in weights:
        if weight != 0.0:
            return False
    return True


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
def prefill_time_s(context_tokens: float, output_tokens: float, row: FloatArray) -> float:
    """Time that the prompt takes without what is cached; of a server the whole service, seconds."""
    if row[ob.ITERATION_S] > 0.0:
        missing = context_tokens - min(row[ob.MATCH_TOKENS], context_tokens)
        prefill_s: float = missing * row[ob.PREFILL_TOKEN_S]
        return prefill_s
    service_s: float = (context_tokens + output_tokens) / row[ob.TOKENS_PER_S]
    return service_s


@compiled
def order_delay_s(
    weights: FloatArray, context_tokens: float, output_tokens: float, row: FloatArray
) -> float:
    """What the orders add to the arrival of a request at a replica, seconds.

    Args:
        weights: Of the time from its start to its end, of that of its prompt, the boost by the
            latter, and one that adds nothing yet; shape (NUM_ORDER_WEIGHTS,), all at least 0.
        context_tokens: Prompt length, tokens.
        output_tokens: Output length as the router knows it, tokens.
        row: One row of the table, shape (NUM_COLUMNS,).
    """
    prefill_s = prefill_time_s(context_tokens, output_tokens, row)
    service_s = prefill_s
    if row[ob.ITERATION_S] > 0.0:
        first_s, decode_s, _ = ob.batching_delays(row, context_tokens, output_tokens)
        service_s = first_s - row[ob.WAIT_S] + decode_s
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


@compiled
def order_key(
    weights: FloatArray,
    arrival_s: float,
    due_s: float,
    context_tokens: float,
    output_tokens: float,
    held_s: float,
    row: FloatArray,
) -> tuple[float, float, float]:
    """By what a request waits at a replica (`types.OrderKey`).

    It is late when what its prompt takes (on a server the whole service) does not fit any more into
    what is left of its SLO. Those who are late go behind those who are not: to let late jobs go
    last makes the fewest late (Moore 1968). Here they go back by a multiple of the wait that was
    to be expected when they were placed, and no further, so that they too get their turn. Where
    little waits that is little, and the slowest responses are hardly slower for it.

    Args:
        weights: Of the order, shape (NUM_ORDER_WEIGHTS,).
        arrival_s: Arrival of the request, seconds.
        due_s: Its SLO, seconds (`Request.due_s`).
        context_tokens: Prompt length, tokens.
        output_tokens: Output length as the router knows it, tokens.
        held_s: Wait to be expected before it is placed, seconds (`Request.held_s`).
        row: One row of the table, shape (NUM_COLUMNS,).
    """
    key_s = arrival_s + order_delay_s(weights, context_tokens, output_tokens, row)
    if weights[SET_BACK_WAITS] == 0.0:
        return key_s, math.inf, math.inf
    late_at_s = arrival_s + due_s - prefill_time_s(context_tokens, output_tokens, row)
    return key_s, late_at_s, key_s + weights[SET_BACK_WAITS] * (held_s + row[ob.WAIT_S])
