"""Where the allocator's loop ends under constant load, against the best of all plans.

python benchmarks/allocator_loop.py

The allocator of the gateway itself decides, against a pool of replicas that take the scenario's
restart time to start, and Poisson arrivals. Told is what its last plans cost per slot over the
cheapest of all feasible plans, found by trying each, over the cheapest of those that can be entered
and left again while a replica serves, and the most times that it turned back to the
plan before the last within ten minutes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tyro
from rich.table import Table

from serve_app.allocation.allocator import Allocator
from serve_app.allocation.plans import make_plan_policy
from serve_app.allocation.transition import Held, Shape, is_reachable
from tokenyard.allocation.scenario import AllocationScenario, load_allocation
from tokenyard.allocation.telemetry import SlotRecord
from tokenyard.allocation.types import Plan
from tokenyard.problem import Row
from tokenyard.provenance import ResultFile, report

_WINDOW_S = 600.0
_TICKS = 4


@dataclass(frozen=True)
class Args:
    """Run the allocator's loop under constant load."""

    scenarios: tuple[str, ...] = (
        "a100x8_13b", "a100x8_13b_tight", "a100x8_70b", "h100x8_13b", "h100x8_70b", "l4x4_7b",
    )  # fmt: skip
    """Allocation scenarios."""
    policies: tuple[str, ...] = ("autoscaler_tuned", "myopic_no_switching", "planner")
    """Who decides."""
    shares: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    """Loads, as shares of the pool's goodput capacity."""
    slots: int = 144
    """Slots; the second half counts."""
    seed: int = 0
    """Of the arrivals."""
    json: ResultFile | None = None
    """File for the rows."""


class SlowPool:
    """Replicas that take a while to start, and none to stop."""

    def __init__(self, restart_s: float) -> None:
        self.now_s = 0.0
        self.offered = 0
        self._restart_s = restart_s
        self._ready_at_s: dict[Shape, list[float]] = {}

    async def observe(self) -> dict[Shape, Held]:
        """Count who is ready by now."""
        held = {}
        for shape, at_s in self._ready_at_s.items():
            ready = sum(one <= self.now_s for one in at_s)
            if at_s:
                held[shape] = Held(len(at_s), ready, len(at_s) - ready)
        return held

    async def limit_batch(self, shape: Shape, max_batch: int) -> bool:
        """Nothing runs here that could be limited."""
        return True

    async def want(self, shape: Shape, count: int) -> None:
        """Start or stop; those that are not ready yet stop first."""
        at_s = self._ready_at_s.setdefault(shape, [])
        at_s.extend([self.now_s + self._restart_s] * (count - len(at_s)))
        del at_s[count:]

    def num_offered(self) -> int:
        """Count what the benchmark has offered."""
        return self.offered

    def num_waiting(self) -> int:
        """Queues are not modelled."""
        return 0

    def record(self, slot: SlotRecord) -> None:
        """Forget it."""


async def run(
    scenario: AllocationScenario, policy: str, share: float, slots: int, seed: int
) -> Row:
    """Let the loop run; one row."""
    rng = np.random.default_rng(seed)
    pool = SlowPool(scenario.restart_s)
    allocator = Allocator(
        scenario, policy, make_plan_policy(policy, scenario), pool, clock_s=lambda: pool.now_s
    )  # fmt: skip
    demand = share * allocator.table.pool_goodput_capacity_per_s
    plans: list[Plan] = []
    for _ in range(slots):
        pool.offered += int(rng.poisson(demand * scenario.slot_s))
        for _ in range(_TICKS):
            pool.now_s += scenario.slot_s / _TICKS
            await allocator.tick()
        plans.append(allocator.plan)

    def cost(plan: Plan) -> float:
        usd, violations = allocator.predicted(plan, demand)
        return usd + scenario.violation_usd * violations

    settled = plans[slots // 2 :]
    best = min(allocator.table.plans, key=cost)
    mean = float(np.mean([cost(plan) for plan in settled]))
    window = max(int(_WINDOW_S / scenario.slot_s) + 1, 3)
    return {
        "scenario": scenario.name,
        "policy": policy,
        "load_share": share,
        "usd_per_slot": mean,
        "best_usd_per_slot": cost(best),
        "cost_over_best": mean / cost(best),
        "cost_over_attainable": mean / min(cost(plan) for plan in attainable(allocator)),
        "best_plan": f"{best.parallelism} x{best.num_gpus}",
        "last_plan": f"{settled[-1].parallelism} x{settled[-1].num_gpus}",
        "most_reversals": max(
            _reversals(settled[i : i + window]) for i in range(len(settled) - window + 1)
        ),
        "changes": sum(a != b for a, b in itertools.pairwise(settled)),
    }


def attainable(allocator: Allocator) -> list[Plan]:
    """Plans that can be entered and left without a pause, from where the loop is."""
    budget, minimum = allocator.budget, allocator.settings.min_replicas
    now = allocator.plan
    return [
        plan for plan in allocator.table.plans
        if is_reachable(now, plan, budget, minimum) and is_reachable(plan, now, budget, minimum)
    ]  # fmt: skip


def _reversals(plans: Sequence[Plan]) -> int:
    steps = [key for key, _ in itertools.groupby(plans)]
    return sum(one == two for one, two in zip(steps, steps[2:], strict=False))


def main(args: Args) -> None:
    combinations = itertools.product(args.scenarios, args.policies, args.shares)
    rows = [
        asyncio.run(run(load_allocation(name), policy, share, args.slots, args.seed))
        for name, policy, share in combinations
    ]
    table = Table(title="the allocator's loop under constant load")
    for column in (
        "scenario",
        "policy",
        "load",
        "cost / best",
        "/ attainable",
        "ends with",
        "best",
        "reversals",
    ):
        table.add_column(column)
    for row in rows:
        table.add_row(
            str(row["scenario"]), str(row["policy"]), f"{row['load_share']:.1f}",
            f"{row['cost_over_best']:.3f}", f"{row['cost_over_attainable']:.3f}",
            str(row["last_plan"]), str(row["best_plan"]), str(row["most_reversals"]),
        )  # fmt: skip
    report(table, rows, args.json, args.seed)


if __name__ == "__main__":
    main(tyro.cli(Args))
