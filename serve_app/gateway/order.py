"""By what key a request waits, in engines of ours, in vLLM and at the gateway: lower goes first."""

from __future__ import annotations

import math

from tokenyard.routing.types import OrderKey


def bounded_key(
    asked: OrderKey | None, arrival_s: float, now_s: float, max_overtaking_s: float
) -> OrderKey | None:
    """Return the key that a request waits by: as `tokenyard.routing.simulator.order`.

    Whoever goes before another that was there first has arrived within the bound of the other's
    placement, whatever a policy orders by.

    Args:
        asked: What the policy orders by, Unix time, seconds; None: it orders nothing, and so does
            the answer: the request waits behind all that are there.
        arrival_s: Arrival of the request, Unix time, seconds.
        now_s: When it is placed, Unix time, seconds.
        max_overtaking_s: Of the scenario.
    """
    if asked is None:
        return None
    latest_s = now_s + max_overtaking_s
    # A policy may answer numbers of numpy, which are not written as Python writes its own.
    key_s = float(min(max(asked.key_s, arrival_s), latest_s))
    late_key_s = float(min(asked.late_key_s, latest_s))
    if asked.late_at_s == math.inf or late_key_s <= key_s:
        return OrderKey(key_s)
    return OrderKey(key_s, float(asked.late_at_s), late_key_s)


def order_fields(order_key: OrderKey | None) -> dict[str, float | None]:
    """Name the numbers of a key, as answers and logs show them; None where there is none.

    JSON has no number for infinity: a key that is infinite is behind all others.
    """
    numbers = (math.inf,) * 3 if order_key is None else order_key
    names = ("order_key_s", "late_at_s", "late_key_s")
    return {
        name: float(one) if math.isfinite(one) else None
        for name, one in zip(names, numbers, strict=True)
    }
