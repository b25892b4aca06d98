"""One slot of many regions, compiled: switching servers, dispatch, and the allocator inside.

All kernels of this simulator are here. A `RegionArrays` is one copy's arrays; `run_slot` advances
it.

Within a slot: what fails, fails; servers go on and off towards the targets; tasks arrive in order,
each is sent to a region by the slot's rule and takes a server that has room, or waits in the
region's buffer. Every `ROUND_S` servers that are warm are ready, what waits is placed by deadline,
and tasks that have not begun may move to where they end earlier.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tokenyard.compiled import compiled
from tokenyard.types import FloatArray, IntArray

# Columns of `RegionArrays.servers`, and the states of a server.
REGION, KIND, STATE, HELD_MODEL, LAST_TASK, LAST_MODEL, NUM_SERVER_INTS = range(7)
OFF, WARMING, ON, DRAINING, DOWN = range(5)
# Columns of `RegionArrays.times`.
READY_S, FREE_S, LAST_FREE_S, BUSY_S, USED, SEEN_S, WARMUP_S, NUM_SERVER_FLOATS = range(8)
# Columns of `RegionArrays.kinds`.
(
    KIND_MEMORY, KIND_IDLE_W, KIND_PEAK_W, KIND_SWITCH_S, KIND_MIGRATION_S, KIND_USD, KIND_TASK_S,
    NUM_KIND,
) = range(8)  # fmt: skip
# Columns of `RegionArrays.tasks`: the first four as in `tokenyard.regions.demand`.
(
    ARRIVAL_S, WORK_S, MEMORY_GB, DEADLINE_S, AT_S, BEGIN_S, START_S, FINISH_S, BACK_S,
    NUM_TASK_FLOATS,
) = range(10)  # fmt: skip
# Columns of `RegionArrays.labels`: the first three as there.
ORIGIN, TYPE, MODEL, TARGET, SERVER, STATUS, NUM_TASK_INTS = range(7)
TO_COME, WAITING, PLACED, DROPPED = range(4)
# Columns of `RegionArrays.region`.
NUM_WAITING, SURPLUS, IS_DOWN, NUM_REGION_INTS = range(4)
# Entries of `RegionArrays.rules`.
(
    SLOT_S, ROOM_S, ROUND_S, PATIENCE_S, HARDWARE, LOAD, LOCALITY, DECAY, RAMP, SURPLUS_SLOTS,
    EARLIEST, SEARCH, PUE, LATE_USD, TASK_S, NUM_RULES,
) = range(16)  # fmt: skip
# Entries of `RegionArrays.clock`.
SLOT, NEXT_TASK, FIRST_OPEN, NUM_CLOCK = range(4)
# How a slot's tasks are sent to regions.
BY_SHARES, LIVE_SHARES, SPILL, LEAST_LOADED, BALANCE, LIVE_COST = range(6)
# Entries of `RegionArrays.weights`, see `tokenyard.regions.types.LiveCost`.
DEBT_S, SERVICE, USE, USD_S, LATE, NUM_WEIGHTS = range(6)
# Columns of what a slot measures.
(
    OUT_OFFERED, OUT_PLACED, OUT_DROPPED, OUT_RESPONSE_S, OUT_NETWORK_S, OUT_INFERENCE_S,
    OUT_LATE_S, OUT_DEADLINE_MISSES, OUT_SERVED_S, OUT_WARMUP_S, OUT_SWITCH_S, OUT_MIGRATION_S,
    OUT_OVERHEAD_USD, OUT_ENERGY_KWH, OUT_ENERGY_USD, OUT_LATE_USD, OUT_BALANCE, OUT_WAITING,
    OUT_RESTARTED, OUT_REROUTED, OUT_MIGRATED, OUT_LOST_S, OUT_ACTIVE, OUT_REMOTE, NUM_OUT,
) = range(25)  # fmt: skip

_MIN_GAIN_S = 1.0
"""A task that waits moves only for so much."""
_MOST_CREDIT = 3.0
"""Tasks that a region can be owed, where what is free at the moment counts too."""
_FORGET = 0.9
"""Share of a region's memory of models asked for that is left after a slot."""


