"""Receding-horizon planning on forecasts: expected costs of slots, and the cheapest way through.

Before a slot its demand is lognormal around a forecast. `slot_costs` holds the expected cost of
every change of plan under every forecast and spread, so that a plan that would just do on average
is charged for the times when it does not. `best_next` then looks for the cheapest sequence of plans
over the horizon by dynamic programming and returns its first step. Where earlier days tell the
demand to come, it is one of several cases, and what comes after them costs what it would if demand
went on as a Markov chain (`tokenyard.allocation.markov`). Backlogs are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenyard.allocation.dynamics import NUM_OUT, Model, make_model, run_slot
from tokenyard.allocation.plans import plan_table
from tokenyard.allocation.scenario import AllocationScenario, Objective
from tokenyard.compiled import compiled
from tokenyard.types import FloatArray, IntArray

SPREADS: FloatArray = np.array([0.0, 0.08, 0.16, 0.24, 0.32, 0.48])
"""Standard deviations of the logarithm of demand for which costs are worked out."""
NUM_LEVELS = 80
LOWEST_LEVEL, HIGHEST_LEVEL = 0.01, 2.5
"""Medians of demand on the grid, over the pool's best; even in the logarithm."""
_STEP = np.log(HIGHEST_LEVEL / LOWEST_LEVEL) / (NUM_LEVELS - 1)
_QUADRATURE = 15


class PlannerModel(NamedTuple):
    """What planning needs of one scenario; S candidate plans, K spreads, L levels."""

    costs: FloatArray
    """Expected cost of a slot from the plan of the row to that of the column, minus the reward,
    shape (K, L, S, S)."""
    candidates: IntArray
    """Plans among all of the table, one per shape, shape (S,)."""
    pool_per_s: float
    edges_per_s: FloatArray
    """Upper ends of all bins of demand but the last, shape (B - 1,)."""
    ends: FloatArray
    """Cost of all that comes after the horizon by bin of the demand and plan then, shape (B, S)."""


def make_planner(scenario: AllocationScenario, objective: Objective | None = None) -> PlannerModel:
    """Work out expected costs for one plan per shape."""
    table = plan_table(scenario)
    candidates = np.array(table.best_memory, np.int64)
    model = make_model(scenario, objective)
    # Certain costs on a finer and wider grid, over which the expectation is taken.
    fine = LOWEST_LEVEL * np.exp(_STEP / 2 * np.arange(-60, 2 * NUM_LEVELS + 60))
    size = len(candidates)
    certain = np.zeros((len(fine), size, size))
    _certain_costs(
        model, candidates, fine * table.pool_goodput_capacity_per_s, certain, np.zeros(NUM_OUT)
    )
    nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE)
    weights = weights / weights.sum()
    costs = np.zeros((len(SPREADS), NUM_LEVELS, size, size))
    for k, spread in enumerate(SPREADS):
        for node, weight in zip(nodes, weights, strict=True):
            at = 60 + 2 * np.arange(NUM_LEVELS) + node * spread / (_STEP / 2)
            low = np.clip(at.astype(int), 0, len(fine) - 2)
            share = np.clip(at - low, 0.0, 1.0)[:, None, None]
            costs[k] += weight * ((1 - share) * certain[low] + share * certain[low + 1])
    return PlannerModel(
        costs, candidates, table.pool_goodput_capacity_per_s, np.zeros(0), np.zeros((1, size))
    )


def nearest_levels(planner: PlannerModel, demand_per_s: npt.ArrayLike) -> IntArray:
    """Levels of `PlannerModel.costs` that demands are nearest to, of their shape."""
    share = np.maximum(np.asarray(demand_per_s) / planner.pool_per_s, LOWEST_LEVEL)
    levels = np.rint(np.log(share / LOWEST_LEVEL) / _STEP).astype(np.int64)
    return np.asarray(np.minimum(levels, NUM_LEVELS - 1))


@compiled
def _certain_costs(
    model: Model, candidates: IntArray, demands: FloatArray, costs: FloatArray, out: FloatArray
) -> None:
    for level in range(len(demands)):
        for i in range(len(candidates)):
            for j in range(len(candidates)):
                reward = run_slot(model, candidates[i], candidates[j], demands[level], 0.0, out)
                costs[level, i, j] = -reward


COSTS = 2
"""Row of a scratch with the costs that `best_next` leaves there."""


def make_scratch(planner: PlannerModel) -> FloatArray:
    """Make room for one `best_next` at a time, shape (3 + S, S)."""
    size = len(planner.candidates)
    return np.zeros((COSTS + 1 + size, size))


@compiled
def best_next(
    planner: PlannerModel,
    forecast: FloatArray,
    spread: FloatArray,
    current: int,
    scratch: FloatArray,
) -> int:
    """Return the candidate to be in force in the next slot.

    Args:
        planner: A `PlannerModel`.
        forecast: Demand of the coming slots in Q equally likely cases, shape (H, Q).
        spread: Standard deviations of the logarithm around each, shape (H,).
        current: Candidate in force.
        scratch: Of `make_scratch`; its row `COSTS` is filled with what each candidate costs from
            the next slot on.
    """
    costs = planner.costs
    size = costs.shape[2]
    horizon, cases = forecast.shape
    values, expected = scratch[:COSTS], scratch[COSTS + 1 :]
    values[:] = 0.0
    for q in range(cases):
        reached = 0
        while reached < len(planner.edges_per_s) and (
            planner.edges_per_s[reached] <= forecast[horizon - 1, q]
        ):
            reached += 1
        for j in range(size):
            values[0, j] += planner.ends[reached, j] / cases
    best = current
    for h in range(horizon - 1, -1, -1):
        k = 0
        while k < len(SPREADS) - 2 and SPREADS[k + 1] < spread[h]:
            k += 1
        b = min(max((spread[h] - SPREADS[k]) / (SPREADS[k + 1] - SPREADS[k]), 0.0), 1.0)
        first = 0 if h > 0 else current
        last = size if h > 0 else current + 1
        expected[:] = 0.0
        for q in range(cases):
            log = np.log(max(forecast[h, q], 1e-9) / planner.pool_per_s)
            at = min(max((log - np.log(LOWEST_LEVEL)) / _STEP, 0.0), NUM_LEVELS - 1.001)
            level = int(at)
            a = at - level
            c00, c01 = costs[k, level], costs[k, level + 1]
            c10, c11 = costs[k + 1, level], costs[k + 1, level + 1]
            w00, w01, w10, w11 = (1 - a) * (1 - b), a * (1 - b), (1 - a) * b, a * b
            for i in range(first, last):
                for j in range(size):
                    cost = w00 * c00[i, j] + w01 * c01[i, j] + w10 * c10[i, j] + w11 * c11[i, j]
                    expected[i, j] += cost
        for i in range(first, last):
            least = np.inf
            for j in range(size):
                cost = expected[i, j] / cases + values[0, j]
                if h == 0:
                    scratch[COSTS, j] = cost
                if cost < least:
                    least = cost
                    best = j
            values[1, i] = least
        for i in range(size):
            values[0, i] = values[1, i]
    return best
