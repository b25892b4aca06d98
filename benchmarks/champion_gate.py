"""Whether shipped champions of routing lose to rules where they may be chosen: no test part.

    python benchmarks/champion_gate.py --csv docs/results/champions_gate.csv

The promotion gate (tokenyard/routing/gate.py) looks at half, the whole and 1.15 of the scenario's
load, and at the recorded requests before the test part.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import tyro
from rich import box
from rich.table import Table

from tokenyard.evaluation import difference
from tokenyard.problem import Row
from tokenyard.provenance import ResultFile, report
from tokenyard.routing.artifact import resolve_champion
from tokenyard.routing.gate import Gate, gate_streams
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.server_models import COMPARED
from tokenyard.routing.simulator.streams import StreamSource
from tokenyard.routing.validation import artifact_runs

COLUMNS = (
    "scenario", "part", "policy", "sha256", "baseline", "stream_count", "mean_response_s",
    "delta_mean_fraction", "delta_mean_ci_low", "delta_mean_ci_high",
    "delta_p99_fraction", "delta_p99_ci_low", "delta_p99_ci_high",
    "delta_slo_violation", "delta_slo_ci_low", "delta_slo_ci_high", "loses",
)  # fmt: skip


@dataclass(frozen=True)
class Args:
    """Compare policies with every strong rule on training and validation data."""

    scenarios: tuple[str, ...] = ()
    """Names; none: every scenario that a champion of its own ships for."""
    policies: tuple[str, ...] = ("champion",)
    """`champion`, or paths of policy files."""
    streams: int = 30
    """Validation streams at every load."""
    seed: int = 0
    csv: Path | None = None
    """Where to write the table."""
    json: ResultFile | None = None
    """Where to write the rows."""


def shipped() -> list[str]:
    """Scenarios that a routing champion of their own ships for."""
    folder = resources.files("tokenyard") / "artifacts" / "routing"
    return sorted(Path(file.name).stem for file in folder.iterdir())


def rows_of(args: Args, name: str) -> list[Row]:
    """Compare the policies with the rules of one scenario."""
    source = StreamSource(load_scenario(name))
    gate = Gate(source, parts=gate_streams(source, args.streams, args.seed))
    rows = [row for policy in args.policies for row in compared(policy, source, gate)]
    return [{**row, "scenario": name} for row in rows]


def compared(policy: str, source: StreamSource, gate: Gate) -> list[Row]:
    """Rows of one policy on all parts of a gate."""
    scenario = source.scenario
    path = policy if policy.endswith(".npz") else None
    artifact, _ = resolve_champion(scenario.name, path=path)
    rows = gate(lambda streams: artifact_runs(scenario, streams, artifact))
    return [{**row, "policy": policy, "sha256": artifact.sha256} for row in rows]


def table(rows: list[Row]) -> Table:
    """Lay out the differences; bold is a loss that keeps a policy from shipping."""
    found = Table(
        "scenario", "part", "policy", "rule", "mean", "p99", "violations, points",
        box=box.SIMPLE_HEAD,
    )  # fmt: skip
    for row in rows:
        style = "bold" if row["loses"] else ""
        cells = [str(row[key]) for key in ("scenario", "part", "policy", "baseline")]
        found.add_row(*cells, *(difference(row, one) for one in COMPARED), style=style)
    return found


def write_csv(path: Path, rows: list[Row]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {key: f"{value:.4f}" if isinstance(value, float) else value
                 for key, value in row.items()}
            )  # fmt: skip


def main(args: Args) -> None:
    rows: list[Row] = []
    for name in args.scenarios or shipped():
        rows += rows_of(args, name)
        print(f"{name}: done", file=sys.stderr, flush=True)
        if args.csv:
            write_csv(args.csv, rows)
    report(table(rows), rows, args.json, args.seed, width=140)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
