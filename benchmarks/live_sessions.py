"""Agents before a gateway that holds sessions, and before one that places every turn by itself.

    TOKENYARD_LOCAL_ADMIN=1 python pipelines/deploy.py --cluster emulated_sessions --port 8100
    python benchmarks/live_sessions.py --url http://127.0.0.1:8100

Agents play sessions one after another. Each turn waits for the answer to the one before, and for
its tool. Every arm plays the same sessions, with other words.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console

from serve_app.load_generator import WORDS, Ask, Client, LoadConfig
from tokenyard.provenance import command_line, write_result
from tokenyard.routing.scenario import load_scenario
from tokenyard.statistics.intervals import t_interval
from tokenyard.workload.model import load_model

PLACED_ALONE = "index_las:lease_s=0:full_at=1e9"
"""Nobody is held, and no session has a place of its own."""
_RETRY_S = 1.0
METRICS = ("completion_s", "ttft_s", "p99_ttft_s")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Play sessions."""

    url: str = "http://127.0.0.1:8100"
    arms: tuple[str, ...] = (
        "marginal_delay+sjf@60 index_las:lease_s=1:growth_tokens=40:hold_s=12",
        f"marginal_delay+sjf@60 {PLACED_ALONE}",
    )
    """A routing policy and a rule of sessions each; the first is compared with the others."""
    scenario: str = "agentic_trace_replay@mixed"
    """Routing scenario whose sessions are played."""
    agents: int = 64
    sessions: int = 128
    """Sessions of a turn of the arms."""
    max_turns: int = 12
    """Longer sessions are cut."""
    length_scale: float = 0.04
    time_scale: float = 0.2
    """Of the tools' times."""
    longest_tool_s: float = 10.0
    """Longer ones are cut, so that a turn of the arms does not wait for one session."""
    repeats: int = 5
    seed: int = 7
    json: Path | None = None


@dataclass(frozen=True)
class Step:
    """One turn: tokens of its prompt and answer, and the time of the tool after it, seconds."""

    prompt_tokens: int
    answer_tokens: int
    tool_s: float


def draw(args: Args, longest: int, seed: int) -> list[list[Step]]:
    """Draw sessions whose prompts and answers a model of so many tokens takes."""
    scenario = load_scenario(args.scenario)
    assert scenario.sessions is not None
    rng = np.random.default_rng(seed)
    turns, _ = scenario.sessions.draw_turns(args.sessions, rng, load_model(scenario.workload))
    sessions: list[list[Step]] = [[] for _ in range(args.sessions)]
    for session, context, answer, tool_s in zip(
        turns.session, turns.context, turns.answer, turns.think_s, strict=True
    ):
        prompt = max(int(context * args.length_scale), 1)
        tokens = max(int(answer * args.length_scale), 2)
        if len(sessions[session]) < args.max_turns and prompt + tokens < 0.9 * longest:
            wait_s = min(float(tool_s) * args.time_scale, args.longest_tool_s)
            sessions[session].append(Step(prompt, tokens, wait_s))
    return [session for session in sessions if session]


async def play(
    client: Client, sessions: list[list[Step]], words_per_token: float, agents: int
) -> dict[str, float]:
    """Have agents play all sessions; means over sessions and turns."""
    salt, waiting = secrets.randbits(32), iter(enumerate(sessions))
    completion_s: list[float] = []
    ttft_s: list[float] = []
    failures: list[str] = []

    async def agent(waiting: Iterator[tuple[int, list[Step]]]) -> None:
        for number, session in waiting:
            rng = np.random.default_rng([salt, number])
            longest = max(step.prompt_tokens for step in session)
            words = rng.choice(WORDS, round(longest * words_per_token) + 1).tolist()
            begun_s = time.perf_counter()
            for place, step in enumerate(session):
                prompt = words[: max(round(step.prompt_tokens * words_per_token), 1)]
                ask = Ask(0.0, tuple(prompt), step.answer_tokens, f"{salt}-{number}")
                due_s = time.perf_counter()
                answer = await client.send(ask, due_s)
                while (answer.failure or "").startswith("429"):
                    await asyncio.sleep(_RETRY_S)  # As clients do; its time goes on.
                    answer = await client.send(ask, due_s)
                if answer.failure is not None:
                    failures.append(answer.failure)
                    break
                ttft_s.append(answer.ttft_s)
                if place < len(session) - 1:
                    await asyncio.sleep(step.tool_s)
            else:
                completion_s.append(time.perf_counter() - begun_s)

    begun_s = time.perf_counter()
    await asyncio.gather(*(agent(waiting) for _ in range(agents)))
    return {
        "completion_s": float(np.mean(completion_s)), "ttft_s": float(np.mean(ttft_s)),
        "p99_ttft_s": float(np.percentile(ttft_s, 99)), "failed_turns": float(len(failures)),
        "sessions": float(len(completion_s)), "took_s": time.perf_counter() - begun_s,
    }  # fmt: skip


async def run(args: Args, console: Console) -> dict[str, list[dict[str, float]]]:
    """Let the arms take turns; results by arm."""
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in args.arms}
    client = Client(LoadConfig(url=args.url))
    try:
        model = (await client.get("/v1/models"))["data"][0]
        client.model = model["id"]
        words_per_token = await client.words_per_token()
        for repeat in range(args.repeats):
            longest = int(model.get("max_model_len") or 4096)
            sessions = draw(args, longest, args.seed + repeat)
            order = repeat % len(args.arms)
            for arm in args.arms[order:] + args.arms[:order]:
                policy, rule = arm.split()
                await client.switch(policy)
                await client.change("rule", rule, "/v1/sessions")
                results[arm].append(await play(client, sessions, words_per_token, args.agents))
                console.print(repeat, arm, {k: round(v, 2) for k, v in results[arm][-1].items()})
    finally:
        await client.close()
    return results


def main(args: Args) -> list[dict[str, object]]:
    """Print and return a row for each arm."""
    console = Console(highlight=False, width=170)
    results = asyncio.run(run(args, console))
    first, rows = args.arms[0], list[dict[str, object]]()
    for arm, turns in results.items():
        row: dict[str, object] = {"arm": arm, "failed": sum(turn["failed_turns"] for turn in turns)}
        for metric in METRICS:
            values = np.array([turn[metric] for turn in turns])
            row[metric] = float(values.mean())
            base = np.array([turn[metric] for turn in results[first]])
            if arm != first and len(turns) > 1:
                row[f"{metric}_of_first_percent"] = t_interval(
                    (100.0 * (base / values - 1)).tolist()
                )
        rows.append(row)
        console.print(row)
    if args.json is not None:
        write_result(args.json, command_line(), args.seed, rows)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
