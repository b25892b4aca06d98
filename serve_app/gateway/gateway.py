"""The gateway: lets a request in, chooses its replica, sends it there, and starts over if it fails.

Everything here runs on one event loop. A choice and its reservation happen without an await in
between, so no two requests are placed on the same state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from serve_app.cluster import Cluster, SloClass
from serve_app.engines.base import EngineStatus, FinishReason
from serve_app.gateway.answer import Answer, record_of
from serve_app.gateway.callers import ANYBODY
from serve_app.gateway.clocks import steady_unix_s
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.exchange import Backend, Downstream, Headers, InferenceRequest
from serve_app.gateway.generation import (
    ReplicaFailed,
    ReplicaFull,
    ReplicaLacks,
    ReplicaRefused,
    ReplicaTimeout,
    ReplicaTooSmall,
    ReplicaUnreachable,
    RequestRejected,
    ResponseGone,
)
from serve_app.gateway.history import History
from serve_app.gateway.holding import Holding, QueueFull, WaitedTooLong
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.outliers import OutlierDetector
from serve_app.gateway.pick import Pick
from serve_app.gateway.placement import Placement, ReplicaStatus
from serve_app.gateway.rate_limits import Grant, OverLimit, RateLimits
from serve_app.gateway.replicas import ReplicaState, ReplicaTable
from serve_app.gateway.tracing import Tracing
from serve_app.models import ModelCatalog, ServedModel
from serve_app.policy.manager import PolicyManager
from tokenyard.routing.scenario import load_scenario

logger = logging.getLogger(__name__)

_MIN_RETRY_AFTER_S = 1
_MAX_RETRY_AFTER_S = 60
_DRAIN_POLL_S = 0.05
_LAST_EVENTS_S = 1.0
"""For errors to be sent to those that are cut off."""
_TIERS = frozenset(("auto", "default", "flex", "priority", "scale", "standard", "standard_only"))
"""OpenAI's and Anthropic's own names, which mean the first class where none has such a name."""
_WHY_FULL = {QueueFull: "queue full", WaitedTooLong: "waited too long"}
"""Reasons of refusals, by what went wrong."""
_PATIENCE_S = 20.0
"""How long a request waits for a replica where there is none."""


class Refused(RuntimeError):
    """A request that is not let in for now."""

    def __init__(
        self,
        reason: str,
        retry_after_s: int,
        over: OverLimit | None = None,
        status: int = 429,
        headers: Headers = (),
    ) -> None:
        """Say why.

        Args:
            reason: A sentence.
            retry_after_s: When to come back.
            over: The caller's limit, where that is why.
            status: 429, or 503 where endpoints have no room for anybody.
            headers: What endpoints say of their limits.
        """
        super().__init__(reason)
        self.retry_after_s, self.over = retry_after_s, over
        self.status, self.headers = status, headers


class Unserved(RuntimeError):
    """A request that was let in and could not be answered; the text says why."""


class Unanswerable(Unserved):
    """A request that no pool can ever answer, as it is."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class Draining(Unserved):
    """A request that comes when the gateway is about to end."""


class _OutOfTime(Unserved):
    """A request whose time was over before its answer's end."""


class _CutOff(Unserved):
    """A request that had not been answered when the gateway ended."""


