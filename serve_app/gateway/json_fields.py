"""Fields of a JSON object, and the positions of their values in its text."""

from __future__ import annotations

import json
import re
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_value_at = json.JSONDecoder().raw_decode


def spans(text: str) -> list[tuple[str, Any, int, int]]:
    """Return the fields of an object: name, value, and where the value begins and ends.

    Raises:
        ValueError: It is not a JSON object.
    """
    at, fields = _after(text, 0, "{"), []
    if text[at : at + 1] == "}":
        return []
    while True:
        if text[at : at + 1] != '"':
            raise ValueError(f"a name is missing at character {at}")
        name, at = _value_at(text, at)
        start = _after(text, at, ":")
        value, end = _value_at(text, start)
        fields.append((name, value, start, end))
        at = _skip(text, end)
        if text[at : at + 1] != ",":
            _after(text, at, "}")
            return fields
        at = _skip(text, at + 1)


def replace_field(body: bytes, name: str, value: str | int) -> bytes:
    """Return an object with a new value of one field; all other bytes stay."""
    text, new = body.decode(), json.dumps(value)
    pieces, done = [], 0
    for field, _, start, end in spans(text):
        if field == name:
            pieces += [text[done:start], new]
            done = end
    return "".join([*pieces, text[done:]]).encode()


def set_field(body: bytes, name: str, value: str | int) -> bytes:
    """Return an object with one field set; a new field is put first."""
    text = body.decode()
    fields = spans(text)
    if any(field == name for field, *_ in fields):
        return replace_field(body, name, value)
    start = _after(text, 0, "{")
    field = f"{json.dumps(name)}: {json.dumps(value)}{', ' if fields else ''}"
    return f"{text[:start]}{field}{text[start:]}".encode()


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def _after(text: str, at: int, expected: str) -> int:
    """Skip one character, and the space around it."""
    at = _skip(text, at)
    if text[at : at + 1] != expected:
        raise ValueError(f"{expected!r} is missing at character {at}")
    return _skip(text, at + 1)
