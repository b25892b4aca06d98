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

from serve_app.ahead import Ahead
from serve_app.backends import Backend
from serve_app.decider import Choice
from serve_app.desk import RAY_DEFAULT, PolicyDesk
from serve_app.history import History
from serve_app.meters import Meters
from serve_app.outcome_log import Outcome, OutcomeLog
from serve_app.pools import Cluster, SloClass
from serve_app.router import RayDefault
from serve_app.telemetry import Collector, Tracked
from serve_app.trial import Arm
from serve_app.work import Delta, ReplicaFailed, ReplicaFull, ReplicaRefused, Work
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

    tracked: Tracked
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

    def take(self, delta: Delta, now_s: float) -> None:
        if delta.num_tokens and math.isnan(self.first_token_s):
            self.first_token_s = now_s
        self.num_tokens = max(delta.num_tokens, self.num_tokens)
        self.finish_reason = delta.finish_reason

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
    desk: PolicyDesk
    backends: Mapping[str, Backend]
    """By the pool's name."""
    meters: Meters = field(default_factory=Meters)
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
        self.collector = Collector(means)
        self.history = History()
        self._ray: RayDefault | None = None
        self._ahead = Ahead()
        self._suspects: dict[str, float] = {}

    def service_class(self, name: str | None) -> SloClass | None:
        """Return the class of that name, the first for None; None: there is none."""
        if name is None or name in ("auto", "default"):
            return self.cluster.classes[0]
        return next((one for one in self.cluster.classes if one.name == name), None)

    async def serve(self, work: Work, service_class: SloClass) -> AsyncGenerator[Delta, None]:
        """Answer a request; leaving the stream early cancels it.

        Raises:
            Refused: Too much is in flight, or no replica takes more; nothing was generated.
            Unserved: No replica could answer it, or the one that had begun died.
        """
        self.num_offered += 1
        self._admit(service_class)
        self.in_flight += 1
        answer = _Answer(self.clock_s(), arm=self.desk.arm_of(work.request_id))
        if self.desk.trial is not None:
            self.desk.trial.open(
                work.request_id, answer.arm, len(work.token_ids), answer.arrival_s,
                service_class.response_s,
            )  # fmt: skip
        try:
            async with asyncio.timeout(self.cluster.limits.timeout_s):
                async with aclosing(self._attempts(work, service_class, answer)) as deltas:
                    async for delta in deltas:
                        yield delta
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
            self.desk.settle(
                work.request_id, kept, answer.response_s, answer.num_tokens, now_s
            )  # fmt: skip
            if kept is not None:
                ttft_s = answer.first_token_s - answer.arrival_s
                self.history.finish(now_s, ttft_s, answer.response_s, kept)

    def refresh(self) -> float:
        """Bring the collector up to date; return the time."""
        now_s = self.clock_s()
        for backend in self.backends.values():
            backend.refresh(self.collector, now_s)
        return now_s

    def _admit(self, service_class: SloClass) -> None:
        limit = self.cluster.limits.max_in_flight * service_class.admitted_fraction
        if self.in_flight >= max(limit, 1):
            self.meters.refused.labels("too many in flight").inc()
            raise Refused(
                f"{self.in_flight} requests are in flight, which is all that class "
                f"{service_class.name!r} may add to",
                self._retry_after_s(),
            )

    def _retry_after_s(self) -> int:
        """Whole seconds until a place is likely to be free."""
        waits_s = [s.wait_s for s in self.collector.snapshots(self._offered(self.clock_s()), [0])]
        wait_s = min(waits_s, default=float(_MIN_RETRY_AFTER_S))
        return int(min(max(math.ceil(wait_s), _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S))

    async def _attempts(
        self, work: Work, service_class: SloClass, answer: _Answer
    ) -> AsyncGenerator[Delta, None]:
        """Try replicas until one has begun to answer."""
        tried: set[str] = set()
        limits = self.cluster.limits
        failure: ReplicaFailed | None = None
        await self._some_replica(answer.arrival_s)
        for attempt in range(limits.max_retries + 1):
            pick = await self._pick(work, answer, tried)
            if pick is None and not self.collector.replicas:
                # The last one has gone since; those that come may be the same, and well again.
                await self._some_replica(self.clock_s())
                tried.clear()
                pick = await self._pick(work, answer, tried)
            if pick is None:
                break
            replica_id = pick.tracked.replica_id
            tried.add(replica_id)
            pool = pick.tracked.pool
            if attempt:
                self.meters.retries.labels(pool).inc()
            try:
                async with aclosing(
                    self._attempt(work, pick, attempt, service_class, answer)
                ) as it:
                    async for delta in it:
                        yield delta
                return
            except ReplicaFailed as error:
                failure = error
                if not isinstance(error, ReplicaFull | ReplicaRefused):
                    self._suspect(replica_id)
                logger.warning("request %s, attempt %d: %s", work.request_id, attempt, error)
                if answer.num_tokens:
                    raise Unserved(f"{error}, after {answer.num_tokens} tokens") from None
        if isinstance(failure, ReplicaFull):
            self.meters.refused.labels("replicas full").inc()
            raise Refused(str(failure), self._retry_after_s())
        raise Unserved("no replica is there" if failure is None else str(failure))

    async def _some_replica(self, arrival_s: float) -> None:
        """Wait a while where there is none: a pool that starts, or whose last replica has died."""
        while not self.collector.replicas:
            if self.refresh() - arrival_s > _PATIENCE_S:
                return
            if not self.collector.replicas:
                await asyncio.sleep(0.05)

    async def _attempt(
        self, work: Work, pick: _Pick, attempt: int, service_class: SloClass, answer: _Answer
    ) -> AsyncGenerator[Delta, None]:
        """Stream from the replica that was picked, and keep the books."""
        tracked = pick.tracked
        outcome = "abort"
        try:
            stream = self.backends[tracked.pool].stream(tracked.replica_id, work)
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    now_s = self.clock_s()
                    answer.take(delta, now_s)
                    tracked.book.receive(work.request_id, delta.num_tokens)
                    if delta.published is not None:
                        tracked.publish(delta.published)
                    if delta.finish_reason is not None:
                        outcome = delta.finish_reason
                    yield delta
        except ReplicaFailed:
            outcome = "failed"
            raise
        finally:
            self._close(work, pick, attempt, service_class, answer, outcome)

    def _close(
        self,
        work: Work,
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
        tracked = pick.tracked
        tracked.book.close(work.request_id, now_s, response_s if done else None)
        if pick.by_ray and self._ray is not None:
            self._ray.finished(tracked.replica_id)
        meters, pool = self.meters, tracked.pool
        meters.in_flight.labels(pool).dec()
        meters.requests.labels(pool, service_class.name, outcome).inc()
        meters.output_tokens.labels(pool).inc(answer.num_tokens)
        if done:
            tpot_s = (now_s - answer.first_token_s) / max(answer.num_tokens - 1, 1)
            meters.response_s.labels(pool).observe(response_s)
            if answer.num_tokens:
                meters.ttft_s.labels(pool).observe(ttft_s)
            if answer.num_tokens > 1:
                meters.tpot_s.labels(pool).observe(tpot_s)
            self.completed[service_class.name] += 1
            self.attained[service_class.name] += bool(answer.kept(service_class, now_s))
        if self.log is not None:
            choice = pick.choice
            self.log.write(
                Outcome(
                    decision_id=uuid.uuid4().hex, request_id=work.request_id, attempt=attempt,
                    time_s=pick.request.arrival_s if not attempt else now_s,
                    policy=pick.policy, service_class=service_class.name, request=pick.request,
                    snapshots=pick.snapshots, pools=pick.pools, scores=choice.scores,
                    index=choice.index, propensity=choice.propensity, explored=choice.explored,
                    fallback_reason=choice.fallback_reason, decision_us=choice.decision_us,
                    outcome=outcome, output_tokens=answer.num_tokens, ttft_s=ttft_s,
                    response_s=response_s, arm=pick.arm,
                )
            )  # fmt: skip

    async def _pick(self, work: Work, answer: _Answer, tried: set[str]) -> _Pick | None:
        """Choose a replica and put the request on its book; None: there is none left."""
        by_ray = self.desk.name == RAY_DEFAULT
        # Threads that wait for the interpreter go first, or they interrupt the decision.
        time.sleep(0)
        started_ns = time.perf_counter_ns()
        chosen = await self._ask_ray(tried) if by_ray else None
        with self._ahead.of_others():
            now_s = self.refresh()
            needed = len(work.token_ids) + work.sampling.max_tokens
            replicas = [
                one for one in self._offered(now_s)
                if one.replica_id not in tried
                and self.backends[one.pool].max_model_tokens >= needed
            ]  # fmt: skip
            if not replicas:
                return None
            snapshots = self.collector.snapshots(replicas, work.token_ids)
            context = len(work.token_ids)
            total = min(self.desk.predicted_total_tokens(context, answer.arm), needed)
            # Always a float: compiled policies are compiled anew for other types.
            request = Request(answer.arrival_s, context, float(max(total, context + 1)))
            ids = [one.replica_id for one in replicas]
            if chosen in ids:
                us = (time.perf_counter_ns() - started_ns) / 1e3
                choice = Choice(ids.index(chosen), None, None, False, False, us)
                self.desk.decision_us.append(us)
                self.desk.num_decisions += 1
            else:
                if chosen is not None and self._ray is not None:
                    self._ray.finished(chosen)
                stale = self._all_stale(replicas, now_s)
                choice = self.desk.pick(request, snapshots, stale, answer.arm)
                if not tried:
                    self.desk.observe(work.request_id, request, snapshots, choice)
        by_ray = by_ray and chosen in ids
        tracked = replicas[choice.index]
        output = request.predicted_total_tokens - context
        match = snapshots[choice.index].engine
        tracked.send(
            work.request_id, work.token_ids, 0 if match is None else match.match_tokens, output,
            now_s,
        )  # fmt: skip
        self._count(choice, tracked.pool, context)
        policy = self.desk.label_of(answer.arm)
        pools = tuple(one.pool for one in replicas)
        self.history.decide(now_s, policy, pools, snapshots, choice)
        return _Pick(tracked, choice, tuple(snapshots), pools, request, policy, answer.arm, by_ray)

    def _count(self, choice: Choice, pool: str, context_tokens: int) -> None:
        self.meters.decision_s.observe(choice.decision_us / 1e6)
        self.meters.in_flight.labels(pool).inc()
        self.meters.prompt_tokens.labels(pool).inc(context_tokens)
        if choice.fallback_reason is not None:
            self.meters.fallbacks.labels(choice.fallback_reason).inc()
        if choice.explored:
            self.meters.explored.inc()

    async def _ask_ray(self, tried: set[str]) -> str | None:
        """Let Ray's router choose among all replicas but those that have failed the request."""
        if self._ray is None:
            self._ray = RayDefault()
        every = [one for backend in self.backends.values() for one in backend.ray_replicas()]
        self._ray.update(every)
        if len(every) <= len(tried):
            return None
        return await self._ray.choose()

    def _offered(self, now_s: float) -> list[Tracked]:
        """Replicas to choose from: those that are suspect wait until they are heard of again."""
        offered = self.collector.offered(now_s, self.cluster.trust.stale_after_s)
        for replica_id, since_s in list(self._suspects.items()):
            tracked = self.collector.replicas.get(replica_id)
            if tracked is None or tracked.published.observed_at_s > since_s:
                del self._suspects[replica_id]
        return [one for one in offered if one.replica_id not in self._suspects] or offered

    def _suspect(self, replica_id: str) -> None:
        self._suspects[replica_id] = self.clock_s()
        if self._ray is not None:
            self._ray.died(replica_id)

    def _all_stale(self, replicas: list[Tracked], now_s: float) -> bool:
        newest_s = max(one.published.observed_at_s for one in replicas)
        return now_s - newest_s > self.cluster.trust.stale_after_s

    def observe(self) -> None:
        """Set the gauges that show the state of the pools."""
        now_s = self.refresh()
        meters = self.meters
        for name, backend in self.backends.items():
            mine = [one for one in self.collector.replicas.values() if one.pool == name]
            published = [one.published for one in mine]
            meters.replicas.labels(name).set(len(mine))
            meters.waiting.labels(name).set(sum(one.num_waiting for one in published))
            meters.running.labels(name).set(sum(one.num_running for one in published))
            used = [one.kv_used_fraction for one in published]
            meters.kv_used_fraction.labels(name).set(sum(used) / max(len(used), 1))
            ages = [now_s - one.observed_at_s for one in published]
            meters.age_s.labels(name).set(max(ages, default=math.nan))
            for replica_id, loads in backend.host_loads().items():
                for quantity, value in loads.items():
                    meters.host.labels(replica_id, quantity).set(value)
        if self.log is not None:
            meters.log_lines_lost.set(self.log.num_lost)
