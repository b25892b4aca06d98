"""Servers: what a task takes on one and costs, and what turns them on and off or breaks them."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled
from tokenyard.regions import telemetry
from tokenyard.regions.policies.allocator import (
    better_server,
    least_used,
    waits_behind,
    wanted_model,
)
from tokenyard.regions.simulator import world
from tokenyard.regions.simulator.reports import begin_head, forget, settle, settle_region
from tokenyard.regions.telemetry import LEAST_LEFT, expected_service_s, switch_s


@compiled
def service_s(w, task, server):
    """Time that a server needs for a task, model switch not counted."""
    t = w.seen
    kind = t.servers[server, telemetry.KIND]
    memory = t.kinds[kind, telemetry.KIND_MEMORY]
    crowding = max(1.0, w.tasks[task, world.MEMORY_GB] / memory)
    return w.tasks[task, world.WORK_S] * t.factor[w.labels[task, world.TYPE], kind] * crowding


@compiled
def account(w, task, sign):
    """Add what a placed task takes and costs to this slot, or take it back."""
    out = w.out[w.seen.clock[telemetry.SLOT]]
    row, label = w.tasks[task], w.labels[task]
    back = row[world.BACK_S]
    finish = row[world.FINISH_S] + back
    late = max(0.0, finish - row[world.DEADLINE_S])
    switching = row[world.START_S] - row[world.BEGIN_S]
    kind = w.seen.servers[label[world.SERVER], telemetry.KIND]
    usd = w.seen.kinds[kind, telemetry.KIND_USD]
    out[world.OUT_PLACED] += sign
    out[world.OUT_RESPONSE_S] += sign * (finish - row[world.ARRIVAL_S])
    out[world.OUT_NETWORK_S] += sign * 2.0 * back
    out[world.OUT_INFERENCE_S] += sign * (row[world.FINISH_S] - row[world.START_S])
    out[world.OUT_LATE_S] += sign * late
    out[world.OUT_LATE_USD] += sign * late * w.seen.rules[telemetry.LATE_USD]
    out[world.OUT_DEADLINE_MISSES] += sign * (late > 0.0)
    out[world.OUT_SERVED_S] += sign * (row[world.FINISH_S] - row[world.START_S])
    out[world.OUT_SWITCH_S] += sign * switching
    out[world.OUT_OVERHEAD_USD] += sign * switching * usd
    out[world.OUT_REMOTE] += sign * (label[world.TARGET] != label[world.ORIGIN])


@compiled
def in_slot(w, begin, end):
    """Part of an interval that lies in the present slot, seconds."""
    t0 = w.seen.clock[telemetry.SLOT] * w.seen.rules[telemetry.SLOT_S]
    return max(0.0, min(end, t0 + w.seen.rules[telemetry.SLOT_S]) - max(begin, t0))


@compiled
def place(w, task, server, now):
    """Put a task at the end of a server's queue."""
    settle(w, server, now)
    row, label, times, seen = w.tasks[task], w.labels[task], w.times[server], w.seen.tasks[task]
    kind = w.seen.servers[server, telemetry.KIND]
    switching = switch_s(w.seen, task, server)
    row[world.BEGIN_S] = max(times[world.FREE_S], max(row[world.AT_S], now))
    row[world.START_S] = row[world.BEGIN_S] + switching
    row[world.FINISH_S] = row[world.START_S] + service_s(w, task, server)
    row[world.BACK_S] = w.seen.latency[label[world.ORIGIN], label[world.TARGET]]
    label[world.SERVER] = server
    label[world.STATUS] = world.PLACED
    times[world.FREE_S] = row[world.FINISH_S]
    times[world.BUSY_S] += in_slot(w, row[world.BEGIN_S], row[world.FINISH_S])
    seen[telemetry.EXPECTED_S] = switching + expected_service_s(w.seen, task, kind)
    append(w, task, server)
    remember(w, task, server, now)
    account(w, task, 1.0)


@compiled
def append(w, task, server):
    """Make a task the last one in a server's queue."""
    tail = w.servers[server, world.TAIL]
    w.labels[task, world.NEXT] = -1
    w.labels[task, world.PREVIOUS] = tail
    w.servers[server, world.TAIL] = task
    w.seen.servers[server, telemetry.IN_FLIGHT] += 1
    w.seen.times[server, telemetry.QUEUED_S] += w.seen.tasks[task, telemetry.EXPECTED_S]
    if tail >= 0:
        w.labels[tail, world.NEXT] = task
    else:
        w.servers[server, world.HEAD] = task
        begin_head(w, server)


