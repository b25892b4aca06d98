"""Estimates the length of a prompt that only the endpoint itself can tokenise.

All that becomes part of a prompt is measured by kind. What a kind is in tokens is learnt for each
model from the `usage` of answers, so each answer corrects the estimates of later requests.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from serve_app.http.image_tokens import Formula, size_of

_TOOLS, _TEXT, _RESULTS, _REASONING, _CALLS, _SCHEMA = range(0, 12, 2)
_WIDE, _COUNTED, _MESSAGES, _IS_CHAT, _HAS_TOOLS = 12, 14, 15, 16, 17
_PRIORS = [0.23, 0.8] * 6 + [0.3, 0.2, 1.0, 4.0, 3.0, 30.0]
"""Tokens before anything is learnt: of a letter and of a digit or mark of each kind; of a character
that is not ASCII, and of its bytes after the first; of what has been counted; of a message's frame;
of what templates write before a conversation, and before tools."""
_LETTERS = bytes(byte for byte in range(256) if byte >= 0x80 or chr(byte).isalpha())
_ASCII = bytes(range(0x80))
_FIELDS = dict.fromkeys(("tools", "functions"), _TOOLS) | dict.fromkeys(
    (
        "system", "instructions", "documents", "messages", "prompt", "input", "suffix", "text",
        "content", "query", "queries", "text_1", "text_2", "items", "input_ids",
    ), _TEXT) | dict.fromkeys(
    (
        "response_format", "guided_json", "guided_regex", "guided_grammar", "guided_choice",
        "structured_outputs", "output_format", "output_config",
    ), _SCHEMA)  # fmt: skip
"""Fields of bodies that are read. Templates write tools first."""
_UNREAD = frozenset(
    (
        "type", "id", "call_id", "tool_call_id", "tool_use_id", "status", "role", "cache_control",
        "data", "url", "file_data", "file_id", "media_type", "format", "detail", "signature",
        "encrypted_content",
    )
)  # fmt: skip
"""Fields of messages, and of their parts, that are no text of the prompt."""
_KINDS = {
    "tool_calls": _CALLS, "function_call": _CALLS, "tool_use": _CALLS, "custom_tool_call": _CALLS,
    "reasoning": _REASONING, "reasoning_content": _REASONING, "thinking": _REASONING,
    "tool": _RESULTS, "tool_result": _RESULTS, "function_call_output": _RESULTS,
    "custom_tool_call_output": _RESULTS,
}  # fmt: skip
"""Kinds by a field of a message, by the type of a part, and by a role."""
_SPEAKERS = ("system", "developer", "user", "assistant")
_AS_JSON = (_CALLS, _TOOLS, _SCHEMA)
_IMAGES = ("image_url", "input_image", "image")
_NAME, _NAME_LENGTH = -1, 64
"""Kind of the characters at an image's end that tell it from others, and their number."""
_MAX_DEPTH = 10
_NOISE, _DRIFT = 1e-3, 1e-6
"""Variance of an answer's relative error, and what that of a weight grows by with each answer."""
_NEAR = 0.01
"""Relative error from which on there is something to learn."""
_encode = json.JSONEncoder(ensure_ascii=False).encode


