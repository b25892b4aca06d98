"""An open-loop load generator for endpoints that speak OpenAI's API.

Requests are sent when they are due, whatever has become of others, as users send them. Answers are
read as streams of server-sent events; times are measured from when a request was due.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import httpx
import numpy as np

from tokenyard import metrics
from tokenyard.routing.scenario import load_scenario
from tokenyard.statistics.intervals import t_interval
from tokenyard.types import FloatArray
from tokenyard.workload.model import load_model, poisson_arrivals
from tokenyard.workload.trace import Trace
from tokenyard.workload.trace_options import TraceOptions

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
_ARRIVALS = 1 << 41
"""Part of the seed of arrivals; words have another."""


@dataclass(frozen=True, kw_only=True)
class LoadConfig(TraceOptions):
    """Which requests are sent, where and when."""

    url: str = "http://127.0.0.1:8000"
    """Base URL of the endpoint."""
    trace: str | None = None
    """File, or name of a published trace (azure_code, azure_conv, ...); None: the generator."""
    scenario: str = "conversation"
    """Scenario, by name or YAML path, whose workload and process of arrivals the generator has."""
    rate: float | None = None
    """Mean requests per second; None: the trace's, or 1 for the generator."""
    rate_scale: float = 1.0
    """Factor on the trace's requests per second."""
    length_scale: float = 1.0
    """Factor on prompt and output lengths, for models that are small."""
    first: int = 0
    """Index of the first request of the trace."""
    duration_s: float = 120.0
    """Requests that arrive within so many seconds are sent."""
    advance: bool = False
    """Every repeat sends the next `duration_s` of the traffic, the same to every policy, so that
    intervals say how much other traffic would differ."""
    pause_s: float = 1.0
    """Pause between two replays."""
    timeout_s: float = 600.0
    """Time after which a request counts as failed."""
    token: str | None = None
    """Bearer token; TOKENYARD_TOKEN serves in its place."""
    seed: int = 2026
    """Seed of generated traffic; words are drawn anew for each replay."""


@dataclass(frozen=True)
class Ask:
    """One request to send."""

    arrival_s: float
    words: tuple[str, ...]
    max_tokens: int
    session: str = ""
    """Name of the session that it is a turn of; empty: none."""


@dataclass(frozen=True)
class ReplayedAnswer:
    """The result of a request; times in seconds since it was due, NaN where missing."""

    response_s: float
    ttft_s: float
    prompt_tokens: int
    output_tokens: int
    failure: str | None


def read_stretches(config: LoadConfig, count: int) -> list[Trace]:
    """Return `count` consecutive parts of the traffic, each `duration_s` long.

    Raises:
        ValueError: The trace cannot be read, nothing arrives in a part, or a number means nothing.
    """
    for name in ("rate", "rate_scale", "length_scale"):
        value = getattr(config, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} {value:g} must be positive and finite")
    if config.trace is None:
        rate = (config.rate or 1.0) * config.rate_scale
        num = max(int(rate * count * config.duration_s * 2) + 50, 1)
        scenario = load_scenario(config.scenario)
        rng = np.random.default_rng(config.seed)
        trace = load_model(scenario.workload).generate(num, rng, rate)
        if scenario.arrivals.process == "poisson":
            arrival_rng = np.random.default_rng([config.seed, _ARRIVALS])
            trace = replace(trace, arrival_s=poisson_arrivals(num, rate, arrival_rng))
    else:
        trace = config.read(config.trace)[0].tail_from(config.first)
        factor = config.rate / trace.mean_rate_per_s if config.rate else 1.0
        trace = trace.rescaled(1.0 / (factor * config.rate_scale))
    edges_s = config.duration_s * np.arange(count + 1)
    parts = [trace.window(*edges) for edges in pairwise(edges_s.tolist())]
    for part, start_s in zip(parts, edges_s, strict=False):
        if not part.num_requests:
            after = f" after {start_s:g} s" if start_s else ""
            raise ValueError(f"no request arrives within {config.duration_s:g} s{after}")
    return parts


