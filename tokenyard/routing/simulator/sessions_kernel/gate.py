"""Who of the held sessions goes on, and where; who of the others is paused."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled, compiled_inline
from tokenyard.routing.sessions import rules as ru
from tokenyard.routing.sessions.index import placement_cost, urgency
from tokenyard.routing.simulator.sessions_kernel import layout as lay
from tokenyard.routing.simulator.sessions_kernel.memory import cut_stretch, hit_tokens

_AFTER_ALL = 1e12


@compiled_inline
def dispatch(world, index, now):
    """Queue the turn of an active session at its replica."""
    session = world.sessions[index]
    replica = int(session[lay.HOME])
    row = world.replicas[replica]
    cut_stretch(world, replica, now)
    turn = int(session[lay.FIRST_TURN] + session[lay.TURN])
    session[lay.STATE] = lay.QUEUED
    session[lay.ACTIVE] = 1.0
    session[lay.STARTED] = 1.0
    session[lay.DUE_S] = math.inf
    world.outcomes[turn, lay.OUT_ADMITTED_S] = now
    if now > session[lay.READY_S]:
        world.totals[lay.HELD_TURNS] += 1.0
    world.waiting[replica, int(row[lay.WAITING])] = index
    row[lay.WAITING] += 1.0
    hit = hit_tokens(world, replica, index, session[lay.TOKENS])[1]
    session[lay.ASSUMED] = session[lay.TOKENS] - hit
    row[lay.PENDING] += session[lay.ASSUMED]


@compiled_inline
def count_footprints(world, now, half_life_s):
    """Tokens of active sessions on every replica, and of those that run or are queued.

    While a tool runs, half of the tokens no longer count after each half-life; inf: they all do.
    Who was admitted because its hold had reached the bound takes no room of others while it is
    queued: a full gate would else only delay all.
    """
    growth = world.rule[ru.GROWTH_TOKENS]
    for replica in range(world.replicas.shape[0]):
        row = world.replicas[replica]
        row[lay.FOOTPRINT] = row[lay.USED]
        row[lay.PLACED] = row[lay.USED]
    active = 0
    for place in range(1, world.live[0] + 1):
        session = world.sessions[world.live[place]]
        if session[lay.ACTIVE] == 0.0:
            continue
        active += 1
        row = world.replicas[int(session[lay.HOME])]
        if session[lay.STATE] == lay.QUEUED and session[lay.FORCED] > 0.0:
            row[lay.PLACED] += session[lay.TOKENS] + session[lay.GENERATED]
            continue
        row[lay.FOOTPRINT] += growth
        if session[lay.STATE] == lay.TOOL:
            turn = int(session[lay.FIRST_TURN] + session[lay.TURN])
            idle_s = now - session[lay.TOOL_END_S] + world.turns[turn, lay.TOOL_S]
            row[lay.FOOTPRINT] += session[lay.TOKENS] * 0.5 ** (idle_s / half_life_s)
        elif session[lay.STATE] == lay.QUEUED:
            tokens = session[lay.TOKENS] + session[lay.GENERATED]
            row[lay.FOOTPRINT] += tokens
            row[lay.PLACED] += tokens
    return active


@compiled_inline
def _score(world, index, now):
    """Urgency of a held session, before all others where its hold has reached the bound."""
    session = world.sessions[index]
    turn = int(session[lay.FIRST_TURN] + session[lay.TURN])
    cached_share = 0.0
    if session[lay.HOME] >= 0.0:
        cached = world.kv[int(session[lay.HOME]), index, lay.CACHED]
        cached_share = cached / session[lay.TOKENS]
    score = urgency(
        world.rule, now - session[lay.READY_S], now - session[lay.ARRIVAL_S], session[lay.STARTED],
        cached_share, world.turns[turn, lay.LOG_REMAINING], session[lay.TOKENS],
        session[lay.LOG_ATTAINED],
    )  # fmt: skip
    return score + 1e18 * session[lay.FORCED]


@compiled_inline
def _cheapest(world, index):
    """The replica with room where a session's turn costs least; -1: there is none."""
    rule = world.rule
    session = world.sessions[index]
    tokens = session[lay.TOKENS]
    chosen = -1
    least = math.inf
    for replica in range(world.replicas.shape[0]):
        row = world.replicas[replica]
        if rule[ru.STICKY] > 0.0 and session[lay.HOME] >= 0.0 and session[lay.HOME] != replica:
            continue
        if tokens > ru.LARGEST_SHARE * row[lay.KV_TOKENS]:
            continue
        full = row[lay.FOOTPRINT] + tokens + rule[ru.GROWTH_TOKENS]
        is_full = full > rule[ru.FULL_AT] * row[lay.KV_TOKENS] and row[lay.FOOTPRINT] > 0.0
        if is_full and session[lay.FORCED] == 0.0:
            continue
        cost = placement_cost(
            rule, tokens - hit_tokens(world, replica, index, tokens)[1], row[lay.PENDING],
            row[lay.FOOTPRINT], row[lay.PLACED], tokens, row[lay.KV_TOKENS], row[lay.ITERATION_S],
            row[lay.PREFILL_TOKEN_S], row[lay.KV_TOKEN_S],
        )  # fmt: skip
        if cost < least:
            least = cost
            chosen = replica
    return chosen


