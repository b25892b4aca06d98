"""`POST /v1/route`: how a message becomes a decision, for callers who send requests themselves."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Sequence

from fastapi import APIRouter, Depends

from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.decision_record import DecisionRecord
from serve_app.gateway.order import order_fields
from serve_app.http.auth import Access
from serve_app.http.decide_schema import RouteAnswer, RouteMessage
from serve_app.http.errors import PROBLEMS
from serve_app.policy.experiment import Arm
from serve_app.policy.manager import PolicyManager
from serve_app.policy.runner import Choice, PolicyRunner
from tokenyard.routing.types import ReplicaSnapshot, Request


class RouteService:
    """Answers messages by the policy that decides.

    Where nothing else is served, these are the server's decisions: explored, counted, logged, and
    part of experiments. Beside pools they are questions, answered by a copy of the policy with a
    memory of its own.
    """

    def __init__(
        self,
        manager: PolicyManager,
        decide_only: bool,
        log: DecisionLog | None = None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Ask a manager.

        Args:
            manager: Knows who decides.
            decide_only: Whether nothing else is served.
            log: Where decisions are written; None: nowhere.
            clock_s: Unix time, seconds.
        """
        self._manager = manager
        self._decide_only = decide_only
        self._log = log if decide_only else None
        self._clock_s = clock_s
        self._copy: PolicyRunner | None = None

    def route(self, message: RouteMessage) -> RouteAnswer:
        """Decide, log and answer.

        Raises:
            IncompatibleRequest: The policy decides between another number of replicas, or needs to
                know more of them.
        """
        decision_id = uuid.uuid4().hex
        arm = self._manager.arm_of(decision_id) if self._decide_only else "champion"
        runner = self._runner(arm)
        card = runner.loaded.card
        predicted = runner.loaded.predicted_total_tokens(message.request.context_tokens)
        due_s = card.slo_response_s
        request = message.request.to_request(self._clock_s(), predicted, due_s)
        snapshots = [snapshot.to_snapshot(request.arrival_s) for snapshot in message.snapshots]
        self._manager.policy.check_compatible(snapshots)
        asked = None if self._decide_only else runner
        choice = self._manager.pick(request, snapshots, arm=arm, runner=asked)
        if self._decide_only:
            self._manager.observe(decision_id, request, snapshots, choice)
        if self._log is not None:
            self._log.write(_record(decision_id, runner, request, snapshots, choice, arm))
        return RouteAnswer(
            decision_id=decision_id,
            replica_id=snapshots[choice.index].replica_id,
            index=choice.index,
            scores=None if choice.scores is None else choice.scores.tolist(),
            predicted_total_tokens=request.predicted_total_tokens,
            policy=card.reference,
            decision_us=choice.decision_us,
            fallback=choice.fallback,
            explored=choice.explored,
            **order_fields(choice.order_key),
        )

    def _runner(self, arm: Arm) -> PolicyRunner:
        deciding = self._manager.deciding(arm)
        if self._decide_only:
            return deciding
        if self._copy is None or self._copy.loaded is not deciding.loaded:
            self._copy = self._manager.runner(deciding.name, deciding.loaded)
        return self._copy


def _record(
    decision_id: str,
    runner: PolicyRunner,
    request: Request,
    snapshots: Sequence[ReplicaSnapshot],
    choice: Choice,
    arm: Arm,
) -> DecisionRecord:
    """What is known of a decision whose request somebody else sends."""
    return DecisionRecord(
        decision_id=decision_id, request_id=decision_id, attempt=0, time_s=request.arrival_s,
        policy=runner.label, service_class="", request=request, snapshots=tuple(snapshots),
        pools=("",) * len(snapshots), scores=choice.scores, index=choice.index,
        propensity=choice.propensity, explored=choice.explored,
        fallback_reason=choice.fallback_reason, decision_us=choice.decision_us, outcome="unknown",
        output_tokens=0, ttft_s=math.nan, response_s=math.nan, mlflow_run=runner.mlflow_run,
        order_key=choice.order_key, arm=arm,
    )  # fmt: skip


def make_router(service: RouteService, access: Access) -> APIRouter:
    """Lay `/v1/route` over a service.

    The handler is a coroutine without an await, so decisions are made one at a time on the event
    loop: policies remember, and a decision is shorter than a change of threads.
    """
    router = APIRouter()

    @router.post("/v1/route", dependencies=[Depends(access.is_authorized)], responses=PROBLEMS)
    async def route(message: RouteMessage) -> RouteAnswer:
        """Choose among replicas that the caller describes; nothing is sent to them."""
        return service.route(message)

    return router
