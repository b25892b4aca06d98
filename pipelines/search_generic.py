"""Search the policy for any cluster, choose among what was found, and export it.

Three steps, which can be stopped and go on where they were; docs/results/regimes.md says how the
shipped one was made:

    python pipelines/search_generic.py --kind servers --state servers.json
    python pipelines/search_generic.py --kind slots --start servers.json --state slots.json
    python pipelines/search_generic.py --kind engines --state engines.json \
        --servers slots.json --out tokenyard/artifacts/routing

Every tenth generation's centre is kept. The one that ships is the best of them on validation
clusters, which no generation has seen: the cost of the search itself, over more streams.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from tokenyard.provenance import git_sha, write_result
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.search_any_cluster import (
    AnyClusterConfig,
    AnyClusterSearch,
    Found,
    Kind,
    TrainingCluster,
    any_cluster_artifact,
    draw_cluster,
    search_cost,
)
from tokenyard.routing.simulator.streams import stream_rng
from tokenyard.types import FloatArray

KEEP_EVERY = 10
"""Generations from one kept centre to the next."""


@dataclass(frozen=True)
class Args:
    """Search over randomised clusters of servers, or of replicas that batch."""

    kind: Kind
    """What the clusters are made of."""
    state: Path
    """Where the search is kept; one that is there is gone on with."""
    generations: int = 120
    seed: int = 0
    population: int = 32
    clusters: int = 36
    """Clusters of a generation."""
    requests: int = 2000
    """Requests per cluster."""
    std: float = 0.1
    """Spread of the first generation."""
    start: Path | None = None
    """State of an earlier search, or a policy file (.npz), whose weights are begun with."""
    validation_clusters: int = 96
    servers: Path | None = None
    """State of the finished search over servers, to be exported together with this one."""
    out: Path | None = None
    """Folder for generic.npz; nothing is written without it."""
    json: Path | None = None
    """Where to write the rows."""


def go_on(args: Args) -> dict[str, Any]:
    """Search to the last generation, and return the state with all that was kept."""
    config = AnyClusterConfig(
        population=args.population,
        num_elites=max(args.population // 5, 2),
        clusters=args.clusters,
        requests_per_cluster=args.requests,
        num_generations=args.generations,
        initial_std=args.std,
    )
    begin = None if args.start is None else weights_of(args.start, args.kind)
    search = AnyClusterSearch(args.kind, config, args.seed, begin)
    kept: list[list[float]] = [search.mean.tolist()]
    cpu_s = 0.0
    if args.state.exists():
        state = json.loads(args.state.read_text())
        search.restore(state)
        kept, cpu_s = state["kept"], state["cpu_s"]
    while search.generation < args.generations:
        started_s = time.process_time()
        found = search.step()
        cpu_s += time.process_time() - started_s
        if search.generation % KEEP_EVERY == 0:
            kept.append(search.mean.tolist())
        whole = search.state() | {"kept": kept, "cpu_s": cpu_s, "env_steps": search.env_steps}
        args.state.write_text(json.dumps(whole), encoding="utf-8")
        told = ", ".join(f"{key} {value:+.3f}" for key, value in found.items())
        print(f"generation {search.generation}: {told}", file=sys.stderr)
    state = json.loads(args.state.read_text())
    state["rows"] = validate(args, config, [np.array(one) for one in kept])
    args.state.write_text(json.dumps(state), encoding="utf-8")
    return dict(state)


def weights_of(path: Path, kind: Kind) -> FloatArray:
    """Weights of a policy file, or those chosen by a finished search."""
    if path.suffix == ".npz":
        arrays = PolicyArtifact.load(path).arrays
        return arrays["engine_weights" if kind == "engines" else "server_weights"]
    return chosen(json.loads(path.read_text()))


def chosen(state: dict[str, Any]) -> FloatArray:
    """Weights of a finished search that cost least on the validation clusters."""
    costs = [row["cost"] for row in state["rows"]]
    return np.array(state["kept"][int(np.argmin(costs))])


def validate(
    args: Args, config: AnyClusterConfig, some: list[FloatArray]
) -> list[dict[str, float | str]]:
    """Try kept weights on clusters that no search has seen; one row each."""
    clusters = []
    for number in range(args.validation_clusters):
        rng = stream_rng(0, "validation", number)
        scenario = draw_cluster(rng, args.kind)
        clusters.append(TrainingCluster(scenario, 2, args.requests, rng))
    rules = Found.together([cluster.best_rule() for cluster in clusters])
    names = [cluster.group for cluster in clusters for _ in range(2)]
    groups = np.array([sorted(set(names)).index(name) for name in names])
    rows: list[dict[str, float | str]] = []
    for number, weights in enumerate(some):
        found = Found.together([cluster.try_weights(weights) for cluster in clusters])
        rows.append(
            {
                "kind": args.kind,
                "generation": number * KEEP_EVERY,
                "cost": search_cost(config, found, rules, groups),
                "delta_mean_fraction": float((found.mean_s / rules.mean_s).mean() - 1),
                "delta_p99_fraction": float((found.p99_s / rules.p99_s).mean() - 1),
                "delta_slo_violation": float((found.violations - rules.violations).mean()),
            }
        )
    return rows


def export(args: Args, servers: dict[str, Any], engines: dict[str, Any]) -> None:
    """Write generic.npz from both searches."""
    assert args.out is not None
    lineage = {"command": shlex.join(["python", *sys.argv]), "git_sha": git_sha()}
    metrics = {
        f"{state['kind']}_{name}": float(state[name])
        for state in (servers, engines)
        for name in ("cpu_s", "env_steps")
    }
    artifact = any_cluster_artifact(chosen(servers), chosen(engines), metrics, lineage)
    args.out.mkdir(parents=True, exist_ok=True)
    artifact.save(args.out / "generic.npz")
    print(f"wrote {args.out / 'generic.npz'} ({artifact.sha256})")


def main(args: Args) -> None:
    state = go_on(args)
    best = int(np.argmin([row["cost"] for row in state["rows"]]))
    table = Table(*state["rows"][0], title="On validation clusters, beside the best rule of each")
    for number, row in enumerate(state["rows"]):
        cells = [f"{cell:+.4f}" if isinstance(cell, float) else str(cell) for cell in row.values()]
        table.add_row(*cells, style="bold" if number == best else "")
    Console().print(table)
    print(f"{state['env_steps']:,} requests routed in {state['cpu_s']:.0f} CPU-seconds")
    if args.out is not None:
        other = state if args.servers is None else json.loads(args.servers.read_text())
        export(args, other, state)
    if args.json is not None:
        write_result(args.json, shlex.join(sys.argv), args.seed, state["rows"])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
