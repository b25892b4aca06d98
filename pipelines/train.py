"""Train for traffic of your own, for what a gateway has logged, or for a scenario.

    python pipelines/train.py --fleet fleet.yaml --trace my.csv --out mine.npz
    python pipelines/train.py --log DIR --fleet fleet.yaml --out mine.npz
    python pipelines/train.py --log DIR --scenario conversation_mixed_gpus --out mine.npz
    python pipelines/train.py --scenario bursty_serial --out bursty_serial.npz

Of a trace or a log the first part is learned from and the last part judges; the answer is a rule
or a policy file (`tokenyard.routing.own_traffic`). Of an allocation's log it is the planner with a
forecaster of your demand (`tokenyard.allocation.own_demand`). For a scenario alone several searches
are run and the best is kept, which is how the policies that ship were made
(`tokenyard.routing.search_study`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from tokenyard.allocation.artifact import champion_or_planner
from tokenyard.allocation.own_demand import fit_planner
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.telemetry import read_telemetry
from tokenyard.artifact import model_name
from tokenyard.evaluation import difference
from tokenyard.problem import Row, TrainedPolicy, find_problem
from tokenyard.provenance import ResultFile, command_line, lineage, make_console, write_result
from tokenyard.registry import connect, mlflow_lookup, offer
from tokenyard.routing import search_study
from tokenyard.routing.choice import CHANGE, LOSSES, refused
from tokenyard.routing.gate import MOST_LOAD
from tokenyard.routing.own_traffic import (
    ORDER_NOTE,
    Choice,
    Found,
    OwnTraffic,
    Traffic,
    logged_traffic,
)
from tokenyard.routing.policies.rule_name import RuleName
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.server_models import COMPARED
from tokenyard.workload.trace_options import TraceOptions


@dataclass(frozen=True, kw_only=True)
class Study(search_study.SearchStudy):
    """Only of a scenario without a log."""

    searches: Path | None = None
    """Folder for the policy of every search, <scenario>-o<objective>-s<seed>.npz, kept or not."""
    jobs: int = 2
    """Processes."""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Train for traffic of your own, for what a gateway has logged, or for a scenario."""

    trace: str | None = None
    """Your traffic: a trace file (docs/workloads.md), or the name of a published one."""
    log: Path | None = None
    """Or what a gateway has logged: its folder of `--decision-log`."""
    fleet: str | None = None
    """Replicas and SLOs of a trace or log: a YAML file (what `calibrate.py --url` writes, or a
    scenario), or the name of a fleet that ships."""
    scenario: str | None = None
    """Name or YAML path. With a log: whose SLOs count, for replicas as they were logged; or an
    allocation, whose demand was logged. Alone: what is trained for."""
    now: str | None = None
    """What decides today, to be compared too: a rule, or a policy file (.npz). None: what the log
    names."""
    minutes: float = 10.0
    """For searches on a trace or log; the whole command takes a few minutes more. `compare` only
    plays rules."""
    load: float | None = None
    """Offered load that a trace or log is scaled to, at most 1.1; None: its own rate."""
    out: ResultFile | None = None
    """File (.npz) for the policy; written only if one is accepted, as a rule needs none."""
    registry: str | None = None
    """MLflow tracking URI where a policy that is accepted becomes `candidate` of the scenario whose
    log it is, and where the champion is looked up."""
    seed: int = 0
    """Of streams and searches."""
    json: ResultFile | None = None
    """Write the result rows to this file."""
    reading: tyro.conf.OmitArgPrefixes[TraceOptions] = field(default_factory=TraceOptions)
    study: tyro.conf.OmitArgPrefixes[Study] = field(default_factory=Study)


def given(args: object, *names: str) -> list[str]:
    """Those options, or all, that are not as they are by default, as they are typed."""
    defaults = type(args)()
    options = names or tuple(vars(args))
    changed = [name for name in options if getattr(args, name) != getattr(defaults, name)]
    return ["--" + name.replace("_", "-") for name in changed]


