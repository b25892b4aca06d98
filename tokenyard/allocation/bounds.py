"""What no allocator can beat, and exact programmes on the Markov load: they know more than states.

`clairvoyant` knows all demand to come. Its programme leaves backlogs out, which can only make a
sequence of plans cheaper (more backlog never means fewer violations), so the programme's value is a
bound; what is reported as its cost is what its sequence costs in the simulator, backlogs included.
`free_switching` also changes plans at no cost.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenyard.allocation import dynamics as dyn
from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.markov import markov_load, value_iteration
from tokenyard.allocation.planner import make_planner
from tokenyard.allocation.policies.learned import ValueTable
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.simulator import AllocationOutcomes
from tokenyard.allocation.simulator.kernel import DEMAND, free_reward
from tokenyard.allocation.simulator.run import StreamRunner
from tokenyard.compiled import compiled
from tokenyard.types import FloatArray, IntArray

_NUM_DRAWS = 5


@compiled
def _clairvoyant(
    model: dyn.Model,
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
                value = dyn.run_slot(model, allowed[i], allowed[j], demands[t], 0.0, out)
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
def _free(model: dyn.Model, demands: FloatArray, best: FloatArray, out: FloatArray) -> None:
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
    _clairvoyant(sim.model, demands, allowed, plans, values, choices, np.zeros(dyn.NUM_OUT))
    return plans, float(values[0, 0])


def _undominated(runner: StreamRunner) -> list[int]:
    """Plans among which an optimum is, the one in force at the start first.

    Where memory and load weigh nothing, all that less memory does is to make batches smaller; only
    the memory of the start is worth keeping, because other memory takes a restart.
    """
    sim = runner.sim
    start = sim.sufficient_plan(runner.stream)
    plans = list(range(sim.table.num_plans))
    if not sim.model.weights[
        [dyn.W_POWER, dyn.W_LATENCY, dyn.W_MEMORY, dyn.W_LOAD, dyn.W_ENERGY]
    ].any():
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
    _free(runner.sim.model, demands, best, np.zeros(dyn.NUM_OUT))
    return best


def best_static_in_hindsight(runner: StreamRunner) -> AllocationOutcomes:
    """The plan that, kept for ever, earns most on this very stream."""
    slots = runner.stream.num_slots
    runs = (runner.run_plans(np.full(slots, p)) for p in range(runner.sim.table.num_plans))
    return max(runs, key=lambda outcomes: float(outcomes.column(dyn.REWARD).sum()))


def value_iteration_policy(scenario: AllocationScenario) -> ValueTable:
    """The optimum of the Markov load, as a policy."""
    source = demand_source(scenario)
    draws = [source.train(seed).per_s for seed in range(_NUM_DRAWS)]
    edges, costs, transition = markov_load(make_planner(scenario), draws)
    _, best = value_iteration(costs, transition)
    return ValueTable(scenario, edges, best[None, None])
