"""CPU time of the compiled parts in two checkouts, in turns, so that a slow minute hits both alike.

git worktree add --detach ../before COMMIT
python benchmarks/compare_trees.py ../before .

Every turn is one process per tree, with one thread: what it measures is run once before, to be
compiled or loaded, and then again and again; the least CPU time counts. The ratio is new over old
in the same turn, and its median over turns is printed with its range. Each tree keeps its own
cache of compiled functions, empty at the start.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

MEASURES = """
import json, sys, time
import env_throughput as env, decision_latency as latency, regions_speed as regions

def least_s(run, repetitions):
    run()
    times = []
    for _ in range(repetitions):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times)

n, found = int(sys.argv[1]), {}
args = env.Args(episode_requests=500)
for name, one in {
    "constant-rate kernel": env.simulator(args, 64),
    "batching kernel": env.kernel_rule(args, "accept"),
    "batching kernel, lookahead": env.fleet_env(args, "response", 8),
    "allocation slots": env.allocation_env(args, "hybrid", 64),
    "routing environment": env.vectorised(args, 64),
    "fleet environment": env.fleet_env(args, "accept", 8),
}.items():
    found[name] = least_s(one.run_episode, n)
args = regions.Args(runs=n)
scenario = regions.a_scenario(12, 250, 100)
for policy in ("round_robin", "prox_ot_forecast_live_cost"):
    found[f"regions episode, {policy}"] = regions.episode_s(scenario, policy, args)[0]
args = latency.Args()
for replicas in (3, 100):
    policies = latency.policies(args, replicas)[0]
    servers = latency.cases(replicas, 0)
    for policy, cases in {
        "sed": servers,
        "linear": servers,
        "network_128x128": servers,
        "marginal_delay": latency.cases(replicas, 0, batches=True),
    }.items():
        took = [latency.measure(policies[policy], cases, 2000)["p50_cpu_us"] for _ in range(n)]
        found[f"decision, {policy}, {replicas} replicas"] = 1e-6 * min(took)
print(json.dumps(found))
"""
"""Goes by the functions of this folder's other scripts, each tree's own."""


@dataclass(frozen=True)
class Args:
    """Compare the speeds of two checkouts."""

    old: tyro.conf.Positional[Path]
    new: tyro.conf.Positional[Path]
    turns: int = 5
    repetitions: int = 3
    """Of every measurement within a turn."""
    json: Path | None = None
    """Write the result rows to this file."""


def measured(tree: Path, cache: Path, repetitions: int) -> dict[str, float]:
    """Seconds of CPU time by what was measured."""
    paths = os.pathsep.join([str(tree), str(tree / "benchmarks")])
    own = {"PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURES, str(repetitions)],
        env=os.environ | own, cwd=tree, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(args: Args, folder: Path) -> list[dict[str, str | float]]:
    """Run the turns, the first tree first in every other one."""
    trees = {"old": args.old.resolve(), "new": args.new.resolve()}
    caches = {tree: folder / str(number) for number, tree in enumerate(set(trees.values()))}
    # Compiling is no part of a turn.
    for tree in caches:
        measured(tree, caches[tree], repetitions=1)
    turns: list[tuple[dict[str, float], dict[str, float]]] = []
    for turn in range(args.turns):
        order = ("old", "new") if turn % 2 == 0 else ("new", "old")
        took = {
            which: measured(trees[which], caches[trees[which]], args.repetitions) for which in order
        }
        turns.append((took["old"], took["new"]))
        print(f"turn {turn + 1} of {args.turns}", file=sys.stderr, flush=True)
    rows: list[dict[str, str | float]] = []
    for name in turns[0][0]:
        ratios = [new[name] / old[name] for old, new in turns]
        rows.append(
            {
                "what": name,
                "old_cpu_ms": 1e3 * statistics.median(old[name] for old, _ in turns),
                "new_cpu_ms": 1e3 * statistics.median(new[name] for _, new in turns),
                "ratio": statistics.median(ratios),
                "least_ratio": min(ratios),
                "greatest_ratio": max(ratios),
            }
        )
    return rows


def main(args: Args) -> None:
    folder = Path(tempfile.mkdtemp(prefix="compare-trees-"))
    try:
        rows = compare(args, folder)
    finally:
        shutil.rmtree(folder)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()))
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(table)
    if args.json is not None:
        args.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Args))
