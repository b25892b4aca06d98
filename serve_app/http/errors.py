"""Every error is one sentence, in the form of the route's clients.

On OpenAI's routes that is OpenAI's envelope, on Anthropic's theirs, elsewhere `{"detail": reason}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from serve_app.gateway.generation import Refused, RequestRejected, Unanswerable, Unserved
from serve_app.http.auth import Access, Denied
from serve_app.http.decide_schema import Problem
from serve_app.http.intake import OPENAI_PATHS, IntakeMiddleware, PendingBodies, TooMuch, route_path
from serve_app.http.reasons import BadRequest, envelope, reason_of
from serve_app.policy.experiment import Conflict
from serve_app.policy.runner import IncompatibleRequest

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem} for status in (400, 401, 403, 413, 422)
}
"""Answers of routes that are not OpenAI's, for the schema."""
DENIED: dict[int | str, dict[str, Any]] = {401: {"model": Problem}, 403: {"model": Problem}}
"""Those of routes that only show something."""
_HANDLED = (
    BadRequest, IncompatibleRequest, RequestValidationError, HTTPException, Denied, Refused,
    Unserved, RequestRejected,
)  # fmt: skip
_MODELS = "/v1/models"
_HANDED_ON = "handed_on"
"""Key in a scope of a request that replicas answer."""


def install(api: FastAPI, access: Access, bodies: PendingBodies) -> None:
    """Make `api` answer errors with one sentence, and pass all requests through an intake."""
    for error in _HANDLED:
        api.add_exception_handler(error, _answer_to)
    api.add_middleware(IntakeMiddleware, access=access, bodies=bodies, refuse=_answer_to)


@contextmanager
def refusals() -> Iterator[None]:
    """Refuse a change that conflicts with what goes on (409), or cannot be made (422)."""
    try:
        yield
    except Conflict as error:
        raise BadRequest(" ".join(str(error).split()), 409) from None
    except (ValueError, OSError) as error:
        raise BadRequest(" ".join(str(error).split()), 422) from None


async def refuse(request: Request, error: Exception) -> Response:
    """Return the answer to a request that is handed on, but not answered."""
    request.scope[_HANDED_ON] = True
    return await _answer_to(request, error)


async def _answer_to(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed with an error."""
    headers: dict[str, str] = {}
    match error:
        case RequestRejected():
            # What the endpoint has against the request, as it is.
            answer = Response(error.body, status_code=error.status)
            kept = [pair for pair in error.headers if pair[0] != b"content-length"]
            answer.raw_headers = [*kept, (b"content-length", b"%d" % len(error.body))]
            return answer
        case Refused():
            return _refused(request, error)
        case BadRequest():
            return _answer(request, str(error), error.status, error.param)
        case Unanswerable():
            return _answer(request, str(error), error.status)
        case RequestValidationError():
            status = 400 if _speaks_openai(request) else 422
            return _answer(request, reason_of(error.errors()), status)
        case HTTPException():
            text, status, headers = str(error.detail), error.status_code, dict(error.headers or {})
            if status == 404 and route_path(request.scope).startswith("/v1/"):
                # No route is there: those that are say what is not.
                request.scope[_HANDED_ON] = True
                text = f"Invalid URL ({request.method} {route_path(request.scope)})"
        case Denied() | TooMuch():
            text, status = str(error), error.status
            headers = {"www-authenticate": "Bearer"} if status == 401 else {}
        case _:
            text, status = str(error), 422 if isinstance(error, IncompatibleRequest) else 503
    answer = _answer(request, text, status)
    answer.headers.update(headers)
    return answer


def _refused(request: Request, error: Refused) -> Response:
    """Return when to come back, and which limit was reached, as headers."""
    answer, over = _answer(request, str(error), error.status), error.over
    answer.raw_headers.extend(error.headers)
    if over is not None:
        path = route_path(request.scope)
        answer = JSONResponse(envelope(path, 429, str(error), None, over.kind, over.code), 429)
        answer.raw_headers.extend(over.headers)
    answer.headers["retry-after"] = str(error.retry_after_s)
    return answer


def _speaks_openai(request: Request) -> bool:
    path = route_path(request.scope)
    return path in OPENAI_PATHS or _HANDED_ON in request.scope or path.startswith(_MODELS)


def _answer(request: Request, message: str, status: int, param: str | None = None) -> JSONResponse:
    if not _speaks_openai(request):
        return JSONResponse({"detail": message}, status_code=status)
    return JSONResponse(envelope(route_path(request.scope), status, message, param), status)
