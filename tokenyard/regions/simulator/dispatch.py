"""Where tasks go: the region by the slot's rule, then a server there or its buffer."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled
from tokenyard.regions.simulator import world
from tokenyard.regions.simulator.servers import (
    choose,
    drop,
    has_idle,
    nearest_up,
    place,
    service_s,
    switch_s,
    wait_in,
)

_MOST_CREDIT = 3.0
"""Tasks that a region can be owed, where what is free at the moment counts too."""


@compiled
def by_shares(w, origin, shares):
    """Smooth weighted round robin: the region that is owed most."""
    credit = w.credit[origin]
    best, most = 0, -math.inf
    for j in range(len(credit)):
        credit[j] += shares[origin, j]
        if credit[j] > most + 1e-12:
            best, most = j, credit[j]
    credit[best] -= 1.0
    return best


@compiled
def idle_for(w, region, model, now):
    """2 where a free server of the region holds the model, 1 where another is free, else 0."""
    found = 0
    if w.region[region, world.IS_DOWN] != 0:
        return 0
    for s in range(w.first[region], w.first[region + 1]):
        if w.servers[s, world.STATE] == world.ON and w.times[s, world.FREE_S] <= now:
            found = 1
            if w.servers[s, world.HELD_MODEL] == model or w.servers[s, world.HELD_MODEL] < 0:
                return 2
    return found


@compiled
def by_live_shares(w, origin, model, shares, now):
    """Follow the shares in the long run, and what is free at the moment.

    Of regions that are owed at most one task less than the one that is owed most, the first by debt
    with a free server that holds the model; else the nearest that has one; else the same for any
    free server; else the region that is owed most.
    """
    credit = w.credit[origin]
    most = -math.inf
    for j in range(len(credit)):
        credit[j] += shares[origin, j]
        most = max(most, credit[j])
    best, highest, quality = -1, -math.inf, 0
    for j in range(len(credit)):
        if shares[origin, j] > 0.0 and credit[j] >= most - 1.0:
            found = idle_for(w, j, model, now)
            if found > quality or (found == quality and credit[j] > highest + 1e-12):
                best, highest, quality = j, credit[j], found
    if quality < 2:
        for j in w.near[origin]:
            found = idle_for(w, j, model, now)
            if found > quality:
                best, quality = j, found
                if found == 2:
                    break
    if best < 0:
        best = origin
    # A debt that is not paid for long is forgiven: plans change.
    credit[best] = max(credit[best] - 1.0, -_MOST_CREDIT)
    for j in range(len(credit)):
        credit[j] = min(credit[j], _MOST_CREDIT)
    return best


@compiled
def cost_there(w, task, region, at, usd):
    """Least cost of a task over the servers of a region, seconds; infinite where none is on."""
    weights = w.weights
    travel = w.latency[w.labels[task, world.ORIGIN], region]
    deadline = w.tasks[task, world.DEADLINE_S] - travel
    least = math.inf
    for s in range(w.first[region], w.first[region + 1]):
        if w.servers[s, world.STATE] != world.ON:
            continue
        cost = max(w.times[s, world.FREE_S] - at, 0.0)
        if cost >= least:
            continue
        cost += switch_s(w, task, s)
        serve = service_s(w, task, s)
        late = max(0.0, at + cost + serve - deadline)
        kind = w.kinds[w.servers[s, world.KIND]]
        cost += (
            weights[world.SERVICE] * serve
            + weights[world.USE] * w.times[s, world.BUSY_S]
            + weights[world.LATE] * late
        )
        cost += usd * serve * (kind[world.KIND_PEAK_W] - kind[world.KIND_IDLE_W])
        least = min(least, cost)
    return least


@compiled
def by_live_cost(w, task, origin, shares, now):
    """Least expected cost at the moment, less what the shares owe to the region."""
    credit, weights = w.credit[origin], w.weights
    best, least = -1, math.inf
    for j in range(len(credit)):
        credit[j] = min(credit[j] + shares[origin, j], _MOST_CREDIT)
    for j in w.near[origin]:
        if w.region[j, world.IS_DOWN] != 0:
            continue
        travel = w.latency[origin, j]
        # Dollars in seconds, of a watt that draws for a second.
        usd = weights[world.USD_S] * w.prices[w.clock[world.SLOT], j] * w.rules[world.PUE] / 3.6e6
        cost = 2 * travel - weights[world.DEBT_S] * credit[j]
        cost += min(cost_there(w, task, j, now + travel, usd), w.rules[world.PATIENCE_S])
        if cost < least - 1e-9:
            best, least = j, cost
    if best < 0:
        best = origin
    credit[best] = max(credit[best] - 1.0, -_MOST_CREDIT)
    return best


@compiled
def by_spilling(w, origin, now):
    """Local first; to the nearest with a free server and no longer queue when there is none."""
    if w.region[origin, world.IS_DOWN] == 0 and has_idle(w, origin, now):
        return origin
    longest = min(10, w.region[origin, world.NUM_WAITING])
    for j in w.near[origin, 1:]:
        if w.region[j, world.IS_DOWN] == 0 and w.region[j, world.NUM_WAITING] <= longest:
            if has_idle(w, j, now):
                return j
    return origin


@compiled
def by_load(w, task, origin, now, balance):
    """Least work per server, or least spread of it and idle time (SDIB); of equals the nearest."""
    num = len(w.region)
    total, squares, total_idle, count = 0.0, 0.0, 0.0, 0
    for j in range(num):
        w.backlog[j] = math.inf
        if w.region[j, world.IS_DOWN] != 0:
            continue
        servers, work, idle, per_s = 0, 0.0, 0, 0.0
        for s in range(w.first[j], w.first[j + 1]):
            if w.servers[s, world.STATE] == world.ON:
                servers += 1
                per_s += 1.0 / w.kinds[w.servers[s, world.KIND], world.KIND_TASK_S]
                work += max(0.0, w.times[s, world.FREE_S] - now)
                idle += w.times[s, world.FREE_S] <= now
        if servers == 0:
            continue
        w.backlog[j] = work / servers + w.region[j, world.NUM_WAITING] / per_s
        total += w.backlog[j]
        squares += w.backlog[j] ** 2
        total_idle += idle / servers
        count += 1
    best, least = origin, math.inf
    for j in w.near[origin]:
        if w.backlog[j] == math.inf:
            continue
        cost = w.backlog[j]
        if balance:
            servers, idle = 0, 0
            for s in range(w.first[j], w.first[j + 1]):
                if w.servers[s, world.STATE] == world.ON:
                    servers += 1
                    idle += w.times[s, world.FREE_S] <= now
            after = w.backlog[j] + w.tasks[task, world.WORK_S] / servers
            mean = (total - w.backlog[j] + after) / count
            square = (squares - w.backlog[j] ** 2 + after**2) / count
            spread = math.sqrt(max(0.0, square - mean * mean)) / max(mean, 1e-9)
            idle_after = (total_idle - (1.0 / servers if idle else 0.0)) / count
            cost = 0.5 * spread + 0.5 * idle_after
        if cost < least - 1e-12:
            best, least = j, cost
    return best


@compiled
def choose_region(w, task, origin, shares, dispatch, now):
    """Region that a task from `origin` is sent to by the slot's rule."""
    if dispatch == world.BY_SHARES:
        return by_shares(w, origin, shares)
    if dispatch == world.LIVE_SHARES:
        return by_live_shares(w, origin, w.labels[task, world.MODEL], shares, now)
    if dispatch == world.LIVE_COST:
        return by_live_cost(w, task, origin, shares, now)
    if dispatch == world.SPILL:
        return by_spilling(w, origin, now)
    return by_load(w, task, origin, now, dispatch == world.BALANCE)


@compiled
def arrive(w, task, shares, dispatch, now):
    """Send a task to a region, and place it there or let it wait."""
    label, row = w.labels[task], w.tasks[task]
    origin = label[world.ORIGIN]
    target = choose_region(w, task, origin, shares, dispatch, now)
    out = w.out[w.clock[world.SLOT]]
    out[world.OUT_OFFERED] += 1.0
    at = now + w.latency[origin, target]
    if w.region[target, world.IS_DOWN] != 0:
        # Nobody answers there: the task comes back and goes where somebody does.
        at += w.latency[origin, target]
        target = nearest_up(w, origin)
        out[world.OUT_REROUTED] += 1.0
        if target < 0:
            drop(w, task)
            return
        at += w.latency[origin, target]
    row[world.AT_S] = at
    label[world.TARGET] = target
    w.inflow[w.clock[world.SLOT], target] += 1.0
    w.asked[target, label[world.MODEL]] += 1.0
    if w.region[target, world.NUM_WAITING] == 0:
        server = choose(w, task, target, at)
        if server >= 0:
            place(w, task, server, at)
            return
    wait_in(w, task, target)
