"""Search the parameters of the allocation rules: the best static plan, and autoscalers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.dynamics import REWARD
from tokenyard.allocation.policies.autoscaler import AutoscalerRule, family, tensor_degrees
from tokenyard.allocation.policies.rules import BEST_RULE, TunedAllocation
from tokenyard.allocation.recurring import RECURRING_KINDS
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.simulator import AllocationOutcomes
from tokenyard.allocation.simulator.run import StreamRunner
from tokenyard.types import FloatArray

OUT_UTILISATIONS = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6)
IN_UTILISATIONS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
WINDOWS = (1, 2, 6)
AHEAD = (1, 3, 6)
COOLDOWNS = (0, 6)
_FURTHER_SEED, _FURTHER_DRAWS = 2_000, 3


def tune_allocation(scenario: AllocationScenario) -> TunedAllocation:
    """Try every plan, and every autoscaler of the grid, on one draw of the training part."""
    runner = StreamRunner(scenario, demand_source(scenario).train(0))
    table, slots = runner.sim.table, runner.stream.num_slots
    statics = [_cost(runner.run_plans(np.full(slots, p))) for p in range(table.num_plans)]
    static = int(np.argmin(statics))
    reactive, reactive_cost = _best_rule(runner, _back(runner), (1, 2))
    forecasting, forecasting_cost = _best_rule(runner, _ahead(runner), AHEAD)
    rules = {"autoscaler_tuned": reactive, "autoscaler_forecast": forecasting}
    return TunedAllocation(
        scenario=runner.scenario.name,
        static_plan=table.plans[static],
        autoscaler=reactive,
        forecast_autoscaler=forecasting,
        train_usd_per_slot={
            "best_static": statics[static],
            "autoscaler_tuned": reactive_cost,
            "autoscaler_forecast": forecasting_cost,
        },
        best_rule=best_on_further_days(scenario, rules),
    )


def best_on_further_days(scenario: AllocationScenario, rules: Mapping[str, AutoscalerRule]) -> str:
    """Return which of the planner and two autoscalers costs least on days that nothing saw.

    Args:
        scenario: Where its days are not drawn, the planner is returned.
        rules: `autoscaler_tuned` and `autoscaler_forecast`.
    """
    if scenario.demand.source not in RECURRING_KINDS:
        return BEST_RULE
    costs = dict.fromkeys([BEST_RULE, *rules], 0.0)
    for seed in range(_FURTHER_SEED, _FURTHER_SEED + _FURTHER_DRAWS):
        runner = StreamRunner(scenario, demand_source(scenario).train(seed))
        costs[BEST_RULE] += _cost(runner.run_planner())
        for name, rule in rules.items():
            signals = _ahead(runner) if name == "autoscaler_forecast" else _back(runner)
            costs[name] += _rule_cost(runner, rule, signals)
    return min(costs, key=lambda name: costs[name])


def _best_rule(
    runner: StreamRunner, signals: dict[int, FloatArray], out_windows: tuple[int, ...]
) -> tuple[AutoscalerRule, float]:
    """Return the cheapest autoscaler of the grid, and its cost per slot."""
    table = runner.sim.table
    best, least = None, np.inf
    for degree in tensor_degrees(table):
        grid = itertools.product(out_windows, signals, OUT_UTILISATIONS, IN_UTILISATIONS, COOLDOWNS)
        for out_window, in_window, out, back, cooldown in grid:
            if back > out:
                continue
            rule = AutoscalerRule(
                tensor_parallel=degree, out_utilisation=out, in_utilisation=back,
                out_window=out_window, in_window=in_window, cooldown_slots=cooldown,
            )  # fmt: skip
            cost = _rule_cost(runner, rule, signals)
            if cost < least:
                best, least = rule, cost
    assert best is not None
    return best, least


def _rule_cost(runner: StreamRunner, rule: AutoscalerRule, signals: dict[int, FloatArray]) -> float:
    out = signals[rule.out_window] / rule.out_utilisation
    back = signals[rule.in_window] / rule.in_utilisation
    plans = family(runner.sim.table, rule.tensor_parallel)
    return _cost(runner.run_autoscaler(plans, out, back, rule.cooldown_slots))


def _back(runner: StreamRunner) -> dict[int, FloatArray]:
    """Highest demand of latest slots, by how many."""
    return {window: runner.highest(window) for window in WINDOWS}


def _ahead(runner: StreamRunner) -> dict[int, FloatArray]:
    """Highest forecast of the coming slots, by how many."""
    return {window: runner.forecasts[:, :window].max(axis=1) for window in AHEAD}


def _cost(outcomes: AllocationOutcomes) -> float:
    """Mean cost per slot: minus the reward."""
    return -float(outcomes.column(REWARD).mean())