class PromptSize:
    """How much of each kind of content a prompt has."""

    def __init__(self, fields: Mapping[str, Any], images: Formula) -> None:
        self._images, self._pieces = images, list[tuple[int, str]]()
        self._num_messages = 0
        self.expected = defaultdict[int, float](float)
        """Tokens by kind, before anything is learnt."""
        for name in sorted(
            [field for field in fields if field in _FIELDS], key=_FIELDS.__getitem__
        ):
            is_format = name == "text" and type(fields[name]) is dict
            self._read(fields[name], _SCHEMA if is_format else _FIELDS[name], 0)
        self.text = "\n".join([text for _, text in self._pieces])
        """The text in order; an image is represented by what tells it from others."""
        kinds = {kind for kind, _ in self._pieces}
        for kind in kinds - {_NAME}:
            parts = (text for piece_kind, text in self._pieces if piece_kind == kind)
            self._measure("".join(parts) if len(kinds) > 1 else self.text, kind)
        if self._num_messages:
            self.expected[_MESSAGES] += self._num_messages * _PRIORS[_MESSAGES]
            self.expected[_IS_CHAT] += _PRIORS[_IS_CHAT]
        if _TOOLS in self.expected:
            self.expected[_HAS_TOOLS] += _PRIORS[_HAS_TOOLS]

    def _measure(self, text: str, kind: int) -> None:
        """Count letters, marks, which take four times as many tokens, and no spaces."""
        data, num_wide = text.encode("utf-8", "surrogatepass"), 0
        rest = data.translate(None, _LETTERS)
        if not text.isascii():
            num_wide, num_more = len(data.translate(None, _ASCII)), len(data) - len(text)
            self.expected[_WIDE] += (num_wide - num_more) * _PRIORS[_WIDE]
            self.expected[_WIDE + 1] += num_more * _PRIORS[_WIDE + 1]
        self.expected[kind] += (len(data) - len(rest) - num_wide) * _PRIORS[kind]
        num_marks = len(rest) - rest.count(b" ") - rest.count(b"\n")
        self.expected[kind + 1] += num_marks * _PRIORS[kind + 1]

    def _read(self, value: Any, kind: int, depth: int) -> None:
        what = type(value)
        if what is str:
            self._pieces.append((kind, value))
        elif (what is not dict and what is not list) or depth == _MAX_DEPTH:
            return
        elif kind in _AS_JSON:
            self._pieces.append((kind, _dump(value)))
        elif what is dict:
            self._read_part(value, kind, depth)
        elif value and type(value[0]) is int:
            self.expected[_COUNTED] += len(value) * _PRIORS[_COUNTED]
        else:
            for item in value:
                is_message = type(item) is dict and item.get("role") in _SPEAKERS
                if is_message and len(item) == 2 and type(text := item.get("content")) is str:
                    # Most messages are nothing else.
                    self._num_messages += 1
                    self._pieces.append((kind, text))
                else:
                    self._read(item, kind, depth + 1)

    def _read_part(self, part: dict[str, Any], kind: int, depth: int) -> None:
        named, role = part.get("type"), part.get("role")
        if named in _IMAGES:
            held = part.get("image_url") or part.get("source") or part.get("image")
            source = held if isinstance(held, dict) else {"url": held, "detail": part.get("detail")}
            image = str(source.get("url") or source.get("data"))
            num_tokens = self._images(*size_of(image), source.get("detail") == "low")
            self.expected[_COUNTED] += num_tokens * _PRIORS[_COUNTED]
            self._pieces.append((_NAME, image[-_NAME_LENGTH:]))
            return
        for label in (role, named):
            kind = _KINDS.get(label, kind) if type(label) is str else kind
        self._num_messages += type(role) is str
        for name, value in part.items():
            if name not in _UNREAD or (name == "data" and named == "text"):
                self._read(value, _KINDS.get(name, kind), depth + 1)


class PromptTokens:
    """Estimates the tokens of prompts for one model, and learns from true counts."""

    def __init__(self, images: Formula) -> None:
        self.images = images
        self._weights, self._variance = [1.0] * len(_PRIORS), np.eye(len(_PRIORS))

    def estimate(self, expected: Mapping[int, float]) -> int:
        """Tokens of a prompt, at least one, by the expectation for each kind."""
        return max(
            round(sum([self._weights[kind] * number for kind, number in expected.items()])), 1
        )

    def learn(self, expected: Mapping[int, float], estimate: int, num_tokens: int) -> None:
        """Learn from a true count: a Kalman filter of relative errors."""
        if abs(num_tokens - estimate) < _NEAR * num_tokens or num_tokens <= 0:
            return
        error = 1.0 - self.estimate(expected) / num_tokens
        shares = np.array([expected.get(kind, 0.0) for kind in range(len(_PRIORS))]) / num_tokens
        spread = self._variance @ shares
        variance = float(shares @ spread) + _NOISE
        # What is far off what was to be expected is odd, and moves less.
        step = error * min(1.0, 3 * variance**0.5 / (abs(error) or 1.0)) / variance
        self._weights = (self._weights + spread * step).tolist()
        self._variance += _DRIFT * np.eye(len(_PRIORS)) - np.outer(spread, spread / variance)


def _dump(value: Any) -> str:
    """Return a value as JSON; empty where it is nested too deeply."""
    try:
        return _encode(value)
    except RecursionError:
        return ""
