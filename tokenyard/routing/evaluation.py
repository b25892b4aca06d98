"""What is measured of a routing run; docs/metrics.md defines every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tokenyard import metrics
from tokenyard.metrics import score
from tokenyard.problem import Measure
from tokenyard.routing.fleet import Fleet
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator.batching import BatchingOutcomes
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.run import Run
from tokenyard.routing.simulator.streams import StreamSet
from tokenyard.statistics.intervals import BlockBootstrap, Samples, block_length
from tokenyard.types import FloatArray

_BOOTSTRAP_SEED = 95
_MOST_SHARES = 8
"""Servers up to which the share of each is printed."""


def measures(scenario: Scenario) -> list[Measure]:
    """What is printed and compared: of servers of constant rate, or of replicas that batch."""
    fleet = scenario.fleet
    return _of_servers(scenario) if fleet is None else [*_of_replicas(), *_of_classes(fleet)]


def _compared(digits: int, tail_digits: int, violation: str) -> list[Measure]:
    return [
        Measure(
            "mean_response_s", "mean s", f".{digits}f", interval=True, delta="delta_mean_fraction"
        ),
        Measure(
            "p99_response_s", "p99 s", f".{tail_digits}f", interval=True, delta="delta_p99_fraction"
        ),
        Measure(
            "slo_violation_fraction", violation, ".1f", 100, interval=True,
            delta="delta_slo_violation",
        ),
    ]  # fmt: skip


def _of_servers(scenario: Scenario) -> list[Measure]:
    late = f"over {scenario.slo_response_s:g} s %"
    found = [
        *_compared(3, 2, late),
        Measure("p50_response_s", "p50 s"),
        Measure("p95_response_s", "p95 s"),
        Measure("reward", "reward", ".0f", interval=True),
        Measure("mean_queue_length", "queue", interval=True),
        Measure("goodput_per_s", "goodput/s"),
        Measure("dropped_fraction", "drop %", ".1f", 100),
    ]
    if scenario.num_servers > _MOST_SHARES:
        return found
    return found + [
        Measure(f"share_server_{i}_fraction", name, ".0f", 100, table="requests by server, %")
        for i, name in enumerate(scenario.server_names)
    ]


def _of_replicas() -> list[Measure]:
    return [
        *_compared(2, 1, "violation %"),
        Measure("mean_ttft_s", "ttft s"),
        Measure("p99_ttft_s", "p99 ttft"),
        Measure("p99_tpot_s", "p99 tpot ms", ".0f", 1000),
        Measure("p99_itl_s", "p99 itl ms", ".0f", 1000),
        Measure("goodput_per_s", "goodput/s"),
        Measure("dropped_fraction", "drop %", ".1f", 100),
        Measure("retried_fraction", "retry %", ".1f", 100),
        Measure("prefix_hit_fraction", "hit %", ".1f", 100),
        Measure("kv_used_fraction", "kv %", ".1f", 100),
        Measure("preemptions_per_request", "preempt"),
        Measure("wasted_tokens_fraction", "waste %", ".1f", 100),
        Measure("energy_j_per_token", "J/token"),
        Measure("reward", interval=True),
        Measure("mean_queue_length", interval=True),
    ]


def _of_classes(fleet: Fleet) -> list[Measure]:
    """Attainment by class and tenant, where there are several of either."""
    tenants = fleet.tenants if len(fleet.tenants) > 1 else ()
    if not tenants and len(fleet.classes) == 1:
        return []
    title = "SLO attainment by class and tenant"
    names = {one.name: one.name for one in fleet.classes}
    names |= {f"tenant_{one.name}": f"tenant {one.name}" for one in tenants}
    found = [
        Measure(f"attained_{key}_fraction", f"{name.replace('_', ' ')} %", ".1f", 100, table=title)
        for key, name in names.items()
    ]
    if tenants:
        found += [
            Measure("service_gap_tokens_per_s", "gap tokens/s", ".0f", table=title),
            Measure("max_service_gap_tokens_per_s", "largest gap", ".0f", table=title),
        ]
    return found


def samples(
    scenario: Scenario, streams: StreamSet, runs: Mapping[str, Sequence[Run]], baseline: str
) -> dict[str, Samples]:
    """Measures by stream; of one recorded stream, by resamples of its requests.

    Resamples are drawn in blocks that policies share. Blocks are as long as the baseline's response
    times are dependent.
    """
    if not streams.bootstrap:
        return {name: Samples(per_stream(scenario, some)) for name, some in runs.items()}
    assert all(len(some) == 1 for some in runs.values()), "a bootstrap is over one stream"
    response_s = runs[baseline][0].outcomes.response_s
    bootstrap = BlockBootstrap(
        len(response_s), block_length(response_s), np.random.default_rng(_BOOTSTRAP_SEED)
    )
    slo_s = scenario.slo_response_s
    return {
        name: Samples(_resample(bootstrap, run, slo_s), summarise(scenario, run))
        for name, (run,) in runs.items()
    }


def summarise(scenario: Scenario, run: Run) -> dict[str, float]:
    """Measure one stream; docs/metrics.md defines every key."""
    outcomes = run.outcomes
    response_s, violations = outcomes.response_s, outcomes.violations(scenario.slo_response_s)
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
        "slo_violation_fraction": metrics.slo_violation_fraction(violations),
        "goodput_per_s": metrics.goodput_per_s(outcomes.arrival_s, violations),
        "dropped_fraction": metrics.dropped_fraction(response_s),
        "load_balance": metrics.load_balance(outcomes.total_tokens, outcomes.server, capacity),
        "score": score(response_s, violations),
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
    violations = outcomes.violations(scenario.slo_response_s)
    found = {
        f"attained_{one.name}_fraction": metrics.attained_fraction(
            violations, outcomes.traffic_class, which
        )
        for which, one in enumerate(scenario.fleet.classes)
    }
    tenants = scenario.fleet.tenants
    if len(tenants) == 1:
        return found
    for which, tenant in enumerate(tenants):
        key = f"attained_tenant_{tenant.name}_fraction"
        found[key] = metrics.attained_fraction(violations, outcomes.tenant, which)
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
    return {key: float(values.mean()) for key, values in per_stream(scenario, runs).items()}


def per_stream(scenario: Scenario, runs: Sequence[Run]) -> dict[str, FloatArray]:
    """Every metric of `summarise`, shape (num_streams,) each."""
    summaries = [summarise(scenario, run) for run in runs]
    return {key: np.array([s[key] for s in summaries]) for key in summaries[0]}


def _resample(bootstrap: BlockBootstrap, run: Run, slo_s: float) -> dict[str, FloatArray]:
    response_s = run.outcomes.response_s
    num_requests = len(response_s)
    # nanpercentile is a hundred times slower than percentile.
    percentile = np.nanpercentile if np.isnan(response_s).any() else np.percentile
    violation = run.outcomes.violations(slo_s).astype(np.float64)
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
