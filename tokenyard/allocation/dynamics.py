"""What a plan does with the demand of one slot: compiled, and shared by simulator and planner.

Within a slot the service is a fluid. While replicas start (`restart_s`), what `PlanTable.during`
names serves alone, or nothing does; then the new plan serves. Arrivals beyond the rate of service
queue in order; who waits `patience_s` goes away, so with deterministic patience the queue never
exceeds the arrivals of that time (Whitt 2006, "Fluid models for multiserver queues with
abandonments", section 2). Requests that arrive to a queue of more than the TTFT target violate the
SLO; of the others the plan's steady state says how many attain the SLO. Every request counts as a
violation in the slot in which it arrives.

Arrays, P plans and U points of utilisation:
- `plans`, shape (P, NUM_PLAN_COLUMNS); `curves`, shape (P, U, NUM_CURVES); `during`, shape (P, P).
- `constants`, shape (NUM_CONSTANTS,); `weights`, shape (NUM_TERMS,); `out`, shape (NUM_OUT,).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokenyard.allocation.plans import (
    ATTAINED,
    BATCH_SHARE,
    LATENCY_S,
    NETWORK_SHARE,
    POWER_W,
    UTILISATION,
    PlanTable,
    plan_table,
)
from tokenyard.allocation.scenario import AllocationScenario, Objective
from tokenyard.allocation.types import SlotMeasurements
from tokenyard.compiled import compiled
from tokenyard.types import FloatArray, IntArray

CAPACITY_PER_S, USD_PER_SLOT, MEMORY_SHARE, IDLE_W, GOODPUT_CAPACITY_PER_S, GPUS = range(6)
NUM_PLAN_COLUMNS = 6
SLOT_S, RESTART_S, PATIENCE_S, SLACK_S, LATENCY_LIMIT_S, POOL_W, OUTPUT_TOKENS = range(7)
NUM_CONSTANTS = 7
(
    OFFERED, SERVED, DROPPED, VIOLATIONS, BACKLOG, USD, ENERGY_J, MEAN_LATENCY_S, LOAD, BATCH,
    NETWORK,
    PAUSED_S, SWITCHED, REWARD,
) = range(14)  # fmt: skip
NUM_OUT = 14
"""What `run_slot` writes: requests, dollars, joules; latency of the plan's steady state; shares."""
W_USD, W_VIOLATIONS, W_ENERGY, W_GOODPUT, W_POWER, W_LATENCY, W_MEMORY, W_LOAD = range(8)
NUM_TERMS = 8
"""Weights in the order of the fields of `Objective`."""
_LAST = len(UTILISATION) - 1
_EMPTY = 1e-9


class Model(NamedTuple):
    """The arrays that compiled functions take, from one scenario."""

    plans: FloatArray
    curves: FloatArray
    during: IntArray
    constants: FloatArray
    weights: FloatArray


def make_model(scenario: AllocationScenario, objective: Objective | None = None) -> Model:
    """Put a scenario into arrays."""
    table: PlanTable = plan_table(scenario)
    plans = np.zeros((table.num_plans, NUM_PLAN_COLUMNS))
    plans[:, CAPACITY_PER_S] = table.capacity_per_s
    plans[:, USD_PER_SLOT] = table.usd_per_hour * scenario.slot_s / 3600
    plans[:, MEMORY_SHARE] = table.memory_share
    plans[:, IDLE_W] = table.idle_w
    plans[:, GOODPUT_CAPACITY_PER_S] = table.goodput_capacity_per_s
    plans[:, GPUS] = [plan.num_gpus for plan in table.plans]
    slo = scenario.slo
    constants = np.zeros(NUM_CONSTANTS)
    constants[SLOT_S], constants[RESTART_S] = scenario.slot_s, scenario.restart_s
    constants[PATIENCE_S], constants[SLACK_S] = scenario.patience_s, slo.ttft_s
    constants[LATENCY_LIMIT_S] = slo.ttft_s + scenario.generated_tokens * slo.tpot_s
    constants[POOL_W], constants[OUTPUT_TOKENS] = table.pool_w, scenario.generated_tokens
    weights = np.array((objective or scenario.reward).values)
    return Model(plans, table.curves, table.during, constants, weights)


@compiled
def curve(curves: FloatArray, plan: int, utilisation: float, column: int) -> float:
    """Return one curve of a plan at a utilisation in [0, 1], linear between the points."""
    u = min(max(utilisation, 0.0), 1.0)
    # Inverse of the spacing of UTILISATION; rounding may be off by one point.
    low = min(int((1.0 - (1.0 - u) ** (2.0 / 3.0)) * _LAST), _LAST - 1)
    share = (u - UTILISATION[low]) / (UTILISATION[low + 1] - UTILISATION[low])
    return float((1.0 - share) * curves[plan, low, column] + share * curves[plan, low + 1, column])


