"""Does synthetic traffic rank policies as recorded traffic does?

Every baseline runs over a scenario's recorded test part, and over synthetic streams of the same
length: from the scenario's fitted model, and, for comparison, with Poisson arrivals and the same
lengths. Agreement is Kendall's tau between the two orders of the policies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import kendalltau

from tokenyard.evaluation import run_candidates
from tokenyard.problem import Row
from tokenyard.routing.evaluation import summarise
from tokenyard.routing.policies import rows_for
from tokenyard.routing.problem import PROBLEM
from tokenyard.routing.scenario import Arrivals, Scenario
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.server_models import server_model
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


def _values(scenario: Scenario, streams: StreamSet, seed: int) -> dict[str, list[list[float]]]:
    """Every metric's values: per stream, one number per policy."""
    names = rows_for(scenario.name, server_model(scenario).has)
    candidates = [PROBLEM.candidate(scenario, name) for name in names]
    runs = run_candidates(candidates, scenario, streams, seed)
    return {name: _table(scenario, runs, key) for name, key in METRICS.items()}


def _table(scenario: Scenario, runs: Mapping[str, Sequence[Run]], key: str) -> list[list[float]]:
    per_policy = [[summarise(scenario, run)[key] for run in some] for some in runs.values()]
    return [list(values) for values in zip(*per_policy, strict=True)]


def taus(one: list[list[float]], others: list[list[float]]) -> list[float]:
    """Kendall's tau (b) of the first stream of `one` with every stream of `others`."""
    return [float(kendalltau(one[0], other).statistic) for other in others]


def agreement(scenario: Scenario, num_streams: int, seed: int) -> list[Row]:
    """One row per kind of synthetic traffic.

    Agreement is averaged over so many synthetic streams. The keys `..._between_streams` say how
    well synthetic streams agree with each other.

    Raises:
        ValueError: The scenario's recorded test part was not found.
    """
    source = StreamSource(scenario)
    recorded = held_out_streams(source)
    if recorded is None:
        raise ValueError(f"the recorded test part of {scenario.name} was not found")
    real = _values(scenario, recorded, seed)
    num_requests = len(recorded.requests[0])
    same_length = scenario.model_copy(update={"requests_per_stream": num_requests})
    poisson = Arrivals(process="poisson", rate_per_s=source.rate_per_s)
    kinds = {
        "fitted arrivals": same_length,
        "poisson arrivals": same_length.model_copy(update={"arrivals": poisson}),
    }
    rows: list[Row] = []
    for kind, synthetic in kinds.items():
        streams = synthetic_streams(StreamSource(synthetic), num_streams, seed)
        drawn = _values(synthetic, streams, seed)
        rows.append({"scenario": scenario.name, "traffic": kind, "stream_count": num_streams})
        for name in METRICS:
            rows[-1][f"tau_{name}"] = float(np.mean(taus(real[name], drawn[name])))
            between = taus(drawn[name], drawn[name][1:])
            rows[-1][f"tau_{name}_between_streams"] = float(np.mean(between))
    return rows
