"""Where a request goes: candidates, the choice, and the reservation, without an await in between.

No two requests are placed on the same state: what one has reserved the next one sees.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Literal

import numpy as np

from serve_app.cluster import Cluster
from serve_app.gateway.answer import Answer
from serve_app.gateway.exchange import Backend
from serve_app.gateway.generation import ReplicaFull
from serve_app.gateway.history import History
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.order import bounded_key
from serve_app.gateway.outliers import BackOff, OutlierDetector
from serve_app.gateway.pick import Pick
from serve_app.gateway.replicas import Prompt, ReplicaState, ReplicaTable
from serve_app.policy.picker import ReplicaPicker
from serve_app.policy.runner import RAY_DEFAULT, PolicyRunner
from tokenyard.routing.observation import WAIT_S
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.sent_queues import SentQueues
from tokenyard.routing.snapshot_table import (
    LIVE_MATCH_TOKENS,
    LIVE_NUM_WAITING,
    LIVE_OBSERVED_AT_S,
    SnapshotTable,
    keep_with_room,
)
from tokenyard.routing.types import Decision, Request
from tokenyard.types import FloatArray, IntArray

logger = logging.getLogger(__name__)

_FULL_BASE_S, _FULL_MAX_S = 0.5, 60.0
"""For how long an endpoint that has no room is left alone: the first time, and at most."""
_LACK_BASE_S, _LACK_MAX_S = 10.0, 300.0
"""Likewise one that does not know the model or the route, for requests that need it."""


ReplicaStatus = Literal["ready", "draining", "ejected", "full", "unreachable"]


class Placement:
    """Chooses replicas for requests, and notes what is on its way to them."""

    def __init__(
        self,
        cluster: Cluster,
        picker: ReplicaPicker,
        backends: Mapping[str, Backend],
        table: ReplicaTable,
        history: History,
        outliers: OutlierDetector,
        metrics: Metrics,
        clock_s: Callable[[], float],
    ) -> None:
        """Place on the replicas of a table.

        Args:
            cluster: Its circuit breaker's settings count.
            picker: Who decides.
            backends: Pools, by name.
            table: Their replicas.
            history: Is told of every decision.
            outliers: Which replicas fail.
            metrics: Are told of every decision.
            clock_s: Unix time, seconds.
        """
        self._stale_after_s = cluster.circuit_breaker.stale_after_s
        scenario = load_scenario(cluster.scenario)
        self._max_overtaking_s = scenario.max_overtaking_s
        self._has_tenants, self._num_servers = bool(cluster.tenants), scenario.num_servers
        self._most_in_flight = {pool.name: pool.max_ongoing for pool in cluster.external_pools}
        if cluster.queue is not None:
            # Else engines of ours, which know their own limit, say themselves when they are full.
            own = cluster.own_pools
            self._most_in_flight |= {pool.name: pool.max_ongoing_requests for pool in own}
        self._most: FloatArray = np.zeros(0)
        """Of one replica, by the number of its pool."""
        none: IntArray = np.zeros(0, dtype=np.int64)
        keep_with_room(table.state, none, self._most, none)  # Loads what is compiled.
        self._picker, self._backends, self._table = picker, backends, table
        self._history, self._outliers, self._metrics = history, outliers, metrics
        self._clock_s = clock_s
        self._full = BackOff(_FULL_BASE_S, _FULL_MAX_S, outliers.clock_s)
        self._full_status: dict[str, int] = {}
        """What each endpoint that had no room answered last."""
        self._lacks = BackOff(_LACK_BASE_S, _LACK_MAX_S, outliers.clock_s)
        """By replica, and model or route."""
        self._listed: dict[tuple[str, str | bytes], tuple[str, frozenset[str] | None]] = {}
        """Name of a model that a replica did not know, and the names that it listed then."""
        self._ray: Any = None  # `serve_app.gateway.ray_default.RayDefault`, once it was asked.
        self._sent = SentQueues()
        """What may wait at each replica, while somebody who decides looks at it."""

    def refresh(self) -> float:
        """Bring the table of replicas up to date; return the time."""
        now_s = self._clock_s()
        for backend in self._backends.values():
            backend.refresh(self._table, now_s)
        self._outliers.keep(self._table.replicas)
        return now_s

    async def pick(self, answer: Answer) -> Pick | None:
        """Choose a replica and reserve a place in it; None: there is none left.

        Raises:
            ReplicaFull: All that are left have as many requests in flight as they may.
        """
        started_ns, by_ray = time.perf_counter_ns(), None
        if self._picker.policy.name == RAY_DEFAULT:
            by_ray = await self._ask_ray(answer.tried)
        return self.pick_now(answer, by_ray, started_ns)

    def pick_now(
        self, answer: Answer, by_ray: str | None = None, started_ns: int = 0
    ) -> Pick | None:
        """As `pick`, without a wait: Ray's own router is not asked here.

        Args:
            answer: To the request that is placed.
            by_ray: Replica that Ray's router has chosen; None: it was not asked.
            started_ns: When it was asked, by `time.perf_counter_ns`.

        Raises:
            ReplicaFull: As `pick`.
        """
        now_s = self.refresh()
        fitting = self._candidates(answer, now_s)
        rows = self._with_room(fitting)
        index = None if by_ray is None else self._index_of(by_ray, rows)
        if not len(rows):
            if len(fitting):
                raise ReplicaFull("every endpoint has max_ongoing requests in flight")
            self._check_rest(answer, now_s)
            return None
        request_id = answer.request.request_id
        picker, arm = self._picker, self._picker.arm_of(request_id)
        request, snapshots = self._seen_by(picker.deciding(arm), answer, rows)
        if index is not None:
            choice = picker.pick_by_ray(request, snapshots, index, started_ns, arm)
        else:
            # Either all that are offered were heard of lately, or none.
            stale = now_s - snapshots.live[0, LIVE_OBSERVED_AT_S] > self._stale_after_s
            choice = picker.pick(
                request, snapshots, stale, arm, last_sent_s=snapshots.last_sent_s,
                has_key=answer.is_ordered,
            )  # fmt: skip
        snapshots.release()
        if not answer.tried:
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

    def give_key(self, answer: Answer, expected_wait_s: Callable[[], float]) -> None:
        """Ask the policy for the key of a request that has to wait, where it has none yet.

        Args:
            answer: To the request.
            expected_wait_s: For how long that will be, as far as one can tell, seconds; only asked
                where it gets a key.
        """
        picker, now_s = self._picker, self._clock_s()
        runner = picker.deciding(picker.arm_of(answer.request.request_id))
        rows = self._candidates(answer, now_s)
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
        rows = self._table.offered(self.refresh(), self._stale_after_s)
        return bool(len(self._with_room(self._admitted(rows))))

    def fitting(self, answer: Answer) -> tuple[str, ...]:
        """Names of the pools that can answer a request."""
        return tuple(name for name, pool in self._backends.items() if answer.fits(pool))

    def windows(self) -> list[dict[str, Any]]:
        """How full each replica is: requests in flight, and how many there may be; None: any."""
        return [
            {
                "replica_id": each.replica_id, "pool": each.pool,
                "in_flight": each.in_flight.count,
                "max_ongoing": self._most_in_flight.get(each.pool),
            }
            for each in self._table.replicas.values()
        ]  # fmt: skip

    def finish(self, pick: Pick, request_id: str, now_s: float, response_s: float | None) -> None:
        """Note the end of an attempt.

        Args:
            pick: Where it went.
            request_id: Whose.
            now_s: Unix time, seconds.
            response_s: How long it took; None where it was not completed.
        """
        pick.replica.in_flight.close(request_id, now_s, response_s)
        self._metrics.of_pool(pick.replica.pool).in_flight.dec()
        if pick.by_ray and self._ray is not None:
            self._ray.finished(pick.replica.replica_id)

    def fail(self, replica: ReplicaState, sent_s: float) -> None:
        """Note that a replica has failed a request that it was sent at a time of the detector."""
        if self._outliers.fail(replica.replica_id, sent_s):
            ejected_s = self._outliers.ejected_s(replica.replica_id)
            logger.warning("replica %s is ejected for %.1f s", replica.replica_id, ejected_s)
            self._metrics.ejections.labels(replica.pool).inc()
        if self._ray is not None:
            self._ray.died(replica.replica_id)

    def note_full(self, replica: ReplicaState, error: ReplicaFull) -> None:
        """Leave an endpoint alone that had no room; engines of ours tell themselves."""
        if self._backends[replica.pool].takes_any:
            self._full.refuse((replica.replica_id,), error.retry_after_s)
            self._full_status[replica.replica_id] = error.status

    def note_lack(self, replica: ReplicaState, needs: tuple[str, bytes], model: str | None) -> None:
        """Ask a replica no more for a model or a route that it does not know.

        Args:
            replica: Which.
            needs: Model and route of the request.
            model: Name by which it was asked for the model; None: it lacks the route.
        """
        lacking = (replica.replica_id, needs[1] if model is None else needs[0])
        self._lacks.refuse(lacking)
        if model is not None:
            self._listed[lacking] = model, replica.info.models

    def begin(self, answer: Answer, replica: ReplicaState, sent_s: float) -> None:
        """Note that a replica has begun to answer; `sent_s` is by the detector's clock."""
        self._outliers.begin(replica.replica_id, sent_s)
        self._full.pop((replica.replica_id,), None)
        if self._lacks:
            for need in answer.needs:
                self._lacks.pop((replica.replica_id, need), None)

    def state_of(self, replica: ReplicaState, now_s: float) -> ReplicaStatus:
        """Whether a replica could be sent a request at a time, Unix time, seconds, or why not."""
        if replica.draining or not replica.status.accepting:
            return "draining"
        if self._outliers.ejected_s(replica.replica_id):
            return "ejected"
        if self._full.left_s((replica.replica_id,)):
            return "full"
        # Engines of ours tell by way of Ray Serve, whose controller may be late.
        is_old = now_s - replica.status.observed_at_s > self._stale_after_s
        return "unreachable" if is_old and self._backends[replica.pool].takes_any else "ready"

    def least_wait_s(self) -> float | None:
        """Shortest time until a replica could start on a prompt, seconds; None: there is none."""
        rows = self._admitted(self._table.offered(self._clock_s(), self._stale_after_s))
        if not len(rows):
            return None
        return float(self._table.snapshots(rows, Prompt([0])).columns[:, WAIT_S].min())

    def _seen_by(
        self, runner: PolicyRunner, answer: Answer, rows: IntArray
    ) -> tuple[Request, SnapshotTable]:
        """Return the request and some replicas as policies see them."""
        snapshots = self._table.snapshots(rows, answer.prompt)
        if self._picker.sees_queues:
            # Here and not where a policy looks: one that never decides would let it grow.
            sent, waiting = self._sent, snapshots.live[:, LIVE_NUM_WAITING].copy()
            sent.keep_latest(sent.rows_of(snapshots.replica_ids), waiting)
            snapshots.sent = sent
        context, slo = answer.prompt.num_tokens, answer.service_class
        predicted = runner.loaded.predicted_total_tokens(context)
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
        """Position of Ray's choice among the candidates; None: it chose none of them."""
        replica = self._table.replicas.get(by_ray)
        indices = [] if replica is None else np.flatnonzero(rows == replica.row).tolist()
        if indices:
            return int(indices[0])
        if self._ray is not None:
            self._ray.finished(by_ray)
        return None

    def _candidates(self, answer: Answer, now_s: float) -> IntArray:
        """Rows of the replicas that the request may go to, shape (num,)."""
        offered = self._table.offered(now_s, self._stale_after_s)
        rows = self._fitting(answer, self._admitted(offered))
        if not len(rows):
            # Those that fit are stale or ejected, and only others are well.
            rows = self._admitted(self._fitting(answer, self._table.offered(now_s, math.inf)))
        return rows

    def _fitting(self, answer: Answer, rows: IntArray) -> IntArray:
        """Those of some rows that can answer the request and have not been tried."""
        table = self._table
        sticks_to = answer.request.sticks_to
        if sticks_to is not None:
            holder = table.replicas.get(sticks_to)
            rows = rows[rows == holder.row] if holder else rows[:0]
        if answer.tried:
            tried = [replica.row for name in answer.tried if (replica := table.replicas.get(name))]
            rows = rows[~np.isin(rows, tried)]
        if self._lacks:
            replicas = [table.at(row) for row in rows.tolist()]
            needs = answer.needs
            lacks = [any(self._is_lacking(each, need) for need in needs) for each in replicas]
            knows = ~np.array(lacks, dtype=bool)
            # Where none is known to know it, one is asked: it says so itself.
            if knows.any() or answer.tried:
                rows = rows[knows]
        fitting = self.fitting(answer)
        if len(fitting) < len(self._backends):
            # None may be in flight at the others.
            most = [np.inf if name in fitting else 0.0 for name in table.pools]
            rows = self._with_room(rows, np.array(most))
        return rows

    def _is_lacking(self, replica: ReplicaState, need: str | bytes) -> bool:
        """Whether a replica does not know a model or a route, as far as it has said.

        What it lists since then says so for certain; else it is asked again after a while.
        """
        lacking = (replica.replica_id, need)
        if lacking not in self._lacks:
            return False
        model, listed_then = self._listed.get(lacking, (None, None))
        listed = replica.info.models
        if model is not None and listed is not None:
            if model not in listed:
                return True
            if listed != listed_then:
                del self._lacks[lacking]
                return False
        return self._lacks.left_s(lacking) > 0.0

    def _check_rest(self, answer: Answer, now_s: float) -> None:
        """Find out whether a request has no replica because all that are left have no room.

        Raises:
            ReplicaFull: That is so.
        """
        if not self._full:
            return
        rows = self._fitting(answer, self._table.offered(now_s, math.inf)).tolist()
        names = [self._table.at(row).replica_id for row in rows]
        rests_s = {name: left_s for name in names if (left_s := self._full.left_s((name,)))}
        if rests_s:
            name = min(rests_s, key=rests_s.__getitem__)
            reason = "every endpoint has said lately that it has no room"
            raise ReplicaFull(reason, self._full_status[name], rests_s[name])

    def _with_room(self, rows: IntArray, most: FloatArray | None = None) -> IntArray:
        """Rows of the replicas with fewer requests in flight than they may have.

        Args:
            rows: To choose from, shape (num,).
            most: Of one replica, by the number of its pool; None: its pool's `max_ongoing`.
        """
        if most is None:
            if not self._most_in_flight:
                return rows
            pools = self._table.pools
            if len(self._most) != len(pools):  # They never go.
                self._most = np.array([self._most_in_flight.get(name, np.inf) for name in pools])
            most = self._most
        out = np.empty_like(rows)
        num = keep_with_room(self._table.state, rows, most, out)
        return rows if num == len(rows) else out[:num]

    def _admitted(self, rows: IntArray) -> IntArray:
        """Those of some rows that have room and are not ejected.

        Where all that have room are ejected, they are offered all the same.
        """
        if self._full:
            names = [self._table.at(row).replica_id for row in rows.tolist()]
            rows = rows[np.array([not self._full.left_s((name,)) for name in names], dtype=bool)]
        outliers = self._outliers
        if not outliers.records:
            return rows
        replicas = [self._table.at(row) for row in rows.tolist()]
        admitted = [outliers.admits(r.replica_id, r.in_flight.count) for r in replicas]
        if not any(admitted):
            admitted = [not outliers.ejected_s(r.replica_id) for r in replicas]
        return rows[np.array(admitted)] if any(admitted) else rows

    def _reserve(self, answer: Answer, pick: Pick) -> None:
        """Note that the request is on its way, before anything else can be placed."""
        choice, replica = pick.choice, pick.replica
        context = choice.request.context_tokens
        match_tokens = int(pick.snapshots.live[choice.index, LIVE_MATCH_TOKENS])
        output_tokens = choice.request.predicted_total_tokens - context
        request_id, now_s = answer.request.request_id, pick.time_s
        replica.send(request_id, answer.prompt, match_tokens, output_tokens, now_s)
        if self._picker.sees_queues:
            key_s = now_s if pick.order_key is None else pick.order_key.key_s
            self._sent.add(replica.replica_id, key_s, float(context))
        metrics, series = self._metrics, self._metrics.of_pool(replica.pool)
        metrics.decision_seconds.observe(choice.decision_us / 1e6)
        series.in_flight.inc()
        series.prompt_tokens.inc(context)
        if choice.fallback_reason is not None:
            metrics.fallbacks.labels(choice.fallback_reason).inc()
        if choice.explored:
            metrics.explored.inc()
        self._history.decide(now_s, pick.snapshots, choice)

    async def _ask_ray(self, tried: set[str]) -> str | None:
        """Let Ray's router choose, among those that have not failed so far."""
        if self._ray is None:
            # Only this policy needs Ray, which takes seconds to import.
            module = await asyncio.to_thread(import_module, "serve_app.gateway.ray_default")
            self._ray = self._ray or module.RayDefault()
        every = [r for backend in self._backends.values() for r in backend.ray_replicas()]
        self._ray.update(every)
        if len(every) <= len(tried):
            return None
        chosen: str = await self._ray.choose()
        return chosen
