"""Where a request would stand in each replica's queue: who waits is shown, or remembered.

A simulator shows what waits. A gateway keeps what it has sent, under all policies
(`tokenyard.routing.sent_queues`). Without one a policy remembers what it has sent itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.routing.observation import NUM_WAITING
from tokenyard.routing.scores.order import fill_order_delays
from tokenyard.routing.scores.places import fill_place
from tokenyard.routing.sent_queues import Queues, SentQueues
from tokenyard.routing.types import ReplicaSnapshot, Request, SnapshotColumns
from tokenyard.types import FloatArray, IntArray


class QueuePlaces:
    """Looks where requests would stand, for a policy that orders them."""

    def __init__(self) -> None:
        self._sent = SentQueues()
        self._notes = False
        """Whether `fill` looked at what this policy has sent itself."""

    def fill(
        self, snapshots: Sequence[ReplicaSnapshot], keys_s: FloatArray, columns: FloatArray
    ) -> None:
        """Write the places of a request that would wait by these keys.

        Args:
            snapshots: Candidates.
            keys_s: Key of the request at each of them, seconds, shape (num,).
            columns: Their table, shape (num, NUM_COLUMNS).
        """
        kept = snapshots.sent if isinstance(snapshots, SnapshotColumns) else None
        is_shown = not isinstance(snapshots, SnapshotColumns) and snapshots[0].queue is not None
        self._notes = kept is None and not is_shown
        if is_shown:
            rows, queues = _shown(snapshots)
        else:
            sent = self._sent if kept is None else kept
            rows = sent.rows_of(_names(snapshots))
            if kept is None:
                # Of one replica the column is contiguous, and of several it is not: a view would be
                # compiled anew at the first decision after warming up.
                sent.keep_latest(rows, columns[:, NUM_WAITING].copy())
            queues = sent.queues
        _fill(columns, keys_s, rows, *queues)

    def note(
        self, request: Request, snapshots: Sequence[ReplicaSnapshot], chosen: int, key_s: float
    ) -> None:
        """Note where a request is sent that `fill` was asked about.

        Args:
            request: The request.
            snapshots: Candidates.
            chosen: Which of them it is sent to.
            key_s: Its key there, seconds.
        """
        if not self._notes:
            return
        if isinstance(snapshots, SnapshotColumns):
            name, batches = snapshots.replica_ids[chosen], snapshots.batches
        else:
            name, batches = snapshots[chosen].replica_id, snapshots[chosen].engine is not None
        tokens = request.context_tokens if batches else request.predicted_total_tokens
        self._sent.add(name, float(key_s), float(tokens))


def order_keys_s(order: FloatArray, request: Request, columns: FloatArray) -> FloatArray:
    """Key of a request at each replica, before it is late, seconds, shape (num,).

    Args:
        order: Weights (`tokenyard.routing.scores.order`).
        request: The request.
        columns: Table of the replicas.
    """
    # Always floats: the compiled function would be compiled anew for other types.
    context = float(request.context_tokens)
    keys_s = np.empty(len(columns))
    output = float(request.predicted_total_tokens) - context
    fill_order_delays(order, context, output, columns, keys_s)
    keys_s += request.arrival_s
    return keys_s


def _names(snapshots: Sequence[ReplicaSnapshot]) -> tuple[str, ...]:
    if isinstance(snapshots, SnapshotColumns):
        return tuple(snapshots.replica_ids)
    return tuple(snapshot.replica_id for snapshot in snapshots)


def _shown(snapshots: Sequence[ReplicaSnapshot]) -> tuple[IntArray, Queues]:
    """Row of each snapshot, and the queues that they show."""
    queues = [snapshot.queue for snapshot in snapshots if snapshot.queue is not None]
    starts = np.zeros(len(snapshots) + 1, dtype=np.int64)
    np.cumsum([len(queue.tokens) for queue in queues], out=starts[1:])
    keys_s = np.concatenate([queue.order_keys_s for queue in queues])
    tokens = np.concatenate([queue.tokens for queue in queues])
    return np.arange(len(snapshots)), (starts, keys_s, tokens)


@compiled
def _fill(
    columns: FloatArray,
    keys_s: FloatArray,
    rows: IntArray,
    starts: IntArray,
    queue_keys_s: FloatArray,
    queue_tokens: FloatArray,
) -> None:
    for i in range(columns.shape[0]):
        first, end = starts[rows[i]], starts[rows[i] + 1]
        tokens = 0.0
        behind = 0
        for at in range(end - 1, first - 1, -1):
            if queue_keys_s[at] > keys_s[i]:
                tokens += queue_tokens[at]
                behind += 1
        fill_place(columns[i], end - first - behind, behind, tokens)
