r"""Go on training the champion on what the live cluster logged, and offer what came of it.

    python pipelines/finetune.py --log /var/log/decisions --scenario conversation_mixed_gpus \
        --out candidate.npz --registry sqlite:///runs/mlflow.db
    python pipelines/finetune.py --problem allocation --log /var/log/decisions --scenario l4x4_7b

The first part of the log is learned from, the last part judges. Methods:
`tokenyard.routing.finetune`, `tokenyard.allocation.finetune`. The result is offered, as a file and
as the alias `candidate`, only if it beats the champion on the last part, and the rule that the log
was served by where that was not the champion. It decides nothing before it has been in the shadow:
`POST /v1/policies`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from mlflow import MlflowClient
from rich.console import Console
from rich.table import Table

from tokenyard.allocation import finetune as of_allocation
from tokenyard.allocation.artifact import champion_or_planner
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.telemetry import read_telemetry
from tokenyard.artifact import model_name
from tokenyard.cross_entropy import FinetuneConfig
from tokenyard.provenance import ResultFile, command_line, lineage, write_result
from tokenyard.registry import mlflow_lookup, offer
from tokenyard.routing import finetune as of_routing
from tokenyard.routing.decision_log import read_log
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.search import champion_or_rule

Row = dict[str, str | float | int | bool]


@dataclass(frozen=True, kw_only=True)
class Args(FinetuneConfig):
    """Fine-tune the champion on a decision log; offer the result if it is better."""

    log: Path
    """Folder of `deploy.py --decision-log`."""
    problem: Literal["routing", "allocation"] = "routing"
    """What is decided."""
    scenario: str = "conversation_mixed_gpus"
    """Whose champion is continued, or best rule where it has none; its model of traffic or of
    plans applies, and its SLOs."""
    champion: Path | None = None
    """Policy file in its place."""
    out: ResultFile | None = None
    """File (.npz) for the candidate; written only if it is offered."""
    registry: str | None = None
    """MLflow tracking URI where the champion is looked up and the candidate is registered."""
    population: tyro.conf.Suppress[int] = FinetuneConfig.population
    spread: tyro.conf.Suppress[float | None] = FinetuneConfig.spread
    json: ResultFile | None = None
    """File for the row."""


@dataclass(frozen=True)
class Outcome:
    """What either problem's fine-tuning came to."""

    source: str
    """Where the champion was found."""
    champion_sha256: str
    scenario: str
    size: Row
    """How long the log was."""
    found: of_routing.Finetuned | of_allocation.Finetuned


def finetune_routing(args: Args) -> Outcome:
    """Continue the router's weights on logged decisions."""
    scenario = load_scenario(args.scenario)
    registry = mlflow_lookup(args.registry) if args.registry else None
    champion, source = champion_or_rule(scenario, args.champion, registry)
    decisions, digest = read_log(args.log)
    made_by = {**lineage(), "trace_sha256": digest}
    found = of_routing.finetune(champion, decisions, scenario, args, made_by)
    size: Row = {"requests": len(decisions)}
    return Outcome(source, champion.sha256, scenario.name, size, found)


def finetune_allocation(args: Args) -> Outcome:
    """Fit the planner's forecaster to logged demand."""
    registry = mlflow_lookup(args.registry) if args.registry else None
    named = load_allocation(args.scenario)
    champion, source = champion_or_planner(named, args.champion, registry)
    scenario = champion.metadata.scenario
    stream, digest = read_telemetry(args.log, scenario.slots_per_day)
    made_by = {**lineage(), "trace_sha256": digest}
    found = of_allocation.finetune(champion, stream, args, made_by)
    size: Row = {"slots": len(stream.per_s)}
    return Outcome(source, champion.sha256, scenario.name, size, found)


def finetune(args: Args, console: Console) -> Row:
    """Learn, judge, and offer.

    Raises:
        ValueError: The log or the champion cannot be used.
    """
    run = finetune_routing if args.problem == "routing" else finetune_allocation
    outcome = run(args)
    found = outcome.found
    console.print(f"champion: {outcome.source}, {outcome.champion_sha256}")
    console.print(found.remark)
    if found.objection is None:
        offered(args, outcome, console)
    else:
        console.print(f"not offered: {found.objection}")
    return {
        "champion": outcome.champion_sha256, "candidate": found.candidate.sha256, **outcome.size,
        **found.row(), "offered": found.objection is None,
    }  # fmt: skip


def offered(args: Args, outcome: Outcome, console: Console) -> None:
    """Write the candidate, and register it."""
    candidate = outcome.found.candidate
    if args.out is not None:
        candidate.save(args.out)
        console.print(f"wrote {args.out} ({candidate.sha256}); try it in the shadow first")
    if args.registry:
        client = MlflowClient(args.registry, args.registry)
        version = offer(client, model_name(args.problem, outcome.scenario), candidate)
        console.print(f"registered as version {version}, alias candidate")


def main(args: Args) -> None:
    console = Console(highlight=False, width=200)
    try:
        row = finetune(args, console)
    except (ValueError, OSError) as error:
        sys.exit(f"finetune: {error}")
    table = Table("", "")
    for key, value in row.items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    if args.json is not None:
        write_result(args.json, command_line(), args.seed, [row])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
