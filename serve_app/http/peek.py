"""The parts that the gateway reads of a body which it hands on unchanged.

What is odd in it is for the endpoint to say: it may know fields and values that nobody here does.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from serve_app.http.reasons import BadRequest

_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Fields that say how long an answer may be: chat, completions, responses."""
_MAX_PARTS, _MAX_PART_HEAD_BYTES = 64, 4096
"""Limits of a form that is read; real ones have fewer fields."""
_MOST_TOKENS = 10**9
"""Longest answer that is counted with: a body may ask for more than a float holds."""


# Not frozen: that takes four times as long to make, and every request makes one.
@dataclass(slots=True)
class Peek:
    """The parts of a body that decide where it goes."""

    fields: dict[str, Any]
    """All of it."""
    model: str | None
    """None: it names none, or not by a text."""
    stream: bool
    max_tokens: int
    """Longest answer; 0: it does not say."""
    class_name: str | None
    """Class of the request; None: it names none."""
    model_at: tuple[int, int] | None = None
    """Position of the model's name in a form; None: the body is no form, or names none."""

    @property
    def priority(self) -> Any:
        """Priority as vLLM has it, a number; None: none is given."""
        given = self.fields.get("priority")
        return None if isinstance(given, str) else given


def peek_form(body: bytes, content_type: str) -> Peek:
    """Read the relevant parts of `multipart/form-data`, the form of audio files."""
    boundary = re.search(
        r'^multipart/form-data;.*boundary="?([^\s";]+)', content_type, re.IGNORECASE
    )
    if boundary is None:
        raise BadRequest("body is neither JSON nor multipart/form-data with a boundary")
    line, fields, model_at = b"--" + boundary[1].encode("latin-1"), dict[str, Any](), None
    at = 0
    for _ in range(_MAX_PARTS):
        start = body.find(b"\r\n\r\n", at, at + _MAX_PART_HEAD_BYTES) + 4
        end = body.find(b"\r\n" + line, start)
        if start < 4 or end < 0:
            break
        head, at = body[at:start], end + 2
        if b"filename" not in head and (name := re.search(rb'[ ;]name="?([^";\r]+)', head)):
            fields[name[1].decode("latin-1")] = body[start:end].decode("utf-8", "replace")
            model_at = (start, end) if name[1] == b"model" else model_at
    fields["stream"] = fields.get("stream", "").lower() in ("true", "1")
    return peek(fields, model_at)


def peek(fields: dict[str, Any], model_at: tuple[int, int] | None = None) -> Peek:
    """Read the relevant fields of a body; `model_at` is for forms."""
    model = fields.get("model")
    named = next((fields[key] for key in _LENGTHS if type(fields.get(key)) is int), 0)
    names = (fields.get("service_tier"), fields.get("priority"))
    return Peek(
        fields,
        model if isinstance(model, str) else None,
        fields.get("stream") is True,
        min(max(named, 0), _MOST_TOKENS),
        next((name for name in names if isinstance(name, str)), None),
        model_at,
    )


def read_fields(body: bytes) -> dict[str, Any]:
    """Read a body, which must be a JSON object in UTF-8; else BadRequest."""
    try:
        fields = json.loads(body.decode())
    except UnicodeDecodeError:
        raise BadRequest("body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"body is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):
        raise BadRequest("body is not JSON: a number is too long, or it is too deep") from None
    if not isinstance(fields, dict):
        raise BadRequest("body must be a JSON object")
    return fields
