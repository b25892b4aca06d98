"""An allocator of your own, in the loop that decides how many GPUs run.

    python examples/allocate.py

Every five minutes the allocator is shown the demand so far, and returns the plan for the next five:
how the GPUs share the work, and how many of them run. Expect the cost of a day, with the price of
SLO violations in it, under this allocator, a tuned autoscaler, and the planner that ships.
It takes a few seconds.
"""

from __future__ import annotations

import numpy as np

from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.evaluation import summarise
from tokenyard.allocation.plans import PlanTable, load_allocation
from tokenyard.allocation.policies import make_allocation_policy
from tokenyard.allocation.policies.rules import AllocationContext
from tokenyard.allocation.simulator.run import run_allocation
from tokenyard.allocation.types import AllocationPolicy, AllocationState, Plan

SCENARIO = "a100x8_13b"
DAYS = 2
HEADROOM = 1.05
"""Capacity that is kept, over the highest demand of the last half hour."""
WINDOW = 6
"""Slots of that half hour."""


class Headroom:
    """The cheapest plan that can carry more than the recent demand within the SLO."""

    def __init__(self, table: PlanTable) -> None:
        """Know what each plan costs and carries."""
        self._table = table

    def allocate(self, state: AllocationState) -> Plan:
        """Return the plan to be in force in the next slot."""
        if not state.may_switch:
            return state.plan
        wanted = HEADROOM * max(state.demand_per_s[-WINDOW:])
        enough = self._table.goodput_capacity_per_s >= wanted
        if not enough.any():
            return self._table.plans[int(np.argmax(self._table.goodput_capacity_per_s))]
        price = np.where(enough, self._table.usd_per_hour, np.inf)
        cheapest = np.flatnonzero(price == price.min())
        if self._table.find(state.plan) in cheapest:
            return state.plan
        return self._table.plans[int(cheapest[0])]


def main() -> None:
    """Run three allocators over the same days of demand."""
    scenario = load_allocation(SCENARIO)
    stream = demand_source(scenario).test(seed=0, num_days=DAYS)
    context = AllocationContext(scenario, np.random.default_rng(0))
    policies: dict[str, AllocationPolicy] = {
        "this allocator": Headroom(context.table),
        "autoscaler_tuned": make_allocation_policy("autoscaler_tuned", context),
        "planner": make_allocation_policy("planner", context),
    }
    for name, policy in policies.items():
        row = summarise(scenario, [run_allocation(scenario, stream, policy)])
        print(
            f"{name}: {row['cost_with_penalty']:.2f} $/h, of which GPUs "
            f"{row['cost_per_hour']:.2f}; {100 * row['slo_attainment']:.1f} % of SLOs attained, "
            f"{row['switches']:.0f} changes of plan"
        )


if __name__ == "__main__":
    main()
