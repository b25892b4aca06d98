"""Snapshots as columns of numbers: what a router keeps of many replicas, and shows its policies.

A router keeps one row of `state` per replica, and updates it when something is published, sent,
received or closed. `offer`, `keep_with_room` and `fill_live` read the rows at a decision.
`SnapshotTable` shows them to policies, which take its columns as they are; a `ReplicaSnapshot` is
made only where somebody asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.routing import observation as ob
from tokenyard.routing.types import (
    EngineSnapshot,
    ReplicaSnapshot,
    SnapshotColumns,
)
from tokenyard.types import FloatArray, IntArray

# Columns of the state; units as in `ReplicaSnapshot` and `EngineSnapshot`. First what is fixed;
# then what the replica published, and how many of its requests in flight were this router's then;
# then what this router sent to it and has not got back, and the number of the replica's pool.
(
    STATE_TOKENS_PER_S, STATE_MAX_BATCH, STATE_ITERATION_S, STATE_PREFILL_TOKEN_S,
    STATE_SEQUENCE_S, STATE_KV_TOKEN_S, STATE_TOKEN_BUDGET, STATE_KV_CAPACITY_TOKENS,
    STATE_PUBLISHED_WAITING, STATE_PUBLISHED_RUNNING, STATE_PUBLISHED_KV_USED,
    STATE_PUBLISHED_AT_S, STATE_ACCEPTING, STATE_SENT_WHEN_PUBLISHED, STATE_IN_FLIGHT,
    STATE_PREFILL_IN_FLIGHT, STATE_OUTPUT_IN_FLIGHT, STATE_MEAN_RESPONSE_S, STATE_LAST_SENT_S,
    STATE_POOL, NUM_STATE,
) = range(21)  # fmt: skip
NUM_FIXED = STATE_PUBLISHED_WAITING

# Columns of what is live in a decision. The last is no part of a snapshot: when the replica was
# last sent a request, Unix time.
(
    LIVE_NUM_WAITING, LIVE_NUM_RUNNING, LIVE_KV_USED_FRACTION, LIVE_PREFILL_TOKENS,
    LIVE_OUTPUT_TOKENS, LIVE_MATCH_TOKENS, LIVE_RESPONSE_S, LIVE_OBSERVED_AT_S, LIVE_SENT_S,
    NUM_LIVE,
) = range(10)  # fmt: skip


@compiled
def offer(
    state: FloatArray, rows: IntArray, now_s: float, stale_after_s: float, out: IntArray
) -> int:
    """Write the rows of replicas that take requests and were heard of lately.

    Where none takes requests, all count as if they did; where none was heard of lately, none needs
    to be.

    Args:
        state: Shape (num_rows, NUM_STATE).
        rows: To choose from, in order, shape (num,).
        now_s: Unix time, seconds.
        stale_after_s: Age from which on nothing is current, seconds.
        out: Filled with the first of what is returned, shape (num,) at least.

    Returns:
        How many they are.
    """
    accepting = fresh = 0
    for i in range(rows.shape[0]):
        row = state[rows[i]]
        accepting += row[STATE_ACCEPTING] != 0.0
    for i in range(rows.shape[0]):
        row = state[rows[i]]
        if accepting == 0 or row[STATE_ACCEPTING] != 0.0:
            fresh += now_s - row[STATE_PUBLISHED_AT_S] <= stale_after_s
    num = 0
    for i in range(rows.shape[0]):
        row = state[rows[i]]
        if accepting != 0 and row[STATE_ACCEPTING] == 0.0:
            continue
        if fresh == 0 or now_s - row[STATE_PUBLISHED_AT_S] <= stale_after_s:
            out[num] = rows[i]
            num += 1
    return num


@compiled
def keep_with_room(state: FloatArray, rows: IntArray, most: FloatArray, out: IntArray) -> int:
    """Write the rows of replicas with fewer requests in flight than their pool's replicas may have.

    Args:
        state: Shape (num_rows, NUM_STATE).
        rows: To choose from, in order, shape (num,).
        most: Requests of this router in flight at one replica at most, by pool, shape (num_pools,).
        out: Filled with the first of what is returned, shape (num,) at least.

    Returns:
        How many they are.
    """
    num = 0
    for i in range(rows.shape[0]):
        row = state[rows[i]]
        if row[STATE_IN_FLIGHT] < most[int(row[STATE_POOL])]:
            out[num] = rows[i]
            num += 1
    return num


@compiled
def fill_live(
    state: FloatArray,
    rows: IntArray,
    match_tokens: IntArray,
    mean_prompt_tokens: float,
    mean_output_tokens: float,
    out: FloatArray,
) -> None:
    """Combine what was published with what was sent and came back since, which is known at once.

    Others' requests are taken to be like one's own. Where all are others', which a lone router of
    the simulator never meets, they are taken to be mean ones, and those that run to be half done.

    Args:
        state: Shape (num_rows, NUM_STATE).
        rows: Of the candidates, shape (num,).
        match_tokens: Of the request to be placed, by row, shape (num_rows,).
        mean_prompt_tokens: Mean prompt of a request, tokens.
        mean_output_tokens: Mean output of a request, tokens.
        out: Filled, shape (num, NUM_LIVE).
    """
    for i in range(rows.shape[0]):
        row, live = state[rows[i]], out[i]
        sent, waiting, running = (
            row[STATE_IN_FLIGHT],
            row[STATE_PUBLISHED_WAITING],
            row[STATE_PUBLISHED_RUNNING],
        )
        outstanding = max(waiting + running + (sent - row[STATE_SENT_WHEN_PUBLISHED]), sent)
        if waiting > 0.0:
            waiting = max(outstanding - running, 0.0)
        else:
            waiting = max(outstanding - row[STATE_MAX_BATCH], 0.0)
        if sent > 0.0:
            share = outstanding / sent
            live[LIVE_PREFILL_TOKENS] = row[STATE_PREFILL_IN_FLIGHT] * share
            live[LIVE_OUTPUT_TOKENS] = row[STATE_OUTPUT_IN_FLIGHT] * share
        else:
            live[LIVE_PREFILL_TOKENS] = waiting * mean_prompt_tokens
            live[LIVE_OUTPUT_TOKENS] = (outstanding + waiting) / 2.0 * mean_output_tokens
        live[LIVE_NUM_WAITING] = waiting
        live[LIVE_NUM_RUNNING] = outstanding - waiting
        live[LIVE_KV_USED_FRACTION] = row[STATE_PUBLISHED_KV_USED]
        live[LIVE_MATCH_TOKENS] = match_tokens[rows[i]]
        live[LIVE_RESPONSE_S] = row[STATE_MEAN_RESPONSE_S]
        live[LIVE_OBSERVED_AT_S] = row[STATE_PUBLISHED_AT_S]
        live[LIVE_SENT_S] = row[STATE_LAST_SENT_S]


@compiled
def _fill_columns(fixed: FloatArray, live: FloatArray, out: FloatArray) -> None:
    """Write the table of `tokenyard.routing.observation`, with ages and ranks of 0."""
    for i in range(fixed.shape[0]):
        own, now, row = fixed[i], live[i], out[i]
        row[ob.TOKENS_PER_S] = own[STATE_TOKENS_PER_S]
        row[ob.NUM_SLOTS] = own[STATE_MAX_BATCH]
        row[ob.MAX_CONCURRENCY] = own[STATE_MAX_BATCH]
        row[ob.NUM_WAITING] = now[LIVE_NUM_WAITING]
        row[ob.NUM_RUNNING] = now[LIVE_NUM_RUNNING]
        row[ob.TOKENS_IN_FLIGHT] = now[LIVE_PREFILL_TOKENS] + now[LIVE_OUTPUT_TOKENS]
        row[ob.MEAN_RESPONSE_S] = now[LIVE_RESPONSE_S]
        row[ob.SPEED_RANK] = 0.0
        row[ob.ITERATION_S] = own[STATE_ITERATION_S]
        row[ob.PREFILL_TOKEN_S] = own[STATE_PREFILL_TOKEN_S]
        row[ob.SEQUENCE_S] = own[STATE_SEQUENCE_S]
        row[ob.KV_TOKEN_S] = own[STATE_KV_TOKEN_S]
        row[ob.TOKEN_BUDGET] = own[STATE_TOKEN_BUDGET]
        row[ob.KV_CAPACITY_TOKENS] = own[STATE_KV_CAPACITY_TOKENS]
        row[ob.KV_USED_FRACTION] = now[LIVE_KV_USED_FRACTION]
        row[ob.PREFILL_IN_FLIGHT] = now[LIVE_PREFILL_TOKENS]
        row[ob.OUTPUT_IN_FLIGHT] = now[LIVE_OUTPUT_TOKENS]
        row[ob.MATCH_TOKENS] = now[LIVE_MATCH_TOKENS]
        row[ob.AGE_S] = 0.0
        row[ob.ROUTABLE] = 1.0
        row[ob.OVERTAKEN_S] = 0.0
        row[ob.NUM_BEFORE] = 0.0
        row[ob.NUM_BEHIND] = 0.0
        row[ob.WAIT_S] = ob.batching_wait_s(row)


@dataclass(frozen=True, eq=False)
class Candidates:
    """What does not change from one decision between the same replicas to the next."""

    replica_ids: tuple[str, ...]
    pools: tuple[str, ...]
    fixed: FloatArray
    """Shape (num, NUM_FIXED)."""

    @cached_property
    def speed_ranks(self) -> FloatArray:
        """As `observation.speed_ranks` has them, shape (num,)."""
        return ob.speed_ranks(self.fixed[:, STATE_TOKENS_PER_S] * self.fixed[:, STATE_MAX_BATCH])


class SnapshotTable(SnapshotColumns):
    """Snapshots of replicas that batch, kept as numbers."""

    def __init__(
        self, candidates: Candidates, live: FloatArray,
        count_blocks: Callable[[int], FloatArray] | None = None,
    ) -> None:  # fmt: skip
        """Show `live` of shape (num, NUM_LIVE), which must not change any more.

        `count_blocks` is `prompt_blocks`, as long as the request is not placed.
        """
        self.candidates = candidates
        self.live = live
        self.last_sent_s = live[:, LIVE_SENT_S]
        """When each replica was last sent a request, Unix time, shape (num,)."""
        self._count_blocks = count_blocks
        self._columns: FloatArray | None = None

    @classmethod
    def idle(cls, num: int) -> SnapshotTable:
        """Replicas that are alike and hold nothing: for those who want compiled code ready."""
        names = tuple(f"idle-{i}" for i in range(num))
        candidates = Candidates(names, names, np.ones((num, NUM_FIXED)))
        return cls(candidates, np.zeros((num, NUM_LIVE)))

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """Names of the replicas."""
        return self.candidates.replica_ids

    @property
    def columns(self) -> FloatArray:
        """The table of `observation`, shape (num, NUM_COLUMNS); ranks and ages are not filled."""
        columns = self._columns
        if columns is None:
            columns = np.empty((len(self.live), ob.NUM_COLUMNS))
            _fill_columns(self.candidates.fixed, self.live, columns)
            self._columns = columns
        return columns

    @property
    def speed_ranks(self) -> FloatArray:
        """Rank of each replica by speed, shape (num,)."""
        return self.candidates.speed_ranks

    @property
    def observed_at_s(self) -> FloatArray:
        """Time of each observation, Unix time, shape (num,)."""
        return self.live[:, LIVE_OBSERVED_AT_S]

    def prompt_blocks(self, block_tokens: int) -> FloatArray:
        """Different blocks of the prompts in flight, shape (num,); NaN once it is released."""
        if self._count_blocks is None:
            return np.full(len(self), np.nan)
        return self._count_blocks(block_tokens)

    def release(self) -> None:
        """Drop what can be derived again: whoever keeps the table long keeps less."""
        self._columns = self._count_blocks = self.sent = None

    def __len__(self) -> int:
        """Number of replicas."""
        return len(self.live)

    def __iter__(self) -> Iterator[ReplicaSnapshot]:
        """Make one snapshot after the other."""
        return map(self._snapshot, range(len(self)))

    def _snapshot(self, at: int) -> ReplicaSnapshot:
        speed, batch, a, b, c, d, budget, capacity = self.candidates.fixed[at].tolist()
        waiting, running, kv, prefill, output, match, response_s, seen_s, _ = self.live[at].tolist()
        return ReplicaSnapshot(
            replica_id=self.candidates.replica_ids[at],
            tokens_per_s=speed,
            num_slots=int(batch),
            max_concurrency=int(batch),
            num_waiting=int(waiting),
            num_running=int(running),
            tokens_in_flight=prefill + output,
            mean_response_s=response_s,
            observed_at_s=seen_s,
            engine=EngineSnapshot(
                a, b, c, d, int(budget), capacity, kv, prefill, output, int(match)
            ),
        )
