"""What a router has sent to each replica and may wait there, by the keys that it waits by.

Live replicas say only how many wait. Those are taken to be the ones with the latest keys of all
that was sent there, as the earliest start first.
"""

from __future__ import annotations

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.types import FloatArray, IntArray

Queues = tuple[IntArray, FloatArray, FloatArray]
"""Queues one behind the other: where each starts, shape (num_queues + 1,) at least, keys in
seconds and tokens of all that wait, each of the shape of what is kept."""


class SentQueues:
    """What was sent to each replica and may wait there, one queue behind the other.

    To read, to shorten and to lengthen them takes one pass over numbers: a decision between a
    thousand replicas makes no object for each.
    """

    def __init__(self) -> None:
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

    def add(self, name: str, key_s: float, tokens: float) -> None:
        """Note what is sent to a replica, behind what has the same key.

        Args:
            name: Of the replica.
            key_s: By which it waits, seconds.
            tokens: Of its prompt; where replicas do not batch, of the whole request.
        """
        if name not in self._row_of:
            self.rows_of((*self._names, name))
        if self._starts[-1] == len(self._keys_s):
            self._keys_s = np.concatenate((self._keys_s, np.zeros_like(self._keys_s)))
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
        _insert(self._row_of[name], key_s, tokens, *self.queues)


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
