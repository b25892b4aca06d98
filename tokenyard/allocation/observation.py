"""What a network sees before it decides: one code for training and serving.

The state of the pool, what is known of demand, and the shape of the plan in force, all squashed or
cut to [-OBSERVATION_LIMIT, OBSERVATION_LIMIT]; `envs.ParallelismEnv` lists the numbers in order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenyard.allocation import dynamics as dyn
from tokenyard.allocation.plans import PlanTable
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.compiled import compiled
from tokenyard.types import FloatArray, IntArray

HORIZONS_SHOWN = (0, 1, 2, 5, 11, 23)
"""Slots ahead whose forecasts are in the observation."""
NUM_RECENT_SHOWN = 6
NUM_KNOWN = 2 + NUM_RECENT_SHOWN + len(HORIZONS_SHOWN)
NUM_STATE_FEATURES = 13
ALLOWED = 9
"""Where an observation says whether another plan is allowed now: 1 if so, else 0."""
OBSERVATION_LIMIT = 5.0


def observation_size(table: PlanTable) -> int:
    """Numbers in an observation: state, what is known of demand, shape of the plan."""
    return NUM_STATE_FEATURES + NUM_KNOWN + int(table.shape_mask.sum())


def cost_unit(scenario: AllocationScenario, table: PlanTable) -> float:
    """What the whole pool costs for a slot, as a reward counts it; 1 where dollars do not count."""
    usd = float(table.usd_per_hour.max()) * scenario.slot_s / 3600
    return usd * scenario.reward.usd or 1.0


def shape_of(table: PlanTable) -> IntArray:
    """Number the feasible shapes (parallelism and GPUs) and return that of every plan."""
    numbers: dict[tuple[str, int], int] = {}
    return np.array(
        [numbers.setdefault((p.parallelism, p.num_gpus), len(numbers)) for p in table.plans],
        np.int64,
    )


def known_features(
    slots: IntArray, recent: FloatArray, forecasts: FloatArray, scale_per_s: float, per_day: int
) -> FloatArray:
    """What is known of demand before some slots, shape (n, NUM_KNOWN).

    Args:
        slots: Slots of the day, shape (n,).
        recent: Demand of the slots before, the latest first, shape (n, NUM_RECENT_SHOWN).
        forecasts: Medians, shape (n, NUM_HORIZONS).
        scale_per_s: What the pool's goodput capacity.
        per_day: Slots of a day.
    """
    angle = 2 * np.pi * slots / per_day
    demand = np.hstack([recent, forecasts[:, HORIZONS_SHOWN]]) / scale_per_s
    return np.column_stack([np.sin(angle), np.cos(angle), demand])


@compiled
def write_costs(costs: FloatArray, unit: float, row: npt.NDArray[np.float32]) -> None:
    """Write what the planner expects each shape to cost beyond the cheapest one into a row's end.

    Args:
        costs: Shape (S,).
        unit: Of `cost_unit`.
        row: Shape (observation_size + S,).
    """
    least = costs[0]
    for j in range(1, len(costs)):
        least = min(least, costs[j])
    for j in range(len(costs)):
        row[len(row) - len(costs) + j] = min((costs[j] - least) / unit, OBSERVATION_LIMIT)


@compiled
def write_observation(
    model: dyn.Model,
    plan: int,
    since: int,
    left: float,
    allowed: bool,
    out: FloatArray,
    known: FloatArray,
    shape: int,
    scale_per_s: float,
    row: npt.NDArray[np.float32],
) -> int:
    """Write an observation and return how many of its numbers were cut to the limit.

    Args:
        model: A `Model`.
        plan: Plan in force.
        since: Slots for which it has been.
        left: Share of the switch budget that is left; 1 where there is none.
        allowed: Whether another plan is allowed now.
        out: What happened in the last slot, shape (NUM_OUT,).
        known: From `known_features`, shape (NUM_KNOWN,).
        shape: Shape of the plan in force.
        scale_per_s: What the pool's goodput capacity.
        row: Filled, shape (observation_size,).
    """
    row[0] = out[dyn.LOAD]
    row[1] = model.plans[plan, dyn.MEMORY_SHARE]
    row[2] = out[dyn.BATCH]
    row[3] = out[dyn.MEAN_LATENCY_S] / model.constants[dyn.LATENCY_LIMIT_S]
    row[4] = out[dyn.NETWORK]
    row[5] = np.log1p(out[dyn.BACKLOG])
    row[6] = out[dyn.PAUSED_S] / model.constants[dyn.SLOT_S]
    row[7] = min(since, 72) / 72.0
    row[8] = left
    row[ALLOWED] = 1.0 if allowed else 0.0
    row[10] = model.plans[plan, dyn.GOODPUT_CAPACITY_PER_S] / scale_per_s
    row[11] = model.plans[plan, dyn.GPUS] / 8.0
    row[12] = 0.0 if out[dyn.OFFERED] <= 0.0 else out[dyn.VIOLATIONS] / out[dyn.OFFERED]
    for i in range(NUM_KNOWN):
        row[NUM_STATE_FEATURES + i] = known[i]
    saturated = 0
    for i in range(NUM_STATE_FEATURES + NUM_KNOWN):
        if row[i] > OBSERVATION_LIMIT:
            row[i] = OBSERVATION_LIMIT
            saturated += 1
    row[NUM_STATE_FEATURES + NUM_KNOWN :] = 0.0
    row[NUM_STATE_FEATURES + NUM_KNOWN + shape] = 1.0
    return saturated
