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
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
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
    Ask,
    Client,
    LoadConfig,
    ReplayedAnswer,
    as_sent,
    make_asks,
    make_rows,
    read_stretches,
    replay,
    summarise,
)
from tokenyard.figures import colours, log_seconds, new_axes, new_figure, save_figures, words
from tokenyard.provenance import ResultFile, command_line, make_console, write_result
from tokenyard.routing.fleet import TrafficClass
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
    """Response time above which a request violates its SLO; None: the SLOs of the first class of
    `simulate`, else what the served policy was trained to keep."""
    simulate: str | None = None
    """Scenario of the same replicas (`calibrate.py --url`): simulate the same requests as well."""
    figure: Path | None = None
    """Draw how long responses and first tokens took, by policy, into this PNG file."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


@contextmanager
def serving(cluster: str) -> Iterator[str]:
    """Serve a cluster while the context is open; gives the URL. ValueError: it did not start."""
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


def draw(answers: dict[str, list[ReplayedAnswer]], credit: str) -> Figure:
    """Draw the share of requests whose response, or first token, came within a time."""
    figure = new_figure(3.4, credit)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, what in zip(panels, ("response", "first token"), strict=True):
        new_axes(axes, f"time to the {what}, s" if what != "response" else "response time, s", "")
        for (policy, replies), colour in zip(answers.items(), colours(), strict=False):
            times = [reply.response_s if what == "response" else reply.ttft_s for reply in replies]
            waited = np.sort(np.nan_to_num(np.array(times), nan=np.inf))
            share = np.arange(1, len(waited) + 1) / len(waited)
            axes.step(waited, 100 * share, where="post", color=colour, label=words(policy))
        log_seconds(axes)
    panels[0].set_ylabel("requests, %", fontsize=9)
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_rows(console: Console, rows: list[dict[str, Any]], baseline: str) -> None:
    """Print the rows as a table."""
    table = _table(
        "done", "failed", "mean s", "p50 s", "p99 s", "ttft s", "p99 ttft", "good/s",
        "violations %", f"mean % to {baseline}", "p99 %", "violations, points",
    )  # fmt: skip
    for row in rows:
        keys = ("mean_response_s", "p50_response_s", "p99_response_s", "mean_ttft_s",
                "p99_ttft_s", "goodput_per_s")  # fmt: skip
        deltas = [_delta(row, key) for key in ("delta_mean", "delta_p99", "delta_slo")]
        cells = [f"{row[key]:.3g}" for key in keys]
        table.add_row(
            row["policy"], str(row["completed"]), str(row["failed"]), *cells,
            f"{100 * row['slo_violation_fraction']:.1f}",
            *([""] * len(deltas) if row["policy"] == baseline else deltas),
        )  # fmt: skip
    console.print(table)


def _delta(row: dict[str, Any], prefix: str) -> str:
    low, high = 100 * row[f"{prefix}_ci_low"], 100 * row[f"{prefix}_ci_high"]
    interval = "" if math.isnan(low) else f" \\[{low:+.1f}, {high:+.1f}]"
    estimate = row["delta_slo_violation" if prefix == "delta_slo" else f"{prefix}_fraction"]
    return f"{100 * estimate:+.1f}{interval}"


def print_simulated(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print measured beside simulated values as a table."""
    table = _table(
        "measured mean s", "simulated mean s", "error %", "p99 s", "simulated p99 s",
        "violations %", "simulated violations %",
    )  # fmt: skip
    for row in rows:
        error = row["simulated_mean_response_s"] / row["mean_response_s"] - 1.0
        table.add_row(
            row["policy"], f"{row['mean_response_s']:.3g}",
            f"{row['simulated_mean_response_s']:.3g}", f"{100 * error:+.1f}",
            f"{row['p99_response_s']:.3g}", f"{row['simulated_p99_response_s']:.3g}",
            *(f"{100 * row[f'{by}slo_violation_fraction']:.1f}" for by in ("", "simulated_")),
        )  # fmt: skip
    console.print(table)
    agreed = agreement(
        *({row["policy"]: row[key] for row in rows}
          for key in ("mean_response_s", "simulated_mean_response_s"))
    )  # fmt: skip
    console.print(
        f"simulated means are off by {100 * agreed.mean_error_fraction:.1f} % "
        f"(at most {100 * agreed.max_error_fraction:.1f} %); Kendall's tau {agreed.kendall_tau:.2f}"
    )


