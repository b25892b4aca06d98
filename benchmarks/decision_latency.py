"""How long one routing decision takes, by policy and number of replicas.

python benchmarks/decision_latency.py

One call of `route` in the calling thread, as the server makes it: from snapshots to the index of a
replica. The champion, policy files and tuned rules are for a fixed number of replicas and have rows
for that number only; the rule that decides where nothing was trained is there once for servers and
once for replicas that batch; `linear` and `network_128x128` have random weights in the shapes that
training makes, for every number.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import tyro
from rich.table import Table

from tokenyard.provenance import ResultFile, report
from tokenyard.routing.artifact import DEFAULT_RULE, PolicyArtifact, learned_policy
from tokenyard.routing.metadata import ArtifactMetadata, FeatureScaling
from tokenyard.routing.observation import (
    NUM_MARGINAL_WEIGHTS,
    NUM_REQUEST_FEATURES,
    observation_size,
)
from tokenyard.routing.policies import BASELINES, PolicyContext, make_policy
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.search import champion_or_rule
from tokenyard.routing.types import EngineSnapshot, ReplicaSnapshot, Request, RoutingPolicy

NUM_CASES = 256


@dataclass(frozen=True)
class Args:
    """Measure the time of one decision."""

    scenario: str = "poisson_085"
    """Whose champion and tuned rules are measured."""
    num_replicas: tuple[int, ...] = (3, 8, 64, 100)
    """Candidates per decision, one row each."""
    decisions: int = 5000
    """Measured decisions per row; a tenth as many come before, unmeasured."""
    seed: int = 0
    """Of requests, loads and the network's weights."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


def policies(args: Args, num_replicas: int) -> tuple[dict[str, RoutingPolicy], list[str]]:
    """Make every policy that can decide between so many replicas, and name the others."""
    scenario = load_scenario(args.scenario)
    context = PolicyContext(
        scenario.name, scenario.slo, np.random.default_rng(args.seed), num_replicas
    )
    made: dict[str, RoutingPolicy] = {}
    left_out: list[str] = []
    for name in BASELINES:
        try:
            made[name] = make_policy(name, context)
        except ValueError as error:
            left_out.append(f"left out: {name}, {num_replicas} replicas: {error}")
    artifact, _ = champion_or_rule(scenario)
    trained_on = artifact.metadata.num_replicas
    if trained_on in (None, num_replicas):
        made["champion"] = learned_policy(artifact)
    else:
        left_out.append(f"left out: champion, {num_replicas} replicas: trained on {trained_on}")
    made[DEFAULT_RULE] = make_policy(DEFAULT_RULE, context)
    made["linear"] = learned_policy(random_linear(num_replicas, args.seed))
    made["network_128x128"] = learned_policy(random_network(num_replicas, args.seed))
    return made, left_out


def random_linear(num_replicas: int, seed: int) -> PolicyArtifact:
    """Make a linear policy that has learned nothing."""
    weights = np.random.default_rng(seed).normal(size=NUM_MARGINAL_WEIGHTS)
    return PolicyArtifact(untrained("marginal", num_replicas), {"weights": weights})


def random_network(num_replicas: int, seed: int) -> PolicyArtifact:
    """Make a network of the trained size that has learned nothing."""
    rng = np.random.default_rng(seed)
    sizes = [observation_size(num_replicas, whole=False), 128, 128, num_replicas]
    arrays = {"mean": np.zeros(sizes[0]), "std": np.ones(sizes[0])}
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        arrays[f"w{layer}"] = rng.normal(size=(outputs, inputs)) / np.sqrt(inputs)
        arrays[f"b{layer}"] = np.zeros(outputs)
    scaling = FeatureScaling(
        medians=(0.0,) * NUM_REQUEST_FEATURES, scales=(1.0,) * NUM_REQUEST_FEATURES
    )
    metadata = untrained("mlp", num_replicas, expected_finish=False, scaling=scaling)
    return PolicyArtifact(metadata, arrays)


