"""Routers of Ray Serve.

`ChosenReplicaRouter` calls one replica of a pool of ours by name and knows which there are; what
callers ask does not go through it. `PolicyRequestRouter` decides by policy within any one
deployment that names it in its `request_router_config`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from serve_app import ray_private
from serve_app.cluster import CircuitBreakerSettings, EngineProfile
from serve_app.engines.tokenizer import EstimatingTokenizer, plain_chat
from serve_app.gateway import router_registry
from serve_app.gateway.backends import profile_of, status_of
from serve_app.gateway.clocks import RemoteClocks, steady_unix_s
from serve_app.gateway.generation import ReplicaFailed, ReplicaFull
from serve_app.gateway.replicas import Prompt, ReplicaTable
from serve_app.policy.manager import PolicyManager
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.types import Request

logger = logging.getLogger(__name__)


class ChosenReplicaRouter(RequestRouter):
    """Sends every call to the replica named by its keyword `replica_id`.

    Serve's own procedure hands a replica that was found to the oldest call that waits, or tries
    again until one is found. Here a replica that is gone or full is an error at once. For the same
    reason `_choose_replica_for_request` is replaced, which is where a call and its replica meet.

    One instance lives in each process that has a handle to the pool; the gateway finds its own in
    `serve_app.gateway.router_registry`. Serve runs it in a thread of its own, which
    only replaces `live` and counts `version`.
    """

    live: tuple[RunningReplica, ...] = ()
    """Replicas that Serve knows of."""
    version: int = 0
    """Grows with every change of `live` or of what its replicas publish."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Let the gateway of this process find the router."""
        router_registry.ROUTERS[self.app_name, self._deployment_id.name] = self

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that Serve knows of."""
        super().update_replicas(replicas)
        self.live = tuple(replicas)
        self.version += 1

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, if it is there."""
        assert pending_request is not None
        chosen = pending_request.kwargs["replica_id"]
        return [[r for r in candidate_replicas if r.replica_id.unique_id == chosen]]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        ((*candidates,),) = await self.choose_replicas(self._replicas_list, pending_request)
        chosen = pending_request.kwargs["replica_id"]
        if not candidates:
            raise ReplicaFailed(f"replica {chosen} is gone")
        if is_retry:
            raise ReplicaFull(f"replica {chosen} takes no more requests for now")
        return candidates[0]


