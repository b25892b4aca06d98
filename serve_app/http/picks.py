"""Picks for whoever sends requests himself: `POST /v1/picks`, and what came of each.

A pick is a request of the gateway's as any other, with a place at a replica, until its end is told
or its lease runs out. Who asks and dies so takes no place for longer than that.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from starlette.types import Message, Scope

from serve_app.engines.base import FinishReason
from serve_app.gateway.exchange import Attempt, Backend, Sender
from serve_app.gateway.generation import ReplicaFailed, ReplicaUnreachable
from serve_app.http.body import Body
from serve_app.http.data_path import DataPath
from serve_app.http.errors import PROBLEMS
from serve_app.http.intake import PICKS, SENDER
from serve_app.http.reasons import BadRequest

_MOST_REPLICAS = 3


class Report(Body):
    """Body of `POST /v1/picks/{decision_id}`."""

    output_tokens: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Tokens of the answer so far."""
    prompt_tokens: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Of the prompt, as the endpoint counts them; 0: it does not say."""
    outcome: Literal["stop", "length", "abort", "failed", "unreachable"] | None = None
    """How it ended; null: it goes on."""
    retry: bool = False
    """Whether another replica is wanted, after `failed` or `unreachable`."""


class OpenPick(Sender):
    """A request that somebody else sends."""

    def __init__(self, lease_s: float, on_end: Callable[[], object]) -> None:
        self._lease_s, self._on_end = lease_s, on_end
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Future[Response] = self._loop.create_future()
        """What the caller is answered: a pick, or a refusal."""
        self._end: asyncio.Future[None] | None = None
        self._attempt: Attempt | None = None
        self._lease: asyncio.TimerHandle | None = None
        self._status = 500
        self._headers: dict[str, str] = {}
        self.id = secrets.token_hex(16)

    async def serve(self, path: DataPath, scope: Scope, body: bytes) -> Response:
        """Have the gateway place a request; return what its caller is answered."""

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        self._task = self._loop.create_task(path(scope, receive, self._send))
        self._task.add_done_callback(self._finish)
        return await self._told

    async def report(self, report: Report) -> Response:
        """Take what came of it; return what is answered: another pick where one is wanted."""
        attempt, end = self._attempt, self._end
        if attempt is None or end is None or end.done():
            raise BadRequest(f"decision {self.id} waits for no report", 409)
        self._renew()
        if report.outcome == "abort":
            self._task.cancel()
        elif report.outcome in ("failed", "unreachable"):
            self.begun = not report.retry
            kind = ReplicaUnreachable if report.outcome == "unreachable" else ReplicaFailed
            end.set_exception(kind("whoever sent the request says so"))
            if report.retry:
                self._told = self._loop.create_future()
                return await self._told
        elif report.outcome is None:
            self.begun = self.begun or report.output_tokens > 0
            attempt.take(report.output_tokens)
        else:
            reason = cast(FinishReason, report.outcome)
            attempt.take(report.output_tokens, reason, is_whole=not self.begun)
            if attempt.request.learn is not None:
                attempt.request.learn(report.prompt_tokens)
            end.set_result(None)
        return Response(status_code=204)

    async def answer(self, backend: Backend, attempt: Attempt, replica_ids: Sequence[str]) -> None:
        """Tell the caller where to send it: see `serve_app.gateway.exchange.Sender`."""
        self._attempt, self._end = attempt, self._loop.create_future()
        attempt.note_send()
        self._renew()
        named = [*replica_ids[:_MOST_REPLICAS]]
        headers = {name.decode(): value.decode() for name, value in self.added}
        content = {"decision_id": self.id, "pool": backend.name, "replica_ids": named}
        self._tell(JSONResponse(content, headers=headers))
        await self._end

    async def _send(self, message: Message) -> None:
        """Refuse, as an ASGI application sends it."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            named = [(name.decode(), value.decode()) for name, value in message["headers"]]
            self._headers = {name: value for name, value in named if name != "content-length"}
        else:
            self._tell(Response(message.get("body", b""), self._status, self._headers))

    def _tell(self, response: Response) -> None:
        if not self._told.done():
            self._told.set_result(response)

    def _renew(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = self._loop.call_later(self._lease_s, self._task.cancel)

    def _finish(self, task: asyncio.Task[None]) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._tell(Response(status_code=204))
        self._on_end()


def make_router(path: DataPath) -> APIRouter:
    """Make the routes over the data path of a gateway."""
    router = APIRouter()
    picks: dict[str, OpenPick] = {}

    @router.post(PICKS, responses=PROBLEMS, response_model=None)
    async def pick(
        request: Request, route: Annotated[str, Query(pattern="^/")] = "/v1/chat/completions",
        lease_s: Annotated[float, Query(gt=0, le=3600)] = 120.0,
    ) -> Response:  # fmt: skip
        """Choose replicas for a request, which is the body, and keep a place at the first.

        `route` is where it will be sent. The place is given up `lease_s` after the last report.
        """
        picked = OpenPick(lease_s, lambda: picks.pop(picked.id, None))
        picks[picked.id] = picked
        scope: dict[str, Any] = {
            **request.scope, "path": route, "raw_path": route.encode(), "query_string": b"",
            "state": {}, "extensions": {SENDER: picked},
        }  # fmt: skip
        return await picked.serve(path, scope, await request.body())

    @router.post("/v1/picks/{decision_id}", responses=PROBLEMS, response_model=None)
    async def report(decision_id: str, report: Report) -> Response:
        """Take the progress or the end of what was sent."""
        if (picked := picks.get(decision_id)) is None:
            raise BadRequest(f"decision {decision_id} is not known, or has ended", 404)
        return await picked.report(report)

    return router
