"""Iterations of a replica: turns end, sequences are preempted and admitted, prompts in chunks."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled, compiled_inline
from tokenyard.routing.sessions import rules as ru
from tokenyard.routing.sessions.index import waiting_key
from tokenyard.routing.simulator.batching_kernel.iteration import time_of
from tokenyard.routing.simulator.sessions_kernel import layout as lay
from tokenyard.routing.simulator.sessions_kernel import memory


@compiled
def end_iterations(world, replica):
    """Hand out the tokens of the iterations in progress; returns whether a turn ended."""
    row = world.replicas[replica]
    now = row[lay.UNTIL_S]
    memory.settle(world, replica, now, True)
    decoding = row[lay.DECODING]
    row[lay.STEP] += row[lay.STEPS]
    row[lay.KV_SUM] += row[lay.STEPS] * decoding
    row[lay.BUSY] = 0.0
    row[lay.UNTIL_S] = math.inf
    ended = False
    which = 0
    while which < row[lay.RUNNING]:
        sequence = world.running[replica, which]
        if sequence[lay.R_TO_PREFILL] > 0.0:
            chunk = sequence[lay.R_CHUNK]
            sequence[lay.R_TO_PREFILL] -= chunk
            sequence[lay.R_KV] += chunk
            row[lay.PENDING] -= chunk
            if sequence[lay.R_TO_PREFILL] <= 0.0:
                _begin_decoding(world, replica, which, now)
        if sequence[lay.R_TO_PREFILL] <= 0.0 and sequence[lay.R_FINISH] <= row[lay.STEP]:
            _end_turn(world, replica, which, now)
            ended = True
        else:
            which += 1
    return ended


@compiled_inline
def _begin_decoding(world, replica, which, now):
    """The prompt is computed: the first token is out."""
    row = world.replicas[replica]
    sequence = world.running[replica, which]
    session = world.sessions[int(sequence[lay.R_SESSION])]
    turn = int(session[lay.FIRST_TURN] + session[lay.TURN])
    if math.isnan(world.outcomes[turn, lay.OUT_FIRST_S]):
        world.outcomes[turn, lay.OUT_FIRST_S] = now
    session[lay.GENERATED] += 1.0
    left = world.turns[turn, lay.ANSWER] - session[lay.GENERATED]
    sequence[lay.R_BASE] = sequence[lay.R_LENGTH] - row[lay.STEP]
    sequence[lay.R_FINISH] = row[lay.STEP] + left
    row[lay.DECODING] += 1.0
    row[lay.KV_SUM] += sequence[lay.R_LENGTH]


@compiled_inline
def _remove(world, replica, which):
    row = world.replicas[replica]
    row[lay.RUNNING] -= 1.0
    for place in range(which, int(row[lay.RUNNING])):
        for column in range(lay.NUM_RUNNING):
            world.running[replica, place, column] = world.running[replica, place + 1, column]


@compiled_inline
def leave(world, session):
    """Take a session out of those that are under way."""
    live = world.live
    place = 1
    while live[place] != session:
        place += 1
    live[0] -= 1
    for later in range(place, live[0] + 1):
        live[later] = live[later + 1]


@compiled_inline
def _end_turn(world, replica, which, now):
    """The answer is complete: its KV is idle until the next turn, or gone with the session."""
    row = world.replicas[replica]
    sequence = world.running[replica, which]
    index = int(sequence[lay.R_SESSION])
    session = world.sessions[index]
    turn = int(session[lay.FIRST_TURN] + session[lay.TURN])
    held = sequence[lay.R_BASE] + row[lay.STEP]
    row[lay.DECODING] -= 1.0
    row[lay.KV_SUM] -= held
    _remove(world, replica, which)
    memory.keep(world, replica, index, held, now)
    outcome = world.outcomes[turn]
    outcome[lay.OUT_FINISH_S] = now
    session[lay.ATTAINED] += world.turns[turn, lay.ANSWER] + outcome[lay.OUT_PREFILLED]
    session[lay.LOG_ATTAINED] = math.log1p(session[lay.ATTAINED] * 1e-3)
    session[lay.TOKENS] = world.turns[turn, lay.CONTEXT] + world.turns[turn, lay.ANSWER]
    if session[lay.TURN] + 1.0 == session[lay.NUM_TURNS]:
        session[lay.STATE] = lay.ENDED
        session[lay.ACTIVE] = 0.0
        session[lay.MARKED] = 0.0
        session[lay.DUE_S] = math.inf
        if world.rule[ru.KNOWS_ENDS] > 0.0:
            memory.forget(world, index)
            leave(world, index)
        return
    session[lay.STATE] = lay.TOOL
    session[lay.TOOL_END_S] = now + world.turns[turn, lay.TOOL_S]
    memory.store_on_host(world, replica, index, held)
    if session[lay.MARKED] > 0.0 or world.rule[ru.LEASE_S] <= 0.0:
        session[lay.MARKED] = 0.0
        session[lay.ACTIVE] = 0.0
    session[lay.DUE_S] = session[lay.TOOL_END_S]
    if session[lay.ACTIVE] > 0.0:
        session[lay.DUE_S] = min(session[lay.DUE_S], now + world.rule[ru.LEASE_S])


@compiled
def _preempt(world, replica, now):
    """Send the sequence that was admitted last back to the queue; it computes its KV again."""
    row = world.replicas[replica]
    which = int(row[lay.RUNNING]) - 1
    sequence = world.running[replica, which]
    index = int(sequence[lay.R_SESSION])
    session = world.sessions[index]
    turn = int(session[lay.FIRST_TURN] + session[lay.TURN])
    computed = sequence[lay.R_KV]
    if sequence[lay.R_TO_PREFILL] > 0.0:
        row[lay.PENDING] -= sequence[lay.R_TO_PREFILL]
        row[lay.USED] -= sequence[lay.R_LENGTH] - computed
    else:
        computed = sequence[lay.R_BASE] + row[lay.STEP]
        left = sequence[lay.R_FINISH] - row[lay.STEP]
        session[lay.GENERATED] = world.turns[turn, lay.ANSWER] - left
        row[lay.DECODING] -= 1.0
        row[lay.KV_SUM] -= computed
    row[lay.RUNNING] -= 1.0
    memory.keep(world, replica, index, computed, now)
    world.waiting[replica, int(row[lay.WAITING])] = index
    row[lay.WAITING] += 1.0
    session[lay.STATE] = lay.QUEUED
    session[lay.PREEMPTED] = 1.0
    session[lay.ASSUMED] = 0.0
    world.totals[lay.PREEMPTIONS] += 1.0


@compiled_inline
def _first_waiting(world, replica):
    """Place in the queue of the turn that is next."""
    row = world.replicas[replica]
    first = 0
    least = math.inf
    for place in range(int(row[lay.WAITING])):
        index = world.waiting[replica, place]
        session = world.sessions[index]
        key = -1e18
        if session[lay.PREEMPTED] == 0.0:
            hit = memory.hit_tokens(world, replica, index, session[lay.TOKENS])[1]
            turn = world.turns[int(session[lay.FIRST_TURN] + session[lay.TURN])]
            key = waiting_key(
                world.rule, session[lay.READY_S], session[lay.ARRIVAL_S],
                (session[lay.TOKENS] - hit) * row[lay.PREFILL_TOKEN_S], session[lay.ATTAINED],
                turn[lay.REMAINING_S],
            )  # fmt: skip
        if key < least:
            least = key
            first = place
    return first


@compiled_inline
def _pinned_tokens(world, replica, index):
    """Idle tokens of others that a lease keeps."""
    pinned = 0.0
    if world.rule[ru.PINNED] > 0.0:
        for place in range(1, world.live[0] + 1):
            other = world.live[place]
            if other != index and memory.is_pinned(world, replica, other):
                pinned += world.kv[replica, other, lay.CACHED]
    return pinned


@compiled_inline
def _admit(world, replica, budget, now):
    """Let the next turn run if it fits; tokens of its chunk (-1: no), of its hit, and loaded."""
    row = world.replicas[replica]
    place = _first_waiting(world, replica)
    index = world.waiting[replica, place]
    session = world.sessions[index]
    length = session[lay.TOKENS] + session[lay.GENERATED]
    pinned = _pinned_tokens(world, replica, index)
    if length + row[lay.USED] + pinned > row[lay.KV_TOKENS] and (
        row[lay.RUNNING] > 0.0 or pinned == 0.0
    ):
        return -1.0, 0.0, 0.0
    cached, hit = memory.hit_tokens(world, replica, index, length)
    row[lay.IDLE] -= world.kv[replica, index, lay.CACHED]
    world.kv[replica, index, lay.CACHED] = 0.0
    memory.take(world, replica, length, now)
    row[lay.WAITING] -= 1.0
    for later in range(place, int(row[lay.WAITING])):
        world.waiting[replica, later] = world.waiting[replica, later + 1]
    need = length - hit
    chunk = min(need, budget)
    sequence = world.running[replica, int(row[lay.RUNNING])]
    row[lay.RUNNING] += 1.0
    sequence[lay.R_SESSION] = index
    sequence[lay.R_LENGTH] = length
    sequence[lay.R_KV] = hit
    sequence[lay.R_TO_PREFILL] = need
    sequence[lay.R_CHUNK] = chunk
    row[lay.PENDING] += need - session[lay.ASSUMED]
    session[lay.STATE] = lay.RUNS
    session[lay.PREEMPTED] = 0.0
    session[lay.ASSUMED] = 0.0
    outcome = world.outcomes[int(session[lay.FIRST_TURN] + session[lay.TURN])]
    outcome[lay.OUT_HIT] += hit
    outcome[lay.OUT_PREFILLED] += need
    return chunk, hit, hit - cached


@compiled
def begin_iterations(world, replica, now):
    """Begin the next iteration, or a stretch of them that only decode; or become idle."""
    row = world.replicas[replica]
    preempted = False
    while row[lay.USED] + row[lay.DECODING] > row[lay.KV_TOKENS]:
        _preempt(world, replica, now)
        preempted = True
    decoding = row[lay.DECODING]
    kv_read = row[lay.KV_SUM]
    memory.take(world, replica, decoding, now)
    budget = row[lay.TOKEN_BUDGET] - decoding
    prefill = 0.0
    loaded = 0.0
    for which in range(int(row[lay.RUNNING])):
        sequence = world.running[replica, which]
        if sequence[lay.R_TO_PREFILL] > 0.0:
            chunk = min(sequence[lay.R_TO_PREFILL], budget)
            sequence[lay.R_CHUNK] = chunk
            budget -= chunk
            prefill += chunk
            if chunk > 0.0:
                kv_read += sequence[lay.R_KV]
    while (
        not preempted and budget > 0.0 and row[lay.WAITING] > 0.0
        and row[lay.RUNNING] < row[lay.MAX_BATCH]
    ):  # fmt: skip
        chunk, hit, from_host = _admit(world, replica, budget, now)
        if chunk < 0.0:
            break
        budget -= chunk
        prefill += chunk
        kv_read += hit
        loaded += from_host
    if row[lay.RUNNING] == 0.0:
        return
    row[lay.BASE_S] = (
        row[lay.ITERATION_S]
        + row[lay.PREFILL_TOKEN_S] * prefill
        + row[lay.SEQUENCE_S] * decoding
        + row[lay.KV_TOKEN_S] * kv_read
        + row[lay.HOST_TOKEN_S] * loaded
    )
    row[lay.GROWTH_S] = row[lay.KV_TOKEN_S] * decoding
    row[lay.STEPS] = 1.0
    row[lay.TAKEN] = 1.0
    if row[lay.RUNNING] == decoding:
        finish = math.inf
        for which in range(int(decoding)):
            finish = min(finish, world.running[replica, which, lay.R_FINISH])
        fits = 1.0 + math.floor((row[lay.KV_TOKENS] - row[lay.USED]) / decoding)
        row[lay.STEPS] = max(1.0, min(finish - row[lay.STEP], fits))
    row[lay.BUSY] = 1.0
    row[lay.START_S] = now
    row[lay.UNTIL_S] = now + time_of(row[lay.BASE_S], row[lay.GROWTH_S], row[lay.STEPS])
