"""Whose fault it is that an endpoint gives no answer: one table for statuses and error events.

| fault | what an endpoint says | what follows, another being asked in all cases but the first |
|---|---|---|
| `CALLER` | any other status from 400 to 499, and some 500 of llama.cpp | the caller gets it |
| `ROOM` | 429, 503, 529 | it is left alone, and for longer each time |
| `LACKS` | it does not know the model, the adapter or the route | it is not asked for that |
| `ENDPOINT` | all else: its own failure, or the key of the pool | several in a row eject it |

An error may come as an event of a stream whose status is 200. Its code or its type then stands in
for the status.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any

_MAX_MESSAGE = 1000
_ROOM = (429, 503, 529)
_ENDPOINT = (401, 402, 403, 407, 408, 409, 425)
"""Client errors that are not the caller's: the key is the pool's, or another endpoint may do."""
_NO_ROUTE = (405, 501)
_STATUS_OF = {
    "badrequest": 400, "invalidrequest": 400, "invalidprompt": 400, "contextlengthexceeded": 400,
    "exceedcontextsize": 400, "authentication": 401, "permission": 403, "permissiondenied": 403,
    "notfound": 404, "modelnotfound": 404, "requesttoolarge": 413, "unprocessableentity": 422,
    "ratelimit": 429, "ratelimitexceeded": 429, "insufficientquota": 429, "unavailable": 503,
    "serviceunavailable": 503, "overloaded": 529,
}  # fmt: skip
"""Statuses of errors by their types and codes, in small letters, without `_` and `error`: of
OpenAI, Anthropic, vLLM, SGLang and llama.cpp."""
_UNKNOWN_MODEL = re.compile(
    r"\b(model|adapter|lora)\b.{0,300}\b(does not exist|not found|is not (served|loaded|available))"
    r"|\b(unknown|invalid|no such) (model|adapter|lora)\b",
    re.IGNORECASE | re.DOTALL,
)
_CALLERS_500 = re.compile(
    r"\b(image|audio|video) input is not supported|\bfailed to parse (messages|tools)\b",
    re.IGNORECASE,
)
"""Errors that llama.cpp answers with 500, as every endpoint with the same model would."""
_NO_SUCH_ROUTE = ("", "notfound", "filenotfound")


class Fault(Enum):
    """Whose fault an error is."""

    CALLER = "caller"
    ROOM = "room"
    LACKS = "lacks"
    ENDPOINT = "endpoint"


@dataclass(frozen=True)
class EndpointError:
    """An error that an endpoint sends in place of an answer."""

    status: int
    """Status of the answer; of an event, the status that its code or type stands for."""
    message: str
    """Empty: it gives none."""
    is_about_model: bool = False
    """Whether it does not know the model."""
    code: Any = None
    """Such as 400, `"rate_limit_exceeded"` or None, as it came."""
    type: Any = None
    """Such as `"BadRequestError"`, `"overloaded_error"` or None, as it came."""

    @classmethod
    def of_answer(cls, status: int, body: bytes) -> EndpointError:
        """Read an answer whose status is an error."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            fields = None
        return cls.of(fields if isinstance(fields, dict) else {}, status)

    @classmethod
    def of(cls, fields: Mapping[str, Any], status: int | None = None) -> EndpointError:
        """Read an error of OpenAI, of vLLM's older form, of FastAPI, or a plain text.

        An event of a stream has no status.
        """
        error = fields.get("error") or fields
        if not isinstance(error, Mapping):
            error = {"message": error}
        message = error.get("message", error.get("detail"))
        message = message[:_MAX_MESSAGE] if isinstance(message, str) else ""
        code, kind = error.get("code"), error.get("type")
        named = _status_named(code) or _status_named(kind)
        if status is None:
            status = named or 500
        elif status == 500 and named is not None and named < 500:
            status = named
        if status == 500 and _CALLERS_500.search(message):
            status = 400
        is_about_model = status in (400, 404, 422) and (
            _plain(code) == "modelnotfound" or bool(_UNKNOWN_MODEL.search(message))
        )
        return cls(status, message, is_about_model, code, kind)

    @property
    def fault(self) -> Fault:
        """Whose fault it is."""
        status = self.status
        if self.is_about_model or status in _NO_ROUTE:
            return Fault.LACKS
        if status == 404 and _plain(self.message) in _NO_SUCH_ROUTE:
            return Fault.LACKS
        if status in _ROOM:
            return Fault.ROOM
        return Fault.CALLER if 400 <= status < 500 and status not in _ENDPOINT else Fault.ENDPOINT


def _status_named(name: Any) -> int | None:
    """Status that a code or a type stands for; None: it is unknown."""
    if isinstance(name, int) or (isinstance(name, str) and name.isdecimal()):
        return int(name) if 400 <= int(name) < 600 else None
    return _STATUS_OF.get(_plain(name))


def _plain(name: Any) -> str:
    if not isinstance(name, str):
        return ""
    return re.sub(r"[^a-z]", "", name.lower()).removesuffix("error")


def retry_after_s(value: bytes | None, now_s: float) -> float | None:
    """Return in how many seconds a header `Retry-After` says to come back; None: it says nothing.

    It has seconds or a date; `now_s` is Unix time, seconds.
    """
    text = (value or b"").decode("latin-1").strip()
    try:
        return max(float(int(text)), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(text).timestamp() - now_s, 0.0)
    except (ValueError, OverflowError):
        return None