@compiled
def _serve(
    model: Model, plan: int, demand_per_s: float, backlog: float, duration_s: float, out: FloatArray
) -> float:
    """Let one plan (-1: none) serve for a while; add to `out`, return the backlog left."""
    if duration_s <= 0.0:
        return backlog
    constants = model.constants
    capacity = 0.0 if plan < 0 else model.plans[plan, CAPACITY_PER_S]
    arrived = demand_per_s * duration_s
    queue: float = max(backlog + arrived - capacity * duration_s, 0.0)
    patience_s = constants[PATIENCE_S]
    longest = demand_per_s * min(duration_s, patience_s)
    longest += backlog * max(0.0, 1.0 - duration_s / patience_s)
    dropped = max(queue - longest, 0.0)
    queue -= dropped
    served = backlog + arrived - dropped - queue
    out[SERVED] += served
    out[DROPPED] += dropped
    if plan < 0:
        return queue
    bearable = capacity * constants[SLACK_S]
    surplus = capacity - demand_per_s
    if surplus > 0.0:
        violation_s = min(max((backlog - bearable) / surplus, 0.0), duration_s)
    else:
        until_s = max(bearable - backlog, 0.0) / max(-surplus, _EMPTY)
        violation_s = max(duration_s - until_s, 0.0)
    on_time = demand_per_s * (duration_s - violation_s)
    attained = curve(model.curves, plan, demand_per_s / capacity, ATTAINED)
    out[VIOLATIONS] -= on_time * attained
    busy = served / (capacity * duration_s)
    out[ENERGY_J] += duration_s * curve(model.curves, plan, busy, POWER_W)
    return queue


@compiled
def run_slot(
    model: Model, old: int, new: int, demand_per_s: float, backlog: float, out: FloatArray
) -> float:
    """Run one slot and return its reward; `out` is overwritten.

    Args:
        model: A `Model`.
        old: Plan of the slot before.
        new: Plan of this slot.
        demand_per_s: Requests that arrive per second.
        backlog: Requests that wait at its start.
        out: Filled with what happened.
    """
    constants, weights = model.constants, model.weights
    slot_s = constants[SLOT_S]
    out[:] = 0.0
    offered = demand_per_s * slot_s
    out[OFFERED] = offered
    out[VIOLATIONS] = offered
    serving = model.during[old, new]
    paused_s = 0.0 if serving == new else constants[RESTART_S]
    queue = _serve(model, serving, demand_per_s, backlog, paused_s, out)
    if serving < 0:
        out[ENERGY_J] += paused_s * model.plans[new, IDLE_W]
    elif serving != new:
        # Replicas that start take power too.
        out[ENERGY_J] += paused_s * (model.plans[new, IDLE_W] - model.plans[serving, IDLE_W])
    queue = _serve(model, new, demand_per_s, queue, slot_s - paused_s, out)
    out[VIOLATIONS] = max(out[VIOLATIONS], 0.0)
    out[BACKLOG] = queue
    out[USD] = model.plans[new, USD_PER_SLOT]
    out[PAUSED_S] = paused_s if serving < 0 else 0.0
    out[SWITCHED] = 0.0 if old == new else 1.0
    utilisation = out[SERVED] / (model.plans[new, CAPACITY_PER_S] * slot_s)
    out[LOAD] = min(utilisation, 1.0)
    waiting_s = queue / model.plans[new, CAPACITY_PER_S]
    out[MEAN_LATENCY_S] = curve(model.curves, new, out[LOAD], LATENCY_S) + waiting_s
    out[BATCH] = curve(model.curves, new, out[LOAD], BATCH_SHARE)
    out[NETWORK] = curve(model.curves, new, out[LOAD], NETWORK_SHARE)
    latency = min(out[MEAN_LATENCY_S] / constants[LATENCY_LIMIT_S], 1.0)
    goodput = 1.0 if offered <= 0.0 else 1.0 - out[VIOLATIONS] / offered
    power = out[ENERGY_J] / slot_s / constants[POOL_W]
    reward: float = -weights[W_USD] * out[USD] - weights[W_VIOLATIONS] * out[VIOLATIONS]
    reward -= weights[W_ENERGY] * out[ENERGY_J] * 1e-6
    reward += weights[W_GOODPUT] * goodput + weights[W_POWER] * (1.0 - power)
    reward += weights[W_LATENCY] * (1.0 - latency)
    reward += weights[W_MEMORY] * (1.0 - model.plans[new, MEMORY_SHARE])
    reward += weights[W_LOAD] * (1.0 - out[LOAD])
    out[REWARD] = reward
    return reward


def measurements(out: FloatArray) -> SlotMeasurements:
    """What policies are told of a slot, from what `run_slot` has put out, shape (NUM_OUT,)."""
    offered = float(out[OFFERED])
    return SlotMeasurements(
        load=float(out[LOAD]),
        batch_share=float(out[BATCH]),
        latency_s=float(out[MEAN_LATENCY_S]),
        network_share=float(out[NETWORK]),
        paused_s=float(out[PAUSED_S]),
        violation_fraction=float(out[VIOLATIONS]) / offered if offered > 0 else 0.0,
    )