@compiled_inline
def place(world, index, replica, now):
    """Admit a session to a replica."""
    session = world.sessions[index]
    row = world.replicas[replica]
    session[lay.HOME] = replica
    if session[lay.FORCED] == 0.0:
        row[lay.FOOTPRINT] += session[lay.TOKENS] + world.rule[ru.GROWTH_TOKENS]
    row[lay.PLACED] += session[lay.TOKENS]
    dispatch(world, index, now)


@compiled_inline
def admit_by_index(world, now):
    """Admit held sessions, the most urgent first, to where they cost least, while there is room."""
    rule = world.rule
    live = world.live
    held = 0
    for at in range(1, live[0] + 1):
        session = world.sessions[live[at]]
        session[lay.SCORE] = -math.inf
        if session[lay.STATE] == lay.HELD:
            session[lay.SCORE] = _score(world, live[at], now)
            held += 1
    if held == 0:
        return
    active = count_footprints(world, now, math.inf)
    most = rule[ru.MOST_ACTIVE] * world.replicas.shape[0]
    skipped = 0.0
    while True:
        best = -1
        score = -math.inf
        for at in range(1, live[0] + 1):
            if world.sessions[live[at], lay.SCORE] > score:
                score = world.sessions[live[at], lay.SCORE]
                best = live[at]
        if best < 0 or (active >= most and world.sessions[best, lay.FORCED] == 0.0):
            return
        world.sessions[best, lay.SCORE] = -math.inf
        replica = _cheapest(world, best)
        if replica >= 0:
            place(world, best, replica, now)
            active += 1
        else:
            skipped += 1.0
            if skipped >= max(rule[ru.BACKFILL], 1.0):
                return


@compiled_inline
def _resume_group(world, index):
    """ThunderAgent's order of paused sessions: turns that wait, new ones, those at a tool."""
    session = world.sessions[index]
    if session[lay.ACTIVE] > 0.0:
        return 3
    if session[lay.STATE] == lay.HELD:
        return 0 if session[lay.STARTED] > 0.0 else 1
    return 2 if session[lay.STATE] == lay.TOOL else 3


@compiled_inline
def _roomiest(world, index):
    """The replica with most room for a session, and that room, tokens; its own where asked."""
    rule = world.rule
    session = world.sessions[index]
    chosen = -1
    most = -math.inf
    for replica in range(world.replicas.shape[0]):
        row = world.replicas[replica]
        own = rule[ru.OWN_REPLICA] > 0.0 and session[lay.STARTED] > 0.0
        if own and session[lay.HOME] != replica:
            continue
        room = (rule[ru.FULL_AT] - rule[ru.SPARE]) * row[lay.KV_TOKENS] - row[lay.FOOTPRINT]
        if room > most and session[lay.TOKENS] <= ru.LARGEST_SHARE * row[lay.KV_TOKENS]:
            most = room
            chosen = replica
    return chosen, most


@compiled_inline
def _resume(world, index, replica, now):
    session = world.sessions[index]
    if session[lay.STATE] == lay.HELD:
        place(world, index, replica, now)
    else:
        session[lay.HOME] = replica
        session[lay.ACTIVE] = 1.0
        world.replicas[replica, lay.FOOTPRINT] += session[lay.TOKENS] + world.rule[ru.GROWTH_TOKENS]


