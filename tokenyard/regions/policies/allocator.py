"""Inside a region: which server takes a task, which moves, which is turned off, what it loads.

Compiled into the simulator, which hands them `tokenyard.regions.telemetry.Telemetry` and no more.
All policies share these rules.
"""

from __future__ import annotations

import math

from tokenyard.compiled import compiled
from tokenyard.regions import telemetry
from tokenyard.regions.telemetry import expected_service_s, expected_wait_s, switch_s

_MIN_GAIN_S = 1.0
"""A task that waits moves only for so much."""


@compiled
def choose_server(t, task, region, now):
    """Server with room of highest score (Eq 7 to 10), or the one expected to be free first.

    -1 where none has room.
    """
    rules, model = t.rules, t.labels[task, telemetry.MODEL]
    best, highest = -1, -math.inf
    for s in range(t.first[region], t.first[region + 1]):
        if t.servers[s, telemetry.STATE] != telemetry.ON:
            continue
        wait = expected_wait_s(t, s, now)
        if wait > rules[telemetry.ROOM_S]:
            continue
        if rules[telemetry.EARLIEST] > 0:
            score = -wait
        else:
            kind = t.servers[s, telemetry.KIND]
            memory = t.kinds[kind, telemetry.KIND_MEMORY]
            enough = min(1.0, memory / t.tasks[task, telemetry.MEMORY_GB])
            ahead = (wait + switch_s(t, task, s)) / rules[telemetry.TASK_S]
            fit = t.fit[t.labels[task, telemetry.TYPE], kind] * enough
            score = (
                rules[telemetry.HARDWARE] * fit
                + rules[telemetry.LOAD] * math.exp(-ahead)
                + rules[telemetry.LOCALITY] * locality(t, model, s, now)
            )
        if score > highest:
            best, highest = s, score
    return best


@compiled
def locality(t, model, server, now):
    """How much of what a server served lately is like a model, 0 to 1."""
    alike, total = 0.0, 0.0
    for other in range(t.recent.shape[1]):
        alike += t.likeness[model, other] * t.recent[server, other]
        total += t.recent[server, other]
    past = now - t.times[server, telemetry.SEEN_S]
    fade = math.exp(-t.rules[telemetry.DECAY] * past)
    # Divided by what could be alike at most, so that the three terms have one scale.
    return alike * fade / (1.0 + total * fade)


@compiled
def better_server(t, task, server, region, now):
    """Server of the region where the last task in a queue is expected to end earliest; -1: here."""
    best, earliest = -1, expected_wait_s(t, server, now) - _MIN_GAIN_S
    for other in range(t.first[region], t.first[region + 1]):
        if other == server or t.servers[other, telemetry.STATE] != telemetry.ON:
            continue
        finish = expected_wait_s(t, other, now)
        if finish >= earliest:
            continue
        finish += switch_s(t, task, other)
        finish += expected_service_s(t, task, t.servers[other, telemetry.KIND])
        if finish < earliest:
            best, earliest = other, finish
    return best


@compiled
def waits_behind(t, task, other):
    """Whether a task that begins to wait lets another one be first: the deadline decides."""
    return t.tasks[other, telemetry.DEADLINE_S] <= t.tasks[task, telemetry.DEADLINE_S]


@compiled
def wanted_model(t, region):
    """Model that most tasks ask for per server that holds it."""
    best, highest = 0, -1.0
    for model in range(t.asked.shape[1]):
        holders = 1.0
        for s in range(t.first[region], t.first[region + 1]):
            state = t.servers[s, telemetry.STATE]
            is_there = state == telemetry.ON or state == telemetry.WARMING
            if is_there and t.servers[s, telemetry.HELD_MODEL] == model:
                holders += 1.0
        need = t.asked[region, model] / holders
        if need > highest:
            best, highest = model, need
    return best


@compiled
def least_used(t, region):
    """Server that is turned off first: of least use, of equals the later in order; -1: none."""
    worst, least = -1, math.inf
    for s in range(t.first[region], t.first[region + 1]):
        used = t.times[s, telemetry.USED]
        if t.servers[s, telemetry.STATE] == telemetry.ON and used <= least:
            worst, least = s, used
    return worst