class RegionArrays(NamedTuple):
    """One copy of the simulator. R regions, S servers, K kinds, M models, N tasks, B buffer."""

    rules: FloatArray
    weights: FloatArray
    """Of dispatch by cost, in force in this slot, (NUM_WEIGHTS,)."""
    kinds: FloatArray
    """(K, NUM_KIND)."""
    factor: FloatArray
    """Service time over work, (types, K)."""
    fit: FloatArray
    """Hw of Eq 8 but for memory, (types, K)."""
    likeness: FloatArray
    """(M, M)."""
    first: IntArray
    """(R + 1,)."""
    latency: FloatArray
    """One way, in force now, (R, R), seconds."""
    near: IntArray
    """Regions by latency from each, itself first, (R, R)."""
    servers: IntArray
    """(S, NUM_SERVER_INTS)."""
    times: FloatArray
    """(S, NUM_SERVER_FLOATS)."""
    recent: FloatArray
    """Tasks served by model, older ones less, (S, M)."""
    tasks: FloatArray
    """(N, NUM_TASK_FLOATS)."""
    labels: IntArray
    """(N, NUM_TASK_INTS)."""
    buffer: IntArray
    """Tasks that wait by deadline, (R, B)."""
    region: IntArray
    """(R, NUM_REGION_INTS)."""
    credit: FloatArray
    """What is owed to each region by the shares, (R, R)."""
    asked: FloatArray
    """Tasks that came by model, older ones less, (R, M)."""
    backlog: FloatArray
    """Scratch of dispatch rules, (R,)."""
    prices: FloatArray
    """(slots and more, R), dollars per kWh."""
    clock: IntArray
    out: FloatArray
    """(slots, NUM_OUT)."""
    inflow: FloatArray
    """Tasks that came to each region, (slots, R)."""
    used: FloatArray
    """Mean share of the time at work of servers that were on, (slots, R)."""


@compiled
def service_s(w, task, server):
    """Time that a server needs for a task, model switch not counted."""
    kind = w.servers[server, KIND]
    crowding = max(1.0, w.tasks[task, MEMORY_GB] / w.kinds[kind, KIND_MEMORY])
    return w.tasks[task, WORK_S] * w.factor[w.labels[task, TYPE], kind] * crowding


@compiled
def switch_s(w, task, server):
    """Time to change to the task's model, 0 where it is held."""
    held = w.servers[server, HELD_MODEL]
    if held == w.labels[task, MODEL] or held < 0:
        return 0.0
    return w.kinds[w.servers[server, KIND], KIND_SWITCH_S]


@compiled
def choose(w, task, region, now):
    """Server with room of highest score (Eq 7 to 10), or the one that is free first; -1: none."""
    rules = w.rules
    label = w.labels[task]
    best, highest = -1, -math.inf
    for s in range(w.first[region], w.first[region + 1]):
        if w.servers[s, STATE] != ON:
            continue
        wait = w.times[s, FREE_S] - now
        if wait > rules[ROOM_S]:
            continue
        wait = max(wait, 0.0)
        if rules[EARLIEST] > 0:
            score = -wait
        else:
            kind = w.servers[s, KIND]
            enough = min(1.0, w.kinds[kind, KIND_MEMORY] / w.tasks[task, MEMORY_GB])
            ahead = (wait + switch_s(w, task, s)) / rules[TASK_S]
            alike, total = 0.0, 0.0
            for model in range(w.recent.shape[1]):
                alike += w.likeness[label[MODEL], model] * w.recent[s, model]
                total += w.recent[s, model]
            fade = math.exp(-rules[DECAY] * (now - w.times[s, SEEN_S]))
            # Divided by what could be alike at most, so that the three terms have one scale.
            locality = alike * fade / (1.0 + total * fade)
            score = (
                rules[HARDWARE] * w.fit[label[TYPE], kind] * enough
                + rules[LOAD] * math.exp(-ahead)
                + rules[LOCALITY] * locality
            )
        if score > highest:
            best, highest = s, score
    return best


