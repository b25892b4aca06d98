"""Ties: of replicas that are equally idle, the one that has waited longest for a request is next.

A policy takes the first of equal costs, or the one whose costs differ by noise. A fleet that is
mostly idle then hangs on one replica, also where that replica hangs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot

_SAME_SPEED = 2.0
"""Replicas whose mean response times differ by more are not equal, whatever is declared."""


def least_recently_used(
    snapshots: Sequence[ReplicaSnapshot], index: int, last_sent_s: Sequence[float]
) -> int:
    """Return the candidate that is next among those that are as idle as a choice.

    Args:
        snapshots: Candidates.
        index: The choice.
        last_sent_s: When each candidate was last sent a request, seconds of any clock.
    """
    chosen = snapshots[index]
    if chosen.num_outstanding:
        return index
    equal = [i for i, one in enumerate(snapshots) if equally_idle(one, chosen)]
    return min(equal, key=lambda i: (last_sent_s[i], i != index))


def equally_idle(one: ReplicaSnapshot, other: ReplicaSnapshot) -> bool:
    """Whether both are idle, equally fast, and hold as much of the request's prefix."""
    if one is other:
        return True
    slower, faster = one.mean_response_s, other.mean_response_s
    if faster > slower:
        slower, faster = faster, slower
    return (
        not one.num_outstanding
        and not other.num_outstanding
        and one.full_tokens_per_s == other.full_tokens_per_s
        and one.num_slots == other.num_slots
        and not slower > _SAME_SPEED * faster  # NaN: nothing has completed yet.
        and _same_engine(one.engine, other.engine)
    )


def _same_engine(one: EngineSnapshot | None, other: EngineSnapshot | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.match_tokens == other.match_tokens and math.isclose(
        one.prefill_token_s, other.prefill_token_s
    )
