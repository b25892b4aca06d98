"""The gateway's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, get_type_hints

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_LATENCIES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKEN_TIMES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_DECISION_TIMES_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)
_POOL, _TENANT, _REASON, _STATE, _NONE = ("pool",), ("tenant",), ("reason",), ("state",), ()
_REQUEST, _HOST = ("pool", "service_class", "outcome"), ("replica", "quantity")
_MAX_TENANTS = 256
_NO_TENANT, _OTHERS = "none", "other"


@dataclass(frozen=True)
class PoolSeries:
    """Series of one pool, kept because a look-up by labels takes as long as a write."""

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
    """All metrics of one gateway, in a registry of its own: each with its text and labels."""

    requests: Annotated[Counter, "Requests by what became of them.", _REQUEST]
    prompt_tokens: Annotated[Counter, "Tokens of prompts.", _POOL]
    output_tokens: Annotated[Counter, "Tokens generated.", _POOL]
    fallbacks: Annotated[
        Counter, "Decisions that the baseline made in the policy's place.", _REASON
    ]
    explored: Annotated[Counter, "Decisions drawn at random.", _NONE]
    sends: Annotated[
        Counter, "Times that a request was sent to a replica, retries and repeats included.", _POOL
    ]
    retries: Annotated[Counter, "Requests placed again after a replica failed.", _POOL]
    refused: Annotated[Counter, "Requests that were not accepted.", _REASON]
    ejections: Annotated[Counter, "Times that a replica was left out because it failed.", _POOL]
    tenant_requests: Annotated[Counter, "Requests of tenants with keys that were let in.", _TENANT]
    tenant_prompt_tokens: Annotated[
        Counter, "Prompt tokens of tenants with keys, as quotas count them.", _TENANT
    ]
    tenant_output_tokens: Annotated[Counter, "Tokens generated for tenants with keys.", _TENANT]
    tenant_refused: Annotated[Counter, "Requests of tenants with keys that were refused.", _TENANT]
    scrape_failures: Annotated[Counter, "Scrapes of an endpoint's metrics that failed.", _POOL]
    peers: Annotated[Gauge, "Other gateways and pickers that were heard lately.", _NONE]
    in_flight: Annotated[Gauge, "Requests sent and not finished.", _POOL]
    waiting: Annotated[Gauge, "Requests that wait, as the pool's replicas publish it.", _POOL]
    running: Annotated[Gauge, "Requests that run, as the pool's replicas publish it.", _POOL]
    kv_used_fraction: Annotated[
        Gauge, "Share of KV memory held, mean of the pool's replicas.", _POOL
    ]
    replicas: Annotated[Gauge, "Replicas that are known.", _POOL]
    recommended_replicas: Annotated[
        Gauge, "Replicas that the pool should have, where its file asks for `autoscaling`.", _POOL
    ]
    signal_age_seconds: Annotated[Gauge, "Age of the oldest state in the pool.", _POOL]
    host: Annotated[Gauge, "Load of a replica's machine and its GPUs.", _HOST]
    held: Annotated[Gauge, "Requests that wait at the gateway for a replica with room.", _NONE]
    sessions: Annotated[
        Gauge, "Sessions with a turn at a replica (running), and idle ones with a lease.", _STATE
    ]
    log_lines_lost: Annotated[Gauge, "Decisions missing in the log.", _NONE]
    ttft_seconds: Annotated[Histogram, "Arrival to first token.", _POOL, _LATENCIES_S]
    tpot_seconds: Annotated[
        Histogram, "Mean time per output token after the first.", _POOL, _TOKEN_TIMES_S
    ]
    response_seconds: Annotated[Histogram, "Arrival to last token.", _POOL, _LATENCIES_S]
    held_seconds: Annotated[
        Histogram, "Time that requests waited at the gateway for room.", _NONE, _LATENCIES_S
    ]
    decision_seconds: Annotated[Histogram, "Time to choose a replica.", _NONE, _DECISION_TIMES_S]

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._pools: dict[str, PoolSeries] = {}
        self._tenants: dict[str, TenantSeries] = {}
        for name, declared in get_type_hints(Metrics, include_extras=True).items():
            text, labels, *buckets = declared.__metadata__
            options = {"buckets": buckets[0]} if buckets else {}
            made = declared.__origin__(
                f"tokenyard_{name}", text, labels, registry=self.registry, **options
            )
            setattr(self, name, made)

    def of_pool(self, pool: str) -> PoolSeries:
        """Return the series of a pool that every request writes."""
        series = self._pools.get(pool)
        if series is None:
            labelled = (getattr(self, field.name).labels(pool) for field in fields(PoolSeries))
            series = self._pools[pool] = PoolSeries(*labelled)
        return series

    def know_tenants(self, tenants: Iterable[str]) -> None:
        """Count these tenants by name, up to 256 in the life of the process."""
        for tenant in sorted(tenants):
            if tenant not in self._tenants and len(self._tenants) < _MAX_TENANTS:
                self._tenants[tenant] = self._series_of(tenant)

    def of_tenant(self, tenant: str) -> TenantSeries:
        """Return the series of a tenant; `none` without one, `other` for an unknown one."""
        series = self._tenants.get(tenant)
        return series or self._series_of(_OTHERS if tenant else _NO_TENANT)

    def _series_of(self, tenant: str) -> TenantSeries:
        counters = (getattr(self, f"tenant_{field.name}") for field in fields(TenantSeries))
        return TenantSeries(*(counter.labels(tenant) for counter in counters))
