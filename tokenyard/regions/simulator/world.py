"""The arrays of one copy of the regional simulator, and what stands where in them.

What policies may read is in `RegionArrays.seen`; the rest is the world's own.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenyard.regions.telemetry import Telemetry
from tokenyard.types import FloatArray, IntArray

# Columns of `RegionArrays.servers`: the first task on a server that has not finished, and the last.
HEAD, TAIL, NUM_SERVER_INTS = range(3)
# Columns of `RegionArrays.times`.
READY_S, FREE_S, BUSY_S, WARMUP_S, NUM_SERVER_FLOATS = range(5)
# Columns of `RegionArrays.tasks`: the first four as in `tokenyard.regions.demand`.
(
    ARRIVAL_S, WORK_S, MEMORY_GB, DEADLINE_S, AT_S, BEGIN_S, START_S, FINISH_S, BACK_S,
    NUM_TASK_FLOATS,
) = range(10)  # fmt: skip
# Columns of `RegionArrays.labels`: the first three as there; tasks on a server are a list.
ORIGIN, TYPE, MODEL, TARGET, SERVER, STATUS, NEXT, PREVIOUS, NUM_TASK_INTS = range(9)
TO_COME, WAITING, PLACED, DROPPED = range(4)
# Columns of `RegionArrays.region`.
NUM_WAITING, SURPLUS, IS_DOWN, NUM_REGION_INTS = range(4)
# Entries of `RegionArrays.clock`.
NEXT_TASK, FIRST_OPEN, NUM_CLOCK = range(3)
# Columns of what a slot measures.
(
    OUT_OFFERED, OUT_PLACED, OUT_DROPPED, OUT_RESPONSE_S, OUT_NETWORK_S, OUT_INFERENCE_S,
    OUT_LATE_S, OUT_DEADLINE_MISSES, OUT_SERVED_S, OUT_WARMUP_S, OUT_SWITCH_S, OUT_MIGRATION_S,
    OUT_OVERHEAD_USD, OUT_ENERGY_KWH, OUT_ENERGY_USD, OUT_LATE_USD, OUT_BALANCE, OUT_WAITING,
    OUT_RESTARTED, OUT_REROUTED, OUT_MIGRATED, OUT_LOST_S, OUT_ACTIVE, OUT_REMOTE, NUM_OUT,
) = range(25)  # fmt: skip


class RegionArrays(NamedTuple):
    """One copy of the simulator. R regions, S servers, N tasks, B buffer."""

    seen: Telemetry
    """What policies may read."""
    servers: IntArray
    """(S, NUM_SERVER_INTS)."""
    times: FloatArray
    """(S, NUM_SERVER_FLOATS)."""
    tasks: FloatArray
    """(N, NUM_TASK_FLOATS)."""
    labels: IntArray
    """(N, NUM_TASK_INTS)."""
    buffer: IntArray
    """Tasks that wait by deadline, (R, B)."""
    region: IntArray
    """(R, NUM_REGION_INTS)."""
    clock: IntArray
    out: FloatArray
    """(slots, NUM_OUT)."""
