"""Demand as a Markov chain over bins, and the exact optimum of an allocation under it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenyard.allocation.forecast import Forecaster
from tokenyard.allocation.planner import PlannerModel, make_planner, nearest_levels
from tokenyard.allocation.scenario import AllocationScenario, Objective
from tokenyard.types import FloatArray, IntArray

NUM_BINS = 24
"""Bins of demand of the Markov load, equally often visited."""
DISCOUNT = 0.99
_SWEEPS = 5_000
_CLOSE_ENOUGH = 1e-9


def value_iteration(
    costs: FloatArray, transition: FloatArray, discount: float = DISCOUNT
) -> tuple[FloatArray, IntArray]:
    """Solve a Markov load for the discounted optimum.

    Args:
        costs: Expected cost of the next slot by bin of the last demand, plan in force and next
            plan, shape (B, S, S).
        transition: Probability of the next bin, shape (B, B).
        discount: Of the next slot.

    Returns:
        Values and best next plans, both of shape (B, S).
    """
    values = np.zeros(costs.shape[:2])
    for _ in range(_SWEEPS):
        ahead = costs + discount * (transition @ values)[:, None, :]
        new = ahead.min(axis=2)
        done = float(np.abs(new - values).max()) < _CLOSE_ENOUGH
        values = new
        if done:
            break
    return values, np.asarray(ahead.argmin(axis=2))


def markov_load(
    planner: PlannerModel, draws: Sequence[FloatArray]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Count the Markov load of demand.

    Args:
        planner: Costs.
        draws: Requests per second, slot by slot.

    Returns:
        Edges between bins, shape (B - 1,); costs and transitions as `value_iteration` takes them.
    """
    edges = np.quantile(np.concatenate(draws), np.linspace(0, 1, NUM_BINS + 1)[1:-1])
    size = len(planner.candidates)
    costs = np.zeros((NUM_BINS, size, size))
    transition = np.zeros((NUM_BINS, NUM_BINS))
    for demand in draws:
        bins = np.searchsorted(edges, demand, side="right")
        np.add.at(transition, (bins[:-1], bins[1:]), 1.0)
        at = nearest_levels(planner, demand[1:])
        for b in range(NUM_BINS):
            costs[b] += planner.costs[0, at[bins[:-1] == b]].sum(axis=0)
    # Where many slots have equal demand some bins hold none of it: theirs would last.
    never = np.flatnonzero(transition.sum(axis=1) == 0.0)
    lowest = np.insert(edges, 0, edges[0])
    transition[never, never] = 1.0
    costs[never] = planner.costs[0, nearest_levels(planner, lowest[never])]
    visits = transition.sum(axis=1)
    return edges, costs / visits[:, None, None], transition / visits[:, None]


def planner_on(
    scenario: AllocationScenario, forecaster: Forecaster, objective: Objective | None = None
) -> PlannerModel:
    """Work out what planning on a forecaster needs; other arguments as for `make_planner`.

    Where plans are made on earlier days, what comes after the horizon counts as in the optimum of
    the Markov load of those days.
    """
    planner, days = make_planner(scenario, objective), forecaster.earlier_days
    if days is None:
        return planner
    edges, costs, transition = markov_load(planner, [np.exp(days.log_demand)])
    return planner._replace(edges_per_s=edges, ends=value_iteration(costs, transition)[0])