def check(args: Args) -> None:
    """Refuse options that do not go together, or are out of their range, with a ValueError."""
    study, reading = given(args.study), given(args.reading)
    match [option is not None for option in (args.trace, args.log, args.fleet, args.scenario)]:
        case [True, False, True, False]:
            what, others = "a trace", [*given(args, "registry"), *study]
        case [False, True, True, False]:
            what, others = "the log of a fleet", [*given(args, "registry"), *reading, *study]
        case [False, True, False, True]:
            what, others = "the log of a scenario", [*reading, *study]
        case [False, False, False, True]:
            what = "a scenario without a log"
            others = [*given(args, "now", "minutes", "load", "registry", "seed"), *reading]
        case _:
            raise ValueError(
                "give --trace and --fleet, --log and one of --fleet and --scenario, or --scenario "
                "alone"
            )
    if others:
        raise ValueError(f"{what} does not go with {', '.join(others)}")
    if not args.minutes > 0:
        raise ValueError(f"--minutes {args.minutes:g} must be above 0: `compare` only plays rules")
    if args.load is not None and not 0 < args.load <= MOST_LOAD:
        raise ValueError(f"--load {args.load:g} must be above 0, and at most {MOST_LOAD:g}")
    if args.out is not None and args.out.suffix != ".npz":
        raise ValueError(f"--out {args.out} must end in .npz")


def train(args: Args, console: Console) -> list[Row]:
    """Train, judge, and write what is accepted; ValueError: options or a file are wrong."""
    check(args)
    if args.scenario is None:
        return train_on_traffic(args, console)
    problem = find_problem(args.scenario, None).name
    if problem not in ("routing", "allocation") or (problem != "routing" and args.log is None):
        raise ValueError(f"--scenario {args.scenario} is of {problem}: train it with sweep.py")
    if args.log is None:
        return train_for_scenario(args, args.scenario, console)
    if problem == "allocation":
        return train_on_demand(args, args.log, args.scenario, console)
    return train_on_traffic(args, console)


def train_on_traffic(args: Args, console: Console) -> list[Row]:
    """The best rule for a trace or a log, or what beats it."""
    traffic = read_traffic(args)
    if args.scenario is not None:
        # Tuned rules and registered models are known by the scenario's name.
        name = load_scenario(args.scenario).name
    else:
        of = f"{Path(str(args.log or args.trace)).stem}_on_{Path(str(args.fleet)).stem}"
        name = args.out.stem if args.out else of
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"{name}.json"
        trained = OwnTraffic(traffic, model, args.minutes, args.load, args.seed).train()
    show(trained, console)
    choice = trained.choice
    if choice == traffic.now:
        console.print(f"best: what decides today, {choice.name}", soft_wrap=True)
    elif choice.artifact is None:
        note = f"; {ORDER_NOTE}" if RuleName.parse(choice.name).order is not None else ""
        line = f"best: a rule, which needs no file; serve it with --policy {choice.name}{note}"
        console.print(line, soft_wrap=True)
    else:
        console.print("best: what a search made")
        keep(args, "routing", name, choice.artifact, console)
    return [with_verdict(row, choice, traffic) for row in trained.rows]


def read_traffic(args: Args) -> Traffic:
    """What was asked, of which replicas, and what decides today."""
    now = None if args.now is None else Choice.named(args.now)
    if args.log is None:
        trace, _ = args.reading.read(str(args.trace))
        return Traffic(trace, str(args.fleet), now)
    registry = mlflow_lookup(args.registry) if args.registry else None
    fleet = str(args.fleet) if args.scenario is None else load_scenario(args.scenario)
    return logged_traffic(args.log, fleet, now, registry)


def with_verdict(row: Row, choice: Choice, traffic: Traffic) -> Row:
    """A row with what is to be served, and how well a log was repeated."""
    artifacts = {option.name: option.artifact for option in (choice, traffic.now) if option}
    artifact = artifacts.get(str(row["policy"]))
    verdict: Row = {"sha256": artifact.sha256 if artifact else ""}
    if traffic.twin_error_fraction is not None:
        verdict["twin_error_fraction"] = traffic.twin_error_fraction
    return {**row, **verdict, "accepted": int(row["policy"] == choice.name)}


def keep(
    args: Args, problem: str, scenario: str, artifact: TrainedPolicy, console: Console
) -> None:
    """Write what is accepted, and register it."""
    if args.out is not None:
        artifact.save(args.out)
        console.print(f"wrote {args.out} ({artifact.sha256}); serve it with --policy {args.out}")
    if args.registry is not None:
        version = offer(connect(args.registry), model_name(problem, scenario), artifact)
        console.print(f"registered as version {version}, alias candidate: try it in the shadow")
    if args.out is None and args.registry is None:
        console.print("--out writes it")


