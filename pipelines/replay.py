"""Replay a trace against a live endpoint, and compare the policies that route it.

python pipelines/replay.py --url http://127.0.0.1:8000 --rate 2 --duration-s 120
python pipelines/replay.py --url http://127.0.0.1:8000 --trace my.csv --rate-scale 0.1 \
    --compare champion,sed,ray_default --repeats 5 --json live.json
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from tokenyard import metrics
from tokenyard.provenance import write_result
from tokenyard.routing.scenario import Scenario, load_scenario
from tokenyard.routing.twin import agreement, simulate
from tokenyard.statistics.intervals import t_interval
from tokenyard.types import FloatArray
from tokenyard.workload.model import load_model
from tokenyard.workload.paths import TRACE_FILES, find_trace
from tokenyard.workload.readers import read_trace
from tokenyard.workload.trace import Trace

WORDS = (
    " the of and to in is that it was for on are with as be at one have this from or had by but"
    " some what there we can out other were all your when up use word how said an each she which"
    " do their time if will way about many then them would write like so these her long make see"
    " him two has look more day could go come did my no most who over know than call first people"
    " may down side been now find any new work part take get place made where after back little"
    " only round man year came show every good me give our under name very through just form much"
    " great think say help low line before turn cause same mean differ move right boy old too does"
    " tell set three want air well also play small end put home read hand port large spell add"
    " even land here must big high such follow act why ask men change went light kind off need"
).split()
_RETRIES_S = (0.0, 1.0, 3.0)


@dataclass(frozen=True)
class Args:
    """Replay a trace against an endpoint that speaks OpenAI's API, open loop and streaming."""

    url: str = "http://127.0.0.1:8000"
    """Where it listens."""
    trace: str | None = None
    """File, or name of a published trace (azure_code, azure_conv, ...); None: the generator."""
    workload: str = "azure_conv"
    """Fitted workload model that the generator draws from."""
    rate: float | None = None
    """Mean requests per second; None: the trace's, or 1 for the generator."""
    rate_scale: float = 1.0
    """Times as many requests per second as in the trace."""
    length_scale: float = 1.0
    """Factor on prompt and output lengths, for models that are small."""
    first: int = 0
    """Index of the first request of the trace."""
    duration_s: float = 120.0
    """Requests that arrive within so many seconds are sent."""
    compare: str | None = None
    """Policies to switch between, separated by commas; None: whatever decides now."""
    baseline: str | None = None
    """Policy that differences are taken to; None: the first of `compare`."""
    repeats: int = 1
    """Times that every policy gets the same requests, in turns."""
    pause_s: float = 1.0
    """Pause between two replays."""
    slo_response_s: float | None = None
    """What counts as good; None: what the served policy was trained to keep."""
    simulate: str | None = None
    """Scenario of the same replicas (`calibrate.py --url`): simulate the same requests as well."""
    timeout_s: float = 600.0
    """Time after which a request counts as failed."""
    token: str | None = None
    """Bearer token; TOKENYARD_TOKEN serves in its place."""
    seed: int = 2026
    """Of generated traffic and of the words in prompts."""
    json: Path | None = None
    """Write the result rows to this file."""


@dataclass(frozen=True)
class Ask:
    """One request to send."""

    arrival_s: float
    words: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """What became of it; times in seconds since it was due, NaN where there is none."""

    response_s: float
    ttft_s: float
    prompt_tokens: int
    output_tokens: int
    failure: str | None


def read_requests(args: Args) -> Trace:
    """Return the requests to send, in their own time."""
    if args.trace is None:
        rate = (args.rate or 1.0) * args.rate_scale
        num = max(int(rate * args.duration_s * 2) + 50, 1)
        trace = load_model(args.workload).generate(num, np.random.default_rng(args.seed), rate)
    else:
        path = find_trace(args.trace) if args.trace in TRACE_FILES else Path(args.trace)
        if path is None or not path.is_file():
            raise ValueError(f"trace {args.trace} is not there")
        trace = read_trace(path)[0].tail_from(args.first)
        factor = args.rate / trace.mean_rate_per_s if args.rate else 1.0
        trace = trace.rescaled(1.0 / (factor * args.rate_scale))
    trace = trace.window(0.0, args.duration_s)
    if not trace.num_requests:
        raise ValueError(f"no request arrives within {args.duration_s:g} s")
    return trace


