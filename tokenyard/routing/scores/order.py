"""How much later than its arrival a request takes its place in a queue: orders by size, compiled.

`tokenyard.routing.policies.order` has two of these orders as rules: `sjf` has a service weight,
`wspt` a prefill weight. Here both are numbers, so that a kernel may run them.
"""

from __future__ import annotations

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.routing import observation as ob
from tokenyard.types import FloatArray

SERVICE_WEIGHT, PREFILL_WEIGHT, NUM_ORDER_WEIGHTS = range(3)
FIRST_COME: FloatArray = np.zeros(NUM_ORDER_WEIGHTS)
"""Weights that order nothing."""


@compiled
def is_first_come(weights: FloatArray) -> bool:
    """Whether these weights order nothing."""
    first_come: bool = weights[SERVICE_WEIGHT] == 0.0 and weights[PREFILL_WEIGHT] == 0.0
    return first_come


@compiled
def order_delay_s(
    weights: FloatArray, context_tokens: float, output_tokens: float, row: FloatArray
) -> float:
    """Weighted time that the request takes at a replica, seconds.

    Args:
        weights: Of the time from its start to its end, and of that of its prompt, shape
            (NUM_ORDER_WEIGHTS,), all at least 0.
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
    return delay_s
