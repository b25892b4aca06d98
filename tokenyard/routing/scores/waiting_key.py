"""The key that a request waits by, in the simulators and in serving: lower goes first."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled

KEY_S, LATE_AT_S, LATE_KEY_S, NUM_ASKED = range(4)
"""What is asked for, in the order of `tokenyard.routing.types.OrderKey`."""
LAST = (math.nan, math.inf, math.inf)
"""Asked for by one that waits behind all that are there: first come, first served."""


@compiled
def bounded_key(
    raw_key: tuple[float, float, float], arrival_s: float, now: float, max_overtaking_s: float
) -> tuple[float, float, float]:
    """By what a request waits: what was asked for, within bounds; the time now where it is NaN.

    No key is below the request's arrival, and none above now plus the bound. So whoever goes before
    another that was there first has arrived within the bound of the other's submission: nobody
    starves, whatever a policy orders by.

    Args:
        raw_key: What the policy orders by, as `tokenyard.routing.types.OrderKey`.
        arrival_s: Arrival of the request.
        now: When it is submitted to the server.
        max_overtaking_s: `Scenario.max_overtaking_s`.
    """
    if math.isnan(raw_key[KEY_S]):
        return now, math.inf, math.inf
    latest_s = now + max_overtaking_s
    key_s = min(max(raw_key[KEY_S], arrival_s), latest_s)
    late_key_s = min(raw_key[LATE_KEY_S], latest_s)
    if raw_key[LATE_AT_S] == math.inf or late_key_s <= key_s:
        return key_s, math.inf, math.inf
    return key_s, raw_key[LATE_AT_S], late_key_s
