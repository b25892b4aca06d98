"""Tune the allocation rules of a scenario and search its planner, all on the training part.

    python pipelines/tune_allocation.py --scenario a100x8_13b

writes tokenyard/scenarios/tuned/allocation/<scenario>.json (best static plan, autoscalers) and, of
five searches, the one that is best on training days with other noise as
tokenyard/artifacts/allocation/<scenario>.npz. `--searches` keeps all of them for evaluation.
"""

from __future__ import annotations

import itertools
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from tokenyard.allocation.demand import demand_source
from tokenyard.allocation.dynamics import REWARD
from tokenyard.allocation.planner import NUM_PARAMETERS
from tokenyard.allocation.policies.autoscaler import AutoscalerRule, family, tensor_degrees
from tokenyard.allocation.policies.rules import TunedAllocation
from tokenyard.allocation.scenario import AllocationScenario, load_allocation
from tokenyard.allocation.search import AllocationSearch, AllocationSearchConfig
from tokenyard.allocation.simulator import AllocationOutcomes
from tokenyard.provenance import git_sha
from tokenyard.sim.allocation_run import StreamRunner
from tokenyard.types import FloatArray

ROOT = Path(__file__).resolve().parent.parent / "tokenyard"
OUT_UTILISATIONS = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6)
IN_UTILISATIONS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
WINDOWS = (1, 2, 6)
AHEAD = (1, 3, 6)
COOLDOWNS = (0, 6)


@dataclass(frozen=True)
class Args:
    """Tune rules and search planners, scenario by scenario."""

    scenario: tuple[str, ...]
    """Names or YAML paths."""
    seeds: int = 5
    """Independent searches; 0 tunes the rules only."""
    generations: int = AllocationSearchConfig.num_generations
    root: Path = ROOT
    """The package's folder, into which results are written."""
    searches: Path | None = None
    """Folder for the policy of every search, <scenario>-s<seed>.npz."""


def main(args: Args) -> None:
    for scenario in [load_allocation(name) for name in args.scenario]:
        tune_scenario(args, scenario)


def tune_scenario(args: Args, scenario: AllocationScenario) -> None:
    runner = StreamRunner(scenario, demand_source(scenario).train(0))
    tuned = tune(runner)
    folder = args.root / "scenarios" / "tuned" / "allocation"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{scenario.name}.json"
    path.write_text(tuned.model_dump_json(indent=2) + "\n", encoding="utf-8")
    print(tuned.model_dump_json(indent=2))
    if not args.seeds:
        return
    config = AllocationSearchConfig(num_generations=args.generations)
    found: list[tuple[float, AllocationSearch]] = []
    for seed in range(args.seeds):
        search = AllocationSearch(scenario, config, seed)
        for _ in range(args.generations):
            search.step()
        found.append((search.validate(), search))
        print(f"search {seed}: {found[-1][0]:.4f} per slot in validation", flush=True)
        if args.searches:
            args.searches.mkdir(parents=True, exist_ok=True)
            search.artifact().save(args.searches / f"{scenario.name}-s{seed}.npz")
    start = found[0][1].validate(np.zeros(NUM_PARAMETERS))
    cost, best = min(found, key=lambda one: one[0])
    print(f"the planner as it is: {start:.4f}; best: search {best.seed}, {cost:.4f}")
    if cost > start:
        # No champion is worse in validation than where it began.
        best.mean, cost = np.zeros(NUM_PARAMETERS), start
    metrics = {"validation_cost_per_slot": cost, "planner_cost_per_slot": start}
    lineage = {
        "command": shlex.join(["python", *sys.argv]),
        "git_sha": git_sha(),
        "seed": str(best.seed),
        "env_steps": str(best.env_steps),
    }
    target = args.root / "artifacts" / "allocation"
    target.mkdir(parents=True, exist_ok=True)
    best.artifact(metrics, lineage).save(target / f"{scenario.name}.npz")


def tune(runner: StreamRunner) -> TunedAllocation:
    """Try every plan, and every autoscaler of the grid, on one draw of the training part."""
    table, slots = runner.sim.table, runner.stream.num_slots
    statics = [cost(runner.run_plans(np.full(slots, p))) for p in range(table.num_plans)]
    static = int(np.argmin(statics))
    back = {window: runner.highest(window) for window in WINDOWS}
    ahead = {window: runner.forecasts[:, :window].max(axis=1) for window in AHEAD}
    reactive, reactive_cost = best_rule(runner, back, (1, 2))
    forecasting, forecasting_cost = best_rule(runner, ahead, AHEAD)
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


def best_rule(
    runner: StreamRunner, signals: dict[int, FloatArray], out_windows: tuple[int, ...]
) -> tuple[AutoscalerRule, float]:
    """The autoscaler of least cost over the grid, and its cost per slot."""
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
            found = cost(outcomes)
            if found < least:
                least = found
                best = AutoscalerRule(
                    tensor_parallel=degree,
                    out_utilisation=out,
                    in_utilisation=back,
                    out_window=out_window,
                    in_window=in_window,
                    cooldown_slots=cooldown,
                )
    assert best is not None
    return best, least


def cost(outcomes: AllocationOutcomes) -> float:
    """Mean cost per slot: minus the reward."""
    return -float(outcomes.column(REWARD).mean())


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
