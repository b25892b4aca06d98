"""Which region a task is sent to, by the slot's rule and by what its origin can see.

Compiled into the simulator, which hands them `tokenyard.regions.telemetry.Telemetry` and no more.
"""

from __future__ import annotations

import math

from tokenyard.compiled import compiled
from tokenyard.regions import telemetry
from tokenyard.regions.telemetry import expected_service_s, free_at, held_at, on_at, row_of
from tokenyard.regions.types import Dispatch

BY_SHARES, LIVE_SHARES, SPILL, LEAST_LOADED, BALANCE, LIVE_COST = range(6)
DISPATCH: dict[Dispatch, int] = {
    "shares": BY_SHARES,
    "live_shares": LIVE_SHARES,
    "spill": SPILL,
    "least_loaded": LEAST_LOADED,
    "balance": BALANCE,
    "live_cost": LIVE_COST,
}
_MOST_CREDIT = 3.0
"""Tasks that a region can be owed, where what is free at the moment counts too."""
_LONGEST_QUEUE = 10.0
"""Tasks that wait in a region to which SkyLB still forwards."""


@compiled
def by_shares(t, origin, shares):
    """Smooth weighted round robin: the region that is owed most."""
    credit = t.credit[origin]
    best, most = 0, -math.inf
    for j in range(len(credit)):
        credit[j] += shares[origin, j]
        if credit[j] > most + 1e-12:
            best, most = j, credit[j]
    credit[best] -= 1.0
    return best


@compiled
def sent_since(t, origin, region):
    """Tasks that a region has sent to another one since its report; it knows its own at once."""
    return 0.0 if origin == region else t.sent[origin, region]


@compiled
def num_free(t, origin, region, now):
    """Free servers that a region expects in another one; none where it is down."""
    row = t.rows[row_of(t, origin, region, now), region]
    if row[telemetry.IS_DOWN] > 0.0:
        return 0.0
    return row[telemetry.FREE] - sent_since(t, origin, region)


@compiled
def idle_for(t, origin, region, model, now):
    """2 where a free server of the region holds the model, 1 where another is free, else 0."""
    if num_free(t, origin, region, now) <= 0.0:
        return 0
    row = t.rows[row_of(t, origin, region, now), region]
    for kind in range(len(t.kinds)):
        if row[free_at(t, kind, model)] > 0.0 or row[free_at(t, kind, -1)] > 0.0:
            return 2
    return 1


@compiled
def by_live_shares(t, origin, model, shares, now):
    """Follow the shares in the long run, and what is free by the last reports.

    Of regions that are owed at most one task less than the one that is owed most, the first by debt
    with a free server that holds the model; else the nearest that has one; else the same for any
    free server; else the region that is owed most.
    """
    credit = t.credit[origin]
    most = -math.inf
    for j in range(len(credit)):
        credit[j] += shares[origin, j]
        most = max(most, credit[j])
    best, highest, quality = -1, -math.inf, 0
    for j in range(len(credit)):
        if shares[origin, j] > 0.0 and credit[j] >= most - 1.0:
            fit = idle_for(t, origin, j, model, now)
            if fit > quality or (fit == quality and credit[j] > highest + 1e-12):
                best, highest, quality = j, credit[j], fit
    if quality < 2:
        for j in t.near[origin]:
            fit = idle_for(t, origin, j, model, now)
            if fit > quality:
                best, quality = j, fit
                if fit == 2:
                    break
    if best < 0:
        best = origin
    # A debt that is not paid for long is forgiven: plans change.
    credit[best] = max(credit[best] - 1.0, -_MOST_CREDIT)
    for j in range(len(credit)):
        credit[j] = min(credit[j], _MOST_CREDIT)
    return best


@compiled
def expected_switch_s(t, row, task, kind, any_free):
    """Least change of model on a server of a kind, or the mean one where none is free, seconds.

    Infinite where servers are free, and none of this kind.
    """
    model, models = t.labels[task, telemetry.MODEL], len(t.likeness)
    switch = t.kinds[kind, telemetry.KIND_SWITCH_S]
    if not any_free:
        return switch * (1.0 - row[held_at(t, model)] / max(row[telemetry.SERVERS_ON], 1.0))
    if row[free_at(t, kind, model)] > 0.0 or row[free_at(t, kind, -1)] > 0.0:
        return 0.0
    for other in range(models):
        if row[free_at(t, kind, other)] > 0.0:
            return switch
    return math.inf


