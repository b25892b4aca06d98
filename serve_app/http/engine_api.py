"""The HTTP side of one of our engines, for the gateway only; it knows no policy and no SLO.

What it is asked, and what it says beside OpenAI's answers, stands in
`serve_app.gateway.engine_wire`.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.cluster import Limits
from serve_app.engines.base import EngineError, EngineFull, InvalidRequest
from serve_app.engines.texts import TextChunk, TextEngine
from serve_app.engines.waiting import read_order_key
from serve_app.gateway.engine_wire import PROGRESS, STATUS_HEADER, read_generation, write_status
from serve_app.http.answer_writer import AnswerWriter
from serve_app.http.auth import Access, Denied
from serve_app.http.connection import connection_of
from serve_app.http.disconnect import CancelOnDisconnect
from serve_app.http.intake import IntakeMiddleware, PendingBodies, TooMuch
from serve_app.http.reasons import BadRequest, kind_of, openai_error

_PROGRESS_EVERY_S = 0.05
"""Time between two signs that an answer which is not streamed grows."""


def create_engine_api(
    engine: TextEngine, longest_tokens: int, limits: Limits, secret: str
) -> ASGIApp:
    """Make the application of an engine; `secret` is the bearer token of whoever may ask.

    Prompt and answer together are at most `longest_tokens`.
    """
    bodies = PendingBodies(limits.body_timeout_s, 2 * limits.max_in_flight, limits.max_body_bytes)
    return IntakeMiddleware(EngineApi(engine, longest_tokens), Access(secret), bodies, _refuse)


class EngineApi:
    """ASGI application of an engine; its requests arrive with complete bodies."""

    def __init__(self, engine: TextEngine, longest_tokens: int) -> None:
        self._engine, self._longest_tokens = engine, longest_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        try:
            try:
                generation, name, key = read_generation((await receive())["body"])
                order_key = None if key is None else read_order_key(key)
            except (ValueError, TypeError) as error:
                raise BadRequest(f"the request cannot be read: {error}") from None
            room = self._longest_tokens - len(generation.token_ids)
            sampling = generation.sampling
            if generation.may_be_shorter and room > 0:
                sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
            answer = _Answer(self._engine, AnswerWriter(generation, name), send)
            texts = self._engine.generate(
                name, generation.token_ids, sampling, generation.stops, order_key
            )
            with CancelOnDisconnect(receive, connection_of(scope)) as caller:
                try:
                    async with aclosing(texts):
                        async for chunk in texts:
                            await answer.add(chunk)
                except EngineError as error:
                    if not answer.begun:
                        raise
                    caller.ignore()
                    await answer.end_with_error(str(error))
        except (BadRequest, EngineError) as error:
            refusal = await _refuse(Request(scope), error)
            await refusal(scope, receive, send)


class _Answer:
    """One answer on its way: events, or a whole answer after signs of its growth."""

    def __init__(self, engine: TextEngine, writer: AnswerWriter, send: Send) -> None:
        self._engine, self._writer, self._send_message = engine, writer, send
        self.begun = False
        self._num_reported, self._reported_s = 0, -math.inf

    async def add(self, chunk: TextChunk) -> None:
        """Send a piece of the answer, or keep it."""
        data = self._writer.add(chunk)
        if chunk.finish_reason is not None:
            await self._send(data + self._writer.finish(), more=False)
            return
        if not self._writer.streams:
            num_new, now_s = chunk.num_tokens - self._num_reported, time.monotonic()
            if num_new and now_s - self._reported_s >= _PROGRESS_EVERY_S:
                self._num_reported, self._reported_s = chunk.num_tokens, now_s
                data = PROGRESS * num_new
        if data:
            await self._send(data, more=True)

    async def end_with_error(self, reason: str) -> None:
        """End an answer that has begun."""
        error = json.dumps({"error": openai_error(reason, kind_of(503))}, separators=(",", ":"))
        piece = f"data: {error}\n\n" if self._writer.streams else error
        await self._send(piece.encode(), more=False)

    async def _send(self, data: bytes, more: bool) -> None:
        """Send a piece of the body, after the head if it is the first."""
        if not self.begun:
            self.begun = True
            status = write_status(self._engine.status())
            headers = [*self._writer.headers, (STATUS_HEADER, status)]
            if not more:
                headers.append((b"content-length", b"%d" % len(data)))
            start = {"type": "http.response.start", "status": 200, "headers": headers}
            await self._send_message(start)
        message = {"type": "http.response.body", "body": data, "more_body": more}
        await self._send_message(message)


async def _refuse(_: Request, error: Exception) -> Response:
    """Say why a request is not answered, in OpenAI's form."""
    status = 503
    if isinstance(error, BadRequest | Denied | TooMuch):
        status = error.status
    elif isinstance(error, InvalidRequest):
        status = 400
    elif isinstance(error, EngineFull):
        status = 429
    body = {"error": openai_error(str(error), kind_of(status), getattr(error, "param", None))}
    return JSONResponse(body, status_code=status)
