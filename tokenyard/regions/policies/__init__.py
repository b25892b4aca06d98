"""Regional policies: every baseline by name, and how to make one.

A policy sees states, never the simulator. To add one, write its class and add its line to
`RECIPES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenyard.config import did_you_mean
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.policies.rules import (
    COST_KNOBS,
    Demand,
    Knobs,
    Planned,
    Planner,
    RecedingHorizon,
    by_capacity,
    by_servers,
    demand_ahead,
    demand_now,
    ot_balanced,
    ot_slack,
    sinkhorn,
    spilled,
    stay_local,
)
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.types import Dispatch, RegionPolicy

Maker = Callable[[ActivationRule, Knobs], RegionPolicy]


@dataclass(frozen=True)
class TunableRule:
    """A rule with its knobs."""

    make: Maker
    tunable: tuple[str, ...] = ()
    """Fields of `Knobs` that it reads."""
    knobs: Knobs = field(default_factory=Knobs)


def _planned(plan: Planner, demand: Demand = demand_now, dispatch: Dispatch = "shares") -> Maker:
    return lambda rule, knobs: Planned(plan, rule, demand, dispatch, knobs)


def _receding(dispatch: Dispatch) -> Maker:
    return lambda rule, knobs: RecedingHorizon(rule, dispatch, knobs)


_CAP, _PROX, _COST = ("cap",), ("cap", "smoothing"), ("cap", "smoothing", "live")

RECIPES: dict[str, TunableRule] = {
    "round_robin": TunableRule(_planned(by_servers)),
    "local_first": TunableRule(_planned(stay_local)),
    "least_loaded": TunableRule(_planned(by_capacity, dispatch="least_loaded")),
    "skylb": TunableRule(_planned(spilled, demand_ahead, "spill"), _CAP, Knobs(0.5)),
    "sdib": TunableRule(_planned(by_capacity, dispatch="balance")),
    "ot_balanced": TunableRule(_planned(ot_balanced)),
    "ot_slack": TunableRule(_planned(ot_slack), _CAP, Knobs(0.43)),
    "sinkhorn": TunableRule(_planned(sinkhorn), _CAP, Knobs(0.46)),
    "prox_ot": TunableRule(_planned(ot_slack), _PROX, Knobs(0.43, 0.4)),
    "ot_slack_forecast": TunableRule(_planned(ot_slack, demand_ahead), _CAP, Knobs(0.43)),
    "sinkhorn_forecast": TunableRule(_planned(sinkhorn, demand_ahead), _CAP),
    "prox_ot_forecast": TunableRule(_planned(ot_slack, demand_ahead), _PROX, Knobs(0.43, 0.4)),
    "prox_ot_forecast_live": TunableRule(
        _planned(ot_slack, demand_ahead, "live_shares"), _PROX, Knobs(0.44, 0.4)
    ),
    "prox_ot_forecast_live_cost": TunableRule(
        _planned(ot_slack, demand_ahead, "live_cost"), _COST, COST_KNOBS
    ),
    "receding_horizon": TunableRule(_receding("shares"), _CAP, Knobs(0.43)),
    "receding_horizon_live": TunableRule(_receding("live_shares"), _CAP, Knobs(0.44)),
    "receding_horizon_live_cost": TunableRule(_receding("live_cost"), ("cap", "live"), COST_KNOBS),
}
"""Every rule by name."""


def _as_tuned(recipe: TunableRule) -> Callable[[ActivationRule], RegionPolicy]:
    return lambda rule: recipe.make(rule, recipe.knobs)


REGION_BASELINES: dict[str, Callable[[ActivationRule], RegionPolicy]] = {
    name: _as_tuned(recipe) for name, recipe in RECIPES.items()
}
"""Every rule by name, with its knobs as they were tuned (docs/results/regions.md)."""
BEST_RULE = "prox_ot_forecast_live_cost"
"""What ships: no learned policy has beaten it."""


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
