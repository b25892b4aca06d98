"""The HTTP API: routes, and how a message becomes a decision."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from serve_app import regions
from serve_app.http import errors
from serve_app.http.decide_schema import (
    PolicyAnswer,
    PolicyReference,
    Problem,
    RouteAnswer,
    RouteMessage,
)
from serve_app.http.jsonl_log import DecisionLog, DecisionRecord
from serve_app.policy.decider import Choice, Decider
from tokenyard.types import ReplicaSnapshot, Request


class RoutingService:
    """Answers messages, and writes each decision to the log."""

    def __init__(
        self,
        decider: Decider,
        log: DecisionLog | None = None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Serve `decider`.

        Args:
            decider: Makes the decisions.
            log: Where they are written; None: nowhere.
            clock_s: Unix time, seconds.
        """
        self._decider = decider
        self._log = log
        self._clock_s = clock_s
        card = decider.loaded.card
        self._reference = PolicyReference(name=card.name, version=card.version, source=card.source)

    def route(self, message: RouteMessage) -> RouteAnswer:
        """Decide, log and answer.

        Raises:
            UnfitRequest: The policy decides between another number of replicas.
        """
        predicted = self._decider.loaded.predicted_total_tokens(message.request.context_tokens)
        request = message.request.to_request(self._clock_s(), predicted)
        snapshots = [snapshot.to_snapshot(request.arrival_s) for snapshot in message.snapshots]
        choice = self._decider.decide(request, snapshots)
        decision_id = uuid.uuid4().hex
        if self._log is not None:
            self._log.write(self._record(decision_id, request, snapshots, choice))
        return RouteAnswer(
            decision_id=decision_id,
            replica_id=snapshots[choice.index].replica_id,
            index=choice.index,
            scores=None if choice.scores is None else list(choice.scores),
            predicted_total_tokens=request.predicted_total_tokens,
            policy=self._reference,
            decision_us=choice.decision_us,
            fallback=choice.fallback,
            explored=choice.explored,
        )

    def describe(self) -> PolicyAnswer:
        """Say what is served and what has happened since the start."""
        decider = self._decider
        return PolicyAnswer(
            **decider.loaded.card.model_dump(),
            explore_fraction=decider.explore_fraction,
            num_decisions=decider.num_decisions,
            num_fallbacks=decider.num_fallbacks,
            num_explored=decider.num_explored,
            num_log_lines_lost=0 if self._log is None else self._log.num_lost,
        )

    def close(self) -> None:
        """Flush and close the log."""
        if self._log is not None:
            self._log.close()

    def _record(
        self,
        decision_id: str,
        request: Request,
        snapshots: list[ReplicaSnapshot],
        choice: Choice,
    ) -> DecisionRecord:
        return DecisionRecord(
            decision_id=decision_id,
            time_s=self._clock_s(),
            policy=f"{self._reference.name}@{self._reference.version}",
            request=request,
            snapshots=snapshots,
            scores=choice.scores,
            index=choice.index,
            propensity=choice.propensity,
            explored=choice.explored,
            fallback=choice.fallback,
            decision_us=choice.decision_us,
        )


def create_api(service: RoutingService, decider: regions.RegionDecider | None = None) -> FastAPI:
    """Lay the HTTP routes over `service`, and over `decider` those about regions.

    The handlers are coroutines without an await, so decisions are made one at a time on the event
    loop: policies remember, and a decision is shorter than a change of threads.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    # The documentation pages load scripts from the network; the schema is at /openapi.json.
    api = FastAPI(title="Tokenyard routing", lifespan=lifespan, docs_url=None, redoc_url=None)
    errors.install(api)

    @api.post("/v1/route", responses={413: {"model": Problem}, 422: {"model": Problem}})
    async def route(message: RouteMessage) -> RouteAnswer:
        """Choose the replica that serves a request."""
        return service.route(message)

    @api.get("/v1/policy")
    async def policy() -> PolicyAnswer:
        """Describe the policy that decides, and count what it did."""
        return service.describe()

    @api.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Say that the server decides."""
        return {"status": "ok"}

    regions.add_routes(api, decider or regions.RegionDecider.shipped())
    return api
