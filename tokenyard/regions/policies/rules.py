"""Hand-written regional rules.

All turn servers on by the same rule (Eq 6) from what their own plan sends where, and all live with
the same allocator inside regions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tokenyard.regions import transport
from tokenyard.regions.activation import ActivationRule, inflows, targets
from tokenyard.regions.types import Dispatch, LiveCost, RegionDecision, RegionState
from tokenyard.types import BoolArray, FloatArray

PRICE_WEIGHT, LATENCY_WEIGHT = 1.0, 0.1
"""w1 and w2 of the paper's cost, whose values it does not give; w1 is to be much the greater."""


@dataclass(frozen=True)
class Knobs:
    """What a rule leaves open, and a search may tune."""

    cap: float = 0.55
    """Share of a region's capacity that plans fill: servers that change models serve less than
    their capacity, and a plan learns nothing of queues."""
    smoothing: float = 0.0
    """lambda1, the weight of the last slot's shares. At 0.4 steps are 2.5 times smaller, the
    paper's target, where plans are independent."""
    live: LiveCost = field(default_factory=LiveCost)
    """Of dispatch by cost."""


COST_KNOBS = Knobs(0.3, 0.05, LiveCost(debt_s=2.4, service=0.39, use=0.43, usd_s=6400.0, late=1.8))
"""Of plans whose tasks go by cost (docs/results/regions.md)."""


def paper_cost(state: RegionState) -> FloatArray:
    """Cost of the paper's transport, price and latency each over its greatest, shape (R, R)."""
    price = state.usd_per_kwh / max(float(state.usd_per_kwh.max()), 1e-12)
    latency = state.latency_s / max(float(state.latency_s.max()), 1e-12)
    return np.asarray(PRICE_WEIGHT * price + LATENCY_WEIGHT * latency)


def demand_now(state: RegionState) -> FloatArray:
    """What a plan without a forecast goes by: the last slot's arrivals."""
    return np.asarray(state.arrivals[-1], dtype=np.float64)


def demand_ahead(state: RegionState) -> FloatArray:
    """What is forecast for the slot that begins."""
    return np.asarray(state.forecast[0], dtype=np.float64)


Demand = Callable[[RegionState], FloatArray]
Planner = Callable[[RegionState, FloatArray, float], FloatArray]
"""From a state, demand and the share of capacity that may be filled to shares."""


@dataclass(frozen=True)
class Planned:
    """Shares that some function plans, smoothed over time or not."""

    plan: Planner
    rule: ActivationRule
    demand: Demand = demand_now
    dispatch: Dispatch = "shares"
    knobs: Knobs = field(default_factory=Knobs)

    def decide(self, state: RegionState) -> RegionDecision:
        """Plan, smooth, and turn servers on for it."""
        knobs = self.knobs
        plan = shares = self.plan(state, self.demand(state), knobs.cap)
        if knobs.smoothing:
            smooth = transport.prox(plan, state.previous, knobs.smoothing)
            shares = without(smooth, state.capacity > 0, plan)
        return RegionDecision(shares, targets(state, shares, self.rule), self.dispatch, knobs.live)


def without(shares: FloatArray, there: BoolArray, instead: FloatArray) -> FloatArray:
    """Send nothing to regions that are down: what is left is scaled up, else `instead` holds."""
    if there.all():
        return shares
    kept = shares * there
    mass = kept.sum(axis=1, keepdims=True)
    return np.where(mass > 1e-9, kept / np.maximum(mass, 1e-9), instead)


def stay_local(state: RegionState, demand: FloatArray, cap: float = 1.0) -> FloatArray:
    """Everything where it comes from, but for regions that are down: those go by capacity."""
    there = state.capacity > 0
    return np.where(there[:, None], np.eye(state.num_regions), by_capacity(state, demand))


def as_shares(state: RegionState, plan: FloatArray) -> FloatArray:
    """The shares of a plan; what a region without demand may still send stays local."""
    return transport.as_shares(plan, stay_local(state, plan.sum(axis=1)))


