"""Clients of a closed process: who waits for an answer asks again when it has thought."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled
from tokenyard.routing.simulator.batching_kernel import layout as lay


@compiled
def begin_sessions(requests, turns, pending):
    """Let every client begin a session at its own time."""
    if pending.shape[0] == 0:
        return
    pending[lay.PENDING_COUNT] = 0
    pending[lay.PENDING_NEXT] = 0
    for _ in range(pending[lay.PENDING_CLIENTS]):
        first = _next_session(turns, pending)
        if first >= 0:
            _ask(requests, turns, pending, first, turns[first, lay.START_S])


@compiled
def ask_again(requests, turns, pending, index, now):
    """A request is over: its client thinks, and goes on with the session or begins the next one.

    A client that hung up or was turned away goes on like one that was answered.
    """
    if pending.shape[0] == 0:
        return
    following = int(turns[index, lay.NEXT_TURN])
    if following < 0:
        following = _next_session(turns, pending)
    if following >= 0:
        _ask(requests, turns, pending, following, now + turns[index, lay.THINK_S])


@compiled
def _next_session(turns, pending):
    """First request of the next session that nobody has begun; -1: there is none."""
    for index in range(pending[lay.PENDING_NEXT], turns.shape[0]):
        if turns[index, lay.BEGINS] != 0.0:
            pending[lay.PENDING_NEXT] = index + 1
            return index
    pending[lay.PENDING_NEXT] = turns.shape[0]
    return -1


@compiled
def _ask(requests, turns, pending, index, at_s):
    requests[index, lay.ARRIVAL_S] = at_s
    requests[index, lay.DISPATCH_S] = at_s
    requests[index, lay.ABANDON_S] = at_s + turns[index, lay.PATIENCE_S]
    pending[lay.PENDING_AT + pending[lay.PENDING_COUNT]] = index
    pending[lay.PENDING_COUNT] += 1


@compiled
def soonest_client(requests, pending):
    """Place in `pending` of the request that arrives first, and when; -1 and infinity: nobody."""
    best_place = -1
    soonest = math.inf
    for place in range(pending[lay.PENDING_COUNT]):
        arrival = requests[pending[lay.PENDING_AT + place], lay.ARRIVAL_S]
        if arrival < soonest:
            soonest = arrival
            best_place = place
    return best_place, soonest


@compiled
def take_client(pending, place):
    """Remove and return a request that has arrived."""
    index = pending[lay.PENDING_AT + place]
    pending[lay.PENDING_COUNT] -= 1
    pending[lay.PENDING_AT + place] = pending[lay.PENDING_AT + pending[lay.PENDING_COUNT]]
    return index


@compiled
def earliest_end(replica):
    """Time before which no request of a replica can be over, seconds."""
    row = replica.row
    if not row[lay.BUSY]:
        return math.inf
    earliest = row[lay.UNTIL_S]
    if row[lay.PREFILLING] == 0.0 and row[lay.WAITING] == 0.0 and replica.factors.shape[0] == 0:
        steps = row[lay.MIN_FINISH] - row[lay.STEP] - 1.0
        earliest += steps * replica.params[lay.ITERATION_S]
    return min(earliest, max(row[lay.UNTIL_S], row[lay.NEXT_ABANDON_S]))
