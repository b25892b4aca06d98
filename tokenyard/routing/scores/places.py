"""Where a request would stand among those who wait at a replica, as columns of the table."""

from __future__ import annotations

from tokenyard.compiled import compiled
from tokenyard.routing import observation as ob
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
    row[ob.NUM_BEFORE] = before
    row[ob.NUM_BEHIND] = behind
    if row[ob.ITERATION_S] > 0.0:
        share = min(tokens_behind / max(row[ob.PREFILL_IN_FLIGHT], 1.0), 1.0)
        row[ob.OVERTAKEN_S] = row[ob.WAIT_S] * share
    else:
        work_s = tokens_behind / (row[ob.TOKENS_PER_S] * row[ob.NUM_SLOTS])
        row[ob.OVERTAKEN_S] = min(work_s, row[ob.WAIT_S])
