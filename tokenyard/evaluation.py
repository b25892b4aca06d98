"""Measure runs, and compare policies on equal streams.

Every policy sees the same streams (common random numbers), so the difference to the baseline is
taken stream by stream, and its interval is much narrower than that of either mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from tokenyard import metrics
from tokenyard.intervals import (
    BlockBootstrap,
    Interval,
    block_length,
    percentile_interval,
    t_interval,
)
from tokenyard.metrics import score
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.scenario import Scenario
from tokenyard.sim.engines import BatchingOutcomes
from tokenyard.sim.run import PolicyFactory, Run, run_each, run_policy
from tokenyard.types import FloatArray

__all__ = [
    "PolicyFactory",
    "Row",
    "Run",
    "compare",
    "mean_summary",
    "run_each",
    "run_policy",
    "score",
    "summarise",
]

Row = dict[str, str | int | float]
"""One line of a results table, with units in its keys."""

WITH_INTERVAL = (
    "reward",
    "mean_response_s",
    "p99_response_s",
    "mean_queue_length",
    "slo_violation_fraction",
)
"""Metrics that get an interval of their own: `<metric>_ci_low` and `<metric>_ci_high`."""

_RELATIVE_DELTAS = {"delta_mean": "mean_response_s", "delta_p99": "p99_response_s"}
_BOOTSTRAP_SEED = 95


def summarise(scenario: Scenario, run: Run) -> dict[str, float]:
    """Measure one stream; docs/metrics.md defines every key."""
    outcomes = run.outcomes
    response_s, missed = outcomes.response_s, outcomes.missed(scenario.slo_response_s)
    capacity = np.array(scenario.server_capacities_tokens_per_s)
    shares = metrics.server_shares(outcomes.server, scenario.num_servers)
    of_engines = (
        _summarise_engines(scenario, outcomes) if isinstance(outcomes, BatchingOutcomes) else {}
    )
    return {
        "reward": float(run.rewards.sum()),
        "mean_response_s": metrics.mean_response_s(response_s),
        "p50_response_s": metrics.percentile_response_s(response_s, 50),
        "p95_response_s": metrics.percentile_response_s(response_s, 95),
        "p99_response_s": metrics.percentile_response_s(response_s, 99),
        "cvar99_response_s": metrics.cvar99_response_s(response_s),
        "mean_queue_length": float(outcomes.waiting_seen.mean()),
        "slo_violation_fraction": metrics.slo_violation_fraction(missed),
        "goodput_per_s": metrics.goodput_per_s(outcomes.arrival_s, missed),
        "dropped_fraction": metrics.dropped_fraction(response_s),
        "load_balance": metrics.load_balance(outcomes.total_tokens, outcomes.server, capacity),
        "score": score(response_s, missed),
        **{f"share_server_{i}_fraction": float(share) for i, share in enumerate(shares)},
        **of_engines,
    }


def _summarise_engines(scenario: Scenario, outcomes: BatchingOutcomes) -> dict[str, float]:
    """Measure what only replicas that batch have: tokens, memory, energy, classes, tenants."""
    ttft_s = outcomes.first_token_s
    tpot_s = metrics.tpot_s(outcomes.response_s, ttft_s, outcomes.output_tokens)
    done = ~np.isnan(outcomes.response_s)
    delivered, wasted = outcomes.output_tokens[done].sum(), outcomes.wasted_tokens.sum()
    hit = outcomes.hit_tokens.sum()
    return {
        "mean_ttft_s": metrics.mean(ttft_s),
        "p50_ttft_s": metrics.percentile(ttft_s, 50),
        "p99_ttft_s": metrics.percentile(ttft_s, 99),
        "mean_tpot_s": metrics.mean(tpot_s),
        "p99_tpot_s": metrics.percentile(tpot_s, 99),
        "p50_itl_s": _itl_s(outcomes, 50),
        "p99_itl_s": _itl_s(outcomes, 99),
        "kv_used_fraction": metrics.mean(outcomes.kv_seen),
        "prefix_hit_fraction": metrics.fraction(hit, hit + outcomes.prefilled_tokens.sum()),
        "preemptions_per_request": metrics.mean(outcomes.preemptions),
        "wasted_tokens_fraction": metrics.fraction(wasted, wasted + delivered),
        "energy_j_per_token": metrics.fraction(outcomes.energy_j, delivered),
        "retried_fraction": float((outcomes.attempts > 1).mean()),
        "gave_up_fraction": float(outcomes.gave_up.mean()),
        **_of_groups(scenario, outcomes),
    }


def _itl_s(outcomes: BatchingOutcomes, percent: float) -> float:
    return metrics.binned_percentile_s(
        outcomes.latency_counts, percent, lay.LATENCY_BIN_START_S, lay.LATENCY_BINS_PER_E
    )


def _of_groups(scenario: Scenario, outcomes: BatchingOutcomes) -> dict[str, float]:
    """Measure how every class and, where there are several, every tenant fared."""
    assert scenario.fleet is not None
    missed = outcomes.missed(scenario.slo_response_s)
    found = {
        f"attained_{one.name}_fraction": metrics.attained_fraction(
            missed, outcomes.traffic_class, which
        )
        for which, one in enumerate(scenario.fleet.classes)
    }
    tenants = scenario.fleet.tenants
    if len(tenants) == 1:
        return found
    for which, tenant in enumerate(tenants):
        key = f"attained_tenant_{tenant.name}_fraction"
        found[key] = metrics.attained_fraction(missed, outcomes.tenant, which)
    gaps = metrics.service_gaps_tokens_per_s(
        outcomes.arrival_s,
        outcomes.first_token_s,
        outcomes.response_s,
        np.stack([outcomes.context_tokens, outcomes.output_tokens], axis=1),
        outcomes.tenant,
        np.array([tenant.weight for tenant in tenants]),
    )
    return found | {
        "service_gap_tokens_per_s": metrics.mean(gaps),
        "max_service_gap_tokens_per_s": float(gaps.max()) if len(gaps) else np.nan,
    }


def mean_summary(scenario: Scenario, runs: Sequence[Run]) -> dict[str, float]:
    """Mean over streams of every metric of `summarise`."""
    return {key: float(values.mean()) for key, values in _per_stream(scenario, runs).items()}


def compare(
    scenario: Scenario, runs: Mapping[str, Sequence[Run]], baseline: str, bootstrap: bool = False
) -> list[Row]:
    """Set policies beside each other, one row each, with their difference to a baseline.

    Args:
        scenario: Names the rows, and gives the SLO.
        runs: The runs of every policy over the same streams, in the same order.
        baseline: The policy of `runs` that the others are compared to.
        bootstrap: Intervals by block bootstrap over the requests of the one stream there is;
            otherwise Student intervals over streams.

    Raises:
        ValueError: The baseline is not among `runs`.
    """
    if baseline not in runs:
        raise ValueError(f"baseline {baseline!r} was not run; choose one of {sorted(runs)}")
    spread: _Spread = (
        _OverRequests(scenario, runs, baseline)
        if bootstrap
        else _OverStreams(scenario, runs, baseline)
    )
    return [_row(scenario, name, runs[name], spread) for name in runs]


class _Spread(Protocol):
    """How far an estimate may be off, by one way of looking at the randomness."""

    def of(self, name: str, metric: str) -> Interval:
        """Mean over streams of a policy's metric."""
        ...

    def difference(self, name: str, metric: str, relative: bool) -> Interval:
        """A policy's metric minus the baseline's, over the baseline's where relative."""
        ...


