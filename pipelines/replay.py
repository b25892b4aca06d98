"""Replay a trace against a live endpoint, and compare the policies that route it.

    python pipelines/replay.py --url http://127.0.0.1:8000 --rate 2 --duration-s 120
    python pipelines/replay.py --url http://127.0.0.1:8000 --trace my.csv --compare champion,sed
    python pipelines/replay.py --url emulated --rate 7.5 --duration-s 30 --figure live.png

With several repeats the policies take turns, and differences have intervals.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import numpy as np
import tyro
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from serve_app.app import LOCAL_ADMIN_VARIABLE
from serve_app.http.free_port import free_port
from serve_app.load_generator import (
    Answer,
    Client,
    LoadConfig,
    as_sent,
    make_asks,
    make_rows,
    read_stretches,
    replay,
    summarise,
)
from tokenyard.figures import colours, log_seconds, new_axes, new_figure, save_figures, words
from tokenyard.provenance import ResultFile, command_line, write_result
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.twin import agreement, runners, simulate
from tokenyard.workload.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Args(LoadConfig):
    """Replay a trace against an endpoint that speaks OpenAI's API, open loop and streaming."""

    compare: str | None = None
    """Policies to switch between, separated by commas; None: whatever decides now."""
    baseline: str | None = None
    """Policy that differences are taken to; None: the first of `compare`."""
    repeats: int = 1
    """Times that every policy gets the same requests, in turns; with `--advance` the next ones."""
    url: str = LoadConfig.url
    """Where it listens; or the name of a cluster, which is served on a port of its own meanwhile
    (`deploy.py --cluster`)."""
    pause_s: tyro.conf.Suppress[float] = LoadConfig.pause_s
    timeout_s: tyro.conf.Suppress[float] = LoadConfig.timeout_s
    slo_response_s: float | None = None
    """What counts as good; None: what the served policy was trained to keep."""
    simulate: str | None = None
    """Scenario of the same replicas (`calibrate.py --url`): simulate the same requests as well."""
    figure: Path | None = None
    """Draw how long responses and first tokens took, by policy, into this PNG file."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


@contextmanager
def serving(cluster: str) -> Iterator[str]:
    """Serve a cluster while the context is open; gives the URL.

    Raises:
        ValueError: It did not start.
    """
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("deploy.py")), "--cluster", cluster]
    server = subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=subprocess.PIPE,
        env=os.environ | {LOCAL_ADMIN_VARIABLE: "1"},
        text=True,
    )
    print(f"starting cluster {cluster}", file=sys.stderr, flush=True)
    assert server.stdout is not None
    try:
        # Its one line comes when it answers.
        if not server.stdout.readline():
            raise ValueError(f"cluster {cluster} did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def draw(answers: dict[str, list[Answer]], credit: str) -> Figure:
    """Draw the share of requests that were answered, and had begun to be, within a time."""
    figure = new_figure(3.4, credit)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, what in zip(panels, ("response", "first token"), strict=True):
        new_axes(axes, f"time to the {what}, s" if what != "response" else "response time, s", "")
        for (policy, found), colour in zip(answers.items(), colours(), strict=False):
            times = [one.response_s if what == "response" else one.ttft_s for one in found]
            waited = np.sort(np.nan_to_num(np.array(times), nan=np.inf))
            share = np.arange(1, len(waited) + 1) / len(waited)
            axes.step(waited, 100 * share, where="post", color=colour, label=words(policy))
        log_seconds(axes)
    panels[0].set_ylabel("requests, %", fontsize=9)
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def print_rows(console: Console, rows: list[dict[str, Any]], baseline: str) -> None:
    """Lay out the rows."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    deltas = (f"mean % to {baseline}", "p99 %", "violations, points")
    for column in ("done", "failed", "mean s", "p50 s", "p99 s", "ttft s", "p99 ttft", "good/s",
                   "violations %", *deltas):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        keys = ("mean_response_s", "p50_response_s", "p99_response_s", "mean_ttft_s",
                "p99_ttft_s", "goodput_per_s")  # fmt: skip
        found = [_delta(row, key) for key in ("delta_mean", "delta_p99", "delta_slo")]
        cells = [f"{row[key]:.3g}" for key in keys]
        table.add_row(
            row["policy"], str(row["completed"]), str(row["failed"]), *cells,
            f"{100 * row['slo_violation_fraction']:.1f}",
            *([""] * len(found) if row["policy"] == baseline else found),
        )  # fmt: skip
    console.print(table)


def _delta(row: dict[str, Any], prefix: str) -> str:
    low, high = 100 * row[f"{prefix}_ci_low"], 100 * row[f"{prefix}_ci_high"]
    interval = "" if math.isnan(low) else f" \\[{low:+.1f}, {high:+.1f}]"
    estimate = row["delta_slo_violation" if prefix == "delta_slo" else f"{prefix}_fraction"]
    return f"{100 * estimate:+.1f}{interval}"


def add_simulated(
    args: Args,
    scenario: Scenario,
    policies_of: str,
    sent: list[Trace],
    rows: list[dict[str, Any]],
) -> None:
    """Put what the simulator says of the same requests into the rows, means over what was sent."""
    names = [row["policy"] for row in rows]
    found = [simulate(scenario, policies_of, one, names, args.seed) for one in sent]
    for row in rows:
        for key in ("mean_response_s", "p99_response_s", "mean_ttft_s", "slo_violation_fraction"):
            row[f"simulated_{key}"] = mean(one[row["policy"]][key] for one in found)


