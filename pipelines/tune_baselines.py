"""Tune the hand rules that have parameters, of any problem.

    python pipelines/tune_baselines.py --scenario poisson_085
    python pipelines/tune_baselines.py --scenario a100x8_13b
    python pipelines/tune_baselines.py --suite regions --only skylb,ot_slack

Writes tokenyard/scenarios/tuned/<problem>/<scenario>.json, which ships with the package. All of it
is learned from training streams: of routing also the knobs of public routers' rules, where their
signals exist (docs/rules.md); of allocation the best static plan and autoscalers. Rules of regions
are tuned over drawn layouts of all scenarios together, and their knobs are printed only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

import tokenyard
from tokenyard.allocation.policies.rules import TunedAllocation
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.tuning import tune_allocation
from tokenyard.config import at_least_one
from tokenyard.problem import PROBLEMS, AnyProblem, Row, find_problem
from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.regions.policies import REGION_BASELINES
from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.search import KnobSearch, RegionSearchConfig
from tokenyard.routing.policies.public import PUBLIC_RULES, TUNED_PREFIX
from tokenyard.routing.policies.tuned import FLEET_GRIDS, TunedRules, load_tuned
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.tuning import tune_loads, tune_orders, tune_public_rules, tune_rules

TUNED = Path(tokenyard.__file__).parent / "scenarios" / "tuned"
ONLY = {"public": tune_public_rules, "orders": tune_orders, "loads": tune_loads}
COLUMNS = {
    "routing": ("score", "score, s"),
    "allocation": ("score", "score, $ per slot"),
    "regions": ("validation_cost_over_start", "cost over untuned"),
}
"""Of every problem the key by which rules are tuned, and its heading."""


@dataclass(frozen=True)
class Args:
    """Tune the hand rules on training streams and write their parameters."""

    scenario: str | None = None
    """Name or YAML path; all of routing that ship, or a suite's, when it is left out."""
    suite: str | None = None
    """The scenarios of one suite of evaluate.py."""
    streams: int = 12
    """Training streams that every value of a parameter is tried on; of allocation it is one, the
    whole training part."""
    requests: int | None = None
    """Requests per stream; the scenario's own number when it is left out."""
    seed: int = 0
    """Of the training streams, or of the layouts of regions."""
    out: Path | None = None
    """Folder of the parameter files; by default that of the package."""
    only: str | None = None
    """Of routing `public`, the rules of public routers, or `orders`, beside what the file has of
    others; or `loads`: score what may ship at several loads. Of regions names of rules, separated
    by commas."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


def tune_regions(
    scenarios: Sequence[RegionScenario], rules: Sequence[str], seed: int,
    config: RegionSearchConfig | None = None,
) -> list[Row]:  # fmt: skip
    """Tune each rule over all scenarios, a row each; ValueError: it is unknown, or has no knobs."""
    rows: list[Row] = []
    searches = [KnobSearch(name, scenarios, config, seed) for name in rules]
    for name, search in zip(rules, searches, strict=True):
        while search.generation < search.config.num_generations:
            search.step()
        knobs = search.knobs(search.mean)
        live = {f"live_{key}": value for key, value in asdict(knobs.live).items()}
        fields = {"cap": knobs.cap, "smoothing": knobs.smoothing, **live}
        parameters = ", ".join(f"{key} {value:.3g}" for key, value in fields.items())
        names = ",".join(scenario.name for scenario in scenarios)
        rows.append(
            {"scenario": names, "policy": name, "parameters": parameters,
             "validation_cost_over_start": search.validate(), **fields}
        )  # fmt: skip
    return rows


def tune(args: Args, scenario: Scenario | AllocationScenario) -> tuple[str, list[Row]]:
    """The file of a scenario's rules, and a row for each."""
    if isinstance(scenario, AllocationScenario):
        tuned = tune_allocation(scenario)
        return tuned.model_dump_json(indent=2), rows_of_allocation(tuned)
    if args.requests:
        scenario = scenario.model_copy(update={"requests_per_stream": args.requests})
    if args.only is None:
        rules = tune_rules(scenario, args.streams, args.seed)
    else:
        rules = ONLY[args.only](scenario, load_tuned(scenario.name), args.streams, args.seed)
    return rules.model_dump_json(indent=2), rows_of_routing(rules)