@compiled
def cost_there(t, task, region, now):
    """Least expected cost of a task in a region, seconds; infinite where no server is on.

    Where no server is free, the task begins when as many tasks have left as are ahead of it.
    """
    weights, origin = t.weights, t.labels[task, telemetry.ORIGIN]
    row = t.rows[row_of(t, origin, region, now), region]
    if row[telemetry.SERVERS_ON] <= 0.0:
        return math.inf
    sent = sent_since(t, origin, region)
    any_free = row[telemetry.FREE] - sent > 0.0
    wait = 0.0
    if not any_free:
        ahead = row[telemetry.TASKS] + row[telemetry.WAITING] + sent
        wait = max(1.0, ahead - row[telemetry.SERVERS_ON] + 1.0) / row[telemetry.RATE]
    # Dollars in seconds, of a watt that draws for a second.
    usd = weights[telemetry.USD_S] * t.prices[t.clock[telemetry.SLOT], region]
    usd *= t.rules[telemetry.PUE] / 3.6e6
    deadline = t.tasks[task, telemetry.DEADLINE_S] - 2.0 * t.latency[origin, region]
    least = math.inf
    for kind in range(len(t.kinds)):
        if row[on_at(kind)] <= 0.0:
            continue
        cost = wait + expected_switch_s(t, row, task, kind, any_free)
        serve = expected_service_s(t, task, kind)
        late = max(0.0, now + cost + serve - deadline)
        watts = t.kinds[kind, telemetry.KIND_PEAK_W] - t.kinds[kind, telemetry.KIND_IDLE_W]
        cost += (weights[telemetry.SERVICE] + usd * watts) * serve + weights[telemetry.LATE] * late
        least = min(least, cost)
    share = (row[telemetry.BUSY] + sent) / row[telemetry.SERVERS_ON]
    return least + weights[telemetry.USE] * min(share, 1.0)


@compiled
def by_live_cost(t, task, shares, now):
    """Least expected cost by the last reports, less what the shares owe to the region."""
    origin = t.labels[task, telemetry.ORIGIN]
    credit, weights = t.credit[origin], t.weights
    best, least = -1, math.inf
    for j in range(len(credit)):
        credit[j] = min(credit[j] + shares[origin, j], _MOST_CREDIT)
    for j in t.near[origin]:
        if t.rows[row_of(t, origin, j, now), j, telemetry.IS_DOWN] > 0.0:
            continue
        cost = 2 * t.latency[origin, j] - weights[telemetry.DEBT_S] * credit[j]
        cost += min(cost_there(t, task, j, now), t.rules[telemetry.PATIENCE_S])
        if cost < least - 1e-9:
            best, least = j, cost
    if best < 0:
        best = origin
    credit[best] = max(credit[best] - 1.0, -_MOST_CREDIT)
    return best


@compiled
def by_spilling(t, origin, now):
    """Local first; to the nearest with a free server and no longer queue when there is none."""
    if num_free(t, origin, origin, now) > 0.0:
        return origin
    longest = min(_LONGEST_QUEUE, t.rows[telemetry.OWN, origin, telemetry.WAITING])
    for j in t.near[origin, 1:]:
        waiting = t.rows[row_of(t, origin, j, now), j, telemetry.WAITING]
        if waiting <= longest and num_free(t, origin, j, now) > 0.0:
            return j
    return origin


@compiled
def by_load(t, origin, now, balance):
    """Least work per server, or least spread of it and idle time (SDIB); of equals the nearest."""
    total, squares, total_idle, count = 0.0, 0.0, 0.0, 0
    for j in range(len(t.near)):
        t.backlog[j] = math.inf
        row = t.rows[row_of(t, origin, j, now), j]
        servers = row[telemetry.SERVERS_ON]
        if row[telemetry.IS_DOWN] > 0.0 or servers <= 0.0:
            continue
        waiting = row[telemetry.WAITING] + sent_since(t, origin, j)
        t.backlog[j] = row[telemetry.WORK_S] / servers + waiting / row[telemetry.RATE]
        total += t.backlog[j]
        squares += t.backlog[j] ** 2
        total_idle += row[telemetry.FREE] / servers
        count += 1
    best, least = origin, math.inf
    for j in t.near[origin]:
        if t.backlog[j] == math.inf:
            continue
        cost = t.backlog[j]
        if balance:
            row = t.rows[row_of(t, origin, j, now), j]
            after = t.backlog[j] + 1.0 / row[telemetry.RATE]
            mean = (total - t.backlog[j] + after) / count
            square = (squares - t.backlog[j] ** 2 + after**2) / count
            spread = math.sqrt(max(0.0, square - mean * mean)) / max(mean, 1e-9)
            taken = 1.0 / row[telemetry.SERVERS_ON] if row[telemetry.FREE] > 0.0 else 0.0
            cost = 0.5 * spread + 0.5 * (total_idle - taken) / count
        if cost < least - 1e-12:
            best, least = j, cost
    return best


@compiled
def choose_region(t, task, shares, dispatch, now):
    """Region that a task is sent to by the slot's rule."""
    origin = t.labels[task, telemetry.ORIGIN]
    if dispatch == BY_SHARES:
        return by_shares(t, origin, shares)
    if dispatch == LIVE_SHARES:
        return by_live_shares(t, origin, t.labels[task, telemetry.MODEL], shares, now)
    if dispatch == LIVE_COST:
        return by_live_cost(t, task, shares, now)
    if dispatch == SPILL:
        return by_spilling(t, origin, now)
    return by_load(t, origin, now, dispatch == BALANCE)