@compiled
def account(w, task, sign):
    """Add what a placed task takes and costs to this slot, or take it back."""
    out = w.out[w.clock[SLOT]]
    row, label = w.tasks[task], w.labels[task]
    back = row[BACK_S]
    finish = row[FINISH_S] + back
    late = max(0.0, finish - row[DEADLINE_S])
    switching = row[START_S] - row[BEGIN_S]
    usd = w.kinds[w.servers[label[SERVER], KIND], KIND_USD]
    out[OUT_PLACED] += sign
    out[OUT_RESPONSE_S] += sign * (finish - row[ARRIVAL_S])
    out[OUT_NETWORK_S] += sign * 2.0 * back
    out[OUT_INFERENCE_S] += sign * (row[FINISH_S] - row[START_S])
    out[OUT_LATE_S] += sign * late
    out[OUT_LATE_USD] += sign * late * w.rules[LATE_USD]
    out[OUT_DEADLINE_MISSES] += sign * (late > 0.0)
    out[OUT_SERVED_S] += sign * (row[FINISH_S] - row[START_S])
    out[OUT_SWITCH_S] += sign * switching
    out[OUT_OVERHEAD_USD] += sign * switching * usd
    out[OUT_REMOTE] += sign * (label[TARGET] != label[ORIGIN])


@compiled
def in_slot(w, begin, end):
    """Part of an interval that lies in the present slot, seconds."""
    t0 = w.clock[SLOT] * w.rules[SLOT_S]
    return max(0.0, min(end, t0 + w.rules[SLOT_S]) - max(begin, t0))


@compiled
def place(w, task, server, now):
    """Put a task at the end of a server's queue."""
    row, label, times = w.tasks[task], w.labels[task], w.times[server]
    row[BEGIN_S] = max(times[FREE_S], max(row[AT_S], now))
    row[START_S] = row[BEGIN_S] + switch_s(w, task, server)
    row[FINISH_S] = row[START_S] + service_s(w, task, server)
    row[BACK_S] = w.latency[label[ORIGIN], label[TARGET]]
    label[SERVER] = server
    label[STATUS] = PLACED
    w.servers[server, LAST_TASK] = task
    w.servers[server, LAST_MODEL] = w.servers[server, HELD_MODEL]
    w.servers[server, HELD_MODEL] = label[MODEL]
    times[LAST_FREE_S] = times[FREE_S]
    times[FREE_S] = row[FINISH_S]
    times[BUSY_S] += in_slot(w, row[BEGIN_S], row[FINISH_S])
    fade = math.exp(-w.rules[DECAY] * max(0.0, now - times[SEEN_S]))
    for model in range(w.recent.shape[1]):
        w.recent[server, model] *= fade
    w.recent[server, label[MODEL]] += 1.0
    times[SEEN_S] = max(now, times[SEEN_S])
    account(w, task, 1.0)


@compiled
def take_back(w, server):
    """Undo the last placement on a server; its task has not begun."""
    task = w.servers[server, LAST_TASK]
    row, times = w.tasks[task], w.times[server]
    account(w, task, -1.0)
    times[BUSY_S] -= in_slot(w, row[BEGIN_S], row[FINISH_S])
    times[FREE_S] = times[LAST_FREE_S]
    w.servers[server, HELD_MODEL] = w.servers[server, LAST_MODEL]
    w.servers[server, LAST_TASK] = -1
    model = w.labels[task, MODEL]
    w.recent[server, model] = max(0.0, w.recent[server, model] - 1.0)
    return task


