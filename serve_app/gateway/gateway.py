"""The gateway: lets a request in, chooses its replica, sends it there, and starts over if it fails.

Everything here runs on one event loop. A choice and its reservation happen without an await in
between, so no two requests are placed on the same state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from serve_app.cluster import Cluster, SloClass
from serve_app.engines.base import FinishReason
from serve_app.gateway.backends import Backend
from serve_app.gateway.decision_log import DecisionLog, DecisionRecord
from serve_app.gateway.exchange import Downstream, InferenceRequest
from serve_app.gateway.generation import (
    ReplicaFailed,
    ReplicaFull,
    ReplicaRefused,
    ReplicaTimeout,
    RequestRejected,
    new_id,
)
from serve_app.gateway.history import History
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.outliers import OutlierDetector
from serve_app.gateway.realtime import RealtimePriority
from serve_app.gateway.replicas import EngineStatus, Prompt, ReplicaState, ReplicaTable
from serve_app.policy.experiment import Arm
from serve_app.policy.manager import PolicyManager
from serve_app.policy.runner import RAY_DEFAULT, Choice
from serve_app.router import RayDefault
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.types import ReplicaSnapshot, Request

logger = logging.getLogger(__name__)

_MIN_RETRY_AFTER_S = 1
_MAX_RETRY_AFTER_S = 60
_DRAIN_POLL_S = 0.05
_LAST_EVENTS_S = 1.0
"""For errors to be sent to those that are cut off."""
_PATIENCE_S = 20.0
"""How long a request waits for a replica where there is none."""


class Refused(RuntimeError):
    """A request that is not let in for now."""

    def __init__(self, reason: str, retry_after_s: int) -> None:
        """Say why, and when to come back."""
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Unserved(RuntimeError):
    """A request that was let in and could not be answered; the text says why."""


class Draining(Unserved):
    """A request that comes when the gateway is about to end."""


class _OutOfTime(Unserved):
    """A request whose time was over before its answer's end."""


class _CutOff(Unserved):
    """A request that had not been answered when the gateway ended."""


@dataclass(frozen=True, slots=True)
class _Pick:
    """Where an attempt goes, and what was known when that was decided."""

    replica: ReplicaState
    choice: Choice
    snapshots: tuple[ReplicaSnapshot, ...]
    pools: tuple[str, ...]
    request: Request
    policy: str
    mlflow_run: str | None
    arm: Arm
    by_ray: bool


@dataclass(slots=True)
class _Answer:
    """A request that was let in, and what has come of its answer so far."""

    wanted: InferenceRequest
    service_class: SloClass
    downstream: Downstream
    prompt: Prompt
    arm: Arm
    arrival_s: float
    wait: asyncio.Timeout
    """When it is given up."""
    longest_tokens: int
    """Prompt and answer that any pool takes."""
    tried: set[str] = field(default_factory=set)
    """Replicas that were sent the request since one was last waited for."""
    num_tokens: int = 0
    first_token_s: float = math.nan
    finish_reason: str | None = None
    response_s: float = math.nan
    """Arrival to the end; NaN: it was not completed."""

    @property
    def needed_tokens(self) -> int:
        """Prompt and longest answer, as far as any pool takes it.

        Endpoints that tokenise themselves say what is too long: here their prompts are estimates.
        """
        return min(len(self.wanted.token_ids) + self.wanted.max_tokens, self.longest_tokens)

    @property
    def completed(self) -> bool:
        """Whether it came to its end."""
        return self.finish_reason in ("stop", "length")

    @property
    def ttft_s(self) -> float:
        """Arrival to first token; NaN: there was none."""
        return self.first_token_s - self.arrival_s

    def tpot_s(self, now_s: float) -> float:
        """Mean time per token after the first, where the answer ended at `now_s`."""
        return (now_s - self.first_token_s) / max(self.num_tokens - 1, 1)

    def attained_slo(self, now_s: float) -> bool | None:
        """Whether an answer that ended at `now_s` attained its SLO; None: its client left before.

        Without a first token a target for it is missed once its time has passed.
        """
        slo, waited_s = self.service_class, now_s - self.arrival_s
        ttft_s = waited_s if math.isnan(self.first_token_s) else self.ttft_s
        attained = waited_s <= slo.response_s and not self.tpot_s(now_s) > (slo.tpot_s or math.inf)
        if self.completed:
            return attained and not self.ttft_s > (slo.ttft_s or math.inf)
        attained = attained and ttft_s <= (slo.ttft_s or math.inf)
        return None if self.finish_reason == "abort" and attained else False


