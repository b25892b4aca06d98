"""What is measured of a routing run; docs/metrics.md defines every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tokenyard import metrics
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.streams import StreamSet
from tokenyard.statistics.intervals import BlockBootstrap, Samples
from tokenyard.statistics.jackknife import JackknifeSamples, p99
from tokenyard.types import FloatArray

_BOOTSTRAP_SEED = 95


def samples(
    scenario: Scenario, streams: StreamSet, runs: Mapping[str, Sequence[Run]], baseline: str
) -> dict[str, Samples]:
    """Measures by stream; of one recorded stream, by blocks or resamples of its requests.

    Resamples are drawn in blocks that policies share. Blocks are as long as the baseline's response
    times are dependent; a stream of few blocks is not resampled, and its rows have no intervals.
    """
    if streams.jackknife:
        return {name: _jackknifed(scenario, run) for name, (run,) in runs.items()}
    if not streams.bootstrap:
        return {name: Samples(per_stream(scenario, results)) for name, results in runs.items()}
    assert all(len(results) == 1 for results in runs.values()), "a bootstrap is over one stream"
    response_s = runs[baseline][0].outcomes.offered_response_s
    bootstrap = BlockBootstrap.of(response_s, np.random.default_rng(_BOOTSTRAP_SEED))
    slo_s = scenario.slo_response_s
    return {
        name: Samples(
            {} if bootstrap is None else _resample(bootstrap, run, slo_s), summarise(scenario, run)
        )
        for name, (run,) in runs.items()
    }


def _jackknifed(scenario: Scenario, run: Run) -> JackknifeSamples:
    outcomes, mean = run.outcomes, metrics.mean
    violations = outcomes.violations(scenario.slo_response_s).astype(np.float64)
    series = {
        "mean_response_s": (outcomes.offered_response_s, mean),
        "p99_response_s": (outcomes.offered_response_s, p99),
        "mean_queue_length": (outcomes.waiting_seen, mean),
        "slo_violation_fraction": (violations, mean),
    }
    if run.rewards is not None:
        series["reward"] = (len(run.rewards) * run.rewards, mean)
    return JackknifeSamples.of(series)


def summarise(scenario: Scenario, run: Run) -> dict[str, float]:
    """Measure one stream; docs/metrics.md defines every key."""
    outcomes = run.outcomes
    offered_s = outcomes.offered_response_s
    violations = outcomes.violations(scenario.slo_response_s)
    capacity = np.array(scenario.server_capacities_tokens_per_s)
    shares = metrics.server_shares(outcomes.server, scenario.num_servers)
    return {
        **({} if run.rewards is None else {"reward": float(run.rewards.sum())}),
        "mean_response_s": metrics.mean(offered_s),
        **{f"p{share}_response_s": metrics.percentile(offered_s, share) for share in (50, 95, 99)},
        "cvar99_response_s": metrics.cvar99_s(offered_s),
        "mean_queue_length": float(outcomes.waiting_seen.mean()),
        "slo_violation_fraction": metrics.slo_violation_fraction(violations),
        "goodput_per_s": metrics.goodput_per_s(outcomes.arrival_s, violations),
        "dropped_fraction": metrics.dropped_fraction(outcomes.response_s),
        "load_balance": metrics.load_balance(outcomes.total_tokens, outcomes.server, capacity),
        "score": metrics.score(offered_s, violations),
        **{f"share_server_{i}_fraction": float(share) for i, share in enumerate(shares)},
        **outcomes.further_measures(scenario),
    }


def mean_summary(scenario: Scenario, runs: Sequence[Run]) -> dict[str, float]:
    """Mean over streams of every metric of `summarise`."""
    return {key: float(values.mean()) for key, values in per_stream(scenario, runs).items()}


def per_stream(scenario: Scenario, runs: Sequence[Run]) -> dict[str, FloatArray]:
    """Every metric of `summarise`, shape (num_streams,) each."""
    summaries = [summarise(scenario, run) for run in runs]
    return {key: np.array([s[key] for s in summaries]) for key in summaries[0]}


def _resample(bootstrap: BlockBootstrap, run: Run, slo_s: float) -> dict[str, FloatArray]:
    offered_s = run.outcomes.offered_response_s
    violation = run.outcomes.violations(slo_s).astype(np.float64)
    resampled = {
        "mean_response_s": bootstrap.resample(offered_s, _row_means),
        "p99_response_s": bootstrap.resample(offered_s, lambda x: np.percentile(x, 99, axis=1)),
        "mean_queue_length": bootstrap.resample(run.outcomes.waiting_seen, _row_means),
        "slo_violation_fraction": bootstrap.resample(violation, _row_means),
    }
    if run.rewards is not None:
        resampled["reward"] = len(run.rewards) * bootstrap.resample(run.rewards, _row_means)
    return resampled


def _row_means(values: FloatArray) -> FloatArray:
    return np.asarray(values.mean(axis=1))