@compiled
def drop(w, task):
    """Give a task up: it counts as late by the patience."""
    out = w.out[w.clock[SLOT]]
    w.labels[task, STATUS] = DROPPED
    out[OUT_DROPPED] += 1.0
    out[OUT_DEADLINE_MISSES] += 1.0
    out[OUT_LATE_S] += w.rules[PATIENCE_S]
    out[OUT_LATE_USD] += w.rules[PATIENCE_S] * w.rules[LATE_USD]


@compiled
def wait_in(w, task, region):
    """Put a task into a region's buffer: the earlier deadline first, of equals the greater work."""
    n = w.region[region, NUM_WAITING]
    w.labels[task, TARGET] = region
    if n == w.buffer.shape[1]:
        drop(w, task)
        return
    w.labels[task, STATUS] = WAITING
    queue = w.buffer[region]
    deadline, work = w.tasks[task, DEADLINE_S], w.tasks[task, WORK_S]
    i = n
    while i > 0:
        before = queue[i - 1]
        theirs = w.tasks[before, DEADLINE_S]
        if theirs < deadline or (theirs == deadline and w.tasks[before, WORK_S] >= work):
            break
        queue[i] = before
        i -= 1
    queue[i] = task
    w.region[region, NUM_WAITING] = n + 1


@compiled
def place_waiting(w, region, may_spill, now):
    """Place what waits, in order, while any server has room; elsewhere where tasks may spill."""
    n, done = w.region[region, NUM_WAITING], 0
    while done < n:
        task = w.buffer[region, done]
        server = choose(w, task, region, now)
        if server < 0 and may_spill and w.labels[task, ORIGIN] == region:
            other = by_spilling(w, region, now)
            if other != region:
                at = now + w.latency[region, other]
                server = choose(w, task, other, at)
                w.tasks[task, AT_S] = at
                w.labels[task, TARGET] = other
                w.inflow[w.clock[SLOT], other] += 1.0
                w.inflow[w.clock[SLOT], region] -= 1.0
        if server < 0:
            break
        place(w, task, server, now)
        done += 1
    if done:
        for i in range(done, n):
            w.buffer[region, i - done] = w.buffer[region, i]
        w.region[region, NUM_WAITING] = n - done


@compiled
def improve(w, region, now):
    """Local search: move the last task of a queue, not yet begun, to where it ends earliest."""
    lo, hi = w.first[region], w.first[region + 1]
    for s in range(lo, hi):
        task = w.servers[s, LAST_TASK]
        if task < 0 or w.servers[s, STATE] == DOWN or w.tasks[task, BEGIN_S] <= now:
            continue
        best, earliest = -1, w.tasks[task, FINISH_S] - _MIN_GAIN_S
        for other in range(lo, hi):
            if other == s or w.servers[other, STATE] != ON:
                continue
            begin = max(w.times[other, FREE_S], max(now, w.tasks[task, AT_S]))
            if begin >= earliest:
                continue
            finish = begin + switch_s(w, task, other) + service_s(w, task, other)
            if finish < earliest:
                best, earliest = other, finish
        if best >= 0:
            take_back(w, s)
            place(w, task, best, now)


@compiled
def look_again(w, may_spill, now):
    """What happens every round."""
    for s in range(len(w.servers)):
        if w.servers[s, STATE] == WARMING and w.times[s, READY_S] <= now:
            w.servers[s, STATE] = ON
    for region in range(len(w.region)):
        if w.region[region, NUM_WAITING] > 0:
            place_waiting(w, region, may_spill, now)
        if w.rules[SEARCH] > 0:
            improve(w, region, now)


