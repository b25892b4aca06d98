"""Compare the rule that routes your requests today with the best one for them: one page to forward.

    python pipelines/compare.py --trace my.csv --fleet fleet.yaml --now "vllm-router round_robin"
    python pipelines/compare.py --log DIR --fleet fleet.yaml --html page.html
    python pipelines/compare.py --log spans.jsonl --url http://prometheus:9090 --now llm-d

The first part of a trace or decision log is learned from, the last part judges, on a simulator of
the fleet (`tokenyard.routing.own_traffic`). The page says what the best rule gains at the load, at
half of it and above, how many requests a second the same GPUs carry within the SLOs, and how far
the simulator is off what was measured. Where it is too far off, no gain is claimed, and the command
ends with status 1.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenyard.problem import Row
from tokenyard.provenance import (
    ResultFile,
    command_line,
    git_sha,
    make_console,
    versions,
    write_result,
)
from tokenyard.routing.artifact import default_rule
from tokenyard.routing.comparison import (
    HEADINGS,
    Conclusion,
    cells,
    judged,
    tables,
    without_claims,
    write_page,
)
from tokenyard.routing.gate import MOST_LOAD
from tokenyard.routing.live_fleet import write_live
from tokenyard.routing.load_sweep import LoadSweep, Played
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
from tokenyard.workload.trace_options import TraceOptions


@dataclass(frozen=True, kw_only=True)
class Args:
    """Compare today's rule with the best rule on your own traffic and fleet."""

    trace: str | None = None
    """Your traffic: a trace file (docs/workloads.md), or the name of a published one. A column
    `response_s` of measured times lets the simulator be checked."""
    log: Path | None = None
    """Or what was logged: a gateway's folder of `--decision-log`, or a file or folder of SGLang's
    request log or of OpenTelemetry spans (docs/workloads.md)."""
    fleet: str | None = None
    """Replicas and SLOs: a YAML file (what `calibrate.py --url` writes, or a scenario), or the name
    of a fleet that ships."""
    url: str | None = None
    """Or who knows the replicas: a gateway, or a Prometheus server that scrapes vLLM. A bearer
    token is taken from TOKENYARD_TOKEN."""
    model: str | None = None
    """Which model of that URL, where several are served."""
    now: str | None = None
    """What decides today: a rule, a policy file (.npz), or a router by its makers' name, such as
    `nginx least_conn` (docs/rules.md). None: what a log names, else Tokenyard's default rule."""
    load: float | None = None
    """Offered load that the requests are scaled to, at most 1.1; None: their own rate."""
    goal: float = 0.95
    """Share of requests within their SLOs up to which load is raised."""
    minutes: float = 0.0
    """For searches of a better policy; 0: only rules are played, which takes one or two minutes."""
    seed: int = 0
    """Of searches and of rules that draw."""
    html: ResultFile | None = None
    """Write the page to this file."""
    json: ResultFile | None = None
    """Write the result rows to this file."""
    reading: tyro.conf.OmitArgPrefixes[TraceOptions] = field(default_factory=TraceOptions)


def check(args: Args) -> None:
    """Refuse options that do not go together, or are out of their range, with a ValueError."""
    if (args.trace is None) == (args.log is None) or (args.fleet is None) == (args.url is None):
        raise ValueError("give one of --trace and --log, and one of --fleet and --url")
    if args.load is not None and not 0 < args.load <= MOST_LOAD:
        raise ValueError(f"--load {args.load:g} must be above 0, and at most {MOST_LOAD:g}")
    if args.minutes < 0:
        raise ValueError(f"--minutes {args.minutes:g} must be at least 0")
    if not 0 < args.goal < 1:
        raise ValueError(f"--goal {args.goal:g} must lie between 0 and 1")