def untrained(kind: Literal["marginal", "mlp"], num_replicas: int, **more: Any) -> ArtifactMetadata:
    return ArtifactMetadata(
        kind=kind,
        scenario="none",
        trainer="none",
        num_replicas=num_replicas,
        slo_response_s=2.0,
        mean_total_tokens=2000.0,
        output_length="none",
        **more,
    )


def cases(
    num_replicas: int, seed: int, batches: bool = False
) -> list[tuple[Request, list[ReplicaSnapshot]]]:
    """Draw requests and the replicas they may go to; such as batch continuously, if asked for."""
    rng = np.random.default_rng(seed)
    return [
        (
            Request(float(number), int(tokens), float(tokens)),
            [random_snapshot(replica, rng, batches) for replica in range(num_replicas)],
        )
        for number, tokens in enumerate(rng.integers(1, 8000, NUM_CASES))
    ]


def random_snapshot(replica: int, rng: np.random.Generator, batches: bool) -> ReplicaSnapshot:
    waiting = int(rng.integers(0, 6))
    engine = EngineSnapshot(
        iteration_s=float(rng.choice([0.008, 0.02, 0.04])),
        prefill_token_s=1e-4,
        sequence_s=3e-4,
        kv_token_s=4e-7,
        token_budget=512,
        kv_capacity_tokens=60_000.0,
        kv_used_fraction=float(rng.random()),
        prefill_in_flight_tokens=1500.0 * waiting,
        output_in_flight_tokens=200.0 * (waiting + 1),
        match_tokens=0,
    )
    return ReplicaSnapshot(
        replica_id=f"replica-{replica}",
        tokens_per_s=float(rng.choice([3000.0, 5000.0, 7000.0])),
        num_slots=1,
        max_concurrency=5,
        num_waiting=waiting,
        num_running=1,
        tokens_in_flight=2000.0 * (waiting + 1),
        engine=engine if batches else None,
    )


def measure(
    policy: RoutingPolicy, some: list[tuple[Request, list[ReplicaSnapshot]]], decisions: int
) -> dict[str, float]:
    """Time `decisions` single calls; return their p50 and p99 in microseconds.

    By the clock, and in CPU time of the thread, which other processes of a busy machine do not
    lengthen.
    """
    for number in range(decisions // 10):
        policy.route(*some[number % len(some)])
    clock_ns, cpu_ns = np.empty(decisions), np.empty(decisions)
    for number in range(decisions):
        request, snapshots = some[number % len(some)]
        started_cpu_ns, started_ns = time.thread_time_ns(), time.perf_counter_ns()
        policy.route(request, snapshots)
        clock_ns[number] = time.perf_counter_ns() - started_ns
        cpu_ns[number] = time.thread_time_ns() - started_cpu_ns
    found = {}
    for kind, took_ns in (("", clock_ns), ("cpu_", cpu_ns)):
        p50_ns, p99_ns = np.percentile(took_ns, [50, 99]).tolist()
        found |= {f"p50_{kind}us": p50_ns / 1e3, f"p99_{kind}us": p99_ns / 1e3}
    return found


def main(args: Args) -> None:
    """Measure, print a table and write the rows."""
    rows: list[dict[str, str | int | float]] = []
    notes: list[str] = []
    for num_replicas in args.num_replicas:
        made, left_out = policies(args, num_replicas)
        notes += left_out
        some = cases(num_replicas, args.seed)
        tried = [(name, policy, some) for name, policy in made.items()]
        batching = cases(num_replicas, args.seed, batches=True)
        tried.append((f"{DEFAULT_RULE}, batching", made[DEFAULT_RULE], batching))
        for name, policy, offered in tried:
            took = measure(policy, offered, args.decisions)
            rows.append({"policy": name, "num_replicas": num_replicas, **took})
    table = Table(*rows[0])
    for row in rows:
        cells = (f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row.values())
        table.add_row(*cells)
    report(table, rows, args.json, args.seed, notes=notes)


if __name__ == "__main__":
    main(tyro.cli(Args))