def train_on_demand(args: Args, log: Path, name: str, console: Console) -> list[Row]:
    """The planner of an allocation with a forecaster of the logged demand."""
    if wrong := given(args, "minutes", "load"):
        raise ValueError(f"the log of an allocation does not go with {', '.join(wrong)}")
    registry = mlflow_lookup(args.registry) if args.registry else None
    today, source = champion_or_planner(load_allocation(name), args.now, registry)
    scenario = today.metadata.scenario
    stream, digest = read_telemetry(log, scenario.slots_per_day)
    fitted = fit_planner(today, stream, args.seed, {**lineage(), "trace_sha256": digest})
    console.print(f"{source}, {today.sha256}, with a forecaster of {len(stream.per_s)} slots:")
    low, change, high = (100 * getattr(fitted.change, of) for of in ("low", "estimate", "high"))
    console.print(f"cost on the last part {change:+.1f} % [{low:+.1f}, {high:+.1f}]", markup=False)
    if fitted.accepted:
        keep(args, "allocation", scenario.name, fitted.planner, console)
    else:
        console.print("nothing is written: the interval does not lie below zero")
    return [{
        "policy": "planner", "scenario": scenario.name, "sha256": fitted.planner.sha256,
        "accepted": int(fitted.accepted), "slots": len(stream.per_s),
        "delta_cost_fraction": fitted.change.estimate, "delta_cost_ci_low": fitted.change.low,
        "delta_cost_ci_high": fitted.change.high, "changed_fraction": fitted.changed,
    }]  # fmt: skip


def train_for_scenario(args: Args, name: str, console: Console) -> list[Row]:
    """Several searches of a scenario's policy, and the best of them, if it beats the rules."""
    scenario, study = load_scenario(name), args.study
    searches = search_study.run_study(scenario, study, study.jobs)
    best = search_study.best_of(searches)
    numbers = [number for number in study.objectives for _ in range(study.seeds)]
    rows: list[Row] = []
    for trial, number in zip(searches, numbers, strict=True):
        of = f"{scenario.name}-o{number}-s{trial.row['seed']}"
        if study.searches is not None:
            trial.policy.save(study.searches / f"{of}.npz")
        verdict: Row = {"policy": of, "sha256": trial.policy.sha256, "accepted": int(trial is best)}
        rows.append({**trial.row, **verdict})
    rows.sort(key=lambda row: float(row[CHANGE]))
    terms = ("cvar99", "violation", "tail_guard")
    table = Table("cvar99, violation, guard", "seed", *BESIDE_THE_RULE)
    for row in rows:
        objective = ", ".join(str(row[f"objective_{term}"]) for term in terms)
        cells = (objective, str(row["seed"]), *beside_the_rule(row))
        table.add_row(*cells, style="bold" if row["accepted"] else "")
    console.print(table)
    if best is None:
        console.print(refused(scenario), soft_wrap=True)
    else:
        keep(args, "routing", scenario.name, best.policy, console)
    return rows


BESIDE_THE_RULE = ("mean", "p99", "at most", "violations", "mean, all parts", "losses")


def beside_the_rule(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Cells of what a search is worth beside the best rule."""
    return (
        f"{row['delta_mean_fraction']:+.1%}",
        f"{row['delta_p99_fraction']:+.1%}",
        f"{row['delta_p99_ci_high']:+.1%}",
        f"{row['delta_slo_violation']:+.2%}",
        f"{row[CHANGE]:+.1%}",
        f"{row[LOSSES]:.0f}",
    )


def show(trained: Found, console: Console) -> None:
    """Print what was found on the way, and all that was judged beside the best rule."""
    for remark in trained.remarks:
        console.print(remark)
    table = Table(
        "requests judged by", "policy", "mean, s", "p99, s", "violations, %", "mean", "p99",
        title="Last part of the trace: differences to the best rule with 95 % intervals",
    )  # fmt: skip
    for row in trained.rows:
        deltas = [difference(row, measure) for measure in COMPARED[:2]]
        table.add_row(
            str(row["part"]), str(row["policy"]), f"{float(row['mean_response_s']):.3g}",
            f"{float(row['p99_response_s']):.3g}",
            f"{100 * float(row['slo_violation_fraction']):.1f}", *deltas,
        )  # fmt: skip
    console.print(table)


def main(args: Args) -> None:
    console = make_console(150)
    try:
        rows = train(args, console)
    except (ValueError, OSError) as error:
        sys.exit(f"train: {error}")
    write_result(args.json, command_line(), args.seed, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
