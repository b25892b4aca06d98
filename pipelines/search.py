"""Search policies without gradients; the best on validation is kept.

This is how the shipped champions are made; docs/results has the commands.

    python pipelines/search.py policy --scenario poisson_085 --out tokenyard/artifacts/routing
    python pipelines/search.py region-rules --rules skylb,ot_slack
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from tokenyard.problem import Row, TrainedPolicy
from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.regions.policies import RECIPES
from tokenyard.regions.scenario import load_regions
from tokenyard.regions.search import KnobSearch, RegionSearchConfig
from tokenyard.routing import search_study
from tokenyard.routing.choice import CHANGE, LOSSES, refused
from tokenyard.routing.scenario import load_scenario


@dataclass(frozen=True, kw_only=True)
class Policy(search_study.SearchStudy):
    """Search where requests go and in which order they wait; export the best of all searches."""

    scenario: str = "poisson_085"
    """Name or YAML path."""
    out: Path | None = None
    """Folder for <scenario>.npz; nothing is written without it."""
    searches: Path | None = None
    """Folder for the policy of every search, <scenario>-o<objective>-s<seed>.npz, kept or not."""
    jobs: int = 2
    """Processes."""
    json: ResultFile | None = None
    """Where to write the rows."""


@dataclass(frozen=True)
class RegionRules:
    """Tune the knobs of regional rules over drawn layouts."""

    rules: str | None = None
    """By name, separated by commas; by default all that have knobs."""
    scenarios: str = "abilene,polska,gabriel,cost266"
    """Names or YAML paths, separated by commas."""
    generations: int = RegionSearchConfig.num_generations
    population: int = RegionSearchConfig.population
    slots: int = RegionSearchConfig.slots
    seed: int = 0
    json: ResultFile | None = None
    """Where to write the rows."""


Args = (
    Annotated[Policy, tyro.conf.subcommand("policy")]
    | Annotated[RegionRules, tyro.conf.subcommand("region-rules")]
)


def search_policy(args: Policy) -> list[Row]:
    scenario = load_scenario(args.scenario)
    found = search_study.run_study(scenario, args, args.jobs)
    best = search_study.best_of(found)
    numbers = [number for number in args.objectives for _ in range(args.seeds)]
    for one, number in zip(found, numbers, strict=True):
        name = f"{scenario.name}-o{number}-s{one.row['seed']}"
        save(one.policy, args.searches, name, quiet=True)
    found.sort(key=lambda one: float(one.row[CHANGE]))
    terms = ("cvar99", "violation", "tail_guard")
    table = Table("cvar99, violation, guard", "seed", *BESIDE_THE_RULE)
    for one in found:
        objective = ", ".join(str(one.row[f"objective_{term}"]) for term in terms)
        cells = (objective, str(one.row["seed"]), *beside_the_rule(one.row))
        table.add_row(*cells, style="bold" if one is best else "")
    Console().print(table)
    if best is None:
        print(refused(scenario.name))
    else:
        save(best.policy, args.out, scenario.name)
    return [one.row for one in found]


def tune_region_rules(args: RegionRules) -> list[Row]:
    scenarios = [load_regions(name) for name in args.scenarios.split(",")]
    config = RegionSearchConfig(args.population, slots=args.slots, num_generations=args.generations)
    tunable = [name for name, recipe in RECIPES.items() if recipe.tunable]
    rows: list[Row] = []
    for name in args.rules.split(",") if args.rules else tunable:
        search = KnobSearch(name, scenarios, config, args.seed)
        while search.generation < args.generations:
            search.step()
        cost, knobs = search.validate(), search.knobs(search.mean)
        print(f"{name}: cost over start {cost:.4f} in validation with {knobs}", flush=True)
        live = {f"live_{key}": value for key, value in asdict(knobs.live).items()}
        rows.append(
            {"rule": name, "validation_cost_over_start": cost, "cap": knobs.cap,
             "smoothing": knobs.smoothing, **live}
        )  # fmt: skip
    return rows


BESIDE_THE_RULE = ("mean", "p99", "at most", "violations", "mean, all parts", "losses")


def beside_the_rule(row: Mapping[str, Any]) -> Sequence[str]:
    return (
        f"{row['delta_mean_fraction']:+.1%}",
        f"{row['delta_p99_fraction']:+.1%}",
        f"{row['delta_p99_ci_high']:+.1%}",
        f"{row['delta_slo_violation']:+.2%}",
        f"{row[CHANGE]:+.1%}",
        f"{row[LOSSES]:.0f}",
    )


def save(policy: TrainedPolicy, folder: Path | None, name: str, quiet: bool = False) -> None:
    """Write a policy into a folder, where there is one to write to."""
    if folder is None:
        return
    path = folder / f"{name}.npz"
    policy.save(path)
    if not quiet:
        print(f"wrote {path} ({policy.sha256})")


def run(args: Args) -> list[Row]:
    if isinstance(args, Policy):
        return search_policy(args)
    return tune_region_rules(args)


def main(args: Args) -> None:
    try:
        rows = run(args)
    except ValueError as error:
        sys.exit(f"search: {error}")
    if args.json is not None:
        write_result(args.json, command_line(), getattr(args, "seed", 0), rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
