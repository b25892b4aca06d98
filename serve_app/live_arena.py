"""The live cells of the arena: routers that listen somewhere play the same traffic in turns.

They are named in a file:

    routers: {mine: "http://127.0.0.1:8000", theirs: "http://127.0.0.1:8100"}
    cells:
      chat: {scenario: conversation, rate: 4, length_scale: 0.1, slo_response_s: 5}
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from serve_app.load_generator import (
    Ask,
    Client,
    LoadConfig,
    ReplayedAnswer,
    make_asks,
    read_stretches,
    replay,
)
from serve_app.watched_file import read_message
from tokenyard import metrics
from tokenyard.config import FrozenModel
from tokenyard.types import FloatArray

Measured = dict[str, FloatArray]
"""Measures by repeat, shape (repeats,) each."""


@dataclass(frozen=True, kw_only=True)
class LiveTraffic(LoadConfig):
    """What a cell sends."""

    slo_response_s: float = math.inf
    """Response time above which a request violates its SLO."""


_TRAFFIC = TypeAdapter(LiveTraffic)
_PLAYED = {field.name for field in fields(LiveTraffic)} - {"url", "advance", "duration_s"}


class Live(FrozenModel):
    """What plays, and how long."""

    routers: dict[str, str] = Field(min_length=2)
    """Base URL of each router, by its name. All stand before the same engines."""
    cells: dict[str, dict[str, Any]] = Field(min_length=1)
    """Options of `tokenyard replay` for the traffic of each cell (`scenario` or `trace`, `rate`,
    `length_scale`, ...), and `slo_response_s`."""
    repeats: int = Field(5, ge=2)
    """Turns of each router. Each repeat has the next part of the traffic, the same for all."""
    duration_s: float = Field(30.0, gt=0)
    """Length of a turn."""
    warm_up_s: float = Field(0.0, ge=0)
    """What is sent at the beginning of a turn and not judged, as queues are empty then."""
    learn_s: float = Field(0.0, ge=0)
    """Time in which routers may learn before the first turn that is judged, in whole turns."""

    @model_validator(mode="after")
    def _check(self) -> Live:
        if self.warm_up_s >= self.duration_s:
            raise ValueError(f"warm_up_s {self.warm_up_s:g} leaves nothing of duration_s to judge")
        for name, options in self.cells.items():
            if unknown := sorted(options.keys() - _PLAYED):
                raise ValueError(f"cell {name}: no option {unknown[0]!r} of traffic")
            try:
                _TRAFFIC.validate_python(options)
            except ValidationError as error:
                first = error.errors(include_input=False)[0]
                raise ValueError(f"cell {name}: {first['loc'][0]}: {first['msg']}") from None
        return self


def read_live(path: Path) -> Live:
    """Read the file of live cells.

    Raises:
        ValueError: It cannot be read, or has a field that means nothing; one sentence.
    """
    return read_message(path, Live, "live cells")


def play_live(
    live: Live, seed: int, tell: Callable[[str], None]
) -> Iterator[tuple[str, float, dict[str, Measured]]]:
    """Play each cell; yield its name, its requests per second, and what was measured.

    `tell` hears of each turn.

    Raises:
        ValueError: A router does not answer, or the traffic cannot be made.
    """
    for name, options in live.cells.items():
        config = LiveTraffic(**{"seed": seed} | options, duration_s=live.duration_s)
        yield name, *asyncio.run(_play(live, name, config, tell))


async def _connected(router: str, config: LiveTraffic) -> tuple[Client, float, int]:
    """A client of a router, how many words its model's tokens have, and how many tokens it takes.

    Raises:
        ValueError: It does not say which model it serves, or does not answer.
    """
    client = Client(config)
    try:
        card = (await client.get("/v1/models"))["data"][0]
        client.model = card["id"]
        longest = int(card.get("max_model_len") or 4096)
    except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
        await client.close()
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{router} does not say which model it serves: {why}") from None
    return client, await client.words_per_token(), longest


async def _play(
    live: Live, cell: str, config: LiveTraffic, tell: Callable[[str], None]
) -> tuple[float, dict[str, Measured]]:
    """Requests per second, and the measures of every router by repeat."""
    learned = math.ceil(live.learn_s / live.duration_s)
    stretches = read_stretches(config, live.repeats + learned)
    turns: dict[str, list[dict[str, float]]] = {router: [] for router in live.routers}
    known: dict[str, tuple[Client, float, int]] = {}
    try:
        for router, url in live.routers.items():
            known[router] = await _connected(router, replace(config, url=url))
        for number in range(len(stretches)):
            first = number % len(known)
            for router in [*known][first:] + [*known][:first]:
                client, words_per_token, longest = known[router]
                # Nothing of another's turn may be in an engine's prefix cache.
                salt = secrets.randbits(32)
                asks = make_asks(config, stretches[number], words_per_token, longest, salt)
                answers, _ = await replay(client, asks)
                if number >= learned:
                    measured = _summarise(asks, answers, live.warm_up_s, config.slo_response_s)
                    turns[router].append(measured)
                    mean_s = measured["mean_response_s"]
                    tell(f"{cell}, turn {number - learned + 1}, {router}: mean {mean_s:.3f} s")
                await asyncio.sleep(config.pause_s)
    finally:
        await asyncio.gather(*(client.close() for client, *_ in known.values()))
    num_requests = sum(stretch.num_requests for stretch in stretches)
    rate_per_s = num_requests / (len(stretches) * live.duration_s)
    return rate_per_s, {
        router: {key: np.array([turn[key] for turn in measured]) for key in measured[0]}
        for router, measured in turns.items()
    }


def _summarise(
    asks: Sequence[Ask], answers: Sequence[ReplayedAnswer], warm_up_s: float, slo_s: float
) -> dict[str, float]:
    """Measures of what was sent after the warm-up; what failed counts as `metrics` says."""
    arrival_s = np.array([ask.arrival_s for ask in asks])
    response_s = np.array([answer.response_s for answer in answers])
    ttft_s = np.array([answer.ttft_s for answer in answers])
    judged = arrival_s >= warm_up_s
    waited_s = metrics.offered_s(response_s, arrival_s, response_s)[judged]
    first_s = metrics.offered_s(ttft_s, arrival_s, response_s)[judged]
    violations = metrics.violations(response_s[judged], slo_s)
    return {
        "mean_response_s": metrics.mean(waited_s),
        "p99_response_s": metrics.percentile(waited_s, 99),
        "mean_ttft_s": metrics.mean(first_s),
        "p90_ttft_s": metrics.percentile(first_s, 90),
        "p99_ttft_s": metrics.percentile(first_s, 99),
        "slo_violation_fraction": metrics.slo_violation_fraction(violations),
        "goodput_per_s": metrics.goodput_per_s(arrival_s[judged], violations),
        "dropped_fraction": metrics.dropped_fraction(response_s[judged]),
    }
