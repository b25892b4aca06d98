"""Champions of routing beside the best rules, on streams that nothing was chosen on.

    python benchmarks/fresh_seeds.py --json fresh_seeds.json
    python benchmarks/fresh_seeds.py --scenario azure_code_slo --loads 0.5 0.7 0.95 1.05

The rules are the best that orders, the best first come, first served, and the best that looks at
all who wait, each by its score on the training streams that it was tuned on. Streams are synthetic
ones of a fresh seed and, where the scenario has one, the recorded test part. With `--loads` the
rules of each load are the best in hindsight: of all placements, orders and knobs, and the
scenario's tuned rules, those with the best score and with the lowest mean on training streams of
that very load. All p-values of the table are one family (Holm).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import tyro
from rich import box
from rich.table import Table

from tokenyard.artifact import NoChampionError
from tokenyard.evaluation import compare, difference
from tokenyard.problem import Row
from tokenyard.provenance import ResultFile, report
from tokenyard.routing.artifact import DEFAULT_RULE, resolve_champion, rule_for
from tokenyard.routing.gate import RECORDED, Runner, rule_runs
from tokenyard.routing.policies.order import IN_ORDER
from tokenyard.routing.policies.rule_name import RuleName
from tokenyard.routing.policies.tuned import find_tuned
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.rule_replay import Replay
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.simulator.run import Run, run_compiled
from tokenyard.routing.simulator.server_models import COMPARED
from tokenyard.routing.simulator.streams import (
    StreamSet,
    StreamSource,
    held_out_streams,
    synthetic_streams,
)
from tokenyard.routing.validation import artifact_runs
from tokenyard.statistics.intervals import holm


@dataclass(frozen=True)
class Args:
    """Compare champions with the best rules of their scenarios on fresh streams."""

    scenario: tuple[str, ...] = ()
    """Names; none: every scenario that a champion ships for."""
    policy: str = "champion"
    """`champion`, or the path of a policy file."""
    rules: tuple[str, ...] = ()
    """Names; none: the best that orders, first come, first served, and that sees all who wait."""
    loads: tuple[float, ...] = ()
    """Offered loads, each with best rules of its own; none: the scenario's load and `rules`."""
    choosing: int = 6
    """Training streams that the rules of a load are found on."""
    seed: int = 52711
    streams: int = 30
    json: ResultFile | None = None
    """Where to write the rows."""


def shipped() -> list[str]:
    """Scenarios that a routing champion of their own ships for."""
    folder = resources.files("tokenyard") / "artifacts" / "routing"
    return sorted(Path(file.name).stem for file in folder.iterdir())


def best_rules(scenario: str) -> list[str]:
    """The best of each sort by training score, and the default rule."""
    tuned = find_tuned(scenario)
    if tuned is None:
        return [DEFAULT_RULE]
    orders = tuned.order_scores
    sees_all = [name for name in orders if RuleName.parse(name).base == IN_ORDER]
    orders_seen = [name for name in orders if name not in sees_all]
    scores = tuned.scores | orders
    best = [
        max(names, key=scores.__getitem__)
        for names in (orders_seen, list(tuned.scores), sees_all)
        if names
    ]
    return list(dict.fromkeys((rule_for(scenario), *best, DEFAULT_RULE)))


def rows_of(args: Args, name: str) -> list[Row]:
    """Compare one scenario's champion with each rule on each part, or at each load."""
    source = StreamSource(load_scenario(name))
    path = args.policy if args.policy.endswith(".npz") else None
    sha256, run = ours_of(source, path)
    if args.loads:
        at_loads = [row for load in args.loads for row in _rows_at(args, source, load, run)]
        return [{**row, "sha256": sha256} for row in at_loads]
    parts: dict[str, StreamSet] = {"synthetic": synthetic_streams(source, args.streams, args.seed)}
    recorded = held_out_streams(source)
    if recorded is not None:
        parts[RECORDED] = recorded
    rows: list[Row] = []
    for part, streams in parts.items():
        ours = run(streams)
        for rule in args.rules or best_rules(name):
            if rule == sha256:
                continue  # It is what ships.
            theirs = rule_runs(PROBLEM, rule, source.scenario, streams)
            row = _compared(source.scenario, streams, {rule: theirs, args.policy: ours})
            rows.append({**row, "part": part, "sha256": sha256})
    return rows


def _rows_at(args: Args, source: StreamSource, load: float, run: Runner) -> list[Row]:
    """Compare the champion with the best rules in hindsight at one offered load."""
    scenario, factor = source.scenario, load / source.offered_load
    training = synthetic_streams(source, args.choosing, args.seed, "training", factor)
    replay = Replay(scenario, training.requests, tuned=True)
    best = [replay.best_rules(by)[0] for by in ("score", "mean_response_s")]
    streams = synthetic_streams(source, args.streams, args.seed, load_factor=factor)
    ours, rows = run(streams), []
    for rule in dict.fromkeys(best):
        theirs = run_compiled(scenario, streams, replay.decide(rule))
        row = _compared(scenario, streams, {rule: theirs, args.policy: ours})
        chosen_by = " and ".join(
            by for by, name in zip(("score", "mean"), best, strict=True) if name == rule
        )
        rows.append(
            {**row, "part": f"load {load:g}", "offered_load": load, "chosen_by": chosen_by}
        )  # fmt: skip
    print(f"{scenario.name} at {load:g}: {best}", file=sys.stderr, flush=True)
    return rows


def _compared(scenario: Scenario, streams: StreamSet, runs: Mapping[str, list[Run]]) -> Row:
    """What a policy and a rule do, with the difference; the rule is the first of `runs`."""
    rule, policy = runs
    theirs, row = compare(PROBLEM, scenario, streams, runs, rule)
    beside = {f"baseline_{key}": theirs[key] for key in (one.key for one in COMPARED)}
    samples = PROBLEM.samples(scenario, streams, runs, rule)
    p_values = {one.p_key: samples[policy].p_value(samples[rule], one.key) for one in COMPARED}
    return {**row, **beside, **p_values, "baseline": rule}


def ours_of(source: StreamSource, path: str | None) -> tuple[str, Runner]:
    """Hash of the policy, or name of the rule that ships in its place, and what runs it."""
    scenario = source.scenario
    try:
        artifact, _ = resolve_champion(scenario.name, path=path)
    except NoChampionError:
        rule = rule_for(scenario.name)
        return rule, lambda streams: rule_runs(PROBLEM, rule, scenario, streams)
    return artifact.sha256, lambda streams: artifact_runs(scenario, streams, artifact)


def table(rows: list[Row]) -> Table:
    """Lay out the values of both and their differences; all p-values are one family."""
    family = [(row, one.p_key) for row in rows for one in COMPARED]
    for (row, key), p_value in zip(family, holm([float(r[k]) for r, k in family]), strict=True):
        row[key] = p_value
    found = Table("scenario", "part", "against", *(one.heading for one in COMPARED),
                  "mean", "p99", "violations", box=box.SIMPLE_HEAD)  # fmt: skip
    for row in rows:
        values = [
            f"{one.factor * float(row[one.key]):.3g} / "
            f"{one.factor * float(row[f'baseline_{one.key}']):.3g}"
            for one in COMPARED
        ]
        cells = [str(row[key]) for key in ("scenario", "part", "baseline")]
        found.add_row(*cells, *values, *(difference(row, one) for one in COMPARED))
    return found


def main(args: Args) -> None:
    rows = [row for name in args.scenario or shipped() for row in rows_of(args, name)]
    report(table(rows), rows, args.json, args.seed, width=170)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
