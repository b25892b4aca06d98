"""Continuous batching as compiled functions that step many independent clusters at once.

docs/engine.md says what a replica does; this module does it without visiting every iteration:
stretches in which nothing but decoding happens are crossed in closed form, since the time of an
iteration is linear in the tokens it holds. `tokenyard.sim.engines.BatchingSim` owns the arrays.

Shapes: C copies, S replicas, R requests per stream, E events, K routers, I prefix-block ids,
B blocks in all chains of a stream.

    plant     (C, S, NUM_PLANT)   what a replica is; never changes within a stream
    rules     (NUM_RULES,)        what holds for all replicas, and what is paid
    events    (C, E, NUM_EVENT)   when replicas fail, drain and join, in order of time
    requests  (C, R, NUM_REQUEST) the streams
    chains    (C, B)              ids of the prefix blocks of all requests, one after the other
    state     (C, S, width)       what a replica holds, row by row as below
    links     (C, S, NUM_LINKS, I + 1)  prefix cache: holders, and the list of evictable blocks
    block_s   (C, S, 2 + K, I + 1) when a block came, when it went, when each router last sent it
    routers   (C, K, S, NUM_OWN)  what each router knows of what it sent
    clock     (C, NUM_CLOCK)      where a copy stands
    retries   (C, R)              ring of requests to be placed again
    outcomes  (C, R, NUM_OUTCOME) what became of each request
    tables    (C, S, NUM_COLUMNS) what the router of the current request may know (`observation`)

A row of `state`: scalars; pages needed next, by phase (page_tokens); sequences in prefill, in the
order of admission (max_batch x PREFILL_FIELDS); sequences that decode (max_batch x DECODE_FIELDS);
then per priority a ring of waiting requests (head, count, request and tokens generated so far).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenyard import observation as ob
from tokenyard.compiled import compiled
from tokenyard.generic import engine_scores
from tokenyard.observation import encode, marginal_scores
from tokenyard.types import FloatArray, IntArray

# plant
ITERATION_S = 0
PREFILL_TOKEN_S = 1
SEQUENCE_S = 2
KV_TOKEN_S = 3
MAX_BATCH = 4
TOKEN_BUDGET = 5
NUM_PAGES = 6
WARM_UP_S = 7
WARM_UP_FACTOR = 8
TOKENS_PER_S = 9
RANK = 10
IDLE_W = 11
ITERATION_J = 12
PREFILL_TOKEN_J = 13
SEQUENCE_J = 14
KV_TOKEN_J = 15
SCRAPE_INTERVAL_S = 16
NUM_PLANT = 17

# rules: layout, dynamics, what the router sees, then reward weights
PAGE_TOKENS = 0
BLOCK_TOKENS = 1
QUEUE_LIMIT = 2
NUM_PRIORITIES = 3
PREFILL_AT = 4
DECODE_AT = 5
RINGS_AT = 6
RING_SIZE = 7
RETRY_DELAY_S = 8
MAX_RETRIES = 9
EXPECTED_FINISH = 10
COMPLETE = 11
SLO_AT_COMPLETION = 12
ACCEPT = 13
DROP = 14
RESPONSE = 15
SLO = 16
TAIL = 17
TAIL_AFTER_S = 18
ENERGY = 19
LOOKS_AHEAD = 20
NUM_RULES = 21

# events
EVENT_S = 0
EVENT_REPLICA = 1
EVENT_STATUS = 2
NUM_EVENT = 3

# status of a replica, and what an event turns it to
DOWN = 0
DRAINING = 1
UP = 2

# requests; the scaled features follow
DISPATCH_S = 0
ARRIVAL_S = 1
CONTEXT = 2
OUTPUT = 3
PREDICTED_OUTPUT = 4
PRIORITY = 5
GIVE_UP_S = 6
ROUTER = 7
CHAIN_AT = 8
CHAIN_LENGTH = 9
SLO_RESPONSE_S = 10
SLO_TTFT_S = 11
SLO_TPOT_S = 12
CLASS = 13
TENANT = 14
FEATURES = 15
NUM_REQUEST = FEATURES + ob.NUM_REQUEST_FEATURES

# scalars of a row of state
STATUS = 0
BUSY = 1
UNTIL_S = 2
DECODING = 3
PREFILLING = 4
WAITING = 5
STEP = 6
MIN_FINISH = 7
KV_SUM = 8
FREE = 9
EVICTABLE = 10
ADMITTED = 11
NEXT_GIVE_UP_S = 12
WARM_UNTIL_S = 13
FINISH_SUM_S = 14
LOOKED_FOR = 15
LOOKED_FINISH_S = 16
TAKES_S = 17
TAKES_J = 18
# from here on what outlives a failure
EARNED = 19
ITERATIONS = 20
BUSY_S = 21
BUSY_J = 22
SCRAPED_S = 23
SCRAPED_WAITING = 24
SCRAPED_RUNNING = 25
SCRAPED_KV = 26
SCRAPED_STATUS = 27
LOOKED_J = 28
NUM_SCALARS = 29

# a sequence in prefill
P_INDEX = 0
P_ORDER = 1
P_LACK = 2
P_KV = 3
P_CHUNK = 4
P_GENERATED = 5
P_HELD = 6
PREFILL_FIELDS = 7

# a sequence that decodes: it holds BASE + STEP tokens of KV, and is done when STEP is FINISH
D_INDEX = 0
D_ORDER = 1
D_BASE = 2
D_FINISH = 3
D_HELD = 4
DECODE_FIELDS = 5

# links of the prefix cache; ids begin at 1, and 0 is the anchor of the list of evictable blocks
HOLDERS = 0
BEFORE = 1
AFTER = 2
NUM_LINKS = 3
ABSENT = -1
ANCHOR = 0

# times of a block
CAME_S = 0
WENT_S = 1
SENT_S = 2

# what a router knows of what it sent to a replica and has not got back
OWN_COUNT = 0
OWN_COUNT_AT_SCRAPE = 1
OWN_PREFILL = 2
OWN_OUTPUT = 3
OWN_DECODING = 4
OWN_GENERATED = 5
OWN_RESPONSE_S = 6
NUM_OWN = 7

# clock
NOW_S = 0
NEXT = 1
CURRENT = 2
EVENT = 3
RETRY_HEAD = 4
RETRY_COUNT = 5
SKIP = 6
PLACED = 7
NUM_CLOCK = 8

# outcomes
SERVER = 0
FIRST_TOKEN_S = 1
FINISH_S = 2
ATTEMPTS = 3
PREEMPTIONS = 4
HIT_TOKENS = 5
PREFILLED_TOKENS = 6
WAITING_SEEN = 7
READY_S = 8
ASSUMED_PREFILL = 9
GAVE_UP = 10
GENERATED = 11
LAST_TOKEN_S = 12
SUBMITTED = 13
KV_SEEN = 14
MET = 15
NUM_OUTCOME = 16

RECENT_WEIGHT = 0.1
"""Weight of the newest completion in the exponential mean of response times."""
LATENCY_BINS = 96
LATENCY_BIN_START_S = 1e-4
LATENCY_BINS_PER_E = 8.0
"""Inter-token latencies are counted in bins that are a factor of e^(1/8) wide, from 0.1 ms on."""


class Fleet(NamedTuple):
    """All arrays of all copies; see the head of this module for their shapes."""

    plant: FloatArray
    rules: FloatArray
    events: FloatArray
    requests: FloatArray
    chains: IntArray
    state: FloatArray
    links: npt.NDArray[np.int32]
    block_s: FloatArray
    routers: FloatArray
    clock: FloatArray
    retries: IntArray
    outcomes: FloatArray
    latencies: FloatArray
    """Inter-token latencies by bin, shape (C, LATENCY_BINS)."""
    tables: FloatArray
    scratch: FloatArray
    """Copy of one row of state, in which a look ahead is played; shape (width,)."""


class _Replica(NamedTuple):
    """One replica of one copy."""

    row: FloatArray
    plant: FloatArray
    rules: FloatArray
    requests: FloatArray
    chains: IntArray
    links: npt.NDArray[np.int32]
    block_s: FloatArray
    own: FloatArray
    outcomes: FloatArray
    latencies: FloatArray
    real: bool
    """False in a look ahead: nothing outside the row may change."""


@compiled
def _replica(fleet, copy, server):
    return _Replica(
        fleet.state[copy, server], fleet.plant[copy, server], fleet.rules, fleet.requests[copy],
        fleet.chains[copy], fleet.links[copy, server], fleet.block_s[copy, server],
        fleet.routers[copy, :, server], fleet.outcomes[copy], fleet.latencies[copy], True,
    )  # fmt: skip


@compiled
def _pages(rules, tokens):
    """Pages that so many tokens take."""
    return math.ceil(tokens / rules[PAGE_TOKENS])


@compiled
def _block_pages(rules):
    return rules[BLOCK_TOKENS] / rules[PAGE_TOKENS]


@compiled
def _phase(rules, tokens):
    """Place in `row` that counts sequences whose KV fills its pages when STEP = -tokens."""
    page = int(rules[PAGE_TOKENS])
    return NUM_SCALARS + (-int(tokens)) % page


# The waiting queues: one ring per priority.


@compiled
def _ring(rules, priority):
    return int(rules[RINGS_AT]) + priority * (2 + 2 * int(rules[RING_SIZE]))


@compiled
def _enqueue(row, rules, priority, index, generated, front):
    at = _ring(rules, priority)
    size = int(rules[RING_SIZE])
    head = int(row[at])
    count = int(row[at + 1])
    if front:
        head = (head - 1) % size
        row[at] = head
        slot = head
    else:
        slot = (head + count) % size
    row[at + 1] = count + 1
    row[at + 2 + 2 * slot] = index
    row[at + 3 + 2 * slot] = generated
    row[WAITING] += 1.0


@compiled
def _first_waiting(row, rules):
    """Ring of the request that is to be admitted next; -1: none waits."""
    for priority in range(int(rules[NUM_PRIORITIES])):
        at = _ring(rules, priority)
        if row[at + 1] > 0.0:
            return at
    return -1


@compiled
def _dequeue(row, rules, at):
    row[at] = (int(row[at]) + 1) % int(rules[RING_SIZE])
    row[at + 1] -= 1.0
    row[WAITING] -= 1.0


# The prefix cache. In a look ahead only the counts of pages move, not the blocks.


@compiled
def _unlink(links, block):
    before = links[BEFORE, block]
    after = links[AFTER, block]
    links[AFTER, before] = after
    links[BEFORE, after] = before


@compiled
def _link_last(links, block):
    """Make a block the last one to be evicted."""
    last = links[BEFORE, ANCHOR]
    links[AFTER, last] = block
    links[BEFORE, block] = last
    links[AFTER, block] = ANCHOR
    links[BEFORE, ANCHOR] = block


@compiled
def _take_pages(replica, pages, now):
    """Use so many pages, evicting what is oldest where too few are free."""
    row = replica.row
    size = _block_pages(replica.rules)
    while row[FREE] < pages:
        if replica.real:
            block = replica.links[AFTER, ANCHOR]
            _unlink(replica.links, block)
            replica.links[HOLDERS, block] = ABSENT
            replica.block_s[WENT_S, block] = now
        row[EVICTABLE] -= size
        row[FREE] += size
    row[FREE] -= pages


@compiled
def _num_chained(replica, index, tokens):
    """Blocks of a request's chain that lie within so many tokens."""
    size = replica.rules[BLOCK_TOKENS]
    if size == 0.0:
        return 0
    return min(int(tokens // size), int(replica.requests[index, CHAIN_LENGTH]))


@compiled
def _hit_blocks(replica, index):
    """Length of the longest prefix of a request's chain that the cache holds, in blocks.

    The last token of a prompt is always computed: what comes after it is not in any cache.
    """
    most = _num_chained(replica, index, replica.requests[index, CONTEXT] - 1.0)
    at = int(replica.requests[index, CHAIN_AT])
    hit = 0
    while hit < most and replica.links[HOLDERS, replica.chains[at + hit]] != ABSENT:
        hit += 1
    return hit


@compiled
def _hold(replica, index, hit):
    """Hold the first `hit` blocks of a request's chain, all of which are cached."""
    at = int(replica.requests[index, CHAIN_AT])
    for block in replica.chains[at : at + hit]:
        if replica.links[HOLDERS, block] == 0:
            replica.row[EVICTABLE] -= _block_pages(replica.rules)
            if replica.real:
                _unlink(replica.links, block)
        if replica.real:
            replica.links[HOLDERS, block] += 1


@compiled
def _register(replica, index, held, tokens, now):
    """Turn the pages of chained blocks within `tokens` into cached ones; return blocks held."""
    most = _num_chained(replica, index, tokens)
    if not replica.real or most <= held:
        return held
    at = int(replica.requests[index, CHAIN_AT])
    size = _block_pages(replica.rules)
    for block in replica.chains[at + held : at + most]:
        holders = replica.links[HOLDERS, block]
        if holders == ABSENT:
            replica.links[HOLDERS, block] = 1
            # One that went since the last scrape was there at that scrape.
            if replica.block_s[WENT_S, block] <= replica.row[SCRAPED_S]:
                replica.block_s[CAME_S, block] = now
            continue
        if holders == 0:
            _unlink(replica.links, block)
            replica.row[EVICTABLE] -= size
        replica.links[HOLDERS, block] += 1
        replica.row[FREE] += size
    return most


@compiled
def _release(replica, index, held, pages):
    """Give back the pages of a sequence, of which the first `held` blocks may stay cached."""
    size = _block_pages(replica.rules)
    replica.row[FREE] += pages - held * size if held else pages
    if not replica.real:
        # As if nobody else held them.
        replica.row[EVICTABLE] += held * size if held else 0.0
        return
    at = int(replica.requests[index, CHAIN_AT])
    for k in range(held - 1, -1, -1):
        block = replica.chains[at + k]
        replica.links[HOLDERS, block] -= 1
        if replica.links[HOLDERS, block] == 0:
            _link_last(replica.links, block)
            replica.row[EVICTABLE] += size


# Sequences come and go.


@compiled
def _update_min_finish(row, rules):
    at = int(rules[DECODE_AT])
    least = math.inf
    for _ in range(int(row[DECODING])):
        least = min(least, row[at + D_FINISH])
        at += DECODE_FIELDS
    row[MIN_FINISH] = least


@compiled
def _remove_decoding(replica, which):
    """Take a sequence out of the batch and release what it holds."""
    row = replica.row
    rules = replica.rules
    first = int(rules[DECODE_AT])
    at = first + DECODE_FIELDS * which
    kv = row[at + D_BASE] + row[STEP]
    row[KV_SUM] -= kv
    row[_phase(rules, row[at + D_BASE])] -= 1.0
    _release(replica, int(row[at + D_INDEX]), int(row[at + D_HELD]), _pages(rules, kv))
    row[DECODING] -= 1.0
    if replica.real:
        replica.own[int(replica.requests[int(row[at + D_INDEX]), ROUTER]), OWN_DECODING] -= 1.0
    last = first + DECODE_FIELDS * int(row[DECODING])
    for field in range(DECODE_FIELDS):
        row[at + field] = row[last + field]


@compiled
def _remove_prefilling(replica, which):
    """Take a sequence out of prefill and release what it holds; the order of others stays."""
    row = replica.row
    at = int(replica.rules[PREFILL_AT]) + PREFILL_FIELDS * which
    pages = _pages(replica.rules, row[at + P_LACK] + row[at + P_KV])
    _release(replica, int(row[at + P_INDEX]), int(row[at + P_HELD]), pages)
    _forget_prefilling(row, replica.rules, which)


@compiled
def _forget_prefilling(row, rules, which):
    at = int(rules[PREFILL_AT]) + PREFILL_FIELDS * which
    row[PREFILLING] -= 1.0
    end = int(rules[PREFILL_AT]) + PREFILL_FIELDS * int(row[PREFILLING])
    for place in range(at, end):
        row[place] = row[place + PREFILL_FIELDS]


@compiled
def _routers_receive(replica, steps):
    """Every router gets the tokens of its own sequences as they are generated."""
    for router in range(replica.own.shape[0]):
        own = replica.own[router]
        own[OWN_GENERATED] += own[OWN_DECODING] * steps


@compiled
def _router_lets_go(replica, index, generated):
    """A request has left the replica: its router takes it off its books."""
    own = replica.own[int(replica.requests[index, ROUTER])]
    own[OWN_COUNT] -= 1.0
    own[OWN_OUTPUT] -= replica.requests[index, PREDICTED_OUTPUT]
    own[OWN_GENERATED] -= generated
    # A request that was preempted had its first token before.
    if generated == 0.0:
        own[OWN_PREFILL] -= replica.outcomes[index, ASSUMED_PREFILL]


@compiled
def _met(requests, outcomes, index):
    """Whether a request that is done kept every promise of its class."""
    ttft = outcomes[index, FIRST_TOKEN_S] - requests[index, ARRIVAL_S]
    response = outcomes[index, FINISH_S] - requests[index, ARRIVAL_S]
    steps = max(requests[index, OUTPUT] - 1.0, 1.0)
    tpot = (response - ttft) / steps
    return (
        response <= requests[index, SLO_RESPONSE_S]
        and ttft <= requests[index, SLO_TTFT_S]
        and tpot <= requests[index, SLO_TPOT_S]
    )


@compiled
def _leave(replica, index, now):
    """Note that a request is held no longer, for the sum over those that are."""
    row = replica.row
    if replica.real:
        row[FINISH_SUM_S] -= now
        return
    row[FINISH_SUM_S] += now
    if row[LOOKED_FOR] == index:
        row[LOOKED_FINISH_S] = now


@compiled
def _complete(replica, which, now):
    row = replica.row
    requests = replica.requests
    at = int(replica.rules[DECODE_AT]) + DECODE_FIELDS * which
    index = int(row[at + D_INDEX])
    total = requests[index, CONTEXT] + requests[index, OUTPUT] - 1.0
    row[at + D_HELD] = _register(replica, index, int(row[at + D_HELD]), total, now)
    _remove_decoding(replica, which)
    _leave(replica, index, now)
    if not replica.real:
        return
    replica.outcomes[index, FINISH_S] = now
    replica.outcomes[index, GENERATED] += requests[index, OUTPUT]
    _router_lets_go(replica, index, requests[index, OUTPUT])
    own = replica.own[int(requests[index, ROUTER])]
    response = now - requests[index, ARRIVAL_S]
    recent = own[OWN_RESPONSE_S]
    own[OWN_RESPONSE_S] = (
        response if math.isnan(recent) else recent + RECENT_WEIGHT * (response - recent)
    )
    row[EARNED] += replica.rules[COMPLETE]
    if _met(requests, replica.outcomes, index):
        replica.outcomes[index, MET] = 1.0
    else:
        row[EARNED] += replica.rules[SLO_AT_COMPLETION]


@compiled
def _end_prefill(replica, which, now):
    """A sequence has computed all it lacked: it has a token, and decodes from now on."""
    row = replica.row
    rules = replica.rules
    at = int(rules[PREFILL_AT]) + PREFILL_FIELDS * which
    index = int(row[at + P_INDEX])
    generated = row[at + P_GENERATED]
    kv = row[at + P_KV]
    context = replica.requests[index, CONTEXT]
    held = _register(replica, index, int(row[at + P_HELD]), context, now)
    if replica.real:
        own = replica.own[int(replica.requests[index, ROUTER])]
        own[OWN_DECODING] += 1.0
        own[OWN_GENERATED] += 1.0
        if generated == 0.0:
            own[OWN_PREFILL] -= replica.outcomes[index, ASSUMED_PREFILL]
            replica.outcomes[index, FIRST_TOKEN_S] = now
        else:
            _count_latency(replica, now - replica.outcomes[index, LAST_TOKEN_S], 1.0)
    to = int(rules[DECODE_AT]) + DECODE_FIELDS * int(row[DECODING])
    finish = row[STEP] + replica.requests[index, OUTPUT] - generated - 1.0
    row[to + D_INDEX] = index
    row[to + D_ORDER] = row[at + P_ORDER]
    row[to + D_BASE] = kv - row[STEP]
    row[to + D_FINISH] = finish
    row[to + D_HELD] = held
    row[DECODING] += 1.0
    row[KV_SUM] += kv
    row[_phase(rules, kv - row[STEP])] += 1.0
    row[MIN_FINISH] = min(row[MIN_FINISH], finish)
    _forget_prefilling(row, rules, which)


@compiled
def _complete_all(replica, now):
    """Complete what is done, the request submitted first before the others."""
    row = replica.row
    while row[MIN_FINISH] <= row[STEP]:
        at = int(replica.rules[DECODE_AT])
        first = -1
        earliest = math.inf
        for which in range(int(row[DECODING])):
            submitted = replica.outcomes[int(row[at + D_INDEX]), SUBMITTED]
            if row[at + D_FINISH] <= row[STEP] and submitted < earliest:
                earliest = submitted
                first = which
            at += DECODE_FIELDS
        _complete(replica, first, now)
        _update_min_finish(row, replica.rules)


@compiled
def _end_iteration(replica):
    """Hand out the tokens of the iteration in progress."""
    row = replica.row
    now = row[UNTIL_S]
    decoding = row[DECODING]
    if decoding > 0.0:
        row[STEP] += 1.0
        row[KV_SUM] += decoding
        if replica.real:
            _routers_receive(replica, 1.0)
    which = 0
    while which < int(row[PREFILLING]):
        at = int(replica.rules[PREFILL_AT]) + PREFILL_FIELDS * which
        row[at + P_LACK] -= row[at + P_CHUNK]
        row[at + P_KV] += row[at + P_CHUNK]
        if row[at + P_LACK] == 0.0:
            _end_prefill(replica, which, now)
        else:
            which += 1
    if row[MIN_FINISH] <= row[STEP]:
        _complete_all(replica, now)


@compiled
def _abandon(replica, index, generated, now):
    """A client has hung up on a request that has just been removed."""
    _leave(replica, index, now)
    if replica.real:
        replica.outcomes[index, GAVE_UP] = 1.0
        replica.outcomes[index, GENERATED] += generated
        _router_lets_go(replica, index, generated)


@compiled
def _generated(replica, at):
    """Tokens that the decoding sequence at `at` has generated."""
    index = int(replica.row[at + D_INDEX])
    return replica.requests[index, OUTPUT] - (replica.row[at + D_FINISH] - replica.row[STEP])


@compiled
def _next_to_give_up(replica, now):
    """Earliest submitted of the held requests whose client has hung up, and where it is held.

    Also renews the time at which the next client hangs up.

    Returns:
        Index of the request (-1: none), 0 decoding, 1 in prefill or 2 waiting, and its place.
    """
    row = replica.row
    rules = replica.rules
    found = -1
    earliest = math.inf
    kind = 0
    place = 0
    row[NEXT_GIVE_UP_S] = math.inf
    size = int(rules[RING_SIZE])
    for k in range(2 + int(rules[NUM_PRIORITIES])):
        if k == 0:
            at = int(rules[DECODE_AT])
            count = int(row[DECODING])
        elif k == 1:
            at = int(rules[PREFILL_AT])
            count = int(row[PREFILLING])
        else:
            at = _ring(rules, k - 2)
            count = int(row[at + 1])
        for which in range(count):
            if k == 0:
                index = int(row[at + DECODE_FIELDS * which + D_INDEX])
            elif k == 1:
                index = int(row[at + PREFILL_FIELDS * which + P_INDEX])
            else:
                slot = (int(row[at]) + which) % size
                index = int(row[at + 2 + 2 * slot])
            give_up = replica.requests[index, GIVE_UP_S]
            row[NEXT_GIVE_UP_S] = min(row[NEXT_GIVE_UP_S], give_up)
            submitted = replica.outcomes[index, SUBMITTED]
            if give_up <= now and submitted < earliest:
                earliest = submitted
                found = index
                kind = min(k, 2)
                place = which if k < 2 else (k - 2) * size + which
    return found, kind, place


@compiled
def _give_up(replica, now):
    """Remove every request whose client has hung up by now."""
    row = replica.row
    rules = replica.rules
    while True:
        index, kind, place = _next_to_give_up(replica, now)
        if index < 0:
            return
        if kind == 0:
            generated = _generated(replica, int(rules[DECODE_AT]) + DECODE_FIELDS * place)
            _remove_decoding(replica, place)
            _update_min_finish(row, rules)
        elif kind == 1:
            generated = row[int(rules[PREFILL_AT]) + PREFILL_FIELDS * place + P_GENERATED]
            _remove_prefilling(replica, place)
        else:
            generated = _remove_waiting(row, rules, place)
        _abandon(replica, index, generated, now)


@compiled
def _remove_waiting(row, rules, place):
    """Close the gap that a waiting request leaves; return what it had generated."""
    size = int(rules[RING_SIZE])
    at = _ring(rules, place // size)
    head = int(row[at])
    slot = at + 2 + 2 * ((head + place % size) % size)
    generated = row[slot + 1]
    for ahead in range(place % size, int(row[at + 1]) - 1):
        to = at + 2 + 2 * ((head + ahead) % size)
        come = at + 2 + 2 * ((head + ahead + 1) % size)
        row[to] = row[come]
        row[to + 1] = row[come + 1]
    row[at + 1] -= 1.0
    row[WAITING] -= 1.0
    return generated


# An iteration begins.


@compiled
def _preempt_one(replica, now):
    """Send the least urgent running sequence, the last admitted of these, back to its queue."""
    row = replica.row
    rules = replica.rules
    victim = -1
    decodes = False
    priority = -1.0
    order = -1.0
    for k in range(2):
        at = int(rules[DECODE_AT]) if k == 0 else int(rules[PREFILL_AT])
        fields = DECODE_FIELDS if k == 0 else PREFILL_FIELDS
        for which in range(int(row[DECODING]) if k == 0 else int(row[PREFILLING])):
            # Index and order stand in the same places of both kinds.
            own = replica.requests[int(row[at + D_INDEX]), PRIORITY]
            if own > priority or (own == priority and row[at + D_ORDER] > order):
                priority = own
                order = row[at + D_ORDER]
                victim = which
                decodes = k == 0
            at += fields
    if decodes:
        at = int(rules[DECODE_AT]) + DECODE_FIELDS * victim
        index = int(row[at + D_INDEX])
        generated = _generated(replica, at)
        if replica.real:
            replica.outcomes[index, LAST_TOKEN_S] = now
        _remove_decoding(replica, victim)
        _update_min_finish(row, rules)
    else:
        at = int(rules[PREFILL_AT]) + PREFILL_FIELDS * victim
        index = int(row[at + P_INDEX])
        generated = row[at + P_GENERATED]
        _remove_prefilling(replica, victim)
    _enqueue(row, rules, int(priority), index, generated, True)
    if replica.real:
        replica.outcomes[index, PREEMPTIONS] += 1.0


@compiled
def _pages_for_decode(row, rules, step):
    """Pages that the decoding sequences need for the token after so many steps."""
    return row[_phase(rules, -step)]


@compiled
def _admission(replica):
    """Whether the next request may run now.

    Returns:
        Its ring (-1: none may), the blocks of its hit, and the pages that it needs beside them.
    """
    row = replica.row
    rules = replica.rules
    if row[WAITING] == 0.0 or row[DECODING] + row[PREFILLING] >= replica.plant[MAX_BATCH]:
        return -1, 0, 0.0
    at = _first_waiting(row, rules)
    slot = at + 2 + 2 * int(row[at])
    index = int(row[slot])
    hit = _hit_blocks(replica, index)
    pages = _pages(rules, replica.requests[index, CONTEXT] + row[slot + 1])
    spare = row[FREE] + row[EVICTABLE]
    if hit:
        pages -= hit * _block_pages(rules)
        chain = int(replica.requests[index, CHAIN_AT])
        for block in replica.chains[chain : chain + hit]:
            if replica.links[HOLDERS, block] == 0:
                spare -= _block_pages(rules)
    if pages > spare:
        return -1, 0, 0.0
    return at, hit, pages


@compiled
def _admit(replica, at, hit, pages, budget, now):
    """Let the head of a ring run; return the tokens that it computes in this iteration."""
    row = replica.row
    rules = replica.rules
    slot = at + 2 + 2 * int(row[at])
    index = int(row[slot])
    generated = row[slot + 1]
    _dequeue(row, rules, at)
    _hold(replica, index, hit)
    _take_pages(replica, pages, now)
    cached = hit * rules[BLOCK_TOKENS]
    lack = replica.requests[index, CONTEXT] + generated - cached
    chunk = min(lack, budget)
    to = int(rules[PREFILL_AT]) + PREFILL_FIELDS * int(row[PREFILLING])
    row[to + P_INDEX] = index
    row[to + P_ORDER] = row[ADMITTED]
    row[to + P_LACK] = lack
    row[to + P_KV] = cached
    row[to + P_CHUNK] = chunk
    row[to + P_GENERATED] = generated
    row[to + P_HELD] = hit
    row[PREFILLING] += 1.0
    row[ADMITTED] += 1.0
    if replica.real:
        replica.outcomes[index, HIT_TOKENS] += cached
        replica.outcomes[index, PREFILLED_TOKENS] += lack
    return chunk, cached


@compiled
def _time_of(base, growth, count):
    """Time of `count` iterations, the first of which takes `base`, each `growth` more."""
    return count * base + growth * count * (count - 1.0) / 2.0


@compiled
def _whole_iterations(base, growth, time, most):
    """Most iterations, up to `most`, that fit into `time`."""
    if _time_of(base, growth, most) <= time:
        return most
    half = base - growth / 2.0
    # The root of the quadratic without cancellation, for small growth too.
    count = math.floor(2.0 * time / (half + math.sqrt(half * half + 2.0 * growth * time)))
    while count > 0.0 and _time_of(base, growth, count) > time:
        count -= 1.0
    while count < most and _time_of(base, growth, count + 1.0) <= time:
        count += 1.0
    return min(count, most)


@compiled
def _pages_of_steps(row, rules, steps):
    """Pages that the decoding sequences need for so many more tokens each."""
    page = int(rules[PAGE_TOKENS])
    whole = steps // page
    pages = whole * row[DECODING]
    for ahead in range(int(steps - whole * page)):
        pages += _pages_for_decode(row, rules, row[STEP] + ahead)
    return pages


@compiled
def _count_latency(replica, latency_s, tokens):
    place = int(math.log(latency_s / LATENCY_BIN_START_S) * LATENCY_BINS_PER_E)
    replica.latencies[min(max(place, 0), LATENCY_BINS - 1)] += tokens


@compiled
def _work(replica, iterations, prefill, decoding, kv, duration):
    """Book time and energy of iterations with these sums over them."""
    row = replica.row
    plant = replica.plant
    joules = (
        plant[ITERATION_J] * iterations
        + plant[PREFILL_TOKEN_J] * prefill
        + plant[SEQUENCE_J] * decoding
        + plant[KV_TOKEN_J] * kv
    )
    row[ITERATIONS] += iterations
    row[BUSY_S] += duration
    row[BUSY_J] += joules
    row[TAKES_S] = duration
    row[TAKES_J] = joules
    if replica.real and decoding > 0.0:
        _count_latency(replica, duration / iterations, decoding)


@compiled
def _skip_ahead(replica, now, until):
    """Cross iterations that only decode, and that end by `until`, at once.

    It stops before an iteration at whose end a sequence completes, or at whose start a client
    hangs up, the replica is warm, or pages run out. Returns the time at which it stops.
    """
    row = replica.row
    plant = replica.plant
    decoding = row[DECODING]
    most = row[MIN_FINISH] - row[STEP] - 1.0
    factor = 1.0
    limit = row[NEXT_GIVE_UP_S]
    if now < row[WARM_UNTIL_S]:
        factor = plant[WARM_UP_FACTOR]
        limit = min(limit, row[WARM_UNTIL_S])
    base = plant[ITERATION_S] + plant[SEQUENCE_S] * decoding + plant[KV_TOKEN_S] * row[KV_SUM]
    base *= factor
    if most < 1.0 or now + base > until:
        return now
    growth = factor * plant[KV_TOKEN_S] * decoding
    steps = _whole_iterations(base, growth, until - now, most)
    if limit < math.inf:
        starts = _whole_iterations(base, growth, limit - now, most)
        if now + _time_of(base, growth, starts) < limit:
            starts += 1.0
        steps = min(steps, starts)
    pages = _pages_of_steps(row, replica.rules, steps)
    spare = row[FREE] + row[EVICTABLE]
    if pages > spare:
        steps = 0.0
        pages = 0.0
        ahead = _pages_for_decode(row, replica.rules, row[STEP])
        while pages + ahead <= spare:
            pages += ahead
            steps += 1.0
            ahead = _pages_for_decode(row, replica.rules, row[STEP] + steps)
    if steps < 1.0:
        return now
    duration = _time_of(base, growth, steps)
    kv = steps * row[KV_SUM] + decoding * steps * (steps - 1.0) / 2.0
    _take_pages(replica, pages, now)
    _work(replica, steps, 0.0, steps * decoding, kv, duration)
    row[STEP] += steps
    row[KV_SUM] += steps * decoding
    if replica.real:
        _routers_receive(replica, steps)
    return now + duration


@compiled
def _begin(replica, now, until):
    """Begin an iteration at `now`, or later where some could be skipped; or become idle."""
    row = replica.row
    plant = replica.plant
    rules = replica.rules
    while True:
        if row[NEXT_GIVE_UP_S] <= now:
            _give_up(replica, now)
        if row[PREFILLING] > 0.0 or row[DECODING] == 0.0 or _admission(replica)[0] >= 0:
            break
        later = _skip_ahead(replica, now, until)
        if later == now:
            break
        now = later
    preempted = False
    while _pages_for_decode(row, rules, row[STEP]) > row[FREE] + row[EVICTABLE]:
        _preempt_one(replica, now)
        preempted = True
    _take_pages(replica, _pages_for_decode(row, rules, row[STEP]), now)
    decoding = row[DECODING]
    budget = plant[TOKEN_BUDGET] - decoding
    prefill = 0.0
    kv = row[KV_SUM]
    at = int(rules[PREFILL_AT])
    for _ in range(int(row[PREFILLING])):
        chunk = min(row[at + P_LACK], budget)
        row[at + P_CHUNK] = chunk
        if chunk > 0.0:
            prefill += chunk
            budget -= chunk
            kv += row[at + P_KV]
        at += PREFILL_FIELDS
    while not preempted and budget > 0.0:
        ring, hit, pages = _admission(replica)
        if ring < 0:
            break
        chunk, cached = _admit(replica, ring, hit, pages, budget, now)
        prefill += chunk
        budget -= chunk
        kv += cached
    row[BUSY] = decoding > 0.0 or prefill > 0.0
    if not row[BUSY]:
        return
    duration = (
        plant[ITERATION_S]
        + plant[PREFILL_TOKEN_S] * prefill
        + plant[SEQUENCE_S] * decoding
        + plant[KV_TOKEN_S] * kv
    )
    if now < row[WARM_UNTIL_S]:
        duration *= plant[WARM_UP_FACTOR]
    _work(replica, 1.0, prefill, decoding, kv, duration)
    row[UNTIL_S] = now + duration


@compiled
def _advance(replica, until):
    """Run one replica up to and including `until`."""
    row = replica.row
    while row[BUSY] and row[UNTIL_S] <= until:
        _end_iteration(replica)
        _begin(replica, row[UNTIL_S], until)


# One replica among others.


@compiled
def _copy_row(row, rules, to):
    """Copy what a replica holds, leaving out the empty places."""
    for place in range(NUM_SCALARS + int(rules[PAGE_TOKENS])):
        to[place] = row[place]
    at = int(rules[PREFILL_AT])
    for place in range(at, at + PREFILL_FIELDS * int(row[PREFILLING])):
        to[place] = row[place]
    at = int(rules[DECODE_AT])
    for place in range(at, at + DECODE_FIELDS * int(row[DECODING])):
        to[place] = row[place]
    size = int(rules[RING_SIZE])
    for priority in range(int(rules[NUM_PRIORITIES])):
        at = _ring(rules, priority)
        to[at] = row[at]
        to[at + 1] = row[at + 1]
        for ahead in range(int(row[at + 1])):
            slot = at + 2 + 2 * ((int(row[at]) + ahead) % size)
            to[slot] = row[slot]
            to[slot + 1] = row[slot + 1]


@compiled
def _look_ahead(replica, scratch, index):
    """Play what the replica holds to its end, as if nothing more came.

    Returns:
        Sum of the times at which all requests leave, and that of request `index`, seconds; and the
        energy that the replica's work will have taken since the stream began, joules.
    """
    return _play_out(_copied(replica, scratch), index)


@compiled
def _copied(replica, scratch):
    """A copy in `scratch` of what the replica holds, which can be run without a trace."""
    _copy_row(replica.row, replica.rules, scratch)
    return _Replica(
        scratch, replica.plant, replica.rules, replica.requests, replica.chains, replica.links,
        replica.block_s, replica.own, replica.outcomes, replica.latencies, False,
    )  # fmt: skip


@compiled
def _play_out(ahead, index):
    """Run a copy to its end; returns what `_look_ahead` does."""
    row = ahead.row
    row[FINISH_SUM_S] = 0.0
    row[LOOKED_FOR] = index
    while row[BUSY] and not _only_decodes(row, ahead.rules):
        _end_iteration(ahead)
        _begin(ahead, row[UNTIL_S], math.inf)
    _finish_decoding(ahead)
    return row[FINISH_SUM_S], row[LOOKED_FINISH_S], row[BUSY_J]


@compiled
def _only_decodes(row, rules):
    """Whether all that is left is decoding which nothing can interrupt."""
    if row[PREFILLING] > 0.0 or row[WAITING] > 0.0 or row[NEXT_GIVE_UP_S] < math.inf:
        return False
    if row[UNTIL_S] < row[WARM_UNTIL_S]:
        return False
    at = int(rules[DECODE_AT])
    tokens = 0.0
    for _ in range(int(row[DECODING])):
        tokens += row[at + D_FINISH] - row[STEP]
        at += DECODE_FIELDS
    return row[FREE] + row[EVICTABLE] >= row[DECODING] + tokens / rules[PAGE_TOKENS]


@compiled
def _finish_decoding(replica):
    """Let the decoding sequences end one after the other, looking at nothing else."""
    row = replica.row
    plant = replica.plant
    first = int(replica.rules[DECODE_AT])
    left = int(row[DECODING])
    kv = row[KV_SUM]
    step = row[STEP]
    # What the iteration in progress takes has been booked when it began.
    end = row[UNTIL_S]
    if left > 0:
        step += 1.0
        kv += left
    joules = 0.0
    while left > 0:
        least = math.inf
        at = first
        for _ in range(left):
            least = min(least, row[at + D_FINISH])
            at += DECODE_FIELDS
        ahead = least - step
        base = plant[ITERATION_S] + plant[SEQUENCE_S] * left + plant[KV_TOKEN_S] * kv
        end += _time_of(base, plant[KV_TOKEN_S] * left, ahead)
        joules += ahead * (
            plant[ITERATION_J]
            + plant[SEQUENCE_J] * left
            + plant[KV_TOKEN_J] * (kv + left * (ahead - 1.0) / 2.0)
        )
        step = least
        kv += ahead * left
        at = first
        which = 0
        while which < left:
            if row[at + D_FINISH] > step:
                which += 1
                at += DECODE_FIELDS
                continue
            kv -= row[at + D_BASE] + step
            row[FINISH_SUM_S] += end
            if row[LOOKED_FOR] == row[at + D_INDEX]:
                row[LOOKED_FINISH_S] = end
            left -= 1
            last = first + DECODE_FIELDS * left
            for field in range(D_FINISH + 1):
                row[at + field] = row[last + field]
    row[BUSY_J] += joules


@compiled
def _empty(row, plant, links, status, warm_until):
    """Leave a replica without batch, queue and cache; its accounts stay."""
    row[:EARNED] = 0.0
    row[NUM_SCALARS:] = 0.0
    row[STATUS] = status
    row[MIN_FINISH] = math.inf
    row[NEXT_GIVE_UP_S] = math.inf
    row[FREE] = plant[NUM_PAGES]
    row[WARM_UNTIL_S] = warm_until
    links[HOLDERS, :] = ABSENT
    links[BEFORE, ANCHOR] = ANCHOR
    links[AFTER, ANCHOR] = ANCHOR


@compiled
def clear(fleet, copy):
    """Empty one copy, and find its first decision."""
    fleet.state[copy] = 0.0
    for server in range(fleet.plant.shape[1]):
        row = fleet.state[copy, server]
        _empty(row, fleet.plant[copy, server], fleet.links[copy, server], UP, -math.inf)
        row[SCRAPED_S] = -math.inf
        row[SCRAPED_STATUS] = UP
    fleet.block_s[copy] = -math.inf
    fleet.routers[copy] = 0.0
    fleet.routers[copy, :, :, OWN_RESPONSE_S] = math.nan
    fleet.clock[copy] = 0.0
    fleet.latencies[copy] = 0.0
    outcomes = fleet.outcomes[copy]
    outcomes[:] = 0.0
    outcomes[:, SERVER] = -1.0
    outcomes[:, FIRST_TOKEN_S] = math.nan
    outcomes[:, FINISH_S] = math.nan
    _find_decision(fleet, copy)


@compiled
def _submit(replica, index, now):
    """Give a request to a replica that has been run to `now`; return whether it takes it."""
    row = replica.row
    rules = replica.rules
    requests = replica.requests
    largest = _pages(rules, requests[index, CONTEXT] + requests[index, OUTPUT] - 1.0)
    if row[STATUS] != UP or row[WAITING] >= rules[QUEUE_LIMIT]:
        return False
    if largest > replica.plant[NUM_PAGES]:
        return False
    row[NEXT_GIVE_UP_S] = min(row[NEXT_GIVE_UP_S], requests[index, GIVE_UP_S])
    _enqueue(row, rules, int(requests[index, PRIORITY]), index, 0.0, False)
    if not row[BUSY]:
        _begin(replica, now, now)
    return True


@compiled
def _book(replica, index, match_tokens):
    """Put a request on the books of its router."""
    requests = replica.requests
    assumed = requests[index, CONTEXT] - match_tokens
    replica.outcomes[index, ASSUMED_PREFILL] = assumed
    own = replica.own[int(requests[index, ROUTER])]
    own[OWN_COUNT] += 1.0
    own[OWN_PREFILL] += assumed
    own[OWN_OUTPUT] += requests[index, PREDICTED_OUTPUT]


@compiled
def _note_sent_blocks(replica, index, now):
    """Let the router of a request believe that its prefix will be cached here."""
    requests = replica.requests
    sent = SENT_S + int(requests[index, ROUTER])
    at = int(requests[index, CHAIN_AT])
    for block in replica.chains[at : at + int(requests[index, CHAIN_LENGTH])]:
        replica.block_s[sent, block] = now


@compiled
def _kv_used(row, plant):
    """Share of the KV memory that requests hold."""
    return 1.0 - (row[FREE] + row[EVICTABLE]) / plant[NUM_PAGES]


@compiled
def _scrape(replica, now):
    """Publish what the replica holds now."""
    row = replica.row
    row[SCRAPED_S] = now
    row[SCRAPED_WAITING] = row[WAITING]
    row[SCRAPED_RUNNING] = row[DECODING] + row[PREFILLING]
    row[SCRAPED_KV] = _kv_used(row, replica.plant)
    row[SCRAPED_STATUS] = row[STATUS]
    for router in range(replica.own.shape[0]):
        replica.own[router, OWN_COUNT_AT_SCRAPE] = replica.own[router, OWN_COUNT]


@compiled
def _catch_up(replica, now):
    """Run a replica to `now`, publishing its state at the last multiple of the interval."""
    row = replica.row
    interval = replica.plant[SCRAPE_INTERVAL_S]
    if interval > 0.0:
        last = min(math.floor(now / interval) * interval, now)
        if last > row[SCRAPED_S]:
            _advance(replica, last)
            _scrape(replica, last)
    _advance(replica, now)
    if interval == 0.0:
        _scrape(replica, now)


@compiled
def _give_back(fleet, copy, index, now):
    """A replica did not serve a request: place it anew later, or drop it."""
    outcomes = fleet.outcomes[copy]
    if outcomes[index, ATTEMPTS] > fleet.rules[MAX_RETRIES]:
        outcomes[index, SERVER] = -1.0
        return False
    clock = fleet.clock[copy]
    size = fleet.retries.shape[1]
    fleet.retries[copy, int(clock[RETRY_HEAD] + clock[RETRY_COUNT]) % size] = index
    clock[RETRY_COUNT] += 1.0
    outcomes[index, READY_S] = now + fleet.rules[RETRY_DELAY_S]
    return True


@compiled
def _evacuate(fleet, copy, server, now):
    """Give everything that a failing replica holds back to the router, first come first."""
    replica = _replica(fleet, copy, server)
    row = replica.row
    rules = fleet.rules
    before = int(fleet.clock[copy, RETRY_COUNT])
    for which in range(int(row[DECODING])):
        at = int(rules[DECODE_AT]) + DECODE_FIELDS * which
        _lose(fleet, copy, replica, int(row[at + D_INDEX]), _generated(replica, at), now)
    for which in range(int(row[PREFILLING])):
        at = int(rules[PREFILL_AT]) + PREFILL_FIELDS * which
        _lose(fleet, copy, replica, int(row[at + P_INDEX]), row[at + P_GENERATED], now)
    size = int(rules[RING_SIZE])
    for priority in range(int(rules[NUM_PRIORITIES])):
        at = _ring(rules, priority)
        for ahead in range(int(row[at + 1])):
            slot = at + 2 + 2 * ((int(row[at]) + ahead) % size)
            _lose(fleet, copy, replica, int(row[slot]), row[slot + 1], now)
    _sort_retries(fleet, copy, before)


@compiled
def _sort_retries(fleet, copy, first):
    """Sort what waits to be placed again, from place `first` on, by when it was submitted."""
    ring = fleet.retries[copy]
    outcomes = fleet.outcomes[copy]
    head = int(fleet.clock[copy, RETRY_HEAD])
    size = ring.shape[0]
    for place in range(first + 1, int(fleet.clock[copy, RETRY_COUNT])):
        index = ring[(head + place) % size]
        at = place
        while at > first:
            before = ring[(head + at - 1) % size]
            if outcomes[before, SUBMITTED] < outcomes[index, SUBMITTED]:
                break
            ring[(head + at) % size] = before
            at -= 1
        ring[(head + at) % size] = index


@compiled
def _lose(fleet, copy, replica, index, generated, now):
    _router_lets_go(replica, index, generated)
    # What has been generated is lost: the response starts again from its first token.
    replica.outcomes[index, FIRST_TOKEN_S] = math.nan
    replica.outcomes[index, GENERATED] += generated
    if not _give_back(fleet, copy, index, now):
        replica.row[EARNED] += fleet.rules[DROP]


@compiled
def _happen(fleet, copy):
    """Let the next event of a copy happen."""
    clock = fleet.clock[copy]
    event = fleet.events[copy, int(clock[EVENT])]
    clock[EVENT] += 1.0
    now = event[EVENT_S]
    server = int(event[EVENT_REPLICA])
    replica = _replica(fleet, copy, server)
    row = replica.row
    _catch_up(replica, now)
    status = event[EVENT_STATUS]
    if status == DOWN:
        _evacuate(fleet, copy, server, now)
        _stop(replica, now)
    elif status == DRAINING:
        row[STATUS] = DRAINING
    elif row[STATUS] == DOWN:
        _empty(row, replica.plant, replica.links, UP, now + replica.plant[WARM_UP_S])
    else:
        row[STATUS] = UP


@compiled
def _stop(replica, now):
    """Take a replica down; routers learn of it, and of the loss of its cache, when they scrape."""
    row = replica.row
    if row[BUSY]:
        # The iteration in progress was booked as a whole.
        undone_s = row[UNTIL_S] - now
        row[BUSY_S] -= undone_s
        row[BUSY_J] -= row[TAKES_J] * undone_s / row[TAKES_S]
        if row[DECODING] > 0.0:
            _count_latency(replica, row[TAKES_S], -row[DECODING])
    for block in range(1, replica.links.shape[1]):
        if replica.links[HOLDERS, block] != ABSENT:
            replica.block_s[WENT_S, block] = now
    replica.own[:, OWN_DECODING] = 0.0
    row[LOOKED_J] = row[BUSY_J]
    _empty(row, replica.plant, replica.links, DOWN, -math.inf)


@compiled
def _find_decision(fleet, copy):
    """Put the clock at the next request to be placed; CURRENT is -1 when none is left."""
    clock = fleet.clock[copy]
    requests = fleet.requests[copy]
    outcomes = fleet.outcomes[copy]
    while True:
        arrival = math.inf
        if clock[NEXT] < requests.shape[0]:
            arrival = requests[int(clock[NEXT]), DISPATCH_S]
        retry = math.inf
        retried = 0
        if clock[RETRY_COUNT] > 0.0:
            retried = int(fleet.retries[copy, int(clock[RETRY_HEAD])])
            retry = outcomes[retried, READY_S]
        soonest = min(arrival, retry)
        event = int(clock[EVENT])
        if event < fleet.events.shape[1] and fleet.events[copy, event, EVENT_S] <= soonest:
            if fleet.events[copy, event, EVENT_S] < math.inf:
                _happen(fleet, copy)
                continue
        if soonest == math.inf:
            clock[CURRENT] = -1.0
            return
        if retry <= arrival:
            clock[RETRY_HEAD] = (clock[RETRY_HEAD] + 1.0) % fleet.retries.shape[1]
            clock[RETRY_COUNT] -= 1.0
            if requests[retried, GIVE_UP_S] <= retry:
                outcomes[retried, GAVE_UP] = 1.0
                outcomes[retried, SERVER] = -1.0
                continue
            clock[CURRENT] = retried
        else:
            clock[CURRENT] = clock[NEXT]
            clock[NEXT] += 1.0
        clock[NOW_S] = soonest
        break
    for server in range(fleet.plant.shape[1]):
        _catch_up(_replica(fleet, copy, server), soonest)


# What the router sees.


@compiled
def _match_blocks(replica, index):
    """Blocks of a request's prefix that its router believes to be cached.

    It knows the blocks that were there at the last scrape, and those it has sent since.
    """
    row = replica.row
    most = _num_chained(replica, index, replica.requests[index, CONTEXT] - 1.0)
    at = int(replica.requests[index, CHAIN_AT])
    sent = SENT_S + int(replica.requests[index, ROUTER])
    scraped = row[SCRAPED_S]
    match = 0
    while match < most:
        block = replica.chains[at + match]
        there = replica.block_s[CAME_S, block] <= scraped and (
            replica.links[HOLDERS, block] != ABSENT or replica.block_s[WENT_S, block] > scraped
        )
        if not (there or replica.block_s[sent, block] > scraped):
            break
        match += 1
    return match


@compiled
def _fill_row(replica, index, now, out):
    row = replica.row
    plant = replica.plant
    own = replica.own[int(replica.requests[index, ROUTER])]
    out[ob.TOKENS_PER_S] = plant[TOKENS_PER_S]
    out[ob.NUM_SLOTS] = plant[MAX_BATCH]
    out[ob.MAX_CONCURRENCY] = plant[MAX_BATCH]
    # What was sent and what came back since the scrape is known at once.
    since = own[OWN_COUNT] - own[OWN_COUNT_AT_SCRAPE]
    waiting = row[SCRAPED_WAITING]
    running = row[SCRAPED_RUNNING]
    outstanding = max(waiting + running + since, own[OWN_COUNT])
    if waiting > 0.0:
        waiting = max(outstanding - running, 0.0)
    else:
        waiting = max(outstanding - plant[MAX_BATCH], 0.0)
    out[ob.NUM_WAITING] = waiting
    out[ob.NUM_RUNNING] = outstanding - waiting
    # Others' requests are taken to be like one's own.
    share = outstanding / own[OWN_COUNT] if own[OWN_COUNT] > 0.0 else 0.0
    left = max(own[OWN_OUTPUT] - own[OWN_GENERATED], own[OWN_COUNT])
    out[ob.PREFILL_IN_FLIGHT] = max(own[OWN_PREFILL], 0.0) * share
    out[ob.OUTPUT_IN_FLIGHT] = left * share
    out[ob.TOKENS_IN_FLIGHT] = out[ob.PREFILL_IN_FLIGHT] + out[ob.OUTPUT_IN_FLIGHT]
    out[ob.MEAN_RESPONSE_S] = own[OWN_RESPONSE_S]
    out[ob.SPEED_RANK] = plant[RANK]
    out[ob.ITERATION_S] = plant[ITERATION_S]
    out[ob.PREFILL_TOKEN_S] = plant[PREFILL_TOKEN_S]
    out[ob.SEQUENCE_S] = plant[SEQUENCE_S]
    out[ob.KV_TOKEN_S] = plant[KV_TOKEN_S]
    out[ob.TOKEN_BUDGET] = plant[TOKEN_BUDGET]
    out[ob.KV_CAPACITY_TOKENS] = plant[NUM_PAGES] * replica.rules[PAGE_TOKENS]
    out[ob.KV_USED_FRACTION] = row[SCRAPED_KV]
    out[ob.MATCH_TOKENS] = _match_blocks(replica, index) * replica.rules[BLOCK_TOKENS]
    out[ob.AGE_S] = now - row[SCRAPED_S]
    out[ob.ROUTABLE] = row[SCRAPED_STATUS] == UP
    out[ob.WAIT_S] = ob.batching_wait_s(out)


@compiled
def fill_table(fleet, copy):
    """Write what the router of the current request may know of one copy's replicas."""
    index = int(fleet.clock[copy, CURRENT])
    if index < 0:
        return
    for server in range(fleet.plant.shape[1]):
        replica = _replica(fleet, copy, server)
        _fill_row(replica, index, fleet.clock[copy, NOW_S], fleet.tables[copy, server])


# Decisions.


@compiled
def _pay(rules, requests, index, response, added):
    """Reward of one placement, by the response time that it is looked to have."""
    reward = rules[RESPONSE] * added + rules[TAIL] * max(response - rules[TAIL_AFTER_S], 0.0)
    if response > requests[index, SLO_RESPONSE_S]:
        reward += rules[SLO]
    return reward


@compiled
def _place(fleet, copy, server):
    """Send the current request to a replica; return the reward that is due at once."""
    clock = fleet.clock[copy]
    rules = fleet.rules
    index = int(clock[CURRENT])
    now = clock[NOW_S]
    outcomes = fleet.outcomes[copy]
    waiting = 0.0
    kv = 0.0
    num = fleet.plant.shape[1]
    for other in range(num):
        waiting += fleet.state[copy, other, WAITING]
        kv += _kv_used(fleet.state[copy, other], fleet.plant[copy, other])
    outcomes[index, WAITING_SEEN] = waiting
    outcomes[index, KV_SEEN] = kv / num
    outcomes[index, SERVER] = server
    outcomes[index, ATTEMPTS] += 1.0
    # A new attempt is a new submission.
    outcomes[index, SUBMITTED] = clock[PLACED]
    clock[PLACED] += 1.0
    replica = _replica(fleet, copy, server)
    row = replica.row
    # Before it is submitted: whoever has hung up leaves the books at once.
    _book(replica, index, fleet.tables[copy, server, ob.MATCH_TOKENS])
    if not _submit(replica, index, now):
        _router_lets_go(replica, index, 0.0)
        return 0.0 if _give_back(fleet, copy, index, now) else rules[DROP]
    _note_sent_blocks(replica, index, now)
    reward = rules[ACCEPT]
    if rules[LOOKS_AHEAD]:
        finishes, finish, joules = _look_ahead(replica, fleet.scratch, index)
        added = finishes - row[FINISH_SUM_S] - now
        reward += _pay(
            rules, fleet.requests[copy], index, finish - fleet.requests[copy, index, ARRIVAL_S],
            added + now - fleet.requests[copy, index, ARRIVAL_S],
        )  # fmt: skip
        reward += rules[ENERGY] * (joules - row[LOOKED_J])
        row[FINISH_SUM_S] = finishes
        row[LOOKED_J] = joules
    return reward


@compiled
def best_ahead(fleet, copy, others_weight):
    """Replica where the current request does best, seen from the true state and true lengths.

    Every replica is played to its end with and without the request, as if nothing more came. The
    cost is when the request would leave plus `others_weight` times how much longer all others
    would stay; the first of equals, and the first of all where none takes it.
    """
    index = int(fleet.clock[copy, CURRENT])
    now = fleet.clock[copy, NOW_S]
    best = 0
    least = math.inf
    for server in range(fleet.plant.shape[1]):
        replica = _replica(fleet, copy, server)
        before = _look_ahead(replica, fleet.scratch, -1)[0]
        ahead = _copied(replica, fleet.scratch)
        if not _submit(ahead, index, now):
            continue
        after, finish, _ = _play_out(ahead, index)
        cost = finish + others_weight * (after - finish - before)
        if cost < least:
            least = cost
            best = server
    return best


@compiled
def _collect(fleet, copy):
    """Reward terms that completions have earned since the last call."""
    earned = 0.0
    for server in range(fleet.plant.shape[1]):
        earned += fleet.state[copy, server, EARNED]
        fleet.state[copy, server, EARNED] = 0.0
    return earned


@compiled
def step(fleet, actions, rewards):
    """Place the waiting request of every copy and run to the moment of the next decision.

    A copy whose SKIP is set has just been cleared, and one whose CURRENT is -1 has no request
    left: their actions are ignored and earn 0.

    Returns:
        The first copy whose action names no replica; -1 if none. Nothing is changed otherwise.
    """
    num = fleet.plant.shape[1]
    for copy in range(fleet.state.shape[0]):
        waits = not fleet.clock[copy, SKIP] and fleet.clock[copy, CURRENT] >= 0.0
        if waits and not 0 <= actions[copy] < num:
            return copy
    for copy in range(fleet.state.shape[0]):
        clock = fleet.clock[copy]
        rewards[copy] = 0.0
        if clock[SKIP]:
            clock[SKIP] = 0.0
        elif clock[CURRENT] >= 0.0:
            rewards[copy] = _place(fleet, copy, actions[copy])
            _find_decision(fleet, copy)
            rewards[copy] += _collect(fleet, copy)
        fill_table(fleet, copy)
    return -1


@compiled
def observe(fleet, observations):
    """Encode what the router sees in every copy; return how many numbers hit the bound."""
    saturated = 0
    for copy in range(fleet.state.shape[0]):
        request = fleet.requests[copy, max(int(fleet.clock[copy, CURRENT]), 0)]
        saturated += encode(
            request[FEATURES:], request[CONTEXT], request[CONTEXT] + request[PREDICTED_OUTPUT],
            fleet.tables[copy], fleet.rules[EXPECTED_FINISH] != 0.0, observations[copy],
        )  # fmt: skip
    return saturated


@compiled
def step_and_observe(fleet, actions, rewards, observations):
    """`step`, then `observe`, in one call; return the results of both."""
    wrong = step(fleet, actions, rewards)
    if wrong >= 0:
        return wrong, 0
    return wrong, observe(fleet, observations)


@compiled
def drain(fleet, rewards):
    """Let every copy whose requests are all placed finish what it holds; fill in what it earns."""
    for copy in range(fleet.state.shape[0]):
        for server in range(fleet.plant.shape[1]):
            _advance(_replica(fleet, copy, server), math.inf)
        rewards[copy] = _collect(fleet, copy)


@compiled
def run_marginal(fleet, weights, mean_total_tokens, slo_s, scores, rewards):
    """Run every copy's whole stream under `marginal_scores`, from empty to drained."""
    for copy in range(fleet.state.shape[0]):
        clear(fleet, copy)
        while fleet.clock[copy, CURRENT] >= 0.0:
            fill_table(fleet, copy)
            request = fleet.requests[copy, int(fleet.clock[copy, CURRENT])]
            server = marginal_scores(
                weights, request[CONTEXT], request[PREDICTED_OUTPUT], mean_total_tokens,
                slo_s, fleet.tables[copy], scores,
            )  # fmt: skip
            _place(fleet, copy, server)
            _find_decision(fleet, copy)
    drain(fleet, rewards)


@compiled
def run_generic(fleet, weights, mean_total_tokens, slo_s, scores, rewards):
    """Run every copy's whole stream under `engine_scores`, from empty to drained."""
    for copy in range(fleet.state.shape[0]):
        clear(fleet, copy)
        while fleet.clock[copy, CURRENT] >= 0.0:
            fill_table(fleet, copy)
            request = fleet.requests[copy, int(fleet.clock[copy, CURRENT])]
            # A policy is told when a request came, not when it is tried again.
            since = fleet.clock[copy, NOW_S] - request[ARRIVAL_S]
            for server in range(fleet.plant.shape[1]):
                row = fleet.tables[copy, server]
                row[ob.AGE_S] = max(row[ob.AGE_S] - since, 0.0)
            replica = engine_scores(
                weights, request[CONTEXT], request[PREDICTED_OUTPUT], mean_total_tokens, slo_s,
                fleet.tables[copy], scores,
            )  # fmt: skip
            _place(fleet, copy, replica)
            _find_decision(fleet, copy)
    drain(fleet, rewards)
