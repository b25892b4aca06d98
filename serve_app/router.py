"""Routers of Ray Serve.

`ChosenReplicaRouter` calls one replica of a pool of ours by name and knows which there are; what
callers ask does not go through it. `PolicyRequestRouter` decides by policy within any one
deployment that names it in its `request_router_config`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray.exceptions import TaskCancelledError
from ray.serve.exceptions import RequestCancelledError
from ray.serve.request_router import PendingRequest, ReplicaResult, RequestRouter, RunningReplica

from serve_app import ray_private
from serve_app.cluster import Cluster, ExternalPool, Limits
from serve_app.engines.base import EngineStatus
from serve_app.engines.tokenizer import EstimatingTokenizer, plain_chat
from serve_app.gateway import router_registry
from serve_app.gateway.backends import status_of
from serve_app.gateway.clocks import RemoteClocks
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.delivery import Delivery
from serve_app.gateway.endpoint_speed import SHARE_EVERY_S, EndpointSpeed
from serve_app.gateway.exchange import Attempt, Backend, Call, InferenceRequest
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.generation import (
    Refused,
    ReplicaFailed,
    ReplicaFull,
    ReplicaRefused,
    RequestRejected,
    Unserved,
)
from serve_app.gateway.replicas import ReplicaState, ReplicaTable, learn_speeds
from serve_app.policy.manager import PolicyManager
from tokenyard.perf.online import PoolEstimator

logger = logging.getLogger(__name__)

_ANY = "any"
"""Name of the model: a deployment has one, whatever callers call it."""
_OF_PROMPT = {"token_ids", "prompt", "messages"}
_EVENTS, _JSON = b"text/event-stream", b"application/json"
_TOKEN = b'data: {"choices": [{"text": "."}]}\n\n'
"""What a piece of a stream counts as that is not of OpenAI's API."""
_UNLIMITED, _DAY_S = 1_000_000_000, 86_400.0
"""Serve limits what is in flight, and for how long."""
_LOOK_EVERY_S, _UNSENT_S, _UNREAD_S = 0.1, 5.0, 5.0
"""Time from one look at what replicas publish to the next; until a request that was chosen a
replica for counts as cancelled on its way there; and until an answer whose replica has ended it
counts as ended, though its caller has not taken all of it."""


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


