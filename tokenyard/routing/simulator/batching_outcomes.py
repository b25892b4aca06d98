"""What becomes of requests that a fleet serves, and what is measured of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenyard import metrics
from tokenyard.routing.scenario import Scenario
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.constant_rate import Outcomes
from tokenyard.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class BatchingOutcomes(Outcomes):
    """What became of the requests of one stream; every array has shape (num_requests,)."""

    first_token_s: FloatArray
    """Time from arrival to the first token, seconds; NaN where there was none."""
    output_tokens: FloatArray
    met: IntArray
    """1 where every SLO of the request's class was attained."""
    traffic_class: IntArray
    tenant: IntArray
    attempts: FloatArray
    """Times that the request was placed."""
    preemptions: FloatArray
    hit_tokens: FloatArray
    """Tokens that the prefix cache had at admission, over all admissions."""
    prefilled_tokens: FloatArray
    """Tokens that were lacking in KV memory at admission, over all admissions."""
    wasted_tokens: FloatArray
    """Generated tokens that reached nobody: the client hung up, or the replica failed."""
    kv_seen: FloatArray
    """Mean over replicas of the share of KV memory that requests held when this one was placed."""
    gave_up: IntArray
    """1 where the client hung up."""
    latency_counts: FloatArray
    """Gaps between the tokens of a request, counted by bin over the whole stream, shape
    (lay.LATENCY_BINS,)."""
    energy_j: float
    """Of all replicas that are up, from the first arrival to the last completion."""

    def violations(self, slo_response_s: float) -> BoolArray:
        """Which requests violated an SLO of their class, shape (num_requests,)."""
        violations: BoolArray = self.met == 0
        return violations

    @classmethod
    def of(cls, outcomes: Outcomes) -> BatchingOutcomes:
        """The outcomes, which are those of a fleet.

        Raises:
            TypeError: They are of other servers.
        """
        if not isinstance(outcomes, cls):
            raise TypeError("only replicas that batch have tokens, memory and energy")
        return outcomes

    @property
    def tpot_s(self) -> FloatArray:
        """Mean time per output token after the first, seconds; NaN for fewer than two tokens."""
        return metrics.tpot_s(self.response_s, self.first_token_s, self.output_tokens)

    def further_measures(self, scenario: Scenario) -> dict[str, float]:
        """Tokens, memory, energy, classes and tenants; docs/metrics.md defines every key."""
        done = ~np.isnan(self.response_s)
        delivered, wasted = self.output_tokens[done].sum(), self.wasted_tokens.sum()
        hit = self.hit_tokens.sum()
        return {
            "mean_ttft_s": metrics.mean(self.first_token_s),
            "p50_ttft_s": metrics.percentile(self.first_token_s, 50),
            "p99_ttft_s": metrics.percentile(self.first_token_s, 99),
            "mean_tpot_s": metrics.mean(self.tpot_s),
            "p99_tpot_s": metrics.percentile(self.tpot_s, 99),
            "p50_itl_s": _itl_s(self, 50),
            "p99_itl_s": _itl_s(self, 99),
            "kv_used_fraction": metrics.mean(self.kv_seen),
            "prefix_hit_fraction": metrics.fraction(hit, hit + self.prefilled_tokens.sum()),
            "preemptions_per_request": metrics.mean(self.preemptions),
            "wasted_tokens_fraction": metrics.fraction(wasted, wasted + delivered),
            "energy_j_per_token": metrics.fraction(self.energy_j, delivered),
            "retried_fraction": float((self.attempts > 1).mean()),
            "gave_up_fraction": float(self.gave_up.mean()),
            **_of_groups(scenario, self),
        }


def _itl_s(outcomes: BatchingOutcomes, percent: float) -> float:
    return metrics.binned_percentile_s(
        outcomes.latency_counts, percent, lay.LATENCY_BIN_START_S, lay.LATENCY_BINS_PER_E
    )


def _of_groups(scenario: Scenario, outcomes: BatchingOutcomes) -> dict[str, float]:
    """Measure how every class and, where there are several, every tenant fared."""
    violations = outcomes.violations(scenario.slo_response_s)
    found = {
        f"attained_{one.name}_fraction": metrics.attained_fraction(
            violations, outcomes.traffic_class, which
        )
        for which, one in enumerate(scenario.required_fleet.classes)
    }
    tenants = scenario.required_fleet.tenants
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
