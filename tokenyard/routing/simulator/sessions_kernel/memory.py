"""KV memory of a replica: what runs takes it, what is idle gives it back from its tail."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled, compiled_inline
from tokenyard.routing.sessions import rules as ru
from tokenyard.routing.simulator.batching_kernel.iteration import time_of, whole_iterations
from tokenyard.routing.simulator.sessions_kernel import layout as lay

BLOCK_TOKENS = 256.0
"""Idle tokens go, and are hit, in blocks of so many."""
_NEVER = 1e7
_PINNED = 1e9


@compiled_inline
def is_pinned(world, replica, session):
    """Whether the lease of an idle session keeps its KV on the replica."""
    row = world.sessions[session]
    leased = row[lay.ACTIVE] > 0.0 and row[lay.STATE] == lay.TOOL and row[lay.HOME] == replica
    return world.rule[ru.PINNED] > 0.0 and leased


@compiled_inline
def _eviction_key(world, replica, session, now):
    """How soon the tokens of an idle session go: the largest first."""
    row = world.sessions[session]
    key = now - world.kv[replica, session, lay.LAST_S]
    if world.rule[ru.PAUSED_FIRST] > 0.0:
        if row[lay.ACTIVE] == 0.0:
            key += _NEVER
        if row[lay.STATE] == lay.QUEUED:
            key -= _NEVER
    if is_pinned(world, replica, session):
        key -= _PINNED
    return key


@compiled
def make_room(world, replica, tokens, now):
    """Evict idle tokens until so many more fit beside those in use.

    Those of a lease that pins go last; who may not take them has asked before.
    """
    row = world.replicas[replica]
    kv = world.kv[replica]
    need = row[lay.USED] + row[lay.IDLE] + tokens - row[lay.KV_TOKENS]
    while need > 0.0 and row[lay.IDLE] > 0.0:
        chosen = -1
        most = -math.inf
        for place in range(1, world.live[0] + 1):
            session = world.live[place]
            if kv[session, lay.CACHED] > 0.0:
                key = _eviction_key(world, replica, session, now)
                if key > most:
                    most = key
                    chosen = session
        if chosen < 0:
            return
        blocks = math.ceil(need / BLOCK_TOKENS) * BLOCK_TOKENS
        gone = min(kv[chosen, lay.CACHED], blocks)
        kv[chosen, lay.CACHED] -= gone
        row[lay.IDLE] -= gone
        need -= gone


@compiled_inline
def take(world, replica, tokens, now):
    """Take memory, for which idle tokens go where there is no other."""
    row = world.replicas[replica]
    if row[lay.USED] + row[lay.IDLE] + tokens > row[lay.KV_TOKENS]:
        make_room(world, replica, tokens, now)
    row[lay.USED] += tokens
    share = (row[lay.USED] + row[lay.IDLE]) / row[lay.KV_TOKENS]
    world.totals[lay.MOST_KV] = max(world.totals[lay.MOST_KV], share)


@compiled_inline
def keep(world, replica, session, tokens, now):
    """Let tokens that a sequence held be idle."""
    row = world.replicas[replica]
    row[lay.USED] -= tokens
    row[lay.IDLE] += tokens
    world.kv[replica, session, lay.CACHED] = tokens
    world.kv[replica, session, lay.LAST_S] = now


@compiled_inline
def settle(world, replica, now, ends):
    """Take the memory of the iterations that have begun by now; of all, where the stretch ends."""
    row = world.replicas[replica]
    if row[lay.BUSY] == 0.0 or row[lay.STEPS] <= row[lay.TAKEN]:
        return
    steps = row[lay.STEPS]
    if not ends:
        whole = whole_iterations(
            row[lay.BASE_S], row[lay.GROWTH_S], now - row[lay.START_S], row[lay.STEPS]
        )
        steps = min(whole + 1.0, steps)
    if steps > row[lay.TAKEN]:
        take(world, replica, (steps - row[lay.TAKEN]) * row[lay.DECODING], now)
        row[lay.TAKEN] = steps


@compiled_inline
def cut_stretch(world, replica, now):
    """Let the iteration in progress be the last of its stretch: somebody has come."""
    row = world.replicas[replica]
    if row[lay.BUSY] > 0.0 and row[lay.STEPS] > 1.0:
        settle(world, replica, now, False)
        if row[lay.TAKEN] < row[lay.STEPS]:
            row[lay.STEPS] = row[lay.TAKEN]
            row[lay.UNTIL_S] = row[lay.START_S] + time_of(
                row[lay.BASE_S], row[lay.GROWTH_S], row[lay.STEPS]
            )


@compiled
def store_on_host(world, replica, session, tokens):
    """Write a session's KV to the host tier; what was used longest ago makes room."""
    row = world.replicas[replica]
    kv = world.kv[replica]
    if row[lay.HOST_TOKENS] <= 0.0:
        return
    row[lay.HOST_USED] += tokens - kv[session, lay.HOST]
    kv[session, lay.HOST] = tokens
    while row[lay.HOST_USED] > row[lay.HOST_TOKENS]:
        chosen = session
        oldest = math.inf
        for place in range(1, world.live[0] + 1):
            other = world.live[place]
            if other != session and kv[other, lay.HOST] > 0.0 and kv[other, lay.LAST_S] < oldest:
                oldest = kv[other, lay.LAST_S]
                chosen = other
        gone = min(kv[chosen, lay.HOST], row[lay.HOST_USED] - row[lay.HOST_TOKENS])
        kv[chosen, lay.HOST] -= gone
        row[lay.HOST_USED] -= gone


@compiled
def forget(world, session):
    """Free all that a session has anywhere: it has ended."""
    for replica in range(world.replicas.shape[0]):
        row = world.replicas[replica]
        kv = world.kv[replica, session]
        row[lay.IDLE] -= kv[lay.CACHED]
        row[lay.HOST_USED] -= kv[lay.HOST]
        kv[lay.CACHED] = 0.0
        kv[lay.HOST] = 0.0


@compiled_inline
def hit_tokens(world, replica, session, length):
    """Tokens of a prompt that need not be computed: in KV memory, and with the host tier."""
    kv = world.kv[replica, session]
    row = world.sessions[session]
    most = length - 1.0
    if row[lay.PREEMPTED] == 0.0:
        most = min(most, world.turns[int(row[lay.FIRST_TURN] + row[lay.TURN]), lay.KEPT])
    cached = _whole_blocks(min(kv[lay.CACHED], most))
    return cached, max(cached, _whole_blocks(min(kv[lay.HOST], most)))


@compiled_inline
def _whole_blocks(tokens):
    return math.floor(tokens / BLOCK_TOKENS) * BLOCK_TOKENS