def _row(scenario: Scenario, name: str, runs: Sequence[Run], spread: _Spread) -> Row:
    row: Row = {"policy": name, "scenario": scenario.name, "stream_count": len(runs)}
    row |= mean_summary(scenario, runs)
    for metric in WITH_INTERVAL:
        interval = spread.of(name, metric)
        row |= {f"{metric}_ci_low": interval.low, f"{metric}_ci_high": interval.high}
    for delta, metric in _RELATIVE_DELTAS.items():
        row |= _delta(f"{delta}_fraction", delta, spread.difference(name, metric, True))
    absolute = spread.difference(name, "slo_violation_fraction", False)
    return row | _delta("delta_slo_violation", "delta_slo", absolute)


def _delta(key: str, prefix: str, interval: Interval) -> Row:
    return {
        key: interval.estimate,
        f"{prefix}_ci_low": interval.low,
        f"{prefix}_ci_high": interval.high,
    }


def _per_stream(scenario: Scenario, runs: Sequence[Run]) -> dict[str, FloatArray]:
    summaries = [summarise(scenario, run) for run in runs]
    return {key: np.array([s[key] for s in summaries]) for key in summaries[0]}


class _OverStreams:
    """Student intervals over independent streams, differences paired by stream."""

    def __init__(
        self, scenario: Scenario, runs: Mapping[str, Sequence[Run]], baseline: str
    ) -> None:
        self._values = {name: _per_stream(scenario, some) for name, some in runs.items()}
        self._baseline = self._values[baseline]

    def of(self, name: str, metric: str) -> Interval:
        return t_interval(self._values[name][metric])

    def difference(self, name: str, metric: str, relative: bool) -> Interval:
        theirs = self._baseline[metric]
        interval = t_interval(self._values[name][metric] - theirs)
        return interval.over(float(theirs.mean())) if relative else interval