@dataclass
class Measured:
    """What has been measured so far: whatever ends a replay, this is told and written."""

    source: str
    baseline: str = ""
    turns: dict[str, list[dict[str, float] | None]] = field(default_factory=dict)
    """Metrics by policy and turn; None: that turn is void."""
    answers: dict[str, list[ReplayedAnswer]] = field(default_factory=dict)
    limits: tuple[float, float | None, float | None] = (math.inf, None, None)
    """SLOs on the response, the first token and the time per token, seconds; None: there is none.
    """
    twin: Scenario | None = None
    """What is simulated."""
    policies_of: str = ""
    """Scenario whose champion and tuned rules decide."""
    sent: dict[int, Trace] = field(default_factory=dict)
    """What was sent, as the endpoint counted its lengths, by stretch of the traffic."""
    is_interrupted: bool = False

    def add(
        self,
        name: str,
        asks: list[Ask],
        answers: list[ReplayedAnswer],
        took_s: float,
        why_void: str | None,
    ) -> None:
        """Add a policy's turn, and print its mean response time and failures."""
        if not answers:
            return
        row = summarise(asks, answers, took_s, *self.limits)
        self.turns[name].append(None if why_void else row)
        failures = Counter(answer.failure for answer in answers if answer.failure is not None)
        why = "".join(f"; {count} x {reason}" for reason, count in failures.most_common(3))
        why += f"; void: meanwhile {why_void}" if why_void else ""
        message = f"turn {len(self.turns[name])} {name}: mean {row['mean_response_s']:.3f} s{why}"
        print(message, file=sys.stderr, flush=True)
        self.answers.setdefault(name, []).extend([] if why_void else answers)

    def rows(self) -> list[dict[str, Any]]:
        """One row per policy that has a turn which is not void."""
        rows = make_rows(self.turns, self.baseline, self.source)
        return [row | {"void_turns": self.turns[row["policy"]].count(None)} for row in rows]


def add_simulated(
    seed: int, twin: Scenario, measured: Measured, rows: list[dict[str, Any]]
) -> None:
    """Add the simulator's results for the same requests to the rows, as means over all turns."""
    names = [row["policy"] for row in rows]
    simulated = [
        simulate(twin, measured.policies_of, sent, names, seed) for sent in measured.sent.values()
    ]
    for row in rows:
        for key in ("mean_response_s", "p99_response_s", "mean_ttft_s", "slo_violation_fraction"):
            row[f"simulated_{key}"] = mean(means[row["policy"]][key] for means in simulated)


async def decider(client: Client) -> tuple[str, str, str] | None:
    """Fetch the active policy's name, its SHA-256 and its last change; None if that fails."""
    try:
        card, policies = await client.get("/v1/policy"), await client.get("/v1/policies")
        # Other events concern plans and keys.
        changes = [event for event in policies["events"] if "@" in event["policy"]]
        last = "{what} {policy} at {time_s}".format(**changes[0]) if changes else "unknown"
        return card["active"], card["sha256"], last
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def slo_of(args: Args, twin: Scenario | None, card: dict[str, Any]) -> tuple[TrafficClass, str]:
    """What is a violation, measured or simulated, and who says so; ValueError: nobody does."""
    if args.slo_response_s is not None:
        return TrafficClass(name="all", response_s=args.slo_response_s), "--slo-response-s"
    if twin is not None:
        # A request that names no class has the first one.
        first = TrafficClass(name="all") if twin.fleet is None else twin.fleet.classes[0]
        response_s = first.response_s or twin.slo_response_s
        slo = first.model_copy(update={"response_s": response_s})
        return slo, f"class {slo.name!r} of scenario {twin.name}"
    if "slo_response_s" not in card:
        raise ValueError("the endpoint tells no SLO: give --slo-response-s")
    return TrafficClass(name="all", response_s=card["slo_response_s"]), "the policy that decides"


