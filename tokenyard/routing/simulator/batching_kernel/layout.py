"""The arrays of a fleet, and what stands where in their rows.

Shapes: C copies, S replicas, R requests per stream, E events, K routers, I prefix-block ids,
B blocks in all chains of a stream, N clients of a closed process, F factors.

    replica_params (C, S, NUM_PARAMS) what a replica is; never changes within a stream
    rules     (NUM_RULES,)        what holds for all replicas, and what is paid
    events    (C, E, NUM_EVENT)   when replicas fail, drain and join, in order of time
    requests  (C, R, NUM_REQUEST) the streams
    chains    (C, B)              ids of the prefix blocks of all requests, one after the other
    state     (C, S, width)       what a replica holds, row by row as below
    links     (C, S, NUM_LINKS, I + 1)  prefix cache: holders, and the list of evictable blocks
    cached    (C, ceil(S / 64), I + 1) who has a block: a bit for each replica
    block_s   (C, S, 2 + K, I + 1) when a block came, when it went, when each router last sent it
    routers   (C, K, S, NUM_OWN)  what each router knows of what it sent
    clock     (C, NUM_CLOCK)      where a copy stands
    retries   (C, R)              ring of requests to be placed again
    turns     (C, R, NUM_TURN)    how requests follow each other; R is 0 without sessions
    pending   (C, PENDING_AT + N) requests of closed clients that think; no column: open arrivals
    factors   (C, S, F)           factors on the times of iterations, used in turn; F is 0 without
    outcomes  (C, R, NUM_OUTCOME) what became of each request
    tables    (C, S, NUM_COLUMNS) what the router of the current request may know (`observation`)

A row of `state`: scalars; pages needed next, by phase (page_tokens); sequences in prefill, in the
order of admission (max_batch x PREFILL_FIELDS); sequences that decode (max_batch x DECODE_FIELDS);
then the ring of waiting requests in their order (head, count, RING_SIZE x WAITING_FIELDS).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenyard.compiled import compiled_inline
from tokenyard.routing import observation as ob
from tokenyard.routing.simulator.rewards import NUM_REWARDS
from tokenyard.types import FloatArray, IntArray

# replica_params
(
    ITERATION_S, PREFILL_TOKEN_S, SEQUENCE_S, KV_TOKEN_S, MAX_BATCH, TOKEN_BUDGET, NUM_PAGES,
    WARM_UP_S, WARM_UP_FACTOR, TOKENS_PER_S, RANK, IDLE_W, ITERATION_J, PREFILL_TOKEN_J,
    SEQUENCE_J, KV_TOKEN_J, SCRAPE_INTERVAL_S, NUM_PARAMS,
) = range(18)  # fmt: skip

# rules: rewards (`rewards`), layout, dynamics
(
    PAGE_TOKENS, BLOCK_TOKENS, QUEUE_LIMIT, MAX_OVERTAKING_S, PREFILL_AT, DECODE_AT, RING_AT,
    RING_SIZE, RETRY_DELAY_S, MAX_RETRIES, ENERGY, LOOKS_AHEAD, NUM_RULES,
) = range(NUM_REWARDS, NUM_REWARDS + 13)  # fmt: skip

# events
EVENT_S, EVENT_REPLICA, EVENT_STATUS, NUM_EVENT = range(4)

# status of a replica, and what an event turns it to
DOWN, DRAINING, UP = range(3)

# requests; the scaled features follow
(
    DISPATCH_S, ARRIVAL_S, CONTEXT, OUTPUT, PREDICTED_OUTPUT, PRIORITY, ABANDON_S, ROUTER,
    CHAIN_AT, CHAIN_LENGTH, SLO_RESPONSE_S, SLO_TTFT_S, SLO_TPOT_S, CLASS, TENANT, MAX_WAIT_S,
    FEATURES,
) = range(17)  # fmt: skip
NUM_REQUEST = FEATURES + ob.NUM_REQUEST_FEATURES

# turns of sessions: the request after this one (-1: the session ends), whether it is the first that
# is played, when that would arrive, seconds
(
    NEXT_TURN, THINK_S, PATIENCE_S, BEGINS, START_S, SESSION, TURN, NUM_TURN,
) = range(8)  # fmt: skip

# pending: how many, where to look for the next session, clients of the copy, and the requests
PENDING_COUNT, PENDING_NEXT, PENDING_CLIENTS, PENDING_AT = range(4)

# scalars of a row of state; EARNED and what follows outlive a failure
(
    STATUS, BUSY, UNTIL_S, DECODING, PREFILLING, WAITING, STEP, MIN_FINISH, KV_SUM, FREE,
    EVICTABLE, ADMITTED, NEXT_ABANDON_S, WARM_UNTIL_S, RESPONSE_REWARD, FINISH_SUM_S,
    LOOKED_FOR, LOOKED_FINISH_S, TAKES_S, TAKES_J, EARNED, ITERATIONS, BUSY_S, BUSY_J, SCRAPED_S,
    SCRAPED_WAITING, SCRAPED_RUNNING, SCRAPED_KV, SCRAPED_STATUS, LOOKED_J, NUM_SCALARS,
) = range(31)  # fmt: skip

# a sequence in prefill
P_INDEX, P_ORDER, P_TO_PREFILL, P_KV, P_CHUNK, P_GENERATED, P_HELD, PREFILL_FIELDS = range(8)

# a sequence that decodes: it holds BASE + STEP tokens of KV, and is done when STEP is FINISH
D_INDEX, D_ORDER, D_BASE, D_FINISH, D_HELD, DECODE_FIELDS = range(6)

# a waiting request: its number, the tokens generated so far, the key that it waits by, and when it
# is late and by what it waits from then on
W_INDEX, W_GENERATED, W_KEY_S, W_LATE_AT_S, W_LATE_KEY_S, WAITING_FIELDS = range(6)

# links of the prefix cache; ids begin at 1, and 0 is the anchor of the list of evictable blocks.
# They hold for blocks that are cached; what they are for others is left from before.
HOLDERS, BEFORE, AFTER, NUM_LINKS = range(4)
ANCHOR = 0
REPLICAS_PER_WORD = 64

# times of a block
CAME_S, WENT_S, SENT_S = range(3)

# what a router knows of what it sent to a replica and has not got back
(
    OWN_COUNT, OWN_COUNT_AT_SCRAPE, OWN_PREFILL, OWN_OUTPUT, OWN_DECODING, OWN_GENERATED,
    OWN_RESPONSE_S, NUM_OWN,
) = range(8)  # fmt: skip

# clock
NOW_S, NEXT, CURRENT, EVENT, RETRY_HEAD, RETRY_COUNT, SKIP, PLACED, NUM_CLOCK = range(9)

# outcomes
(
    SERVER, FIRST_TOKEN_S, FINISH_S, ATTEMPTS, PREEMPTIONS, HIT_TOKENS, PREFILLED_TOKENS,
    WAITING_SEEN, READY_S, ASSUMED_PREFILL, GAVE_UP, GENERATED, LAST_TOKEN_S, SUBMITTED,
    KV_SEEN, MET, NUM_OUTCOME,
) = range(17)  # fmt: skip

LATENCY_BINS = 96
LATENCY_BIN_START_S = 1e-4
LATENCY_BINS_PER_E = 8.0
"""Inter-token latencies are counted in bins that are a factor of e^(1/8) wide, from 0.1 ms on."""


class FleetArrays(NamedTuple):
    """All arrays of all copies; see the head of this module for their shapes."""

    replica_params: FloatArray
    rules: FloatArray
    events: FloatArray
    requests: FloatArray
    chains: IntArray
    state: FloatArray
    links: npt.NDArray[np.int32]
    cached: IntArray
    block_s: FloatArray
    """Kept of replicas that are scraped at intervals; others are seen as they are."""
    routers: FloatArray
    clock: FloatArray
    retries: IntArray
    turns: FloatArray
    pending: IntArray
    factors: FloatArray
    outcomes: FloatArray
    latencies: FloatArray
    """Inter-token latencies by bin, shape (C, LATENCY_BINS)."""
    tables: FloatArray
    asked: FloatArray
    """Places of the next requests in the waiting queues, shape (C, NUM_ASKED) of
    `scores.waiting_key`; NaN: by `order`."""
    order: FloatArray
    """Weights of the order in which requests wait, shape (NUM_ORDER_WEIGHTS,) of `scores.order`."""
    scratch: FloatArray
    """Copy of one row of state, in which a look ahead is played; shape (width,)."""


class ReplicaView(NamedTuple):
    """One replica of one copy."""

    row: FloatArray
    params: FloatArray
    rules: FloatArray
    requests: FloatArray
    chains: IntArray
    links: npt.NDArray[np.int32]
    cached: IntArray
    bit: int
    """The replica's, in `cached`."""
    block_s: FloatArray
    own: FloatArray
    outcomes: FloatArray
    latencies: FloatArray
    turns: FloatArray
    pending: IntArray
    factors: FloatArray
    real: bool
    """False in a look ahead: nothing outside the row may change."""