@dataclass
class Gateway:
    """Serves requests with the replicas of all pools."""

    cluster: Cluster
    manager: PolicyManager
    backends: Mapping[str, Backend]
    """By the pool's name."""
    metrics: Metrics = field(default_factory=Metrics)
    log: DecisionLog | None = None
    clock_s: Callable[[], float] = time.time
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
        self._ray: RayDefault | None = None
        self._realtime = RealtimePriority()
        self.outliers = OutlierDetector(self.cluster.outlier_ejection)
        self._waits: set[asyncio.Timeout] = set()
        self._ends_s = math.inf
        self._longest_tokens = 0 if self.cluster.decide_only else self.cluster.max_model_tokens

    def service_class(self, name: str | None) -> SloClass | None:
        """Return the class of that name, the first for None; None: there is none."""
        if name is None or name in ("auto", "default"):
            return self.cluster.classes[0]
        return next((one for one in self.cluster.classes if one.name == name), None)

    async def serve(
        self, request: InferenceRequest, service_class: SloClass, downstream: Downstream
    ) -> None:
        """Answer a request; being cancelled cancels it at its replica.

        Raises:
            Draining: The gateway is about to end.
            Refused: Too much is in flight, or no replica takes more; nothing was generated.
            Unserved: No replica could answer it in time, or the one that had begun died.
            RequestRejected: An endpoint has something against the request.
        """
        self.num_offered += 1
        self._admit(service_class)
        self.in_flight += 1
        answer = self._open(request, service_class, downstream)
        try:
            with self._in_time(answer):
                async with answer.wait:
                    await self._attempts(answer)
        except asyncio.CancelledError:
            if answer.finish_reason is None:
                answer.finish_reason = "abort"
            raise
        finally:
            self.in_flight -= 1
            self._settle(answer)

    def _open(
        self, request: InferenceRequest, service_class: SloClass, downstream: Downstream
    ) -> _Answer:
        """Begin the answer to a request that is let in."""
        arm, prompt = self.manager.arm_of(request.request_id), Prompt(request.token_ids)
        deadline_s = asyncio.get_running_loop().time() + self.cluster.limits.timeout_s
        wait = asyncio.timeout_at(min(deadline_s, self._ends_s))
        answer = _Answer(
            request, service_class, downstream, prompt, arm, self.clock_s(), wait,
            self._longest_tokens,
        )  # fmt: skip
        if self.manager.experiment is not None:
            self.manager.experiment.open(
                request.request_id, arm, len(request.token_ids), answer.arrival_s,
                service_class.response_s,
            )  # fmt: skip
        return answer

    async def drain(self) -> int:
        """Let nothing more in; return once all is answered, or the time for it is over.

        What is not answered by then ends with an error: of a stream, with an event that says so.

        Returns:
            How many requests were cut off.
        """
        self.draining = True
        await self._answered(self.cluster.limits.drain_s)
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
        now_s = self.clock_s()
        for backend in self.backends.values():
            backend.refresh(self.table, now_s)
        return now_s

    def observe(self) -> None:
        """Set the gauges that show the state of the pools."""
        now_s = self.refresh()
        metrics = self.metrics
        for name, backend in self.backends.items():
            mine = [one.status for one in self.table.replicas.values() if one.pool == name]
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

    def _admit(self, service_class: SloClass) -> None:
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

    def _retry_after_s(self) -> int:
        """Whole seconds until a place is likely to be free."""
        offered = self._offered(self.clock_s())
        waits_s = [one.wait_s for one in self.table.snapshots(offered, Prompt([0]))]
        wait_s = min(waits_s, default=float(_MIN_RETRY_AFTER_S))
        return int(min(max(math.ceil(wait_s), _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S))

    def _settle(self, answer: _Answer) -> None:
        """Note what has become of a request, once for all its attempts."""
        now_s = self.clock_s()
        attained = answer.attained_slo(now_s)
        self.manager.settle(
            answer.wanted.request_id, attained, answer.response_s, answer.num_tokens, now_s
        )
        if attained is not None:
            self.history.finish(now_s, answer.ttft_s, answer.response_s, attained)

    async def _attempts(self, answer: _Answer) -> None:
        """Try replicas until one has begun to answer."""
        failure: ReplicaFailed | None = None
        await self._some_replica(answer.arrival_s)
        for attempt in range(self.cluster.limits.max_retries + 1):
            pick = await self._pick_or_wait(answer)
            if pick is None:
                break
            replica_id = pick.replica.replica_id
            answer.tried.add(replica_id)
            if attempt:
                self.metrics.retries.labels(pick.replica.pool).inc()
            try:
                await self._attempt(answer, pick, attempt)
                return
            except ReplicaFailed as error:
                failure = error
                request_id = answer.wanted.request_id
                logger.warning(
                    "request %s, attempt %d at %s: %s", request_id, attempt, replica_id, error
                )
                if answer.num_tokens or answer.downstream.begun:
                    raise Unserved(f"{error}, after {answer.num_tokens} tokens") from None
        if isinstance(failure, ReplicaFull):
            self.metrics.refused.labels("replicas full").inc()
            raise Refused(str(failure), self._retry_after_s())
        raise Unserved("no replica is there" if failure is None else str(failure))

    @contextlib.contextmanager
    def _in_time(self, answer: _Answer) -> Iterator[None]:
        """Say why an answer's time is over.

        Raises:
            Unserved: It is, or the gateway's.
        """
        self._waits.add(answer.wait)
        try:
            yield
        except TimeoutError:
            if not answer.wait.expired():
                raise
            if math.isfinite(self._ends_s):
                raise _CutOff("the gateway ended before the answer did") from None
            raise _OutOfTime(f"no answer within {self.cluster.limits.timeout_s:g} s") from None
        finally:
            self._waits.discard(answer.wait)

    async def _some_replica(self, arrival_s: float) -> None:
        """Wait a while where there is none: a pool that starts, or whose last replica has died."""
        while not self.table.replicas:
            if self.refresh() - arrival_s > _PATIENCE_S:
                return
            if not self.table.replicas:
                await asyncio.sleep(0.05)

    async def _attempt(self, answer: _Answer, pick: _Pick, number: int) -> None:
        """Have the replica that was picked answer, and note what comes."""
        replica, attempt = pick.replica, _Attempt(self, answer, pick.replica)
        outcome = "failed"
        try:
            await self.backends[replica.pool].answer(replica.replica_id, attempt)
            outcome = answer.finish_reason or "failed"
        except asyncio.CancelledError:
            outcome = answer.finish_reason or self._why_cancelled(answer)
            raise
        except ReplicaTimeout:
            outcome = "timeout"
            self._fail(replica, attempt.sent_s)
            raise
        except RequestRejected:
            outcome = "rejected"
            raise
        except ReplicaFailed as error:
            if not isinstance(error, ReplicaFull | ReplicaRefused):
                self._fail(replica, attempt.sent_s)
            raise
        finally:
            self._close(answer, pick, number, outcome)

    def _why_cancelled(self, answer: _Answer) -> str:
        """Whether an answer's time is over, the gateway's, or its caller left."""
        if not answer.wait.expired():
            return "abort"
        return "cut_off" if math.isfinite(self._ends_s) else "timeout"

    def _close(self, answer: _Answer, pick: _Pick, attempt: int, outcome: str) -> None:
        """Note the end of an attempt."""
        now_s = self.clock_s()
        done = outcome in ("stop", "length")
        answer.response_s = now_s - answer.arrival_s if done else math.nan
        replica, pool = pick.replica, pick.replica.pool
        replica.in_flight.close(
            answer.wanted.request_id, now_s, answer.response_s if done else None
        )
        if pick.by_ray and self._ray is not None:
            self._ray.finished(replica.replica_id)
        metrics = self.metrics
        metrics.in_flight.labels(pool).dec()
        metrics.requests.labels(pool, answer.service_class.name, outcome).inc()
        metrics.output_tokens.labels(pool).inc(answer.num_tokens)
        if done:
            metrics.response_seconds.labels(pool).observe(answer.response_s)
            if not math.isnan(answer.ttft_s):
                metrics.ttft_seconds.labels(pool).observe(answer.ttft_s)
            if answer.num_tokens > 1 and not math.isnan(answer.ttft_s):
                metrics.tpot_seconds.labels(pool).observe(answer.tpot_s(now_s))
        if self.log is not None:
            time_s = now_s if attempt else answer.arrival_s
            self.log.write(_record(answer, pick, attempt, outcome, time_s))

    async def _pick_or_wait(self, answer: _Answer) -> _Pick | None:
        """Choose a replica; where the last one has gone since, wait for another."""
        pick = await self._pick(answer)
        if pick is None and not self.table.replicas:
            await self._some_replica(self.clock_s())
            answer.tried.clear()  # Those that come may be the same, and well again.
            pick = await self._pick(answer)
        return pick

    async def _pick(self, answer: _Answer) -> _Pick | None:
        """Choose a replica and reserve a place in it; None: there is none left."""
        # Threads that wait for the interpreter go first, or they interrupt the decision.
        time.sleep(0)
        started_ns = time.perf_counter_ns()
        by_ray = await self._ask_ray(answer.tried)
        with self._realtime.section():
            now_s = self.refresh()
            replicas = self._candidates(answer, now_s)
            index = next((i for i, one in enumerate(replicas) if one.replica_id == by_ray), None)
            if by_ray is not None and index is None and self._ray is not None:
                self._ray.finished(by_ray)
            if not replicas:
                return None
            snapshots = self.table.snapshots(replicas, answer.prompt)
            request = self._request(answer)
            if index is not None:
                choice = self.manager.pick_by_ray(index, started_ns)
            else:
                stale = self._all_stale(replicas, now_s)
                last_sent_s = [one.last_sent_s for one in replicas]
                choice = self.manager.pick(
                    request, snapshots, stale, answer.arm, last_sent_s=last_sent_s
                )
                if not answer.tried:
                    self.manager.observe(answer.wanted.request_id, request, snapshots, choice)
        pools = tuple(one.pool for one in replicas)
        runner = self.manager.deciding(answer.arm)
        pick = _Pick(
            replicas[choice.index], choice, tuple(snapshots), pools, request,
            runner.label, runner.mlflow_run, answer.arm, index is not None,
        )  # fmt: skip
        self._reserve(answer, pick, now_s)
        return pick

    def _candidates(self, answer: _Answer, now_s: float) -> list[ReplicaState]:
        """Replicas that the request may go to."""
        return [
            one
            for one in self._offered(now_s)
            if one.replica_id not in answer.tried
            and answer.wanted.is_for(self.backends[one.pool])
            and self.backends[one.pool].max_model_tokens >= answer.needed_tokens
        ]

    def _request(self, answer: _Answer) -> Request:
        """The request as a policy sees it."""
        context = len(answer.wanted.token_ids)
        total = self.manager.deciding(answer.arm).loaded.predicted_total_tokens(context)
        total = max(min(total, answer.needed_tokens), context + 1)
        # Always a float: compiled policies are compiled anew for other types.
        return Request(answer.arrival_s, context, float(total))

    def _reserve(self, answer: _Answer, pick: _Pick, now_s: float) -> None:
        """Note that the request is on its way, before anything else can be placed."""
        choice, context = pick.choice, pick.request.context_tokens
        engine = pick.snapshots[choice.index].engine
        pick.replica.send(
            answer.wanted.request_id, answer.prompt, 0 if engine is None else engine.match_tokens,
            pick.request.predicted_total_tokens - context, now_s,
        )  # fmt: skip
        metrics, pool = self.metrics, pick.replica.pool
        metrics.decision_seconds.observe(choice.decision_us / 1e6)
        metrics.in_flight.labels(pool).inc()
        metrics.prompt_tokens.labels(pool).inc(context)
        if choice.fallback_reason is not None:
            metrics.fallbacks.labels(choice.fallback_reason).inc()
        if choice.explored:
            metrics.explored.inc()
        self.history.decide(now_s, pick.policy, pick.pools, pick.snapshots, choice)

    async def _ask_ray(self, tried: set[str]) -> str | None:
        """Let Ray's router choose, where it decides, among those that have not failed so far."""
        if self.manager.policy.name != RAY_DEFAULT:
            return None
        if self._ray is None:
            self._ray = RayDefault()
        every = [one for backend in self.backends.values() for one in backend.ray_replicas()]
        self._ray.update(every)
        if len(every) <= len(tried):
            return None
        return await self._ray.choose()

    def _offered(self, now_s: float) -> list[ReplicaState]:
        """Replicas to choose from: without those that are ejected, as long as there are others."""
        offered = self.table.offered(now_s, self.cluster.circuit_breaker.stale_after_s)
        outliers = self.outliers
        outliers.keep(self.table.replicas)
        admitted = [r for r in offered if outliers.admits(r.replica_id, r.in_flight.count)]
        return admitted or [r for r in offered if not outliers.ejected_s(r.replica_id)] or offered

    def _fail(self, replica: ReplicaState, sent_s: float) -> None:
        """Note that a replica has failed."""
        if self.outliers.fail(replica.replica_id, sent_s):
            ejected_s = self.outliers.ejected_s(replica.replica_id)
            logger.warning("replica %s is ejected for %.1f s", replica.replica_id, ejected_s)
            self.metrics.ejections.labels(replica.pool).inc()
        if self._ray is not None:
            self._ray.died(replica.replica_id)

    def _all_stale(self, replicas: list[ReplicaState], now_s: float) -> bool:
        newest_s = max(one.status.observed_at_s for one in replicas)
        return now_s - newest_s > self.cluster.circuit_breaker.stale_after_s


class _Attempt:
    """One try to have a replica answer a request."""

    __slots__ = ("_answer", "_gateway", "_replica", "downstream", "request", "sent_s")

    def __init__(self, gateway: Gateway, answer: _Answer, replica: ReplicaState) -> None:
        self._gateway, self._answer, self._replica = gateway, answer, replica
        self.request, self.downstream = answer.wanted, answer.downstream
        self.sent_s = gateway.outliers.clock_s()

    def take(
        self,
        num_tokens: int,
        finish_reason: FinishReason | None = None,
        status: EngineStatus | None = None,
        is_whole: bool = False,
    ) -> None:
        """Note what has come: see `serve_app.gateway.exchange.Attempt`."""
        answer, gateway, replica = self._answer, self._gateway, self._replica
        if (num_tokens or is_whole) and not answer.num_tokens:
            gateway.outliers.begin(replica.replica_id, self.sent_s)
            if not is_whole:
                answer.first_token_s = gateway.clock_s()
        if num_tokens > answer.num_tokens:
            answer.num_tokens = num_tokens
            replica.in_flight.receive(answer.wanted.request_id, num_tokens)
        answer.finish_reason = finish_reason
        if status is not None:
            replica.publish(status)


def _record(
    answer: _Answer, pick: _Pick, attempt: int, outcome: str, time_s: float
) -> DecisionRecord:
    choice = pick.choice
    return DecisionRecord(
        decision_id=new_id(), request_id=answer.wanted.request_id, attempt=attempt,
        time_s=time_s, policy=pick.policy, service_class=answer.service_class.name,
        request=pick.request, snapshots=pick.snapshots, pools=pick.pools, scores=choice.scores,
        index=choice.index, propensity=choice.propensity, explored=choice.explored,
        fallback_reason=choice.fallback_reason, decision_us=choice.decision_us, outcome=outcome,
        output_tokens=answer.num_tokens, ttft_s=answer.ttft_s, response_s=answer.response_s,
        arm=pick.arm, mlflow_run=pick.mlflow_run,
    )  # fmt: skip
