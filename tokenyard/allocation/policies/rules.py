"""Hand-written allocation rules, and what they may be built from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import resources

import numpy as np

from tokenyard.allocation.planner import PlannerModel, make_planner, nearest_levels
from tokenyard.allocation.plans import PlanTable, plan_table
from tokenyard.allocation.policies.autoscaler import AutoscalerRule
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.types import AllocationState, Plan
from tokenyard.config import FrozenModel

_TUNED = "scenarios/tuned/allocation"
BEST_RULE = "planner"
"""Decides where no policy was trained and nothing was tuned. On the training part of six of the
eight recorded pools it costs less than any tuned rule, and up to 0.3 % more on the others."""


class TunedAllocation(FrozenModel):
    """What was tuned for one scenario on its training part; `pipelines/tune_baselines.py`."""

    scenario: str
    static_plan: Plan
    """The best of all plans that never change."""
    autoscaler: AutoscalerRule
    forecast_autoscaler: AutoscalerRule
    train_usd_per_slot: dict[str, float]
    """Cost of each on the training part, SLO violations included."""
    best_rule: str = BEST_RULE
    """What costs least on further days, where days are drawn; recorded ones are too few to tell."""


def load_tuned_allocation(scenario: str) -> TunedAllocation:
    """Read what ships for a scenario.

    Raises:
        ValueError: Nothing does; names the command that makes it.
    """
    file = resources.files("tokenyard") / _TUNED / f"{scenario}.json"
    if not file.is_file():
        raise ValueError(
            f"no tuned allocation rules for scenario {scenario!r}; make them with "
            f"python pipelines/tune_baselines.py --scenario {scenario}"
        )
    return TunedAllocation.model_validate_json(file.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class AllocationContext:
    """What a policy may be built from."""

    scenario: AllocationScenario
    rng: np.random.Generator
    """Draws the choices of the random policy."""

    @cached_property
    def table(self) -> PlanTable:
        """Every plan of the scenario, with its costs."""
        return plan_table(self.scenario)

    @cached_property
    def tuned(self) -> TunedAllocation:
        """Tuned parameters that ship for the scenario."""
        return load_tuned_allocation(self.scenario.name)


class RandomPlan:
    """Any feasible plan, every slot: what random exploration does to a service."""

    def __init__(self, context: AllocationContext) -> None:
        self._plans, self._rng = context.table.plans, context.rng

    def allocate(self, state: AllocationState) -> Plan:
        """Draw a plan."""
        return self._plans[int(self._rng.integers(len(self._plans)))]


class StaticPlan:
    """One plan for ever."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def allocate(self, state: AllocationState) -> Plan:
        """Return the one plan, in every state."""
        return self._plan


class FixedThresholds:
    """The allocation paper's Fixed policy: above 0.7 of the load hybrid parallelism on all GPUs.

    The paper gives this one rule; ours for the rest: above 0.4 model parallelism on two GPUs, else
    data parallelism on one. Where that is infeasible, the feasible plan of least GPUs that is
    no smaller. Load is demand over the pool's goodput capacity.
    """

    def __init__(self, context: AllocationContext) -> None:
        table, num_gpus = context.table, context.scenario.num_gpus
        self._pool_per_s = table.pool_goodput_capacity_per_s
        wanted = (("hybrid_tp2", num_gpus), ("model", 2), ("data", 1))
        self._plans = [_like(table, kind, gpus) for kind, gpus in wanted]

    def allocate(self, state: AllocationState) -> Plan:
        """Compare the last slot's load with the thresholds."""
        load = state.demand_per_s[-1] / self._pool_per_s
        return self._plans[0 if load > 0.7 else 1 if load > 0.4 else 2]


def _like(table: PlanTable, kind: str, gpus: int) -> Plan:
    plans = [table.plans[i] for i in table.best_memory]
    same = [plan for plan in plans if plan.parallelism == kind and plan.num_gpus == gpus]
    enough = [plan for plan in plans if plan.num_gpus >= gpus]
    return same[0] if same else min(enough or plans, key=lambda plan: plan.num_gpus)


class Myopic:
    """The plan that is cheapest in the next slot if demand stays as it was."""

    def __init__(self, context: AllocationContext, counts_switching: bool) -> None:
        """Work out the costs, with `counts_switching` those of the restart that a change takes."""
        self._planner = make_planner(context.scenario)
        self._table, self._counts_switching = context.table, counts_switching

    def allocate(self, state: AllocationState) -> Plan:
        """Look the costs up."""
        costs = self._planner.costs[0, nearest_levels(self._planner, state.demand_per_s[-1])]
        now = candidate_index(self._table, self._planner, state.plan)
        row = costs[now] if self._counts_switching else np.diag(costs)
        return self._table.plans[int(self._planner.candidates[int(row.argmin())])]


def candidate_index(table: PlanTable, planner: PlannerModel, plan: Plan) -> int:
    """Return the index of the candidate with the same shape as a plan."""
    for i, candidate in enumerate(planner.candidates.tolist()):
        shape = table.plans[candidate]
        if shape.num_gpus == plan.num_gpus and shape.parallelism == plan.parallelism:
            return i
    raise ValueError(f"{plan} has the shape of no plan of this pool")
