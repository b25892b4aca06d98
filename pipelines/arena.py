"""Rank routing policies over many clusters, loads and kinds of traffic; add one of your own.

Rules that hold and place whole sessions have a second board.

    python pipelines/arena.py --quick
    python pipelines/arena.py --quick --entry my_rule.py
    python pipelines/arena.py --full --json arena.json
    python pipelines/arena.py --quick --entry http://127.0.0.1:8000/v1/route
    python pipelines/arena.py --live live.yaml

my_rule.py is a Python file with one class that has `route(self, request, snapshots) -> int`
(docs/arena.md); a trained policy (.npz) and a URL are entries too. live.yaml names routers that
listen somewhere, and traffic: they play in turns, and nothing is simulated.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from tokenyard.evaluation import processes
from tokenyard.problem import Row
from tokenyard.provenance import ResultFile, command_line, make_console, versions, write_result
from tokenyard.routing import arena
from tokenyard.routing.arena_page import write_page
from tokenyard.routing.policy_url import PolicyOfUrl, is_url
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.sessions import arena as sessions


@dataclass(frozen=True)
class Args:
    """Rank every rule, the policies that ship, and your own."""

    quick: bool = False
    """6 of the cells and one of sessions, with fewer and shorter streams."""
    full: bool = False
    """30 streams a cell in place of 8."""
    entry: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Policies of your own: Python files, artifacts (.npz), or URLs that answer POST /v1/route."""
    live: Path | None = None
    """File of routers and cells that are played live, in place of all others (docs/arena.md)."""
    seed: int = 2026
    """Of the streams."""
    sealed_seed: int | None = None
    """Draws the fleets of sealed cells; by default nobody knows it before, and it is printed."""
    jobs: int = os.cpu_count() or 1
    """Processes that matches are divided between."""
    page: Path = Path("runs/arena.html")
    """Where to write the board as a page."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


def print_board(console: Console, rows: list[Row], title: str) -> None:
    """Print a board as a table."""
    table = Table(
        "entry", "kind", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        title=f"{title} is than the best rule's in hindsight",
        title_justify="left",
    )  # fmt: skip
    for heading in ("cells", "mean rank", "mean regret %", "worst %", "better in", "worse in"):
        table.add_column(heading, justify="right")
    table.add_column("worst cell")
    for row in rows:
        table.add_row(
            str(row["entry"]), str(row["kind"]), str(row["cells"]), f"{row['mean_rank']:.1f}",
            *(f"{100 * float(row[f'{kind}_regret_mean_fraction']):+.1f}"
              for kind in ("mean", "worst")),
            str(row["cells_better"]), str(row["cells_worse"]), str(row["worst_cell"]),
        )  # fmt: skip
    console.print(table)


def simulated_rows(args: Args, sealed_seed: int) -> tuple[list[Row], list[Row], list[str], str]:
    """Play the cells; return their rows, those of sessions, what failed, and what was played."""
    size = arena.QUICK if args.quick else arena.FULL if args.full else arena.USUAL
    cells = arena.find_cells(args.quick, sealed_seed)
    session_cells = sessions.QUICK_CELLS if args.quick else sessions.CELLS
    for policy in args.entry:
        if is_url(policy):
            PolicyOfUrl(policy)
        else:
            PROBLEM.candidate(cells[0].scenario, policy)
    matches = [
        arena.Match(entry, cell, size, args.seed)
        for cell in cells
        for entry in arena.entries_of(cell, args.entry)
    ]
    with processes(args.jobs) as mapped:
        results = list(zip(matches, arena.play_all(matches, mapped), strict=True))
        of_sessions = [
            row
            for name in session_cells
            for row in sessions.rows_of_sessions(name, size.streams, args.seed, mapped)
        ]
    rows: list[Row] = []
    for cell in cells:
        of_cell = {match.entry: result for match, result in results if match.cell is cell}
        played = {key: value for key, value in of_cell.items() if not isinstance(value, str)}
        rows += arena.rows_of_cell(cell.name, cell.load, played, args.seed)
    failed = [
        f"{match.entry.name} in {match.cell.name}: {result}"
        for match, result in results
        if isinstance(result, str)
    ]
    failed += [
        f"{row['entry']} in {row['cell']}: {100 * float(share):.1f} % of its decisions failed"
        for row in rows
        if (share := row.get(arena.FAILED))
    ]
    size_line = (
        f"{len(cells)} cells, {size.streams} streams of {size.requests} requests each, and "
        f"{len(session_cells)} of sessions; sealed cells: --sealed-seed {sealed_seed}"
    )
    return rows, of_sessions, failed, size_line


def live_rows(args: Args, path: Path) -> tuple[list[Row], list[Row], list[str], str]:
    """Play the cells of a file; return as `simulated_rows`."""
    # It needs what serving does.
    from serve_app.live_arena import play_live, read_live

    live, tell = read_live(path), partial(print, file=sys.stderr, flush=True)
    rows: list[Row] = []
    for cell, rate_per_s, measured in play_live(live, args.seed, tell):
        played = {
            arena.Entry(name, "live", live.routers[name]): measures
            for name, measures in measured.items()
        }
        rows += [
            {**row, "rate_per_s": rate_per_s}
            for row in arena.rows_of_cell(cell, math.nan, played, args.seed)
        ]
    failed = [
        f"{row['entry']} in {row['cell']}: {100 * share:.1f} % of the requests"
        for row in rows
        if (share := float(row["dropped_fraction"]))
    ]
    size_line = f"{len(live.cells)} cells, {live.repeats} turns of {live.duration_s:g} s each"
    return rows, [], failed, size_line


def main(args: Args) -> None:
    if args.quick and args.full:
        sys.exit("arena: give one of --quick and --full")
    if args.live is not None and (args.quick or args.full or args.entry):
        sys.exit("arena: --live takes its routers and cells from its file, and no other option")
    if args.jobs < 1:
        sys.exit(f"arena: --jobs {args.jobs} must be at least 1")
    sealed_seed = secrets.randbits(31) if args.sealed_seed is None else args.sealed_seed
    started_s = time.monotonic()
    try:
        if args.live is None:
            rows, of_sessions, failed, size_line = simulated_rows(args, sealed_seed)
        else:
            rows, of_sessions, failed, size_line = live_rows(args, args.live)
    except ValueError as error:
        sys.exit(f"arena: {error}")
    summed, summed_sessions = arena.board(rows), arena.board(of_sessions)
    console = make_console(150)
    print_board(console, summed, "regret: how much longer the mean response")
    if summed_sessions:
        print_board(console, summed_sessions, "sessions: how much longer the mean completion")
    for line in failed:
        console.print(f"failed: {line}", markup=False)
    size_line += f"; {time.monotonic() - started_s:.0f} s"
    console.print(size_line, soft_wrap=True)
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    write_page(args.page, rows, of_sessions, failed, [size_line, command_line(), installed])
    console.print(f"page: {args.page}", soft_wrap=True)
    if args.json is not None:
        every = rows + summed + of_sessions + summed_sessions
        write_result(args.json, command_line(), args.seed, every, sealed_seed=sealed_seed)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
