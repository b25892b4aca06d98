"""Regional policies: every baseline by name, and how to make one.

A policy sees states, never the simulator. To add one, write its class and add its line to
`REGION_BASELINES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenyard.config import did_you_mean
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.policies import rules
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.types import Dispatch, RegionPolicy

Maker = Callable[[ActivationRule, rules.Knobs], RegionPolicy]


@dataclass(frozen=True)
class TunableRule:
    """A rule with its knobs."""

    make: Maker
    tunable: tuple[str, ...] = ()
    """Fields of `Knobs` that it reads."""
    knobs: rules.Knobs = field(default_factory=rules.Knobs)

    def tuned(self, rule: ActivationRule) -> RegionPolicy:
        """The rule with these knobs."""
        return self.make(rule, self.knobs)


def _planned(
    plan: rules.Planner, demand: rules.Demand = rules.demand_now, dispatch: Dispatch = "shares"
) -> Maker:
    return lambda rule, knobs: rules.Planned(plan, rule, demand, dispatch, knobs)


def _receding(dispatch: Dispatch) -> Maker:
    return lambda rule, knobs: rules.RecedingHorizon(rule, dispatch, knobs)


_CAP, _PROX, _COST = ("cap",), ("cap", "smoothing"), ("cap", "smoothing", "live")

REGION_BASELINES: dict[str, TunableRule] = {
    "round_robin": TunableRule(_planned(rules.by_servers)),
    "local_first": TunableRule(_planned(rules.stay_local)),
    "least_loaded": TunableRule(_planned(rules.by_capacity, dispatch="least_loaded")),
    "skylb": TunableRule(
        _planned(rules.spilled, rules.demand_ahead, "spill"), _CAP, rules.Knobs(0.5)
    ),
    "sdib": TunableRule(_planned(rules.by_capacity, dispatch="balance")),
    "ot_balanced": TunableRule(_planned(rules.ot_balanced)),
    "ot_slack": TunableRule(_planned(rules.ot_slack), _CAP, rules.Knobs(0.43)),
    "sinkhorn": TunableRule(_planned(rules.sinkhorn), _CAP, rules.Knobs(0.46)),
    "prox_ot": TunableRule(_planned(rules.ot_slack), _PROX, rules.Knobs(0.43, 0.4)),
    "ot_slack_forecast": TunableRule(
        _planned(rules.ot_slack, rules.demand_ahead), _CAP, rules.Knobs(0.43)
    ),
    "sinkhorn_forecast": TunableRule(_planned(rules.sinkhorn, rules.demand_ahead), _CAP),
    "prox_ot_forecast": TunableRule(
        _planned(rules.ot_slack, rules.demand_ahead), _PROX, rules.Knobs(0.43, 0.4)
    ),
    "prox_ot_forecast_live": TunableRule(
        _planned(rules.ot_slack, rules.demand_ahead, "live_shares"), _PROX, rules.Knobs(0.44, 0.4)
    ),
    "prox_ot_forecast_live_cost": TunableRule(
        _planned(rules.ot_slack, rules.demand_ahead, "live_cost"), _COST, rules.COST_KNOBS
    ),
    "receding_horizon": TunableRule(_receding("shares"), _CAP, rules.Knobs(0.43)),
    "receding_horizon_live": TunableRule(_receding("live_shares"), _CAP, rules.Knobs(0.44)),
    "receding_horizon_live_cost": TunableRule(
        _receding("live_cost"), ("cap", "live"), rules.COST_KNOBS
    ),
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
    return REGION_BASELINES[name].tuned(ActivationRule.from_scenario(scenario))
