"""Servers: which takes a task, what that costs, and what turns them on and off or breaks them."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled
from tokenyard.regions.simulator import world

_MIN_GAIN_S = 1.0
"""A task that waits moves only for so much."""


@compiled
def service_s(w, task, server):
    """Time that a server needs for a task, model switch not counted."""
    kind = w.servers[server, world.KIND]
    crowding = max(1.0, w.tasks[task, world.MEMORY_GB] / w.kinds[kind, world.KIND_MEMORY])
    return w.tasks[task, world.WORK_S] * w.factor[w.labels[task, world.TYPE], kind] * crowding


@compiled
def switch_s(w, task, server):
    """Time to change to the task's model, 0 where it is held."""
    held = w.servers[server, world.HELD_MODEL]
    if held == w.labels[task, world.MODEL] or held < 0:
        return 0.0
    return w.kinds[w.servers[server, world.KIND], world.KIND_SWITCH_S]


@compiled
def choose(w, task, region, now):
    """Server with room of highest score (Eq 7 to 10), or the one that is free first; -1: none."""
    rules = w.rules
    label = w.labels[task]
    best, highest = -1, -math.inf
    for s in range(w.first[region], w.first[region + 1]):
        if w.servers[s, world.STATE] != world.ON:
            continue
        wait = w.times[s, world.FREE_S] - now
        if wait > rules[world.ROOM_S]:
            continue
        wait = max(wait, 0.0)
        if rules[world.EARLIEST] > 0:
            score = -wait
        else:
            kind = w.servers[s, world.KIND]
            enough = min(1.0, w.kinds[kind, world.KIND_MEMORY] / w.tasks[task, world.MEMORY_GB])
            ahead = (wait + switch_s(w, task, s)) / rules[world.TASK_S]
            alike, total = 0.0, 0.0
            for model in range(w.recent.shape[1]):
                alike += w.likeness[label[world.MODEL], model] * w.recent[s, model]
                total += w.recent[s, model]
            fade = math.exp(-rules[world.DECAY] * (now - w.times[s, world.SEEN_S]))
            # Divided by what could be alike at most, so that the three terms have one scale.
            locality = alike * fade / (1.0 + total * fade)
            score = (
                rules[world.HARDWARE] * w.fit[label[world.TYPE], kind] * enough
                + rules[world.LOAD] * math.exp(-ahead)
                + rules[world.LOCALITY] * locality
            )
        if score > highest:
            best, highest = s, score
    return best


@compiled
def account(w, task, sign):
    """Add what a placed task takes and costs to this slot, or take it back."""
    out = w.out[w.clock[world.SLOT]]
    row, label = w.tasks[task], w.labels[task]
    back = row[world.BACK_S]
    finish = row[world.FINISH_S] + back
    late = max(0.0, finish - row[world.DEADLINE_S])
    switching = row[world.START_S] - row[world.BEGIN_S]
    usd = w.kinds[w.servers[label[world.SERVER], world.KIND], world.KIND_USD]
    out[world.OUT_PLACED] += sign
    out[world.OUT_RESPONSE_S] += sign * (finish - row[world.ARRIVAL_S])
    out[world.OUT_NETWORK_S] += sign * 2.0 * back
    out[world.OUT_INFERENCE_S] += sign * (row[world.FINISH_S] - row[world.START_S])
    out[world.OUT_LATE_S] += sign * late
    out[world.OUT_LATE_USD] += sign * late * w.rules[world.LATE_USD]
    out[world.OUT_DEADLINE_MISSES] += sign * (late > 0.0)
    out[world.OUT_SERVED_S] += sign * (row[world.FINISH_S] - row[world.START_S])
    out[world.OUT_SWITCH_S] += sign * switching
    out[world.OUT_OVERHEAD_USD] += sign * switching * usd
    out[world.OUT_REMOTE] += sign * (label[world.TARGET] != label[world.ORIGIN])


@compiled
def in_slot(w, begin, end):
    """Part of an interval that lies in the present slot, seconds."""
    t0 = w.clock[world.SLOT] * w.rules[world.SLOT_S]
    return max(0.0, min(end, t0 + w.rules[world.SLOT_S]) - max(begin, t0))


