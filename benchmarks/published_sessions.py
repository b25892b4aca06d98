"""The simulator of sessions against a sweep that others measured on H100s.

python benchmarks/published_sessions.py

Published: github.com/zetxqx/thunderagent-original-verification, step 13 (September 2026). Four
vLLM pods of two H100s serve Qwen3-Coder-30B FP8; 4 to 84 recorded coding sessions a pod are always
open, for half an hour. Each turn goes to a pod by llm-d's default scorers, or the ThunderAgent of
llm-d's router holds, pauses and resumes sessions, on the pod with most room or on their own.

Fitted here are four times of an iteration and what a session sends, to the arm of llm-d's default
alone: its output below the knee, its prefill rate far beyond. The rest is predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import tyro
from rich.box import SIMPLE
from rich.table import Table

from tokenyard.problem import Row
from tokenyard.provenance import ResultFile, report
from tokenyard.routing.sessions.rules import make_rule
from tokenyard.routing.simulator.sessions import (
    SessionReplicas,
    SessionRun,
    SessionStream,
    run_sessions,
    said_before,
)
from tokenyard.routing.simulator.sessions_kernel import layout as lay
from tokenyard.types import FloatArray
from tokenyard.workload.spread import Spread

# As the port in llm-d's router: it looks for room all the time, and pauses every 5 s. The engine
# evicts what was used longest ago.
_PORT = "paused_first=0:half_life_s=1:tick_s=0.25:pause_s=5"
ARMS = {
    "default": "per_turn_most_cached:order=0",
    "most_room": f"thunderagent:{_PORT}",
    "own_replica": f"thunderagent_own_replica:{_PORT}",
}
PUBLISHED = {
    4: {"default": (1278, 0.947, 0.5), "most_room": (1247, 0.945, 0.4)},
    8: {"default": (1782, 0.953, 0.5), "most_room": (1775, 0.952, 0.4)},
    12: {"default": (2014, 0.952, 0.4), "most_room": (1972, 0.948, 0.4)},
    16: {"default": (1956, 0.930, 0.4), "most_room": (1974, 0.926, 0.4)},
    24: {
        "default": (1541, 0.625, 0.5), "most_room": (1536, 0.602, 0.5),
        "own_replica": (1813, 0.816, 0.5),
    },
    32: {
        "default": (1151, 0.040, 8.2), "most_room": (1382, 0.353, 2.3),
        "own_replica": (1571, 0.629, 1.3),
    },
    48: {
        "default": (1065, 0.003, 36.0), "most_room": (1342, 0.301, 3.2),
        "own_replica": (1639, 0.525, 3.0),
    },
    64: {
        "default": (999, 0.002, 65.8), "most_room": (1438, 0.266, 3.4),
        "own_replica": (1633, 0.456, 4.0),
    },
    84: {
        "default": (1050, 0.002, 101.5), "most_room": (1538, 0.249, 3.5),
        "own_replica": (1698, 0.422, 4.4),
    },
}  # fmt: skip
"""By sessions a pod and arm: output tokens per second, hit rate, median time to first token."""
NUM_PODS, KV_TOKENS = 4, 2_237_040.0
ITERATION = (3e-3, 33e-6, 2e-5, 16e-9)
TURNS = Spread(mean=93, std=98, low=1, high=392)
"""Of a session: median 64, mean 93, largest 392 as published."""
OPENING = Spread(mean=45_000, std=31_500, low=2000, high=120_000)
MESSAGE = Spread(mean=1000, std=2000, low=20, high=60_000)
REPLACED = Spread(mean=3000, std=4500, high=60_000)
"""Tokens at a prompt's end that the next one no longer has, such as those of sub-agents."""
ANSWER = Spread(mean=557, std=688, low=1, high=3700)
THINK_S = Spread(mean=1.5, std=3.0, low=0.05, high=10)
LONGEST = 250_000
_LEAST_TURNS, _ALL_OPEN_S = 140, 30.0


