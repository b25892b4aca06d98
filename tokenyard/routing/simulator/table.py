"""What a policy is shown of a simulator: its table of replicas, as snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from tokenyard.routing import observation as ob
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, SnapshotColumns
from tokenyard.types import FloatArray


class TableSnapshots(SnapshotColumns):
    """Snapshots of the replicas that are offered in one copy of a simulator.

    To make them takes longer than to simulate a request. Rules that read columns do without.
    """

    def __init__(
        self, names: Sequence[str], table: FloatArray, offered: Sequence[int], now_s: float,
        batches: bool, block_tokens: int = 0, prompt_blocks: FloatArray | None = None,
    ) -> None:  # fmt: skip
        """Copy what is there.

        Args:
            names: Of all replicas.
            table: Of `observation`, one row for each of them, shape (num, NUM_COLUMNS).
            offered: Which of them the policy may choose from.
            now_s: Clock time, seconds.
            batches: Whether they batch continuously.
            block_tokens: Size of the blocks that were counted; 0: none were.
            prompt_blocks: `prompt_blocks` of all of them in blocks of that size, shape (num,).
        """
        self.batches = batches
        self._block_tokens = block_tokens
        self._prompt_blocks = None if prompt_blocks is None else prompt_blocks.take(offered)
        self._names = names
        self._offered = offered
        self._now_s = now_s
        self._table = table.copy() if len(offered) == len(table) else table.take(offered, axis=0)

    @property
    def replica_ids(self) -> list[str]:
        """Names of the replicas."""
        return [self._names[i] for i in self._offered]

    @cached_property
    def columns(self) -> FloatArray:
        """The table of `observation`, shape (num, NUM_COLUMNS); ranks and ages are 0."""
        columns = self._table.copy()
        columns[:, ob.SPEED_RANK] = 0.0
        columns[:, ob.AGE_S] = 0.0
        columns[:, ob.ROUTABLE] = 1.0
        return columns

    @property
    def speed_ranks(self) -> FloatArray:
        """Rank of each replica by speed, shape (num,)."""
        table = self._table
        places = table[:, ob.NUM_SLOTS] if self.batches else 1.0
        return ob.speed_ranks(table[:, ob.TOKENS_PER_S] * places)

    @property
    def observed_at_s(self) -> FloatArray:
        """Clock time of each observation, seconds, shape (num,)."""
        return self._now_s - self._table[:, ob.AGE_S]

    def prompt_blocks(self, block_tokens: int) -> FloatArray:
        """Different blocks of the prompts in flight, shape (num,); NaN: they were not counted."""
        if self._prompt_blocks is None or block_tokens != self._block_tokens:
            return np.full(len(self), np.nan)
        return self._prompt_blocks.copy()

    def __len__(self) -> int:
        """Number of replicas."""
        return len(self._offered)

    def _snapshot(self, at: int) -> ReplicaSnapshot:
        return self._made[at]

    def __iter__(self) -> Iterator[ReplicaSnapshot]:
        """One snapshot after the other."""
        return iter(self._made)

    @cached_property
    def _made(self) -> list[ReplicaSnapshot]:
        # Rules look at all of them, if at any.
        names, now_s, make = self._names, self._now_s, _of_replica if self.batches else _of_server
        rows = self._table.tolist()
        return [make(names[i], row, now_s) for i, row in zip(self._offered, rows, strict=True)]


def _of_server(
    name: str, row: list[float], observed_at_s: float, engine: EngineSnapshot | None = None
) -> ReplicaSnapshot:
    # By position, in the order of the fields: this runs for every replica at every decision.
    return ReplicaSnapshot(
        name,
        row[ob.TOKENS_PER_S],
        int(row[ob.NUM_SLOTS]),
        int(row[ob.MAX_CONCURRENCY]),
        int(row[ob.NUM_WAITING]),
        int(row[ob.NUM_RUNNING]),
        row[ob.TOKENS_IN_FLIGHT],
        row[ob.WAIT_S],
        row[ob.MEAN_RESPONSE_S],
        observed_at_s,
        engine,
    )


def _of_replica(name: str, row: list[float], now_s: float) -> ReplicaSnapshot:
    engine = EngineSnapshot(
        row[ob.ITERATION_S],
        row[ob.PREFILL_TOKEN_S],
        row[ob.SEQUENCE_S],
        row[ob.KV_TOKEN_S],
        int(row[ob.TOKEN_BUDGET]),
        row[ob.KV_CAPACITY_TOKENS],
        row[ob.KV_USED_FRACTION],
        row[ob.PREFILL_IN_FLIGHT],
        row[ob.OUTPUT_IN_FLIGHT],
        int(row[ob.MATCH_TOKENS]),
    )
    return _of_server(name, row, now_s - row[ob.AGE_S], engine)