def print_simulated(console: Console, rows: list[dict[str, Any]]) -> None:
    """Lay out measured beside simulated."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for column in ("measured mean s", "simulated mean s", "error %", "p99 s", "simulated p99 s",
                   "violations %", "simulated violations %"):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        error = row["simulated_mean_response_s"] / row["mean_response_s"] - 1.0
        table.add_row(
            row["policy"], f"{row['mean_response_s']:.3g}",
            f"{row['simulated_mean_response_s']:.3g}", f"{100 * error:+.1f}",
            f"{row['p99_response_s']:.3g}", f"{row['simulated_p99_response_s']:.3g}",
            *(f"{100 * row[f'{by}slo_violation_fraction']:.1f}" for by in ("", "simulated_")),
        )  # fmt: skip
    console.print(table)
    found = agreement(
        *({row["policy"]: row[key] for row in rows}
          for key in ("mean_response_s", "simulated_mean_response_s"))
    )  # fmt: skip
    console.print(
        f"simulated means are off by {100 * found.mean_error_fraction:.1f} % "
        f"(at most {100 * found.max_error_fraction:.1f} %); Kendall's tau {found.kendall_tau:.2f}"
    )


async def run(args: Args, console: Console) -> list[dict[str, Any]]:
    """Replay, policy by policy in turns, and return the rows."""
    stretches = read_stretches(args, args.repeats if args.advance else 1)
    twin = load_scenario(args.simulate) if args.simulate else None
    client = Client(args)
    try:
        model = (await client.get("/v1/models"))["data"][0]
        client.model = model["id"]
        needs_card = args.compare or args.slo_response_s is None or twin is not None
        card = await client.get("/v1/policy") if needs_card else {}
        words_per_token = await client.words_per_token()
        longest = int(model.get("max_model_len") or 4096)
        asks = [make_asks(args, one, words_per_token, longest) for one in stretches]
        names = [one.strip() for one in (args.compare or "").split(",") if one.strip()]
        before = card.get("active", card.get("name", "as served"))
        baseline = args.baseline or (names[0] if names else before)
        if names and baseline not in names:
            names.append(baseline)
        elif not names and baseline != before:
            raise ValueError(f"baseline {baseline!r} does not decide; name it in --compare, too")
        if twin is not None:
            policies_of = card.get("scenario") or twin.name
            runners(twin, policies_of, names or [before])
        slo_s = args.slo_response_s or float(card["slo_response_s"])
        console.print(
            f"{sum(map(len, asks))} requests over {args.duration_s * len(asks):g} s, "
            f"{args.repeats // len(asks)} x "
            f"{', '.join(names or [before])}; good: answered within {slo_s:g} s",
            highlight=False,
        )
        found: dict[str, list[dict[str, float]]] = {one: [] for one in names or [before]}
        answered: dict[str, list[Answer]] = {one: [] for one in found}
        sent: dict[int, Trace] = {}
        try:
            for turn in range(args.repeats):
                order, which = list(found), turn % len(asks)
                # Each policy is once in every place, so that none always follows the same one.
                for name in order[turn % len(order) :] + order[: turn % len(order)]:
                    if names:
                        await client.switch(name)
                    answers, took_s = await replay(client, asks[which])
                    answered[name] += answers
                    found[name].append(summarise(asks[which], answers, took_s, slo_s))
                    told = as_sent(stretches[which], answers)
                    # What was not answered has no lengths: those of whom most was answered.
                    if told.num_requests >= max(1, sent.get(which, told).num_requests):
                        sent[which] = told
                    _tell(name, turn, answers, found[name][-1])
                    await asyncio.sleep(args.pause_s)
        finally:
            if names and "active" in card:
                await client.switch(before)
        source = args.trace or f"generated {args.scenario}"
        rows = make_rows(found, baseline, source)
        if args.figure is not None:
            credit = f"{len(asks[0])} requests in turn 1, {source}, turns: {args.repeats}"
            drawn = draw(answered, credit)
            [path] = save_figures({args.figure.stem: drawn}, args.figure.parent)
            console.print(f"picture: {path}", soft_wrap=True)
        if twin is not None:
            if not sent:
                raise ValueError("no request was answered, so none can be simulated")
            add_simulated(args, twin, policies_of, list(sent.values()), rows)
        return rows
    finally:
        await client.close()


def _tell(name: str, turn: int, answers: list[Answer], found: dict[str, float]) -> None:
    failures = Counter(one.failure for one in answers if one.failure is not None)
    why = "".join(f"; {count} x {reason}" for reason, count in failures.most_common(3))
    mean = found["mean_response_s"]
    print(f"turn {turn + 1} {name}: mean {mean:.3f} s{why}", file=sys.stderr, flush=True)


def main(args: Args) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 170
    if args.repeats < 1:
        sys.exit(f"replay: --repeats {args.repeats} must be at least 1")
    try:
        with nullcontext(args.url) if "://" in args.url else serving(args.url) as url:
            rows = asyncio.run(run(replace(args, url=url), console))
    except httpx.TransportError as error:
        why = str(error) or type(error).__name__
        sys.exit(f"replay: no answer from the gateway at {args.url}: {why}")
    except (ValueError, OSError, httpx.HTTPError, KeyError) as error:
        sys.exit(f"replay: {' '.join(str(error).split()) or type(error).__name__}")
    print_rows(console, rows, args.baseline or rows[0]["policy"])
    if args.simulate is not None:
        print_simulated(console, rows)
    if args.json is not None:
        write_result(args.json, command_line(args.token), args.seed, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
