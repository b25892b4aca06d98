"""What an operator can see while tasks come: all that dispatch and allocators may read.

The simulator fills it and policies take it; nothing else of the simulator reaches them. In it are:

- Of a task, from the moment it comes: origin, type, model, memory and deadline, as they are
  declared. How much work it is shows when it has finished, and no sooner.
- Of a server, to its own region: its state, the model it will hold, how many tasks it was given
  that have not finished, and when the first of these began. When they will finish is expected from
  the profile of the server's kind, never known.
- Of a region, to the others: its last report. It is made every `ROUND_S`, takes the latency to
  arrive, and holds counts. A region knows its own counts at once, and what it has sent since.
- The profile of every kind of server, latencies that were measured, the tariff of electricity.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenyard.compiled import compiled
from tokenyard.types import FloatArray, IntArray

# Columns of `Telemetry.tasks` and of `Telemetry.labels`.
COME_S, MEMORY_GB, DEADLINE_S, LEFT, EXPECTED_S, NUM_TASK_FLOATS = range(6)
ORIGIN, TYPE, MODEL, NUM_LABELS = range(4)
# Columns of `Telemetry.servers`, and the states of a server.
KIND, STATE, HELD_MODEL, IN_FLIGHT, NUM_SERVER_INTS = range(5)
OFF, WARMING, ON, DRAINING, DOWN = range(5)
# Columns of `Telemetry.times`.
SINCE_S, HEAD_S, QUEUED_S, SEEN_S, USED, NUM_SERVER_FLOATS = range(6)
# Columns of `Telemetry.rows`, which hold for a region; `on_at`, `held_at`, `free_at` follow them.
SERVERS_ON, RATE, BUSY, FREE, WAITING, TASKS, WORK_S, IS_DOWN, NUM_COUNTS = range(9)
# First index of `Telemetry.rows`: what a region knows of itself, and two reports in turn.
OWN, FIRST, SECOND, NUM_ROWS = range(4)
# Columns of `Telemetry.kinds`.
(
    KIND_MEMORY, KIND_IDLE_W, KIND_PEAK_W, KIND_SWITCH_S, KIND_MIGRATION_S, KIND_USD, KIND_TASK_S,
    NUM_KIND,
) = range(8)  # fmt: skip
# Entries of `Telemetry.rules`.
(
    SLOT_S, ROOM_S, ROUND_S, PATIENCE_S, HARDWARE, LOAD, LOCALITY, DECAY, RAMP, SURPLUS_SLOTS,
    EARLIEST, SEARCH, PUE, LATE_USD, TASK_S, NUM_RULES,
) = range(16)  # fmt: skip
# Entries of `Telemetry.weights`, see `tokenyard.regions.types.LiveCost`.
DEBT_S, SERVICE, USE, USD_S, LATE, NUM_WEIGHTS = range(6)
# Entries of `Telemetry.clock`.
SLOT, NEWEST, NUM_CLOCK = range(3)
LEAST_LEFT = 0.1
"""Share of a task's expected time that is expected to be left of one that takes longer."""


class Telemetry(NamedTuple):
    """R regions, S servers, K kinds, M models, N tasks."""

    rules: FloatArray
    """Configuration, (NUM_RULES,)."""
    weights: FloatArray
    """Of dispatch by cost, in force in this slot, (NUM_WEIGHTS,)."""
    kinds: FloatArray
    """Profiles, (K, NUM_KIND)."""
    factor: FloatArray
    """Service time over work, (types, K)."""
    fit: FloatArray
    """Hw of Eq 8 but for memory, (types, K)."""
    likeness: FloatArray
    """(M, M)."""
    first: IntArray
    """First server of every region, (R + 1,)."""
    latency: FloatArray
    """One way, as measured, (R, R), seconds."""
    near: IntArray
    """Regions by latency from each, itself first, (R, R)."""
    prices: FloatArray
    """The tariff, (slots and more, R), dollars per kWh."""
    tasks: FloatArray
    """What is declared of tasks that have come, (N, NUM_TASK_FLOATS); 0 of the others. `LEFT` is
    the share of the work that is left of a task that moved, `EXPECTED_S` the time it is expected to
    take on the server that it was given to, change of model included."""
    labels: IntArray
    """The same, (N, NUM_LABELS)."""
    servers: IntArray
    """(S, NUM_SERVER_INTS)."""
    times: FloatArray
    """(S, NUM_SERVER_FLOATS): when the first task that has not finished began, how long it and all
    of them are expected to take, when the server last took one, share of the time it was at work
    by slot, older ones less."""
    recent: FloatArray
    """Tasks given to a server by model, older ones less, (S, M)."""
    asked: FloatArray
    """Tasks that came to a region by model, older ones less, (R, M)."""
    rows: FloatArray
    """Counts of regions, (NUM_ROWS, R, columns): servers on and the tasks they serve in a second,
    servers at work and not, tasks that wait, tasks on servers, the time these are expected to take,
    whether the region is down; then servers on by kind, by model, and free ones by both."""
    reported_s: FloatArray
    """When the reports were made, (NUM_ROWS,)."""
    sent: FloatArray
    """Tasks that a region has sent to another one since the reports, (R, R)."""
    used: FloatArray
    """Mean share of a region's servers on that were at work in a slot's reports, (slots, R)."""
    credit: FloatArray
    """What is owed to each region by the shares, (R, R)."""
    backlog: FloatArray
    """Scratch of dispatch rules, (R,)."""
    clock: IntArray
    """The slot, and which report is the newest."""


@compiled
def on_at(kind):
    """Column of the servers of a kind that are on."""
    return NUM_COUNTS + kind


@compiled
def held_at(t, model):
    """Column of the servers on that hold a model when they have served what they were given."""
    return NUM_COUNTS + len(t.kinds) + model


@compiled
def free_at(t, kind, model):
    """Column of the free servers of a kind with a model; -1 is none."""
    models = len(t.likeness)
    return NUM_COUNTS + len(t.kinds) + models + kind * (models + 1) + model + 1


def num_columns(num_kinds: int, num_models: int) -> int:
    """Columns of `Telemetry.rows`."""
    return NUM_COUNTS + num_kinds + num_models + num_kinds * (num_models + 1)


@compiled
def row_of(t, origin, region, now):
    """First index of the row of `Telemetry.rows` by which a region knows another one now."""
    if origin == region:
        return OWN
    newest = t.clock[NEWEST]
    if now - t.reported_s[newest] >= t.latency[region, origin]:
        return newest
    return FIRST + SECOND - newest


@compiled
def expected_service_s(t, task, kind):
    """Time that a server of a kind is expected to need for a task, model switch not counted."""
    crowding = max(1.0, t.tasks[task, MEMORY_GB] / t.kinds[kind, KIND_MEMORY])
    work = t.rules[TASK_S] * t.tasks[task, LEFT]
    return work * t.factor[t.labels[task, TYPE], kind] * crowding


@compiled
def switch_s(t, task, server):
    """Time to change to the task's model, 0 where it is held."""
    held = t.servers[server, HELD_MODEL]
    if held == t.labels[task, MODEL] or held < 0:
        return 0.0
    return t.kinds[t.servers[server, KIND], KIND_SWITCH_S]


@compiled
def expected_wait_s(t, server, now):
    """Expected time until a server has served all that it was given; 0 where nothing is left."""
    if t.servers[server, IN_FLIGHT] == 0:
        return 0.0
    times = t.times[server]
    head = times[HEAD_S]
    left = max(head - max(0.0, now - times[SINCE_S]), LEAST_LEFT * head)
    return left + times[QUEUED_S] - head