class PolicyRequestRouter(RequestRouter):
    """Lets a policy choose among the replicas of one deployment, ours or any other.

    Name it as `request_router_class="serve_app.router:PolicyRequestRouter"`; its
    `request_router_kwargs` are those of `initialize_state`. It is a gateway without a data path:
    requests are placed, logged and learned from as there. Replicas that publish what
    `EngineReplica` does are known by that; of others the router knows what it sent, and what was
    streamed back.

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
        decision_log: str | None = None,
        prefix_block_tokens: int = 16,
    ) -> None:
        """Make the policy, with settings as `serve_app.cluster.Cluster` has them.

        `profile` is what is believed of the speed of replicas until their streams show it.
        `decision_log` is a folder on the machine of whoever holds a handle.

        Raises:
            ValueError: One of them is not what it should be.
        """
        pool = ExternalPool(
            name="replicas", kind="external", model=_ANY, allowed=("*",), profile=profile,
            prefix_block_tokens=prefix_block_tokens, max_ongoing=_UNLIMITED,
        )  # fmt: skip
        cluster = Cluster(
            name=self._deployment_id.name, description="A deployment of Ray Serve.",
            served_model=_ANY, scenario=scenario, baseline=baseline, pools=(pool,),
            limits=Limits(max_in_flight=_UNLIMITED, timeout_s=_DAY_S),
            circuit_breaker=circuit_breaker or {},
        )  # fmt: skip
        rng = np.random.default_rng()
        manager = PolicyManager(scenario, baseline, cluster.circuit_breaker, rng)
        manager.switch(policy, explore_fraction, may_be_missing=True)
        log = None if decision_log is None else DecisionLog(Path(decision_log))
        backends = {pool.name: _Replicas(pool, self)}
        self._gateway = Gateway(cluster, manager, backends, log=log)
        self._tokenizer = EstimatingTokenizer()
        self._calls: dict[int, _Call] = {}
        """Of requests under way, which each call holds, by their identity: ids may be shared."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates one by one, from the cheapest to the costliest."""
        if pending_request is None:
            return [candidate_replicas]
        call = self._calls.get(id(pending_request))
        if call is None:
            call = self._open(pending_request)
        call.watch_future()
        order = await asyncio.shield(call.order)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = [[by_id.pop(name)] for name in order if name in by_id]
        return [*ranked, [*by_id.values()]] if by_id else ranked

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ray_private.ReplicaID,
        result: ReplicaResult,
    ) -> None:
        """Follow the answer of the replica that got the request, which may be a stand-in."""
        if (call := self._calls.get(id(pending_request))) is not None:
            call.follow(replica_id.unique_id, result)

    def _open(self, pending: PendingRequest) -> _Call:
        """Have the gateway place a request."""
        body = _body_of(pending)
        call = self._calls[id(pending)] = _Call(pending)
        path = b"/v1/chat/completions" if "messages" in body else b"/v1/completions"
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        request = InferenceRequest(
            pending.metadata.request_id, self._token_ids(body),
            most if isinstance(most, int) else 0, Call(path, b"", b"", bool(body.get("stream"))),
            sender=call,
        )  # fmt: skip
        call.start(self._serve(request, call), lambda: self._calls.pop(id(pending)))
        return call

    async def _serve(self, request: InferenceRequest, call: _Call) -> None:
        try:
            service_class = self._gateway.cluster.classes[0]
            await self._gateway.serve(request, service_class, call)
        except (Refused, Unserved, RequestRejected) as error:
            logger.debug("request %s: %s", request.request_id, error)  # Serve tells its caller.
        finally:
            if not call.order.done():
                call.order.set_result([])  # Any will do.

    def _token_ids(self, body: Mapping[str, Any]) -> Sequence[int]:
        """Count the tokens of a prompt."""
        for name in ("token_ids", "prompt"):
            prompt = _prompt(body.get(name))
            if isinstance(prompt, str):
                return self._tokenizer.encode(prompt) or [0]
            if prompt is not None:
                return prompt
        if isinstance(body.get("messages"), list | tuple):
            messages = [_fields(message) for message in body["messages"]]
            texts = [{"role": m.get("role", ""), "content": m.get("content")} for m in messages]
            return self._tokenizer.encode(plain_chat(texts)) or [0]
        return [0]


