"""Autoscalers: equal replicas, added and removed by demand or by its forecast."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from tokenyard.allocation.forecast import Forecaster
from tokenyard.allocation.plans import PlanTable
from tokenyard.allocation.types import AllocationState, Plan
from tokenyard.config import FrozenModel
from tokenyard.types import IntArray


class AutoscalerRule(FrozenModel):
    """Parameters of an autoscaler over replicas of one kind."""

    tensor_parallel: Annotated[int, Field(ge=1)]
    """GPUs per replica; replicas are added and taken away."""
    out_utilisation: Annotated[float, Field(gt=0)] = 0.7
    """GPUs are added above this share of the plan's goodput capacity."""
    in_utilisation: Annotated[float, Field(gt=0)] = 0.7
    """GPUs are given back where what is left stays below this share."""
    out_window: Annotated[int, Field(ge=1)] = 1
    """Slots of whose demand the highest counts for adding; ahead, where demand is forecast."""
    in_window: Annotated[int, Field(ge=1)] = 1
    """The same for giving back."""
    cooldown_slots: Annotated[int, Field(ge=0)] = 0
    """Slots between a change and the next return."""


class Autoscaler:
    """Adds and removes equal replicas by the demand of the last slots, or by its forecast."""

    def __init__(
        self, table: PlanTable, rule: AutoscalerRule, forecaster: Forecaster | None = None,
        slot_s: float = 300.0,
    ) -> None:  # fmt: skip
        """Make the family of plans.

        Args:
            table: The plans.
            rule: Targets and windows.
            forecaster: Windows look ahead through its medians; None: back.
            slot_s: Length of a slot, seconds, where there is a forecaster.
        """
        self._table, self._rule, self._forecaster = table, rule, forecaster
        plans = family(table, rule.tensor_parallel)
        self._family: list[Plan] = [table.plans[i] for i in plans.tolist()]
        self._capacity = table.goodput_capacity_per_s[plans]
        self._slot_s = slot_s

    def allocate(self, state: AllocationState) -> Plan:
        """Grow at once, shrink when it is safe and the last change is long enough ago."""
        rule = self._rule
        wanted = self._highest(state, rule.out_window) / rule.out_utilisation
        returned = self._highest(state, rule.in_window) / rule.in_utilisation
        out = self._smallest(wanted)
        now = self._family.index(state.plan) if state.plan in self._family else -1
        if now < 0 or out > now:
            return self._family[out]
        smaller = self._smallest(max(wanted, returned))
        if smaller < now and state.slots_since_switch >= rule.cooldown_slots:
            return self._family[smaller]
        return state.plan

    def _highest(self, state: AllocationState, window: int) -> float:
        if self._forecaster is None:
            return max(state.demand_per_s[-window:])
        slot = round(state.time_s / self._slot_s)
        forecast = self._forecaster.forecast(state.demand_per_s, slot)
        return float(forecast[:window].max())

    def _smallest(self, wanted: float) -> int:
        enough = np.flatnonzero(self._capacity >= wanted)
        return int(enough[0]) if len(enough) else len(self._family) - 1


def family(table: PlanTable, tensor_parallel: int) -> IntArray:
    """Plans with replicas of so many GPUs, by capacity, one per number of replicas.

    Raises:
        ValueError: There is none that attains the SLO.
    """
    plans = [
        i
        for i in table.best_memory
        if _is_of(table.plans[i], tensor_parallel) and table.goodput_capacity_per_s[i] > 0
    ]
    if not plans:
        raise ValueError(f"no plan of this pool attains the SLO on replicas of {tensor_parallel}")
    # Equal memory and batch limit, so that replicas are equal and the others stay at work.
    largest = table.plans[max(plans, key=lambda i: table.plans[i].num_gpus)]
    alike = [
        i
        for i, plan in enumerate(table.plans)
        if _is_of(plan, tensor_parallel)
        and (plan.memory_fraction, plan.max_batch) == (largest.memory_fraction, largest.max_batch)
        and table.goodput_capacity_per_s[i] > 0
    ]
    return np.array(sorted(alike, key=lambda i: table.plans[i].num_gpus), np.int64)


def _is_of(plan: Plan, tensor_parallel: int) -> bool:
    return (plan.tensor_parallel, plan.pipeline_parallel) == (tensor_parallel, 1)


def tensor_degrees(table: PlanTable) -> list[int]:
    """Return the tensor-parallel degrees, without pipeline stages, that can attain the SLO."""
    degrees = {
        p.tensor_parallel
        for p, c in zip(table.plans, table.goodput_capacity_per_s, strict=True)
        if c and p.pipeline_parallel == 1
    }
    return sorted(degrees)
