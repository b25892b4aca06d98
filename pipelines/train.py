"""Find the best rule for a fleet and a trace of your own, or train what beats it.

    python pipelines/train.py --fleet fleet.yaml --trace my.csv --out mine.npz
    python pipelines/train.py --fleet mixed --trace azure_code --load 0.8 --minutes 5

The first seven tenths of the trace are learned from, the rest judges, against the rule that decides
where nothing was trained. Method: `tokenyard.routing.own_traffic`.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from tokenyard.problem import Row
from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.routing.artifact import DEFAULT_RULE
from tokenyard.routing.gate import MOST_LOAD
from tokenyard.routing.own_traffic import Found, OwnTraffic
from tokenyard.routing.policies.rule_name import RuleName
from tokenyard.workload.trace_options import TraceOptions


@dataclass(frozen=True)
class Args(TraceOptions):
    """Find the best rule for a fleet and a trace of your own, or train what beats it."""

    fleet: str
    """A YAML file with replicas and SLOs (what `calibrate.py --url` writes, or a scenario), or the
    name of a fleet that ships."""
    trace: str
    """Trace file (docs/workloads.md), or the name of a published one."""
    minutes: float = 10.0
    """For searches; the whole command takes a few minutes more. 0: only rules are played."""
    load: float | None = None
    """Offered load that the trace is scaled to, at most 1.1; None: its own rate."""
    out: ResultFile | None = None
    """File (.npz) for the policy; written only if one is accepted, as a rule needs none."""
    seed: int = 0
    """Of streams and searches."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


def train(args: Args, console: Console) -> list[Row]:
    """Train, judge, and write what is accepted.

    Raises:
        ValueError: The trace or the fleet cannot be used.
    """
    if args.minutes < 0:
        raise ValueError(f"--minutes {args.minutes:g} must be at least 0")
    if args.load is not None and not 0 < args.load <= MOST_LOAD:
        raise ValueError(f"--load {args.load:g} must be above 0, and at most {MOST_LOAD:g}")
    if args.out is not None and args.out.suffix != ".npz":
        raise ValueError(f"--out {args.out} must end in .npz")
    name = args.out.stem if args.out else f"{Path(args.trace).stem}_on_{Path(args.fleet).stem}"
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"{name}.json"
        trace, _ = args.read(args.trace)
        own = OwnTraffic(args.fleet, trace, model, args.minutes, args.load, args.seed)
        found = own.train()
    show(found, console)
    artifact = found.choice.artifact
    if artifact is None:
        console.print(
            f"best: a rule, which needs no file; serve it with --policy {found.choice.name}; "
            f"{beside_default(found)}",
            soft_wrap=True,
        )
    elif args.out is not None:
        artifact.save(args.out)
        console.print(f"best: wrote {args.out}; serve it with --policy {args.out}")
    else:
        console.print(f"best: what a search made ({name}.npz); --out writes it")
    return [{**row, "served": int(row["policy"] == found.choice.name)} for row in found.rows]


def beside_default(found: Found) -> str:
    """Say what a rule is worth beside the default one, and what its order needs."""
    name, default = found.choice.name, found.rows[0]
    gain, low, high = (
        100 * float(default[f"delta_mean_{key}"]) for key in ("fraction", "ci_low", "ci_high")
    )
    if name == DEFAULT_RULE:
        told = "it is the default"
    else:
        worth = "slower" if low > 0 else "level with it"
        told = (
            f"the default, {DEFAULT_RULE}, is {worth}: mean {gain:+.1f} % [{low:+.1f}, {high:+.1f}]"
        )
    if RuleName.parse(name).order is not None:
        told += (
            "; what follows + says which waiting request is next: it does nothing at "
            "endpoints without `order: priority`, unless the gateway holds requests back"
        )
    return told


def show(found: Found, console: Console) -> None:
    """Print what was found on the way, and all that was judged beside the best rule."""
    for remark in found.remarks:
        console.print(remark)
    table = Table(
        "requests judged by", "policy", "mean, s", "p99, s", "violations, %", "mean", "p99",
        title="Last part of the trace: differences to the best rule with 95 % intervals",
    )  # fmt: skip
    for row in found.rows:
        deltas = [
            f"{100 * float(row[f'delta_{k}_fraction']):+.1f} % "
            f"\\[{100 * float(row[f'delta_{k}_ci_low']):+.1f}, "
            f"{100 * float(row[f'delta_{k}_ci_high']):+.1f}]"
            for k in ("mean", "p99")
        ]
        table.add_row(
            str(row["part"]), str(row["policy"]), f"{float(row['mean_response_s']):.3g}",
            f"{float(row['p99_response_s']):.3g}",
            f"{100 * float(row['slo_violation_fraction']):.1f}", *deltas,
        )  # fmt: skip
    console.print(table)


def main(args: Args) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 150
    try:
        rows = train(args, console)
    except (ValueError, OSError) as error:
        sys.exit(f"train: {error}")
    if args.json is not None:
        write_result(args.json, command_line(), args.seed, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
