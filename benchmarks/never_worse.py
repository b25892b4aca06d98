"""The law: whether a policy is ever worse than the best tuned rule, on clusters drawn at random.

    python benchmarks/never_worse.py --draws 200 --json never_worse.json

Each draw is a cluster and its traffic (`tokenyard.routing.drawn_clusters.draw_wide`). Its rival is
the best of all placements, orders and knobs on one half of the draw's streams; policies are judged
beside it on the other half (`tokenyard.routing.never_worse`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from tokenyard.evaluation import difference
from tokenyard.problem import Row
from tokenyard.provenance import ResultFile, report
from tokenyard.routing import never_worse as law
from tokenyard.routing.simulator.server_models import COMPARED

WIDTH = 180
"""Columns of the tables."""
NUM_WORST = 5
"""Draws that are named of every policy that breaks the law."""


@dataclass(frozen=True)
class Args:
    """Judge policies by the law."""

    draws: int = 200
    """Clusters."""
    policies: tuple[str, ...] = ("marginal_delay", "default", "tuned", "tuned:5")
    """`default`; `tuned` (behind `:` the streams of its own); `marginal_delay` or
    `marginal_in_order`, with an order where one is wanted; or policy files (.npz)."""
    streams: int = law.STREAMS
    """Of each half of a draw."""
    workers: int = 2
    """Processes."""
    seed: int = 0
    """Of the draws."""
    json: ResultFile | None = None
    """Where to write the rows."""


def table(verdicts: Sequence[Row]) -> Table:
    """One line per policy."""
    found = Table(
        "policy", "draws", f"worse by {law.WORSE:.0%}", "in mean", "in p99", "in violations",
        f"worse by {law.FAR_WORSE:.0%}", "better", "median mean %", "mean of means %",
        f"at most {law.MOST_WORSE:.0%} worse, none by {law.FAR_WORSE:.0%}",
        box=box.SIMPLE_HEAD,
    )  # fmt: skip
    counts = ("draws", "worse", *(f"worse_{key}" for key in law.DELTAS), "far_worse", "better")
    for row in verdicts:
        found.add_row(
            str(row["policy"]), *(str(row[key]) for key in counts),
            *(f"{100 * float(row[key]):+.1f}" for key in ("median_mean", "mean_mean")),
            "holds" if row["holds"] else "does not hold",
        )  # fmt: skip
    return found


def worst(rows: Sequence[Row], policies: Sequence[str]) -> Table:
    """Draws that break the law furthest, by name."""
    found = Table("policy", "draw", "cluster", "rival", "mean", "p99", "violations, points",
                  title="furthest beyond the rival", box=box.SIMPLE_HEAD)  # fmt: skip
    for policy in policies:
        broken = [row for row in of(rows, policy) if row["worse"]]
        broken.sort(key=lambda row: -float(row["worst_delta_ci_low"]))
        for row in broken[:NUM_WORST]:
            found.add_row(
                policy, str(row["draw"]), str(row["cell"]), str(row["rival"]),
                *(difference(row, measure) for measure in COMPARED),
            )  # fmt: skip
    return found


def of(rows: Sequence[Row], policy: str) -> list[Row]:
    """Rows of one policy."""
    return [row for row in rows if row["policy"] == policy]


def main(args: Args) -> None:
    draw = partial(law.play, policies=args.policies, seed=args.seed, streams=args.streams)
    rows: list[Row] = []
    with ProcessPoolExecutor(args.workers) as pool:
        for number, drawn in enumerate(pool.map(draw, range(args.draws)), 1):
            rows += drawn
            if number % 20 == 0:
                print(f"{number} draws", file=sys.stderr, flush=True)
    # A file may be for servers that no draw has.
    judged = [policy for policy in args.policies if of(rows, policy)]
    verdicts = [law.verdict(of(rows, policy)) for policy in judged]
    Console(width=WIDTH, highlight=False).print(worst(rows, judged))
    report(table(verdicts), rows + verdicts, args.json, args.seed, WIDTH)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
