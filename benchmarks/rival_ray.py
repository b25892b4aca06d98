"""The two request routers of Ray Serve, in this process, before replicas that only count."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTreeActor
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.common import PendingRequest

DEPLOYMENT = DeploymentID("parity", "parity")


class Replica:
    """What a request router asks of a running replica."""

    node_id, availability_zone, multiplexed_model_ids, is_cross_language = "n", None, set(), False
    max_ongoing_requests = 1 << 20

    def __init__(self, index: int) -> None:
        self.replica_id = ReplicaID(str(index), DEPLOYMENT)
        self.num_ongoing, self.num_polls = 0, 0

    def push_proxy_handle(self, handle: object) -> None:
        """Nothing is sent."""

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """Requests in flight."""
        return self.num_ongoing


class RayFleet:
    """As `Fleet`, with a request router of Ray Serve in place of a process."""

    def __init__(self, policy: str, num_replicas: int, knobs: Mapping[str, float]) -> None:
        """Make the router by its class name; `knobs` are those of `initialize_state`."""
        state: dict[str, Any] = dict(knobs)
        classes = (PowerOfTwoChoicesRequestRouter, PrefixCacheAffinityRouter)
        made = next(one for one in classes if one.__name__ == policy)
        self._router = made(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=False,
        )
        if made is PrefixCacheAffinityRouter:
            # By default it registers the actor with Serve's controller; here there is none.
            state["tree_actor"] = PrefixTreeActor.remote()
        self._router.initialize_state(**state)
        self.engines = [Replica(index) for index in range(num_replicas)]
        self._router.update_replicas(self.engines)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Requests in flight at each replica."""
        return tuple(replica.num_ongoing for replica in self.engines)

    async def send(self, prompt: str) -> int:
        """Have a prompt routed; return the index of the replica."""
        metadata = RequestMetadata(request_id=os.urandom(8).hex(), internal_request_id=prompt)
        request = PendingRequest([SimpleNamespace(prompt=prompt)], {}, metadata)
        chosen = await self._router._choose_replica_for_request(request)
        self._router.on_request_routed(request, chosen.replica_id, None)
        chosen.num_ongoing += 1
        return self.engines.index(chosen)

    async def finish(self, engine: int, place: int) -> None:
        """End one request of a replica."""
        self.engines[engine].num_ongoing -= 1

    async def drain(self) -> None:
        """End all requests."""
        for replica in self.engines:
            replica.num_ongoing = 0

    async def answer_polls(self) -> None:
        """Replicas are asked for their queues at each decision."""
