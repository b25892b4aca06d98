"""OpenTelemetry spans of requests, arrival to last token, where the environment asks for them.

What is set is what OpenTelemetry's own documentation says: `OTEL_TRACES_EXPORTER`,
`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER` and the others. Without them nothing is
imported here. Names of attributes are those of OpenTelemetry's conventions for generative AI where
it has one, else they begin with `tokenyard.`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from serve_app.gateway.decision_record import Pick

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PARENT = b"traceparent"
HEADERS = (PARENT, b"tracestate")
"""Those of W3C Trace Context."""


class RequestSpan:
    """The span of one request."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._num_attempts = 0

    def place(self, pick: Pick) -> None:
        """Record where an attempt goes, and who decided that."""
        choice, replica = pick.choice, pick.replica
        attributes: dict[str, str | int | float] = {
            "tokenyard.pool": replica.pool, "tokenyard.replica": replica.replica_id,
            "tokenyard.policy": choice.policy, "tokenyard.arm": choice.arm,
            "tokenyard.decision_us": choice.decision_us, "tokenyard.explored": choice.explored,
            "tokenyard.retries": self._num_attempts,
        }  # fmt: skip
        if choice.fallback_reason is not None:
            attributes["tokenyard.fallback_reason"] = choice.fallback_reason
        if choice.order_key is not None:
            attributes["tokenyard.order_key_s"] = choice.order_key.key_s
        self._num_attempts += 1
        self._span.set_attributes(attributes)
        self._span.add_event("tokenyard.placed", attributes)

    def end_attempt(self, outcome: str, num_sends: int) -> None:
        """Record how an attempt ended, and how often it sent the request."""
        attributes: dict[str, str | int] = {
            "tokenyard.outcome": outcome, "tokenyard.sends": num_sends,
        }  # fmt: skip
        self._span.add_event("tokenyard.attempt_ended", attributes)

    def first_token(self) -> None:
        """Record the first token."""
        self._span.add_event("gen_ai.first_token")

    def finish(self, num_tokens: int, finish_reason: str | None) -> None:
        """Record the answer, as far as it came."""
        self._span.set_attribute("gen_ai.usage.output_tokens", num_tokens)
        if finish_reason is not None:
            self._span.set_attribute("gen_ai.response.finish_reasons", [finish_reason])


class Tracing:
    """Makes spans of requests."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", "tokenyard-gateway")
        self._provider: TracerProvider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tokenyard")
        self._propagator = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def request(
        self, trace: bytes, attributes: Mapping[str, str | int]
    ) -> Iterator[tuple[RequestSpan, bytes]]:
        """Trace a request while it is served; yields its span, and the header line that names it.

        `trace` has the header lines by which the caller names its trace; empty: it does not.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        lines = (line.decode("latin-1").partition(":") for line in trace.splitlines())
        parent = self._propagator.extract({name: value.strip() for name, _, value in lines})
        begun = self._tracer.start_span("request", parent, SpanKind.SERVER, attributes)
        span = RequestSpan(begun)
        named: dict[str, str] = {}
        self._propagator.inject(named, set_span_in_context(begun))
        try:
            yield span, b"traceparent: %b\r\n" % named["traceparent"].encode()
        except BaseException as error:
            begun.set_attribute("error.type", type(error).__name__)
            begun.set_status(Status(StatusCode.ERROR, str(error)[:200] or None))
            raise
        finally:
            begun.end()

    def close(self) -> None:
        """Flush pending spans; may take seconds."""
        self._provider.shutdown()


def tracing_of(environment: Mapping[str, str]) -> Tracing | None:
    """Return the tracing that the environment asks for; None: it asks for none."""
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    has_endpoint = any(environment.get(name) for name in _ENDPOINTS)
    name = environment.get("OTEL_TRACES_EXPORTER") or ("otlp" if has_endpoint else "none")
    if is_off or name == "none":
        return None
    return Tracing(_exporter(name, environment))


def _exporter(name: str, environment: Mapping[str, str]) -> SpanExporter:
    if name == "otlp":
        protocols = (environment.get(variable) for variable in _PROTOCOLS)
        protocol = next((value for value in protocols if value), "http/protobuf")
        name = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    for entry_point in entry_points(group="opentelemetry_traces_exporter", name=name):
        made: Any = entry_point.load()
        exporter: SpanExporter = made()
        return exporter
    raise ValueError(
        f"the exporter of traces {name!r} is not installed; `pip install tokenyard[tracing]` has "
        "otlp, or set OTEL_SDK_DISABLED=true"
    )
