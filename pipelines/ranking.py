"""Ask whether synthetic traffic ranks policies as recorded traffic does.

    python pipelines/ranking.py

Every baseline runs over each scenario's recorded test part, and over synthetic streams of the
same length: from the scenario's fitted model, and, for comparison, with Poisson arrivals and the
same lengths. Agreement is Kendall's tau between the two orders of the policies.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau

from tokenyard.evaluation import run_candidates
from tokenyard.provenance import write_result
from tokenyard.routing.evaluation import summarise
from tokenyard.routing.policies import BASELINES
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Arrivals, Scenario, load_scenario
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.streams import (
    StreamSet,
    StreamSource,
    held_out_streams,
    synthetic_streams,
)

METRICS = {
    "mean": "mean_response_s",
    "p99": "p99_response_s",
    "slo": "slo_violation_fraction",
}


@dataclass(frozen=True)
class Args:
    """Compare the order of the baselines on recorded and on synthetic traffic."""

    scenarios: tuple[str, ...] = ("bursty_serial", "conversation")
    """Scenarios that name a recorded test part."""
    streams: int = 10
    """Synthetic streams; agreement is averaged over them."""
    seed: int = 2026
    """Of the synthetic streams."""
    json: Path | None = None
    """Write the result rows to this file."""


def values(scenario: Scenario, streams: StreamSet, seed: int) -> dict[str, list[list[float]]]:
    """Every metric's values: per stream, one number per policy."""
    candidates = [PROBLEM.candidate(scenario, name) for name in BASELINES]
    runs = run_candidates(candidates, scenario, streams, seed)
    return {name: _table(scenario, runs, key) for name, key in METRICS.items()}


def _table(scenario: Scenario, runs: Mapping[str, Sequence[Run]], key: str) -> list[list[float]]:
    per_policy = [[summarise(scenario, run)[key] for run in some] for some in runs.values()]
    return [list(values) for values in zip(*per_policy, strict=True)]


def taus(one: list[list[float]], others: list[list[float]]) -> list[float]:
    """Kendall's tau (b) of the first stream of `one` with every stream of `others`."""
    return [float(kendalltau(one[0], other).statistic) for other in others]


def agreement(scenario: Scenario, args: Args) -> list[dict[str, str | int | float]]:
    """One row per kind of synthetic traffic, and one for how well real traffic can be matched."""
    source = StreamSource(scenario)
    recorded = held_out_streams(source)
    if recorded is None:
        raise SystemExit(f"the recorded test part of {scenario.name} was not found")
    real = values(scenario, recorded, args.seed)
    num_requests = len(recorded.requests[0])
    same_length = scenario.model_copy(update={"requests_per_stream": num_requests})
    poisson = Arrivals(process="poisson", rate_per_s=source.rate_per_s)
    kinds = {
        "fitted arrivals": same_length,
        "poisson arrivals": same_length.model_copy(update={"arrivals": poisson}),
    }
    rows: list[dict[str, str | int | float]] = []
    for kind, synthetic in kinds.items():
        streams = synthetic_streams(StreamSource(synthetic), args.streams, args.seed)
        drawn = values(synthetic, streams, args.seed)
        rows.append({"scenario": scenario.name, "traffic": kind, "stream_count": args.streams})
        for name in METRICS:
            rows[-1][f"tau_{name}"] = float(np.mean(taus(real[name], drawn[name])))
            between = taus(drawn[name], drawn[name][1:])
            rows[-1][f"tau_{name}_between_streams"] = float(np.mean(between))
    return rows


def main(args: Args) -> None:
    rows = [row for name in args.scenarios for row in agreement(load_scenario(name), args)]
    table = Table(
        "scenario", "traffic", "mean", "p99", "violations", title="Kendall's tau to recorded"
    )
    for row in rows:
        cells = [f"{row[f'tau_{m}']:.2f} ({row[f'tau_{m}_between_streams']:.2f})" for m in METRICS]
        table.add_row(str(row["scenario"]), str(row["traffic"]), *cells)
    Console().print(table)
    print("in brackets: between the first synthetic stream and the others")
    if args.json:
        write_result(args.json, shlex.join(sys.argv), args.seed, rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
