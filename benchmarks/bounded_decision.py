"""What it costs to be able to give up on a policy: in place, in a thread, in a process.

The numbers behind docs/decisions/0009-a-policy-that-hangs.md.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from serve_app.policy.loading import resolve_policy
from serve_app.policy.runner import warm_up
from serve_app.policy.timeouts import InlineTimeout, ThreadTimeout
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, Request, RoutingPolicy

SCENARIO = "conversation_mixed_gpus"


@dataclass(frozen=True)
class Args:
    """Measure one decision of the champion in three ways, in turns."""

    num_replicas: int = 4
    """Candidates."""
    decisions: int = 3000
    """Per way."""
    idle_ms: float = 2.0
    """Pause before each, as between requests: a worker that has just run is found awake."""


def main(args: Args) -> None:
    """Measure and print."""
    policy = _policy()
    engine = EngineSnapshot(0.01, 1e-4, 1e-4, 1e-6, 512, 1e5, 0.1, 300.0, 200.0, 0)
    snapshots = [
        ReplicaSnapshot(f"r{i}", 100.0 + i, 8, 8, 0, 2, 500.0, engine=engine)
        for i in range(args.num_replicas)
    ]
    request = Request(0.0, 500, 700.0)
    caller, watched = ThreadTimeout(1.0), InlineTimeout(0.02, 5.0)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    process.start()
    ways: dict[str, Callable[[], object]] = {
        "in place": partial(policy.route, request, snapshots),
        "in place, watched": lambda: watched.call(partial(policy.route, request, snapshots)),
        "thread": lambda: caller.call(partial(policy.route, request, snapshots)),
        "process": lambda: _ask(ours, request, snapshots),
    }
    for way in ways.values():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.decisions):
        for name, way in ways.items():
            time.sleep(args.idle_ms / 1e3)
            started_ns = time.perf_counter_ns()
            way()
            times[name].append((time.perf_counter_ns() - started_ns) / 1e3)
    ours.send(None)
    process.join()
    caller.stop()
    watched.stop()
    table = Table("way", "p50 us", "p90 us", "p99 us", "p99.9 us")
    for name, found in times.items():
        table.add_row(name, *(f"{v:.0f}" for v in np.percentile(found, [50, 90, 99, 99.9])))
    Console().print(table)


def _policy() -> RoutingPolicy:
    served = resolve_policy("champion", SCENARIO)
    warm_up(served)
    return served.make(np.random.default_rng(0))


def _ask(connection: Connection, request: Request, snapshots: list[ReplicaSnapshot]) -> int:
    connection.send((request, snapshots))
    answer: int = connection.recv()
    return answer


def _serve(connection: Connection) -> None:
    policy = _policy()
    while (question := connection.recv()) is not None:
        connection.send(policy.route(*question))


if __name__ == "__main__":
    main(tyro.cli(Args))
