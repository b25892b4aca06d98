"""Ties: of replicas that are equally idle, the one that has waited longest for a request is next.

A policy takes the first of equal costs, or the one whose costs differ by noise. A fleet that is
mostly idle then hangs on one replica, also where that replica hangs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenyard.routing.observation import (
    ITERATION_S,
    MATCH_TOKENS,
    MEAN_RESPONSE_S,
    NUM_RUNNING,
    NUM_SLOTS,
    NUM_WAITING,
    PREFILL_TOKEN_S,
    TOKENS_PER_S,
    unranked_columns,
)
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

    Args:
        snapshots: Candidates.
        index: The choice.
        last_sent_s: When each candidate was last sent a request, seconds of any clock.
    """
    columns = unranked_columns(snapshots)
    if columns[index, NUM_WAITING] or columns[index, NUM_RUNNING]:
        return index
    equal = np.flatnonzero(equally_idle(columns, index))
    sent_s = np.asarray(last_sent_s)
    first = equal[sent_s[equal].argmin()]
    return index if sent_s[index] == sent_s[first] else int(first)


def equally_idle(columns: FloatArray, index: int) -> npt.NDArray[np.bool_]:
    """Which replicas are idle, equally fast, and hold as much of the request's prefix as one.

    Args:
        columns: The table of `tokenyard.routing.observation`, shape (num, NUM_COLUMNS).
        index: Of that one, which always is.

    Returns:
        Shape (num,).
    """
    chosen = columns[index]
    speeds = columns[:, TOKENS_PER_S] * columns[:, NUM_SLOTS]
    response_s, own_s = columns[:, MEAN_RESPONSE_S], chosen[MEAN_RESPONSE_S]
    prefill_s, own_prefill_s = columns[:, PREFILL_TOKEN_S], chosen[PREFILL_TOKEN_S]
    equal: npt.NDArray[np.bool_] = (
        (columns[:, NUM_WAITING] + columns[:, NUM_RUNNING] == 0.0)
        & (chosen[NUM_WAITING] + chosen[NUM_RUNNING] == 0.0)
        & (speeds == speeds[index])
        & (columns[:, NUM_SLOTS] == chosen[NUM_SLOTS])
        # NaN, where nothing has completed yet, is not greater than anything.
        & ~(response_s > _SAME_SPEED * own_s)
        & ~(own_s > _SAME_SPEED * response_s)
        & ((columns[:, ITERATION_S] > 0.0) == (chosen[ITERATION_S] > 0.0))
        & (columns[:, MATCH_TOKENS] == chosen[MATCH_TOKENS])
        & (
            np.abs(prefill_s - own_prefill_s)
            <= _SAME_NUMBER * np.maximum(np.abs(prefill_s), abs(own_prefill_s))
        )
    )
    equal[index] = True
    return equal