@compiled_inline
def replica_of(fleet, copy, server):
    """One replica of one copy, whose arrays are views."""
    return ReplicaView(
        fleet.state[copy, server], fleet.replica_params[copy, server], fleet.rules,
        fleet.requests[copy], fleet.chains[copy], fleet.links[copy, server],
        fleet.cached[copy, server // REPLICAS_PER_WORD], 1 << (server % REPLICAS_PER_WORD),
        fleet.block_s[copy, server], fleet.routers[copy, :, server], fleet.outcomes[copy],
        fleet.latencies[copy], fleet.turns[copy], fleet.pending[copy], fleet.factors[copy, server],
        True,
    )  # fmt: skip


@compiled_inline
def start_by_s(requests, index):
    """Time at which a request is given up that still waits for its prompt to begin."""
    return requests[index, ARRIVAL_S] + requests[index, MAX_WAIT_S]


@compiled_inline
def pages_of(rules, tokens):
    """Pages that so many tokens take."""
    return math.ceil(tokens / rules[PAGE_TOKENS])


@compiled_inline
def pages_per_block(rules):
    """Pages that a block of a prefix takes."""
    return rules[BLOCK_TOKENS] / rules[PAGE_TOKENS]


@compiled_inline
def phase_at(rules, tokens):
    """Place in `row` that counts sequences whose KV fills its pages when STEP = -tokens."""
    page = int(rules[PAGE_TOKENS])
    return NUM_SCALARS + (-int(tokens)) % page