@dataclass
class Gateway:
    """Serves requests with the replicas of all pools."""

    cluster: Cluster
    manager: PolicyManager
    backends: Mapping[str, Backend]
    """By the pool's name."""
    metrics: Metrics = field(default_factory=Metrics)
    log: DecisionLog | None = None
    clock_s: Callable[[], float] = steady_unix_s
    limits: RateLimits = field(default_factory=RateLimits)
    """Of callers."""
    tracing: Tracing | None = None
    """Makes spans of requests; None: nobody wants them."""
    in_flight: int = 0
    num_offered: int = 0
    """Requests that have asked to be let in, those that were refused included."""
    draining: bool = False
    """Whether it is about to end, and lets nothing in."""

    def __post_init__(self) -> None:
        """Make the table of replicas."""
        means = load_scenario(self.cluster.scenario).mean_lengths_tokens
        self.table = ReplicaTable(means)
        self.history = History()
        self.outliers = OutlierDetector(self.cluster.outlier_ejection)
        self._placement = Placement(
            self.cluster, self.manager.picker, self.backends, self.table, self.history,
            self.outliers, self.metrics, self.clock_s,
        )  # fmt: skip
        queue = self.cluster.queue
        self.holding = None
        if queue is not None:
            self.holding = Holding(queue, self._placement, self.metrics, self.clock_s)
        self._waits: set[asyncio.Timeout] = set()
        self._ends_s = math.inf
        self._catalog = ModelCatalog(self.cluster)

    def service_class(self, name: str | None) -> SloClass | None:
        """Return the class of that name, the first for None; None: there is none."""
        classes = self.cluster.classes
        if not name:
            return classes[0]
        named = next((known for known in classes if known.name == name), None)
        return classes[0] if named is None and name in _TIERS else named

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
        if self.tracing is None:
            return await self._serve(request, service_class, downstream)
        model = request.model or self._catalog.default
        attributes = request.span_attributes(model, service_class.name)
        with self.tracing.request(request.trace, attributes) as (span, line):
            await self._serve(request.traced(line, span), service_class, downstream)

    async def _serve(
        self, request: InferenceRequest, service_class: SloClass, downstream: Downstream
    ) -> None:
        self.num_offered += 1
        try:
            answer = self._open(request, service_class, downstream)
        except Refused:
            self._count_refusal(request)
            raise
        self.in_flight += 1
        self._waits.add(answer.wait)
        try:
            async with answer.wait:
                await self._attempts(answer)
        except TimeoutError:
            if not answer.wait.expired():
                raise
            if math.isfinite(self._ends_s):
                raise _CutOff("the gateway ended before the answer did") from None
            raise _OutOfTime(f"no answer within {self.cluster.limits.timeout_s:g} s") from None
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
            self._waits.discard(answer.wait)
            self.in_flight -= 1
            self._settle(answer)

    def _open(
        self, request: InferenceRequest, service_class: SloClass, downstream: Downstream
    ) -> Answer:
        """Let a request in, and begin its answer.

        Raises:
            Draining: The gateway is about to end.
            Refused: Too much is in flight, or its caller has asked for too much.
        """
        if self.draining:
            self.metrics.refused.labels("draining").inc()
            raise Draining("the gateway is about to end; ask another")
        limit = self.cluster.limits.max_in_flight * service_class.admitted_fraction
        if self.in_flight >= max(limit, 1):
            self.metrics.refused.labels("too many in flight").inc()
            raise Refused(
                f"{self.in_flight} requests are in flight, which is all that class "
                f"{service_class.name!r} may add to",
                self._retry_after_s(),
            )
        model = self._catalog.find(request.model)
        assert model is not None  # Others are refused where bodies are read.
        most_tokens = self.max_tokens_of(model)
        grant = None
        if request.caller is not ANYBODY:
            grant = self._grant(request, downstream, most_tokens)
        deadline_s = asyncio.get_running_loop().time() + self.cluster.limits.timeout_s
        answer = Answer(
            request, service_class, downstream, request.prompt, self.clock_s(),
            asyncio.timeout_at(min(deadline_s, self._ends_s)), model, grant,
            self.cluster.tenant_share(request.tenant),
            int(min(len(request.token_ids) + request.max_tokens, most_tokens)),
        )  # fmt: skip
        picker = self.manager.picker
        if picker.experiment is not None:
            picker.experiment.open(
                request.request_id, picker.arm_of(request.request_id),
                len(request.token_ids), answer.arrival_s, service_class.response_s,
            )  # fmt: skip
        return answer

    async def drain(self, within_s: float | None = None) -> int:
        """Let nothing more in; return once all is answered, or the time for it is over.

        That is `limits.drain_s`, if none is given. What is not answered by then ends with an error:
        of a stream, with an event that says so.

        Returns:
            How many requests were cut off.
        """
        self.draining = True
        await self._answered(self.cluster.limits.drain_s if within_s is None else within_s)
        cut = self.in_flight
        self._ends_s = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(self._ends_s)
        await self._answered(_LAST_EVENTS_S)
        return cut

    async def _answered(self, most_s: float) -> None:
        """Wait until nothing is in flight, but no longer than that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while self.in_flight:
                    await asyncio.sleep(_DRAIN_POLL_S)

    def refresh(self) -> float:
        """Bring the table of replicas up to date; return the time."""
        return self._placement.refresh()

    def states(self) -> dict[str, ReplicaStatus]:
        """Whether each replica could be sent a request now, or why not, by its name."""
        now_s, replicas = self.refresh(), self.table.replicas
        return {name: self._placement.state_of(one, now_s) for name, one in replicas.items()}

    def observe(self) -> None:
        """Set the gauges that show the state of the pools."""
        now_s = self.refresh()
        metrics = self.metrics
        # Replicas that are gone have no load, and pools no replicas.
        for gauge in (metrics.host, metrics.replicas, metrics.waiting, metrics.running,
                      metrics.kv_used_fraction, metrics.signal_age_seconds):  # fmt: skip
            gauge.clear()
        for name, backend in self.backends.items():
            mine = [
                replica.status for replica in self.table.replicas.values() if replica.pool == name
            ]
            metrics.replicas.labels(name).set(len(mine))
            metrics.waiting.labels(name).set(sum(one.num_waiting for one in mine))
            metrics.running.labels(name).set(sum(one.num_running for one in mine))
            used = [one.kv_used_fraction for one in mine]
            metrics.kv_used_fraction.labels(name).set(sum(used) / max(len(used), 1))
            ages = [now_s - one.observed_at_s for one in mine]
            metrics.signal_age_seconds.labels(name).set(max(ages, default=math.nan))
            for replica_id, loads in backend.host_loads().items():
                for quantity, value in loads.items():
                    metrics.host.labels(replica_id, quantity).set(value)
        if self.log is not None:
            metrics.log_lines_lost.set(self.log.num_lost)

    def _grant(
        self, request: InferenceRequest, downstream: Downstream, most_tokens: float
    ) -> Grant | None:
        """Reserve what a request may need of its caller's limits; None: it has none."""
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
        """Longest prompt plus output that any of its pools takes; infinite: nobody says."""
        pools = (one for name, one in self.backends.items() if model.is_served_by(name))
        return max((pool.max_model_tokens for pool in pools), default=math.inf)

    def _count_refusal(self, request: InferenceRequest) -> None:
        if request.caller is not ANYBODY:
            self.metrics.of_tenant(request.caller.tenant).refused.inc()

    def _retry_after_s(self, told_s: float | None = None) -> int:
        """Whole seconds until a place is likely to be free, as endpoints tell or as it looks."""
        least_s = self._placement.least_wait_s() if told_s is None else told_s
        wait_s = float(_MIN_RETRY_AFTER_S) if least_s is None else least_s
        return int(min(max(math.ceil(wait_s), _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S))

    def _settle(self, answer: Answer) -> None:
        """Note what has become of a request, once for all its attempts."""
        if answer.request.caller is not ANYBODY:
            self._charge(answer)
        if answer.request.span is not None:
            answer.request.span.finish(answer.num_tokens, answer.finish_reason)
        now_s = self.clock_s()
        attained = answer.attained_slo(now_s)
        if (experiment := self.manager.picker.experiment) is not None:
            experiment.close(
                answer.request.request_id, attained, answer.response_s, answer.num_tokens, now_s
            )
        if attained is not None:
            self.history.finish(now_s, answer.ttft_s, answer.response_s, attained)

    def _charge(self, answer: Answer) -> None:
        """Count what a caller has used."""
        used = answer.used_tokens
        if answer.grant is not None:
            answer.grant.settle(used)
        series = self.metrics.of_tenant(answer.request.caller.tenant)
        series.requests.inc()
        series.prompt_tokens.inc(max(used - answer.num_tokens, 0))
        series.output_tokens.inc(answer.num_tokens)

    async def _attempts(self, answer: Answer) -> None:
        """Try replicas until one has begun to answer.

        One that has no room, or lacks what is asked for, has not failed: another is asked in its
        place, each at most once.
        """
        errors: list[ReplicaFailed] = []
        num_failed = number = 0
        if not self.table.replicas:
            await self._some_replica(answer, answer.arrival_s)
        sticks_to = answer.request.sticks_to
        if sticks_to is not None and sticks_to not in self.table.replicas:
            raise ResponseGone
        while num_failed <= self.cluster.limits.max_retries:
            try:
                pick = await self._pick(answer)
            except ReplicaFull as error:
                errors.append(error)
                break
            if pick is None:
                break
            replica_id = pick.replica.replica_id
            answer.tried.add(replica_id)
            answer.is_ordered, answer.order_key = True, pick.order_key
            if number:
                self.metrics.retries.labels(pick.replica.pool).inc()
            try:
                await self._attempt(answer, pick, number)
                return
            except ReplicaFailed as error:
                errors.append(error)
                if isinstance(error, ReplicaTooSmall):
                    answer.excluded.add(pick.replica.pool)
                elif not isinstance(error, ReplicaLacks):
                    request_id = answer.request.request_id
                    logger.warning(
                        "request %s, attempt %d at %s: %s", request_id, number, replica_id, error
                    )
                if answer.num_tokens or answer.downstream.begun:
                    raise Unserved(f"{error}, after {answer.num_tokens} tokens") from None
                num_failed += not isinstance(error, ReplicaFull | ReplicaLacks)
                number += 1
        if len(answer.suspects) == 1:
            # Where several failed it, the request may be at fault.
            self._blame_suspects(answer)
        raise self._refusal(answer, errors)

    def _refusal(self, answer: Answer, errors: Sequence[ReplicaFailed]) -> Exception:
        """What to tell a caller whom no replica has answered."""
        full = [error for error in errors if isinstance(error, ReplicaFull)]
        if full:
            self.metrics.refused.labels(_WHY_FULL.get(type(full[-1]), "replicas full")).inc()
            told = [one for one in full if one.retry_after_s is not None]
            first = min(told, key=lambda one: one.retry_after_s or 0.0, default=full[-1])
            after_s = self._retry_after_s(first.retry_after_s)
            status = 429 if any(one.status == 429 for one in full) else 503
            return Refused(str(first), after_s, status=status, headers=first.headers)
        small = [error for error in errors if isinstance(error, ReplicaTooSmall)]
        if small and not any(answer.fits(backend) for backend in self.backends.values()):
            return Unanswerable(str(small[-1]))
        if not errors:
            return Unserved("no replica is there")
        lacks = [error for error in errors if isinstance(error, ReplicaLacks)]
        if len(lacks) == len(errors):
            return lacks[-1].rejection or Unanswerable(str(lacks[-1]), 404)
        return Unserved(str(next(error for error in reversed(errors) if error not in lacks)))

    def _blame_suspects(self, answer: Answer) -> None:
        """Count it against the replicas that failed a request."""
        suspects, answer.suspects = answer.suspects, []
        for replica, sent_s in suspects:
            self._placement.fail(replica, sent_s)

    async def _some_replica(self, answer: Answer, since_s: float) -> None:
        """Wait a while where there is none: a pool that starts, or whose last replica has died."""
        while not self._has_replica(answer):
            if self.refresh() - since_s > _PATIENCE_S:
                return
            if not self._has_replica(answer):
                await asyncio.sleep(0.05)

    def _has_replica(self, answer: Answer) -> bool:
        """Whether there is one that the request could go to, whatever became of it there."""
        pools = {replica.pool for replica in self.table.replicas.values() if not replica.draining}
        return any(answer.fits(self.backends[name]) for name in pools)

    async def _attempt(self, answer: Answer, pick: Pick, number: int) -> None:
        """Have the replica that was picked answer, and note what comes."""
        replica, attempt = pick.replica, _Attempt(self, answer, pick.replica)
        if answer.request.span is not None:
            answer.request.span.place(pick)
        outcome = "failed"
        try:
            await self.backends[replica.pool].answer(replica.replica_id, attempt)
            outcome = answer.finish_reason or "failed"
        except asyncio.CancelledError:
            outcome = answer.finish_reason or self._why_cancelled(answer)
            raise
        except (ReplicaTooSmall, ReplicaLacks, RequestRejected) as error:
            outcome = "rejected"
            if isinstance(error, ReplicaLacks):
                self._placement.note_lack(replica, answer.needs, error.model)
            raise
        except ReplicaFull as error:
            self._placement.note_full(replica, error)
            raise
        except ReplicaFailed as error:
            outcome = "timeout" if isinstance(error, ReplicaTimeout) else outcome
            if not isinstance(error, ReplicaRefused):
                answer.suspects.append((replica, attempt.sent_s))
                if isinstance(error, ReplicaUnreachable) or answer.downstream.begun:
                    self._blame_suspects(answer)
            raise
        finally:
            self._close(answer, pick, number, outcome, attempt.num_sends)

    def _why_cancelled(self, answer: Answer) -> str:
        """Whether an answer's time is over, the gateway's, or its caller left."""
        if not answer.wait.expired():
            return "abort"
        return "cut_off" if math.isfinite(self._ends_s) else "timeout"

    def _close(
        self, answer: Answer, pick: Pick, attempt: int, outcome: str, num_sends: int
    ) -> None:
        """Note the end of an attempt."""
        if answer.request.span is not None:
            answer.request.span.end_attempt(outcome, num_sends)
        now_s = self.clock_s()
        done = outcome in ("stop", "length")
        answer.response_s = now_s - answer.arrival_s if done else math.nan
        metrics, pool = self.metrics, pick.replica.pool
        response_s = answer.response_s if done else None
        self._placement.finish(pick, answer.request.request_id, now_s, response_s)
        if self.holding is not None:
            self.holding.release()
        metrics.requests.labels(pool, answer.service_class.name, outcome).inc()
        series = metrics.of_pool(pool)
        series.output_tokens.inc(answer.num_tokens)
        if done:
            series.response_seconds.observe(answer.response_s)
            if not math.isnan(answer.ttft_s):
                series.ttft_seconds.observe(answer.ttft_s)
            if answer.num_tokens > 1 and not math.isnan(answer.ttft_s):
                series.tpot_seconds.observe(answer.tpot_s(now_s))
        if self.log is not None:
            self.log.write(record_of(answer, pick, attempt, outcome, num_sends))

    async def _pick(self, answer: Answer, waits: bool = True) -> Pick | None:
        """Choose a replica; where all are full hold the request, where none is there wait for one.

        Args:
            answer: To the request that goes there.
            waits: Whether to wait for a replica; else there is no choice without one.

        Raises:
            ReplicaFull: All are full, and the request is not held, or has been for too long.
        """
        if self.holding is not None:
            self.holding.release()  # Who waits goes before who comes.
        try:
            pick = await self._placement.pick(answer)
        except ReplicaFull:
            if self.holding is None:
                raise
            pick = await self.holding.place(answer, answer.service_class.max_wait_s)
        if pick is None and waits and not self._has_replica(answer):
            await self._some_replica(answer, self.clock_s())
            answer.tried.clear()  # Those that come may be the same, and well again.
            return await self._pick(answer, waits=False)
        return pick


class _Attempt:
    """One try to have a replica answer a request."""

    __slots__ = (
        "_answer", "_gateway", "_replica", "downstream", "num_sends", "order_key", "request",
        "sent_s",
    )  # fmt: skip

    def __init__(self, gateway: Gateway, answer: Answer, replica: ReplicaState) -> None:
        self._gateway, self._answer, self._replica = gateway, answer, replica
        self.request, self.downstream = answer.request, answer.downstream
        self.order_key = answer.order_key
        self.sent_s = gateway.outliers.clock_s()
        self.num_sends = 0

    def note_send(self) -> None:
        """Note that the request goes out to the replica."""
        self.num_sends += 1
        self._gateway.metrics.of_pool(self._replica.pool).sends.inc()

    def take(
        self, num_tokens: int, finish_reason: FinishReason | None = None, is_whole: bool = False
    ) -> None:
        """Note what has come: see `serve_app.gateway.exchange.Attempt`."""
        answer, gateway, replica = self._answer, self._gateway, self._replica
        if (num_tokens or is_whole) and not answer.num_tokens:
            gateway._placement.begin(answer, replica, self.sent_s)
            if answer.suspects:
                gateway._blame_suspects(answer)
            if not is_whole:
                answer.ttft_s = gateway.clock_s() - answer.arrival_s
                if answer.request.span is not None:
                    answer.request.span.first_token()
        if num_tokens > answer.num_tokens:
            answer.num_tokens = num_tokens
            replica.in_flight.receive(answer.request.request_id, num_tokens)
        answer.finish_reason = finish_reason

    def publish(self, status: EngineStatus) -> None:
        """Note the state of the replica."""
        replica, gateway = self._replica, self._gateway
        pool = gateway.backends.get(replica.pool)
        if pool is not None:
            now_s = gateway.clock_s()
            replica.publish(pool.by_our_clock(replica.replica_id, status, now_s))
