"""The regional half of `evaluate.py`: which scenarios it has, and how its tables look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tokenyard.artifact import RegistryLookup
from tokenyard.regions.policies import REGION_BASELINES
from tokenyard.regions.scenario import RegionScenario, load_regions, region_names
from tokenyard.regions_evaluation import (
    LEARNED,
    Measured,
    RegionCandidate,
    Row,
    compare_regions,
    margins,
    resolve_region_candidate,
    run_region_candidates,
)

SUITE = ("abilene", "polska", "gabriel", "cost266")
DEFAULT_POLICIES = (*REGION_BASELINES, *LEARNED)
DEFAULT_BASELINE = "skylb"
DEFAULT_STREAMS = 5
RIVALS = (
    "skylb", "sdib", "round_robin", "prox_ot_forecast", "prox_ot_forecast_live",
    "prox_ot_forecast_live_cost", "receding_horizon", "receding_horizon_live",
    "receding_horizon_live_cost",
)  # fmt: skip
"""Policies that `torta` is set beside, one by one."""


def is_regions(scenario: str | None, suite: str | None) -> bool:
    """Whether a command line means regions: by suite, shipped name, or what a file says."""
    if suite is not None or scenario is None:
        return suite == "regions"
    if scenario in region_names():
        return True
    path = Path(scenario)
    is_file = path.suffix in (".yaml", ".yml") and path.is_file()
    return is_file and "problem: regions" in path.read_text(encoding="utf-8")


def prepare(
    names: list[str], policies: list[str], registry: RegistryLookup | None
) -> list[tuple[RegionScenario, list[RegionCandidate]]]:
    """Resolve every scenario and name, so that no mistake shows after a long run.

    Raises:
        ValueError: Something is unknown or missing.
    """
    scenarios = [load_regions(name) for name in names]
    return [
        (one, [resolve_region_candidate(name, one, registry) for name in policies])
        for one in scenarios
    ]


def evaluate_all(
    prepared: list[tuple[RegionScenario, list[RegionCandidate]]],
    baseline: str,
    num_streams: int,
    seed: int,
    console: Console,
    keep: Callable[[list[Row]], None],
) -> list[Row]:
    """Run every scenario and print its tables; what is done is kept, as a suite takes minutes."""
    rows: list[Row] = []
    for scenario, candidates in prepared:
        measured = run_region_candidates(scenario, candidates, num_streams, seed)
        rows += compare_regions(scenario, measured, baseline)
        beside = margins(scenario, measured, LEARNED[0], RIVALS) if LEARNED[0] in measured else {}
        rows += [row for other, row in beside.items() if other != baseline]
        _print(console, scenario, candidates, measured, baseline, num_streams)
        keep(rows)
    return rows


def _print(
    console: Console,
    scenario: RegionScenario,
    candidates: list[RegionCandidate],
    measured: Measured,
    baseline: str,
    num_streams: int,
) -> None:
    console.print(f"\n[bold]{scenario.name}[/]: {scenario.description}")
    console.print(f"{num_streams} streams of {scenario.num_slots} slots, load "
                  f"{scenario.demand.load:g}, {scenario.num_servers} servers")  # fmt: skip
    for one in candidates:
        if one.source != "baseline":
            console.print(f"{one.name}: {one.source}")
    console.print(region_table(compare_regions(scenario, measured, baseline), baseline))
    if LEARNED[0] in measured:
        console.print(margin_table(list(margins(scenario, measured, "torta", RIVALS).values())))


def region_table(rows: list[Row], baseline: str) -> Table:
    """Lay out response, costs and promises."""
    table = _table(f"total cost: paired difference to {baseline} [95 % interval]", "policy")
    columns = ["response s", "p50/p95/p99", "network/wait/serve", "balance", "energy $",
               "overhead %", "switching $", "late $", "total $", "difference %", "missed %",
               "dropped %", "decision ms"]  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: -float(row["total_cost"])):
        table.add_row(
            str(row["policy"]),
            f"{row['mean_response_s']:.2f}",
            "/".join(f"{row[f'{p}_response_s']:.0f}" for p in ("p50", "p95", "p99")),
            f"{row['network_s']:.2f}/{row['waiting_s']:.2f}/{row['inference_s']:.2f}",
            f"{row['load_balance']:.3f}",
            f"{row['energy_cost']:.1f}",
            f"{100 * float(row['overhead_fraction']):.2f}",
            f"{row['switching_cost']:.1f}",
            f"{row['lateness_cost']:.1f}",
            f"{row['total_cost']:.1f}",
            "" if row["policy"] == baseline else _interval(row, "cost"),
            f"{100 * float(row['deadline_miss_fraction']):.1f}",
            f"{100 * float(row['dropped_fraction']):.2f}",
            f"{row['decision_ms']:.2f}",
        )
    return table


def margin_table(rows: list[Row]) -> Table:
    """Lay out what the learned policy gains over each rival."""
    table = _table("torta: paired differences in % [95 % interval]", "to")
    names = {"mean_response_s": "response", "energy_cost": "energy",
             "overhead_fraction": "overhead", "load_balance": "balance",
             "cost": "total cost"}  # fmt: skip
    for name in names.values():
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(str(row["baseline"]), *(_interval(row, key) for key in names))
    return table


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    return table


def _interval(row: Row, key: str) -> str:
    fields = (f"delta_{key}_fraction", f"delta_{key}_ci_low", f"delta_{key}_ci_high")
    estimate, low, high = (100 * float(row[field]) for field in fields)
    return f"{estimate:+.1f} \\[{low:+.1f}, {high:+.1f}]"