@compiled
def _resume_smallest(world, group, now):
    """Resume sessions of a group, the smallest first, while they fit."""
    rule = world.rule
    live = world.live
    for at in range(1, live[0] + 1):
        session = world.sessions[live[at]]
        session[lay.SCORE] = math.inf
        if _resume_group(world, live[at]) == group:
            session[lay.SCORE] = session[lay.TOKENS]
    while True:
        best = -1
        least = math.inf
        for at in range(1, live[0] + 1):
            if world.sessions[live[at], lay.SCORE] < least:
                least = world.sessions[live[at], lay.SCORE]
                best = live[at]
        if best < 0:
            return
        world.sessions[best, lay.SCORE] = math.inf
        replica, room = _roomiest(world, best)
        if room >= least + rule[ru.GROWTH_TOKENS]:
            _resume(world, best, replica, now)
        elif rule[ru.OWN_REPLICA] == 0.0:
            return


@compiled
def _count_tokens(world, replica):
    """Write the tokens of a replica's active sessions into SCORE; returns those of marked ones."""
    row = world.replicas[replica]
    for at in range(1, world.live[0] + 1):
        session = world.sessions[world.live[at]]
        session[lay.SCORE] = session[lay.TOKENS]
        if session[lay.STATE] == lay.QUEUED:
            session[lay.SCORE] += session[lay.GENERATED]
    marked = 0.0
    for which in range(int(row[lay.RUNNING])):
        sequence = world.running[replica, which]
        session = world.sessions[int(sequence[lay.R_SESSION])]
        session[lay.SCORE] = sequence[lay.R_LENGTH]
        if sequence[lay.R_TO_PREFILL] <= 0.0:
            session[lay.SCORE] = sequence[lay.R_BASE] + row[lay.STEP]
            if row[lay.BUSY] > 0.0:
                session[lay.SCORE] += row[lay.TAKEN]
    for at in range(1, world.live[0] + 1):
        session = world.sessions[world.live[at]]
        if session[lay.MARKED] > 0.0 and session[lay.HOME] == replica:
            marked += session[lay.SCORE] + world.rule[ru.GROWTH_TOKENS]
    return marked


@compiled
def _pause_smallest(world, replica):
    """Pause sessions of a replica that is too full: idle ones first, the smallest first.

    Those that are marked already will leave when their turn ends.
    """
    row = world.replicas[replica]
    live = world.live
    limit = world.rule[ru.FULL_AT] * row[lay.KV_TOKENS]
    row[lay.FOOTPRINT] -= _count_tokens(world, replica)
    while row[lay.FOOTPRINT] > limit:
        best = -1
        least = math.inf
        for at in range(1, live[0] + 1):
            session = world.sessions[live[at]]
            if session[lay.ACTIVE] == 0.0 or session[lay.HOME] != replica:
                continue
            if session[lay.MARKED] > 0.0:
                continue
            # What is idle goes before all that runs.
            runs = session[lay.STATE] != lay.TOOL
            key = session[lay.SCORE] + (_AFTER_ALL if runs else 0.0)
            if key < least:
                least = key
                best = live[at]
        if best < 0:
            return
        session = world.sessions[best]
        row[lay.FOOTPRINT] -= session[lay.SCORE] + world.rule[ru.GROWTH_TOKENS]
        if session[lay.STATE] == lay.TOOL:
            session[lay.ACTIVE] = 0.0
        else:
            session[lay.MARKED] = 1.0


@compiled
def admit_by_thunderagent(world, now, is_tick, pauses):
    """Resume at ticks, pause at some; between them only a new session that fits goes in at once."""
    live = world.live
    half_life_s = world.rule[ru.HALF_LIFE_S]
    if is_tick:
        count_footprints(world, now, half_life_s)
        for group in range(3):
            _resume_smallest(world, group, now)
    count_footprints(world, now, math.inf)
    if pauses:
        for replica in range(world.replicas.shape[0]):
            _pause_smallest(world, replica)
    newest = -1
    others = 0
    for at in range(1, live[0] + 1):
        index = live[at]
        session = world.sessions[index]
        if session[lay.STATE] == lay.HELD and session[lay.FORCED] > 0.0:
            replica = _cheapest(world, index)
            if replica >= 0:
                place(world, index, replica, now)
        elif _resume_group(world, index) < 3:
            if session[lay.STARTED] == 0.0 and session[lay.READY_S] == now:
                newest = index
            else:
                others += 1
    if newest >= 0 and others == 0:
        count_footprints(world, now, half_life_s)
        replica, room = _roomiest(world, newest)
        if room >= world.sessions[newest, lay.TOKENS] + world.rule[ru.GROWTH_TOKENS]:
            place(world, newest, replica, now)
