"""Which replicas a request can go to now: those that fit it, are healthy, and have room."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from serve_app.cluster import Cluster
from serve_app.gateway.answer import Answer
from serve_app.gateway.exchange import Backend
from serve_app.gateway.generation import ReplicaFull
from serve_app.gateway.metrics import Metrics
from serve_app.gateway.outliers import BackOff, OutlierDetector
from serve_app.gateway.replicas import ReplicaState, ReplicaTable
from tokenyard.routing.snapshot_table import keep_with_room
from tokenyard.types import FloatArray, IntArray

logger = logging.getLogger(__name__)

_FULL_BASE_S, _FULL_MAX_S = 0.5, 60.0
"""Time for which a full endpoint is left alone: the first time, and at most."""
_LACK_BASE_S, _LACK_MAX_S = 10.0, 300.0
"""The same for one that does not know the model or the route, for requests that need it."""

ReplicaStatus = Literal["ready", "draining", "ejected", "full", "unreachable"]


class Availability:
    """Remembers which replicas fail, are full or lack something, and leaves those out."""

    def __init__(
        self,
        cluster: Cluster,
        backends: Mapping[str, Backend],
        table: ReplicaTable,
        outliers: OutlierDetector,
        metrics: Metrics,
    ) -> None:
        self.stale_after_s = cluster.circuit_breaker.stale_after_s
        self._most_in_flight = {pool.name: pool.max_ongoing for pool in cluster.external_pools}
        if cluster.queue is not None:
            # Without a queue our own engines say themselves when they are full.
            own = cluster.own_pools
            self._most_in_flight |= {pool.name: pool.max_ongoing_requests for pool in own}
        self._most: FloatArray = np.zeros(0)
        """Requests that one replica may have in flight, by the number of its pool."""
        none: IntArray = np.zeros(0, dtype=np.int64)
        keep_with_room(table.state, none, self._most, none)  # Loads the compiled function.
        self._backends, self._table = backends, table
        self.outliers, self._metrics = outliers, metrics
        self.full = BackOff(_FULL_BASE_S, _FULL_MAX_S, outliers.clock_s)
        self._full_status: dict[str, int] = {}
        """Status of the last answer of each endpoint that had no room."""
        self.lacks = BackOff(_LACK_BASE_S, _LACK_MAX_S, outliers.clock_s)
        """What replicas lack, by replica and by model or route."""
        self._listed: dict[tuple[str, str | bytes], tuple[str, frozenset[str] | None]] = {}
        """Name of a model that a replica did not know, and the names that it listed then."""

    def candidates(self, answer: Answer, now_s: float) -> IntArray:
        """Rows of the replicas that the request may go to, whether or not they have room."""
        sender = answer.request.sender
        if sender is not None and sender.serves is not None:
            replica = self._table.replicas.get(sender.serves)
            return np.array([] if replica is None else [replica.row], dtype=np.int64)
        fresh = self._table.offered(now_s, self.stale_after_s)
        rows = self._fitting(answer, self._admitted(fresh))
        if not len(rows):
            # Those that fit are stale or ejected, and only others are well.
            rows = self._admitted(self._fitting(answer, self._table.offered(now_s, math.inf)))
        return rows

    def admitted(self, now_s: float) -> IntArray:
        """Rows of the healthy replicas that have not said that they are full."""
        return self._admitted(self._table.offered(now_s, self.stale_after_s))

    def with_room(self, rows: IntArray, most: FloatArray | None = None) -> IntArray:
        """Rows of the replicas with fewer requests in flight than they may have.

        `most` is the limit of one replica, by the number of its pool; None: the pool's
        `max_ongoing`.
        """
        if most is None:
            if not self._most_in_flight:
                return rows
            pools = self._table.pools
            if len(self._most) != len(pools):  # Pools are only ever added.
                self._most = np.array([self._most_in_flight.get(name, np.inf) for name in pools])
            most = self._most
        out = np.empty_like(rows)
        num = keep_with_room(self._table.state, rows, most, out)
        return rows if num == len(rows) else out[:num]

    def fitting_pools(self, answer: Answer) -> tuple[str, ...]:
        """Names of the pools that can answer a request."""
        return tuple(name for name, pool in self._backends.items() if answer.fits(pool))

    def check_not_full(self, answer: Answer, now_s: float) -> None:
        """Raise ReplicaFull where all remaining replicas for a request are full."""
        if not self.full:
            return
        rows = self._fitting(answer, self._table.offered(now_s, math.inf)).tolist()
        names = [self._table.at(row).replica_id for row in rows]
        left_s = {name: rest_s for name in names if (rest_s := self.full.left_s((name,)))}
        if left_s:
            name = min(left_s, key=left_s.__getitem__)
            reason = "every endpoint has said lately that it has no room"
            raise ReplicaFull(reason, self._full_status[name], left_s[name])

    def windows(self) -> list[dict[str, Any]]:
        """Requests in flight at each replica, and their limit; None: there is none."""
        return [
            {
                "replica_id": replica.replica_id, "pool": replica.pool,
                "in_flight": replica.in_flight.count,
                "max_ongoing": self._most_in_flight.get(replica.pool),
            }
            for replica in self._table.replicas.values()
        ]  # fmt: skip

    def state_of(self, replica: ReplicaState, now_s: float) -> ReplicaStatus:
        """Whether a replica takes requests at a Unix time, seconds, or why not."""
        if replica.draining or not replica.status.accepting:
            return "draining"
        if self.outliers.ejected_s(replica.replica_id):
            return "ejected"
        if self.full.left_s((replica.replica_id,)):
            return "full"
        # Our own engines publish by way of Ray Serve, whose controller may be late.
        is_old = now_s - replica.status.observed_at_s > self.stale_after_s
        return "unreachable" if is_old and self._backends[replica.pool].takes_any else "ready"

    def begin(self, answer: Answer, replica: ReplicaState, sent_s: float) -> None:
        """Note that a replica has begun to answer; `sent_s` is by the detector's clock."""
        if self.outliers.records or self.outliers.in_a_row:
            self.outliers.begin(replica.replica_id, sent_s)
        self.full.pop((replica.replica_id,), None)
        if self.lacks:
            for need in answer.needs:
                self.lacks.pop((replica.replica_id, need), None)

    def fail(self, replica: ReplicaState, sent_s: float) -> None:
        """Count a failed request against a replica; `sent_s` is by the detector's clock."""
        if self.outliers.fail(replica.replica_id, sent_s):
            ejected_s = self.outliers.ejected_s(replica.replica_id)
            logger.warning("replica %s is ejected for %.1f s", replica.replica_id, ejected_s)
            self._metrics.ejections.labels(replica.pool).inc()

    def note_full(self, replica: ReplicaState, error: ReplicaFull) -> None:
        """Avoid a full endpoint for a while; engines of ours publish their load instead."""
        if self._backends[replica.pool].takes_any:
            self.full.refuse((replica.replica_id,), error.retry_after_s)
            self._full_status[replica.replica_id] = error.status

    def note_lack(self, replica: ReplicaState, needs: tuple[str, bytes], model: str | None) -> None:
        """Stop sending a replica requests for a model or a route that it does not know.

        `model` is the name by which it was asked for the model; None: it lacks the route.
        """
        lacking = (replica.replica_id, needs[1] if model is None else needs[0])
        self.lacks.refuse(lacking)
        if model is not None:
            self._listed[lacking] = model, replica.info.models

    def _fitting(self, answer: Answer, rows: IntArray) -> IntArray:
        """Those of some rows that can answer the request and have not been tried."""
        table = self._table
        sticks_to = answer.request.sticks_to
        if sticks_to is not None:
            holder = table.replicas.get(sticks_to)
            rows = rows[rows == holder.row] if holder else rows[:0]
        sender = answer.request.sender
        if sender is not None and sender.allowed is not None:
            names = [table.at(row).replica_id for row in rows.tolist()]
            rows = rows[np.array([name in sender.allowed for name in names], dtype=bool)]
        if answer.tried:
            tried = [replica.row for name in answer.tried if (replica := table.replicas.get(name))]
            rows = rows[~np.isin(rows, tried)]
        if self.lacks:
            needs = answer.needs
            lacks = [
                any(self._is_lacking(table.at(row), need) for need in needs)
                for row in rows.tolist()
            ]
            knows = ~np.array(lacks, dtype=bool)
            # Where none is known to know it, one is asked: it says so itself.
            if knows.any() or answer.tried:
                rows = rows[knows]
        fitting = self.fitting_pools(answer)
        if len(fitting) < len(self._backends):
            # None may be in flight at the others.
            most = [np.inf if name in fitting else 0.0 for name in table.pools]
            rows = self.with_room(rows, np.array(most))
        return rows

    def _is_lacking(self, replica: ReplicaState, need: str | bytes) -> bool:
        """Whether a replica has said that it does not know a model or a route.

        What it lists since then says so for certain; else it is asked again after a while.
        """
        lacking = (replica.replica_id, need)
        if lacking not in self.lacks:
            return False
        model, listed_then = self._listed.get(lacking, (None, None))
        listed = replica.info.models
        if model is not None and listed is not None:
            if model not in listed:
                return True
            if listed != listed_then:
                del self.lacks[lacking]
                return False
        return self.lacks.left_s(lacking) > 0.0

    def _admitted(self, rows: IntArray) -> IntArray:
        """Those of some rows that have room and are not ejected.

        Where all that have room are ejected, they are offered all the same.
        """
        table, outliers = self._table, self.outliers
        if self.full:
            has_room = [not self.full.left_s((table.at(row).replica_id,)) for row in rows.tolist()]
            rows = rows[np.array(has_room, dtype=bool)]
        if not outliers.records:
            return rows
        replicas = [table.at(row) for row in rows.tolist()]
        admitted = [outliers.admits(r.replica_id, r.in_flight.count) for r in replicas]
        if not any(admitted):
            admitted = [not outliers.ejected_s(r.replica_id) for r in replicas]
        return rows[np.array(admitted)] if any(admitted) else rows