def make_asks(
    config: LoadConfig, trace: Trace, words_per_token: float, longest: int, salt: int = 0
) -> list[Ask]:
    """Write prompts of the given lengths, cut to what the model can hold.

    With another `salt` the words are others, so that engines have none of the prompts cached.
    """
    asks = []
    for index in range(trace.num_requests):
        context = max(int(trace.context_tokens[index] * config.length_scale), 1)
        output = max(int(trace.generated_tokens[index] * config.length_scale), 1)
        output = min(output, max(longest // 4, 1))
        context = min(context, longest - output - longest // 20 - 1)
        num_words = max(round(context * words_per_token), 1)
        words = _words(config, trace, index, num_words, words_per_token, salt)
        asks.append(Ask(float(trace.arrival_s[index]), words, output))
    return asks


def _words(
    config: LoadConfig, trace: Trace, index: int, num_words: int, words_per_token: float,
    salt: int,
) -> tuple[str, ...]:  # fmt: skip
    """Draw words; equal prefix blocks of the trace become equal words."""
    words: list[str] = []
    if trace.prefix_hashes is not None and trace.prefix_block_tokens is not None:
        per_block = max(round(trace.prefix_block_tokens * config.length_scale * words_per_token), 1)
        for block in trace.prefix_hashes[index]:
            rng = np.random.default_rng([config.seed, salt, abs(int(block))])
            words += [WORDS[i] for i in rng.integers(len(WORDS), size=per_block)]
            if len(words) >= num_words:
                break
    if len(words) < num_words:
        rng = np.random.default_rng([config.seed, salt, 1 << 40, index])
        words += [WORDS[i] for i in rng.integers(len(WORDS), size=num_words - len(words))]
    return tuple(words[:num_words])


class ServerError(Exception):
    """The server ended an answer with an error."""


class EventReader:
    """Reads the server-sent events of one answer, line by line."""

    def __init__(self) -> None:
        self.first_s = math.nan
        """When the first event came that carries text or an end; NaN before."""
        self.usage: dict[str, int] = {}
        """Tokens that the server counted."""
        self.done = False
        """Whether the answer was whole."""

    def read(self, line: str, now_s: float) -> None:
        """Read a line that came at this time.

        Raises:
            ServerError: It says that the answer was broken off.
            ValueError: It is no event.
        """
        if not line.startswith("data:"):
            return
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            self.done = True
            self._begin(now_s)
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is {data:.100}")
        if event.get("error"):
            error = event["error"]
            raise ServerError(str(error.get("message") if isinstance(error, dict) else error))
        if any(
            choice.get("text") or choice.get("finish_reason")
            for choice in event.get("choices") or ()
        ):
            self._begin(now_s)
        self.usage = event.get("usage") or self.usage

    def _begin(self, now_s: float) -> None:
        if math.isnan(self.first_s):
            self.first_s = now_s


class Client:
    """Sends requests to one endpoint."""

    def __init__(self, config: LoadConfig) -> None:
        token = config.token or os.environ.get("TOKENYARD_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(
            base_url=config.url.rstrip("/"),
            headers=headers,
            limits=limits,
            timeout=config.timeout_s,
        )
        self._timeout_s = config.timeout_s
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
        """Change the policy; a ValueError says why the server refuses."""
        await self.change("policy", policy)

    async def change(self, what: str, value: str, path: str = "/v1/policy") -> None:
        """Change a setting of the server; a ValueError says why it refuses."""
        token = os.environ.get("TOKENYARD_ADMIN_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else None
        answer = await self._http.post(path, json={what: value}, headers=headers)
        if answer.status_code != 200:
            raise ValueError(f"{what} {value!r}: {answer.json().get('detail', answer.text)}")

    async def send(self, ask: Ask, due_s: float) -> ReplayedAnswer:
        """Send a request when it is due by `time.perf_counter`, and read the whole answer."""
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
        events = EventReader()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.stream(
                    "POST",
                    "/v1/completions",
                    json=body,
                    headers={"x-session-id": ask.session} if ask.session else None,
                ) as response,
            ):
                if response.status_code != 200:
                    await response.aread()
                    return _failed(f"{response.status_code}: {_message(response)}")
                async for line in response.aiter_lines():
                    events.read(line, time.perf_counter())
        except ServerError as error:
            return _failed(str(error))
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            return _failed(type(error).__name__)
        if not events.done:
            return _failed("the answer ended without a reason")
        now_s = time.perf_counter()
        tokens = events.usage.get("prompt_tokens", 0), events.usage.get("completion_tokens", 0)
        return ReplayedAnswer(now_s - due_s, events.first_s - due_s, *tokens, None)

    async def words_per_token(self) -> float:
        """Measure how many of our words make a token of the served model, or raise ValueError."""
        words = tuple(WORDS[i % len(WORDS)] for i in range(100))
        failure: str | None = None
        for pause_s in _RETRIES_S:
            await asyncio.sleep(pause_s)
            answer = await self.send(Ask(0.0, words, 1), time.perf_counter())
            failure = answer.failure
            if answer.prompt_tokens:
                return len(words) / answer.prompt_tokens
            if failure is None:
                raise ValueError("the endpoint counts no tokens: its answers have no usage")
        raise ValueError(f"the endpoint does not answer: {failure}")


def _failed(reason: str) -> ReplayedAnswer:
    return ReplayedAnswer(math.nan, math.nan, 0, 0, reason)


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:100]


async def replay(
    client: Client, asks: list[Ask], done: dict[int, ReplayedAnswer] | None = None
) -> tuple[list[ReplayedAnswer], float]:
    """Send every request when it is due, whatever happened to others; also return the time taken.

    `done` gets every answer, by the index of its request, as soon as it has ended.
    """
    started_s = time.perf_counter() + 0.1
    ended = {} if done is None else done

    async def send(index: int) -> None:
        ended[index] = await client.send(asks[index], started_s + asks[index].arrival_s)

    await asyncio.gather(*map(send, range(len(asks))))
    return [ended[index] for index in range(len(asks))], time.perf_counter() - started_s


def as_sent(trace: Trace, answers: list[ReplayedAnswer]) -> Trace:
    """Return a trace of the answered requests, with the lengths that the server counted."""
    done = np.array([answer.failure is None for answer in answers])
    return Trace(
        trace.arrival_s[done],
        np.array([answer.prompt_tokens for answer in answers])[done],
        np.array([answer.output_tokens for answer in answers])[done],
    )


def summarise(
    asks: list[Ask],
    answers: list[ReplayedAnswer],
    took_s: float,
    slo_s: float,
    ttft_slo_s: float | None = None,
    tpot_slo_s: float | None = None,
) -> dict[str, float]:
    """Return the metrics of one replay, see docs/metrics.md; None: no SLO on that."""
    response_s = np.array([answer.response_s for answer in answers])
    ttft_s = np.array([answer.ttft_s for answer in answers])
    arrival_s = np.array([ask.arrival_s for ask in asks])
    tokens = np.array([answer.output_tokens for answer in answers])
    violations = metrics.violations(response_s, slo_s) | (ttft_s > (ttft_slo_s or np.inf))
    violations |= metrics.tpot_s(response_s, ttft_s, tokens) > (tpot_slo_s or np.inf)
    return {
        "requests": len(asks),
        "completed": int(np.isfinite(response_s).sum()),
        "failed": int(np.isnan(response_s).sum()),
        "mean_response_s": metrics.mean(response_s),
        **{f"p{share}_response_s": metrics.percentile(response_s, share) for share in (50, 95, 99)},
        "mean_ttft_s": metrics.mean(ttft_s),
        **{f"p{share}_ttft_s": metrics.percentile(ttft_s, share) for share in (50, 99)},
        "output_tokens_per_s": sum(answer.output_tokens for answer in answers) / took_s,
        "goodput_per_s": metrics.goodput_per_s(arrival_s, violations),
        "slo_violation_fraction": metrics.slo_violation_fraction(violations),
        "mean_prompt_tokens": _mean_tokens([answer.prompt_tokens for answer in answers]),
        "mean_output_tokens": _mean_tokens([answer.output_tokens for answer in answers]),
    }


def _mean_tokens(counts: list[int]) -> float:
    return metrics.mean(np.array([count or np.nan for count in counts]))


_SUMS = ("requests", "completed", "failed")


def make_rows(
    runs_by_policy: Mapping[str, Sequence[dict[str, float] | None]], baseline: str, name: str
) -> list[dict[str, Any]]:
    """One row per policy: means over its repeats, and paired differences to the baseline.

    A repeat that is None or missing is left out, and so is what it would be paired with.
    """
    rows = []
    for policy, repeats in runs_by_policy.items():
        runs = [run for run in repeats if run is not None]
        if not runs:
            continue
        both = [(x, y) for x, y in zip(repeats, runs_by_policy[baseline], strict=False) if x and y]
        row: dict[str, Any] = {"policy": policy, "trace": name, "repeats": len(runs)}
        for key in runs[0]:
            values = _values(runs, key)
            row[key] = int(values.sum()) if key in _SUMS else metrics.mean(values)
        for prefix, key in (("delta_mean", "mean_response_s"), ("delta_p99", "p99_response_s")):
            differences, theirs = _paired(both, key)
            interval = t_interval(differences).over(metrics.mean(theirs))
            row |= {f"{prefix}_fraction": interval.estimate}
            row |= {f"{prefix}_ci_low": interval.low, f"{prefix}_ci_high": interval.high}
        key = "slo_violation_fraction"
        interval = t_interval(_paired(both, key)[0])
        row |= {"delta_slo_violation": interval.estimate}
        row |= {"delta_slo_ci_low": interval.low, "delta_slo_ci_high": interval.high}
        rows.append(row)
    return rows


def _paired(
    pairs: list[tuple[dict[str, float], dict[str, float]]], key: str
) -> tuple[FloatArray, FloatArray]:
    theirs = _values([their for _, their in pairs], key)
    return _values([our for our, _ in pairs], key) - theirs, theirs


def _values(runs: list[dict[str, float]], key: str) -> FloatArray:
    return np.array([run[key] for run in runs], dtype=np.float64)
