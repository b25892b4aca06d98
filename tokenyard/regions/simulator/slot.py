"""One slot: switching servers, dispatch, and the allocator inside.

Within a slot: what fails, fails; servers go on and off towards the targets; tasks arrive in order,
each is sent to a region by the slot's rule and takes a server that has room, or waits in the
region's buffer. Every `ROUND_S` servers that are warm are ready, what waits is placed by deadline,
tasks that have not begun may move to where they should end earlier, and regions report. All that is
decided goes by `RegionArrays.seen`.
"""

from __future__ import annotations

import math

from tokenyard.compiled import compiled
from tokenyard.regions import telemetry
from tokenyard.regions.policies.allocator import choose_server
from tokenyard.regions.policies.dispatch import BY_SHARES, SPILL, by_spilling, choose_region
from tokenyard.regions.simulator import servers, world
from tokenyard.regions.simulator.reports import count, declare, report, settle, settle_region

_FORGET = 0.9
"""Share of a region's memory of models asked for that is left after a slot."""


@compiled
def arrive(w, task, shares, dispatch, now):
    """Send a task to a region, and place it there or let it wait."""
    declare(w, task)
    origin = w.labels[task, world.ORIGIN]
    if dispatch != BY_SHARES:
        count(w, origin, now)
    target = choose_region(w.seen, task, shares, dispatch, now)
    out = w.out[w.seen.clock[telemetry.SLOT]]
    out[world.OUT_OFFERED] += 1.0
    w.seen.sent[origin, target] += 1.0
    at = now + w.seen.latency[origin, target]
    if w.region[target, world.IS_DOWN] != 0:
        # Nobody answers there: the task comes back and goes where somebody does.
        at += w.seen.latency[origin, target]
        target = servers.nearest_up(w, origin)
        out[world.OUT_REROUTED] += 1.0
        if target < 0:
            servers.drop(w, task)
            return
        at += w.seen.latency[origin, target]
    deliver(w, task, target, at, now)


@compiled
def deliver(w, task, target, at, now):
    """Hand a task that comes at `at` to a region's allocator; it waits where no server has room."""
    w.tasks[task, world.AT_S] = at
    w.labels[task, world.TARGET] = target
    w.seen.asked[target, w.labels[task, world.MODEL]] += 1.0
    if w.region[target, world.NUM_WAITING] == 0:
        settle_region(w, target, now)
        server = choose_server(w.seen, task, target, now)
        if server >= 0:
            servers.place(w, task, server, now)
            return
    servers.wait_in(w, task, target)


@compiled
def place_waiting(w, region, may_spill, now):
    """Place what waits, in order, while any server has room; elsewhere where tasks may spill."""
    n, done = w.region[region, world.NUM_WAITING], 0
    while done < n:
        task = w.buffer[region, done]
        server = choose_server(w.seen, task, region, now)
        if server >= 0:
            servers.place(w, task, server, now)
        elif may_spill and w.labels[task, world.ORIGIN] == region:
            count(w, region, now)
            other = by_spilling(w.seen, region, now)
            if other == region or w.region[other, world.IS_DOWN] != 0:
                break
            w.seen.sent[region, other] += 1.0
            deliver(w, task, other, now + w.seen.latency[region, other], now)
        else:
            break
        done += 1
    if done:
        for i in range(done, n):
            w.buffer[region, i - done] = w.buffer[region, i]
        w.region[region, world.NUM_WAITING] = n - done


@compiled
def look_again(w, may_spill, num_before, now):
    """What happens every round, the `num_before`-th of its slot."""
    for s in range(len(w.servers)):
        is_warming = w.seen.servers[s, telemetry.STATE] == telemetry.WARMING
        if is_warming and w.times[s, world.READY_S] <= now:
            w.seen.servers[s, telemetry.STATE] = telemetry.ON
    for region in range(len(w.region)):
        count(w, region, now)
        if w.region[region, world.NUM_WAITING] > 0:
            place_waiting(w, region, may_spill, now)
        if w.seen.rules[telemetry.SEARCH] > 0:
            servers.improve(w, region, now)
    report(w, num_before, now)


@compiled
def drop_impatient(w, now):
    """Drop what has waited longer than the patience."""
    for region in range(len(w.region)):
        kept = 0
        for i in range(w.region[region, world.NUM_WAITING]):
            task = w.buffer[region, i]
            if now - w.tasks[task, world.ARRIVAL_S] > w.seen.rules[telemetry.PATIENCE_S]:
                servers.drop(w, task)
            else:
                w.buffer[region, kept] = task
                kept += 1
        w.region[region, world.NUM_WAITING] = kept


