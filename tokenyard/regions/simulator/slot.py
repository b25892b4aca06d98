"""One slot: switching servers, dispatch, and the allocator inside.

Within a slot: what fails, fails; servers go on and off towards the targets; tasks arrive in order,
each is sent to a region by the slot's rule and takes a server that has room, or waits in the
region's buffer. Every `ROUND_S` servers that are warm are ready, what waits is placed by deadline,
and tasks that have not begun may move to where they end earlier.
"""

from __future__ import annotations

import math

from tokenyard.compiled import compiled
from tokenyard.regions.simulator import world
from tokenyard.regions.simulator.dispatch import arrive, by_spilling
from tokenyard.regions.simulator.servers import activate, choose, drop, improve, in_slot, place

_FORGET = 0.9
"""Share of a region's memory of models asked for that is left after a slot."""


@compiled
def place_waiting(w, region, may_spill, now):
    """Place what waits, in order, while any server has room; elsewhere where tasks may spill."""
    n, done = w.region[region, world.NUM_WAITING], 0
    while done < n:
        task = w.buffer[region, done]
        server = choose(w, task, region, now)
        if server < 0 and may_spill and w.labels[task, world.ORIGIN] == region:
            other = by_spilling(w, region, now)
            if other != region:
                at = now + w.latency[region, other]
                server = choose(w, task, other, at)
                w.tasks[task, world.AT_S] = at
                w.labels[task, world.TARGET] = other
                w.inflow[w.clock[world.SLOT], other] += 1.0
                w.inflow[w.clock[world.SLOT], region] -= 1.0
        if server < 0:
            break
        place(w, task, server, now)
        done += 1
    if done:
        for i in range(done, n):
            w.buffer[region, i - done] = w.buffer[region, i]
        w.region[region, world.NUM_WAITING] = n - done


@compiled
def look_again(w, may_spill, now):
    """What happens every round."""
    for s in range(len(w.servers)):
        if w.servers[s, world.STATE] == world.WARMING and w.times[s, world.READY_S] <= now:
            w.servers[s, world.STATE] = world.ON
    for region in range(len(w.region)):
        if w.region[region, world.NUM_WAITING] > 0:
            place_waiting(w, region, may_spill, now)
        if w.rules[world.SEARCH] > 0:
            improve(w, region, now)


@compiled
def drop_impatient(w, now):
    """Drop what has waited longer than the patience."""
    for region in range(len(w.region)):
        kept = 0
        for i in range(w.region[region, world.NUM_WAITING]):
            task = w.buffer[region, i]
            if now - w.tasks[task, world.ARRIVAL_S] > w.rules[world.PATIENCE_S]:
                drop(w, task)
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
        w.times[s, world.BUSY_S] = in_slot(w, now, w.times[s, world.FREE_S])
    for region in range(len(w.region)):
        for model in range(w.asked.shape[1]):
            w.asked[region, model] *= _FORGET
        activate(w, region, targets[region], now)


@compiled
def end_slot(w, now):
    """Meter energy and balance; servers that have drained go off."""
    slot = w.clock[world.SLOT]
    slot_s = w.rules[world.SLOT_S]
    out = w.out[slot]
    begin = now - slot_s
    count, total, squares = 0, 0.0, 0.0
    for region in range(len(w.region)):
        servers, used = 0, 0.0
        for s in range(w.first[region], w.first[region + 1]):
            state, times = w.servers[s, world.STATE], w.times[s]
            if state == world.OFF or state == world.DOWN:
                continue
            kind = w.kinds[w.servers[s, world.KIND]]
            warming = min(max(min(times[world.READY_S], now) - begin, 0.0), slot_s)
            there = slot_s
            if state == world.DRAINING:
                there = min(max(times[world.FREE_S] - begin, 0.0), slot_s)
            busy = min(times[world.BUSY_S], there - warming)
            idle = there - warming - busy
            kwh = (
                kind[world.KIND_PEAK_W] * (busy + warming) + kind[world.KIND_IDLE_W] * idle
            ) / 3.6e6
            kwh *= w.rules[world.PUE]
            out[world.OUT_ENERGY_KWH] += kwh
            out[world.OUT_ENERGY_USD] += kwh * w.prices[slot, region]
            out[world.OUT_WARMUP_S] += warming
            out[world.OUT_OVERHEAD_USD] += warming * kind[world.KIND_USD]
            times[world.USED] = 0.7 * times[world.USED] + 0.3 * busy / slot_s
            if state == world.ON and warming == 0.0:
                share = busy / slot_s
                count += 1
                total += share
                squares += share * share
                servers += 1
                used += share
            if state == world.DRAINING and times[world.FREE_S] <= now:
                w.servers[s, world.STATE] = world.OFF
                w.servers[s, world.LAST_TASK] = -1
            out[world.OUT_ACTIVE] += state == world.ON or state == world.WARMING
        w.used[slot, region] = used / servers if servers else 0.0
        out[world.OUT_WAITING] += w.region[region, world.NUM_WAITING]
    mean = total / count if count else 0.0
    spread = math.sqrt(max(0.0, squares / count - mean * mean)) if count else 0.0
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
    slot_s, round_s = w.rules[world.SLOT_S], w.rules[world.ROUND_S]
    t0 = w.clock[world.SLOT] * slot_s
    t1 = t0 + slot_s
    begin_slot(w, targets, t0)
    tick = 0
    while True:
        task = w.clock[world.NEXT_TASK]
        arrival = w.tasks[task, world.ARRIVAL_S] if task < len(w.tasks) else math.inf
        look_s = t0 + tick * round_s
        if look_s < t1 and look_s <= arrival:
            look_again(w, dispatch == world.SPILL, look_s)
            tick += 1
        elif arrival < t1:
            arrive(w, task, shares, dispatch, arrival)
            w.clock[world.NEXT_TASK] += 1
        else:
            break
    end_slot(w, t1)
    w.clock[world.SLOT] += 1


@compiled
def drain(w):
    """After the last slot: serve what waits, on servers as they are, and drop what is left."""
    w.clock[world.SLOT] -= 1
    now = (w.clock[world.SLOT] + 1) * w.rules[world.SLOT_S]
    end = now + w.rules[world.PATIENCE_S]
    while now <= end:
        look_again(w, False, now)
        waiting = 0
        for region in range(len(w.region)):
            waiting += w.region[region, world.NUM_WAITING]
        if waiting == 0:
            break
        now += w.rules[world.ROUND_S]
    for region in range(len(w.region)):
        for i in range(w.region[region, world.NUM_WAITING]):
            drop(w, w.buffer[region, i])
        w.region[region, world.NUM_WAITING] = 0
    w.clock[world.SLOT] += 1