@compiled
def wanted_model(w, region):
    """Model that most tasks ask for per server that holds it."""
    best, highest = 0, -1.0
    for model in range(w.asked.shape[1]):
        holders = 1.0
        for s in range(w.first[region], w.first[region + 1]):
            state = w.servers[s, STATE]
            if (state == ON or state == WARMING) and w.servers[s, HELD_MODEL] == model:
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
        state = w.servers[s, STATE]
        running += state == ON or state == WARMING
        there += state != DOWN
    target = max(min(target, there), min(1, there))
    ramp = max(1, int(w.rules[RAMP] * there))
    if target >= running:
        w.region[region, SURPLUS] = 0
        start(w, region, min(target - running, ramp), now)
        return
    w.region[region, SURPLUS] += 1
    if w.region[region, SURPLUS] > w.rules[SURPLUS_SLOTS]:
        stop(w, region, min(running - target, ramp), now)


@compiled
def start(w, region, count, now):
    """Turn on `count` servers in their order, those first that still drain."""
    for s in range(w.first[region], w.first[region + 1]):
        if count > 0 and w.servers[s, STATE] == DRAINING:
            w.servers[s, STATE] = ON
            count -= 1
    for s in range(w.first[region], w.first[region + 1]):
        if count > 0 and w.servers[s, STATE] == OFF:
            w.servers[s, HELD_MODEL] = wanted_model(w, region)
            w.servers[s, STATE] = WARMING
            w.times[s, READY_S] = now + w.times[s, WARMUP_S]
            w.times[s, FREE_S] = now
            w.times[s, USED] = 1.0  # nobody turns off what has not shown its use
            count -= 1


@compiled
def stop(w, region, count, now):
    """Turn off `count` servers of least use, of equals the later in order; none in mid-task."""
    for _ in range(count):
        worst, least = -1, math.inf
        for s in range(w.first[region], w.first[region + 1]):
            if w.servers[s, STATE] == ON and w.times[s, USED] <= least:
                worst, least = s, w.times[s, USED]
        if worst < 0:
            return
        w.servers[worst, STATE] = DRAINING if w.times[worst, FREE_S] > now else OFF
        w.servers[worst, LAST_TASK] = -1


@compiled
def nearest_up(w, origin):
    """Closest region that is up; -1: none."""
    for j in w.near[origin]:
        if w.region[j, IS_DOWN] == 0:
            return j
    return -1


@compiled
def move_off(w, server, now, is_lost):
    """Take every unfinished task off a server that fails.

    Lost: it begins anew in the nearest region that is up. Else it moves within the region and goes
    on where it was after a migration.
    """
    out = w.out[w.clock[SLOT]]
    kind = w.servers[server, KIND]
    for task in range(w.clock[FIRST_OPEN], w.clock[NEXT_TASK]):
        row, label = w.tasks[task], w.labels[task]
        if label[STATUS] != PLACED or label[SERVER] != server or row[FINISH_S] <= now:
            continue
        account(w, task, -1.0)
        begun = row[START_S] < now
        ran = max(0.0, now - row[START_S])
        target = label[TARGET]
        row[AT_S] = now
        if is_lost:
            target = nearest_up(w, label[ORIGIN])
            out[OUT_LOST_S] += ran
            out[OUT_RESTARTED if begun else OUT_REROUTED] += 1.0
            if target < 0:
                drop(w, task)
                continue
            row[AT_S] += w.latency[label[ORIGIN], target]
        elif begun:
            row[WORK_S] *= 1.0 - ran / (row[FINISH_S] - row[START_S])
            row[AT_S] += w.kinds[kind, KIND_MIGRATION_S]
            out[OUT_SERVED_S] += ran
            out[OUT_MIGRATED] += 1.0
            out[OUT_MIGRATION_S] += w.kinds[kind, KIND_MIGRATION_S]
            out[OUT_OVERHEAD_USD] += w.kinds[kind, KIND_MIGRATION_S] * w.kinds[kind, KIND_USD]
        wait_in(w, task, target)