@compiled
def place(w, task, server, now):
    """Put a task at the end of a server's queue."""
    row, label, times = w.tasks[task], w.labels[task], w.times[server]
    row[world.BEGIN_S] = max(times[world.FREE_S], max(row[world.AT_S], now))
    row[world.START_S] = row[world.BEGIN_S] + switch_s(w, task, server)
    row[world.FINISH_S] = row[world.START_S] + service_s(w, task, server)
    row[world.BACK_S] = w.latency[label[world.ORIGIN], label[world.TARGET]]
    label[world.SERVER] = server
    label[world.STATUS] = world.PLACED
    w.servers[server, world.LAST_TASK] = task
    w.servers[server, world.LAST_MODEL] = w.servers[server, world.HELD_MODEL]
    w.servers[server, world.HELD_MODEL] = label[world.MODEL]
    times[world.LAST_FREE_S] = times[world.FREE_S]
    times[world.FREE_S] = row[world.FINISH_S]
    times[world.BUSY_S] += in_slot(w, row[world.BEGIN_S], row[world.FINISH_S])
    fade = math.exp(-w.rules[world.DECAY] * max(0.0, now - times[world.SEEN_S]))
    for model in range(w.recent.shape[1]):
        w.recent[server, model] *= fade
    w.recent[server, label[world.MODEL]] += 1.0
    times[world.SEEN_S] = max(now, times[world.SEEN_S])
    account(w, task, 1.0)


@compiled
def take_back(w, server):
    """Undo the last placement on a server; its task has not begun."""
    task = w.servers[server, world.LAST_TASK]
    row, times = w.tasks[task], w.times[server]
    account(w, task, -1.0)
    times[world.BUSY_S] -= in_slot(w, row[world.BEGIN_S], row[world.FINISH_S])
    times[world.FREE_S] = times[world.LAST_FREE_S]
    w.servers[server, world.HELD_MODEL] = w.servers[server, world.LAST_MODEL]
    w.servers[server, world.LAST_TASK] = -1
    model = w.labels[task, world.MODEL]
    w.recent[server, model] = max(0.0, w.recent[server, model] - 1.0)
    return task


@compiled
def drop(w, task):
    """Give a task up: it counts as late by the patience."""
    out = w.out[w.clock[world.SLOT]]
    w.labels[task, world.STATUS] = world.DROPPED
    out[world.OUT_DROPPED] += 1.0
    out[world.OUT_DEADLINE_MISSES] += 1.0
    out[world.OUT_LATE_S] += w.rules[world.PATIENCE_S]
    out[world.OUT_LATE_USD] += w.rules[world.PATIENCE_S] * w.rules[world.LATE_USD]


@compiled
def wait_in(w, task, region):
    """Put a task into a region's buffer: the earlier deadline first, of equals the greater work."""
    n = w.region[region, world.NUM_WAITING]
    w.labels[task, world.TARGET] = region
    if n == w.buffer.shape[1]:
        drop(w, task)
        return
    w.labels[task, world.STATUS] = world.WAITING
    queue = w.buffer[region]
    deadline, work = w.tasks[task, world.DEADLINE_S], w.tasks[task, world.WORK_S]
    i = n
    while i > 0:
        before = queue[i - 1]
        theirs = w.tasks[before, world.DEADLINE_S]
        if theirs < deadline or (theirs == deadline and w.tasks[before, world.WORK_S] >= work):
            break
        queue[i] = before
        i -= 1
    queue[i] = task
    w.region[region, world.NUM_WAITING] = n + 1


@compiled
def improve(w, region, now):
    """Local search: move the last task of a queue, not yet begun, to where it ends earliest."""
    lo, hi = w.first[region], w.first[region + 1]
    for s in range(lo, hi):
        task = w.servers[s, world.LAST_TASK]
        if (
            task < 0
            or w.servers[s, world.STATE] == world.DOWN
            or w.tasks[task, world.BEGIN_S] <= now
        ):
            continue
        best, earliest = -1, w.tasks[task, world.FINISH_S] - _MIN_GAIN_S
        for other in range(lo, hi):
            if other == s or w.servers[other, world.STATE] != world.ON:
                continue
            begin = max(w.times[other, world.FREE_S], max(now, w.tasks[task, world.AT_S]))
            if begin >= earliest:
                continue
            finish = begin + switch_s(w, task, other) + service_s(w, task, other)
            if finish < earliest:
                best, earliest = other, finish
        if best >= 0:
            take_back(w, s)
            place(w, task, best, now)


@compiled
def has_idle(w, region, now):
    """Whether a server of the region is on and free."""
    for s in range(w.first[region], w.first[region + 1]):
        if w.servers[s, world.STATE] == world.ON and w.times[s, world.FREE_S] <= now:
            return True
    return False


@compiled
def wanted_model(w, region):
    """Model that most tasks ask for per server that holds it."""
    best, highest = 0, -1.0
    for model in range(w.asked.shape[1]):
        holders = 1.0
        for s in range(w.first[region], w.first[region + 1]):
            state = w.servers[s, world.STATE]
            if (state == world.ON or state == world.WARMING) and w.servers[
                s, world.HELD_MODEL
            ] == model:
                holders += 1.0
        need = w.asked[region, model] / holders
        if need > highest:
            best, highest = model, need
    return best


