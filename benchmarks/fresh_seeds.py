"""A shipped champion of routing against one rule on many seeds, so that no seed is picked.

python benchmarks/fresh_seeds.py --scenario azure_code_slo --rule tuned_marginal_delay

Equal to `evaluate.py --source synthetic --seed S --streams 30` of every seed, in compiled code.
`--service-weight` adds the rule that is missing from the list of rules: shortest expected delay
with a tuned weight on the service time, for servers (cost = wait + a x service).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich import box
from rich.table import Table

from tokenyard.evaluation import compare, difference
from tokenyard.problem import Row
from tokenyard.provenance import report
from tokenyard.routing.artifact import resolve_champion
from tokenyard.routing.evaluation import mean_summary
from tokenyard.routing.gate import rule_runs
from tokenyard.routing.observation import NUM_SCORE_WEIGHTS
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.server_models import COMPARED
from tokenyard.routing.simulator.streams import StreamSet, StreamSource, synthetic_streams
from tokenyard.routing.validation import artifact_runs, outcome_runs

SERVICE = 2
"""Weight of a linear policy on the service time, at every speed alike."""
TRIED = tuple(np.arange(1, 15) / 10)


@dataclass(frozen=True)
class Args:
    """Compare a champion with one rule on synthetic test streams of many seeds."""

    scenario: str = "azure_code_slo"
    policy: str = "champion"
    """`champion`, or the path of a policy file."""
    rule: str = "tuned_marginal_delay"
    service_weight: bool = False
    """Add shortest expected delay with a tuned weight on the service time, on servers."""
    seeds: tuple[int, ...] = (3777, 1777, 4777, 9001, 9002, 9003, 9004, 9005, 9006)
    streams: int = 30
    json: Path | None = None
    """Where to write the rows."""


def sed_linear(scenario: Scenario, streams: StreamSet, a: float) -> list[Run]:
    """Shortest expected delay whose service time counts `a` times."""
    weights = np.zeros(NUM_SCORE_WEIGHTS)
    weights[SERVICE] = a - 1.0
    return outcome_runs(scenario, streams, lambda sim: sim.run_linear(weights, 1.0))


def tuned_service_weight(source: StreamSource) -> float:
    """The weight with the best score on six training streams."""
    training = synthetic_streams(source, 6, 0, "training")
    scores = {
        a: mean_summary(source.scenario, sed_linear(source.scenario, training, a))["score"]
        for a in TRIED
    }
    return float(max(scores, key=scores.__getitem__))


def rows_of(args: Args) -> list[Row]:
    scenario = load_scenario(args.scenario)
    source = StreamSource(scenario)
    path = args.policy if args.policy.endswith(".npz") else None
    artifact, _ = resolve_champion("routing", scenario.name, path=path)
    a = tuned_service_weight(source) if args.service_weight else None
    rows: list[Row] = []
    for seed in args.seeds:
        streams = synthetic_streams(source, args.streams, seed)
        runs = {
            args.rule: rule_runs(args.rule, scenario, streams),
            args.policy: artifact_runs(scenario, streams, artifact),
        }
        if a is not None:
            runs["sed_linear"] = sed_linear(scenario, streams, a)
            rows += _against(
                streams, scenario, runs, "sed_linear", {"seed": seed, "service_weight": a}
            )
        rows += _against(streams, scenario, runs, args.rule, {"seed": seed})
    return rows


def _against(
    streams: StreamSet, scenario: Scenario, runs: dict[str, list[Run]], rule: str, more: Row
) -> list[Row]:
    compared = compare(PROBLEM, scenario, streams, runs, rule)
    return [{**row, **more, "baseline": rule} for row in compared if row["policy"] != rule]


def table(rows: list[Row]) -> Table:
    """Lay out every seed, and the mean over seeds of each pair."""
    found = Table(
        "policy", "against", "seed", "mean, %", "p99, %", "violations, points", box=box.SIMPLE_HEAD
    )
    for row in rows:
        cells = [difference(row, one) for one in COMPARED]
        found.add_row(str(row["policy"]), str(row["baseline"]), str(row["seed"]), *cells)
    for policy, rule in dict.fromkeys((row["policy"], row["baseline"]) for row in rows):
        pair = [row for row in rows if (row["policy"], row["baseline"]) == (policy, rule)]
        means = [f"{100 * np.mean([float(r[one.delta]) for r in pair]):+.1f}" for one in COMPARED]
        found.add_row(str(policy), str(rule), f"mean of {len(pair)}", *means, style="bold")
    return found


def main(args: Args) -> None:
    rows = rows_of(args)
    report(table(rows), rows, args.json, None, width=140)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