@compiled
def fail(w, region, count, is_lost, now):
    """Take down `count` servers of a region, spread over its order; if lost, the region too."""
    lo, hi = w.first[region], w.first[region + 1]
    if is_lost:
        w.region[region, IS_DOWN] = 1
    for k in range(count):
        s = lo + (k * (hi - lo)) // count
        if w.servers[s, STATE] == DOWN:
            continue
        w.servers[s, STATE] = DOWN
        w.servers[s, LAST_TASK] = -1
        move_off(w, s, now, is_lost)
        w.times[s, FREE_S] = now
    if is_lost:
        n = w.region[region, NUM_WAITING]
        w.region[region, NUM_WAITING] = 0
        for i in range(n):
            task = w.buffer[region, i]
            target = nearest_up(w, w.labels[task, ORIGIN])
            w.out[w.clock[SLOT], OUT_REROUTED] += 1.0
            if target < 0:
                drop(w, task)
            else:
                w.tasks[task, AT_S] = now + w.latency[w.labels[task, ORIGIN], target]
                wait_in(w, task, target)


@compiled
def recover(w, region):
    """Bring back all servers of a region that are down, switched off."""
    w.region[region, IS_DOWN] = 0
    for s in range(w.first[region], w.first[region + 1]):
        if w.servers[s, STATE] == DOWN:
            w.servers[s, STATE] = OFF
            w.servers[s, HELD_MODEL] = -1


@compiled
def has_idle(w, region, now):
    """Whether a server of the region is on and free."""
    for s in range(w.first[region], w.first[region + 1]):
        if w.servers[s, STATE] == ON and w.times[s, FREE_S] <= now:
            return True
    return False


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
    if w.region[region, IS_DOWN] != 0:
        return 0
    for s in range(w.first[region], w.first[region + 1]):
        if w.servers[s, STATE] == ON and w.times[s, FREE_S] <= now:
            found = 1
            if w.servers[s, HELD_MODEL] == model or w.servers[s, HELD_MODEL] < 0:
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
    weights, deadline = (
        w.weights,
        w.tasks[task, DEADLINE_S] - w.latency[w.labels[task, ORIGIN], region],
    )
    least = math.inf
    for s in range(w.first[region], w.first[region + 1]):
        if w.servers[s, STATE] != ON:
            continue
        cost = max(w.times[s, FREE_S] - at, 0.0)
        if cost >= least:
            continue
        cost += switch_s(w, task, s)
        serve = service_s(w, task, s)
        late = max(0.0, at + cost + serve - deadline)
        kind = w.kinds[w.servers[s, KIND]]
        cost += weights[SERVICE] * serve + weights[USE] * w.times[s, BUSY_S] + weights[LATE] * late
        cost += usd * serve * (kind[KIND_PEAK_W] - kind[KIND_IDLE_W])
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
        if w.region[j, IS_DOWN] != 0:
            continue
        travel = w.latency[origin, j]
        # Dollars in seconds, of a watt that draws for a second.
        usd = weights[USD_S] * w.prices[w.clock[SLOT], j] * w.rules[PUE] / 3.6e6
        cost = 2 * travel - weights[DEBT_S] * credit[j]
        cost += min(cost_there(w, task, j, now + travel, usd), w.rules[PATIENCE_S])
        if cost < least - 1e-9:
            best, least = j, cost
    if best < 0:
        best = origin
    credit[best] = max(credit[best] - 1.0, -_MOST_CREDIT)
    return best