class _Call(Delivery):
    """A request that Serve delivers; all but `watch_future` and `follow` is of a delivery."""

    def __init__(self, pending: PendingRequest) -> None:
        super().__init__()
        self._pending, self._loop = pending, asyncio.get_running_loop()
        self._watched: asyncio.Future[Any] | None = None
        self._is_routed = self._has_head = False
        self.order: asyncio.Future[list[str]] = self._loop.create_future()
        """Replicas from the cheapest to the costliest; none: the policy was not asked."""

    def watch_future(self) -> None:
        """Give the place up where Serve gives the request up before a replica has it."""
        if self._pending.future is not self._watched:
            self._watched = self._pending.future
            self._watched.add_done_callback(self._note_choice)

    def place(self, backend: Backend, attempt: Attempt, replica_ids: Sequence[str]) -> None:
        """Tell the router: see `Delivery.place`."""
        self.order.set_result([*replica_ids])

    def follow(self, replica_id: str, result: ReplicaResult) -> None:
        """Watch the answer of a replica."""
        self._is_routed, tell = True, self._loop.call_soon_threadsafe
        self.note_other(replica_id, ReplicaRefused("a replica had no room"))
        ray_private.watch(
            result, lambda piece: tell(self._take, piece), lambda error: tell(self._finish, error)
        )

        def end(value: object) -> None:
            # A caller who takes pieces more slowly than the replica makes them sees them still.
            wait_s = _UNREAD_S if self._pending.metadata.is_streaming else 0.0
            self._loop.call_later(wait_s, self._finish, value)

        result.add_done_callback(lambda value: tell(end, value))

    def _note_choice(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self.leave()
        else:
            self._loop.call_later(_UNSENT_S, self._check_sent)

    def _check_sent(self) -> None:
        """Give up what was cancelled on its way; what a replica refused has another future."""
        if not self._is_routed and self._pending.future.done():
            self.leave()

    def _take(self, piece: object) -> None:
        """Take a piece of a stream: of an answer by OpenAI's API, or one token of any other."""
        for part in piece if isinstance(piece, list) else [piece]:
            status, kind, data = _part_of(part)
            if not self._has_head:
                self._has_head = True
                self.show_head(((b":status", b"%d" % status), (b"content-type", kind)))
            self.show_body(data)
            if kind == _JSON:
                self.show_end()  # It is whole: its caller may not ask whether more comes.

    def _finish(self, end: object) -> None:
        # What ends a replica's stream comes wrapped; it may be that its caller has left.
        end = getattr(end, "cause", None) or end
        if isinstance(end, asyncio.CancelledError | RequestCancelledError | TaskCancelledError):
            self.leave()
        elif isinstance(end, Exception) and not isinstance(end, StopAsyncIteration):
            self.show_failure(ReplicaFailed(f"a replica failed: {type(end).__name__}"))
        elif self._has_head:
            self.show_end()
        else:
            self.show_head(((b":status", b"200"),))
            self.show_end(has_body=False)


class _Replicas(Backend):
    """The replicas of a deployment, as a pool of the gateway's."""

    takes_any = True
    max_model_tokens: float = math.inf

    def __init__(self, pool: ExternalPool, router: RequestRouter) -> None:
        self.name, self._pool, self._router = pool.name, pool, router
        is_known = pool.profile is not None
        self._estimator = PoolEstimator(pool.prior.iteration if is_known else None)
        self._clocks = RemoteClocks()
        self._seen: list[RunningReplica] | None = None
        self._look_at_s = self._share_at_s = 0.0

    def refresh(self, table: ReplicaTable, now_s: float) -> None:
        """Take over which replicas there are, and what they publish."""
        replicas = self._router._replicas_list
        if replicas is self._seen and now_s < self._look_at_s:
            return
        self._seen, self._look_at_s = replicas, now_s + _LOOK_EVERY_S
        by_id = {replica.replica_id.unique_id: replica for replica in replicas}
        gone = table.replicas.keys() - by_id.keys()
        for name in gone:
            self._estimator.drop(name)
        table.keep(self.name, by_id)
        self._clocks.keep(by_id)
        for name, replica in by_id.items():
            state = table.replicas.get(name) or self._add(name, table, now_s)
            status = status_of(replica)
            if status is not None:
                status = self._clocks.to_ours(name, status, now_s)
            else:
                held = min(state.in_flight.held_tokens / state.profile.kv_capacity_tokens, 1.0)
                status = EngineStatus(0, state.in_flight.count, held, now_s)
            state.publish(status)
        if now_s >= self._share_at_s:
            self._share_at_s = now_s + SHARE_EVERY_S
            learn_speeds(table.replicas.values(), self._estimator)

    def _add(self, name: str, table: ReplicaTable, now_s: float) -> ReplicaState:
        speed = EndpointSpeed.of_endpoint(name, self._pool, self._estimator)
        blocks = self._pool.prefix_block_tokens
        state = table.add(name, self.name, speed.profile, blocks, now_s)
        state.estimate_with(speed)
        return state

    def ray_replicas(self) -> tuple[Any, ...]:
        """None: Ray's own router would be named in this one's place."""
        return ()

    async def answer(self, replica_id: str, attempt: Attempt) -> None:
        """Never: Serve delivers all requests."""
        raise NotImplementedError


def _body_of(pending: PendingRequest) -> Mapping[str, Any]:
    """Return the fields of the argument that looks like a request."""
    arguments = (*pending.args, *pending.kwargs.values())
    bodies = [value if isinstance(value, Mapping) else _fields(value) for value in arguments]
    return next((body for body in bodies if _OF_PROMPT & body.keys()), {})


def _part_of(part: object) -> tuple[int, bytes, bytes]:
    """Return a piece of a stream as HTTP has it: a status, the kind of the body, and bytes."""
    if isinstance(part, str | bytes):
        data = part.encode() if isinstance(part, str) else part
        if data.startswith((b"data:", b"event:", b":")):
            return 200, _EVENTS, data
    elif hasattr(part, "model_dump_json"):
        code = getattr(getattr(part, "error", None), "code", 200)
        data = part.model_dump_json().encode()
        return code if isinstance(code, int) else 500, _JSON, data
    return 200, _EVENTS, _TOKEN


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
    if hasattr(value, "model_fields_set") or isinstance(value, SimpleNamespace):
        return vars(value)
    return asdict(value) if hasattr(value, "__dataclass_fields__") else {}  # type: ignore[call-overload]
