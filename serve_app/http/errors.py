"""Every error is one sentence, in the form that the route's clients expect.

On OpenAI's routes that is OpenAI's envelope, elsewhere `{"detail": reason}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException as StarletteHTTPException

from serve_app.gateway.gateway import Refused, Unserved
from serve_app.gateway.generation import RequestRejected
from serve_app.http.auth import Access, Denied
from serve_app.http.decide_schema import Problem
from serve_app.http.intake import OPENAI_PATHS, Intake, PendingBodies, TooMuch
from serve_app.policy.runner import IncompatibleRequest

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem} for status in (400, 401, 403, 413, 422)
}
"""Answers of routes that are not OpenAI's, for the schema."""
_MODELS = "/v1/models"
_MAX_SHOWN = 40


class BadRequest(ValueError):
    """A request that cannot be served as it is; the text says why."""

    def __init__(self, reason: str, status: int = 400, param: str | None = None) -> None:
        """Say why, with the HTTP status and the field."""
        super().__init__(reason)
        self.status = status
        self.param = param


def install(api: FastAPI, access: Access, bodies: PendingBodies) -> None:
    """Make `api` answer errors in one sentence, and refuse what need not be read.

    Args:
        api: The application.
        access: Who may ask.
        bodies: Reads the bodies.
    """
    for error, handle in (
        (BadRequest, _on_bad),
        (IncompatibleRequest, _on_incompatible),
        (RequestValidationError, _on_invalid),
        (StarletteHTTPException, _on_http),
        (Denied, _on_denied),
        (Refused, _on_refused),
        (Unserved, _on_unserved),
        (RequestRejected, _on_rejected),
    ):
        api.add_exception_handler(error, handle)
    api.add_middleware(Intake, access=access, bodies=bodies, answer=_on_turned_away)


async def refuse(request: Request, error: Exception) -> Response:
    """Write down why a request of OpenAI's is not answered."""
    if isinstance(error, BadRequest):
        return await _on_bad(request, error)
    if isinstance(error, Refused):
        return await _on_refused(request, error)
    if isinstance(error, RequestRejected):
        return await _on_rejected(request, error)
    if isinstance(error, Denied | TooMuch):
        return await _on_turned_away(request, error)
    return await _on_unserved(request, error)


async def _on_bad(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BadRequest)
    return _answer(request, str(error), error.status, error.param)


async def _on_incompatible(request: Request, error: Exception) -> JSONResponse:
    return _answer(request, str(error), 422)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _answer(request, reason_of(error.errors()), 400 if _speaks_openai(request) else 422)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    answer = _answer(request, str(error.detail), error.status_code)
    answer.headers.update(error.headers or {})
    return answer


async def _on_denied(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Denied)
    answer = _answer(request, str(error), error.status)
    if error.status == 401:
        answer.headers["www-authenticate"] = "Bearer"
    return answer


async def _on_turned_away(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, Denied):
        return await _on_denied(request, error)
    assert isinstance(error, TooMuch)
    return _answer(request, str(error), error.status)


async def _on_refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    answer = _answer(request, str(error), 429)
    answer.headers["retry-after"] = str(error.retry_after_s)
    return answer


async def _on_unserved(request: Request, error: Exception) -> JSONResponse:
    return _answer(request, str(error), 503)


async def _on_rejected(request: Request, error: Exception) -> Response:
    """Hand on what the endpoint has against the request, as it is."""
    assert isinstance(error, RequestRejected)
    answer = Response(error.body, status_code=error.status)
    answer.raw_headers = [
        *((name, value) for name, value in error.headers if name != b"content-length"),
        (b"content-length", str(len(error.body)).encode()),
    ]
    return answer


def _speaks_openai(request: Request) -> bool:
    path = get_route_path(request.scope)
    return path in OPENAI_PATHS or path.startswith(_MODELS)


def _answer(request: Request, message: str, status: int, param: str | None = None) -> JSONResponse:
    if not _speaks_openai(request):
        return JSONResponse({"detail": message}, status_code=status)
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return JSONResponse({"error": openai_error(message, kind, param)}, status_code=status)


def openai_error(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """Lay an error out as OpenAI does."""
    return {"message": message, "type": kind, "param": param, "code": None}


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