def rows_of_routing(rules: TunedRules) -> list[Row]:
    """One row per rule: its parameter and its score on the training streams."""
    order = ", ".join(f"{i}" for i in rules.sita_replicas)
    cuts = ", ".join(f"{cut:.0f}" for cut in rules.sita_cuts_tokens)
    parameters = {
        "sed": "none",
        "sed_reserve": f"above {rules.reserve_above_tokens:.0f} tokens",
        "sed_dump": f"replica {rules.dump_replica}",
        "sita": f"cuts at {cuts} tokens, replicas {order}",
    }
    for name, fields in FLEET_GRIDS.items():
        values = [f"{field} {getattr(rules.fleet, field):g}" for field in fields]
        parameters[name] = ", ".join(values) or "none"
    for name in PUBLIC_RULES:
        knobs_text = [f"{knob} {value:g}" for knob, value in rules.knobs.get(name, {}).items()]
        parameters[name] = "its makers'"
        parameters[TUNED_PREFIX + name] = ", ".join(knobs_text) or "its makers'"
    for name, knobs in rules.orders.items():
        parameters[name] = ", ".join(f"{knob} {value:g}" for knob, value in knobs.items())
    scores = rules.scores | rules.order_scores
    return [
        {
            "scenario": rules.scenario,
            "policy": name,
            "parameters": text,
            "score": scores[name],
        }
        for name, text in parameters.items()
        if name in scores
    ]


def rows_of_allocation(tuned: TunedAllocation) -> list[Row]:
    """One row per rule: its parameters, and its score, minus dollars per training slot."""
    rules = {
        "best_static": asdict(tuned.static_plan),
        "autoscaler_tuned": tuned.autoscaler.model_dump(),
        "autoscaler_forecast": tuned.forecast_autoscaler.model_dump(),
    }
    return [
        {
            "scenario": tuned.scenario,
            "policy": name,
            "parameters": ", ".join(f"{key} {value}" for key, value in rule.items()),
            "score": -tuned.train_usd_per_slot[name],
        }
        for name, rule in rules.items()
    ]


def names_of(args: Args) -> tuple[AnyProblem, list[str]]:
    """What is tuned; ValueError: an unknown suite, or rules that the problem does not have."""
    if args.scenario is None and args.suite is None:
        problem = PROBLEMS["routing"]()
    else:
        problem = find_problem(args.scenario, args.suite)
    if problem.name == "routing" and args.only is not None and args.only not in ONLY:
        raise ValueError(f"--only {args.only}: of routing it is one of {sorted(ONLY)}")
    if problem.name == "allocation" and args.only is not None:
        raise ValueError("--only is not for allocation: its rules are tuned together")
    if problem.name == "regions" and args.out is not None:
        raise ValueError("--out is not for regions: knobs are printed, and written with --json")
    if args.scenario is None and args.suite is None:
        return problem, problem.scenario_names()
    return problem, list(problem.suites[args.suite]) if args.suite else [str(args.scenario)]


def main(args: Args) -> None:
    rows: list[Row] = []
    try:
        at_least_one("--streams", args.streams)
        problem, names = names_of(args)
        out = args.out or TUNED / problem.name
        if problem.name == "regions":
            tunable = [name for name, recipe in REGION_BASELINES.items() if recipe.tunable]
            rules = tunable if args.only is None else args.only.split(",")
            rows = tune_regions([problem.load_scenario(name) for name in names], rules, args.seed)
            names = []
        for name in names:
            out.mkdir(parents=True, exist_ok=True)
            scenario = problem.load_scenario(name)
            text, tuned_rows = tune(args, scenario)
            (out / f"{scenario.name}.json").write_text(text + "\n", encoding="utf-8")
            rows += tuned_rows
    except ValueError as error:
        sys.exit(f"tune_baselines: {error}")
    key, heading = COLUMNS[problem.name]
    table = Table("scenario", "policy", "parameters", heading, title="Tuned on training streams")
    for row in rows:
        cells = [str(row[key]) for key in ("scenario", "policy", "parameters")]
        table.add_row(*cells, f"{row[key]:.3f}")
    Console().print(table)
    write_result(args.json, command_line(), args.seed, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
