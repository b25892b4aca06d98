"""How long a routing answer takes over HTTP, and how much of that is the decision.

Asks a server that `pipelines/deploy.py` started; run both on one machine.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path
from shlex import join
from typing import Any

import numpy as np
import requests
import tyro
from rich.console import Console
from rich.table import Table

from tokenyard.provenance import write_result


@dataclass(frozen=True)
class Args:
    """Measure a running routing server."""

    url: str = "http://127.0.0.1:8000"
    """Where it listens."""
    requests: int = 2000
    """Measured requests per row; a tenth as many are asked before, unmeasured."""
    clients: tuple[int, ...] = (1, 8)
    """Callers at a time, one row each; every one keeps its connection."""
    num_replicas: int = 3
    """Candidates in each request."""
    seed: int = 0
    """Draws requests and loads."""
    json: Path | None = None
    """File for the rows."""


@dataclass(frozen=True)
class Row:
    """Latencies of one server at one number of callers."""

    policy: str
    version: str
    num_replicas: int
    clients: int
    requests: int
    requests_per_s: float
    http_p50_ms: float
    http_p99_ms: float
    decision_p50_us: float
    decision_p99_us: float


def main(args: Args) -> None:
    """Measure, print a table and write the rows."""
    card = requests.get(f"{args.url}/v1/policy", timeout=10).json()
    rows = [_measure(args, card, clients) for clients in args.clients]
    table = Table(*asdict(rows[0]))
    for row in rows:
        cells = asdict(row).values()
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console().print(table)
    if args.json is not None:
        write_result(args.json, join(sys.argv), args.seed, [asdict(row) for row in rows])


def _measure(args: Args, card: dict[str, Any], clients: int) -> Row:
    rng = np.random.default_rng(args.seed)
    bodies = [_body(args.num_replicas, rng) for _ in range(256)]
    _ask_all(args.url, bodies, args.requests // 10, clients)
    started_s = time.perf_counter()
    pairs = _ask_all(args.url, bodies, args.requests, clients)
    elapsed_s = time.perf_counter() - started_s
    http_ms, decision_us = np.array(pairs).T
    return Row(
        policy=card["name"],
        version=card["version"],
        num_replicas=args.num_replicas,
        clients=clients,
        requests=len(pairs),
        requests_per_s=len(pairs) / elapsed_s,
        http_p50_ms=float(np.percentile(http_ms, 50)),
        http_p99_ms=float(np.percentile(http_ms, 99)),
        decision_p50_us=float(np.percentile(decision_us, 50)),
        decision_p99_us=float(np.percentile(decision_us, 99)),
    )


def _ask_all(
    url: str, bodies: list[dict[str, Any]], num_requests: int, clients: int
) -> list[tuple[float, float]]:
    """Ask from `clients` threads; return (HTTP milliseconds, decision microseconds) pairs."""
    numbers = count()

    def ask_many(_: int) -> list[tuple[float, float]]:
        with requests.Session() as session:
            mine = takewhile(lambda number: number < num_requests, numbers)
            return [_ask(session, url, bodies[number % len(bodies)]) for number in mine]

    with ThreadPoolExecutor(clients) as pool:
        return [pair for pairs in pool.map(ask_many, range(clients)) for pair in pairs]


def _ask(session: requests.Session, url: str, body: dict[str, Any]) -> tuple[float, float]:
    started_s = time.perf_counter()
    response = session.post(f"{url}/v1/route", json=body, timeout=30)
    http_ms = (time.perf_counter() - started_s) * 1e3
    response.raise_for_status()
    return http_ms, response.json()["decision_us"]


def _body(num_replicas: int, rng: np.random.Generator) -> dict[str, Any]:
    snapshots = []
    for index in range(num_replicas):
        waiting = int(rng.integers(0, 6))
        snapshots.append(
            {
                "replica_id": f"replica-{index}",
                "tokens_per_s": float(rng.choice([3000.0, 5000.0, 7000.0])),
                "num_slots": 1,
                "max_concurrency": 5,
                "num_waiting": waiting,
                "num_running": 1,
                "tokens_in_flight": 2000.0 * (waiting + 1),
            }
        )
    return {"request": {"context_tokens": int(rng.integers(1, 8000))}, "snapshots": snapshots}


if __name__ == "__main__":
    main(tyro.cli(Args))