class PolicyRequestRouter(FIFOMixin, RequestRouter):
    """Lets a policy choose among the replicas of one deployment, ours or any other.

    Name it as `request_router_class="serve_app.router:PolicyRequestRouter"`; its
    `request_router_kwargs` are those of `initialize_state`. Replicas that publish what
    `EngineReplica` does are known by that; of others the router knows what it sent itself.

    Serve makes one router per process that holds a handle, and each knows only its own requests.
    """

    def initialize_state(
        self,
        policy: str = "champion",
        scenario: str = "conversation_mixed_gpus",
        baseline: str = "marginal_delay",
        explore_fraction: float = 0.0,
        profile: Mapping[str, Any] | None = None,
        circuit_breaker: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the policy, with settings as `serve_app.cluster.Cluster` has them.

        `profile` is the speed of replicas that publish none, fields of `EngineProfile`.

        Raises:
            ValueError: One of them is not what it should be.
        """
        self._settings = CircuitBreakerSettings(**(circuit_breaker or {}))
        self._profile = None if profile is None else EngineProfile(**profile)
        rng = np.random.default_rng()
        manager = PolicyManager(scenario, baseline, self._settings, rng)
        manager.switch(policy, explore_fraction, may_be_missing=True)
        self._picker = manager.picker
        self._table = ReplicaTable(load_scenario(scenario).mean_lengths_tokens)
        self._clocks = RemoteClocks()
        self._tokenizer = EstimatingTokenizer()
        self._unsent: dict[str, PendingRequest] = {}
        self._reserved_at: dict[str, str] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates one by one, from the cheapest to the costliest."""
        if pending_request is None or len(candidate_replicas) < 2:
            return [candidate_replicas]
        now_s = steady_unix_s()
        for replica in candidate_replicas:
            if not self._track(replica, now_s):
                return [candidate_replicas]  # Nothing is known of its speed: any will do.
        by_id = {r.replica_id.unique_id: r for r in candidate_replicas}
        self._table.keep("", by_id)
        self._clocks.keep(by_id)
        offered = self._table.offered(now_s, self._settings.stale_after_s)
        prompt = Prompt(self._token_ids(pending_request))
        length = len(prompt.token_ids)
        request = Request(now_s, length, self._picker.policy.loaded.predicted_total_tokens(length))
        snapshots = self._table.snapshots(offered, prompt)
        choice = self._picker.pick(request, snapshots, last_sent_s=snapshots.last_sent_s)
        # Reserved at once: the next request may be placed before this one is on its way.
        ids = snapshots.candidates.replica_ids
        self._reserve(pending_request, ids[choice.index], prompt)
        order = list(range(len(ids)))
        if choice.scores is not None:
            order = np.argsort(choice.scores, kind="stable").tolist()
        order.remove(choice.index)
        return [[by_id[ids[i]]] for i in (choice.index, *order)]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ray_private.ReplicaID,
        result: ReplicaResult,
    ) -> None:
        """Reserve a place at the replica that got the request, which may be another's pick."""
        prompt = Prompt(self._token_ids(pending_request))
        self._reserve(pending_request, replica_id.unique_id, prompt)
        self._unsent.pop(pending_request.metadata.internal_request_id, None)

    def on_request_completed(
        self, replica_id: ray_private.ReplicaID, internal_request_id: str
    ) -> None:
        """Give its place back."""
        self._unsent.pop(internal_request_id, None)
        self._close(internal_request_id)

    def _reserve(self, pending_request: PendingRequest, replica_id: str, prompt: Prompt) -> None:
        request_id = pending_request.metadata.internal_request_id
        self._close(request_id)
        for other_id, other in list(self._unsent.items()):
            if other.future.cancelled():
                del self._unsent[other_id]
                self._close(other_id)
        self._unsent[request_id] = pending_request
        state = self._table.replicas.get(replica_id)
        if state is None:
            return
        length = len(prompt.token_ids)
        output = max(self._picker.policy.loaded.predicted_total_tokens(length) - length, 1.0)
        state.send(request_id, prompt, state.match_tokens(prompt), output, steady_unix_s())
        self._reserved_at[request_id] = replica_id

    def _close(self, request_id: str) -> None:
        state = self._table.replicas.get(self._reserved_at.pop(request_id, ""))
        if state is not None:
            state.in_flight.close(request_id, steady_unix_s())

    def _track(self, replica: RunningReplica, now_s: float) -> bool:
        profile = profile_of(replica) or self._profile
        if profile is None:
            return False
        replica_id = replica.replica_id.unique_id
        state = self._table.add(replica_id, "", profile, 0, now_s)
        status = status_of(replica)
        if status is not None:
            state.publish(self._clocks.to_ours(replica_id, status, now_s))
        return True

    def _token_ids(self, pending_request: PendingRequest) -> list[int]:
        """Count the tokens of what looks like a prompt among the arguments."""
        for value in (*pending_request.args, *pending_request.kwargs.values()):
            fields = value if isinstance(value, Mapping) else _fields(value)
            for name in ("token_ids", "prompt"):
                prompt = _prompt(fields.get(name))
                if isinstance(prompt, str):
                    return self._tokenizer.encode(prompt) or [0]
                if prompt is not None:
                    return prompt
            if isinstance(fields.get("messages"), list | tuple):
                messages = [_fields(message) for message in fields["messages"]]
                texts = [{"role": m.get("role", ""), "content": m.get("content")} for m in messages]
                return self._tokenizer.encode(plain_chat(texts)) or [0]
        return [0]


def _prompt(given: object) -> str | list[int] | None:
    """Read a prompt as OpenAI's API has it: a text, its token ids, or a list of one text."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list | tuple) or not given:
        return None
    if isinstance(given[0], int):
        return list(given)
    return given[0] if len(given) == 1 and isinstance(given[0], str) else None


def _fields(value: object) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if hasattr(value, "model_fields_set"):
        return vars(value)
    return asdict(value) if hasattr(value, "__dataclass_fields__") else {}  # type: ignore[call-overload]