class _OverRequests:
    """Bootstrap intervals over the requests of one long stream, in blocks that policies share.

    Blocks are as long as the baseline's response times are dependent.
    """

    def __init__(
        self, scenario: Scenario, runs: Mapping[str, Sequence[Run]], baseline: str
    ) -> None:
        assert all(len(some) == 1 for some in runs.values()), "a bootstrap is over one stream"
        response_s = runs[baseline][0].outcomes.response_s
        bootstrap = BlockBootstrap(
            len(response_s), block_length(response_s), np.random.default_rng(_BOOTSTRAP_SEED)
        )
        self._point = {name: summarise(scenario, some[0]) for name, some in runs.items()}
        self._resampled = {
            name: _resample(bootstrap, some[0], scenario.slo_response_s)
            for name, some in runs.items()
        }
        self._baseline = baseline

    def of(self, name: str, metric: str) -> Interval:
        return percentile_interval(self._point[name][metric], self._resampled[name][metric])

    def difference(self, name: str, metric: str, relative: bool) -> Interval:
        ours, theirs = self._point[name][metric], self._point[self._baseline][metric]
        samples = self._resampled[name][metric] - self._resampled[self._baseline][metric]
        if relative:
            samples = samples / self._resampled[self._baseline][metric]
        return percentile_interval((ours - theirs) / (theirs if relative else 1.0), samples)


def _resample(bootstrap: BlockBootstrap, run: Run, slo_s: float) -> dict[str, FloatArray]:
    response_s = run.outcomes.response_s
    num_requests = len(response_s)
    # nanpercentile is a hundred times slower than percentile.
    percentile = np.nanpercentile if np.isnan(response_s).any() else np.percentile
    violation = run.outcomes.missed(slo_s).astype(np.float64)
    return {
        "reward": num_requests * bootstrap.resample(run.rewards, _row_means),
        "mean_response_s": bootstrap.resample(response_s, lambda x: np.nanmean(x, axis=1)),
        "p99_response_s": bootstrap.resample(response_s, lambda x: percentile(x, 99, axis=1)),
        "mean_queue_length": bootstrap.resample(run.outcomes.waiting_seen, _row_means),
        "slo_violation_fraction": bootstrap.resample(violation, _row_means),
    }


def _row_means(values: FloatArray) -> FloatArray:
    means: FloatArray = values.mean(axis=1)
    return means
