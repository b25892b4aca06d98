"""The attempts to answer a request: one replica after another, until one begins to answer."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from serve_app.engines.base import EngineStatus, FinishReason
from serve_app.gateway.answer import COMPLETED, Answer
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.decision_record import DecisionRecord, Pick
from serve_app.gateway.exchange import Backend
from serve_app.gateway.generation import (
    Refused,
    ReplicaFailed,
    ReplicaFull,
    ReplicaLacks,
    ReplicaRefused,
    ReplicaTimeout,
    ReplicaTooSmall,
    ReplicaUnreachable,
    RequestRejected,
    ResponseGone,
    Unanswerable,
    Unserved,
    new_id,
)
from serve_app.gateway.holding import Holding, QueueFull, WaitedTooLong
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.placement import Placement
from serve_app.gateway.replicas import ReplicaState, ReplicaTable
from serve_app.policy.picker import ReplicaPicker
from serve_app.policy.runner import RAY_DEFAULT

logger = logging.getLogger(__name__)

_REFUSALS = {QueueFull: "queue full", WaitedTooLong: "waited too long"}
"""Reasons of refusals in the metrics, by the error."""
_PATIENCE_S = 20.0
"""How long a request waits for a replica where there is none."""


class Attempts:
    """Sends requests to replicas, retries after failures, and records the results."""

    def __init__(
        self, backends: Mapping[str, Backend], table: ReplicaTable, picker: ReplicaPicker,
        placement: Placement, holding: Holding | None, metrics: Metrics, log: DecisionLog | None,
        clock_s: Callable[[], float], max_retries: int,
    ) -> None:  # fmt: skip
        self.backends, self.clock_s, self.metrics = backends, clock_s, metrics
        self.placement = placement
        self._table, self._picker, self._holding, self._log = table, picker, holding, log
        self._max_retries = max_retries

    async def run(self, answer: Answer) -> None:
        """Try replicas until one begins to answer; raises what `Gateway.serve` raises.

        One that has no room, or lacks what is asked for, has not failed: another is asked in its
        place, each at most once.
        """
        errors: list[ReplicaFailed] = []
        num_failed = number = 0
        if not self._table.replicas and self._may_get_replica(answer):
            await self._wait_for_replica(answer, answer.arrival_s)
        sticks_to = answer.request.sticks_to
        if sticks_to is not None and sticks_to not in self._table.replicas:
            raise ResponseGone
        while num_failed <= self._max_retries:
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
                return await self._attempt(answer, pick, number)
            except ReplicaFailed as error:
                errors.append(error)
                if isinstance(error, ReplicaTooSmall):
                    answer.excluded.add(pick.replica.pool)
                elif not isinstance(error, ReplicaLacks):
                    request_id = answer.request.request_id
                    logger.warning(
                        "request %s, attempt %d at %s: %s", request_id, number, replica_id, error
                    )
                sender, has_begun = answer.request.sender, answer.downstream.begun
                if sender is not None and has_begun and not answer.num_tokens:
                    raise self._refusal(answer, [error]) from None  # Its caller gets the error.
                if answer.num_tokens or has_begun:
                    raise Unserved(f"{error}, after {answer.num_tokens} tokens") from None
                # Another that answers already is no retry.
                is_served = sender is not None and sender.serves is not None
                is_failure = not isinstance(error, ReplicaFull | ReplicaLacks)
                num_failed += is_failure and not is_served
                number += 1
        if len(answer.suspects) == 1:
            # Where several failed it, the request may be at fault.
            self.blame_suspects(answer)
        raise self._refusal(answer, errors)

    def blame_suspects(self, answer: Answer) -> None:
        """Count the failure of a request against the replicas that failed it."""
        suspects, answer.suspects = answer.suspects, []
        for replica, sent_s in suspects:
            self.placement.fail(replica, sent_s)

    async def _pick(self, answer: Answer, waits: bool = True) -> Pick | None:
        """Choose a replica; hold the request while all are full, and wait while there is none."""
        if self._holding is not None:
            self._holding.release()  # Who waits goes before who comes.
        by_ray, started_ns = None, 0
        if self._picker.policy.name == RAY_DEFAULT:
            started_ns = time.perf_counter_ns()
            by_ray = await self.placement.ask_ray(len(answer.tried))
        try:
            pick = self.placement.pick(answer, by_ray, started_ns)
        except ReplicaFull:
            if self._holding is None:
                raise
            pick = await self._holding.place(answer, answer.service_class.max_wait_s)
        if pick is None and waits and self._may_get_replica(answer):
            await self._wait_for_replica(answer, self.clock_s())
            answer.tried.clear()  # Those that come may be the same, and well again.
            return await self._pick(answer, waits=False)
        return pick

    async def _wait_for_replica(self, answer: Answer, since_s: float) -> None:
        """Wait a while for a first replica: its pool may start, or replace one that died."""
        while not self._has_replica(answer):
            if self.placement.refresh() - since_s > _PATIENCE_S:
                return
            if not self._has_replica(answer):
                await asyncio.sleep(0.05)

    def _may_get_replica(self, answer: Answer) -> bool:
        """Whether there is no replica for the request, but a pool that could have one.

        Where a proxy allows some replicas only, these are known.
        """
        sender = answer.request.sender
        if self._has_replica(answer) or (sender is not None and sender.allowed is not None):
            return False
        return any(answer.fits(backend) for backend in self.backends.values())

    def _has_replica(self, answer: Answer) -> bool:
        """Whether there is any replica for the request, tried or not."""
        pools = {replica.pool for replica in self._table.replicas.values() if not replica.draining}
        return any(answer.fits(self.backends[name]) for name in pools)

    async def _attempt(self, answer: Answer, pick: Pick, number: int) -> None:
        """Have the chosen replica answer, and record the result."""
        replica, attempt = pick.replica, ReplicaAttempt(self, answer, pick.replica)
        if answer.request.span is not None:
            answer.request.span.place(pick)
        outcome = "failed"
        try:
            backend, sender = self.backends[replica.pool], answer.request.sender
            if sender is None:
                await backend.answer(replica.replica_id, attempt)
            else:
                await sender.answer(backend, attempt, [replica.replica_id, *pick.stand_ins()])
            outcome = answer.finish_reason or "failed"
        except asyncio.CancelledError:
            outcome = answer.finish_reason or answer.why_cancelled
            raise
        except (ReplicaTooSmall, ReplicaLacks, RequestRejected) as error:
            outcome = "rejected"
            if isinstance(error, ReplicaLacks):
                self.placement.availability.note_lack(replica, answer.needs, error.model)
            raise
        except ReplicaFull as error:
            self.placement.availability.note_full(replica, error)
            raise
        except ReplicaFailed as error:
            outcome = "timeout" if isinstance(error, ReplicaTimeout) else outcome
            if not isinstance(error, ReplicaRefused):
                answer.suspects.append((replica, attempt.sent_s))
                if isinstance(error, ReplicaUnreachable) or answer.downstream.begun:
                    self.blame_suspects(answer)
            raise
        finally:
            self.close(answer, pick, number, outcome, attempt.num_sends)

    def close(self, answer: Answer, pick: Pick, attempt: int, outcome: str, num_sends: int) -> None:
        """Record the end of an attempt in table, metrics and decision log."""
        if answer.request.span is not None:
            answer.request.span.end_attempt(outcome, num_sends)
        now_s, request_id = self.clock_s(), answer.request.request_id
        done = outcome in COMPLETED
        answer.response_s = now_s - answer.arrival_s if done else math.nan
        self.placement.finish(pick, answer, now_s, answer.response_s if done else None)
        if self._holding is not None:
            self._holding.release()
        pool, class_name = pick.replica.pool, answer.service_class.name
        self.metrics.requests.labels(pool, class_name, outcome).inc()
        series = self.metrics.of_pool(pool)
        series.output_tokens.inc(answer.num_tokens)
        if done:
            series.response_seconds.observe(answer.response_s)
            if not math.isnan(answer.ttft_s):
                series.ttft_seconds.observe(answer.ttft_s)
                if answer.num_tokens > 1:
                    series.tpot_seconds.observe(answer.tpot_s(now_s))
        if self._log is not None:
            record = DecisionRecord(
                new_id(), request_id, attempt, pick.time_s, class_name, pick.choice,
                pick.snapshots.candidates.pools, outcome, answer.num_tokens, answer.ttft_s,
                answer.response_s, pick.order_key, num_sends,
            )  # fmt: skip
            self._log.write(record)

    def _refusal(self, answer: Answer, errors: Sequence[ReplicaFailed]) -> Exception:
        """Return the error for a caller whom no replica has answered."""
        full = [error for error in errors if isinstance(error, ReplicaFull)]
        if full:
            self.metrics.refused.labels(_REFUSALS.get(type(full[-1]), "replicas full")).inc()
            said = [error for error in full if error.retry_after_s is not None]
            first = min(said, key=attrgetter("retry_after_s"), default=full[-1])
            after_s = self.placement.retry_after_s(first.retry_after_s)
            status = 429 if any(error.status == 429 for error in full) else 503
            return Refused(str(first), after_s, status=status, headers=first.headers)
        small = [error for error in errors if isinstance(error, ReplicaTooSmall)]
        if small and not any(answer.fits(backend) for backend in self.backends.values()):
            return Unanswerable(str(small[-1]))
        if not errors:
            return Unserved("no replica is there")
        others = [error for error in errors if not isinstance(error, ReplicaLacks)]
        if others:
            return Unserved(str(others[-1]))
        last = errors[-1]
        assert isinstance(last, ReplicaLacks)
        return last.rejection


class ReplicaAttempt:
    """One attempt to have a replica answer a request."""

    __slots__ = (
        "_answer", "_attempts", "_replica", "downstream", "num_sends", "order_key", "request",
        "sent_s",
    )  # fmt: skip

    def __init__(self, attempts: Attempts, answer: Answer, replica: ReplicaState) -> None:
        self._attempts, self._answer, self._replica = attempts, answer, replica
        self.request, self.downstream = answer.request, answer.downstream
        self.order_key = answer.order_key
        self.sent_s = attempts.placement.availability.outliers.clock_s()
        self.num_sends = 0

    def note_send(self) -> None:
        """Note that the request is sent."""
        self.num_sends += 1
        self._attempts.metrics.of_pool(self._replica.pool).sends.inc()

    def take(
        self, num_tokens: int, finish_reason: FinishReason | None = None, is_whole: bool = False
    ) -> None:
        """Count tokens: see `serve_app.gateway.exchange.Attempt`."""
        answer, attempts, replica = self._answer, self._attempts, self._replica
        if (num_tokens or is_whole) and not answer.num_tokens:
            attempts.placement.availability.begin(answer, replica, self.sent_s)
            if attempts.placement.peers is not None:
                attempts.placement.peers.begin(answer.request.request_id)
            if answer.suspects:
                attempts.blame_suspects(answer)
            if not is_whole:
                answer.ttft_s = attempts.clock_s() - answer.arrival_s
                if answer.request.span is not None:
                    answer.request.span.first_token()
        if num_tokens > answer.num_tokens:
            answer.num_tokens = num_tokens
            replica.in_flight.receive(answer.request.request_id, num_tokens, is_whole)
        answer.finish_reason = finish_reason

    def publish(self, status: EngineStatus) -> None:
        """Record the state of the replica."""
        replica, attempts = self._replica, self._attempts
        pool = attempts.backends.get(replica.pool)
        if pool is not None:
            now_s = attempts.clock_s()
            replica.publish(pool.by_our_clock(replica.replica_id, status, now_s))