def by_servers(state: RegionState, demand: FloatArray, cap: float = 1.0) -> FloatArray:
    """Round robin over regions, each as often as it has servers."""
    servers = (state.server_tasks > 0).sum(axis=1).astype(np.float64)
    return _same_rows(servers)


def by_capacity(state: RegionState, demand: FloatArray, cap: float = 1.0) -> FloatArray:
    """Every region's share of all capacity."""
    return _same_rows(state.capacity)


def _same_rows(weights: FloatArray) -> FloatArray:
    num = len(weights)
    total = weights.sum()
    row = weights / total if total > 0 else np.full(num, 1 / num)
    return np.tile(row, (num, 1))


def spilled(state: RegionState, demand: FloatArray, cap: float) -> FloatArray:
    """What spilling comes to: local up to capacity, the rest to the nearest that has room.

    A rule that forwards request by request has no plan; this one says which servers it will need.
    """
    room = cap * state.capacity
    served = np.minimum(demand, room)
    plan = np.diag(served)
    room = room - served
    for i in np.argsort(-(demand - served), kind="stable"):
        left = demand[i] - served[i]
        for j in np.argsort(state.latency_s[i], kind="stable"):
            if left <= 0:
                break
            taken = min(left, room[j])
            plan[i, j] += taken
            room[j] -= taken
            left -= taken
        plan[i] += max(left, 0.0) * by_capacity(state, demand)[i]
    return as_shares(state, plan)


def ot_balanced(state: RegionState, demand: FloatArray, cap: float = 1.0) -> FloatArray:
    """The paper's Eq 2."""
    return as_shares(state, transport.balanced(demand, state.capacity, paper_cost(state)))


def ot_slack(state: RegionState, demand: FloatArray, cap: float) -> FloatArray:
    """The same cost with capacities as upper bounds."""
    plan = transport.within(demand, cap * state.capacity, paper_cost(state))
    return as_shares(state, plan)


def sinkhorn(state: RegionState, demand: FloatArray, cap: float) -> FloatArray:
    """`ot_slack` with an entropy term."""
    plan = transport.sinkhorn(demand, cap * state.capacity, paper_cost(state))
    return as_shares(state, plan)


_PLANNED_SLOTS = 4
_SWITCHING_COST = 0.05
"""Of a task that another region served in the slot before, in units of the paper's cost."""


class RecedingHorizon:
    """Plan several slots of forecasts at once, pay for changes of loads, and plan again after them.

    The linear program takes a hundred times as long as a transport, so all its slots are used.
    """

    def __init__(self, rule: ActivationRule, dispatch: Dispatch, knobs: Knobs) -> None:
        """Start without a plan; of the knobs cap and live costs are read."""
        self._rule, self._dispatch, self._knobs = rule, dispatch, knobs
        self._plans: list[FloatArray] = []
        self._capacity: FloatArray | None = None

    def decide(self, state: RegionState) -> RegionDecision:
        """Take the next slot of the plan; make a new one where it is over or capacity changed."""
        capacity = state.capacity
        changed = self._capacity is None or not np.array_equal(self._capacity, capacity)
        if capacity.sum() <= 0:
            shares = stay_local(state, demand_ahead(state))
            return self._decision(state, shares)
        if not self._plans or changed:
            ahead = state.forecast[:_PLANNED_SLOTS]
            cost = np.repeat(paper_cost(state)[None], len(ahead), axis=0)
            before = inflows(demand_now(state)[None], state.previous)[0]
            plans = transport.receding_horizon(
                ahead, self._knobs.cap * capacity, cost, before, _SWITCHING_COST
            )
            self._plans = [as_shares(state, plan) for plan in plans]
            self._capacity = capacity
        return self._decision(state, self._plans.pop(0))

    def _decision(self, state: RegionState, shares: FloatArray) -> RegionDecision:
        active = targets(state, shares, self._rule)
        return RegionDecision(shares, active, self._dispatch, self._knobs.live)
