"""Regional policies: every baseline by name, and how to make one.

A policy sees states, never the simulator. To add one, write its class and add its line to
`REGION_BASELINES`.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenyard.config import did_you_mean
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.mixing import START_CAP, START_LIVE, START_SMOOTHING
from tokenyard.regions.policies.rules import (
    LIVE_CAP,
    SMOOTHING,
    Demand,
    Planned,
    Planner,
    RecedingHorizon,
    by_capacity,
    by_servers,
    demand_ahead,
    demand_now,
    ot_balanced,
    ot_slack,
    ot_slack_live,
    ot_slack_live_cost,
    sinkhorn,
    spilled,
    stay_local,
)
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.types import Dispatch, LiveCost, RegionPolicy


def _planned(
    plan: Planner,
    demand: Demand = demand_now,
    smoothing: float = 0.0,
    dispatch: Dispatch = "shares",
    live: LiveCost | None = None,
) -> Callable[[ActivationRule], RegionPolicy]:
    return lambda rule: Planned(plan, rule, demand, smoothing, dispatch, live or LiveCost())


REGION_BASELINES: dict[str, Callable[[ActivationRule], RegionPolicy]] = {
    "round_robin": _planned(by_servers),
    "local_first": _planned(stay_local),
    "least_loaded": _planned(by_capacity, dispatch="least_loaded"),
    "skylb": _planned(spilled, demand_ahead, dispatch="spill"),
    "sdib": _planned(by_capacity, dispatch="balance"),
    "ot_balanced": _planned(ot_balanced),
    "ot_slack": _planned(ot_slack),
    "sinkhorn": _planned(sinkhorn),
    "prox_ot": _planned(ot_slack, smoothing=SMOOTHING),
    "ot_slack_forecast": _planned(ot_slack, demand_ahead),
    "sinkhorn_forecast": _planned(sinkhorn, demand_ahead),
    "prox_ot_forecast": _planned(ot_slack, demand_ahead, SMOOTHING),
    "prox_ot_forecast_live": _planned(ot_slack_live, demand_ahead, SMOOTHING, "live_shares"),
    "prox_ot_forecast_live_cost": _planned(
        ot_slack_live_cost, demand_ahead, START_SMOOTHING, "live_cost", START_LIVE
    ),
    "receding_horizon": RecedingHorizon,
    "receding_horizon_live": lambda rule: RecedingHorizon(rule, LIVE_CAP, "live_shares"),
    "receding_horizon_live_cost": lambda rule: RecedingHorizon(
        rule, START_CAP, "live_cost", START_LIVE
    ),
}
"""Every baseline by name. `prox_ot_forecast_live_cost` has the fill, the smoothing and the live
costs with which the search for `torta` starts, and learns nothing: what `torta` gains over it is
what learning gains."""


def make_region_policy(name: str, scenario: RegionScenario) -> RegionPolicy:
    """Make a baseline for a scenario.

    Raises:
        ValueError: Unknown name, with the closest one.
    """
    if name not in REGION_BASELINES:
        hint = did_you_mean(name, REGION_BASELINES)
        raise ValueError(
            f"unknown regional policy {name!r}; choose one of {sorted(REGION_BASELINES)}{hint}"
        )
    return REGION_BASELINES[name](ActivationRule.from_scenario(scenario))
