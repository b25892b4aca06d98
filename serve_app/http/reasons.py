"""What is wrong with a request, in one sentence, and OpenAI's form of errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_SHOWN = 40
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
_ANTHROPIC = "/v1/messages"
_ANTHROPIC_KINDS = dict.fromkeys((400, 405, 408, 415, 422, 431), "invalid_request_error") | {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class BadRequest(ValueError):
    """A request cannot be served as it is; the text says why."""

    def __init__(self, reason: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.param = param


def kind_of(status: int) -> str:
    """OpenAI's name for errors of a status."""
    return _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def openai_error(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    return {"message": message, "type": kind, "param": param, "code": code}


def envelope(
    path: str, status: int, message: str, param: str | None = None, kind: str | None = None,
    code: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return an error in the form of a route's clients: Anthropic's or OpenAI's."""
    if path.startswith(_ANTHROPIC):
        kind = _ANTHROPIC_KINDS.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    if (status, param) == (404, "model"):
        code = "model_not_found"  # Clients look at it.
    return {"error": openai_error(message, kind or kind_of(status), param, code)}


def reason_of(errors: Sequence[Mapping[str, Any]]) -> str:
    """Say in one sentence what the first of the errors of pydantic is."""
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
    """Return ("body", "snapshots", 1, "num_slots") as snapshots[1].num_slots."""
    path = ""
    for part in location[1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".") or "body"


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return ""
    text = "NaN" if isinstance(value, float) and math.isnan(value) else repr(value)
    return f", got {text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + '...'}"
