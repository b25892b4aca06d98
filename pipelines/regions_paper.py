"""Studies of regions beside the paper's: loads, prediction accuracy, ablation, failures, micro.

python pipelines/regions_paper.py accuracy --scenario abilene --json accuracy.json
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tokenyard.evaluation import compare, run_candidates
from tokenyard.problem import Row
from tokenyard.provenance import write_result
from tokenyard.regions.forecast import (
    DemandForecaster,
    NoisyOracle,
    fit_seasonal,
    sd_for_accuracy,
)
from tokenyard.regions.problem import PROBLEM, episodes
from tokenyard.regions.scenario import Failure, RegionScenario, load_regions

Study = Literal["loads", "accuracy", "ablation", "failures"]
LOADS = (0.6, 0.8, 0.95)
ACCURACIES = (0.1, 0.3, 0.5, 0.7, 0.9)
FAILURES = {
    "none": (),
    "region down for 15 minutes": (Failure(kind="region_down", start_slot=200, num_slots=20),),
    "half of a region's capacity lost for 15 minutes": (
        Failure(kind="capacity_lost", start_slot=200, num_slots=20),
    ),
    "all links five times slower for 15 minutes": (
        Failure(kind="links_slow", start_slot=200, num_slots=20),
    ),
}


@dataclass(frozen=True)
class Args:
    """Run one study on one scenario."""

    study: Annotated[Study, tyro.conf.Positional]
    scenario: str = "abilene"
    """Name or YAML path."""
    policies: str = "round_robin,skylb,sdib,prox_ot_forecast,prox_ot_forecast_live_cost,torta"
    """By name, separated by commas; `ablation` takes the first and the last."""
    streams: int = 3
    seed: int = 2026
    json: Path | None = None
    """Write the result rows to this file."""


@dataclass(frozen=True)
class Case:
    """One setting of a study."""

    name: str
    scenario: RegionScenario
    policies: tuple[str, ...]
    forecaster: DemandForecaster | None = None


def cases(args: Args) -> Iterator[Case]:
    scenario, policies = load_regions(args.scenario), tuple(args.policies.split(","))
    if args.study == "loads":
        for load in LOADS:
            demand = scenario.demand.model_copy(update={"load": load})
            yield Case(f"load {load:g}", scenario.model_copy(update={"demand": demand}), policies)
    elif args.study == "failures":
        for name, failures in FAILURES.items():
            yield Case(name, scenario.model_copy(update={"failures": failures}), policies)
    elif args.study == "accuracy":
        streams = PROBLEM.streams(scenario, "evaluation", 1, args.seed + 1).streams
        for accuracy in ACCURACIES:
            sd = sd_for_accuracy(accuracy, streams)
            oracle = NoisyOracle(sd, scenario.forecast_slots, args.seed)
            yield Case(f"accuracy {accuracy:g}", scenario, policies, oracle)
    else:
        for rule in ("earliest", "score"):
            search = rule == "score"
            micro = scenario.micro.model_copy(update={"rule": rule, "local_search": search})
            changed = scenario.model_copy(update={"micro": micro})
            yield Case(f"micro {rule}", changed, (policies[0], policies[-1]))


def run(args: Args, case: Case) -> list[Row]:
    scenario, forecaster = case.scenario, case.forecaster or fit_seasonal(case.scenario)
    candidates = [PROBLEM.candidate(scenario, name) for name in case.policies]
    streams = episodes(scenario, "evaluation", args.streams, args.seed, forecaster)
    runs = run_candidates(candidates, scenario, streams, args.seed)
    rows = compare(PROBLEM, scenario, streams, runs, case.policies[0])
    return [{"study": args.study, "case": case.name, **row} for row in rows]


def main(args: Args) -> None:
    args = replace(args, policies=args.policies.replace(" ", ""))
    rows: list[Row] = []
    for case in cases(args):
        for row in run(args, case):
            rows.append(row)
            print(
                f"{row['case']}: {row['policy']} response {row['mean_response_s']:.2f} s, "
                f"p99 {row['p99_response_s']:.0f} s, total {row['total_cost']:.1f} $, overhead "
                f"{100 * float(row['overhead_fraction']):.2f} %, violations "
                f"{100 * float(row['deadline_miss_fraction']):.1f} %, dropped "
                f"{100 * float(row['dropped_fraction']):.2f} %, restarted "
                f"{row['restarted_tasks']:.0f}, migrated {row['migrated_tasks']:.0f}, rerouted "
                f"{row['rerouted_tasks']:.0f}, unaccounted {row['unaccounted_tasks']:.0f}",
                flush=True,
            )
        if args.json:
            write_result(args.json, shlex.join(sys.argv), args.seed, rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