@compiled
def by_spilling(w, origin, now):
    """Local first; to the nearest with a free server and no longer queue when there is none."""
    if w.region[origin, IS_DOWN] == 0 and has_idle(w, origin, now):
        return origin
    longest = min(10, w.region[origin, NUM_WAITING])
    for j in w.near[origin, 1:]:
        if w.region[j, IS_DOWN] == 0 and w.region[j, NUM_WAITING] <= longest:
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
        if w.region[j, IS_DOWN] != 0:
            continue
        servers, work, idle, per_s = 0, 0.0, 0, 0.0
        for s in range(w.first[j], w.first[j + 1]):
            if w.servers[s, STATE] == ON:
                servers += 1
                per_s += 1.0 / w.kinds[w.servers[s, KIND], KIND_TASK_S]
                work += max(0.0, w.times[s, FREE_S] - now)
                idle += w.times[s, FREE_S] <= now
        if servers == 0:
            continue
        w.backlog[j] = work / servers + w.region[j, NUM_WAITING] / per_s
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
                if w.servers[s, STATE] == ON:
                    servers += 1
                    idle += w.times[s, FREE_S] <= now
            after = w.backlog[j] + w.tasks[task, WORK_S] / servers
            mean = (total - w.backlog[j] + after) / count
            square = (squares - w.backlog[j] ** 2 + after**2) / count
            spread = math.sqrt(max(0.0, square - mean * mean)) / max(mean, 1e-9)
            idle_after = (total_idle - (1.0 / servers if idle else 0.0)) / count
            cost = 0.5 * spread + 0.5 * idle_after
        if cost < least - 1e-12:
            best, least = j, cost
    return best


@compiled
def arrive(w, task, shares, dispatch, now):
    """Send a task to a region, and place it there or let it wait."""
    label, row = w.labels[task], w.tasks[task]
    origin = label[ORIGIN]
    if dispatch == BY_SHARES:
        target = by_shares(w, origin, shares)
    elif dispatch == LIVE_SHARES:
        target = by_live_shares(w, origin, label[MODEL], shares, now)
    elif dispatch == LIVE_COST:
        target = by_live_cost(w, task, origin, shares, now)
    elif dispatch == SPILL:
        target = by_spilling(w, origin, now)
    else:
        target = by_load(w, task, origin, now, dispatch == BALANCE)
    out = w.out[w.clock[SLOT]]
    out[OUT_OFFERED] += 1.0
    at = now + w.latency[origin, target]
    if w.region[target, IS_DOWN] != 0:
        # Nobody answers there: the task comes back and goes where somebody does.
        at += w.latency[origin, target]
        target = nearest_up(w, origin)
        out[OUT_REROUTED] += 1.0
        if target < 0:
            drop(w, task)
            return
        at += w.latency[origin, target]
    row[AT_S] = at
    label[TARGET] = target
    w.inflow[w.clock[SLOT], target] += 1.0
    w.asked[target, label[MODEL]] += 1.0
    if w.region[target, NUM_WAITING] == 0:
        server = choose(w, task, target, at)
        if server >= 0:
            place(w, task, server, at)
            return
    wait_in(w, task, target)


@compiled
def abandon(w, now):
    """Drop what has waited longer than the patience."""
    for region in range(len(w.region)):
        kept = 0
        for i in range(w.region[region, NUM_WAITING]):
            task = w.buffer[region, i]
            if now - w.tasks[task, ARRIVAL_S] > w.rules[PATIENCE_S]:
                drop(w, task)
            else:
                w.buffer[region, kept] = task
                kept += 1
        w.region[region, NUM_WAITING] = kept


@compiled
def begin_slot(w, targets, now):
    """Forget a little, carry on what runs, and turn servers on and off."""
    while (
        w.clock[FIRST_OPEN] < w.clock[NEXT_TASK]
        and w.labels[w.clock[FIRST_OPEN], STATUS] >= PLACED
        and w.tasks[w.clock[FIRST_OPEN], FINISH_S] <= now
    ):
        w.clock[FIRST_OPEN] += 1
    abandon(w, now)
    for s in range(len(w.servers)):
        # What reaches beyond a slot's end has no gaps: a server's queue is served on and on.
        w.times[s, BUSY_S] = in_slot(w, now, w.times[s, FREE_S])
    for region in range(len(w.region)):
        for model in range(w.asked.shape[1]):
            w.asked[region, model] *= _FORGET
        activate(w, region, targets[region], now)


