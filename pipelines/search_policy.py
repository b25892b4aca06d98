"""Search the linear policy of a scenario from several seeds and keep the best on validation.

This is how the shipped champions are made:

    python pipelines/search_policy.py --scenario poisson_085 --out tokenyard/artifacts/routing
"""

from __future__ import annotations

import itertools
import json
import platform
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from tokenyard import metrics
from tokenyard.artifact import PolicyArtifact
from tokenyard.observation import NUM_SCORE_WEIGHTS
from tokenyard.rl.policy_search import Objective, PolicySearch, SearchConfig
from tokenyard.scenario import load_scenario
from tokenyard.sim import kernel
from tokenyard.sim.cluster import ClusterSim
from tokenyard.sim.streams import StreamSource, synthetic_streams
from tokenyard.types import FloatArray


@dataclass(frozen=True)
class Args:
    """Search a scenario's linear policy and export the best of all seeds and objectives."""

    scenario: str = "poisson_085"
    """Name or YAML path."""
    out: Path | None = None
    """Folder for <scenario>.npz; nothing is written without it."""
    seeds: int = 4
    """Independent searches per objective."""
    generations: int = 50
    streams: int = 6
    """Streams per generation, of 5000 requests each."""
    load_range: tuple[float, float] = (1.0, 1.0)
    """Range of factors on the scenario's arrival rate."""
    p99_margin: float = 0.01
    """How far the mean p99 may exceed that of shortest expected delay on validation streams."""
    jobs: int = 2
    """Processes."""
    json: Path | None = None
    """Where to write the rows."""


OBJECTIVES = (
    Objective(cvar99=0.0, violation=2.0, tail_guard=2.0),
    Objective(cvar99=0.0, violation=1.0, tail_guard=2.0),
    Objective(cvar99=0.05, violation=2.0, tail_guard=2.0),
    Objective(cvar99=0.1, violation=2.0, tail_guard=5.0),
)


@dataclass(frozen=True)
class Found:
    """One finished search and what its policy does on the validation streams."""

    row: dict[str, float | int | str]
    weights: list[float]


def search(args: Args, objective: Objective, seed: int) -> Found:
    """Run one search to the end and judge it on the validation streams."""
    scenario = load_scenario(args.scenario)
    config = SearchConfig(
        objective=objective,
        streams_per_generation=args.streams,
        num_generations=args.generations,
        load_range=args.load_range,
    )
    policy = PolicySearch(scenario, config, seed)
    for _ in range(args.generations):
        policy.step()
    row: dict[str, float | int | str] = {"seed": seed, "env_steps": policy.env_steps}
    row |= {f"objective_{name}": value for name, value in asdict(objective).items()}
    return Found(row | validate(args.scenario, policy.mean), policy.mean.tolist())


def validate(scenario_name: str, weights: FloatArray, num_streams: int = 90) -> dict[str, float]:
    """Compare weights with shortest expected delay on streams that no search has seen."""
    source = StreamSource(load_scenario(scenario_name))
    streams = synthetic_streams(source, num_streams, seed=0, purpose="validation").requests
    sim = ClusterSim(source.scenario, num_streams, len(streams[0]))
    for copy, requests in enumerate(streams):
        sim.load(copy, requests)
    slo_s = source.scenario.slo_response_s

    def measure(candidate: FloatArray) -> FloatArray:
        sim.run_linear(candidate, source.mean_total_tokens)
        responses = sim.outcome_table[:, :, kernel.RESPONSE_S]
        return np.array(
            [
                [
                    metrics.score(r, slo_s),
                    metrics.mean_response_s(r),
                    metrics.percentile_response_s(r, 99.0),
                    metrics.slo_violation_fraction(r, slo_s),
                ]
                for r in responses
            ]
        ).mean(axis=0)

    ours, sed = measure(weights), measure(np.zeros(NUM_SCORE_WEIGHTS))
    return {
        "score": float(ours[0]),
        "mean_response_s": float(ours[1]),
        "p99_response_s": float(ours[2]),
        "slo_violation_fraction": float(ours[3]),
        "delta_mean_fraction": float(ours[1] / sed[1] - 1),
        "delta_p99_fraction": float(ours[2] / sed[2] - 1),
        "delta_slo_violation": float(ours[3] - sed[3]),
    }


def choose(found: list[Found], p99_margin: float) -> Found:
    """Return the best score among those that keep the tail; the shortest tail if none does."""
    keeps_tail = [f for f in found if float(f.row["delta_p99_fraction"]) <= p99_margin]
    if keeps_tail:
        return max(keeps_tail, key=lambda f: float(f.row["score"]))
    return min(found, key=lambda f: float(f.row["delta_p99_fraction"]))


def export(args: Args, best: Found) -> PolicyArtifact:
    policy = PolicySearch(load_scenario(args.scenario), seed=int(best.row["seed"]))
    policy.mean = np.array(best.weights)
    found = {key: float(value) for key, value in best.row.items() if not isinstance(value, str)}
    lineage = {"command": f"pipelines/search_policy.py --scenario {args.scenario}"}
    return policy.artifact(found, lineage)


def report(found: list[Found], best: Found) -> None:
    table = Table("objective (cvar99, violation, guard)", "seed", "score", "mean", "p99", "late")
    for one in sorted(found, key=lambda f: -float(f.row["score"])):
        row = one.row
        table.add_row(
            f"{row['objective_cvar99']}, {row['objective_violation']}, "
            f"{row['objective_tail_guard']}",
            str(row["seed"]),
            f"{row['score']:.4f}",
            f"{row['delta_mean_fraction']:+.1%}",
            f"{row['delta_p99_fraction']:+.1%}",
            f"{row['delta_slo_violation']:+.2%}",
            style="bold" if one is best else "",
        )
    Console().print(table)


def main(args: Args) -> None:
    tasks = list(itertools.product(OBJECTIVES, range(args.seeds)))
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(search, args, objective, seed) for objective, seed in tasks]
        found = [future.result() for future in futures]
    best = choose(found, args.p99_margin)
    report(found, best)
    artifact = export(args, best)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"{artifact.metadata.scenario}.npz"
        artifact.save(path)
        print(f"wrote {path} ({artifact.sha256})")
    if args.json is not None:
        sha = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        result = {
            "command": " ".join(sys.argv),
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
            "seed": 0,
            "git_sha": sha,
            "rows": [f.row for f in found],
        }
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
