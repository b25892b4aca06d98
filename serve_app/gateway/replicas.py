"""What policies know of the replicas: one table, in the names and units of the simulator.

Two sources meet here. A replica publishes its queue, its batch and its memory now and then; what
this router has sent itself and got back it knows at once. Both are written into one row of numbers
per replica (`tokenyard.routing.snapshot_table`) as they come. `ReplicaTable.snapshots` combines
them as `tokenyard.routing.simulator.batching_kernel` does for a router of the simulator, which a
test compares number by number.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from serve_app.cluster import EngineProfile
from serve_app.engines.base import EngineStatus
from serve_app.gateway.endpoint_speed import EndpointSpeed
from tokenyard.perf.online import AnswerMeter, PoolEstimator
from tokenyard.routing import prefix_index
from tokenyard.routing import snapshot_table as columns
from tokenyard.routing.prefix_index import PrefixIndex, block_names
from tokenyard.routing.snapshot_table import Candidates, SnapshotTable, fill_live, offer
from tokenyard.types import FloatArray, IntArray

RECENT_WEIGHT = 0.1
"""Weight of the newest completion in the mean of response times."""
_MAX_HISTORY = 4096
_FIRST_ROWS = 16
_LENGTHS_DIFFER = 0.1
"""Change of a mean length, as a fraction, that speeds are said anew for."""
_MAX_CANDIDATE_SETS = 64
_NO_BLOCKS: IntArray = np.zeros(0, dtype=np.int64)


class Row(Protocol):
    """The numbers of one replica, by the columns of `snapshot_table`."""

    def __setitem__(self, column: int, value: float, /) -> None:
        """Write one number."""


@dataclass(frozen=True)
class EndpointInfo:
    """What an endpoint publishes about its model; None: unknown."""

    engine: str | None = None
    models: frozenset[str] | None = None
    """Names by which it can be asked, adapters included."""
    max_model_len: int | None = None
    """Longest prompt plus output, tokens."""
    max_batch: int | None = None
    kv_capacity_tokens: float | None = None
    missing: tuple[str, ...] = ()
    """Metrics that it does not publish; the gateway's own counts stand in for them."""


@dataclass(slots=True)
class _Sent:
    """A request at one replica."""

    assumed_prefill_tokens: float
    predicted_output_tokens: float
    prompt_tokens: int
    blocks: IntArray
    """Names of the prompt's whole blocks in the prefix cache, shape (num_blocks,)."""
    context_tokens: float
    """Of the prompt, those that are cached included."""
    is_ours: bool = True
    """Whether this router has sent it, and sees all of its tokens."""
    num_generated: int = 0


