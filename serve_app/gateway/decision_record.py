"""One decision: as an attempt needs it, and as a row of the decision log."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serve_app.gateway.replicas import ReplicaState
from serve_app.policy.runner import ReplicaChoice
from tokenyard.routing.observation import WAIT_S
from tokenyard.routing.snapshot_table import SnapshotTable
from tokenyard.routing.types import OrderKey

# Not frozen: that takes four times as long to make, and every request makes one of each.


@dataclass(slots=True)
class Pick:
    """The replica of an attempt, and what was known when it was chosen."""

    time_s: float
    """When that was, Unix time, seconds."""
    replica: ReplicaState
    choice: ReplicaChoice
    snapshots: SnapshotTable
    by_ray: bool
    order_key: OrderKey | None
    """Key that the request waits by, Unix time, seconds; None: it waits behind all others."""

    def stand_ins(self) -> list[str]:
        """Other replicas of the same pool that were offered, the best first.

        The best have the lowest cost; where the policy tells none, the shortest expected wait.
        """
        candidates, costs = self.snapshots.candidates, self.choice.scores
        if costs is None:
            costs = self.snapshots.columns[:, WAIT_S]
        return [
            candidates.replica_ids[index]
            for index in np.argsort(costs, kind="stable").tolist()
            if index != self.choice.index and candidates.pools[index] == self.replica.pool
        ]


@dataclass(slots=True, eq=False)
class DecisionRecord:
    """A decision and the end of its request, as the event loop queues it for the log."""

    decision_id: str
    request_id: str
    attempt: int
    """0 for the first time that the request was placed."""
    time_s: float
    """Unix time of the decision, seconds."""
    service_class: str
    choice: ReplicaChoice
    pools: tuple[str, ...]
    """Pool of every candidate."""
    outcome: str
    """`stop`, `length`, `abort` (the client left), `timeout`, `cut_off` (the gateway ended),
    `failed`, `rejected` (the endpoint has something against the request); `unknown` where only the
    choice was asked for."""
    output_tokens: int
    ttft_s: float
    """Arrival to first token; NaN: there was none."""
    response_s: float
    """Arrival to the end; NaN: it was not completed."""
    order_key: OrderKey | None = None
    """Key that it waited by, Unix time, seconds; None: behind all that waited."""
    num_sends: int = 0
    """How often the attempt sent the request: 2 where a kept connection turned out to be closed."""
