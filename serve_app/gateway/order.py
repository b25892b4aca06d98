"""Keys by which requests wait at the gateway, in our engines and in vLLM: lower goes first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from tokenyard.routing.scores import waiting_key
from tokenyard.routing.types import OrderKey

_bounded: Callable[..., tuple[float, float, float]] = cast(Any, waiting_key.bounded_key).py_func
"""Plain Python: to call compiled code costs more than this takes."""


def bounded_key(
    wanted: OrderKey | None, arrival_s: float, now_s: float, max_overtaking_s: float
) -> OrderKey | None:
    """Return the key that a request waits by (`tokenyard.routing.scores.waiting_key`).

    Args:
        wanted: Key that the policy gives, Unix time, seconds; None: it orders nothing, and the
            request waits behind all that are there.
        arrival_s: Arrival of the request, Unix time, seconds.
        now_s: When it is placed, Unix time, seconds.
        max_overtaking_s: Of the scenario.
    """
    if wanted is None:
        return None
    # A policy may answer numbers of numpy, which are not written as Python writes its own.
    numbers = tuple(map(float, wanted))
    return OrderKey(*_bounded(numbers, arrival_s, now_s, max_overtaking_s))


def order_fields(order_key: OrderKey | None) -> dict[str, float | None]:
    """Return the numbers of a key by name, as answers and logs show them; None: no key.

    JSON has no number for infinity: a key that is infinite is behind all others.
    """
    numbers = (math.inf,) * 3 if order_key is None else order_key
    names = ("order_key_s", "late_at_s", "late_key_s")
    return {
        name: float(number) if math.isfinite(number) else None
        for name, number in zip(names, numbers, strict=True)
    }