class InFlight:
    """Requests that this router sent to one replica and that have not ended."""

    def __init__(self, row: Row) -> None:
        self._requests: dict[str, _Sent] = {}
        self._prefill_tokens = 0.0
        self._output_tokens = 0.0
        self._generated_tokens = 0
        self._times_s: deque[float] = deque([-math.inf], _MAX_HISTORY)
        self._counts: deque[int] = deque([0], _MAX_HISTORY)
        self.num_changes = 0
        """Requests that were sent or ended so far."""
        self.mean_response_s = math.nan
        self.meter: AnswerMeter | None = None
        """What estimates the replica's speed from its answers; None: nobody does."""
        self.closed: Callable[[IntArray], None] | None = None
        """Hears the block names of each prompt whose request has ended; None: nobody does."""
        self.tell(row)

    def tell(self, row: Row) -> None:
        """Write everything to a row, and later changes as they come."""
        self._row = row
        self.count = len(self._requests)
        """Requests in flight."""
        self.prefill_tokens = max(self._prefill_tokens, 0.0)
        """Prompt tokens believed to be still to compute."""
        expected_tokens = self._output_tokens - self._generated_tokens
        self.output_tokens = max(expected_tokens, float(self.count))
        """Predicted tokens still to come; at least one for each request."""
        row[columns.STATE_IN_FLIGHT] = self.count
        row[columns.STATE_PREFILL_IN_FLIGHT] = self.prefill_tokens
        row[columns.STATE_OUTPUT_IN_FLIGHT] = self.output_tokens
        row[columns.STATE_MEAN_RESPONSE_S] = self.mean_response_s

    @property
    def held_tokens(self) -> int:
        """Tokens of prompts in flight, and of their answers so far."""
        return sum(
            request.prompt_tokens + request.num_generated for request in self._requests.values()
        )

    def count_at(self, time_s: float) -> int:
        """Requests in flight at a time, as far back as is remembered."""
        if time_s >= self._times_s[-1]:
            return self._counts[-1]
        return self._counts[max(bisect_right(self._times_s, time_s) - 1, 0)]

    def send(
        self,
        request_id: str,
        assumed_prefill_tokens: float,
        predicted_output_tokens: float,
        now_s: float,
        prompt_tokens: int = 0,
        blocks: IntArray = _NO_BLOCKS,
        context_tokens: float = 0.0,
        is_ours: bool = True,
    ) -> None:
        """Add a request that is on its way, of this router's or of a peer's."""
        self._requests[request_id] = _Sent(
            assumed_prefill_tokens, predicted_output_tokens, prompt_tokens, blocks, context_tokens,
            is_ours,
        )  # fmt: skip
        if self.meter is not None:
            self.meter.send(request_id, assumed_prefill_tokens)
        self._prefill_tokens += assumed_prefill_tokens
        self._output_tokens += predicted_output_tokens
        self._change(now_s)

    def receive(self, request_id: str, num_generated: int, is_whole: bool = False) -> None:
        """Record how many tokens of an answer have come so far; `is_whole`: all at once."""
        request = self._requests.get(request_id)
        if request is None or num_generated <= request.num_generated:
            return
        if (meter := self.meter) is not None:
            computed, context = request.assumed_prefill_tokens, request.context_tokens
            if not request.is_ours:
                meter.receive_unseen(request_id, computed, context)
            elif is_whole:
                meter.receive_whole(request_id, num_generated, computed, context)
            else:
                before = request.num_generated
                meter.receive(request_id, num_generated - before, before, computed, context)
        if request.num_generated == 0:
            self._prefill_tokens -= request.assumed_prefill_tokens
            self.prefill_tokens = max(self._prefill_tokens, 0.0)
            self._row[columns.STATE_PREFILL_IN_FLIGHT] = self.prefill_tokens
        self._generated_tokens += num_generated - request.num_generated
        request.num_generated = num_generated
        expected_tokens = self._output_tokens - self._generated_tokens
        self.output_tokens = max(expected_tokens, float(self.count))
        self._row[columns.STATE_OUTPUT_IN_FLIGHT] = self.output_tokens

    def num_generated(self, request_id: str) -> int:
        """Tokens of an answer that have come; 0: none, or it is not in flight."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.num_generated

    def close(self, request_id: str, now_s: float, response_s: float | None = None) -> None:
        """Remove a request; `response_s` is None where it was not completed."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if self.meter is not None:
            self.meter.end(request_id)
        if self.closed is not None:
            self.closed(request.blocks)
        self._output_tokens -= request.predicted_output_tokens
        self._generated_tokens -= request.num_generated
        if request.num_generated == 0:
            self._prefill_tokens -= request.assumed_prefill_tokens
        if response_s is not None:
            recent = self.mean_response_s
            self.mean_response_s = (
                response_s if math.isnan(recent) else recent + RECENT_WEIGHT * (response_s - recent)
            )
        self._change(now_s)

    def prompts(self) -> Iterator[tuple[int, IntArray]]:
        """Length, tokens, and block names of each prompt in flight."""
        return ((request.prompt_tokens, request.blocks) for request in self._requests.values())

    def _change(self, now_s: float) -> None:
        self.tell(self._row)
        self.num_changes += 1
        self._times_s.append(max(now_s, self._times_s[-1]))
        self._counts.append(self.count)


class Prompt:
    """A prompt and the names of its whole blocks, hashed once per block size."""

    def __init__(
        self,
        token_ids: Sequence[int],
        num_tokens: int | None = None,
        parent: int = prefix_index.WHOLE_PROMPT,
    ) -> None:
        """Keep the tokens; nothing is hashed yet.

        `token_ids` may be of pieces by which its blocks are named; it then has `num_tokens`.
        `parent` is what its blocks depend on beside its tokens: see `block_names`.
        """
        self.token_ids, self._parent = token_ids, parent
        self.num_tokens = len(token_ids) if num_tokens is None else num_tokens
        self.scale = self.num_tokens / max(len(token_ids), 1)
        """Tokens of the prompt per one of `token_ids`."""
        self._blocks: dict[int, IntArray] = {0: _NO_BLOCKS}

    def blocks(self, block_tokens: int) -> IntArray:
        """Return the names of blocks, each a hash of all tokens up to its end; 0 tokens: none."""
        if block_tokens not in self._blocks:
            self._blocks[block_tokens] = block_names(self.token_ids, block_tokens, self._parent)
        return self._blocks[block_tokens]


