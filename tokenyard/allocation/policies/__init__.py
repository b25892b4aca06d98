"""Allocation policies: every baseline by name, and how to make one.

A policy sees states, the plans of the scenario and the forecaster, never the simulator. To add one,
write its class and add its line to `ALLOCATION_BASELINES`.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenyard.allocation.forecast import scenario_forecaster
from tokenyard.allocation.policies.autoscaler import Autoscaler, AutoscalerRule, tensor_degrees
from tokenyard.allocation.policies.learned import ForecastPlanner
from tokenyard.allocation.policies.rules import (
    BEST_RULE,
    AllocationContext,
    FixedThresholds,
    Myopic,
    RandomPlan,
    StaticPlan,
    load_tuned_allocation,
)
from tokenyard.allocation.types import AllocationPolicy
from tokenyard.config import did_you_mean


def _reactive(context: AllocationContext) -> Autoscaler:
    rule = AutoscalerRule(tensor_parallel=tensor_degrees(context.table)[0])
    return Autoscaler(context.table, rule)


def _forecasting(context: AllocationContext) -> Autoscaler:
    forecaster = scenario_forecaster(context.scenario)
    rule = context.tuned.forecast_autoscaler
    return Autoscaler(context.table, rule, forecaster, context.scenario.slot_s)


ALLOCATION_BASELINES: dict[str, Callable[[AllocationContext], AllocationPolicy]] = {
    "random": RandomPlan,
    "fixed": FixedThresholds,
    "best_static": lambda context: StaticPlan(context.tuned.static_plan),
    "myopic_no_switching": lambda context: Myopic(context, counts_switching=False),
    "myopic": lambda context: Myopic(context, counts_switching=True),
    "autoscaler_70": _reactive,
    "autoscaler_tuned": lambda c: Autoscaler(c.table, c.tuned.autoscaler),
    "autoscaler_forecast": _forecasting,
    "planner": lambda context: ForecastPlanner(context.scenario),
}
"""Name of every baseline to what makes a fresh one."""


def best_rule(scenario: str) -> str:
    """Rule that decides where no policy was trained, as far as it is known by tuning."""
    try:
        return load_tuned_allocation(scenario).best_rule
    except ValueError:
        return BEST_RULE


def make_allocation_policy(name: str, context: AllocationContext) -> AllocationPolicy:
    """Make a fresh baseline by name.

    Raises:
        ValueError: The name is unknown, or tuned parameters are missing.
    """
    if name not in ALLOCATION_BASELINES:
        names, hint = sorted(ALLOCATION_BASELINES), did_you_mean(name, ALLOCATION_BASELINES)
        raise ValueError(f"unknown allocation policy {name!r}; choose one of {names}{hint}")
    return ALLOCATION_BASELINES[name](context)
