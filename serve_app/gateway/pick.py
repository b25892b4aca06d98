"""The outcome of a placement: the replica of an attempt, and what was known about it."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.gateway.replicas import ReplicaState
from serve_app.policy.runner import ReplicaChoice
from tokenyard.routing.snapshot_table import SnapshotTable
from tokenyard.routing.types import OrderKey


# Not frozen: that takes four times as long to make, and every request makes one.
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
