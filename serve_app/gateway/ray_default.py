"""The policy `ray_default`: Ray Serve's own choice among the replicas of all pools."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, RunningReplica

from serve_app import ray_private


class RayDefault:
    """Ray Serve's power of two choices (its own code) over the replicas of all pools.

    Serve runs it within one deployment. Here it is given the replicas of several, and is told what
    a handle would tell it: what was sent, what came back, and how long queues are.
    """

    def __init__(self) -> None:
        self._router = ray_private.PowerOfTwoChoicesRequestRouter(
            deployment_id=ray_private.DeploymentID("all-pools", "tokenyard"),
            handle_source=ray_private.DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            self_node_id=None,
            prefer_local_node_routing=False,
            prefer_local_az_routing=False,
            self_availability_zone=None,
        )

    def update(self, replicas: Sequence[RunningReplica]) -> None:
        """Take the replicas of all pools."""
        replica_ids = self._router.curr_replicas
        if {r.replica_id for r in replicas} != set(replica_ids):
            self._router.update_replicas(list(replicas))

    async def choose(self) -> str:
        """Return the id of the replica that Ray would choose."""
        metadata = ray_private.RequestMetadata(
            request_id=uuid.uuid4().hex, internal_request_id=uuid.uuid4().hex
        )
        pending = PendingRequest(args=[], kwargs={}, metadata=metadata)
        replica = await ray_private.choose_replica(self._router, pending)
        self._router.on_send_request(replica.replica_id)
        chosen: str = replica.replica_id.unique_id
        return chosen

    def finished(self, replica_id: str) -> None:
        """Note that a request has left a replica."""
        for current in self._router.curr_replicas:
            if current.unique_id == replica_id:
                self._router.decrement_queue_len_cache(current)
                return

    def died(self, replica_id: str) -> None:
        """Note that a replica does not answer."""
        for current in list(self._router.curr_replicas):
            if current.unique_id == replica_id:
                self._router.on_replica_actor_died(current)
