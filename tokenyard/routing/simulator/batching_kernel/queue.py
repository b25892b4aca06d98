"""The waiting requests of a replica: one ring, in order of priority, then of key."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled
from tokenyard.routing.simulator.batching_kernel import layout as lay


@compiled
def waiting_at(row, rules, place):
    """Place in `row` of the waiting request that so many are ahead of."""
    at = int(rules[lay.RING_AT])
    slot = int(row[at]) + place
    size = int(rules[lay.RING_SIZE])
    return at + 2 + lay.WAITING_FIELDS * (slot - size if slot >= size else slot)


@compiled
def enqueue(replica, index, generated, key, late_at_s, late_key_s, submitted):
    """Let a request wait behind those of no larger priority number and key.

    Of equal keys the one submitted first comes first: `submitted` is its number, infinity for one
    that has just come. Both are minus infinity for a preempted sequence, which goes before all of
    its priority.
    """
    row = replica.row
    rules = replica.rules
    ring = int(rules[lay.RING_AT])
    size = int(rules[lay.RING_SIZE])
    count = int(row[ring + 1])
    row[ring + 1] = count + 1
    row[lay.WAITING] += 1.0
    if count > 0 and _goes_before(replica, waiting_at(row, rules, 0), index, key, submitted):
        row[ring] = (int(row[ring]) - 1) % size
        to = waiting_at(row, rules, 0)
    else:
        to = waiting_at(row, rules, count)
        for place in range(count - 1, -1, -1):
            before = waiting_at(row, rules, place)
            if not _goes_before(replica, before, index, key, submitted):
                break
            _move(row, before, to)
            to = before
    row[to + lay.W_INDEX] = index
    row[to + lay.W_GENERATED] = generated
    row[to + lay.W_KEY_S] = key
    row[to + lay.W_LATE_AT_S] = late_at_s
    row[to + lay.W_LATE_KEY_S] = late_key_s


@compiled
def _goes_before(replica, at, index, key, submitted):
    """Whether a request that comes with this key goes before the one that waits at `at`."""
    other = int(replica.row[at + lay.W_INDEX])
    theirs = replica.requests[other, lay.PRIORITY]
    own = replica.requests[index, lay.PRIORITY]
    if own != theirs:
        return own < theirs
    their_key = replica.row[at + lay.W_KEY_S]
    if key == their_key:
        return submitted < replica.outcomes[other, lay.SUBMITTED]
    return key < their_key


@compiled
def _move(row, come, to):
    for field in range(lay.WAITING_FIELDS):
        row[to + field] = row[come + field]


@compiled
def dequeue(row, rules):
    """Take the head off the ring."""
    at = int(rules[lay.RING_AT])
    row[at] = (int(row[at]) + 1) % int(rules[lay.RING_SIZE])
    row[at + 1] -= 1.0
    row[lay.WAITING] -= 1.0


@compiled
def set_back_late(replica, now):
    """Let those who are late by now give up their places, as far as that brings others forward.

    Keys only grow, so the head is the right one as soon as it is not late, or was set back before.
    """
    row = replica.row
    rules = replica.rules
    while row[lay.WAITING] > 0.0:
        head = waiting_at(row, rules, 0)
        if row[head + lay.W_LATE_AT_S] >= now:
            return
        index = int(row[head + lay.W_INDEX])
        generated = row[head + lay.W_GENERATED]
        key = row[head + lay.W_LATE_KEY_S]
        dequeue(row, rules)
        submitted = replica.outcomes[index, lay.SUBMITTED]
        enqueue(replica, index, generated, key, math.inf, math.inf, submitted)


@compiled
def remove_waiting(row, rules, place):
    """Close the gap that a waiting request leaves; return what it had generated."""
    ring = int(rules[lay.RING_AT])
    to = waiting_at(row, rules, place)
    generated = row[to + lay.W_GENERATED]
    for behind in range(place + 1, int(row[ring + 1])):
        come = waiting_at(row, rules, behind)
        _move(row, come, to)
        to = come
    row[ring + 1] -= 1.0
    row[lay.WAITING] -= 1.0
    return generated
