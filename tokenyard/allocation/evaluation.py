"""What is measured of an allocation run, and by what its policies are paired.

All policies live through the same test part under several draws of its noise. One trace is one
trace: draws are averaged, and intervals are Student's over its days, paired by day.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenyard.allocation import dynamics as dyn
from tokenyard.allocation.plans import plan_table
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.simulator import AllocationOutcomes
from tokenyard.problem import Measure
from tokenyard.types import FloatArray

MEASURES = (
    Measure("cost_with_penalty", "$/h with violations", ".4g", delta="delta_cost_fraction"),
    Measure("cost_per_hour", "$/h", ".4g"),
    Measure("slo_attainment", "attainment %", factor=100, more_is_better=True),
    Measure("worst_day_attainment", "worst day %", ".1f", 100),
    Measure("energy_j_per_token", "J/token"),
    Measure("cost_per_million_tokens", "$/M tokens"),
    Measure("switches", "changes", ".0f"),
    *(
        Measure(f"share_{kind}_fraction", f"{kind} %", ".0f", 100)
        for kind in ("data", "model", "hybrid")
    ),
)


def summarise(scenario: AllocationScenario, runs: Sequence[AllocationOutcomes]) -> dict[str, float]:
    """Measure all runs of one policy together; docs/metrics.md defines every key."""
    outs = np.concatenate([run.outs for run in runs])
    offered, violations = outs[:, dyn.OFFERED].sum(), outs[:, dyn.VIOLATIONS].sum()
    hours = len(outs) * scenario.slot_s / 3600
    tokens = outs[:, dyn.SERVED].sum() * scenario.generated_tokens
    usd = outs[:, dyn.USD].sum()
    table = plan_table(scenario)
    kinds = [table.plans[i].parallelism for run in runs for i in run.plans.tolist() if i >= 0]
    shares = {
        f"share_{kind}_fraction": float(np.mean([k.startswith(kind) for k in kinds]))
        if kinds
        else np.nan
        for kind in ("data", "model", "hybrid")
    }
    return {
        "reward": float(outs[:, dyn.REWARD].mean()),
        "cost_per_hour": float(usd / hours),
        "cost_with_penalty": float(daily_cost(scenario, runs).mean()),
        "cost_per_million_tokens": float(1e6 * usd / tokens),
        "goodput_fraction": float(1 - violations / offered),
        "slo_attainment": float(1 - violations / offered),
        "worst_day_attainment": _worst_day(scenario, runs),
        "dropped_fraction": float(outs[:, dyn.DROPPED].sum() / offered),
        "energy_j_per_token": float(outs[:, dyn.ENERGY_J].sum() / tokens),
        "switches": float(outs[:, dyn.SWITCHED].sum() / len(runs)),
        "refused": float(sum(run.num_refused for run in runs)),
        **shares,
    }


def daily_cost(scenario: AllocationScenario, runs: Sequence[AllocationOutcomes]) -> FloatArray:
    """Dollars per hour of every day, SLO violations included, mean over draws; shape (days,)."""
    per_slot = np.mean([_cost(scenario, run) for run in runs], axis=0)
    days = max(1, len(per_slot) // scenario.slots_per_day)
    slots_per_day = len(per_slot) // days
    return np.asarray(per_slot[: days * slots_per_day].reshape(days, slots_per_day).mean(axis=1))


def _cost(scenario: AllocationScenario, outcomes: AllocationOutcomes) -> FloatArray:
    if scenario.objective is None:
        # Of a bound the reward alone is known.
        usd = -outcomes.column(dyn.REWARD)
    else:
        usd = outcomes.column(dyn.USD) + scenario.violation_usd * outcomes.column(dyn.VIOLATIONS)
    return usd * 3600 / scenario.slot_s


def _worst_day(scenario: AllocationScenario, runs: Sequence[AllocationOutcomes]) -> float:
    slots_per_day = scenario.slots_per_day
    days = []
    for run in runs:
        for start in range(0, len(run.outs) - slots_per_day + 1, slots_per_day):
            day = run.outs[start : start + slots_per_day]
            days.append(1 - day[:, dyn.VIOLATIONS].sum() / day[:, dyn.OFFERED].sum())
    return float(min(days)) if days else np.nan