def make_asks(args: Args, trace: Trace, words_per_token: float, longest: int) -> list[Ask]:
    """Write prompts of the wanted lengths; what is longer than the model is cut."""
    asks = []
    for index in range(trace.num_requests):
        context = max(int(trace.context_tokens[index] * args.length_scale), 1)
        output = max(int(trace.generated_tokens[index] * args.length_scale), 1)
        output = min(output, max(longest // 4, 1))
        context = min(context, longest - output - longest // 20 - 1)
        num_words = max(round(context * words_per_token), 1)
        words = _words(args, trace, index, num_words, words_per_token)
        asks.append(Ask(float(trace.arrival_s[index]), words, output))
    return asks


def _words(
    args: Args, trace: Trace, index: int, num_words: int, words_per_token: float
) -> tuple[str, ...]:
    """Draw words; equal prefix blocks of the trace become equal words."""
    words: list[str] = []
    if trace.prefix_hashes is not None and trace.prefix_block_tokens is not None:
        per_block = max(round(trace.prefix_block_tokens * args.length_scale * words_per_token), 1)
        for block in trace.prefix_hashes[index]:
            rng = np.random.default_rng([args.seed, abs(int(block))])
            words += [WORDS[i] for i in rng.integers(len(WORDS), size=per_block)]
            if len(words) >= num_words:
                break
    if len(words) < num_words:
        rng = np.random.default_rng([args.seed, 1 << 40, index])
        words += [WORDS[i] for i in rng.integers(len(WORDS), size=num_words - len(words))]
    return tuple(words[:num_words])


class Client:
    """Asks one endpoint."""

    def __init__(self, args: Args) -> None:
        """Open no connection yet."""
        token = args.token or os.environ.get("TOKENYARD_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(
            base_url=args.url.rstrip("/"), headers=headers, limits=limits, timeout=args.timeout_s
        )
        self._timeout_s = args.timeout_s
        self.model = ""

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        answer = await self._http.get(path)
        answer.raise_for_status()
        return answer.json()

    async def switch(self, policy: str) -> None:
        """Let another policy decide.

        Raises:
            ValueError: The server refuses.
        """
        answer = await self._http.post("/v1/policy", json={"policy": policy})
        if answer.status_code != 200:
            detail = answer.json().get("detail", answer.text)
            raise ValueError(f"policy {policy!r}: {detail}")

    async def send(self, ask: Ask, due_s: float) -> Answer:
        """Send a request when it is due, on the clock of `time.perf_counter`, and read it all."""
        await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
        body = {
            "model": self.model,
            "prompt": " ".join(ask.words),
            "max_tokens": ask.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first_s, usage, failure = math.nan, {}, "the answer ended without a reason"
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.stream("POST", "/v1/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    return _failed(f"{response.status_code}: {_message(response)}")
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        failure = None
                    elif line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            return _failed(event["error"]["message"])
                        if math.isnan(first_s):
                            first_s = time.perf_counter()
                        usage = event.get("usage") or usage
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            return _failed(type(error).__name__)
        if failure is not None:
            return _failed(failure)
        now_s = time.perf_counter()
        tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        return Answer(now_s - due_s, first_s - due_s, *tokens, None)

    async def words_per_token(self) -> float:
        """Measure how many of our words make a token of the served model.

        Raises:
            ValueError: The endpoint does not answer.
        """
        words = tuple(WORDS[i % len(WORDS)] for i in range(100))
        failure: str | None = None
        for pause_s in _RETRIES_S:
            await asyncio.sleep(pause_s)
            answer = await self.send(Ask(0.0, words, 1), time.perf_counter())
            failure = answer.failure
            if failure is None:
                return len(words) / max(answer.prompt_tokens, 1)
        raise ValueError(f"the endpoint does not answer: {failure}")


def _failed(reason: str) -> Answer:
    return Answer(math.nan, math.nan, 0, 0, reason)


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:100]


async def replay(client: Client, asks: list[Ask]) -> tuple[list[Answer], float]:
    """Send every request when it is due, whatever has become of others; also the time it took."""
    started_s = time.perf_counter() + 0.1
    answers = await asyncio.gather(*(client.send(one, started_s + one.arrival_s) for one in asks))
    return answers, time.perf_counter() - started_s


def summarise(
    asks: list[Ask], answers: list[Answer], took_s: float, slo_s: float
) -> dict[str, float]:
    """Metrics of one replay, as docs/metrics.md defines them."""
    response_s = np.array([one.response_s for one in answers])
    ttft_s = np.array([one.ttft_s for one in answers])
    arrival_s = np.array([one.arrival_s for one in asks])
    violations = metrics.violations(response_s, slo_s)
    return {
        "requests": len(asks),
        "completed": int(np.isfinite(response_s).sum()),
        "failed": int(np.isnan(response_s).sum()),
        "mean_response_s": metrics.mean(response_s),
        "p50_response_s": metrics.percentile(response_s, 50),
        "p95_response_s": metrics.percentile(response_s, 95),
        "p99_response_s": metrics.percentile(response_s, 99),
        "mean_ttft_s": metrics.mean(ttft_s),
        "p50_ttft_s": metrics.percentile(ttft_s, 50),
        "p99_ttft_s": metrics.percentile(ttft_s, 99),
        "output_tokens_per_s": sum(one.output_tokens for one in answers) / took_s,
        "goodput_per_s": metrics.goodput_per_s(arrival_s, violations),
        "slo_violation_fraction": metrics.slo_violation_fraction(violations),
        "mean_prompt_tokens": _mean_tokens([one.prompt_tokens for one in answers]),
        "mean_output_tokens": _mean_tokens([one.output_tokens for one in answers]),
    }


def _mean_tokens(counts: list[int]) -> float:
    return metrics.mean(np.array([count or np.nan for count in counts]))


_SUMS = ("requests", "completed", "failed")


def make_rows(
    found: dict[str, list[dict[str, float]]], baseline: str, name: str
) -> list[dict[str, Any]]:
    """One row per policy: means over its repeats, and paired differences to the baseline."""
    rows = []
    theirs = {key: _values(found[baseline], key) for key in found[baseline][0]}
    for policy, runs in found.items():
        row: dict[str, Any] = {"policy": policy, "trace": name, "repeats": len(runs)}
        for key in runs[0]:
            values = _values(runs, key)
            row[key] = int(values.sum()) if key in _SUMS else metrics.mean(values)
        for prefix, key in (("delta_mean", "mean_response_s"), ("delta_p99", "p99_response_s")):
            interval = t_interval(_values(runs, key) - theirs[key]).over(metrics.mean(theirs[key]))
            row |= {f"{prefix}_fraction": interval.estimate}
            row |= {f"{prefix}_ci_low": interval.low, f"{prefix}_ci_high": interval.high}
        key = "slo_violation_fraction"
        interval = t_interval(_values(runs, key) - theirs[key])
        row |= {"delta_slo_violation": interval.estimate}
        row |= {"delta_slo_ci_low": interval.low, "delta_slo_ci_high": interval.high}
        rows.append(row)
    return rows


def _values(runs: list[dict[str, float]], key: str) -> FloatArray:
    return np.array([run[key] for run in runs], dtype=np.float64)


def print_rows(console: Console, rows: list[dict[str, Any]], baseline: str) -> None:
    """Lay out the rows."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for column in ("done", "failed", "mean s", "p50 s", "p99 s", "ttft s", "p99 ttft", "tokens/s",
                   "good/s", f"mean % to {baseline}", "p99 %"):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        keys = ("mean_response_s", "p50_response_s", "p99_response_s", "mean_ttft_s",
                "p99_ttft_s", "output_tokens_per_s", "goodput_per_s")  # fmt: skip
        deltas = [_delta(row, prefix) for prefix in ("delta_mean", "delta_p99")]
        cells = [f"{row[key]:.3g}" for key in keys]
        table.add_row(
            row["policy"], str(row["completed"]), str(row["failed"]), *cells,
            *(["", ""] if row["policy"] == baseline else deltas),
        )  # fmt: skip
    console.print(table)


def _delta(row: dict[str, Any], prefix: str) -> str:
    low, high = 100 * row[f"{prefix}_ci_low"], 100 * row[f"{prefix}_ci_high"]
    interval = "" if math.isnan(low) else f" \\[{low:+.1f}, {high:+.1f}]"
    return f"{100 * row[f'{prefix}_fraction']:+.1f}{interval}"


def add_simulated(
    args: Args, scenario: Scenario, card: dict[str, Any], sent: Trace, rows: list[dict[str, Any]]
) -> None:
    """Put what the simulator says of the same requests into the rows."""
    names = [row["policy"] for row in rows]
    found = simulate(scenario, card.get("scenario") or scenario.name, sent, names, args.seed)
    for row in rows:
        for key in ("mean_response_s", "p99_response_s", "mean_ttft_s"):
            row[f"simulated_{key}"] = found[row["policy"]][key]


def print_simulated(console: Console, rows: list[dict[str, Any]]) -> None:
    """Lay out measured beside simulated."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for column in ("measured mean s", "simulated mean s", "error %", "p99 s", "simulated p99 s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        error = row["simulated_mean_response_s"] / row["mean_response_s"] - 1.0
        table.add_row(
            row["policy"], f"{row['mean_response_s']:.3g}",
            f"{row['simulated_mean_response_s']:.3g}", f"{100 * error:+.1f}",
            f"{row['p99_response_s']:.3g}", f"{row['simulated_p99_response_s']:.3g}",
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


def as_sent(trace: Trace, answers: list[Answer]) -> Trace:
    """Return a trace with the lengths that the server counted, of the requests it answered."""
    done = np.array([one.failure is None for one in answers])
    return Trace(
        trace.arrival_s[done],
        np.array([one.prompt_tokens for one in answers])[done],
        np.array([one.output_tokens for one in answers])[done],
    )


async def run(args: Args, console: Console) -> list[dict[str, Any]]:
    """Replay, policy by policy in turns, and return the rows."""
    trace = read_requests(args)
    twin = load_scenario(args.simulate) if args.simulate else None
    client = Client(args)
    try:
        model = (await client.get("/v1/models"))["data"][0]
        client.model = model["id"]
        needs_card = args.compare or args.slo_response_s is None or twin is not None
        card = await client.get("/v1/policy") if needs_card else {}
        words_per_token = await client.words_per_token()
        asks = make_asks(args, trace, words_per_token, int(model.get("max_model_len", 4096)))
        names = [one.strip() for one in (args.compare or "").split(",") if one.strip()]
        before = card.get("active", card.get("name", "as served"))
        baseline = args.baseline or (names[0] if names else before)
        if names and baseline not in names:
            names.append(baseline)
        slo_s = args.slo_response_s or float(card["slo_response_s"])
        console.print(
            f"{len(asks)} requests over {args.duration_s:g} s, {args.repeats} x "
            f"{', '.join(names or [before])}; good: answered within {slo_s:g} s",
            highlight=False,
        )
        found: dict[str, list[dict[str, float]]] = {one: [] for one in names or [before]}
        try:
            for turn in range(args.repeats):
                order = list(found)
                # Each policy is once in every place, so that none always follows the same one.
                for name in order[turn % len(order) :] + order[: turn % len(order)]:
                    if names:
                        await client.switch(name)
                    answers, took_s = await replay(client, asks)
                    found[name].append(summarise(asks, answers, took_s, slo_s))
                    _tell(name, turn, answers, found[name][-1])
                    await asyncio.sleep(args.pause_s)
        finally:
            if names and "active" in card:
                await client.switch(before)
        rows = make_rows(found, baseline, args.trace or f"generated {args.workload}")
        if twin is not None:
            add_simulated(args, twin, card, as_sent(trace, answers), rows)
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
        rows = asyncio.run(run(args, console))
    except (ValueError, OSError, httpx.HTTPError, KeyError) as error:
        sys.exit(f"replay: {' '.join(str(error).split()) or type(error).__name__}")
    print_rows(console, rows, args.baseline or rows[0]["policy"])
    if args.simulate is not None:
        print_simulated(console, rows)
    if args.json is not None:
        safe = replace(args, token=None)
        command = shlex.join(a if a != args.token else "TOKEN" for a in sys.argv)
        write_result(args.json, command, safe.seed, rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