def read_traffic(args: Args, folder: Path) -> Traffic:
    """What was asked, of which replicas, and what decides today; files go to that folder."""
    now, fleet = None if args.now is None else Choice.named(args.now), args.fleet
    if args.url is not None:
        fleet = str(folder / "live.yaml")
        base = load_scenario("conversation_mixed_gpus")  # Its SLO counts where the URL tells none.
        rows, description = write_live(args.url, Path(fleet), base, args.model)
        print(f"fleet of {len(rows)} replicas from {args.url}. {description}", file=sys.stderr)
    if args.log is not None and any(args.log.glob("decisions-*.parquet")):
        return logged_traffic(args.log, str(fleet), now)
    return Traffic(args.reading.read(str(args.log or args.trace))[0], str(fleet), now)


def policies(traffic: Traffic, trained: Found, default: str) -> list[Played]:
    """What is played: differences are to today's rule, or to the default where none is known."""
    played = [] if traffic.now is None else [Played("now", traffic.now)]
    played += [Played("default", Choice(default)), Played("best_rule", trained.rule)]
    return played + ([] if trained.searched is None else [Played("searched", trained.searched)])


def compare(args: Args, console: Console) -> tuple[list[Row], Conclusion]:
    """Play, judge, print, and write the page if asked; ValueError: options or a file are wrong."""
    check(args)
    with tempfile.TemporaryDirectory() as folder:
        traffic = read_traffic(args, Path(folder))
        model = Path(folder) / f"{Path(str(args.log or args.trace)).stem}.json"
        own = OwnTraffic(traffic, model, args.minutes, args.load, args.seed)
        error = own.twin_error(traffic)
        trained = own.train()
        played = policies(traffic, trained, default_rule(own.scenario))
        rows = LoadSweep(own, played, args.goal).rows()
    at_load = [row for row in rows if row["offered_load"] == own.load]
    verdict = judged(at_load, trained.choice.name, args.goal, error)
    if verdict.is_refused:
        rows = [without_claims(row) for row in rows]
    rows = [row | {"twin_error_fraction": error} for row in rows]
    show(tables(rows, own.load), verdict, console)
    console.print(serve_line(played, trained), soft_wrap=True)
    if args.html is not None:
        write_page(args.html, rows, own.load, verdict, args.goal, made(own, played, trained))
        console.print(f"wrote {args.html}", soft_wrap=True)
    return rows, verdict


def serve_line(played: list[Played], trained: Found) -> str:
    """How the recommended policy is served."""
    name = trained.choice.name
    if trained.choice == trained.searched:
        return "best here: the searched policy; `tokenyard train` with --out writes it"
    if name == played[0].choice.name and played[0].role == "now":
        return f"best here: what decides today, {name}"
    line = f"best here: serve it with --policy {name}"
    return f"{line}; {ORDER_NOTE}" if RuleName.parse(name).order is not None else line


def made(own: OwnTraffic, played: list[Played], trained: Found) -> list[str]:
    """How the page was made, in sentences, and the command."""
    num, first = own.trace.num_requests, own.first_judged
    known = versions()
    return [
        f"Of {num:,} requests the first {first:,} chose the best rule; the last {num - first:,} "
        "judge. These are played in one go, with the same requests for every policy, behind up to "
        "1,000 earlier ones that fill the servers and do not count. Intervals are from leaving out "
        "one of 30 blocks at a time.",
        *(f"{remark[:1].upper()}{remark[1:]}." for remark in trained.remarks),
        "Everything is simulated: no request was sent to your fleet.",
        f"Tokenyard {known.get('tokenyard', '')}, commit {git_sha()[:8]}, "
        f"Python {known['python']}. The command:",
        command_line(),
    ]


def show(titled: list[tuple[str, list[Row]]], verdict: Conclusion, console: Console) -> None:
    """Print the verdict and the tables at the load and at half of it."""
    console.print(f"\n[bold]{escape(verdict.headline)}[/]", soft_wrap=True)
    for sentence in verdict.sentences:
        console.print(f"  {escape(sentence)}", soft_wrap=True)
    for title, group in titled:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for place, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="right" if place else "left")
        for row in group:
            table.add_row(*(escape("\n".join(cell)) for cell in cells(row)))
        console.print(table)


def main(args: Args) -> None:
    console = make_console(140)
    try:
        rows, verdict = compare(args, console)
    except (ValueError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    write_result(args.json, command_line(), args.seed, rows)
    if verdict.is_refused:
        sys.exit(1)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