@compiled
def end_slot(w, now):
    """Meter energy and balance; servers that have drained go off."""
    slot = w.clock[SLOT]
    slot_s = w.rules[SLOT_S]
    out = w.out[slot]
    begin = now - slot_s
    count, total, squares = 0, 0.0, 0.0
    for region in range(len(w.region)):
        servers, used = 0, 0.0
        for s in range(w.first[region], w.first[region + 1]):
            state, times = w.servers[s, STATE], w.times[s]
            if state == OFF or state == DOWN:
                continue
            kind = w.kinds[w.servers[s, KIND]]
            warming = min(max(min(times[READY_S], now) - begin, 0.0), slot_s)
            there = slot_s
            if state == DRAINING:
                there = min(max(times[FREE_S] - begin, 0.0), slot_s)
            busy = min(times[BUSY_S], there - warming)
            idle = there - warming - busy
            kwh = (kind[KIND_PEAK_W] * (busy + warming) + kind[KIND_IDLE_W] * idle) / 3.6e6
            kwh *= w.rules[PUE]
            out[OUT_ENERGY_KWH] += kwh
            out[OUT_ENERGY_USD] += kwh * w.prices[slot, region]
            out[OUT_WARMUP_S] += warming
            out[OUT_OVERHEAD_USD] += warming * kind[KIND_USD]
            times[USED] = 0.7 * times[USED] + 0.3 * busy / slot_s
            if state == ON and warming == 0.0:
                share = busy / slot_s
                count += 1
                total += share
                squares += share * share
                servers += 1
                used += share
            if state == DRAINING and times[FREE_S] <= now:
                w.servers[s, STATE] = OFF
                w.servers[s, LAST_TASK] = -1
            out[OUT_ACTIVE] += state == ON or state == WARMING
        w.used[slot, region] = used / servers if servers else 0.0
        out[OUT_WAITING] += w.region[region, NUM_WAITING]
    mean = total / count if count else 0.0
    spread = math.sqrt(max(0.0, squares / count - mean * mean)) if count else 0.0
    out[OUT_BALANCE] = mean / (mean + spread) if mean > 0 else 1.0


@compiled
def run_slot(w, shares, targets, dispatch):
    """Run one slot.

    Args:
        w: The world; its clock advances.
        shares: Of each region's tasks by target, (R, R); used only where dispatch is `BY_SHARES`.
        targets: Servers to be on or warming, (R,).
        dispatch: How tasks are sent to regions.
    """
    slot_s, round_s = w.rules[SLOT_S], w.rules[ROUND_S]
    t0 = w.clock[SLOT] * slot_s
    t1 = t0 + slot_s
    begin_slot(w, targets, t0)
    tick = 0
    while True:
        task = w.clock[NEXT_TASK]
        arrival = w.tasks[task, ARRIVAL_S] if task < len(w.tasks) else math.inf
        look_s = t0 + tick * round_s
        if look_s < t1 and look_s <= arrival:
            look_again(w, dispatch == SPILL, look_s)
            tick += 1
        elif arrival < t1:
            arrive(w, task, shares, dispatch, arrival)
            w.clock[NEXT_TASK] += 1
        else:
            break
    end_slot(w, t1)
    w.clock[SLOT] += 1


@compiled
def drain(w):
    """After the last slot: serve what waits, on servers as they are, and drop what is left."""
    w.clock[SLOT] -= 1
    now = (w.clock[SLOT] + 1) * w.rules[SLOT_S]
    end = now + w.rules[PATIENCE_S]
    while now <= end:
        look_again(w, False, now)
        waiting = 0
        for region in range(len(w.region)):
            waiting += w.region[region, NUM_WAITING]
        if waiting == 0:
            break
        now += w.rules[ROUND_S]
    for region in range(len(w.region)):
        for i in range(w.region[region, NUM_WAITING]):
            drop(w, w.buffer[region, i])
        w.region[region, NUM_WAITING] = 0
    w.clock[SLOT] += 1
