"""Which plans may be taken now: none that cannot be reached, and none too soon after the last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from serve_app.allocation.plans import format_plan
from serve_app.allocation.transition import is_reachable
from serve_app.cluster import ReshapingLimits
from tokenyard.allocation.plans import PlanTable
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.types import Plan

_FOREVER_SLOTS = 1_000_000


class PlanLimits:
    """Counts changes of plan, and holds policies to the limits of scenario and cluster file."""

    def __init__(
        self, scenario: AllocationScenario, table: PlanTable, limits: ReshapingLimits, slot: int
    ) -> None:
        self.slot = slot
        """Number of the slot that is under way, from the Unix epoch on."""
        self.since_slots = _FOREVER_SLOTS
        """Slots since the last change."""
        self._scenario, self._table, self._limits = scenario, table, limits
        self._grown_slot = -_FOREVER_SLOTS
        self._switches: Counter[int] = Counter()
        """Changes by the period of the switch budget."""

    def start(self) -> Plan:
        """The cheapest plan with half of the pool's capacity that can still be changed later."""
        table = self._table
        smallest = table.plans[min(table.best_memory, key=lambda i: float(table.usd_per_hour[i]))]
        plans = [i for i in table.best_memory if self._is_reachable(table.plans[i], smallest)]
        return table.plans[table.cheapest_for(0.5 * table.pool_goodput_capacity_per_s, plans)]

    def advance(self, slot: int) -> None:
        """Go on to another slot."""
        self.since_slots += slot - self.slot
        self.slot = slot

    def note(self, old: Plan, new: Plan) -> None:
        """Count a change."""
        if self._is_growth(old, new):
            self._grown_slot = self.slot
        if old != new:
            self.since_slots = 0
            budget = self._scenario.switch_budget
            if budget is not None:
                self._switches[self.slot // budget.period_slots] += 1

    @property
    def switches_left(self) -> int | None:
        """Changes that the scenario's budget still allows in this period; None: any number."""
        budget = self._scenario.switch_budget
        if budget is None:
            return None
        return max(budget.switches - self._switches[self.slot // budget.period_slots], 0)

    @property
    def budget_left(self) -> float:
        """Share of the switch budget that is left in this period."""
        budget, left = self._scenario.switch_budget, self.switches_left
        return 1.0 if budget is None or left is None else left / max(budget.switches, 1)

    @property
    def may_switch(self) -> bool:
        """Whether switch budget, hysteresis and cooldown allow another plan now."""
        wait_slots = max(self._scenario.hysteresis_slots, self._limits.cooldown_slots)
        return self.since_slots >= wait_slots and self.switches_left != 0

    def attainable(self, now: Plan, wanted: Plan) -> Plan:
        """The plan that was asked for, or the closest that can still be changed later.

        One replica on all GPUs is a trap: nothing can start beside it, and it may not stop before.
        """
        if self._is_round_trip(now, wanted):
            return wanted
        table = self._table
        serves = {table.plans[i]: float(table.goodput_capacity_per_s[i]) for i in table.best_memory}
        plans = [plan for plan in serves if plan == now or self._is_round_trip(now, plan)]
        least = float(table.goodput_capacity_per_s[table.find(wanted)])
        enough = [plan for plan in plans if serves[plan] >= least]
        if enough:
            return min(enough, key=lambda plan: (plan.num_gpus, plan != now))
        return max(plans or [now], key=lambda plan: serves.get(plan, 0.0))

    def too_soon(self, now: Plan, plan: Plan) -> str | None:
        """Say why a policy may not change to a plan yet; None: it may."""
        if not self.may_switch:
            return "switch budget, hysteresis or cooldown forbid it"
        settling_s = (self.slot - self._grown_slot) * self._scenario.slot_s
        if not self._is_growth(now, plan) and settling_s < self._limits.shrink_after_s:
            return f"the pool grew {settling_s:.0f} s ago: nothing is taken back so soon"
        return None

    def out_of_reach(self, now: Plan, plan: Plan) -> str | None:
        """Say why one plan cannot become another under load; None: it can."""
        if self._is_reachable(now, plan):
            return None
        return (
            f"{format_plan(plan)} cannot be reached from {format_plan(now)} within "
            f"{self._scenario.num_gpus} GPUs while {self._limits.min_replicas} replicas serve"
        )

    def saved(self) -> dict[str, Any]:
        """The rest of the switch budget and the time of the last change, for JSON."""
        return {
            "slot": self.slot,
            "since_slots": self.since_slots,
            "grown_slot": self._grown_slot,
            "switches": [list(item) for item in self._switches.items()],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what was saved, unless its slots were shorter than ours."""
        if self.slot >= int(saved["slot"]):
            self.since_slots = int(saved["since_slots"]) + self.slot - int(saved["slot"])
            self._grown_slot = int(saved["grown_slot"])
            self._switches = Counter({int(period): int(n) for period, n in saved["switches"]})

    def _is_growth(self, now: Plan, plan: Plan) -> bool:
        serves = self._table.goodput_capacity_per_s
        return bool(serves[self._table.find(plan)] > serves[self._table.find(now)])

    def _is_reachable(self, now: Plan, plan: Plan) -> bool:
        return is_reachable(now, plan, self._scenario.num_gpus, self._limits.min_replicas)

    def _is_round_trip(self, now: Plan, plan: Plan) -> bool:
        return self._is_reachable(now, plan) and self._is_reachable(plan, now)
