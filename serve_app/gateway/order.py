"""By what key a request waits, in engines of ours, in vLLM and at the gateway: lower goes first."""

from __future__ import annotations


def bounded_key_s(
    asked_s: float | None, arrival_s: float, now_s: float, max_overtaking_s: float
) -> float | None:
    """Return the key that a request waits by: as `tokenyard.routing.simulator.order`.

    Whoever goes before another that was there first has arrived within the bound of the other's
    placement, whatever a policy orders by.

    Args:
        asked_s: What the policy orders by, Unix time, seconds; None: it orders nothing, and so
            does the answer: the request waits behind all that are there.
        arrival_s: Arrival of the request, Unix time, seconds.
        now_s: When it is placed, Unix time, seconds.
        max_overtaking_s: Of the scenario.
    """
    if asked_s is None:
        return None
    # A policy may answer numbers of numpy, which are not written as Python writes its own.
    return float(min(max(asked_s, arrival_s), now_s + max_overtaking_s))
