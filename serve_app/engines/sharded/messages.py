"""Messages between ranks and their engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from serve_app.engines.base import EngineStats
from serve_app.engines.kv_events import BlockEvent
from serve_app.engines.waiting import ArrivalKeys, read_order_key, write_order_key
from tokenyard.routing.types import OrderKey


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Limits of a loaded model."""

    kv_capacity_tokens: int
    eos_token_ids: frozenset[int]


class RequestNames:
    """Names of requests at the ranks: each is unique, and ends with an order key.

    All ranks queue alike, so that they must be told the same keys, and transformers tells them
    nothing of a request but its name and its tokens.
    """

    def __init__(self) -> None:
        self._numbers, self._arrivals = itertools.count(), ArrivalKeys()

    def new(self, request_id: str, order_key: OrderKey | None) -> str:
        """Name a request; without an order key, the time is its key."""
        key = write_order_key(self._arrivals.key(order_key))
        return f"{request_id}#{next(self._numbers)}@{key}"


def request_id_in(name: str) -> str:
    """Return the request id in a name."""
    return name.rpartition("#")[0]


def order_key_in(name: str) -> OrderKey:
    """Return the order key in a name: Unix time, seconds."""
    return read_order_key(name.rpartition("@")[2])


@dataclass(frozen=True, slots=True)
class Progress:
    """What an iteration did to one request."""

    request_id: str
    token_id: int | None
    """None: it failed."""
    finished: bool
    error: str | None


@dataclass(frozen=True, slots=True)
class RankReport:
    """What has happened on rank 0 since the last poll."""

    progress: list[Progress]
    stats: EngineStats | None
    """None before the first iteration."""
    blocks: list[BlockEvent]
    """How the prefix cache has changed, in order."""
