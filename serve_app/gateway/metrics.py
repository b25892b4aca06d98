"""What Prometheus sees of the gateway."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_LATENCIES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKEN_TIMES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_DECISION_TIMES_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2)


class Metrics:
    """All series of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        """Register them."""
        self.registry = registry = CollectorRegistry()
        by_pool = ["pool"]
        self.requests = Counter(
            "tokenyard_requests", "Requests by what became of them.",
            ["pool", "service_class", "outcome"], registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "tokenyard_prompt_tokens", "Tokens of prompts.", by_pool, registry=registry
        )
        self.output_tokens = Counter(
            "tokenyard_output_tokens", "Tokens generated.", by_pool, registry=registry
        )
        self.ttft_s = Histogram(
            "tokenyard_ttft_seconds", "Arrival to first token.", by_pool,
            buckets=_LATENCIES_S, registry=registry,
        )  # fmt: skip
        self.tpot_s = Histogram(
            "tokenyard_tpot_seconds", "Mean time per output token after the first.", by_pool,
            buckets=_TOKEN_TIMES_S, registry=registry,
        )  # fmt: skip
        self.response_s = Histogram(
            "tokenyard_response_seconds", "Arrival to last token.", by_pool,
            buckets=_LATENCIES_S, registry=registry,
        )  # fmt: skip
        self.decision_s = Histogram(
            "tokenyard_decision_seconds", "Time to choose a replica.",
            buckets=_DECISION_TIMES_S, registry=registry,
        )  # fmt: skip
        self.fallbacks = Counter(
            "tokenyard_fallbacks", "Decisions that the baseline made in the policy's place.",
            ["reason"], registry=registry,
        )  # fmt: skip
        self.explored = Counter(
            "tokenyard_explored", "Decisions drawn at random.", registry=registry
        )
        self.retries = Counter(
            "tokenyard_retries", "Requests placed again after a replica failed.", by_pool,
            registry=registry,
        )  # fmt: skip
        self.refused = Counter(
            "tokenyard_refused", "Requests that were not accepted.", ["reason"], registry=registry
        )
        self.in_flight = Gauge(
            "tokenyard_in_flight", "Requests sent and not finished.", by_pool, registry=registry
        )
        self.waiting = Gauge(
            "tokenyard_waiting", "Requests that wait, as the pool's replicas publish it.", by_pool,
            registry=registry,
        )  # fmt: skip
        self.running = Gauge(
            "tokenyard_running", "Requests in batches, likewise.", by_pool, registry=registry
        )
        self.kv_used_fraction = Gauge(
            "tokenyard_kv_used_fraction", "Share of KV memory held, mean of the pool's replicas.",
            by_pool, registry=registry,
        )  # fmt: skip
        self.replicas = Gauge(
            "tokenyard_replicas", "Replicas that are known.", by_pool, registry=registry
        )
        self.age_s = Gauge(
            "tokenyard_signal_age_seconds", "Age of the oldest state in the pool.", by_pool,
            registry=registry,
        )  # fmt: skip
        self.host = Gauge(
            "tokenyard_host", "Load of a replica's machine and its GPUs.", ["replica", "quantity"],
            registry=registry,
        )  # fmt: skip
        self.log_lines_lost = Gauge(
            "tokenyard_log_lines_lost", "Decisions missing in the log.", registry=registry
        )

    def exposition(self) -> bytes:
        """All series in Prometheus's text format."""
        text: bytes = generate_latest(self.registry)
        return text
