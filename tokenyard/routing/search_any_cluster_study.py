"""The search for the policy for any cluster from beginning to end: it can be stopped, and goes on.

Every tenth generation's centre is kept. The one that ships is the best of them on validation
clusters, which no generation has seen: the cost of the search itself, over more streams.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.problem import Row
from tokenyard.provenance import lineage
from tokenyard.routing.artifact import PolicyArtifact
from tokenyard.routing.drawn_clusters import Kind, draw_cluster
from tokenyard.routing.search_any_cluster import (
    AnyClusterConfig,
    AnyClusterSearch,
    Found,
    TrainingCluster,
    any_cluster_artifact,
    search_cost,
)
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import stream_rng
from tokenyard.types import FloatArray

KEEP_EVERY = 10
"""Generations from one kept centre to the next."""


@dataclass(frozen=True, kw_only=True)
class AnyClusterStudy:
    """What is searched on, how wide, how long, and on how many clusters it is judged."""

    kind: Kind
    """What the clusters are made of."""
    generations: int = 120
    seed: int = 0
    population: int = 32
    clusters: int = 36
    """Clusters of a generation."""
    requests: int = 2000
    """Requests per cluster."""
    std: float = 0.1
    """Spread of the first generation."""
    validation_clusters: int = 96

    @property
    def config(self) -> AnyClusterConfig:
        """Of the search."""
        return AnyClusterConfig(
            population=self.population,
            num_elites=max(self.population // 5, 2),
            clusters=self.clusters,
            requests_per_cluster=self.requests,
            num_generations=self.generations,
            initial_std=self.std,
        )


def run_any_cluster_study(
    study: AnyClusterStudy,
    path: Path,
    start: FloatArray | None = None,
    tell: Callable[[int, Mapping[str, float]], None] = lambda generation, found: None,
) -> dict[str, Any]:
    """Search to the last generation.

    Args:
        study: The search.
        path: Where its state is kept; one that is there is gone on with.
        start: Weights to begin with; None: those of the rule that is corrected.
        tell: Is told of every generation.

    Returns:
        The state with all that was kept, and the `rows` of what was kept on validation clusters.
    """
    search = AnyClusterSearch(study.kind, study.config, study.seed, start)
    kept: list[list[float]] = [search.mean.tolist()]
    cpu_s = 0.0
    if path.exists():
        state = json.loads(path.read_text(encoding="utf-8"))
        search.restore(state)
        kept, cpu_s = state["kept"], state["cpu_s"]
    while search.generation < study.generations:
        started_s = time.process_time()
        found = search.step()
        cpu_s += time.process_time() - started_s
        if search.generation % KEEP_EVERY == 0:
            kept.append(search.mean.tolist())
        whole = search.state() | {"kept": kept, "cpu_s": cpu_s, "env_steps": search.env_steps}
        path.write_text(json.dumps(whole), encoding="utf-8")
        tell(search.generation, found)
    state = json.loads(path.read_text(encoding="utf-8"))
    state["rows"] = validate(study, [np.array(one) for one in kept])
    path.write_text(json.dumps(state), encoding="utf-8")
    return dict(state)


def weights_of(path: Path, kind: Kind) -> FloatArray:
    """Weights of a policy file (.npz), or those chosen by a finished search."""
    if path.suffix == ".npz":
        arrays = PolicyArtifact.load(path).arrays
        return arrays["engine_weights" if kind == "engines" else "server_weights"]
    return chosen(json.loads(path.read_text(encoding="utf-8")))


def best_row(state: Mapping[str, Any]) -> int:
    """Index of what costs least on the validation clusters."""
    return int(np.argmin([row["cost"] for row in state["rows"]]))


def chosen(state: Mapping[str, Any]) -> FloatArray:
    """Weights of a finished search that cost least on the validation clusters."""
    return np.array(state["kept"][best_row(state)])


def validate(study: AnyClusterStudy, some: list[FloatArray]) -> list[Row]:
    """Try kept weights on clusters that no search has seen; one row each."""
    clusters = []
    for number in range(study.validation_clusters):
        rng = stream_rng(0, "validation", number)
        scenario = draw_cluster(rng, study.kind)
        clusters.append(TrainingCluster(scenario, 2, study.requests, rng))
    rules = Found.together([cluster.best_rule() for cluster in clusters])
    names = [server_model(one.scenario).group() for one in clusters for _ in range(2)]
    groups = np.array([sorted(set(names)).index(name) for name in names])
    rows: list[Row] = []
    for number, weights in enumerate(some):
        found = Found.together([cluster.try_weights(weights) for cluster in clusters])
        rows.append(
            {
                "kind": study.kind,
                "generation": number * KEEP_EVERY,
                "cost": search_cost(study.config, found, rules, groups),
                "delta_mean_fraction": float((found.mean_s / rules.mean_s).mean() - 1),
                "delta_p99_fraction": float((found.p99_s / rules.p99_s).mean() - 1),
                "delta_slo_violation": float((found.violations - rules.violations).mean()),
            }
        )
    return rows


def export(servers: Mapping[str, Any], engines: Mapping[str, Any]) -> PolicyArtifact:
    """The policy for any cluster, from the states of both finished searches."""
    scored = {
        f"{state['kind']}_{name}": float(state[name])
        for state in (servers, engines)
        for name in ("cpu_s", "env_steps")
    }
    return any_cluster_artifact(chosen(servers), chosen(engines), scored, lineage())
