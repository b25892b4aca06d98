"""Chooses a replica and reserves it, without an await in between.

No two requests are placed on the same state: the next one sees what the last one has reserved.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from serve_app.cluster import Cluster
from serve_app.gateway.answer import COMPLETED, Answer
from serve_app.gateway.availability import Availability
from serve_app.gateway.decision_record import Pick
from serve_app.gateway.exchange import Backend
from serve_app.gateway.generation import ReplicaFull
from serve_app.gateway.history import History
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.order import bounded_key
from serve_app.gateway.outliers import OutlierDetector
from serve_app.gateway.peers import Peers
from serve_app.gateway.replicas import Prompt, ReplicaState, ReplicaTable
from serve_app.gateway.sessions import SessionGate
from serve_app.policy.picker import ReplicaPicker
from serve_app.policy.runner import PolicyRunner
from tokenyard.routing import snapshot_table as st
from tokenyard.routing.observation import WAIT_S
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.sent_queues import SentQueues
from tokenyard.routing.types import Decision, OrderKey, Request
from tokenyard.types import IntArray
from tokenyard.workload.answer_lengths import AnswerFeatures, AnswerLengths

_MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 1, 60


class Placement:
    """Chooses replicas for requests, and counts the requests on their way to them."""

    def __init__(
        self,
        cluster: Cluster,
        picker: ReplicaPicker,
        backends: Mapping[str, Backend],
        table: ReplicaTable,
        history: History,
        outliers: OutlierDetector,
        metrics: Metrics,
        answer_lengths: AnswerLengths,
        sessions: SessionGate | None,
        peers: Peers | None,
        clock_s: Callable[[], float],
    ) -> None:
        self.availability = Availability(cluster, backends, table, outliers, metrics)
        scenario = load_scenario(cluster.scenario)
        self._max_overtaking_s = scenario.max_overtaking_s
        self._has_tenants, self._num_servers = bool(cluster.tenants), scenario.num_servers
        self._picker, self._backends, self._table = picker, backends, table
        self._history, self._metrics = history, metrics
        self._answer_lengths, self._sessions = answer_lengths, sessions
        self.peers, self._clock_s = peers, clock_s
        self._ray: Any = None  # `serve_app.gateway.ray_default.RayDefault`, once it was asked.
        self._sent = SentQueues()
        """Requests that may wait at each replica, while the deciding policy looks at them."""

    def refresh(self) -> float:
        """Bring the table of replicas up to date; return the Unix time, seconds."""
        now_s = self._clock_s()
        for backend in self._backends.values():
            backend.refresh(self._table, now_s)
        outliers = self.availability.outliers
        if outliers.records or outliers.in_a_row:
            outliers.keep(self._table.replicas)
        return now_s

    async def ask_ray(self, num_tried: int) -> str | None:
        """Let Ray's router choose a replica; None: as many have been tried as there are."""
        if self._ray is None:
            # Only this policy needs Ray, which takes seconds to import.
            module = await asyncio.to_thread(import_module, "serve_app.gateway.ray_default")
            self._ray = self._ray or module.RayDefault()
        replicas = [r for backend in self._backends.values() for r in backend.ray_replicas()]
        self._ray.update(replicas)
        if len(replicas) <= num_tried:
            return None
        chosen: str = await self._ray.choose()
        return chosen

    def pick(self, answer: Answer, by_ray: str | None = None, started_ns: int = 0) -> Pick | None:
        """Choose a replica and reserve a place in it; None: there is none left.

        `by_ray` is the replica that `ask_ray` has chosen, asked at `started_ns` of
        `time.perf_counter_ns`; None: the policy chooses.

        Raises:
            ReplicaFull: All that are left have as many requests in flight as they may.
        """
        now_s = self.refresh()
        fitting = self.availability.candidates(answer, now_s)
        sender = answer.request.sender
        is_served = sender is not None and sender.serves is not None
        rows = fitting if is_served else self.availability.with_room(fitting)
        index = None if by_ray is None else self._index_of(by_ray, rows)
        if not len(rows):
            if len(fitting):
                raise ReplicaFull("every endpoint has max_ongoing requests in flight")
            self.availability.check_not_full(answer, now_s)
            return None
        is_bound = is_served or index is not None
        if self._sessions is not None and answer.turn is not None and not is_bound:
            rows = self._sessions.admitted(answer.turn, rows, now_s)
            if not len(rows):
                raise ReplicaFull("no replica has KV memory left for another session")
        request_id = answer.request.request_id
        picker, arm = self._picker, self._picker.arm_of(request_id)
        request, snapshots = self._seen_by(picker.deciding(arm), answer, rows)
        if index is not None:
            choice = picker.pick_by_ray(request, snapshots, index, started_ns, arm)
        else:
            # Either all that are offered were heard of lately, or none.
            age_s = now_s - snapshots.live[0, st.LIVE_OBSERVED_AT_S]
            choice = picker.pick(
                request, snapshots, age_s > self.availability.stale_after_s, arm,
                last_sent_s=snapshots.last_sent_s, has_key=answer.is_ordered,
            )  # fmt: skip
        snapshots.release()
        if not answer.tried and picker.experiment is not None:
            # Only now: a shadow reads them in a thread of its own, and what was sent changes here.
            picker.observe(request_id, choice)
        order_key = answer.order_key  # A request keeps the key of its first placement.
        if not answer.is_ordered:
            bound_s = self._max_overtaking_s
            order_key = bounded_key(choice.order_key, answer.arrival_s, now_s, bound_s)
        replica = self._table.at(int(rows[choice.index]))
        pick = Pick(now_s, replica, choice, snapshots, index is not None, order_key)
        self._reserve(answer, pick)
        return pick

    def line_key(self, answer: Answer, expected_wait_s: Callable[[], float]) -> OrderKey:
        """Return by which key a request waits at the gateway: the policy's, or its session's.

        `expected_wait_s` returns for how long it will wait; it is only called where it gets a key.
        """
        if self._sessions is not None and answer.turn is not None:
            return self._sessions.order_key(answer.turn)
        self._give_key(answer, expected_wait_s)
        return answer.order_key or OrderKey(answer.arrival_s)

    def _give_key(self, answer: Answer, expected_wait_s: Callable[[], float]) -> None:
        """Ask the policy for the key of a request that has to wait, unless it has one."""
        picker, now_s = self._picker, self._clock_s()
        runner = picker.deciding(picker.arm_of(answer.request.request_id))
        rows = self.availability.candidates(answer, now_s)
        if answer.is_ordered or not runner.orders or not len(rows):
            return
        request, snapshots = self._seen_by(runner, answer, rows)
        decision = runner.decide(replace(request, held_s=expected_wait_s()), snapshots)
        snapshots.release()
        if isinstance(decision, Decision):
            answer.order_key = bounded_key(
                decision.order_key, answer.arrival_s, now_s, self._max_overtaking_s
            )
            answer.is_ordered = True

    def has_room(self) -> bool:
        """Whether any replica takes another request."""
        rows = self.availability.admitted(self.refresh())
        return bool(len(self.availability.with_room(rows)))

    def finish(self, pick: Pick, answer: Answer, now_s: float, response_s: float | None) -> None:
        """Record the end of an attempt; `response_s` is None where it was not completed."""
        pick.replica.in_flight.close(answer.request.request_id, now_s, response_s)
        if self.peers is not None:
            self.peers.close(answer.request.request_id)
        if self._sessions is not None and answer.turn is not None:
            num_tokens = None if response_s is None else answer.num_tokens
            self._sessions.end(answer.turn, now_s, num_tokens)
        self._metrics.of_pool(pick.replica.pool).requests_in_flight.dec()
        if pick.by_ray and self._ray is not None:
            self._ray.finished(pick.replica.replica_id)

    def learn_length(self, answer: Answer, now_s: float) -> None:
        """Learn from the length of an answer that has come to its end."""
        loaded, context = self._picker.policy.loaded, answer.prompt.num_tokens
        ended = answer.finish_reason in COMPLETED and answer.request.call.generates
        if ended and answer.num_tokens:
            expected = loaded.predicted_total_tokens(context) - context
            lengths = self._answer_lengths
            lengths.observe(_features(answer), answer.num_tokens, expected, now_s)
            if lengths.is_better:
                self._table.learn_lengths(lengths.mean_lengths_tokens)

    def fail(self, replica: ReplicaState, sent_s: float) -> None:
        """Record a failure of a replica; `sent_s` is by the outlier detector's clock."""
        self.availability.fail(replica, sent_s)
        if self._ray is not None:
            self._ray.died(replica.replica_id)

    def retry_after_s(self, endpoint_s: float | None = None) -> int:
        """Whole seconds until a place is likely free, by what endpoints say or an estimate."""
        if endpoint_s is None:
            rows = self.availability.admitted(self._clock_s())
            endpoint_s = float(_MIN_RETRY_AFTER_S)
            if len(rows):
                columns = self._table.snapshots(rows, Prompt([0])).columns
                endpoint_s = float(columns[:, WAIT_S].min())
        return int(min(max(math.ceil(endpoint_s), _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S))

    def _seen_by(
        self, runner: PolicyRunner, answer: Answer, rows: IntArray
    ) -> tuple[Request, st.SnapshotTable]:
        """Return the request and replicas as policies see them."""
        snapshots = self._table.snapshots(rows, answer.prompt)
        if self._picker.sees_queues:
            # Here and not where a policy looks: one that never decides would let it grow.
            sent, waiting = self._sent, snapshots.live[:, st.LIVE_NUM_WAITING].copy()
            sent.keep_latest(sent.rows_of(snapshots.replica_ids), waiting)
            snapshots.sent = sent
        context, slo = answer.prompt.num_tokens, answer.service_class
        predicted = runner.loaded.predicted_total_tokens(context)
        if runner.loaded.predictor is not None:
            # Without one the policy has learned to decide without lengths.
            predicted = context + self._answer_lengths.expected_tokens(
                _features(answer), predicted - context
            )
        total = max(min(predicted, answer.needed_tokens), context + 1)
        # Always a float: compiled policies are compiled anew for other types.
        share = answer.tenant_share
        if self._has_tenants:
            # Orders are made for as many replicas as the scenario has, and here there are others.
            share *= len(self._table.replicas) / self._num_servers
        due_s = slo.ttft_s or slo.response_s
        tenant = answer.request.tenant
        request = Request(answer.arrival_s, context, float(total), due_s, tenant, share)
        return request, snapshots

    def _index_of(self, by_ray: str, rows: IntArray) -> int | None:
        """Index of Ray's choice among the candidates; None: it is not among them."""
        replica = self._table.replicas.get(by_ray)
        indices = [] if replica is None else np.flatnonzero(rows == replica.row).tolist()
        if indices:
            return int(indices[0])
        if self._ray is not None:
            self._ray.finished(by_ray)
        return None

    def _reserve(self, answer: Answer, pick: Pick) -> None:
        """Count the request as on its way, before another is placed."""
        choice, replica = pick.choice, pick.replica
        context = choice.request.context_tokens
        match_tokens = int(pick.snapshots.live[choice.index, st.LIVE_MATCH_TOKENS])
        output_tokens = choice.request.predicted_total_tokens - context
        request_id, now_s = answer.request.request_id, pick.time_s
        replica.send(request_id, answer.prompt, match_tokens, output_tokens, now_s)
        if self.peers is not None:
            self.peers.send(replica, request_id, answer.prompt, match_tokens, output_tokens)
        if self._sessions is not None and answer.turn is not None:
            self._sessions.start(answer.turn, replica, match_tokens)
        if self._picker.sees_queues:
            key_s = now_s if pick.order_key is None else pick.order_key.key_s
            self._sent.add(replica.replica_id, key_s, float(context))
        metrics, series = self._metrics, self._metrics.of_pool(replica.pool)
        metrics.decision_seconds.observe(choice.decision_us / 1e6)
        series.requests_in_flight.inc()
        series.prompt_tokens.inc(context)
        if choice.fallback_reason is not None:
            metrics.fallbacks.labels(choice.fallback_reason).inc()
        if choice.explored:
            metrics.explored.inc()
        self._history.decide(now_s, pick.snapshots, choice)


def _features(answer: Answer) -> AnswerFeatures:
    """What the length of the answer is predicted from."""
    model, route = answer.needs
    request = answer.request
    tenant = request.tenant or request.caller.tenant
    return AnswerFeatures(answer.prompt.num_tokens, request.max_tokens, model, route, tenant)
