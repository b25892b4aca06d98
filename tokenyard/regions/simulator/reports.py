"""What the world shows: the only code that writes `Telemetry` from what is true.

A completion is told to the server's own region when it has happened, and to others by the next
report.
"""

from __future__ import annotations

from tokenyard.compiled import compiled
from tokenyard.regions import telemetry
from tokenyard.regions.simulator import world
from tokenyard.regions.telemetry import expected_wait_s, free_at, held_at, on_at


@compiled
def declare(w, task):
    """Show what is declared of a task that comes."""
    row, label = w.seen.tasks[task], w.seen.labels[task]
    row[telemetry.COME_S] = w.tasks[task, world.ARRIVAL_S]
    row[telemetry.MEMORY_GB] = w.tasks[task, world.MEMORY_GB]
    row[telemetry.DEADLINE_S] = w.tasks[task, world.DEADLINE_S]
    row[telemetry.LEFT] = 1.0
    label[telemetry.ORIGIN] = w.labels[task, world.ORIGIN]
    label[telemetry.TYPE] = w.labels[task, world.TYPE]
    label[telemetry.MODEL] = w.labels[task, world.MODEL]


@compiled
def begin_head(w, server):
    """Show when the first task on a server began, and how long it is expected to take."""
    head, times = w.servers[server, world.HEAD], w.seen.times[server]
    times[telemetry.SINCE_S] = w.tasks[head, world.BEGIN_S]
    times[telemetry.HEAD_S] = w.seen.tasks[head, telemetry.EXPECTED_S]


@compiled
def forget(w, server):
    """Show that nothing is left on a server."""
    w.servers[server, world.HEAD] = -1
    w.servers[server, world.TAIL] = -1
    w.seen.servers[server, telemetry.IN_FLIGHT] = 0
    w.seen.times[server, telemetry.QUEUED_S] = 0.0


@compiled
def settle(w, server, now):
    """Show what has finished on a server by now."""
    head = w.servers[server, world.HEAD]
    if head < 0 or w.tasks[head, world.FINISH_S] > now:
        return
    while head >= 0 and w.tasks[head, world.FINISH_S] <= now:
        expected = w.seen.tasks[head, telemetry.EXPECTED_S]
        w.seen.times[server, telemetry.QUEUED_S] -= expected
        w.seen.servers[server, telemetry.IN_FLIGHT] -= 1
        head = w.labels[head, world.NEXT]
    if head < 0:
        forget(w, server)
        return
    w.servers[server, world.HEAD] = head
    w.labels[head, world.PREVIOUS] = -1
    begin_head(w, server)


@compiled
def settle_region(w, region, now):
    """Show what has finished in a region by now."""
    for s in range(w.seen.first[region], w.seen.first[region + 1]):
        settle(w, s, now)


@compiled
def count(w, region, now):
    """Bring up to date what a region knows of itself."""
    t = w.seen
    settle_region(w, region, now)
    row = t.rows[telemetry.OWN, region]
    row[:] = 0.0
    row[telemetry.IS_DOWN] = w.region[region, world.IS_DOWN]
    row[telemetry.WAITING] = w.region[region, world.NUM_WAITING]
    for s in range(t.first[region], t.first[region + 1]):
        if t.servers[s, telemetry.STATE] != telemetry.ON:
            continue
        kind, model = t.servers[s, telemetry.KIND], t.servers[s, telemetry.HELD_MODEL]
        row[telemetry.SERVERS_ON] += 1.0
        row[telemetry.RATE] += 1.0 / t.kinds[kind, telemetry.KIND_TASK_S]
        row[on_at(kind)] += 1.0
        if model >= 0:
            row[held_at(t, model)] += 1.0
        tasks = t.servers[s, telemetry.IN_FLIGHT]
        if tasks == 0:
            row[telemetry.FREE] += 1.0
            row[free_at(t, kind, model)] += 1.0
            continue
        row[telemetry.BUSY] += 1.0
        row[telemetry.TASKS] += tasks
        row[telemetry.WORK_S] += expected_wait_s(t, s, now)


@compiled
def report(w, num_before, now):
    """Let every region report to the others; the last report stays until this one has arrived.

    Args:
        w: The arrays.
        num_before: Reports of this slot before this one, for the mean use of the slot.
        now: Seconds since the start.
    """
    t = w.seen
    newest = telemetry.FIRST + telemetry.SECOND - t.clock[telemetry.NEWEST]
    slot = min(t.clock[telemetry.SLOT], len(t.used) - 1)
    for region in range(len(w.region)):
        count(w, region, now)
        row, reported = t.rows[telemetry.OWN, region], t.rows[newest, region]
        share = row[telemetry.BUSY] / max(row[telemetry.SERVERS_ON], 1.0)
        t.used[slot, region] += (share - t.used[slot, region]) / (num_before + 1)
        for column in range(len(row)):
            reported[column] = row[column]
    t.reported_s[newest] = now
    t.clock[telemetry.NEWEST] = newest
    t.sent[:] = 0.0