class ReplicaState:
    """One replica: its profile, its latest status, and the requests sent to it."""

    def __init__(
        self,
        replica_id: str,
        pool: str,
        profile: EngineProfile,
        prefixes: PrefixIndex,
        block_tokens: int,
        now_s: float,
        row: Row,
        row_number: int,
        retell: Callable[[ReplicaState], None],
    ) -> None:
        """Take the replica to be idle until it publishes something else.

        `prefixes` are of all replicas with blocks of so many tokens; 0: it has no prefix cache.
        `retell` is called where the profile has changed.
        """
        self.replica_id = replica_id
        self.pool = pool
        self.profile = profile
        self.block_tokens = block_tokens
        self.row = row_number
        self.in_flight = InFlight(row)
        self.status = EngineStatus(0, 0, 0.0, now_s)
        self.last_sent_s = -math.inf
        """Unix time when a request was last sent to it, seconds."""
        self.info = EndpointInfo()
        self.speed: EndpointSpeed | None = None
        """What estimates its speed; None: nobody does."""
        self.draining = False
        """Whether it gets no new requests, and goes once those in flight have ended."""
        self._count_when_published = 0
        self._retell = retell
        self._capacity = self._blocks_held()
        self._prefixes = prefixes
        self.tell(row)

    def tell(self, row: Row) -> None:
        """Write everything to a row, and later changes as they come."""
        self._row = row
        row[columns.STATE_LAST_SENT_S] = self.last_sent_s
        self.in_flight.tell(row)
        self._tell_status()

    def publish(self, status: EngineStatus) -> None:
        """Take a status, unless a newer one is known."""
        if status.observed_at_s > self.status.observed_at_s:
            if self.status.accepting and not status.accepting:
                self.forget_cache()  # An engine of ours that starts anew has none.
            self.status = status
            self._count_when_published = self.in_flight.count_at(status.observed_at_s)
            self._tell_status()
            if status.max_batch not in (None, self.profile.max_batch):
                self.learn(self.profile.model_copy(update={"max_batch": status.max_batch}))

    def learn(self, profile: EngineProfile) -> None:
        """Replace the profile."""
        if profile != self.profile:
            self.profile = profile
            self._capacity = self._blocks_held()
            self._retell(self)

    def estimate_with(self, speed: EndpointSpeed) -> None:
        """Have its speed estimated from its answers."""
        self.speed, self.in_flight.meter = speed, speed.meter

    @property
    def kv_tokens(self) -> float:
        """Tokens that its KV memory holds; infinite: nobody says."""
        if self.speed is not None and not self.speed.knows_memory:
            return math.inf
        return self.profile.kv_capacity_tokens

    def _blocks_held(self) -> int:
        size = self.block_tokens
        return int(self.profile.kv_capacity_tokens // size) if size else 0

    def _tell_status(self) -> None:
        row, status = self._row, self.status
        row[columns.STATE_PUBLISHED_WAITING] = status.num_waiting
        row[columns.STATE_PUBLISHED_RUNNING] = status.num_running
        row[columns.STATE_PUBLISHED_KV_USED] = status.kv_used_fraction
        row[columns.STATE_PUBLISHED_AT_S] = status.observed_at_s
        row[columns.STATE_ACCEPTING] = status.accepting
        row[columns.STATE_SENT_WHEN_PUBLISHED] = self._count_when_published

    def forget_cache(self) -> None:
        """Believe nothing to be cached there any more, unless its events say so."""
        if self.in_flight.closed is None:
            self._prefixes.forget(self.row)

    def follow_events(self, follows: bool) -> None:
        """Believe its events alone, by which nothing is cached yet; or what is sent from now on.

        With events, prompts on their way count as cached, too, until their answers end.
        """
        self._prefixes.forget(self.row)
        self.in_flight.closed = None
        if follows:
            self.in_flight.closed = partial(self.hold, prefix_index.ENDED)
            for _, blocks in self.in_flight.prompts():
                self.hold(prefix_index.SENT, blocks)

    def hold(self, reason: int, blocks: IntArray) -> None:
        """Note why blocks are cached there, or are no longer: see `PrefixIndex.hold`."""
        self._prefixes.hold(blocks, self.row, reason)

    def leave(self) -> None:
        """Tell whoever has the row next nothing of what still ends here or is said to be cached."""
        self._prefixes.forget(self.row)
        self._prefixes = PrefixIndex()
        self.tell([0.0] * columns.NUM_STATE)

    def match_tokens(self, prompt: Prompt) -> int:
        """Leading tokens of a prompt that are probably cached; never the last one."""
        if not self.block_tokens:
            return 0
        most = (len(prompt.token_ids) - 1) // self.block_tokens
        blocks = prompt.blocks(self.block_tokens)[:most]
        return int(self._prefixes.match_row(blocks, self.row) * self.block_tokens * prompt.scale)

    def send(
        self,
        request_id: str,
        prompt: Prompt,
        match_tokens: int,
        predicted_output_tokens: float,
        now_s: float,
    ) -> None:
        """Add a request that is on its way."""
        rest, blocks = float(prompt.num_tokens - match_tokens), prompt.blocks(self.block_tokens)
        self.in_flight.send(
            request_id, rest, predicted_output_tokens, now_s, len(prompt.token_ids), blocks,
            prompt.num_tokens,
        )  # fmt: skip
        self.last_sent_s = now_s
        self._row[columns.STATE_LAST_SENT_S] = now_s
        if self.in_flight.closed is not None:
            self.hold(prefix_index.SENT, blocks)
        elif self.block_tokens:
            self._prefixes.send(blocks, self.row, self._capacity)

    def count_peers(
        self, request_id: str, num_tokens: int, num_ids: int, match_tokens: int,
        output_tokens: float, blocks: IntArray, now_s: float,
    ) -> None:  # fmt: skip
        """Add a request that a peer has sent: of so many tokens, named by so many ids."""
        self.in_flight.send(
            request_id, float(num_tokens - match_tokens), output_tokens, now_s, num_ids, blocks,
            num_tokens, is_ours=False,
        )  # fmt: skip
        if self.in_flight.closed is not None:
            self.hold(prefix_index.SENT, blocks)
        elif self.block_tokens:
            self._prefixes.send(blocks, self.row, self._capacity)

    def prompt_blocks(self, prompt: Prompt, block_tokens: int) -> int:
        """Distinct blocks of that many tokens in the prompts in flight and one more."""
        own_rest, names, size = 0, set[int](), self.block_tokens
        one_more = (len(prompt.token_ids), prompt.blocks(size))
        for length, blocks in (one_more, *self.in_flight.prompts()):
            names.update(blocks.tolist())
            # What is in no whole block is the request's own.
            own_rest += math.ceil((length - len(blocks) * size) / block_tokens)
        return math.ceil((own_rest + math.ceil(len(names) * size / block_tokens)) * prompt.scale)


class ReplicaTable:
    """All replicas of all pools, a row of numbers each; not thread-safe."""

    def __init__(self, mean_lengths_tokens: tuple[float, float]) -> None:
        """Start empty; speeds are for requests of these mean prompts and outputs, tokens."""
        self._mean_lengths_tokens = mean_lengths_tokens
        self.replicas: dict[str, ReplicaState] = {}
        self.pools: list[str] = []
        """Names of the pools, by their numbers in the rows."""
        self._prefixes: dict[int, PrefixIndex] = {}
        self.state = np.zeros((_FIRST_ROWS, columns.NUM_STATE))
        """All rows as `snapshot_table` has them; only to be read."""
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))
        self._at: list[ReplicaState | None] = [None] * _FIRST_ROWS
        self._sets: dict[bytes, Candidates] = {}
        self._match_tokens: IntArray = np.zeros(_FIRST_ROWS, dtype=np.int64)
        """Tokens of the last prompt that are believed to be cached, by row."""
        self._rows: IntArray | None = None
        """Rows in the order of adding; None: not known since replicas came or went."""
        self._scratch: IntArray = np.zeros(0, dtype=np.int64)
        # Loads what is compiled, or the first decision would wait for it.
        assert not len(self.snapshots(self.offered(0.0, 0.0), Prompt([0])).columns)

    def add(
        self, replica_id: str, pool: str, profile: EngineProfile, block_tokens: int, now_s: float
    ) -> ReplicaState:
        """Track a replica; a known one keeps its requests in flight."""
        if replica_id in self.replicas:
            return self.replicas[replica_id]
        if not self._free:
            self._grow()
        number = self._free.pop()
        prefixes = self._prefixes.setdefault(block_tokens, PrefixIndex())
        replica = ReplicaState(
            replica_id, pool, profile, prefixes, block_tokens, now_s,
            self._row(number), number, self._tell_profile,
        )  # fmt: skip
        if pool not in self.pools:
            self.pools.append(pool)
        self.state[number, columns.STATE_POOL] = self.pools.index(pool)
        self.replicas[replica_id] = self._at[number] = replica
        self._tell_profile(replica)
        self._rows = None
        return replica

    def keep(self, pool: str, replica_ids: Iterable[str]) -> None:
        """Forget the replicas of a pool that are gone."""
        kept = set(replica_ids)
        gone = [r for r in self.replicas.values() if r.pool == pool and r.replica_id not in kept]
        for replica in gone:
            del self.replicas[replica.replica_id]
            replica.leave()
            self._at[replica.row] = None
            self._free.append(replica.row)
        if gone:
            self._rows = None
            self._sets.clear()

    def learn_lengths(self, mean_lengths_tokens: tuple[float, float]) -> None:
        """Say speeds for requests of other mean prompts and outputs, tokens, if they are others."""
        pairs = zip(mean_lengths_tokens, self._mean_lengths_tokens, strict=True)
        if any(abs(new - old) > _LENGTHS_DIFFER * old for new, old in pairs):
            self._mean_lengths_tokens = mean_lengths_tokens
            for replica in self.replicas.values():
                self._tell_profile(replica)

    def drain(self, replica: ReplicaState, draining: bool) -> None:
        """Stop offering a replica, or offer it again."""
        if replica.draining != draining:
            replica.draining, self._rows = draining, None

    def at(self, row: int) -> ReplicaState:
        """Return the replica of a row."""
        replica = self._at[row]
        assert replica is not None
        return replica

    def offered(self, now_s: float, stale_after_s: float) -> IntArray:
        """Rows of replicas that take requests and published lately; all rows, where none did.

        They are in the order in which replicas were added, shape (num,).
        """
        rows = self._rows
        if rows is None:
            rows = np.array([r.row for r in self.replicas.values() if not r.draining], np.int64)
            self._rows, self._scratch = rows, np.empty_like(rows)
        num = offer(self.state, rows, now_s, stale_after_s, self._scratch)
        return rows if num == len(rows) else self._scratch[:num].copy()

    def snapshots(self, rows: IntArray, prompt: Prompt) -> SnapshotTable:
        """Return what a policy may know of some rows when a prompt is to be placed."""
        matches = self._match_tokens
        matches.fill(0)
        for block_tokens, prefixes in self._prefixes.items():
            if block_tokens:
                # The last token is always computed.
                most = (len(prompt.token_ids) - 1) // block_tokens
                prefixes.match(prompt.blocks(block_tokens)[:most], block_tokens, matches)
        if prompt.scale != 1.0 and any(self._prefixes):
            matches[:] = matches * prompt.scale
        live = np.empty((len(rows), columns.NUM_LIVE))
        fill_live(self.state, rows, matches, *self._mean_lengths_tokens, live)

        def count_blocks(block_tokens: int) -> FloatArray:
            replicas = map(self.at, rows.tolist())
            return np.array(
                [float(replica.prompt_blocks(prompt, block_tokens)) for replica in replicas]
            )

        key = rows.tobytes()
        candidates = self._sets.get(key)
        if candidates is None:
            if len(self._sets) >= _MAX_CANDIDATE_SETS:
                self._sets.clear()
            replicas = [self.at(row) for row in rows.tolist()]
            candidates = Candidates(
                tuple(replica.replica_id for replica in replicas),
                tuple(replica.pool for replica in replicas),
                np.ascontiguousarray(self.state[rows, : columns.NUM_FIXED]),
            )
            self._sets[key] = candidates
        return SnapshotTable(candidates, live, count_blocks)

    def _tell_profile(self, replica: ReplicaState) -> None:
        if self._at[replica.row] is not replica:
            return  # It is gone, and the row may be another's.
        profile = replica.profile
        self.state[replica.row, : columns.NUM_FIXED] = (
            profile.slot_tokens_per_s(*self._mean_lengths_tokens), profile.max_batch,
            profile.iteration_s, profile.prefill_token_s, profile.sequence_s, profile.kv_token_s,
            profile.token_budget, profile.kv_capacity_tokens,
        )  # fmt: skip
        self._sets.clear()

    def _grow(self) -> None:
        """Double the room."""
        num = len(self.state)
        self.state = np.vstack([self.state, np.zeros_like(self.state)])
        self._free += range(2 * num - 1, num - 1, -1)
        self._at += [None] * num
        self._match_tokens = np.zeros(2 * num, dtype=np.int64)
        for replica in self.replicas.values():
            replica.tell(self._row(replica.row))

    def _row(self, number: int) -> Row:
        # Python writes into a view of memory in a third of the time that numpy needs.
        return memoryview(self.state[number])


def learn_speeds(replicas: Iterable[ReplicaState], estimator: PoolEstimator) -> None:
    """Let replicas of a pool learn their speeds from each other, and policies from them."""
    estimated = [(replica, replica.speed) for replica in replicas if replica.speed is not None]
    for _, speed in estimated:
        speed.meter.settle()
    estimator.share()
    for replica, speed in estimated:
        if changes := speed.estimate():
            replica.learn(replica.profile.model_copy(update=changes))
