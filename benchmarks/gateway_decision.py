"""What one routing decision costs the live gateway, by number of replicas before it.

python benchmarks/gateway_decision.py

CPU time of one thread: `snapshots` is what the table of replicas does for a request (who is
offered, what is known of each, which of the prompt its cache may hold), `route` is the policy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.table import Table

from serve_app.cluster import EngineProfile
from serve_app.gateway.replicas import EngineStatus, Prompt, ReplicaTable
from tokenyard.problem import Row
from tokenyard.provenance import report
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.types import Request

PROFILE = EngineProfile(
    iteration_s=0.02, prefill_token_s=6e-5, sequence_s=5e-5, kv_token_s=8e-8,
    max_batch=64, token_budget=512, kv_capacity_tokens=150_000,
)  # fmt: skip
NOW_S = 1e9


@dataclass(frozen=True)
class Args:
    """Measure the gateway's time per decision."""

    scenario: str = "conversation_mixed_gpus"
    """Whose SLO and tuned rules apply."""
    policy: str = "marginal_delay"
    """Rule that decides."""
    num_replicas: tuple[int, ...] = (10, 100, 1_000, 10_000)
    """Replicas before it, one row each."""
    prompt_tokens: int = 500
    """Length of every prompt."""
    prefix_block_tokens: int = 0
    """Tokens of one block of the replicas' prefix caches; 0: they have none."""
    json: Path | None = None
    """Write the result rows to this file."""


def measure(args: Args, num_replicas: int) -> Row:
    """Time decisions on replicas that are all busy alike."""
    scenario = load_scenario(args.scenario)
    table = ReplicaTable(scenario.mean_lengths_tokens)
    for number in range(num_replicas):
        replica = table.add(f"r{number}", "pool", PROFILE, args.prefix_block_tokens, NOW_S)
        replica.publish(EngineStatus(1, 3, 0.2, NOW_S))
    rng = np.random.default_rng(0)
    policy = make_policy(args.policy, PolicyContext(scenario.name, scenario.slo, rng, num_replicas))
    token_ids = list(range(args.prompt_tokens))
    request = Request(NOW_S, args.prompt_tokens, 1.4 * args.prompt_tokens)
    times = []
    for _ in range(max(5, 3_000 // num_replicas)):
        started = time.process_time()
        snapshots = table.snapshots(table.offered(NOW_S, 5.0), Prompt(token_ids))
        collected = time.process_time()
        policy.route(request, snapshots)
        times.append((collected - started, time.process_time() - collected))
    snapshots_s, route_s = np.median(times, axis=0)
    return {
        "policy": args.policy,
        "num_replicas": num_replicas,
        "snapshots_us": 1e6 * float(snapshots_s),
        "route_us": 1e6 * float(route_s),
        "decisions_per_cpu_s": 1 / float(snapshots_s + route_s),
    }


def main(args: Args) -> None:
    rows = [measure(args, number) for number in args.num_replicas]
    table = Table(title=f"one decision of the gateway, {args.policy}")
    for column in ("replicas", "snapshots us", "route us", "decisions per CPU second"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["num_replicas"]), f"{row['snapshots_us']:.0f}", f"{row['route_us']:.0f}",
            f"{row['decisions_per_cpu_s']:,.0f}",
        )  # fmt: skip
    report(table, rows, args.json, 0, width=100)


if __name__ == "__main__":
    main(tyro.cli(Args))
