"""Every error is one sentence, in the form that the route's clients expect.

On OpenAI's routes that is OpenAI's envelope, on Anthropic's theirs, elsewhere `{"detail": reason}`.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from serve_app.gateway.gateway import Refused, Unanswerable, Unserved
from serve_app.gateway.generation import RequestRejected
from serve_app.http.auth import Access, Denied
from serve_app.http.decide_schema import Problem
from serve_app.http.intake import OPENAI_PATHS, IntakeMiddleware, PendingBodies, TooMuch, route_path
from serve_app.http.reasons import BadRequest, envelope, reason_of
from serve_app.policy.runner import IncompatibleRequest

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem} for status in (400, 401, 403, 413, 422)
}
"""Answers of routes that are not OpenAI's, for the schema."""
_MODELS = "/v1/models"
_HANDED_ON = "handed_on"
"""In a scope: replicas answer it."""


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
    api.add_middleware(IntakeMiddleware, access=access, bodies=bodies, refuse=_on_turned_away)


async def refuse(request: Request, error: Exception) -> Response:
    """Write down why a request that is handed on is not answered."""
    request.scope[_HANDED_ON] = True
    if isinstance(error, BadRequest):
        return await _on_bad(request, error)
    if isinstance(error, Refused):
        return await _on_refused(request, error)
    if isinstance(error, RequestRejected):
        return await _on_rejected(request, error)
    if isinstance(error, Denied | TooMuch):
        return await _on_turned_away(request, error)
    if isinstance(error, StarletteHTTPException):
        return await _on_http(request, error)
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
    text = str(error.detail)
    if error.status_code == 404 and route_path(request.scope).startswith("/v1/"):
        # No route is there: those that are say what is not.
        request.scope[_HANDED_ON] = True
        text = f"Invalid URL ({request.method} {route_path(request.scope)})"
    answer = _answer(request, text, error.status_code)
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
    answer = _answer(request, str(error), error.status)
    answer.raw_headers.extend(error.headers)
    if error.over is not None:
        path, over = route_path(request.scope), error.over
        answer = JSONResponse(envelope(path, 429, str(error), None, over.kind, over.code), 429)
        answer.raw_headers.extend(error.over.headers)
    answer.headers["retry-after"] = str(error.retry_after_s)
    return answer


async def _on_unserved(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, Unanswerable):
        return _answer(request, str(error), error.status, "model" if error.status == 404 else None)
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
    path = route_path(request.scope)
    is_handed_on = path in OPENAI_PATHS or _HANDED_ON in request.scope
    return is_handed_on or path.startswith(_MODELS)


def _answer(request: Request, message: str, status: int, param: str | None = None) -> JSONResponse:
    if not _speaks_openai(request):
        return JSONResponse({"detail": message}, status_code=status)
    return JSONResponse(envelope(route_path(request.scope), status, message, param), status)
