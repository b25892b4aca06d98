"""Ties: of replicas that are equally idle, the one that has waited longest for a request is next.

A policy takes the first of equal costs, or the one whose costs differ by noise. A fleet that is
mostly idle then hangs on one replica, also where that replica hangs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.routing import observation as ob
from tokenyard.routing.types import ReplicaSnapshot
from tokenyard.types import FloatArray

_SAME_SPEED = 2.0
"""Replicas whose mean response times differ by more are not equal, whatever is declared."""
_SAME_NUMBER = 1e-9
"""Relative difference of numbers that are equal but for rounding."""


def least_recently_used(
    snapshots: Sequence[ReplicaSnapshot], index: int, last_sent_s: Sequence[float] | FloatArray
) -> int:
    """Return the candidate that is next among those that are as idle as a choice.

    `last_sent_s` is when each was last sent a request, seconds of any clock.
    """
    # Always in one piece: the compiled function would be compiled anew for other arrays.
    sent_s = np.ascontiguousarray(last_sent_s, dtype=np.float64)
    return _least_recently_used(ob.unranked_columns(snapshots), index, sent_s)


@compiled
def _least_recently_used(columns: FloatArray, index: int, last_sent_s: FloatArray) -> int:
    chosen = columns[index]
    best = index
    if chosen[ob.NUM_WAITING] + chosen[ob.NUM_RUNNING] > 0.0:
        return best
    for i in range(columns.shape[0]):
        if last_sent_s[i] < last_sent_s[best] and equally_idle(columns[i], chosen):
            best = i
    return best


@compiled
def equally_idle(row: FloatArray, other: FloatArray) -> bool:
    """Whether two replicas are idle, equally fast, and hold as much of the request's prefix.

    Both are rows of the table of `tokenyard.routing.observation`, shape (NUM_COLUMNS,).
    """
    row_prefill_s, other_prefill_s = row[ob.PREFILL_TOKEN_S], other[ob.PREFILL_TOKEN_S]
    difference_s = abs(row_prefill_s - other_prefill_s)
    equal: bool = (
        row[ob.NUM_WAITING] + row[ob.NUM_RUNNING] == 0.0
        and other[ob.NUM_WAITING] + other[ob.NUM_RUNNING] == 0.0
        and row[ob.TOKENS_PER_S] * row[ob.NUM_SLOTS] == other[ob.TOKENS_PER_S] * other[ob.NUM_SLOTS]
        and row[ob.NUM_SLOTS] == other[ob.NUM_SLOTS]
        # NaN, where nothing has completed yet, is not greater than anything.
        and not row[ob.MEAN_RESPONSE_S] > _SAME_SPEED * other[ob.MEAN_RESPONSE_S]
        and not other[ob.MEAN_RESPONSE_S] > _SAME_SPEED * row[ob.MEAN_RESPONSE_S]
        and (row[ob.ITERATION_S] > 0.0) == (other[ob.ITERATION_S] > 0.0)
        and row[ob.MATCH_TOKENS] == other[ob.MATCH_TOKENS]
        and difference_s <= _SAME_NUMBER * max(abs(row_prefill_s), abs(other_prefill_s))
    )
    return equal