@dataclass(frozen=True)
class Args:
    """Play the sweep, and print both."""

    sessions: tuple[int, ...] = tuple(PUBLISHED)
    """Sessions that are open on each pod."""
    minutes: float = 30.0
    """Of each cell; hit rates are those after the first third, as published."""
    seeds: int = 5
    """Draws of the sessions."""
    seed: int = 0
    """Of the first draw."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


def one_session(rng: np.random.Generator) -> FloatArray:
    """Prompts, answers, pauses and what prompts keep of the turn before, shape (4, num_turns)."""
    num = int(TURNS.draw_whole(1, rng)[0])
    # Deep turns have longer answers: output per request falls from 1,048 at 4 sessions a pod, which
    # get furthest, to 571 at 84.
    deeper = 1.2 * (510 + 12 * np.minimum(np.arange(num), 60)) / ANSWER.mean
    answer = np.maximum(np.rint(ANSWER.draw(num, rng) * deeper), 1)
    said = np.cumsum(MESSAGE.draw_whole(num, rng) + answer)
    context = OPENING.draw_whole(1, rng) + said - answer
    before = said_before(context, answer, np.array([0]))
    kept = np.maximum(before - REPLACED.draw_whole(num, rng), 0.0)
    turns = np.array([context, answer, THINK_S.draw(num, rng), kept])
    return turns[:, : max(int(np.searchsorted(context + answer, LONGEST)), 1)]


def draw(num_sessions: int, rng: np.random.Generator) -> SessionStream:
    """Places of which each has one session after another, so that all are always open."""
    places = []
    for _ in range(num_sessions):
        sessions = [one_session(rng)]
        while sum(turns.shape[1] for turns in sessions) < _LEAST_TURNS:
            sessions.append(one_session(rng))
        places.append(np.concatenate(sessions, axis=1))
    first = np.cumsum([0, *(turns.shape[1] for turns in places[:-1])])
    context, answer, think_s, kept = np.concatenate(places, axis=1)
    arrival_s = np.sort(rng.uniform(0.0, _ALL_OPEN_S, num_sessions))
    unknown = np.ones(len(context))
    return SessionStream(arrival_s, first, context, answer, think_s, unknown, kept)


def measure(run: SessionRun, until_s: float) -> tuple[float, float, float]:
    """Output tokens per second, hit rate after the first third, median time to first token."""
    finish_s = run.outcomes[:, lay.OUT_FINISH_S]
    done = finish_s <= until_s
    steady = run.outcomes[done & (finish_s > until_s / 3.0)]
    hit, computed = steady[:, lay.OUT_HIT : lay.OUT_PREFILLED + 1].sum(axis=0)
    tokens_per_s = run.stream.answer[done].sum() / until_s
    return tokens_per_s, hit / (hit + computed), float(np.median(run.ttft_s[done]))


def play(args: Args) -> list[Row]:
    """All arms at all loads, on the same sessions; ratios are to the default arm."""
    each = np.ones(NUM_PODS)
    pods = SessionReplicas(
        np.tile(ITERATION, (NUM_PODS, 1)), KV_TOKENS * each, 1024 * each, 8192 * each, 0 * each,
        0 * each,
    )  # fmt: skip
    rows: list[Row] = []
    for sessions in args.sessions:
        rngs = [np.random.default_rng([args.seed, k]) for k in range(args.seeds)]
        streams = [draw(sessions * NUM_PODS, rng) for rng in rngs]
        default, published_default = math.nan, PUBLISHED[sessions]["default"][0]
        for arm, theirs in PUBLISHED[sessions].items():
            runs = [run_sessions(pods, stream, make_rule(ARMS[arm])) for stream in streams]
            measured = [measure(run, args.minutes * 60.0) for run in runs]
            tokens, hit, ttft_s = np.mean(measured, axis=0)
            default = tokens if arm == "default" else default
            rows.append(
                {
                    "sessions": sessions, "arm": arm,
                    "output_tokens_per_s": tokens, "published_tokens_per_s": theirs[0],
                    "ratio": tokens / default, "published_ratio": theirs[0] / published_default,
                    "hit_fraction": hit, "published_hit_fraction": theirs[1],
                    "median_ttft_s": ttft_s, "published_median_ttft_s": theirs[2],
                }
            )  # fmt: skip
    return rows


def main(args: Args) -> None:
    """Play, print and write."""
    rows = play(args)
    columns = ("sessions", "arm", "tokens/s", "ratio", "hit rate", "median TTFT, s")
    table = Table(*columns, box=SIMPLE, title="Simulated (published), by sessions a pod")
    for row in rows:
        sessions, arm, *numbers = row.values()
        pairs = zip(numbers[::2], numbers[1::2], (0, 2, 3, 1), strict=True)
        cells = (f"{ours:.{digits}f} ({theirs:.{digits}f})" for ours, theirs, digits in pairs)
        table.add_row(str(sessions), str(arm), *cells)
    report(table, rows, args.json, args.seed)


if __name__ == "__main__":
    main(tyro.cli(Args))