def cancel_on_signals(measured: Measured) -> None:
    """Have Ctrl-C and SIGTERM cancel the running task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        measured.is_interrupted = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)


async def run(args: Args, console: Console, measured: Measured) -> None:
    """Replay, policy by policy in turns."""
    cancel_on_signals(measured)
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
        names = [name.strip() for name in (args.compare or "").split(",") if name.strip()]
        begun = await decider(client)
        before = card.get("name", "as served") if begun is None else begun[0]
        baseline = args.baseline or (names[0] if names else before)
        if names and baseline not in names:
            names.append(baseline)
        elif not names and baseline != before:
            raise ValueError(f"baseline {baseline!r} does not decide; name it in --compare, too")
        slo, whose = slo_of(args, twin, card)
        if twin is not None:
            fleet = twin.fleet and twin.fleet.model_copy(update={"classes": (slo,)})
            alike = {"fleet": fleet, "slo_response_s": slo.response_s}
            measured.twin = twin.model_copy(update=alike)
            measured.policies_of = card.get("scenario") or twin.name
            runners(twin, measured.policies_of, names or [before])
        measured.baseline = baseline
        measured.turns = {name: [] for name in names or [before]}
        measured.limits = slo.response_s or math.inf, slo.ttft_s, slo.tpot_s
        named = zip(("response", "first token", "per token"), measured.limits, strict=True)
        over = " or ".join(f"{what} over {value:g} s" for what, value in named if value)
        console.print(
            f"{sum(stretch.num_requests for stretch in stretches)} requests over "
            f"{args.duration_s * len(stretches):g} s, {args.repeats // len(stretches)} x "
            f"{', '.join(measured.turns)}; "
            f"violation: {over} ({whose})",
            highlight=False,
        )
        try:
            for turn in range(args.repeats):
                order, which = list(measured.turns), turn % len(stretches)
                # Rotate the order, so that no policy always follows the same one.
                for name in order[turn % len(order) :] + order[: turn % len(order)]:
                    if measured.is_interrupted:
                        # A connection attempt may have swallowed the cancellation.
                        raise asyncio.CancelledError
                    if names:
                        await client.switch(name)
                    # Nothing of an earlier replay may be in an engine's prefix cache.
                    salt = secrets.randbits(32)
                    sent = make_asks(args, stretches[which], words_per_token, longest, salt)
                    first, done = await decider(client), dict[int, ReplayedAnswer]()
                    started_s, why_void = time.perf_counter(), None
                    try:
                        answers, _ = await replay(client, sent, done)
                        after = await decider(client)
                        if (first and first[0]) not in (None, name) or first != after:
                            why_void = f"the gateway {after[2] if after else 'does not answer'}"
                    finally:
                        # An interrupted turn reports the requests that have ended.
                        ended = [sent[i] for i in sorted(done)]
                        took_s = time.perf_counter() - started_s
                        measured.add(name, ended, [done[i] for i in sorted(done)], took_s, why_void)
                        write(args, measured.rows())
                    stream = as_sent(stretches[which], answers)
                    # Unanswered requests have no lengths: keep the turn with the most answers.
                    most = max(1, measured.sent.get(which, stream).num_requests)
                    if not why_void and stream.num_requests >= most:
                        measured.sent[which] = stream
                    await asyncio.sleep(args.pause_s)
        finally:
            if names and begun is not None:
                await client.switch(before)
    finally:
        await client.close()


def write(args: Args, rows: list[dict[str, Any]]) -> None:
    """Write what there is: whatever happens next, it is not lost."""
    if rows:
        write_result(args.json, command_line(args.token), args.seed, rows)


def main(args: Args) -> None:
    console = make_console(170)
    if args.repeats < 1:
        sys.exit(f"replay: --repeats {args.repeats} must be at least 1")
    # Also while a cluster starts, before there is a loop.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    measured = Measured(args.trace or f"generated {args.scenario}")
    ended = None
    try:
        with nullcontext(args.url) if "://" in args.url else serving(args.url) as url:
            asyncio.run(run(replace(args, url=url), console, measured))
    except (KeyboardInterrupt, asyncio.CancelledError):
        ended = "interrupted"
    except httpx.TransportError as error:
        why = str(error) or type(error).__name__
        ended = f"no answer from the gateway at {args.url}: {why}"
    except (ValueError, OSError, httpx.HTTPError, KeyError) as error:
        ended = " ".join(str(error).split()) or type(error).__name__
    rows = measured.rows()
    if rows:
        print_rows(console, rows, measured.baseline)
    if rows and args.figure is not None:
        drawn = draw(measured.answers, f"{measured.source}, turns: {args.repeats}")
        [path] = save_figures({args.figure.stem: drawn}, args.figure.parent)
        console.print(f"picture: {path}", soft_wrap=True)
    if ended is not None or not rows:
        sys.exit(f"replay: {ended or 'every turn is void'}")
    if measured.twin is not None:
        if not measured.sent:
            sys.exit("replay: no request was answered, so none can be simulated")
        add_simulated(args.seed, measured.twin, measured, rows)
        print_simulated(console, rows)
        write(args, rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
