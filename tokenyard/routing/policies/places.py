"""Where a request would stand in each replica's queue: who waits is shown, or remembered.

A simulator shows what waits. Live replicas say only how many do: those are taken to be the ones
with the latest keys of all that was sent there, as the earliest start first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.routing.observation import ITERATION_S, NUM_WAITING
from tokenyard.routing.scores.places import fill_place
from tokenyard.routing.types import ReplicaSnapshot, Request, SnapshotColumns
from tokenyard.types import FloatArray, IntArray


class QueuePlaces:
    """Looks where requests would stand, for a policy that orders them."""

    def __init__(self) -> None:
        """Begin with nothing sent."""
        self._sent = SentQueues()
        self._rows: IntArray | None = None
        """Of those whom `fill` looked at last, in what was sent; None: queues were shown."""

    def fill(
        self, snapshots: Sequence[ReplicaSnapshot], keys_s: FloatArray, columns: FloatArray
    ) -> None:
        """Write the places of a request that would wait by these keys.

        Args:
            snapshots: Candidates.
            keys_s: Key of the request at each of them, seconds, shape (num,).
            columns: Their table, shape (num, NUM_COLUMNS).
        """
        if not isinstance(snapshots, SnapshotColumns) and snapshots[0].queue is not None:
            self._rows = None
            rows, queues = _shown(snapshots)
        else:
            rows = self._rows = self._sent.rows_of(_names(snapshots))
            # Of one replica the column is contiguous, and of several it is not: a view would be
            # compiled anew at the first decision after warming up.
            self._sent.keep_latest(rows, columns[:, NUM_WAITING].copy())
            queues = self._sent.queues
        _fill(columns, keys_s, rows, *queues)

    def note(self, request: Request, chosen: int, key_s: float, columns: FloatArray) -> None:
        """Note where a request is sent that `fill` was asked about.

        Args:
            request: The request.
            chosen: Place of its replica among the candidates.
            key_s: Its key there, seconds.
            columns: Table of the candidates.
        """
        if self._rows is None:
            return
        batches = columns[chosen, ITERATION_S] > 0.0
        tokens = request.context_tokens if batches else request.predicted_total_tokens
        self._sent.add(int(self._rows[chosen]), float(key_s), float(tokens))


Queues = tuple[IntArray, FloatArray, FloatArray]
"""Queues one behind the other: where each starts, shape (num_queues + 1,) at least, keys in
seconds and tokens of all that wait, each of the shape of what is kept."""


class SentQueues:
    """What was sent to each replica and may wait there, one queue behind the other.

    To read, to shorten and to lengthen them takes one pass over numbers: a decision between a
    thousand replicas makes no object for each.
    """

    def __init__(self) -> None:
        """Begin with nothing sent."""
        self._row_of: dict[str, int] = {}
        self._names: tuple[str, ...] = ()
        self._rows: IntArray = np.zeros(0, dtype=np.int64)
        self._most: FloatArray = np.zeros(0)
        self._starts: IntArray = np.zeros(1, dtype=np.int64)
        self._keys_s: FloatArray = np.zeros(64)
        self._tokens: FloatArray = np.zeros(64)

    @property
    def queues(self) -> Queues:
        """Those of all replicas, by row, each in the order of keys."""
        return self._starts, self._keys_s, self._tokens

    def rows_of(self, names: tuple[str, ...]) -> IntArray:
        """Row of each replica by its name, shape (num,); new ones have nothing sent."""
        if names != self._names:
            self._names = names
            rows = [self._row_of.setdefault(name, len(self._row_of)) for name in names]
            self._rows = np.array(rows, dtype=np.int64)
            new = len(self._row_of) - len(self._most)
            self._most = np.empty(len(self._row_of))
            self._starts = np.concatenate((self._starts, np.repeat(self._starts[-1:], new)))
        return self._rows

    def keep_latest(self, rows: IntArray, num_waiting: FloatArray) -> None:
        """Drop all but the latest `num_waiting` keys of these rows, both of shape (num,)."""
        _keep_latest(rows, num_waiting, self._most, *self.queues)

    def add(self, row: int, key_s: float, tokens: float) -> None:
        """Note what is sent to the replica of a row, behind what has the same key."""
        if self._starts[-1] == len(self._keys_s):
            self._keys_s = np.concatenate((self._keys_s, np.zeros_like(self._keys_s)))
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
        _insert(row, key_s, tokens, *self.queues)


def _names(snapshots: Sequence[ReplicaSnapshot]) -> tuple[str, ...]:
    if isinstance(snapshots, SnapshotColumns):
        return tuple(snapshots.replica_ids)
    return tuple(one.replica_id for one in snapshots)


def _shown(snapshots: Sequence[ReplicaSnapshot]) -> tuple[IntArray, Queues]:
    """Row of each snapshot, and the queues that they show."""
    queues = [one.queue for one in snapshots if one.queue is not None]
    starts = np.zeros(len(snapshots) + 1, dtype=np.int64)
    np.cumsum([len(one.tokens) for one in queues], out=starts[1:])
    keys_s = np.concatenate([one.order_keys_s for one in queues])
    tokens = np.concatenate([one.tokens for one in queues])
    return np.arange(len(snapshots)), (starts, keys_s, tokens)


@compiled
def _keep_latest(
    rows: IntArray,
    num_waiting: FloatArray,
    most: FloatArray,
    starts: IntArray,
    keys_s: FloatArray,
    tokens: FloatArray,
) -> None:
    for row in range(most.shape[0]):
        most[row] = np.inf  # Of replicas that are not offered all is kept.
    for i in range(rows.shape[0]):
        most[rows[i]] = num_waiting[i]
    first = kept = 0
    for row in range(most.shape[0]):
        end = starts[row + 1]
        if end - first > most[row]:
            first = end - int(most[row])
        for at in range(first, end):
            keys_s[kept] = keys_s[at]
            tokens[kept] = tokens[at]
            kept += 1
        starts[row + 1] = kept
        first = end


@compiled
def _insert(
    row: int,
    key_s: float,
    num_tokens: float,
    starts: IntArray,
    keys_s: FloatArray,
    tokens: FloatArray,
) -> None:
    last = starts.shape[0] - 1
    place = starts[row + 1]
    while place > starts[row] and keys_s[place - 1] > key_s:
        place -= 1
    for at in range(starts[last], place, -1):
        keys_s[at] = keys_s[at - 1]
        tokens[at] = tokens[at - 1]
    keys_s[place] = key_s
    tokens[place] = num_tokens
    for later in range(row + 1, last + 1):
        starts[later] += 1


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