@compiled
def activate(w, region, target, now):
    """Turn servers on or off towards a target, no more in a slot than the ramp allows."""
    lo, hi = w.first[region], w.first[region + 1]
    running, there = 0, 0
    for s in range(lo, hi):
        state = w.servers[s, world.STATE]
        running += state == world.ON or state == world.WARMING
        there += state != world.DOWN
    target = max(min(target, there), min(1, there))
    ramp = max(1, int(w.rules[world.RAMP] * there))
    if target >= running:
        w.region[region, world.SURPLUS] = 0
        start(w, region, min(target - running, ramp), now)
        return
    w.region[region, world.SURPLUS] += 1
    if w.region[region, world.SURPLUS] > w.rules[world.SURPLUS_SLOTS]:
        stop(w, region, min(running - target, ramp), now)


@compiled
def start(w, region, count, now):
    """Turn on `count` servers in their order, those first that still drain."""
    for s in range(w.first[region], w.first[region + 1]):
        if count > 0 and w.servers[s, world.STATE] == world.DRAINING:
            w.servers[s, world.STATE] = world.ON
            count -= 1
    for s in range(w.first[region], w.first[region + 1]):
        if count > 0 and w.servers[s, world.STATE] == world.OFF:
            w.servers[s, world.HELD_MODEL] = wanted_model(w, region)
            w.servers[s, world.STATE] = world.WARMING
            w.times[s, world.READY_S] = now + w.times[s, world.WARMUP_S]
            w.times[s, world.FREE_S] = now
            w.times[s, world.USED] = 1.0  # nobody turns off what has not shown its use
            count -= 1


@compiled
def stop(w, region, count, now):
    """Turn off `count` servers of least use, of equals the later in order; none in mid-task."""
    for _ in range(count):
        worst, least = -1, math.inf
        for s in range(w.first[region], w.first[region + 1]):
            if w.servers[s, world.STATE] == world.ON and w.times[s, world.USED] <= least:
                worst, least = s, w.times[s, world.USED]
        if worst < 0:
            return
        w.servers[worst, world.STATE] = (
            world.DRAINING if w.times[worst, world.FREE_S] > now else world.OFF
        )
        w.servers[worst, world.LAST_TASK] = -1


@compiled
def nearest_up(w, origin):
    """Closest region that is up; -1: none."""
    for j in w.near[origin]:
        if w.region[j, world.IS_DOWN] == 0:
            return j
    return -1


@compiled
def move_off(w, server, now, is_lost):
    """Take every unfinished task off a server that fails.

    Lost: it begins anew in the nearest region that is up. Else it moves within the region and goes
    on where it was after a migration.
    """
    out = w.out[w.clock[world.SLOT]]
    kind = w.servers[server, world.KIND]
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
            row[world.AT_S] += w.latency[label[world.ORIGIN], target]
        elif begun:
            row[world.WORK_S] *= 1.0 - ran / (row[world.FINISH_S] - row[world.START_S])
            row[world.AT_S] += w.kinds[kind, world.KIND_MIGRATION_S]
            out[world.OUT_SERVED_S] += ran
            out[world.OUT_MIGRATED] += 1.0
            out[world.OUT_MIGRATION_S] += w.kinds[kind, world.KIND_MIGRATION_S]
            out[world.OUT_OVERHEAD_USD] += (
                w.kinds[kind, world.KIND_MIGRATION_S] * w.kinds[kind, world.KIND_USD]
            )
        wait_in(w, task, target)


@compiled
def fail(w, region, count, is_lost, now):
    """Take down `count` servers of a region, spread over its order; if lost, the region too."""
    lo, hi = w.first[region], w.first[region + 1]
    if is_lost:
        w.region[region, world.IS_DOWN] = 1
    for k in range(count):
        s = lo + (k * (hi - lo)) // count
        if w.servers[s, world.STATE] == world.DOWN:
            continue
        w.servers[s, world.STATE] = world.DOWN
        w.servers[s, world.LAST_TASK] = -1
        move_off(w, s, now, is_lost)
        w.times[s, world.FREE_S] = now
    if is_lost:
        n = w.region[region, world.NUM_WAITING]
        w.region[region, world.NUM_WAITING] = 0
        for i in range(n):
            task = w.buffer[region, i]
            target = nearest_up(w, w.labels[task, world.ORIGIN])
            w.out[w.clock[world.SLOT], world.OUT_REROUTED] += 1.0
            if target < 0:
                drop(w, task)
            else:
                w.tasks[task, world.AT_S] = now + w.latency[w.labels[task, world.ORIGIN], target]
                wait_in(w, task, target)


@compiled
def recover(w, region):
    """Bring back all servers of a region that are down, switched off."""
    w.region[region, world.IS_DOWN] = 0
    for s in range(w.first[region], w.first[region + 1]):
        if w.servers[s, world.STATE] == world.DOWN:
            w.servers[s, world.STATE] = world.OFF
            w.servers[s, world.HELD_MODEL] = -1
