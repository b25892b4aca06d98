"""What no allocator can beat, and exact programmes on the Markov load: they know more than states.

`clairvoyant` knows all demand to come. Its programme leaves backlogs out, which can only make a
sequence of plans cheaper (more backlog never means fewer violations), so the programme's value is a
bound; what is reported as its cost is what its sequence costs in the simulator, backlogs included.
`free_switching` also changes plans at no cost.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.dynamics import (
    NUM_OUT,
    REWARD,
    W_ENERGY,
    W_LATENCY,
    W_LOAD,
    W_MEMORY,
    W_POWER,
    Model,
    run_slot,
)
from tokenyard.allocation.planner import HIGHEST_LEVEL, LOWEST_LEVEL, NUM_LEVELS, make_planner
from tokenyard.allocation.policies.learned import ValueTable
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.simulator import AllocationOutcomes
from tokenyard.allocation.simulator.kernel import DEMAND, free_reward
from tokenyard.allocation.simulator.run import StreamRunner
from tokenyard.compiled import compiled
from tokenyard.types import FloatArray, IntArray

NUM_BINS = 24
"""Bins of demand of the Markov load, equally often visited."""
DISCOUNT = 0.99
_NUM_DRAWS = 5
_SWEEPS = 5_000
_CLOSE_ENOUGH = 1e-9


@compiled
def _clairvoyant(
    model: Model,
    demands: FloatArray,
    allowed: IntArray,
    plans: IntArray,
    values: FloatArray,
    choices: npt.NDArray[np.int32],
    out: FloatArray,
) -> None:
    """Cheapest sequence of plans by backward induction over (slot, plan in force).

    The plan in force at the start is the first of those allowed.
    """
    size = len(allowed)
    values[:] = 0.0
    for t in range(len(demands) - 1, -1, -1):
        for i in range(size):
            best = -np.inf
            for j in range(size):
                value = run_slot(model, allowed[i], allowed[j], demands[t], 0.0, out)
                value += values[0, j]
                if value > best:
                    best = value
                    choices[t, i] = j
            values[1, i] = best
        for i in range(size):
            values[0, i] = values[1, i]
    now = 0
    for t in range(len(demands)):
        now = choices[t, now]
        plans[t] = allowed[now]


@compiled
def _free(model: Model, demands: FloatArray, best: FloatArray, out: FloatArray) -> None:
    """Highest reward of each slot if every plan were in force already."""
    for t in range(len(demands)):
        best[t] = free_reward(model, demands[t], out)


def clairvoyant_plans(runner: StreamRunner) -> tuple[IntArray, float]:
    """Return the plans of the clairvoyant programme and its value: a bound on summed rewards."""
    sim = runner.sim
    demands = sim.stream(0)[: runner.stream.num_slots, DEMAND].copy()
    allowed = np.array(_undominated(runner), np.int64)
    plans = np.zeros(len(demands), np.int64)
    values = np.zeros((2, len(allowed)))
    choices = np.zeros((len(demands), len(allowed)), np.int32)
    _clairvoyant(sim.model, demands, allowed, plans, values, choices, np.zeros(NUM_OUT))
    return plans, float(values[0, 0])


def _undominated(runner: StreamRunner) -> list[int]:
    """Plans among which an optimum is, the one in force at the start first.

    Where memory and load weigh nothing, all that less memory does is to make batches smaller; only
    the memory of the start is worth keeping, because other memory takes a restart.
    """
    sim = runner.sim
    start = sim.sufficient_plan(runner.stream)
    plans = list(range(sim.table.num_plans))
    if not sim.model.weights[[W_POWER, W_LATENCY, W_MEMORY, W_LOAD, W_ENERGY]].any():
        largest = {int(sim.shapes[plan]): plan for plan in plans}
        memory = sim.table.plans[start].memory_fraction
        like_start = [p for p in plans if sim.table.plans[p].memory_fraction == memory]
        plans = sorted({*largest.values(), *like_start})
    return [start, *(plan for plan in plans if plan != start)]


def clairvoyant(runner: StreamRunner) -> AllocationOutcomes:
    """Run the clairvoyant's plans; budget and hysteresis refuse some of them."""
    return runner.run_plans(clairvoyant_plans(runner)[0])


def free_switching(runner: StreamRunner) -> FloatArray:
    """Reward of every slot at best, were changes free, shape (slots,)."""
    demands = runner.sim.stream(0)[: runner.stream.num_slots, DEMAND].copy()
    best = np.zeros(len(demands))
    _free(runner.sim.model, demands, best, np.zeros(NUM_OUT))
    return best


def best_static_in_hindsight(runner: StreamRunner) -> AllocationOutcomes:
    """The plan that, kept for ever, earns most on this very stream."""
    slots = runner.stream.num_slots
    runs = (runner.run_plans(np.full(slots, p)) for p in range(runner.sim.table.num_plans))
    return max(runs, key=_total_reward)


def _total_reward(outcomes: AllocationOutcomes) -> float:
    return float(outcomes.column(REWARD).sum())


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


def markov_load(scenario: AllocationScenario) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Count the Markov load of the training part.

    Returns:
        Edges between bins, shape (B - 1,); costs and transitions as `value_iteration` takes them.
    """
    source, planner = demand_source(scenario), make_planner(scenario)
    draws = [source.train(seed).per_s for seed in range(_NUM_DRAWS)]
    edges = np.quantile(np.concatenate(draws), np.linspace(0, 1, NUM_BINS + 1)[1:-1])
    size = len(planner.candidates)
    costs = np.zeros((NUM_BINS, size, size))
    transition = np.zeros((NUM_BINS, NUM_BINS))
    for demand in draws:
        bins = np.searchsorted(edges, demand, side="right")
        np.add.at(transition, (bins[:-1], bins[1:]), 1.0)
        at = _levels(demand[1:] / planner.pool_per_s)
        for b in range(NUM_BINS):
            costs[b] += planner.costs[0, at[bins[:-1] == b]].sum(axis=0)
    # Where many slots have equal demand some bins hold none of it: theirs would last.
    never = np.flatnonzero(transition.sum(axis=1) == 0.0)
    lowest = np.insert(edges, 0, edges[0])
    transition[never, never] = 1.0
    costs[never] = planner.costs[0, _levels(lowest[never] / planner.pool_per_s)]
    visits = transition.sum(axis=1)
    return edges, costs / visits[:, None, None], transition / visits[:, None]


def _levels(share: FloatArray) -> IntArray:
    """Levels of `PlannerModel.costs` that demands are nearest to, as shares of the pool's best."""
    step = np.log(HIGHEST_LEVEL / LOWEST_LEVEL) / (NUM_LEVELS - 1)
    above = np.log(np.maximum(share, LOWEST_LEVEL) / LOWEST_LEVEL)
    return np.asarray(np.clip((above / step).round().astype(int), 0, NUM_LEVELS - 1))


def value_iteration_policy(scenario: AllocationScenario) -> ValueTable:
    """The optimum of the Markov load, as a policy."""
    edges, costs, transition = markov_load(scenario)
    _, best = value_iteration(costs, transition)
    return ValueTable(scenario, edges, best[None, None])
