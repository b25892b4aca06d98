"""What Prometheus sees of the gateway."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_LATENCIES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKEN_TIMES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_DECISION_TIMES_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)
_POOL = ("pool",)
_TENANT = ("tenant",)
_MAX_TENANTS = 256
_NO_TENANT, _OTHERS = "none", "other"

_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("Requests by what became of them.", ("pool", "service_class", "outcome")),
    "prompt_tokens": ("Tokens of prompts.", _POOL),
    "output_tokens": ("Tokens generated.", _POOL),
    "fallbacks": ("Decisions that the baseline made in the policy's place.", ("reason",)),
    "explored": ("Decisions drawn at random.", ()),
    "sends": ("Times that a request was sent to a replica, retries and repeats included.", _POOL),
    "retries": ("Requests placed again after a replica failed.", _POOL),
    "refused": ("Requests that were not accepted.", ("reason",)),
    "ejections": ("Times that a replica was left out because it failed.", _POOL),
    "tenant_requests": ("Requests of tenants with keys that were let in.", _TENANT),
    "tenant_prompt_tokens": ("Prompt tokens of tenants with keys, as quotas count them.", _TENANT),
    "tenant_output_tokens": ("Tokens generated for tenants with keys.", _TENANT),
    "tenant_refused": (
        "Requests of tenants with keys that were refused.",
        _TENANT,
    ),
    "carried_alone": ("Requests that carriers placed while the decider was away.", ()),
    "scrape_failures": ("Scrapes of an endpoint's metrics that failed.", _POOL),
}
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "in_flight": ("Requests sent and not finished.", _POOL),
    "waiting": ("Requests that wait, as the pool's replicas publish it.", _POOL),
    "running": ("Requests that run, as the pool's replicas publish it.", _POOL),
    "kv_used_fraction": ("Share of KV memory held, mean of the pool's replicas.", _POOL),
    "replicas": ("Replicas that are known.", _POOL),
    "signal_age_seconds": ("Age of the oldest state in the pool.", _POOL),
    "host": ("Load of a replica's machine and its GPUs.", ("replica", "quantity")),
    "held": ("Requests that wait at the gateway for a replica with room.", ()),
    "carriers": ("Processes that carry for this decider.", ()),
    "log_lines_lost": ("Decisions missing in the log.", ()),
}
_HISTOGRAMS: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "ttft_seconds": ("Arrival to first token.", _POOL, _LATENCIES_S),
    "tpot_seconds": ("Mean time per output token after the first.", _POOL, _TOKEN_TIMES_S),
    "response_seconds": ("Arrival to last token.", _POOL, _LATENCIES_S),
    "held_seconds": ("Time that requests waited at the gateway for room.", (), _LATENCIES_S),
    "decision_seconds": ("Time to choose a replica.", (), _DECISION_TIMES_S),
}


@dataclass(frozen=True)
class PoolSeries:
    """Series of one pool: to look them up by label takes as long as to write them."""

    in_flight: Gauge
    sends: Counter
    prompt_tokens: Counter
    output_tokens: Counter
    response_seconds: Histogram
    ttft_seconds: Histogram
    tpot_seconds: Histogram


@dataclass(frozen=True)
class TenantSeries:
    """Series of one tenant."""

    requests: Counter
    prompt_tokens: Counter
    output_tokens: Counter
    refused: Counter


class Metrics:
    """All series of one gateway, in a registry of its own; attributes are its names."""

    requests: Counter
    prompt_tokens: Counter
    output_tokens: Counter
    fallbacks: Counter
    explored: Counter
    sends: Counter
    retries: Counter
    refused: Counter
    ejections: Counter
    scrape_failures: Counter
    tenant_requests: Counter
    tenant_prompt_tokens: Counter
    tenant_output_tokens: Counter
    tenant_refused: Counter
    carried_alone: Counter
    in_flight: Gauge
    waiting: Gauge
    running: Gauge
    kv_used_fraction: Gauge
    replicas: Gauge
    signal_age_seconds: Gauge
    host: Gauge
    held: Gauge
    carriers: Gauge
    log_lines_lost: Gauge
    ttft_seconds: Histogram
    tpot_seconds: Histogram
    response_seconds: Histogram
    held_seconds: Histogram
    decision_seconds: Histogram

    def __init__(self) -> None:
        self.registry = one = CollectorRegistry()
        self._pools: dict[str, PoolSeries] = {}
        self._tenants: dict[str, TenantSeries] = {}
        for name, (text, labels) in _COUNTERS.items():
            setattr(self, name, Counter(f"tokenyard_{name}", text, labels, registry=one))
        for name, (text, labels) in _GAUGES.items():
            setattr(self, name, Gauge(f"tokenyard_{name}", text, labels, registry=one))
        for name, (text, labels, buckets) in _HISTOGRAMS.items():
            made = Histogram(f"tokenyard_{name}", text, labels, buckets=buckets, registry=one)
            setattr(self, name, made)

    def of_pool(self, pool: str) -> PoolSeries:
        """Return the series of a pool that every request writes."""
        known = self._pools.get(pool)
        if known is None:
            known = self._pools[pool] = PoolSeries(
                self.in_flight.labels(pool),
                self.sends.labels(pool),
                self.prompt_tokens.labels(pool),
                self.output_tokens.labels(pool),
                self.response_seconds.labels(pool),
                self.ttft_seconds.labels(pool),
                self.tpot_seconds.labels(pool),
            )
        return known

    def know_tenants(self, tenants: Iterable[str]) -> None:
        """Count these by their names, the first 256 that ever were."""
        for tenant in sorted(tenants):
            if tenant not in self._tenants and len(self._tenants) < _MAX_TENANTS:
                self._tenants[tenant] = self._series_of(tenant)

    def of_tenant(self, tenant: str) -> TenantSeries:
        """Return the series of a tenant; `none` where there is none, `other` of one unknown."""
        known = self._tenants.get(tenant)
        return known or self._series_of(_OTHERS if tenant else _NO_TENANT)

    def _series_of(self, tenant: str) -> TenantSeries:
        return TenantSeries(
            self.tenant_requests.labels(tenant),
            self.tenant_prompt_tokens.labels(tenant),
            self.tenant_output_tokens.labels(tenant),
            self.tenant_refused.labels(tenant),
        )

    def exposition(self) -> bytes:
        """All series in Prometheus's text format."""
        text: bytes = generate_latest(self.registry)
        return text
