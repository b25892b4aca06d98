"""Tune the hand rules that have parameters for a scenario: on a fleet also those of public routers.

    python pipelines/tune_baselines.py --scenario poisson_085

Writes tokenyard/scenarios/tuned/routing/<scenario>.json, which ships with the package.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

import tokenyard
from tokenyard.provenance import write_result
from tokenyard.routing.policies.tuned import TunedRules
from tokenyard.routing.scenario import load_scenario, scenario_names
from tokenyard.routing.suites import SUITES, SuiteName
from tokenyard.routing.tuning import FLEET_GRIDS, tune_rules

TUNED = Path(tokenyard.__file__).parent / "scenarios" / "tuned" / "routing"


@dataclass(frozen=True)
class Args:
    """Tune the hand rules on training streams and write their parameters."""

    scenario: str | None = None
    """Name or YAML path; all that ship, or a suite's, when it is left out."""
    suite: SuiteName | None = None
    """The scenarios of one suite of evaluate.py."""
    streams: int = 12
    """Training streams that every value of a parameter is tried on."""
    requests: int | None = None
    """Requests per stream; the scenario's own number when it is left out."""
    seed: int = 0
    """Of the training streams."""
    out: Path = TUNED
    """Folder of the parameter files."""
    json: Path | None = None
    """Write the result rows to this file."""


def rows_of(rules: TunedRules) -> list[dict[str, str | float]]:
    """One row per rule: its parameter and its score on the training streams."""
    order = ", ".join(f"{i}" for i in rules.sita_replicas)
    cuts = ", ".join(f"{cut:.0f}" for cut in rules.sita_cuts_tokens)
    parameters = {
        "sed": "none",
        "sed_reserve": f"above {rules.reserve_above_tokens:.0f} tokens",
        "sed_dump": f"replica {rules.dump_replica}",
        "sita": f"cuts at {cuts} tokens, replicas {order}",
        "marginal_delay": "none",
    }
    for name, fields in FLEET_GRIDS.items():
        parameters[name] = ", ".join(f"{field} {getattr(rules.fleet, field):g}" for field in fields)
    return [
        {
            "scenario": rules.scenario,
            "policy": name,
            "parameters": text,
            "score": rules.scores[name],
        }
        for name, text in parameters.items()
        if name in rules.scores
    ]


def main(args: Args) -> None:
    rows = []
    args.out.mkdir(parents=True, exist_ok=True)
    names = SUITES[args.suite] if args.suite else scenario_names()
    for name in [args.scenario] if args.scenario else names:
        scenario = load_scenario(name)
        if args.requests:
            scenario = scenario.model_copy(update={"requests_per_stream": args.requests})
        rules = tune_rules(scenario, args.streams, args.seed)
        text = rules.model_dump_json(indent=2) + "\n"
        (args.out / f"{rules.scenario}.json").write_text(text, encoding="utf-8")
        rows += rows_of(rules)
    table = Table("scenario", "policy", "parameters", "score, s", title="Tuned on training streams")
    for row in rows:
        score = f"{row['score']:.3f}"
        table.add_row(str(row["scenario"]), str(row["policy"]), str(row["parameters"]), score)
    Console().print(table)
    if args.json:
        write_result(args.json, shlex.join(sys.argv), args.seed, rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
