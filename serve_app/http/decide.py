"""`POST /v1/route`: how a message becomes a decision, for callers who send requests themselves."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable

from fastapi import APIRouter, Depends

from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.decision_record import DecisionRecord
from serve_app.gateway.order import order_fields
from serve_app.http.auth import Access
from serve_app.http.decide_schema import RouteAnswer, RouteMessage
from serve_app.http.errors import PROBLEMS
from serve_app.policy.picker import ReplicaPicker
from serve_app.policy.runner import Arm, PolicyRunner


class RouteService:
    """Answers messages with the decisions of the current policy.

    Where nothing else is served, these are the server's decisions: explored, counted, logged, and
    part of experiments. Beside pools they are questions, answered by a copy of the policy with a
    memory of its own.
    """

    def __init__(
        self,
        picker: ReplicaPicker,
        decide_only: bool,
        log: DecisionLog | None = None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._picker = picker
        self._decide_only = decide_only
        self._log = log if decide_only else None
        self._clock_s = clock_s
        self._copy: PolicyRunner | None = None

    def route(self, message: RouteMessage) -> RouteAnswer:
        """Decide, log and answer; raises what `PolicyRunner.check_compatible` raises."""
        decision_id, picker = uuid.uuid4().hex, self._picker
        arm = picker.arm_of(decision_id) if self._decide_only else "champion"
        runner = self._runner(arm)
        card = runner.loaded.card
        predicted = runner.loaded.predicted_total_tokens(message.request.context_tokens)
        due_s = card.slo_response_s
        request = message.request.to_request(self._clock_s(), predicted, due_s)
        snapshots = tuple(snapshot.to_snapshot(request.arrival_s) for snapshot in message.snapshots)
        picker.policy.check_compatible(snapshots)
        copy = None if self._decide_only else runner
        choice = picker.pick(request, snapshots, arm=arm, copy=copy)
        if self._decide_only:
            picker.observe(decision_id, choice)
        if self._log is not None:
            # Somebody else sends the request: nothing is known of its end.
            record = DecisionRecord(
                decision_id, decision_id, 0, request.arrival_s, "", choice,
                ("",) * len(snapshots), "unknown", 0, math.nan, math.nan, choice.order_key,
            )  # fmt: skip
            self._log.write(record)
        return RouteAnswer(
            decision_id=decision_id,
            replica_id=snapshots[choice.index].replica_id,
            index=choice.index,
            scores=None if choice.scores is None else choice.scores.tolist(),
            predicted_total_tokens=request.predicted_total_tokens,
            policy=card.reference,
            decision_us=choice.decision_us,
            fallback=choice.fallback_reason is not None,
            explored=choice.explored,
            **order_fields(choice.order_key),
        )

    def _runner(self, arm: Arm) -> PolicyRunner:
        deciding = self._picker.deciding(arm)
        if self._decide_only:
            return deciding
        if self._copy is None or self._copy.loaded is not deciding.loaded:
            self._copy = self._picker.runner(deciding.name, deciding.loaded)
        return self._copy


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
