"""The gateway: lets a request in, chooses its replica, sends it there, and starts over if it fails.

Everything here runs on one event loop. A choice and its entry in the books happen without an await
in between, so no two requests are placed on the same state.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from serve_app.cluster import Cluster, SloClass
from serve_app.gateway.backends import Backend
from serve_app.gateway.decision_log import Outcome, OutcomeLog
from serve_app.gateway.generation import (
    GenerationChunk,
    GenerationRequest,
    ReplicaFailed,
    ReplicaFull,
    ReplicaRefused,
)
from serve_app.gateway.history import History
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.realtime import RealtimePriority
from serve_app.gateway.replicas import ReplicaState, ReplicaTable
from serve_app.policy.decider import Choice
from serve_app.policy.experiment import Arm
from serve_app.policy.manager import RAY_DEFAULT, PolicyManager
from serve_app.router import RayDefault
from tokenyard.scenario import load_scenario
from tokenyard.types import ReplicaSnapshot, Request

logger = logging.getLogger(__name__)

_MIN_RETRY_AFTER_S = 1
_MAX_RETRY_AFTER_S = 60
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


@dataclass(frozen=True, slots=True)
class _Pick:
    """Where an attempt goes, and what was known when that was decided."""

    replica: ReplicaState
    choice: Choice
    snapshots: tuple[ReplicaSnapshot, ...]
    pools: tuple[str, ...]
    request: Request
    policy: str
    arm: Arm
    by_ray: bool


@dataclass(slots=True)
class _Answer:
    """What has come of an answer so far."""

    arrival_s: float
    num_tokens: int = 0
    first_token_s: float = math.nan
    finish_reason: str | None = None
    arm: Arm = "champion"
    response_s: float = math.nan
    """Arrival to the end; NaN: it was not completed."""

    def take(self, chunk: GenerationChunk, now_s: float) -> None:
        if chunk.num_tokens and math.isnan(self.first_token_s):
            self.first_token_s = now_s
        self.num_tokens = max(chunk.num_tokens, self.num_tokens)
        self.finish_reason = chunk.finish_reason

    def kept(self, promises: SloClass, now_s: float) -> bool | None:
        """Whether an answer that has ended kept all promises; None: its client left before that.

        Args:
            promises: Of its class.
            now_s: When it ended, Unix time, seconds.
        """
        ttft_s = self.first_token_s - self.arrival_s
        tpot_s = (now_s - self.first_token_s) / max(self.num_tokens - 1, 1)
        in_time = (
            now_s - self.arrival_s <= promises.response_s
            and not ttft_s > (promises.ttft_s or math.inf)
            and not tpot_s > (promises.tpot_s or math.inf)
        )
        if self.finish_reason in ("stop", "length"):
            return in_time
        # Without a first token its promise is broken once its time has passed.
        waited_s = now_s - self.arrival_s if math.isnan(ttft_s) else ttft_s
        in_time = in_time and waited_s <= (promises.ttft_s or math.inf)
        return None if self.finish_reason == "abort" and in_time else False


@dataclass
class Gateway:
    """Serves requests with the replicas of all pools."""

    cluster: Cluster
    manager: PolicyManager
    backends: Mapping[str, Backend]
    """By the pool's name."""
    metrics: Metrics = field(default_factory=Metrics)
    log: OutcomeLog | None = None
    clock_s: Callable[[], float] = time.time
    in_flight: int = 0
    num_offered: int = 0
    """Requests that have asked to be let in, those that were refused included."""
    attained: Counter[str] = field(default_factory=Counter)
    """Completed requests by class that kept all its promises."""
    completed: Counter[str] = field(default_factory=Counter)
    """Completed requests by class."""

    def __post_init__(self) -> None:
        """Make the collector."""
        means = load_scenario(self.cluster.scenario).mean_lengths_tokens
        self.table = ReplicaTable(means)
        self.history = History()
        self._ray: RayDefault | None = None
        self._realtime = RealtimePriority()
        self._suspects: dict[str, float] = {}

    def service_class(self, name: str | None) -> SloClass | None:
        """Return the class of that name, the first for None; None: there is none."""
        if name is None or name in ("auto", "default"):
            return self.cluster.classes[0]
        return next((one for one in self.cluster.classes if one.name == name), None)

    async def serve(
        self, generation: GenerationRequest, service_class: SloClass
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Answer a request; leaving the stream early cancels it.

        Raises:
            Refused: Too much is in flight, or no replica takes more; nothing was generated.
            Unserved: No replica could answer it, or the one that had begun died.
        """
        self.num_offered += 1
        self._admit(service_class)
        self.in_flight += 1
        answer = _Answer(self.clock_s(), arm=self.manager.arm_of(generation.request_id))
        if self.manager.experiment is not None:
            self.manager.experiment.open(
                generation.request_id, answer.arm, len(generation.token_ids), answer.arrival_s,
                service_class.response_s,
            )  # fmt: skip
        try:
            async with asyncio.timeout(self.cluster.limits.timeout_s):
                async with aclosing(self._attempts(generation, service_class, answer)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        except TimeoutError:
            raise Unserved(f"no answer within {self.cluster.limits.timeout_s:g} s") from None
        except (GeneratorExit, asyncio.CancelledError):
            if answer.finish_reason is None:
                answer.finish_reason = "abort"
            raise
        finally:
            self.in_flight -= 1
            now_s = self.clock_s()
            kept = answer.kept(service_class, now_s)
            self.manager.settle(
                generation.request_id, kept, answer.response_s, answer.num_tokens, now_s
            )  # fmt: skip
            if kept is not None:
                ttft_s = answer.first_token_s - answer.arrival_s
                self.history.finish(now_s, ttft_s, answer.response_s, kept)

    def refresh(self) -> float:
        """Bring the collector up to date; return the time."""
        now_s = self.clock_s()
        for backend in self.backends.values():
            backend.refresh(self.table, now_s)
        return now_s

    def _admit(self, service_class: SloClass) -> None:
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
        waits_s = [s.wait_s for s in self.table.snapshots(self._offered(self.clock_s()), [0])]
        wait_s = min(waits_s, default=float(_MIN_RETRY_AFTER_S))
        return int(min(max(math.ceil(wait_s), _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S))

    async def _attempts(
        self, generation: GenerationRequest, service_class: SloClass, answer: _Answer
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Try replicas until one has begun to answer."""
        tried: set[str] = set()
        limits = self.cluster.limits
        failure: ReplicaFailed | None = None
        await self._some_replica(answer.arrival_s)
        for attempt in range(limits.max_retries + 1):
            pick = await self._pick(generation, answer, tried)
            if pick is None and not self.table.replicas:
                # The last one has gone since; those that come may be the same, and well again.
                await self._some_replica(self.clock_s())
                tried.clear()
                pick = await self._pick(generation, answer, tried)
            if pick is None:
                break
            replica_id = pick.replica.replica_id
            tried.add(replica_id)
            pool = pick.replica.pool
            if attempt:
                self.metrics.retries.labels(pool).inc()
            try:
                async with aclosing(
                    self._attempt(generation, pick, attempt, service_class, answer)
                ) as it:
                    async for chunk in it:
                        yield chunk
                return
            except ReplicaFailed as error:
                failure = error
                if not isinstance(error, ReplicaFull | ReplicaRefused):
                    self._suspect(replica_id)
                logger.warning("request %s, attempt %d: %s", generation.request_id, attempt, error)
                if answer.num_tokens:
                    raise Unserved(f"{error}, after {answer.num_tokens} tokens") from None
        if isinstance(failure, ReplicaFull):
            self.metrics.refused.labels("replicas full").inc()
            raise Refused(str(failure), self._retry_after_s())
        raise Unserved("no replica is there" if failure is None else str(failure))

    async def _some_replica(self, arrival_s: float) -> None:
        """Wait a while where there is none: a pool that starts, or whose last replica has died."""
        while not self.table.replicas:
            if self.refresh() - arrival_s > _PATIENCE_S:
                return
            if not self.table.replicas:
                await asyncio.sleep(0.05)

    async def _attempt(
        self,
        generation: GenerationRequest,
        pick: _Pick,
        attempt: int,
        service_class: SloClass,
        answer: _Answer,
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Stream from the replica that was picked, and keep the books."""
        replica = pick.replica
        outcome = "abort"
        try:
            stream = self.backends[replica.pool].stream(replica.replica_id, generation)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    now_s = self.clock_s()
                    answer.take(chunk, now_s)
                    replica.in_flight.receive(generation.request_id, chunk.num_tokens)
                    if chunk.status is not None:
                        replica.publish(chunk.status)
                    if chunk.finish_reason is not None:
                        outcome = chunk.finish_reason
                    yield chunk
        except ReplicaFailed:
            outcome = "failed"
            raise
        finally:
            self._close(generation, pick, attempt, service_class, answer, outcome)

    def _close(
        self,
        generation: GenerationRequest,
        pick: _Pick,
        attempt: int,
        service_class: SloClass,
        answer: _Answer,
        outcome: str,
    ) -> None:
        now_s = self.clock_s()
        done = outcome in ("stop", "length")
        response_s = answer.response_s = now_s - answer.arrival_s if done else math.nan
        ttft_s = answer.first_token_s - answer.arrival_s
        replica = pick.replica
        replica.in_flight.close(generation.request_id, now_s, response_s if done else None)
        if pick.by_ray and self._ray is not None:
            self._ray.finished(replica.replica_id)
        metrics, pool = self.metrics, replica.pool
        metrics.in_flight.labels(pool).dec()
        metrics.requests.labels(pool, service_class.name, outcome).inc()
        metrics.output_tokens.labels(pool).inc(answer.num_tokens)
        if done:
            tpot_s = (now_s - answer.first_token_s) / max(answer.num_tokens - 1, 1)
            metrics.response_s.labels(pool).observe(response_s)
            if answer.num_tokens:
                metrics.ttft_s.labels(pool).observe(ttft_s)
            if answer.num_tokens > 1:
                metrics.tpot_s.labels(pool).observe(tpot_s)
            self.completed[service_class.name] += 1
            self.attained[service_class.name] += bool(answer.kept(service_class, now_s))
        if self.log is not None:
            choice = pick.choice
            self.log.write(
                Outcome(
                    decision_id=uuid.uuid4().hex, request_id=generation.request_id, attempt=attempt,
                    time_s=pick.request.arrival_s if not attempt else now_s,
                    policy=pick.policy, service_class=service_class.name, request=pick.request,
                    snapshots=pick.snapshots, pools=pick.pools, scores=choice.scores,
                    index=choice.index, propensity=choice.propensity, explored=choice.explored,
                    fallback_reason=choice.fallback_reason, decision_us=choice.decision_us,
                    outcome=outcome, output_tokens=answer.num_tokens, ttft_s=ttft_s,
                    response_s=response_s, arm=pick.arm,
                )
            )  # fmt: skip

    async def _pick(
        self, generation: GenerationRequest, answer: _Answer, tried: set[str]
    ) -> _Pick | None:
        """Choose a replica and put the request on its book; None: there is none left."""
        by_ray = self.manager.name == RAY_DEFAULT
        # Threads that wait for the interpreter go first, or they interrupt the decision.
        time.sleep(0)
        started_ns = time.perf_counter_ns()
        chosen = await self._ask_ray(tried) if by_ray else None
        with self._realtime.section():
            now_s = self.refresh()
            needed = len(generation.token_ids) + generation.sampling.max_tokens
            replicas = [
                one for one in self._offered(now_s)
                if one.replica_id not in tried
                and self.backends[one.pool].max_model_tokens >= needed
            ]  # fmt: skip
            if not replicas:
                return None
            snapshots = self.table.snapshots(replicas, generation.token_ids)
            context = len(generation.token_ids)
            total = min(self.manager.predicted_total_tokens(context, answer.arm), needed)
            # Always a float: compiled policies are compiled anew for other types.
            request = Request(answer.arrival_s, context, float(max(total, context + 1)))
            ids = [one.replica_id for one in replicas]
            if chosen in ids:
                us = (time.perf_counter_ns() - started_ns) / 1e3
                choice = Choice(ids.index(chosen), None, None, False, False, us)
                self.manager.decision_us.append(us)
                self.manager.num_decisions += 1
            else:
                if chosen is not None and self._ray is not None:
                    self._ray.finished(chosen)
                stale = self._all_stale(replicas, now_s)
                choice = self.manager.pick(request, snapshots, stale, answer.arm)
                if not tried:
                    self.manager.observe(generation.request_id, request, snapshots, choice)
        by_ray = by_ray and chosen in ids
        replica = replicas[choice.index]
        output = request.predicted_total_tokens - context
        match = snapshots[choice.index].engine
        replica.send(
            generation.request_id, generation.token_ids,
            0 if match is None else match.match_tokens, output, now_s,
        )  # fmt: skip
        self._count(choice, replica.pool, context)
        policy = self.manager.label_of(answer.arm)
        pools = tuple(one.pool for one in replicas)
        self.history.decide(now_s, policy, pools, snapshots, choice)
        return _Pick(replica, choice, tuple(snapshots), pools, request, policy, answer.arm, by_ray)

    def _count(self, choice: Choice, pool: str, context_tokens: int) -> None:
        self.metrics.decision_s.observe(choice.decision_us / 1e6)
        self.metrics.in_flight.labels(pool).inc()
        self.metrics.prompt_tokens.labels(pool).inc(context_tokens)
        if choice.fallback_reason is not None:
            self.metrics.fallbacks.labels(choice.fallback_reason).inc()
        if choice.explored:
            self.metrics.explored.inc()

    async def _ask_ray(self, tried: set[str]) -> str | None:
        """Let Ray's router choose among all replicas but those that have failed the request."""
        if self._ray is None:
            self._ray = RayDefault()
        every = [one for backend in self.backends.values() for one in backend.ray_replicas()]
        self._ray.update(every)
        if len(every) <= len(tried):
            return None
        return await self._ray.choose()

    def _offered(self, now_s: float) -> list[ReplicaState]:
        """Replicas to choose from: those that are suspect wait until they are heard of again."""
        offered = self.table.offered(now_s, self.cluster.circuit_breaker.stale_after_s)
        for replica_id, since_s in list(self._suspects.items()):
            replica = self.table.replicas.get(replica_id)
            if replica is None or replica.status.observed_at_s > since_s:
                del self._suspects[replica_id]
        return [one for one in offered if one.replica_id not in self._suspects] or offered

    def _suspect(self, replica_id: str) -> None:
        self._suspects[replica_id] = self.clock_s()
        if self._ray is not None:
            self._ray.died(replica_id)

    def _all_stale(self, replicas: list[ReplicaState], now_s: float) -> bool:
        newest_s = max(one.status.observed_at_s for one in replicas)
        return now_s - newest_s > self.cluster.circuit_breaker.stale_after_s

    def observe(self) -> None:
        """Set the gauges that show the state of the pools."""
        now_s = self.refresh()
        metrics = self.metrics
        for name, backend in self.backends.items():
            mine = [one for one in self.table.replicas.values() if one.pool == name]
            status = [one.status for one in mine]
            metrics.replicas.labels(name).set(len(mine))
            metrics.waiting.labels(name).set(sum(one.num_waiting for one in status))
            metrics.running.labels(name).set(sum(one.num_running for one in status))
            used = [one.kv_used_fraction for one in status]
            metrics.kv_used_fraction.labels(name).set(sum(used) / max(len(used), 1))
            ages = [now_s - one.observed_at_s for one in status]
            metrics.age_s.labels(name).set(max(ages, default=math.nan))
            for replica_id, loads in backend.host_loads().items():
                for quantity, value in loads.items():
                    metrics.host.labels(replica_id, quantity).set(value)
        if self.log is not None:
            metrics.log_lines_lost.set(self.log.num_lost)
