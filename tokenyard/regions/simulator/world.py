"""The arrays of one copy of the regional simulator, and what stands where in them."""

from __future__ import annotations

from typing import NamedTuple

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