@compiled
def begin_slot(w, targets, now):
    """Forget a little, carry on what runs, and turn servers on and off."""
    while (
        w.clock[world.FIRST_OPEN] < w.clock[world.NEXT_TASK]
        and w.labels[w.clock[world.FIRST_OPEN], world.STATUS] >= world.PLACED
        and w.tasks[w.clock[world.FIRST_OPEN], world.FINISH_S] <= now
    ):
        w.clock[world.FIRST_OPEN] += 1
    drop_impatient(w, now)
    for s in range(len(w.servers)):
        # What reaches beyond a slot's end has no gaps: a server's queue is served on and on.
        w.times[s, world.BUSY_S] = servers.in_slot(w, now, w.times[s, world.FREE_S])
    for region in range(len(w.region)):
        for model in range(w.seen.asked.shape[1]):
            w.seen.asked[region, model] *= _FORGET
        servers.activate(w, region, targets[region], now)


@compiled
def end_slot(w, now):
    """Meter energy and balance; servers that have drained go off."""
    slot = w.seen.clock[telemetry.SLOT]
    slot_s = w.seen.rules[telemetry.SLOT_S]
    out = w.out[slot]
    begin = now - slot_s
    num_on, total, squares = 0, 0.0, 0.0
    for region in range(len(w.region)):
        for s in range(w.seen.first[region], w.seen.first[region + 1]):
            state, times = w.seen.servers[s, telemetry.STATE], w.times[s]
            if state == telemetry.OFF or state == telemetry.DOWN:
                continue
            kind = w.seen.kinds[w.seen.servers[s, telemetry.KIND]]
            warming = min(max(min(times[world.READY_S], now) - begin, 0.0), slot_s)
            there = slot_s
            if state == telemetry.DRAINING:
                there = min(max(times[world.FREE_S] - begin, 0.0), slot_s)
            busy = min(times[world.BUSY_S], there - warming)
            idle = there - warming - busy
            kwh = (
                kind[telemetry.KIND_PEAK_W] * (busy + warming) + kind[telemetry.KIND_IDLE_W] * idle
            ) / 3.6e6
            kwh *= w.seen.rules[telemetry.PUE]
            out[world.OUT_ENERGY_KWH] += kwh
            out[world.OUT_ENERGY_USD] += kwh * w.seen.prices[slot, region]
            out[world.OUT_WARMUP_S] += warming
            out[world.OUT_OVERHEAD_USD] += warming * kind[telemetry.KIND_USD]
            share = busy / slot_s
            used = w.seen.times[s, telemetry.USED]
            w.seen.times[s, telemetry.USED] = 0.7 * used + 0.3 * share
            if state == telemetry.ON and warming == 0.0:
                num_on += 1
                total += share
                squares += share * share
            settle(w, s, now)
            is_busy = w.seen.servers[s, telemetry.IN_FLIGHT] > 0
            if state == telemetry.DRAINING and not is_busy:
                w.seen.servers[s, telemetry.STATE] = telemetry.OFF
            out[world.OUT_ACTIVE] += state == telemetry.ON or state == telemetry.WARMING
        out[world.OUT_WAITING] += w.region[region, world.NUM_WAITING]
    mean = total / num_on if num_on else 0.0
    spread = math.sqrt(max(0.0, squares / num_on - mean * mean)) if num_on else 0.0
    out[world.OUT_BALANCE] = mean / (mean + spread) if mean > 0 else 1.0


@compiled
def run_slot(w, shares, targets, dispatch):
    """Run one slot.

    Args:
        w: The arrays; its clock advances.
        shares: Of each region's tasks by target, (R, R); used only where dispatch is `BY_SHARES`.
        targets: Servers to be on or warming, (R,).
        dispatch: How tasks are sent to regions.
    """
    slot_s, round_s = w.seen.rules[telemetry.SLOT_S], w.seen.rules[telemetry.ROUND_S]
    t0 = w.seen.clock[telemetry.SLOT] * slot_s
    t1 = t0 + slot_s
    begin_slot(w, targets, t0)
    tick = 0
    while True:
        task = w.clock[world.NEXT_TASK]
        arrival = w.tasks[task, world.ARRIVAL_S] if task < len(w.tasks) else math.inf
        look_s = t0 + tick * round_s
        if look_s < t1 and look_s <= arrival:
            look_again(w, dispatch == SPILL, tick, look_s)
            tick += 1
        elif arrival < t1:
            arrive(w, task, shares, dispatch, arrival)
            w.clock[world.NEXT_TASK] += 1
        else:
            break
    end_slot(w, t1)
    w.seen.clock[telemetry.SLOT] += 1


@compiled
def drain(w):
    """After the last slot: serve what waits, on servers as they are, and drop what is left."""
    w.seen.clock[telemetry.SLOT] -= 1
    now = (w.seen.clock[telemetry.SLOT] + 1) * w.seen.rules[telemetry.SLOT_S]
    end = now + w.seen.rules[telemetry.PATIENCE_S]
    while now <= end:
        drop_impatient(w, now)
        look_again(w, False, 0, now)
        waiting = 0
        for region in range(len(w.region)):
            waiting += w.region[region, world.NUM_WAITING]
        if waiting == 0:
            break
        now += w.seen.rules[telemetry.ROUND_S]
    for region in range(len(w.region)):
        for i in range(w.region[region, world.NUM_WAITING]):
            servers.drop(w, w.buffer[region, i])
        w.region[region, world.NUM_WAITING] = 0
    w.seen.clock[telemetry.SLOT] += 1
