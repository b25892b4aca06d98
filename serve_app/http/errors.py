"""Bad input: every 4xx answer is `{"detail": reason}` with the reason in one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.http.decide_schema import MAX_BODY_BYTES
from serve_app.policy.decider import IncompatibleRequest

_MAX_SHOWN = 40


def install(api: FastAPI) -> None:
    """Make `api` answer bad input in one sentence, and refuse bodies that are too large."""
    api.add_exception_handler(RequestValidationError, _on_invalid)
    api.add_exception_handler(IncompatibleRequest, _on_unfit)
    api.add_middleware(_BodyLimit)


async def _on_invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": reason_of(error.errors())}, status_code=422)


async def _on_unfit(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status_code=422)


def reason_of(errors: Sequence[Mapping[str, Any]]) -> str:
    """Say in one sentence what is wrong first, naming the field and the value.

    Args:
        errors: As pydantic lists them, not empty.
    """
    first = errors[0]
    others = len(errors) - 1
    more = f" (and {others} more problem{'s' if others > 1 else ''})" if others else ""
    return _sentence(first) + more


def _sentence(error: Mapping[str, Any]) -> str:
    kind, field = error["type"], _field(error["loc"])
    if kind == "json_invalid":
        return f"body is not JSON: {error['ctx']['error']} at character {error['loc'][-1]}"
    if kind == "missing":
        return f"{field} is missing"
    if kind == "extra_forbidden":
        return f"{field} is not a known field"
    if kind in ("model_attributes_type", "model_type", "dict_type"):
        hint = " sent with content-type application/json" if field == "body" else ""
        return f"{field} must be a JSON object{hint}"
    if kind == "value_error":
        return f"{field}: {error['ctx']['error']}"
    # Pydantic's sentences begin with what the value is: "Input should", "List should".
    demand = str(error["msg"]).partition(" ")[2].replace(" after validation", "")
    return f"{field} {demand}{_shown(error['input'])}"


def _field(location: tuple[str | int, ...]) -> str:
    """Write ("body", "snapshots", 1, "num_slots") as snapshots[1].num_slots."""
    path = ""
    for part in location[1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".") or "body"


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return ""
    text = "NaN" if isinstance(value, float) and math.isnan(value) else repr(value)
    return f", got {text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + '...'}"


class _BodyLimit:
    """Middleware that stops reading a body at MAX_BODY_BYTES."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"body is larger than {MAX_BODY_BYTES} bytes")
            return message

        await self._app(scope, limited, send)
