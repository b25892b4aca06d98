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
from typing import Any, Literal, Protocol

import numpy as np

from serve_app.cluster import Cluster
from serve_app.gateway.exchange import Backend
from serve_app.gateway.generation import ReplicaFull
from serve_app.gateway.history import History
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.order import bounded_key
from serve_app.gateway.outliers import BackOff, OutlierDetector
from serve_app.gateway.pick import Pick
from serve_app.gateway.replicas import Prompt, ReplicaState, ReplicaTable
from serve_app.policy.picker import ReplicaPicker
from serve_app.policy.runner import RAY_DEFAULT, ReplicaChoice
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
from tokenyard.routing.types import Decision, OrderKey, Request
from tokenyard.types import FloatArray, IntArray

logger = logging.getLogger(__name__)

_FULL_BASE_S, _FULL_MAX_S = 0.5, 60.0
"""For how long an endpoint that has no room is left alone: the first time, and at most."""
_LACK_BASE_S, _LACK_MAX_S = 10.0, 300.0
"""Likewise one that does not know the model or the route, for requests that need it."""


ReplicaStatus = Literal["ready", "draining", "ejected", "full", "unreachable"]


class Placeable(Protocol):
    """A request, as far as its placement needs to know it."""

    @property
    def request_id(self) -> str:
        """Its name, the same for every attempt."""

    @property
    def prompt(self) -> Prompt:
        """Its prompt."""

    @property
    def sticks_to(self) -> str | None:
        """The one replica that can answer it; None: any."""

    @property
    def needed_tokens(self) -> int:
        """Prompt and longest answer."""

    @property
    def needs(self) -> tuple[str, bytes]:
        """Model and route that a replica has to know."""

    def fits(self, backend: Backend) -> bool:
        """Whether the replicas of a pool can answer it."""

    @property
    def arrival_s(self) -> float:
        """Unix time, seconds."""

    @property
    def tried(self) -> set[str]:
        """Replicas that it must not be sent to again."""

    @property
    def due_s(self) -> float:
        """Its SLO for the first token, or for the response where that has none, seconds."""

    @property
    def tenant(self) -> str:
        """Who is to be served; empty: nobody who is known."""

    @property
    def tenant_share(self) -> float:
        """Share of the service that the tenant is entitled to, in (0, 1]."""

    is_ordered: bool
    """Whether it has been placed before, or held, and so has the key that it waits by."""
    order_key: OrderKey | None
    """That key, Unix time, seconds; None: it waits behind all that are there."""


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
        self._most_in_flight = {one.name: one.max_ongoing for one in cluster.external_pools}
        if cluster.queue is not None:
            # Else engines of ours, which know their own limit, say themselves when they are full.
            own = cluster.own_pools
            self._most_in_flight |= {one.name: one.max_ongoing_requests for one in own}
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
        return now_s

    async def pick(self, asked: Placeable) -> Pick | None:
        """Choose a replica and reserve a place in it; None: there is none left.

        Raises:
            ReplicaFull: All that are left have as many requests in flight as they may.
        """
        started_ns, by_ray = time.perf_counter_ns(), None
        if self._picker.policy.name == RAY_DEFAULT:
            by_ray = await self._ask_ray(asked.tried)
        return self._pick(asked, by_ray, started_ns)

    def pick_now(self, asked: Placeable) -> Pick | None:
        """As `pick`, without a wait: Ray's own router is not asked, and the baseline decides.

        Raises:
            ReplicaFull: As `pick`.
        """
        return self._pick(asked, None, time.perf_counter_ns())

    def _pick(self, asked: Placeable, by_ray: str | None, started_ns: int) -> Pick | None:
        now_s = self.refresh()
        pick = self._decide(asked, now_s, by_ray, started_ns)
        if pick is not None:
            self._reserve(asked, pick, now_s)
        return pick

    def give_key(self, asked: Placeable, expected_wait_s: Callable[[], float]) -> None:
        """Ask the policy for the key of a request that has to wait, where it has none yet.

        Args:
            asked: The request.
            expected_wait_s: For how long that will be, as far as one can tell, seconds; only asked
                where it gets a key.
        """
        picker, now_s = self._picker, self._clock_s()
        runner = picker.deciding(picker.arm_of(asked.request_id))
        rows = self._candidates(asked, now_s)
        if asked.is_ordered or not runner.orders or not len(rows):
            return
        snapshots = self._shown(rows, asked.prompt)
        request = self._request(asked, runner.loaded.predicted_total_tokens)
        decision = runner.decide(replace(request, held_s=expected_wait_s()), snapshots)
        snapshots.release()
        if isinstance(decision, Decision):
            asked.order_key = bounded_key(
                decision.order_key, asked.arrival_s, now_s, self._max_overtaking_s
            )
            asked.is_ordered = True

    def has_room(self) -> bool:
        """Whether any replica takes another request."""
        return bool(len(self._with_room(self._offered(self.refresh()))))

    def fitting(self, asked: Placeable) -> tuple[str, ...]:
        """Names of the pools that can answer a request."""
        return tuple(name for name, one in self._backends.items() if asked.fits(one))

    def windows(self) -> list[dict[str, Any]]:
        """How full each replica is: requests in flight, and how many there may be; None: any."""
        return [
            {
                "replica_id": one.replica_id, "pool": one.pool, "in_flight": one.in_flight.count,
                "max_ongoing": self._most_in_flight.get(one.pool),
            }
            for one in self._table.replicas.values()
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

    def note_begun(self, replica: ReplicaState, asked: Placeable) -> None:
        """Note that a replica has begun to answer a request."""
        self._full.forget((replica.replica_id,))
        if self._lacks:
            for need in asked.needs:
                self._lacks.forget((replica.replica_id, need))

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
        rows = self._offered(self._clock_s())
        if not len(rows):
            return None
        return float(self._table.snapshots(rows, Prompt([0])).columns[:, WAIT_S].min())

    def _decide(
        self, asked: Placeable, now_s: float, by_ray: str | None, started_ns: int
    ) -> Pick | None:
        left = self._candidates(asked, now_s)
        rows = self._with_room(left)
        index = self._index_of(by_ray, rows)
        if not len(rows):
            if len(left):
                raise ReplicaFull("every endpoint has max_ongoing requests in flight")
            self._check_rest(asked, now_s)
            return None
        picker, arm = self._picker, self._picker.arm_of(asked.request_id)
        snapshots = self._shown(rows, asked.prompt)
        request = self._request(asked, picker.deciding(arm).loaded.predicted_total_tokens)
        if index is not None:
            choice = picker.pick_by_ray(request, snapshots, index, started_ns, arm)
        else:
            # Either all that are offered were heard of lately, or none.
            stale = now_s - snapshots.live[0, LIVE_OBSERVED_AT_S] > self._stale_after_s
            last_sent_s = snapshots.last_sent_s
            choice = picker.pick(
                request, snapshots, stale, arm, last_sent_s=last_sent_s, has_key=asked.is_ordered
            )
        snapshots.release()
        if not asked.tried:
            # Only now: a shadow reads them in a thread of its own, and what was sent changes here.
            picker.observe(asked.request_id, choice)
        replica = self._table.at(int(rows[choice.index]))
        order_key = self._order_key(asked, choice, now_s)
        return Pick(now_s, replica, choice, snapshots, index is not None, order_key)

    def _shown(self, rows: IntArray, prompt: Prompt) -> SnapshotTable:
        """What policies see of some replicas, with what may wait there where one looks at it."""
        snapshots = self._table.snapshots(rows, prompt)
        if self._picker.sees_queues:
            # Here and not where a policy looks: one that never decides would let it grow.
            sent, waiting = self._sent, snapshots.live[:, LIVE_NUM_WAITING].copy()
            sent.keep_latest(sent.rows_of(snapshots.replica_ids), waiting)
            snapshots.sent = sent
        return snapshots

    def _order_key(self, asked: Placeable, choice: ReplicaChoice, now_s: float) -> OrderKey | None:
        """Key that a request waits by: it keeps that of its first placement."""
        if asked.is_ordered:
            return asked.order_key
        bound_s = self._max_overtaking_s
        return bounded_key(choice.order_key, asked.arrival_s, now_s, bound_s)

    def _index_of(self, by_ray: str | None, rows: IntArray) -> int | None:
        """Position of Ray's choice among the candidates; None: it chose none of them."""
        if by_ray is None:
            return None
        replica = self._table.replicas.get(by_ray)
        found = [] if replica is None else np.flatnonzero(rows == replica.row).tolist()
        if found:
            return int(found[0])
        if self._ray is not None:
            self._ray.finished(by_ray)
        return None

    def _candidates(self, asked: Placeable, now_s: float) -> IntArray:
        """Rows of the replicas that the request may go to, shape (num,)."""
        rows = self._fitting(asked, self._offered(now_s))
        if not len(rows):
            # Those that fit are stale or ejected, and only others are well.
            rows = self._admitted(self._fitting(asked, self._table.offered(now_s, math.inf)))
        return rows

    def _fitting(self, asked: Placeable, rows: IntArray) -> IntArray:
        """Those of some rows that can answer the request and have not been tried."""
        table = self._table
        if asked.sticks_to is not None:
            known = table.replicas.get(asked.sticks_to)
            rows = rows[rows == known.row] if known else rows[:0]
        if asked.tried:
            tried = [one.row for name in asked.tried if (one := table.replicas.get(name))]
            rows = rows[~np.isin(rows, tried)]
        if self._lacks:
            replicas = [table.at(row) for row in rows.tolist()]
            lacks = [any(self._is_lacking(one, need) for need in asked.needs) for one in replicas]
            knows = ~np.array(lacks, dtype=bool)
            # Where none is known to know it, one is asked: it says so itself.
            if knows.any() or asked.tried:
                rows = rows[knows]
        fitting = self.fitting(asked)
        if len(fitting) < len(self._backends):
            # None may be in flight at the others.
            rows = self._below(
                np.array([np.inf if name in fitting else 0.0 for name in table.pools]), rows
            )
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
                self._lacks.forget(lacking)
                return False
        return self._lacks.left_s(lacking) > 0.0

    def _check_rest(self, asked: Placeable, now_s: float) -> None:
        """Find out whether a request has no replica because all that are left have no room.

        Raises:
            ReplicaFull: That is so.
        """
        if not self._full:
            return
        rows = self._fitting(asked, self._table.offered(now_s, math.inf)).tolist()
        names = [self._table.at(row).replica_id for row in rows]
        rests_s = {name: left_s for name in names if (left_s := self._full.left_s((name,)))}
        if rests_s:
            name = min(rests_s, key=lambda one: rests_s[one])
            reason = "every endpoint has said lately that it has no room"
            raise ReplicaFull(reason, self._full_status[name], rests_s[name])

    def _with_room(self, rows: IntArray) -> IntArray:
        """Rows of the replicas with fewer requests in flight than their pool's `max_ongoing`."""
        if not self._most_in_flight:
            return rows
        pools = self._table.pools
        if len(self._most) != len(pools):  # They never go.
            self._most = np.array([self._most_in_flight.get(name, np.inf) for name in pools])
        return self._below(self._most, rows)

    def _below(self, most: FloatArray, rows: IntArray) -> IntArray:
        """Rows with fewer requests in flight than their pools' replicas may have."""
        out = np.empty_like(rows)
        num = keep_with_room(self._table.state, rows, most, out)
        return rows if num == len(rows) else out[:num]

    def _offered(self, now_s: float) -> IntArray:
        """Replicas to choose from: without those that are ejected, as long as there are others."""
        rows = self._table.offered(now_s, self._stale_after_s)
        self._outliers.keep(self._table.replicas)
        return self._admitted(rows)

    def _admitted(self, rows: IntArray) -> IntArray:
        """Those of some rows that have room and are not ejected.

        Where all that have room are ejected, they are offered all the same.
        """
        if self._full:
            names = [self._table.at(row).replica_id for row in rows.tolist()]
            rows = rows[np.array([not self._full.left_s((name,)) for name in names], dtype=bool)]
        outliers = self._outliers
        if not outliers.watches:
            return rows
        replicas = [self._table.at(row) for row in rows.tolist()]
        admitted = [outliers.admits(r.replica_id, r.in_flight.count) for r in replicas]
        if not any(admitted):
            admitted = [not outliers.ejected_s(r.replica_id) for r in replicas]
        return rows[np.array(admitted)] if any(admitted) else rows

    def _request(self, asked: Placeable, predicted: Callable[[int], float]) -> Request:
        """The request as a policy sees it."""
        context = asked.prompt.num_tokens
        total = max(min(predicted(context), asked.needed_tokens), context + 1)
        # Always a float: compiled policies are compiled anew for other types.
        share = asked.tenant_share
        if self._has_tenants:
            # Orders are made for as many replicas as the scenario has, and here there are others.
            share *= len(self._table.replicas) / self._num_servers
        return Request(asked.arrival_s, context, float(total), asked.due_s, asked.tenant, share)

    def _reserve(self, asked: Placeable, pick: Pick, now_s: float) -> None:
        """Note that the request is on its way, before anything else can be placed."""
        choice, replica = pick.choice, pick.replica
        context = choice.request.context_tokens
        match_tokens = int(pick.snapshots.live[choice.index, LIVE_MATCH_TOKENS])
        output_tokens = choice.request.predicted_total_tokens - context
        replica.send(asked.request_id, asked.prompt, match_tokens, output_tokens, now_s)
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
        every = [one for backend in self._backends.values() for one in backend.ray_replicas()]
        self._ray.update(every)
        if len(every) <= len(tried):
            return None
        chosen: str = await self._ray.choose()
        return chosen
