"""Search the parameters of the allocation rules: the best static plan, and autoscalers."""

from __future__ import annotations

import itertools

import numpy as np

from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.dynamics import REWARD
from tokenyard.allocation.policies.autoscaler import AutoscalerRule, family, tensor_degrees
from tokenyard.allocation.policies.rules import TunedAllocation
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.simulator import AllocationOutcomes
from tokenyard.allocation.simulator.run import StreamRunner
from tokenyard.types import FloatArray

OUT_UTILISATIONS = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6)
IN_UTILISATIONS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
WINDOWS = (1, 2, 6)
AHEAD = (1, 3, 6)
COOLDOWNS = (0, 6)


def tune_allocation(scenario: AllocationScenario) -> TunedAllocation:
    """Try every plan, and every autoscaler of the grid, on one draw of the training part."""
    runner = StreamRunner(scenario, demand_source(scenario).train(0))
    table, slots = runner.sim.table, runner.stream.num_slots
    statics = [_cost(runner.run_plans(np.full(slots, p))) for p in range(table.num_plans)]
    static = int(np.argmin(statics))
    back = {window: runner.highest(window) for window in WINDOWS}
    ahead = {window: runner.forecasts[:, :window].max(axis=1) for window in AHEAD}
    reactive, reactive_cost = _best_rule(runner, back, (1, 2))
    forecasting, forecasting_cost = _best_rule(runner, ahead, AHEAD)
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
    )


def _best_rule(
    runner: StreamRunner, signals: dict[int, FloatArray], out_windows: tuple[int, ...]
) -> tuple[AutoscalerRule, float]:
    """Return the cheapest autoscaler of the grid, and its cost per slot."""
    table = runner.sim.table
    best, least = None, np.inf
    for degree in tensor_degrees(table):
        plans = family(table, degree)
        grid = itertools.product(out_windows, signals, OUT_UTILISATIONS, IN_UTILISATIONS, COOLDOWNS)
        for out_window, in_window, out, back, cooldown in grid:
            if back > out:
                continue
            outcomes = runner.run_autoscaler(
                plans, signals[out_window] / out, signals[in_window] / back, cooldown
            )
            cost = _cost(outcomes)
            if cost < least:
                least = cost
                best = AutoscalerRule(
                    tensor_parallel=degree, out_utilisation=out, in_utilisation=back,
                    out_window=out_window, in_window=in_window, cooldown_slots=cooldown,
                )  # fmt: skip
    assert best is not None
    return best, least


def _cost(outcomes: AllocationOutcomes) -> float:
    """Mean cost per slot: minus the reward."""
    return -float(outcomes.column(REWARD).mean())
