"""The events of a stream of sessions, in their order."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled, compiled_inline
from tokenyard.routing.sessions import rules as ru
from tokenyard.routing.simulator.sessions_kernel import layout as lay
from tokenyard.routing.simulator.sessions_kernel.gate import (
    admit_by_index,
    admit_by_thunderagent,
    dispatch,
)
from tokenyard.routing.simulator.sessions_kernel.iteration import begin_iterations, end_iterations
from tokenyard.routing.simulator.sessions_kernel.memory import cut_stretch, settle


@compiled_inline
def _session_is_due(world, index, now):
    """A tool is done, a lease ends, or a hold reaches its bound."""
    session = world.sessions[index]
    if session[lay.STATE] == lay.HELD:
        session[lay.FORCED] = 1.0
        session[lay.DUE_S] = math.inf
        return
    if now < session[lay.TOOL_END_S]:
        session[lay.ACTIVE] = 0.0
        session[lay.DUE_S] = session[lay.TOOL_END_S]
        if world.rule[ru.PINNED] > 0.0:
            # What waited for the memory may have it now.
            cut_stretch(world, int(session[lay.HOME]), now)
        return
    session[lay.TURN] += 1.0
    _turn_is_ready(world, index, now)


@compiled_inline
def _turn_is_ready(world, index, now):
    """A turn waits at the gateway, or goes on at once where its session is active."""
    session = world.sessions[index]
    turn = int(session[lay.FIRST_TURN] + session[lay.TURN])
    session[lay.STATE] = lay.HELD
    session[lay.READY_S] = now
    session[lay.TOKENS] = world.turns[turn, lay.CONTEXT]
    session[lay.GENERATED] = 0.0
    session[lay.FORCED] = 0.0
    session[lay.DUE_S] = now + world.rule[ru.HOLD_S]
    world.outcomes[turn, lay.OUT_READY_S] = now
    if session[lay.ACTIVE] > 0.0:
        dispatch(world, index, now)


@compiled_inline
def _decide(world, now, is_tick, num_ticks):
    tick_s = world.rule[ru.TICK_S]
    if tick_s > 0.0:
        between = max(1, round(world.rule[ru.PAUSE_S] / tick_s))
        admit_by_thunderagent(world, now, is_tick, is_tick and num_ticks % between == 0)
    else:
        admit_by_index(world, now)


@compiled
def play(world):
    """Play all sessions to their ends; returns the time of the last event, seconds."""
    replicas, sessions, live = world.replicas, world.sessions, world.live
    arriving = 0
    tick_s = world.rule[ru.TICK_S]
    next_tick_s = tick_s if tick_s > 0.0 else math.inf
    num_ticks = 0
    now = 0.0
    while arriving < sessions.shape[0] or live[0] > 0:
        ends_s = math.inf
        ending = -1
        for replica in range(replicas.shape[0]):
            if replicas[replica, lay.UNTIL_S] < ends_s:
                ends_s = replicas[replica, lay.UNTIL_S]
                ending = replica
        due_s = math.inf
        due = -1
        for place in range(1, live[0] + 1):
            if sessions[live[place], lay.DUE_S] < due_s:
                due_s = sessions[live[place], lay.DUE_S]
                due = live[place]
        arrives_s = math.inf
        if arriving < sessions.shape[0]:
            arrives_s = sessions[arriving, lay.ARRIVAL_S]
        first_s = min(min(ends_s, due_s), arrives_s)
        if first_s == math.inf and (next_tick_s == math.inf or not _anyone_is_held(world)):
            return now
        now = min(first_s, next_tick_s)
        for replica in range(replicas.shape[0]):
            settle(world, replica, now, False)
        decides, is_tick = True, False
        if ends_s <= now:
            decides = end_iterations(world, ending)
        elif due_s <= now:
            _session_is_due(world, due, now)
        elif arrives_s <= now:
            live[0] += 1
            live[live[0]] = arriving
            _turn_is_ready(world, arriving, now)
            arriving += 1
        else:
            next_tick_s += tick_s
            num_ticks += 1
            is_tick = True
        if decides:
            _decide(world, now, is_tick, num_ticks)
            for replica in range(replicas.shape[0]):
                if replicas[replica, lay.BUSY] == 0.0:
                    begin_iterations(world, replica, now)
        else:
            begin_iterations(world, ending, now)
    return now


@compiled
def _anyone_is_held(world):
    for place in range(1, world.live[0] + 1):
        if world.sessions[world.live[place], lay.STATE] == lay.HELD:
            return True
    return False
