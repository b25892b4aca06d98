"""Where a request would stand among those who wait at a replica, as columns of the table."""

from __future__ import annotations

from tokenyard.compiled import compiled
from tokenyard.routing.observation import (
    ITERATION_S,
    NUM_BEFORE,
    NUM_BEHIND,
    NUM_SLOTS,
    OVERTAKEN_S,
    PREFILL_IN_FLIGHT,
    TOKENS_PER_S,
    WAIT_S,
)
from tokenyard.types import FloatArray


@compiled
def fill_place(row: FloatArray, before: int, behind: int, tokens_behind: float) -> None:
    """Write how many would start before and after a request, and what it does not wait for.

    Where replicas batch, that is the share of prompts in flight that would be behind it, of the
    wait; else the work behind it at full speed.

    Args:
        row: One row of the table, shape (NUM_COLUMNS,).
        before: Requests that would start before it.
        behind: Requests that would start after it.
        tokens_behind: Prompts of the latter, tokens; of a server the whole requests.
    """
    row[NUM_BEFORE] = before
    row[NUM_BEHIND] = behind
    if row[ITERATION_S] > 0.0:
        share = min(tokens_behind / max(row[PREFILL_IN_FLIGHT], 1.0), 1.0)
        row[OVERTAKEN_S] = row[WAIT_S] * share
    else:
        work_s = tokens_behind / (row[TOKENS_PER_S] * row[NUM_SLOTS])
        row[OVERTAKEN_S] = min(work_s, row[WAIT_S])
