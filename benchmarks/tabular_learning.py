"""How long tabular learners of allocation take, and what their policies cost on the test part.

python benchmarks/tabular_learning.py --steps 20000000
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import get_args

import tyro
from rich.table import Table

from tokenyard.allocation.artifact import learned_allocation
from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.dynamics import REWARD
from tokenyard.allocation.paper.simulator import Update
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.simulator.run import run_allocation
from tokenyard.allocation.tabular import TabularConfig, TabularLearner
from tokenyard.provenance import ResultFile, report


@dataclass(frozen=True)
class Args:
    """Train Q-learning, SARSA and the printed update, and measure them."""

    scenario: str = "a100x8_13b"
    """Name or YAML path."""
    steps: int = 20_000_000
    """Slots that each learns from."""
    seeds: int = 5
    json: ResultFile | None = None
    """Write the result rows to this file."""


def main(args: Args) -> None:
    """Train, evaluate on one draw of the test part, print."""
    scenario = load_allocation(args.scenario)
    stream = demand_source(scenario).test(0)
    rows: list[dict[str, str | float]] = []
    for update in get_args(Update):
        for centred in (True, False):
            for seed in range(args.seeds):
                centring = TabularConfig().centring if centred else 0.0
                config = TabularConfig(update, num_steps=args.steps, centring=centring)
                TabularLearner(scenario, config, seed).step(1)  # Compiles.
                learner = TabularLearner(scenario, config, seed)
                started_s = time.process_time()
                learner.step(args.steps)
                cpu_s = time.process_time() - started_s
                outcomes = run_allocation(scenario, stream, learned_allocation(learner.artifact()))
                cost = -float(outcomes.column(REWARD).mean()) * 3600 / scenario.slot_s
                rows.append(
                    {
                        "policy": update,
                        "rewards": "centred" if centred else "as they are",
                        "scenario": scenario.name,
                        "seed": seed,
                        "env_steps": learner.env_steps,
                        "cpu_s": cpu_s,
                        "cost_with_penalty": cost,
                        "switches": float((outcomes.plans[1:] != outcomes.plans[:-1]).sum()),
                    }
                )
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{v:,.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    report(table, rows, args.json, None)


if __name__ == "__main__":
    main(tyro.cli(Args))
