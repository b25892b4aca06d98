"""The placement that knows the order: `marginal_in_order`, which exists only with an order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.routing.observation import (
    ITERATION_S,
    NUM_RUNNING,
    NUM_SLOTS,
    NUM_WAITING,
    PREFILL_IN_FLIGHT,
    TOKENS_PER_S,
    unranked_columns,
)
from tokenyard.routing.policies.cost import cheapest
from tokenyard.routing.policies.delay import (
    ADDED_DECODE_S,
    ADDED_FIRST_TOKEN_S,
    ADDED_OTHERS_S,
    ADDED_WAIT_S,
    added_delays,
)
from tokenyard.routing.policies.order import Order
from tokenyard.routing.policies.order_spec import OrderSpec
from tokenyard.routing.types import Decision, ReplicaSnapshot, Request, SnapshotColumns
from tokenyard.types import FloatArray, IntArray


class MarginalInOrder:
    """Least marginal delay that knows where in each queue the request would stand.

    It waits for those whose key is not above its own, and delays only those behind it: the cost is
    the wait for the former, its own service, and that service for each of the latter. Where
    replicas batch, the share of prompts that would be behind is taken off the wait, and the share
    of requests that would be before it off what the others are delayed by.

    A simulator shows what waits. Live replicas say only how many do: then the rule takes them to be
    those with the latest keys of all that it has sent there, as the earliest start first.
    """

    sees_queues = True

    def __init__(self, order: Order, wait_weight: float = 1.0, others_weight: float = 1.0) -> None:
        """Let requests wait as `order` says; weights as those of `MarginalDelay`."""
        self._order = order
        self._wait_weight = float(wait_weight)
        self._others_weight = float(others_weight)
        self._sent = SentQueues()

    @property
    def order_spec(self) -> OrderSpec:
        """By which rule requests wait."""
        return self._order.spec

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the index of the choice."""
        return self.place(request, snapshots).replica

    def place(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the replica of least cost, with the order key there."""
        columns, delays = unranked_columns(snapshots), added_delays(request, snapshots)
        delays_s = self._order.delays_s(request, snapshots)
        keys_s = request.arrival_s + delays_s
        is_shown = not isinstance(snapshots, SnapshotColumns) and snapshots[0].queue is not None
        if is_shown:
            rows, queues = _shown(snapshots)
        else:
            rows = self._sent.rows_of(_names(snapshots))
            # Of one replica the column is contiguous, and of several it is not: a view would be
            # compiled anew at the first decision after warming up.
            self._sent.keep_latest(rows, columns[:, NUM_WAITING].copy())
            queues = self._sent.queues
        costs = np.empty(len(columns))
        _fill_costs(
            columns, delays, keys_s, rows, *queues, self._wait_weight, self._others_weight, costs
        )
        chosen = cheapest(costs)
        if not is_shown:
            batches = columns[chosen, ITERATION_S] > 0.0
            tokens = request.context_tokens if batches else request.predicted_total_tokens
            self._sent.add(int(rows[chosen]), float(keys_s[chosen]), float(tokens))
        key = self._order.key_at(request, snapshots, chosen, float(delays_s[chosen]))
        return Decision(chosen, costs, key)


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
def _fill_costs(
    columns: FloatArray,
    delays: FloatArray,
    keys_s: FloatArray,
    rows: IntArray,
    starts: IntArray,
    queue_keys_s: FloatArray,
    queue_tokens: FloatArray,
    wait_weight: float,
    others_weight: float,
    out: FloatArray,
) -> None:
    for i in range(columns.shape[0]):
        row = columns[i]
        first, end = starts[rows[i]], starts[rows[i] + 1]
        tokens = 0.0
        behind = 0
        for at in range(end - 1, first - 1, -1):
            if queue_keys_s[at] > keys_s[i]:
                tokens += queue_tokens[at]
                behind += 1
        wait_s, others_s = delays[i, ADDED_WAIT_S], delays[i, ADDED_OTHERS_S]
        service_s = delays[i, ADDED_FIRST_TOKEN_S] + delays[i, ADDED_DECODE_S] - wait_s
        if row[ITERATION_S] > 0.0:
            wait_s *= 1.0 - min(tokens / max(row[PREFILL_IN_FLIGHT], 1.0), 1.0)
            num = end - first
            outstanding = row[NUM_WAITING] + row[NUM_RUNNING]
            others_s *= 1.0 - (num - behind) / max(outstanding, num, 1.0)
        else:
            wait_s = max(wait_s - tokens / (row[TOKENS_PER_S] * row[NUM_SLOTS]), 0.0)
            others_s = service_s * behind / row[NUM_SLOTS]
        out[i] = wait_weight * wait_s + service_s + others_weight * others_s
