"""How long a routing answer takes over HTTP, and how much of that is the decision.

Asks a server that `pipelines/deploy.py` started; run both on one machine. Each routing request is
followed by one to /healthz, which does nothing: its time is what HTTP and Ray Serve cost anyway.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tyro
from rich.table import Table

from tokenyard.provenance import report


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
    """Latencies of one server at one number of callers, as the callers see them."""

    policy: str
    version: str
    num_replicas: int
    clients: int
    requests: int
    route_p50_ms: float
    route_p99_ms: float
    healthz_p50_ms: float
    healthz_p99_ms: float
    decision_p50_us: float
    decision_p99_us: float


def main(args: Args) -> None:
    """Measure, print a table and write the rows."""
    card = httpx.get(f"{args.url}/v1/policy", timeout=10).json()
    rows = [_measure(args, card, clients) for clients in args.clients]
    table = Table(*asdict(rows[0]))
    for row in rows:
        cells = asdict(row).values()
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    report(table, [asdict(row) for row in rows], args.json, args.seed)


def _measure(args: Args, card: dict[str, Any], clients: int) -> Row:
    rng = np.random.default_rng(args.seed)
    bodies = [_body(args.num_replicas, rng) for _ in range(256)]
    _ask_all(args.url, bodies, args.requests // 10, clients)
    measured = _ask_all(args.url, bodies, args.requests, clients)
    p50, p99 = np.percentile(measured, [50, 99], axis=0).tolist()
    return Row(
        policy=card["name"],
        version=card["sha256"],
        num_replicas=args.num_replicas,
        clients=clients,
        requests=len(measured),
        route_p50_ms=p50[0],
        route_p99_ms=p99[0],
        healthz_p50_ms=p50[1],
        healthz_p99_ms=p99[1],
        decision_p50_us=p50[2],
        decision_p99_us=p99[2],
    )


Measured = tuple[float, float, float]
"""Milliseconds to route, milliseconds for /healthz, microseconds of the decision."""


def _ask_all(
    url: str, bodies: list[dict[str, Any]], num_requests: int, clients: int
) -> list[Measured]:
    """Ask from `clients` threads at a time."""
    numbers = count()

    def ask_many(_: int) -> list[Measured]:
        with httpx.Client(timeout=30) as client:
            mine = takewhile(lambda number: number < num_requests, numbers)
            return [_ask(client, url, bodies[number % len(bodies)]) for number in mine]

    with ThreadPoolExecutor(clients) as pool:
        return [one for many in pool.map(ask_many, range(clients)) for one in many]


def _ask(client: httpx.Client, url: str, body: dict[str, Any]) -> Measured:
    started_s = time.perf_counter()
    response = client.post(f"{url}/v1/route", json=body)
    routed_s = time.perf_counter()
    client.get(f"{url}/healthz")
    checked_s = time.perf_counter()
    response.raise_for_status()
    decision_us = response.json()["decision_us"]
    return (routed_s - started_s) * 1e3, (checked_s - routed_s) * 1e3, decision_us


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
