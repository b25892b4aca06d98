"""By what key a request waits, in both simulators."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled

LAST_S = math.nan
"""Asked for by one that waits behind all that are there: first come, first served."""


@compiled
def order_key_s(asked_s: float, arrival_s: float, now: float, max_overtaking_s: float) -> float:
    """Key that a request waits by: the one asked for, within bounds; the time now where it is NaN.

    No key is below the request's arrival, and none above now plus the bound. So whoever goes before
    another that was there first has arrived within the bound of the other's submission: nobody
    starves, whatever a policy orders by.

    Args:
        asked_s: What the policy orders by, seconds on the clock of arrivals.
        arrival_s: Arrival of the request.
        now: When it is submitted to the server.
        max_overtaking_s: `Scenario.max_overtaking_s`.
    """
    if math.isnan(asked_s):
        return now
    return min(max(asked_s, arrival_s), now + max_overtaking_s)
