"""The allocation half of `evaluate.py`: which scenarios it has, and how its tables look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.policies import ALLOCATION_BASELINES
from tokenyard.allocation.scenario import AllocationScenario, allocation_names, load_allocation
from tokenyard.allocation_evaluation import (
    BOUNDS,
    TRAINED,
    AllocationCandidate,
    Row,
    compare_allocation,
    resolve_allocation_candidate,
    run_candidates,
)
from tokenyard.artifact import RegistryLookup

SUITE = (
    "a100x8_7b",
    "a100x8_13b",
    "a100x8_13b_tight",
    "a100x8_70b",
    "h100x8_13b",
    "h100x8_70b",
    "l4x4_7b",
    "mixed_13b",
)
DEFAULT_POLICIES = (*ALLOCATION_BASELINES, *TRAINED, *BOUNDS)
DEFAULT_BASELINE = "autoscaler_tuned"
DEFAULT_STREAMS = 5


def is_allocation(scenario: str | None, suite: str | None) -> bool:
    """Whether a command line means allocation: by suite, shipped name, or what a file says."""
    if suite is not None or scenario is None:
        return suite == "allocation"
    if scenario in allocation_names():
        return True
    path = Path(scenario)
    is_file = path.suffix in (".yaml", ".yml") and path.is_file()
    return is_file and "problem: allocation" in path.read_text(encoding="utf-8")


def prepare(
    names: list[str], policies: list[str], registry: RegistryLookup | None
) -> list[tuple[AllocationScenario, list[AllocationCandidate]]]:
    """Resolve every scenario and name, so that no mistake shows after a long run.

    Raises:
        ValueError: Something is unknown or missing.
    """
    scenarios = [load_allocation(name) for name in names]
    return [
        (one, [resolve_allocation_candidate(name, one, registry) for name in policies])
        for one in scenarios
    ]


def evaluate_all(
    prepared: list[tuple[AllocationScenario, list[AllocationCandidate]]],
    baseline: str,
    num_streams: int,
    seed: int,
    console: Console,
    keep: Callable[[list[Row]], None],
) -> list[Row]:
    """Run every scenario and print its table; what is done is kept."""
    rows: list[Row] = []
    for scenario, candidates in prepared:
        rows += evaluate(scenario, candidates, baseline, num_streams, seed, console)
        keep(rows)
    return rows


def evaluate(
    scenario: AllocationScenario,
    candidates: list[AllocationCandidate],
    baseline: str,
    num_streams: int,
    seed: int,
    console: Console,
) -> list[Row]:
    """Run one scenario and print its table."""
    runs = run_candidates(scenario, candidates, num_streams, seed)
    rows = compare_allocation(scenario, runs, baseline)
    console.print(f"\n[bold]{scenario.name}[/]: {scenario.description}")
    console.print(f"{num_streams} draws of noise; {demand_source(scenario).origin}")
    for one in candidates:
        if one.source != "baseline":
            console.print(f"{one.name}: {one.source}")
    console.print(allocation_table(rows, baseline))
    return rows


def allocation_table(rows: list[Row], baseline: str) -> Table:
    """Lay out costs, promises and changes of plan."""
    table = Table(
        title=f"cost with penalty: paired difference to {baseline} by day [95 % interval]",
        title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    columns = ["policy", "$/h", "$/h with missed", "difference %", "in time %", "worst day %",
               "J/token", "$/M tokens", "changes", "data/model/hybrid %"]  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for row in sorted(rows, key=lambda row: -float(row["cost_with_penalty"])):
        low, high = float(row["delta_cost_ci_low"]), float(row["delta_cost_ci_high"])
        shares = (row[f"share_{kind}_fraction"] for kind in ("data", "model", "hybrid"))
        table.add_row(
            str(row["policy"]),
            f"{row['cost_per_hour']:.2f}",
            f"{row['cost_with_penalty']:.2f}",
            ""
            if row["policy"] == baseline
            else f"{100 * float(row['delta_cost_fraction']):+.1f} "
            f"\\[{100 * low:+.1f}, {100 * high:+.1f}]",
            f"{100 * float(row['slo_attainment']):.2f}",
            f"{100 * float(row['worst_day_attainment']):.1f}",
            f"{row['energy_j_per_token']:.2f}",
            f"{row['cost_per_million_tokens']:.2f}",
            f"{row['switches']:.0f}",
            "/".join(f"{100 * float(share):.0f}" for share in shares),
        )
    return table