@compiled
def remember(w, task, server, now):
    """Note the model that a server was given."""
    t, model = w.seen, w.labels[task, world.MODEL]
    past = max(0.0, now - t.times[server, telemetry.SEEN_S])
    fade = math.exp(-t.rules[telemetry.DECAY] * past)
    for other in range(t.recent.shape[1]):
        t.recent[server, other] *= fade
    t.recent[server, model] += 1.0
    t.servers[server, telemetry.HELD_MODEL] = model
    t.times[server, telemetry.SEEN_S] = max(now, t.times[server, telemetry.SEEN_S])


@compiled
def take_back(w, server):
    """Undo the last placement on a server; it has not begun, as another task is before it."""
    task = w.servers[server, world.TAIL]
    before = w.labels[task, world.PREVIOUS]
    row, t = w.tasks[task], w.seen
    account(w, task, -1.0)
    w.times[server, world.BUSY_S] -= in_slot(w, row[world.BEGIN_S], row[world.FINISH_S])
    w.times[server, world.FREE_S] = w.tasks[before, world.FINISH_S]
    w.servers[server, world.TAIL] = before
    w.labels[before, world.NEXT] = -1
    t.servers[server, telemetry.IN_FLIGHT] -= 1
    t.servers[server, telemetry.HELD_MODEL] = w.labels[before, world.MODEL]
    t.times[server, telemetry.QUEUED_S] -= t.tasks[task, telemetry.EXPECTED_S]
    model = w.labels[task, world.MODEL]
    t.recent[server, model] = max(0.0, t.recent[server, model] - 1.0)
    return task


@compiled
def drop(w, task):
    """Give a task up: it counts as late by the patience."""
    out = w.out[w.seen.clock[telemetry.SLOT]]
    w.labels[task, world.STATUS] = world.DROPPED
    out[world.OUT_DROPPED] += 1.0
    out[world.OUT_DEADLINE_MISSES] += 1.0
    out[world.OUT_LATE_S] += w.seen.rules[telemetry.PATIENCE_S]
    out[world.OUT_LATE_USD] += w.seen.rules[telemetry.PATIENCE_S] * w.seen.rules[telemetry.LATE_USD]


@compiled
def wait_in(w, task, region):
    """Put a task into a region's buffer, in the order of `waits_behind`."""
    n = w.region[region, world.NUM_WAITING]
    w.labels[task, world.TARGET] = region
    if n == w.buffer.shape[1]:
        drop(w, task)
        return
    w.labels[task, world.STATUS] = world.WAITING
    queue = w.buffer[region]
    i = n
    while i > 0 and not waits_behind(w.seen, task, queue[i - 1]):
        queue[i] = queue[i - 1]
        i -= 1
    queue[i] = task
    w.region[region, world.NUM_WAITING] = n + 1


@compiled
def improve(w, region, now):
    """Local search: move the last task of a queue, not yet begun, to where it should end sooner."""
    t = w.seen
    for s in range(t.first[region], t.first[region + 1]):
        is_on = t.servers[s, telemetry.STATE] == telemetry.ON
        if is_on and t.servers[s, telemetry.IN_FLIGHT] > 1:
            better = better_server(t, w.servers[s, world.TAIL], s, region, now)
            if better >= 0:
                place(w, take_back(w, s), better, now)


@compiled
def activate(w, region, target, now):
    """Turn servers on or off towards a target, no more in a slot than the ramp allows."""
    t = w.seen
    running, there = 0, 0
    for s in range(t.first[region], t.first[region + 1]):
        state = t.servers[s, telemetry.STATE]
        running += state == telemetry.ON or state == telemetry.WARMING
        there += state != telemetry.DOWN
    target = max(min(target, there), min(1, there))
    ramp = max(1, int(t.rules[telemetry.RAMP] * there))
    if target >= running:
        w.region[region, world.SURPLUS] = 0
        start(w, region, min(target - running, ramp), now)
        return
    w.region[region, world.SURPLUS] += 1
    if w.region[region, world.SURPLUS] > t.rules[telemetry.SURPLUS_SLOTS]:
        stop(w, region, min(running - target, ramp), now)


@compiled
def start(w, region, count, now):
    """Turn on `count` servers in their order, those first that still drain."""
    t = w.seen
    for s in range(t.first[region], t.first[region + 1]):
        if count > 0 and t.servers[s, telemetry.STATE] == telemetry.DRAINING:
            t.servers[s, telemetry.STATE] = telemetry.ON
            count -= 1
    for s in range(t.first[region], t.first[region + 1]):
        if count > 0 and t.servers[s, telemetry.STATE] == telemetry.OFF:
            t.servers[s, telemetry.HELD_MODEL] = wanted_model(t, region)
            t.servers[s, telemetry.STATE] = telemetry.WARMING
            w.times[s, world.READY_S] = now + w.times[s, world.WARMUP_S]
            w.times[s, world.FREE_S] = now
            # Nobody turns off what has not shown its use.
            t.times[s, telemetry.USED] = 1.0
            count -= 1


