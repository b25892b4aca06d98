"""Requests that wait for room, by their order keys: see `tokenyard.routing.policies.order`."""

from __future__ import annotations

import itertools
import math
import time
from bisect import insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from tokenyard.routing.types import OrderKey

Item = TypeVar("Item")


def write_order_key(key: OrderKey) -> str:
    """Write a key as text: its numbers, without infinite ones at the end."""
    if key.late_at_s == key.late_key_s == math.inf:
        return repr(key.key_s)
    numbers = key[:2] if key.late_key_s == math.inf else key
    return " ".join(map(repr, numbers))


def read_order_key(text: str) -> OrderKey:
    """Read what `write_order_key` wrote; anything else is a ValueError."""
    numbers = [float(part) for part in text.split()]
    if not 1 <= len(numbers) <= len(OrderKey._fields) or any(map(math.isnan, numbers)):
        raise ValueError(f"an order key is {text!r}")
    key = OrderKey(*numbers)
    if not math.isfinite(key.key_s) or key.late_key_s < key.key_s:
        raise ValueError(f"an order key is {text!r}")
    return key


class ArrivalKeys:
    """Keys for requests without one: their arrival times, which never decrease."""

    def __init__(self, clock_s: Callable[[], float] = time.time) -> None:
        self._clock_s, self._last_s = clock_s, -math.inf

    def key(self, order_key: OrderKey | None) -> OrderKey:
        """Return a request's own key, or else the time."""
        if order_key is not None:
            return order_key
        self._last_s = max(self._last_s, self._clock_s())
        return OrderKey(self._last_s)


def priority_of(key_s: float) -> int:
    """Return a key as vLLM's `priority`, a whole number, lower first: Unix time, milliseconds."""
    return round(key_s * 1000)


class WaitingLine(Generic[Item]):
    """Waiting requests, lowest key first, and of equal keys the first to come.

    Who is late gives its place up only when it has become the first, as in the simulator: keys only
    grow, so the first is the right one as soon as it is not late, or has gone back before.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, float, float, Item]] = []
        """Key that counts, number, from when on the one behind it counts, and who waits."""
        self._numbers = itertools.count()

    def add(self, item: Item, key: OrderKey) -> None:
        """Add a request; the times in its key are by the clock that `pop` is given."""
        # No two have one number, so items are never compared.
        insort(self._entries, (key.key_s, next(self._numbers), key.late_at_s, key.late_key_s, item))

    def pop(self, now_s: float) -> Item:
        """Take out the request that is first now."""
        item = next(self.in_order(now_s))
        del self._entries[0]
        return item

    def remove(self, item: Item) -> None:
        """Take out a request that gives up; ignored where it does not wait."""
        self._entries = [entry for entry in self._entries if entry[-1] is not item]

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._entries)

    def in_order(self, now_s: float) -> Iterator[Item]:
        """Go through the waiting requests, first to last as of now.

        Meanwhile the one who was just named may be taken out, and no other.
        """
        at = 0
        while at < len(self._entries):
            entry = self._entries[at]
            _, number, late_at_s, late_key_s, item = entry
            if late_at_s < now_s:
                del self._entries[at]
                insort(self._entries, (late_key_s, number, math.inf, math.inf, item), lo=at)
                continue
            yield item
            if at < len(self._entries) and self._entries[at] is entry:
                at += 1
