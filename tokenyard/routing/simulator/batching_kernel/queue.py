"""The waiting requests of a replica: one ring per priority."""

from __future__ import annotations

from tokenyard.compiled import compiled
from tokenyard.routing.simulator.batching_kernel import layout as lay


@compiled
def ring_at(rules, priority):
    """Place in `row` where the ring of a priority begins."""
    return int(rules[lay.RINGS_AT]) + priority * (2 + 2 * int(rules[lay.RING_SIZE]))


@compiled
def enqueue(row, rules, priority, index, generated, front):
    """Let a request wait, behind the others of its priority or, preempted, in `front` of them."""
    at = ring_at(rules, priority)
    size = int(rules[lay.RING_SIZE])
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
    row[lay.WAITING] += 1.0


@compiled
def first_waiting(row, rules):
    """Ring of the request that is to be admitted next; -1: none waits."""
    for priority in range(int(rules[lay.NUM_PRIORITIES])):
        at = ring_at(rules, priority)
        if row[at + 1] > 0.0:
            return at
    return -1


@compiled
def dequeue(row, rules, at):
    """Take the head off the ring at `at`."""
    row[at] = (int(row[at]) + 1) % int(rules[lay.RING_SIZE])
    row[at + 1] -= 1.0
    row[lay.WAITING] -= 1.0


@compiled
def remove_waiting(row, rules, place):
    """Close the gap that a waiting request leaves; return what it had generated."""
    size = int(rules[lay.RING_SIZE])
    at = ring_at(rules, place // size)
    head = int(row[at])
    slot = at + 2 + 2 * ((head + place % size) % size)
    generated = row[slot + 1]
    for ahead in range(place % size, int(row[at + 1]) - 1):
        to = at + 2 + 2 * ((head + ahead) % size)
        come = at + 2 + 2 * ((head + ahead + 1) % size)
        row[to] = row[come]
        row[to + 1] = row[come + 1]
    row[at + 1] -= 1.0
    row[lay.WAITING] -= 1.0
    return generated