@compiled
def stop(w, region, count, now):
    """Turn off `count` servers; one with tasks serves them first."""
    t = w.seen
    settle_region(w, region, now)
    for _ in range(count):
        worst = least_used(t, region)
        if worst < 0:
            return
        is_busy = t.servers[worst, telemetry.IN_FLIGHT] > 0
        t.servers[worst, telemetry.STATE] = telemetry.DRAINING if is_busy else telemetry.OFF


@compiled
def nearest_up(w, origin):
    """Closest region that is up; -1: none."""
    for j in w.seen.near[origin]:
        if w.region[j, world.IS_DOWN] == 0:
            return j
    return -1


@compiled
def move_off(w, server, now, is_lost):
    """Take every unfinished task off a server that fails.

    Lost: it begins anew in the nearest region that is up. Else it moves within the region and goes
    on where it was after a migration.
    """
    out = w.out[w.seen.clock[telemetry.SLOT]]
    kind = w.seen.kinds[w.seen.servers[server, telemetry.KIND]]
    for task in range(w.clock[world.FIRST_OPEN], w.clock[world.NEXT_TASK]):
        row, label = w.tasks[task], w.labels[task]
        if (
            label[world.STATUS] != world.PLACED
            or label[world.SERVER] != server
            or row[world.FINISH_S] <= now
        ):
            continue
        account(w, task, -1.0)
        begun = row[world.START_S] < now
        ran = max(0.0, now - row[world.START_S])
        target = label[world.TARGET]
        row[world.AT_S] = now
        if is_lost:
            target = nearest_up(w, label[world.ORIGIN])
            out[world.OUT_LOST_S] += ran
            out[world.OUT_RESTARTED if begun else world.OUT_REROUTED] += 1.0
            if target < 0:
                drop(w, task)
                continue
            row[world.AT_S] += w.seen.latency[label[world.ORIGIN], target]
        elif begun:
            row[world.WORK_S] *= 1.0 - ran / (row[world.FINISH_S] - row[world.START_S])
            expected = max(w.seen.tasks[task, telemetry.EXPECTED_S], 1e-9)
            w.seen.tasks[task, telemetry.LEFT] *= max(1.0 - ran / expected, LEAST_LEFT)
            row[world.AT_S] += kind[telemetry.KIND_MIGRATION_S]
            out[world.OUT_SERVED_S] += ran
            out[world.OUT_MIGRATED] += 1.0
            out[world.OUT_MIGRATION_S] += kind[telemetry.KIND_MIGRATION_S]
            out[world.OUT_OVERHEAD_USD] += (
                kind[telemetry.KIND_MIGRATION_S] * kind[telemetry.KIND_USD]
            )
        wait_in(w, task, target)


@compiled
def fail(w, region, count, is_lost, now):
    """Take down `count` servers of a region, spread over its order; if lost, the region too."""
    lo, hi = w.seen.first[region], w.seen.first[region + 1]
    if is_lost:
        w.region[region, world.IS_DOWN] = 1
    for k in range(count):
        s = lo + (k * (hi - lo)) // count
        if w.seen.servers[s, telemetry.STATE] == telemetry.DOWN:
            continue
        w.seen.servers[s, telemetry.STATE] = telemetry.DOWN
        settle(w, s, now)
        move_off(w, s, now, is_lost)
        forget(w, s)
        w.times[s, world.FREE_S] = now
    if is_lost:
        n = w.region[region, world.NUM_WAITING]
        w.region[region, world.NUM_WAITING] = 0
        for i in range(n):
            task = w.buffer[region, i]
            target = nearest_up(w, w.labels[task, world.ORIGIN])
            w.out[w.seen.clock[telemetry.SLOT], world.OUT_REROUTED] += 1.0
            if target < 0:
                drop(w, task)
            else:
                travel = w.seen.latency[w.labels[task, world.ORIGIN], target]
                w.tasks[task, world.AT_S] = now + travel
                wait_in(w, task, target)


@compiled
def recover(w, region):
    """Bring back all servers of a region that are down, switched off."""
    w.region[region, world.IS_DOWN] = 0
    for s in range(w.seen.first[region], w.seen.first[region + 1]):
        if w.seen.servers[s, telemetry.STATE] == telemetry.DOWN:
            w.seen.servers[s, telemetry.STATE] = telemetry.OFF
            w.seen.servers[s, telemetry.HELD_MODEL] = -1
