"""The gateway: it lets requests in, has them answered, and records the results.

Everything here runs on one event loop. A choice and its reservation happen without an await in
between, so no two requests are placed on the same state.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

from serve_app.cluster import Cluster, QueueSettings, SloClass
from serve_app.gateway.answer import Answer
from serve_app.gateway.attempts import Attempts
from serve_app.gateway.availability import ReplicaStatus
from serve_app.gateway.callers import ANYBODY
from serve_app.gateway.clocks import steady_unix_s
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.exchange import Backend, Downstream, InferenceRequest
from serve_app.gateway.generation import Draining, Refused, RequestRejected, Unanswerable, Unserved
from serve_app.gateway.history import History
from serve_app.gateway.holding import Holding
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.outliers import OutlierDetector
from serve_app.gateway.peers import KEY_VARIABLE, Peers
from serve_app.gateway.placement import Placement
from serve_app.gateway.rate_limits import Grant, OverLimit, RateLimits
from serve_app.gateway.replicas import Prompt, ReplicaTable
from serve_app.gateway.sessions import SessionGate, Turn
from serve_app.gateway.tracing import Tracing
from serve_app.models import ModelCatalog, ServedModel
from serve_app.policy.autopilot import AutopilotStatus
from serve_app.policy.manager import PolicyManager
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.sessions.rules import make_rule
from tokenyard.workload.answer_lengths import AnswerLengths

SHEDDABLE_FRACTION = 0.5
"""Share of the requests in flight to which one of a priority below 0 may add."""
_DRAIN_POLL_S = 0.05
_LAST_EVENTS_S = 1.0
"""Time to send errors to callers that are cut off."""


@dataclass
class Gateway:
    """Serves requests with the replicas of all pools."""

    cluster: Cluster
    manager: PolicyManager
    backends: Mapping[str, Backend]
    """Pools by name."""
    metrics: Metrics = field(default_factory=Metrics)
    log: DecisionLog | None = None
    clock_s: Callable[[], float] = steady_unix_s
    limits: RateLimits = field(default_factory=RateLimits)
    """Limits of callers."""
    tracing: Tracing | None = None
    """Makes spans of requests; None: nobody wants them."""
    in_flight: int = 0
    num_offered: int = 0
    """Requests that have asked to be let in, those that were refused included."""
    draining: bool = False
    """Whether it is about to end, and lets nothing in."""

    def __post_init__(self) -> None:
        """Make the parts that requests pass through."""
        means = load_scenario(self.cluster.scenario).mean_lengths_tokens
        self.table = ReplicaTable(means)
        self.history = History(self._num_queued)
        self.outliers = OutlierDetector(self.cluster.outlier_ejection)
        self.answer_lengths = AnswerLengths()
        self.autopilot = AutopilotStatus()
        queue, settings = self.cluster.queue, self.cluster.sessions
        self.sessions = None
        if settings is not None:
            share_of = self.cluster.tenant_share if self.cluster.tenants else None
            self.sessions = SessionGate(make_rule(settings.rule), self.table, share_of)
            queue = queue or QueueSettings()
        self.peers = None
        if (named := self.cluster.gateway.peers) is not None:
            self.peers = Peers(named, os.environ.get(KEY_VARIABLE), self.table, self.clock_s)
        self._placement = Placement(
            self.cluster, self.manager.picker, self.backends, self.table, self.history,
            self.outliers, self.metrics, self.answer_lengths, self.sessions, self.peers,
            self.clock_s,
        )  # fmt: skip
        self.holding = None
        if queue is not None:
            self.holding = Holding(
                queue, self._placement, self.metrics, self.clock_s, self.sessions
            )
        self._attempts = Attempts(
            self.backends, self.table, self.manager.picker, self._placement, self.holding,
            self.metrics, self.log, self.clock_s, self.cluster.limits.max_retries,
        )  # fmt: skip
        self._num_lost = 0
        """Rows that the decision log had lost when this was last looked at."""
        self._answers: set[Answer] = set()
        """Those under way."""
        self._catalog = ModelCatalog(self.cluster)

    def class_of_objective(self, objective: str) -> SloClass:
        """Return the class of that name, else the first.

        If Kubernetes has an InferenceObjective of that name with a priority below 0, requests are
        let in only while less is in flight than `SHEDDABLE_FRACTION` of what may be.
        """
        if (named := self.cluster.service_class(objective)) is not None:
            return named
        first = self.cluster.classes[0]
        if any(backend.objectives.get(objective, 0) < 0 for backend in self.backends.values()):
            fraction = SHEDDABLE_FRACTION * first.admitted_fraction
            return first.model_copy(update={"admitted_fraction": fraction})
        return first

    async def serve(
        self, request: InferenceRequest, service_class: SloClass, downstream: Downstream
    ) -> None:
        """Answer a request; being cancelled cancels it at its replica.

        Raises:
            Draining: The gateway is about to end.
            Unanswerable: No pool can ever answer it: it is too long for all.
            Refused: Too much is in flight, no replica takes more, or its caller has asked for too
                much; nothing was generated.
            Unserved: No replica could answer it in time, or the one that had begun died.
            RequestRejected: An endpoint has something against the request, or is gone with what
                it goes on from.
        """
        if self.tracing is not None and request.span is None:
            model = request.model or self._catalog.default
            attributes = request.span_attributes(model, service_class.name)
            with self.tracing.request(request.trace, attributes) as (span, line):
                return await self.serve(request.traced(line, span), service_class, downstream)
        self.num_offered += 1
        try:
            answer = self._open(request, service_class, downstream)
        except (Refused, Draining):
            self._count_refusal(request)
            raise
        self.in_flight += 1
        self._answers.add(answer)
        try:
            async with answer.wait:
                await self._attempts.run(answer)
        except TimeoutError:
            if not answer.wait.expired():
                raise
            reason = f"no answer within {self.cluster.limits.timeout_s:g} s"
            if answer.is_cut_off:
                reason = "the gateway ended before the answer did"
            raise Unserved(reason) from None
        except asyncio.CancelledError:
            if answer.finish_reason is None:
                answer.finish_reason = "abort"
            raise
        except (RequestRejected, Unanswerable):
            answer.is_rejected = True
            raise
        except Refused:
            self._count_refusal(request)
            if answer.grant is not None:
                answer.grant.cancel()
                answer.grant = None
            raise
        finally:
            self._answers.discard(answer)
            self.in_flight -= 1
            self._settle(answer)

    def _open(
        self, request: InferenceRequest, service_class: SloClass, downstream: Downstream
    ) -> Answer:
        """Let a request in, and begin its answer; raises what `serve` raises."""
        if self.draining:
            self.metrics.refused.labels("draining").inc()
            raise Draining("the gateway is about to end; ask another")
        limit = self.cluster.limits.max_in_flight * service_class.admitted_fraction
        if self.in_flight >= max(limit, 1):
            self.metrics.refused.labels("too many in flight").inc()
            raise Refused(
                f"{self.in_flight} requests are in flight, which is all that class "
                f"{service_class.name!r} may add to",
                self._placement.retry_after_s(),
            )
        model = self._catalog.find(request.model)
        assert model is not None  # Others are refused where bodies are read.
        most_tokens = self.max_tokens_of(model)
        grant = None
        if request.caller is not ANYBODY:
            grant = self._grant(request, downstream, most_tokens)
        answer = Answer(
            request, service_class, downstream, request.prompt or Prompt(request.token_ids),
            self.clock_s(),
            asyncio.timeout(self.cluster.limits.timeout_s), model, grant,
            self.cluster.tenant_share(request.tenant),
            int(min(len(request.token_ids) + request.max_tokens, most_tokens)),
        )  # fmt: skip
        if self.sessions is not None and request.call.generates:
            tenant = request.tenant or request.caller.tenant
            answer.turn = self.sessions.arrive(
                request.session, tenant, answer.prompt, answer.arrival_s
            )
            request.learn = partial(_learn, answer.turn, request.learn)
        picker = self.manager.picker
        if picker.experiment is not None:
            picker.experiment.open(
                request.request_id, picker.arm_of(request.request_id),
                len(request.token_ids), answer.arrival_s, service_class.response_s,
            )  # fmt: skip
        return answer

    async def drain(self, within_s: float | None = None) -> int:
        """Let nothing more in, wait for all answers, and return how many were cut off.

        Those are what is not answered within `limits.drain_s`, or the time that is given: each ends
        with an error, and a stream with an event that says so.
        """
        self.draining = True
        await self._answered(self.cluster.limits.drain_s if within_s is None else within_s)
        cut = self.in_flight
        for answer in self._answers:
            answer.is_cut_off = True
            if not answer.wait.expired():
                answer.wait.reschedule(asyncio.get_running_loop().time())
        await self._answered(_LAST_EVENTS_S)
        return cut

    async def _answered(self, most_s: float) -> None:
        """Wait until nothing is in flight, at most for a given time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while self.in_flight:
                    await asyncio.sleep(_DRAIN_POLL_S)

    def refresh(self) -> float:
        """Bring the table of replicas up to date; return the time."""
        return self._placement.refresh()

    def states(self) -> dict[str, ReplicaStatus]:
        """Whether each replica takes requests now, or why not, by its name."""
        now_s, replicas = self.refresh(), self.table.replicas
        state_of = self._placement.availability.state_of
        return {name: state_of(replica, now_s) for name, replica in replicas.items()}

    def observe(self) -> None:
        """Set the gauges that show the state of the pools."""
        now_s = self.refresh()
        metrics = self.metrics
        # Pools that are gone have no replicas.
        for gauge in (metrics.replicas, metrics.requests_waiting, metrics.requests_running,
                      metrics.kv_used_ratio, metrics.signal_age_seconds):  # fmt: skip
            gauge.clear()
        states, loads = self.states(), dict[str, dict[str, float]]()
        for name, backend in self.backends.items():
            replicas = [r for r in self.table.replicas.values() if r.pool == name]
            statuses = [replica.status for replica in replicas]
            num, used = len(statuses), sum(status.kv_used_fraction for status in statuses)
            in_state = Counter(states[replica.replica_id] for replica in replicas)
            for state in get_args(ReplicaStatus):
                metrics.replicas.labels(name, state).set(in_state[state])
            metrics.requests_waiting.labels(name).set(sum(s.num_waiting for s in statuses))
            metrics.requests_running.labels(name).set(sum(s.num_running for s in statuses))
            metrics.kv_used_ratio.labels(name).set(used / max(num, 1))
            ages = [now_s - status.observed_at_s for status in statuses]
            metrics.signal_age_seconds.labels(name).set(max(ages, default=math.nan))
            loads |= backend.host_loads()
        metrics.tell_hosts(loads)
        if self.sessions is not None:
            for state, num in self.sessions.num_sessions().items():
                metrics.sessions.labels(state).set(num)
        if self.peers is not None:
            metrics.peers.set(self.peers.num_heard)
        if self.log is not None:
            lost, self._num_lost = self.log.num_lost - self._num_lost, self.log.num_lost
            metrics.decision_log_lost_rows.inc(lost)

    def _grant(
        self, request: InferenceRequest, downstream: Downstream, most_tokens: float
    ) -> Grant | None:
        """Reserve a request's share of its caller's limits; None: the caller has no limits."""
        longest = request.max_tokens or self.cluster.limits.default_output_tokens
        num_tokens = int(min(len(request.token_ids) + longest, most_tokens))
        granted = self.limits.admit(request.caller, num_tokens)
        if isinstance(granted, OverLimit):
            self.metrics.refused.labels(granted.code.replace("_", " ")).inc()
            raise Refused(granted.reason, granted.retry_after_s, granted)
        if granted is not None:
            downstream.add_headers(granted.headers)
        return granted

    def max_tokens_of(self, model: ServedModel) -> float:
        """Longest prompt plus output that any of its pools takes; infinite: unknown."""
        pools = self.backends.items()
        lengths = [pool.max_model_tokens for name, pool in pools if model.is_served_by(name)]
        return max(lengths, default=math.inf)

    def _num_queued(self) -> int:
        """Requests that wait: at replicas, as these publish it, and here."""
        held = 0 if self.holding is None else len(self.holding)
        return held + sum(r.status.num_waiting for r in self.table.replicas.values())

    def _count_refusal(self, request: InferenceRequest) -> None:
        self.history.refuse(self.clock_s())
        if request.caller is not ANYBODY:
            self.metrics.of_tenant(request.caller.tenant).refused.inc()

    def _settle(self, answer: Answer) -> None:
        """Record the result of a request, once for all its attempts."""
        if answer.request.caller is not ANYBODY:
            used = answer.used_tokens
            if answer.grant is not None:
                answer.grant.settle(used)
            series = self.metrics.of_tenant(answer.request.caller.tenant)
            series.requests.inc()
            series.prompt_tokens.inc(max(used - answer.num_tokens, 0))
            series.output_tokens.inc(answer.num_tokens)
        if answer.request.span is not None:
            answer.request.span.finish(answer.num_tokens, answer.finish_reason)
        now_s = self.clock_s()
        self._placement.learn_length(answer, now_s)
        attained = answer.attained_slo(now_s)
        if (experiment := self.manager.picker.experiment) is not None:
            experiment.close(
                answer.request.request_id, attained, answer.response_s, answer.num_tokens, now_s
            )
        if attained is not None:
            name = answer.service_class.name
            self.metrics.slo_requests.labels(name, str(attained).lower()).inc()
            self.history.finish(
                now_s, answer.ttft_s, answer.response_s, attained, answer.num_tokens
            )


def _learn(turn: Turn, also: Callable[[int], None] | None, num_tokens: int) -> None:
    """Take the length of a prompt as the endpoint counts it; 0: it does not say."""
    turn.prompt_tokens = num_tokens
    if also is not None:
        also(num_tokens)
