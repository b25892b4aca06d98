"""A replica among others: submissions, scrapes, failures, retries and the next decision."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled, compiled_inline
from tokenyard.routing.simulator import rewards as pay
from tokenyard.routing.simulator.batching_kernel import clients
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_kernel.iteration import advance, begin
from tokenyard.routing.simulator.batching_kernel.layout import pages_of, replica_of
from tokenyard.routing.simulator.batching_kernel.prefix_cache import keeps_times
from tokenyard.routing.simulator.batching_kernel.queue import enqueue, waiting_at
from tokenyard.routing.simulator.batching_kernel.sequences import (
    count_latency,
    generated_tokens,
    router_acknowledge,
)


@compiled
def _empty_replica(row, params, links, status, warm_until):
    """Leave a replica without batch, queue and cache; its accounts stay."""
    row[: lay.EARNED] = 0.0
    row[lay.NUM_SCALARS :] = 0.0
    row[lay.STATUS] = status
    row[lay.MIN_FINISH] = math.inf
    row[lay.NEXT_ABANDON_S] = math.inf
    row[lay.FREE] = params[lay.NUM_PAGES]
    row[lay.WARM_UNTIL_S] = warm_until
    links[lay.BEFORE, lay.ANCHOR] = lay.ANCHOR
    links[lay.AFTER, lay.ANCHOR] = lay.ANCHOR


@compiled
def clear(fleet, copy):
    """Empty one copy, and find its first decision."""
    fleet.state[copy] = 0.0
    for server in range(fleet.replica_params.shape[1]):
        row = fleet.state[copy, server]
        _empty_replica(
            row, fleet.replica_params[copy, server], fleet.links[copy, server], lay.UP, -math.inf
        )
        row[lay.SCRAPED_S] = -math.inf
        row[lay.SCRAPED_STATUS] = lay.UP
        if fleet.replica_params[copy, server, lay.SCRAPE_INTERVAL_S] > 0.0:
            fleet.block_s[copy, server] = -math.inf
    fleet.cached[copy] = 0
    fleet.routers[copy] = 0.0
    fleet.routers[copy, :, :, lay.OWN_RESPONSE_S] = math.nan
    fleet.clock[copy] = 0.0
    fleet.latencies[copy] = 0.0
    outcomes = fleet.outcomes[copy]
    outcomes[:] = 0.0
    outcomes[:, lay.SERVER] = -1.0
    outcomes[:, lay.FIRST_TOKEN_S] = math.nan
    outcomes[:, lay.FINISH_S] = math.nan
    clients.begin_sessions(fleet.requests[copy], fleet.turns[copy], fleet.pending[copy])
    find_decision(fleet, copy)


@compiled
def submit(replica, index, now, key):
    """Give a request to a replica that has been run to `now`; return whether it takes it.

    Where it has to wait, it waits by `key` among those of its priority (`order.bounded_key`).
    """
    row = replica.row
    rules = replica.rules
    requests = replica.requests
    largest = pages_of(rules, requests[index, lay.CONTEXT] + requests[index, lay.OUTPUT] - 1.0)
    if row[lay.STATUS] != lay.UP or row[lay.WAITING] >= rules[lay.QUEUE_LIMIT]:
        return False
    if largest > replica.params[lay.NUM_PAGES]:
        return False
    leaves_s = min(requests[index, lay.ABANDON_S], lay.start_by_s(requests, index))
    row[lay.NEXT_ABANDON_S] = min(row[lay.NEXT_ABANDON_S], leaves_s)
    key_s, late_at_s, late_key_s = key
    enqueue(replica, index, 0.0, key_s, late_at_s, late_key_s, math.inf)
    if not row[lay.BUSY]:
        begin(replica, now, now)
    return True


@compiled
def track_request(replica, index, match_tokens):
    """Count a request as in flight for its router."""
    requests = replica.requests
    assumed = requests[index, lay.CONTEXT] - match_tokens
    replica.outcomes[index, lay.ASSUMED_PREFILL] = assumed
    own = replica.own[int(requests[index, lay.ROUTER])]
    own[lay.OWN_COUNT] += 1.0
    own[lay.OWN_PREFILL] += assumed
    own[lay.OWN_OUTPUT] += requests[index, lay.PREDICTED_OUTPUT]


@compiled
def note_sent_blocks(replica, index, now):
    """Let the router of a request believe that its prefix will be cached here."""
    if not keeps_times(replica):
        return
    requests = replica.requests
    sent = lay.SENT_S + int(requests[index, lay.ROUTER])
    at = int(requests[index, lay.CHAIN_AT])
    for block in replica.chains[at : at + int(requests[index, lay.CHAIN_LENGTH])]:
        replica.block_s[sent, block] = now


@compiled
def kv_used(row, params):
    """Share of the KV memory that requests hold."""
    return 1.0 - (row[lay.FREE] + row[lay.EVICTABLE]) / params[lay.NUM_PAGES]


@compiled_inline
def _scrape(replica, now):
    """Publish what the replica holds now."""
    row = replica.row
    row[lay.SCRAPED_S] = now
    row[lay.SCRAPED_WAITING] = row[lay.WAITING]
    row[lay.SCRAPED_RUNNING] = row[lay.DECODING] + row[lay.PREFILLING]
    row[lay.SCRAPED_KV] = kv_used(row, replica.params)
    row[lay.SCRAPED_STATUS] = row[lay.STATUS]
    for router in range(replica.own.shape[0]):
        replica.own[router, lay.OWN_COUNT_AT_SCRAPE] = replica.own[router, lay.OWN_COUNT]


@compiled_inline
def _catch_up(replica, now):
    """Run a replica to `now`, publishing its state at the last multiple of the interval."""
    row = replica.row
    interval = replica.params[lay.SCRAPE_INTERVAL_S]
    if interval > 0.0:
        last = min(math.floor(now / interval) * interval, now)
        if last > row[lay.SCRAPED_S]:
            advance(replica, last)
            _scrape(replica, last)
    advance(replica, now)
    if interval == 0.0:
        _scrape(replica, now)


@compiled
def requeue(fleet, copy, index, now):
    """A replica did not serve a request: place it anew later, or drop it."""
    outcomes = fleet.outcomes[copy]
    if outcomes[index, lay.ATTEMPTS] > fleet.rules[lay.MAX_RETRIES]:
        outcomes[index, lay.SERVER] = -1.0
        clients.ask_again(fleet.requests[copy], fleet.turns[copy], fleet.pending[copy], index, now)
        return False
    clock = fleet.clock[copy]
    size = fleet.retries.shape[1]
    fleet.retries[copy, int(clock[lay.RETRY_HEAD] + clock[lay.RETRY_COUNT]) % size] = index
    clock[lay.RETRY_COUNT] += 1.0
    outcomes[index, lay.READY_S] = now + fleet.rules[lay.RETRY_DELAY_S]
    return True


@compiled
def _drain_replica(fleet, copy, server, now):
    """Give everything that a failing replica holds back to the router, first come first."""
    replica = replica_of(fleet, copy, server)
    row = replica.row
    rules = fleet.rules
    before = int(fleet.clock[copy, lay.RETRY_COUNT])
    for which in range(int(row[lay.DECODING])):
        at = int(rules[lay.DECODE_AT]) + lay.DECODE_FIELDS * which
        _retry_or_fail(
            fleet, copy, replica, int(row[at + lay.D_INDEX]), generated_tokens(replica, at), now
        )
    for which in range(int(row[lay.PREFILLING])):
        at = int(rules[lay.PREFILL_AT]) + lay.PREFILL_FIELDS * which
        _retry_or_fail(
            fleet, copy, replica, int(row[at + lay.P_INDEX]), row[at + lay.P_GENERATED], now
        )
    for ahead in range(int(row[lay.WAITING])):
        at = waiting_at(row, rules, ahead)
        _retry_or_fail(
            fleet, copy, replica, int(row[at + lay.W_INDEX]), row[at + lay.W_GENERATED], now
        )
    _sort_retries(fleet, copy, before)


@compiled
def _sort_retries(fleet, copy, first):
    """Sort what waits to be placed again, from place `first` on, by when it was submitted."""
    ring = fleet.retries[copy]
    outcomes = fleet.outcomes[copy]
    head = int(fleet.clock[copy, lay.RETRY_HEAD])
    size = ring.shape[0]
    for place in range(first + 1, int(fleet.clock[copy, lay.RETRY_COUNT])):
        index = ring[(head + place) % size]
        at = place
        while at > first:
            before = ring[(head + at - 1) % size]
            if outcomes[before, lay.SUBMITTED] < outcomes[index, lay.SUBMITTED]:
                break
            ring[(head + at) % size] = before
            at -= 1
        ring[(head + at) % size] = index


@compiled
def _retry_or_fail(fleet, copy, replica, index, generated, now):
    router_acknowledge(replica, index, generated)
    # What has been generated is lost: the response starts again from its first token.
    replica.outcomes[index, lay.FIRST_TOKEN_S] = math.nan
    replica.outcomes[index, lay.GENERATED] += generated
    if not requeue(fleet, copy, index, now):
        replica.row[lay.EARNED] += fleet.rules[pay.DROP]


@compiled
def _apply_event(fleet, copy):
    """Let the next event of a copy happen."""
    clock = fleet.clock[copy]
    event = fleet.events[copy, int(clock[lay.EVENT])]
    clock[lay.EVENT] += 1.0
    now = event[lay.EVENT_S]
    server = int(event[lay.EVENT_REPLICA])
    replica = replica_of(fleet, copy, server)
    row = replica.row
    _catch_up(replica, now)
    status = event[lay.EVENT_STATUS]
    if status == lay.DOWN:
        _drain_replica(fleet, copy, server, now)
        _stop(replica, now)
    elif status == lay.DRAINING:
        row[lay.STATUS] = lay.DRAINING
    elif row[lay.STATUS] == lay.DOWN:
        _empty_replica(
            row, replica.params, replica.links, lay.UP, now + replica.params[lay.WARM_UP_S]
        )
    else:
        row[lay.STATUS] = lay.UP


@compiled
def _stop(replica, now):
    """Take a replica down; routers learn of it, and of the loss of its cache, when they scrape."""
    row = replica.row
    if row[lay.BUSY]:
        # The iteration in progress was accounted for as a whole.
        undone_s = row[lay.UNTIL_S] - now
        row[lay.BUSY_S] -= undone_s
        row[lay.BUSY_J] -= row[lay.TAKES_J] * undone_s / row[lay.TAKES_S]
        if row[lay.DECODING] > 0.0:
            count_latency(replica, row[lay.TAKES_S], -row[lay.DECODING])
    for block in range(1, replica.links.shape[1]):
        if replica.cached[block] & replica.bit:
            replica.cached[block] &= ~replica.bit
            if keeps_times(replica):
                replica.block_s[lay.WENT_S, block] = now
    replica.own[:, lay.OWN_DECODING] = 0.0
    row[lay.LOOKED_J] = row[lay.BUSY_J]
    _empty_replica(row, replica.params, replica.links, lay.DOWN, -math.inf)


@compiled
def _run_towards(fleet, copy, until):
    """Run all replicas to where a closed client might be answered, if that is before `until`.

    Its next request may be the one that arrives first. Returns whether it was before.
    """
    if fleet.pending.shape[1] == 0:
        return False
    earliest = math.inf
    for server in range(fleet.replica_params.shape[1]):
        earliest = min(earliest, clients.earliest_end(replica_of(fleet, copy, server)))
    if earliest >= until:
        return False
    for server in range(fleet.replica_params.shape[1]):
        _catch_up(replica_of(fleet, copy, server), earliest)
    return True


@compiled
def find_decision(fleet, copy):
    """Put the clock at the next request to be placed; CURRENT is -1 when none is left."""
    clock = fleet.clock[copy]
    requests = fleet.requests[copy]
    outcomes = fleet.outcomes[copy]
    pending = fleet.pending[copy]
    closed = pending.shape[0] > 0
    while True:
        arrival = math.inf
        place = -1
        if closed:
            place, arrival = clients.soonest_client(requests, pending)
        elif clock[lay.NEXT] < requests.shape[0]:
            arrival = requests[int(clock[lay.NEXT]), lay.DISPATCH_S]
        retry = math.inf
        retried = 0
        if clock[lay.RETRY_COUNT] > 0.0:
            retried = int(fleet.retries[copy, int(clock[lay.RETRY_HEAD])])
            retry = outcomes[retried, lay.READY_S]
        soonest = min(arrival, retry)
        event = int(clock[lay.EVENT])
        event_s = math.inf
        if event < fleet.events.shape[1]:
            event_s = fleet.events[copy, event, lay.EVENT_S]
        if _run_towards(fleet, copy, min(soonest, event_s)):
            continue
        if event_s <= soonest and event_s < math.inf:
            _apply_event(fleet, copy)
            continue
        if soonest == math.inf:
            clock[lay.CURRENT] = -1.0
            return
        if retry <= arrival:
            clock[lay.RETRY_HEAD] = (clock[lay.RETRY_HEAD] + 1.0) % fleet.retries.shape[1]
            clock[lay.RETRY_COUNT] -= 1.0
            if requests[retried, lay.ABANDON_S] <= retry:
                outcomes[retried, lay.GAVE_UP] = 1.0
                outcomes[retried, lay.SERVER] = -1.0
                clients.ask_again(requests, fleet.turns[copy], pending, retried, retry)
                continue
            clock[lay.CURRENT] = retried
        elif closed:
            clock[lay.CURRENT] = clients.take_client(pending, place)
        else:
            clock[lay.CURRENT] = clock[lay.NEXT]
            clock[lay.NEXT] += 1.0
        clock[lay.NOW_S] = soonest
        break
    for server in range(fleet.replica_params.shape[1]):
        _catch_up(replica_of(fleet, copy, server), soonest)
