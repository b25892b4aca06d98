"""Read a gateway's decision log: what it knew, what it chose, and what came of it.

    python examples/decision_log.py LOG       # the folder of `tokenyard serve --decision-log LOG`
    python examples/decision_log.py           # logs decisions of its own, and reads those

Without a folder it starts a gateway that only decides, and asks it where each of 50 requests should
go. Expect how often each replica was chosen, how long a decision took, and the last decision with
the score of every candidate. Columns are in docs/serving/operations.md. It takes a few seconds.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pandas as pd

DECISIONS = 50
SPEEDS = {"slow": 3000.0, "middling": 5000.0, "fast": 7000.0}
"""Tokens per second of each replica."""


def question(number: int) -> dict[str, object]:
    """Body of POST /v1/route: a request, and what is known of the replicas."""
    backlog = {"slow": 0.0, "middling": 0.0, "fast": 900.0 * (number % 4)}
    return {
        "request": {"context_tokens": 800 + 10 * number},
        "snapshots": [
            {"replica_id": name, "tokens_per_s": speed, "tokens_in_flight": backlog[name],
             "num_slots": 1, "max_concurrency": 8, "num_waiting": 0,
             "num_running": int(backlog[name] > 0)}
            for name, speed in SPEEDS.items()
        ],
    }  # fmt: skip


def log_decisions(folder: str) -> None:
    """Start a gateway, ask it, and end it: its log is complete then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pipelines.cli", "serve", "--cluster", "none"]
    options = ["--policy", "sed", "--port", str(port), "--decision-log", folder]
    with subprocess.Popen(command + options, stdout=subprocess.PIPE) as gateway:
        try:
            assert gateway.stdout is not None
            gateway.stdout.readline()  # Printed once it answers.
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
                for number in range(DECISIONS):
                    client.post("/v1/route", json=question(number)).raise_for_status()
        finally:
            gateway.terminate()


def show(folder: str) -> None:
    """Print what the log says."""
    files = sorted(Path(folder).glob("decisions-*.parquet"))
    log = pd.concat([pd.read_parquet(file) for file in files]).sort_values("time_s")
    print(f"{len(log)} decisions of {', '.join(log['policy'].unique())}")
    print(log["replica_id"].value_counts().to_string())
    print(f"median time of a decision: {log['decision_us'].median():.0f} us")
    last = log.iloc[-1]
    print(f"the last went to {last['replica_id']}, of these candidates (the lowest score wins):")
    for candidate in last["candidates"]:
        print(f"  {candidate['replica_id']}: {candidate['score']:.3f}")


def main() -> None:
    """Read the folder that is named, or decisions that are made for it."""
    if sys.argv[1:]:
        show(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        log_decisions(folder)
        show(folder)


if __name__ == "__main__":
    main()
