"""What the learned router costs: the same gateway with only the router swapped, in one run.

Asks a gateway that `TOKENYARD_LOCAL_ADMIN=1 python pipelines/deploy.py` started, on the same
machine. Policies take turns in short blocks, so that whatever else the machine does meets all of
them alike. Requests are short (one token unless told otherwise): what is compared is the way
through the gateway, not the engine.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from typing import Any

import httpx
import numpy as np
import tyro
from rich.table import Table

from serve_app.policy.runner import RAY_DEFAULT
from tokenyard.provenance import ResultFile, report


@dataclass(frozen=True)
class Args:
    """Compare routers of a running gateway."""

    url: str = "http://127.0.0.1:8000"
    """Where it listens."""
    policies: tuple[str, ...] = ("ray_default", "champion", "marginal_delay")
    """The first is what the others are compared to."""
    blocks: int = 10
    """Turns of every policy."""
    requests: int = 60
    """Requests per turn."""
    clients: int = 1
    """Callers at a time."""
    max_tokens: int = 1
    """Tokens per answer."""
    json: ResultFile | None = None
    """File for the rows."""


@dataclass(frozen=True)
class Row:
    """One policy; times as callers see them, decisions as the gateway does."""

    policy: str
    requests: int
    p50_ms: float
    p99_ms: float
    added_p50_ms: float
    """Median over turns of the difference of medians to the first policy's turn."""
    decision_p50_us: float
    decision_p99_us: float
    decision_cpu_p99_us: float
    """What a decision computed; NaN for Ray's own."""


def main(args: Args) -> None:
    """Measure, print a table and write the rows."""
    with httpx.Client(base_url=args.url, timeout=60) as client:
        before = client.get("/v1/policy").json()["active"]
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "the quick brown fox", "max_tokens": args.max_tokens,
                "ignore_eos": True}  # fmt: skip
        times: dict[str, list[list[float]]] = {one: [] for one in args.policies}
        decisions: dict[str, list[float]] = {one: [] for one in args.policies}
        computed: dict[str, list[float]] = {one: [] for one in args.policies}
        for policy in args.policies:
            _switch(client, policy)
            _ask(args, body, args.requests // 3)
        for turn in range(args.blocks):
            names = list(args.policies)
            for policy in names if turn % 2 else reversed(names):
                _switch(client, policy)
                times[policy].append(_ask(args, body, args.requests))
                # The last thousand decisions, of which the newest are this turn's.
                said = client.get("/v1/policy").json()
                decisions[policy] += said["last_decisions_us"][-args.requests :]
                if policy != RAY_DEFAULT:
                    computed[policy] += said["last_decisions_cpu_us"][-args.requests :]
        _switch(client, before)
    first = np.array([np.median(block) for block in times[args.policies[0]]])
    rows = [
        _row(policy, times[policy], decisions[policy], computed[policy], first)
        for policy in args.policies
    ]
    table = Table("", *args.policies)
    for name in list(asdict(rows[0]))[1:]:
        cells = [getattr(row, name) for row in rows]
        table.add_row(
            name, *(f"{one:.4g}" if isinstance(one, float) else str(one) for one in cells)
        )
    report(table, [asdict(row) for row in rows], args.json, None)


def _switch(client: httpx.Client, policy: str) -> None:
    client.post("/v1/policy", json={"policy": policy}).raise_for_status()


def _ask(args: Args, body: dict[str, Any], num_requests: int) -> list[float]:
    """Milliseconds of every request."""
    numbers = count()

    def ask_many(_: int) -> list[float]:
        found = []
        with httpx.Client(base_url=args.url, timeout=60) as client:
            for _number in takewhile(lambda number: number < num_requests, numbers):
                started_s = time.perf_counter()
                client.post("/v1/completions", json=body).raise_for_status()
                found.append((time.perf_counter() - started_s) * 1e3)
        return found

    with ThreadPoolExecutor(args.clients) as pool:
        return [one for many in pool.map(ask_many, range(args.clients)) for one in many]


def _row(
    policy: str,
    blocks: list[list[float]],
    decisions: list[float],
    computed: list[float],
    first: np.ndarray[Any, Any],
) -> Row:
    every = [one for block in blocks for one in block]
    p50, p99 = np.percentile(every, [50, 99]).tolist()
    decision_p50, decision_p99 = np.percentile(decisions, [50, 99]).tolist()
    added = float(np.median(np.array([np.median(block) for block in blocks]) - first))
    cpu_p99 = float(np.percentile(computed, 99)) if computed else float("nan")
    return Row(policy, len(every), p50, p99, added, decision_p50, decision_p99, cpu_p99)


if __name__ == "__main__":
    main(tyro.cli(Args))
