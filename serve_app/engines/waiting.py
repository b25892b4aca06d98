"""Requests that wait for room, by their order keys: see `tokenyard.routing.policies.order`."""

from __future__ import annotations

import itertools
import math
import time
from bisect import insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Arrivals:
    """Keys of requests that come without one: the times when they come, which never go back."""

    def __init__(self, clock_s: Callable[[], float] = time.time) -> None:
        """Read a clock: Unix time, seconds."""
        self._clock_s, self._last_s = clock_s, -math.inf

    def key_s(self, order_key_s: float | None) -> float:
        """Return the key of a request that comes now; it is its own where it has one."""
        if order_key_s is not None:
            return order_key_s
        self._last_s = max(self._last_s, self._clock_s())
        return self._last_s


def priority_of(key_s: float) -> int:
    """Return a key as vLLM's `priority`, a whole number, lower first: Unix time, milliseconds."""
    return round(key_s * 1000)


class WaitingLine(Generic[Item]):
    """Those who wait, lowest key first, and of equal keys who came first."""

    def __init__(self) -> None:
        """Begin empty."""
        self._entries: list[tuple[float, int, Item]] = []
        self._numbers = itertools.count()

    def add(self, item: Item, key_s: float) -> None:
        """Let one wait."""
        # No two have one number, so items are never compared.
        insort(self._entries, (key_s, next(self._numbers), item))

    def pop(self) -> Item:
        """Take out who is first."""
        return self._entries.pop(0)[2]

    def remove(self, item: Item) -> None:
        """Take out one who gives up; ignored where it does not wait."""
        self._entries = [one for one in self._entries if one[2] is not item]

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Item]:
        """Go through all who wait now, the first one first."""
        return iter([item for _, _, item in self._entries])
