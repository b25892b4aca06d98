"""Whole streams: any policy by its public method, and two families of rules compiled.

The compiled forms decide exactly as the classes of `tokenyard.allocation.policies` do; searches
run them over millions of slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from tokenyard.allocation.demand import DemandStream
from tokenyard.allocation.dynamics import NUM_OUT, measurements
from tokenyard.allocation.forecast import Forecaster, history_slots, scenario_forecaster
from tokenyard.allocation.markov import planner_on
from tokenyard.allocation.planner import PlannerModel, best_next, make_scratch
from tokenyard.allocation.scenario import AllocationScenario, Objective
from tokenyard.allocation.simulator import AllocationOutcomes, AllocationSim
from tokenyard.allocation.simulator.kernel import LEFT, PLAN, REFUSED, SINCE, may_switch, step_one
from tokenyard.allocation.types import AllocationPolicy, AllocationState
from tokenyard.compiled import compiled
from tokenyard.types import FloatArray, IntArray


def run_allocation(
    scenario: AllocationScenario,
    stream: DemandStream,
    policy: AllocationPolicy,
) -> AllocationOutcomes:
    """Let a policy decide every slot of a stream, shown states and nothing else."""
    sim = AllocationSim(scenario, 1, stream.num_slots, scenario_forecaster(scenario))
    sim.load(0, stream)
    table = sim.table
    demand = tuple(float(value) for value in stream.per_s)
    budget = scenario.switch_budget.switches if scenario.switch_budget else 0
    history = history_slots(scenario.slots_per_day)
    plans = np.zeros(stream.num_slots, np.int64)
    outs = np.zeros((stream.num_slots, NUM_OUT))
    for t in range(stream.num_slots):
        counts = sim.counts[0]
        slot = stream.first + t
        state = AllocationState(
            time_s=(stream.start_slot + slot) * scenario.slot_s,
            plan=table.plans[int(counts[PLAN])],
            demand_per_s=demand[max(0, slot - history) : slot] or (demand[0],),
            backlog_requests=float(sim.numbers[0, 0]),
            slots_since_switch=int(counts[SINCE]),
            switches_left=int(counts[LEFT]) if scenario.switch_budget else None,
            may_switch=sim.may_switch(0),
            budget_left=int(counts[LEFT]) / budget if budget else 1.0,
            measured=measurements(sim.outs[0]),
        )
        sim.step(np.array([table.find(policy.allocate(state))]))
        plans[t], outs[t] = sim.plan(0), sim.outs[0]
    return AllocationOutcomes(plans, outs, sim.num_refused)


class StreamRunner:
    """One stream, made ready to be run again and again by compiled rules."""

    def __init__(
        self,
        scenario: AllocationScenario,
        stream: DemandStream,
        forecaster: Forecaster | None = None,
        objective: Objective | None = None,
    ) -> None:
        self.scenario, self.stream, self._objective = scenario, stream, objective
        self._forecaster = forecaster or scenario_forecaster(scenario)
        self.sim = AllocationSim(scenario, 1, stream.num_slots, self._forecaster, objective)
        self.forecasts = self._forecaster.forecast_all(stream)[stream.first :]
        self.sim.load(0, stream)
        self._start = self.sim.plan(0)
        self._outs = np.zeros((stream.num_slots, NUM_OUT))
        self._plans = np.zeros(stream.num_slots, np.int64)

    @cached_property
    def _planning(self) -> tuple[PlannerModel, FloatArray, FloatArray, IntArray, FloatArray]:
        """The planner, cases and spreads of every slot, shape of every plan, scratch."""
        planner = planner_on(self.scenario, self._forecaster, self._objective)
        cases, spread = map(np.ascontiguousarray, self._forecaster.cases_all(self.stream))
        return planner, cases, spread, self.sim.shapes, make_scratch(planner)

    def highest(self, window: int) -> FloatArray:
        """Highest demand of the last `window` slots before each, shape (slots,)."""
        demand, first = self.stream.per_s, self.stream.first
        lags = [
            demand[np.maximum(np.arange(first, len(demand)) - k, 0)] for k in range(1, 1 + window)
        ]
        return np.asarray(np.max(lags, axis=0))

    def run_planner(self) -> AllocationOutcomes:
        """Run the receding-horizon planner."""
        return self._run(run_planner, *self._planning)

    def run_autoscaler(
        self, family: IntArray, out_signal: FloatArray, in_signal: FloatArray, cooldown: int
    ) -> AllocationOutcomes:
        """Run an autoscaler over a family of plans of rising capacity.

        `out_signal` is the capacity wanted at least before every slot, and `in_signal` what must be
        left after giving GPUs back, requests/s, shape (slots,). `cooldown` slots lie between a
        change and the next return of GPUs.
        """
        capacity = self.sim.table.goodput_capacity_per_s
        return self._run(run_autoscaler, family, capacity, out_signal, in_signal, cooldown)

    def run_plans(self, plans: IntArray) -> AllocationOutcomes:
        """Run a given plan in every slot."""
        return self._run(run_plans, plans)

    def _run(self, live: Callable[..., None], *inputs: Any) -> AllocationOutcomes:
        """Live through all slots from the start, by one of the loops below."""
        sim = self.sim
        sim.counts[0, REFUSED] = 0
        sim.restart(0, self._start)
        live(
            sim.model, sim.stream(0), sim.rules, sim.counts[0], sim.numbers[0], *inputs, self._outs,
            self._plans,
        )  # fmt: skip
        return AllocationOutcomes(self._plans.copy(), self._outs.copy(), sim.num_refused)


@compiled
def run_planner(
    model, stream, rules, counts, numbers, planner, cases, spreads, shape_of, scratch, outs,
    plans,
):  # fmt: skip
    """Plan and live through every slot."""
    for t in range(len(outs)):
        now = counts[PLAN]
        action = now
        if may_switch(counts, rules):
            current = shape_of[now]
            chosen = best_next(planner, cases[t], spreads[t], current, scratch)
            if chosen != current:
                action = planner.candidates[chosen]
        step_one(model, stream, rules, counts, numbers, action, outs[t])
        plans[t] = counts[PLAN]


@compiled
def autoscale(family, capacity, now, wanted_out, wanted_in, may_return):
    """Return the next plan of an autoscaler.

    The smallest plan with `wanted_out` when the present one has less; else the smallest with
    `wanted_in`, if that is smaller than the present one and GPUs may be given back.
    """
    size = len(family)
    at = -1
    for k in range(size):
        if family[k] == now:
            at = k
    out = size - 1
    for k in range(size - 1, -1, -1):
        if capacity[family[k]] >= wanted_out:
            out = k
    if at < 0 or out > at:
        return family[out]
    smaller = size - 1
    for k in range(size - 1, -1, -1):
        if capacity[family[k]] >= max(wanted_in, wanted_out):
            smaller = k
    if smaller < at and may_return:
        return family[smaller]
    return now


@compiled
def run_autoscaler(
    model, stream, rules, counts, numbers, family, capacity, out_signal, in_signal, cooldown, outs,
    plans,
):  # fmt: skip
    """Scale and live through every slot."""
    for t in range(len(outs)):
        action = counts[PLAN]
        if may_switch(counts, rules):
            may_return = counts[SINCE] >= cooldown
            action = autoscale(family, capacity, action, out_signal[t], in_signal[t], may_return)
        step_one(model, stream, rules, counts, numbers, action, outs[t])
        plans[t] = counts[PLAN]


@compiled
def run_plans(model, stream, rules, counts, numbers, actions, outs, plans):
    """Live through every slot with given plans."""
    for t in range(len(outs)):
        step_one(model, stream, rules, counts, numbers, actions[t], outs[t])
        plans[t] = counts[PLAN]
