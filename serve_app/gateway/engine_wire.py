"""Messages between the gateway and our engines, besides the answers of OpenAI's API.

- A request is what the gateway has read of its body, and the tokens of its prompt.
- The head of an answer tells the state of the engine.
- An answer that is not streamed is preceded by a space for each token that has come so far: JSON
  may begin with spaces, and the gateway knows of the first token, and of the others now and then.
- Where an engine fails after its first token, the answer ends with OpenAI's error object.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from serve_app.engines.base import EngineStatus, Generation
from serve_app.engines.waiting import write_order_key
from tokenyard.routing.types import OrderKey

STATUS_HEADER = b"x-engine-status"
PROGRESS = b" "
BYTES_PER_TOKEN = 4
_TOKENS = np.dtype("<u4")
_STATUS = tuple(field.name for field in fields(EngineStatus))
_GENERATION = TypeAdapter(Generation)
_encode = json.JSONEncoder(separators=(",", ":")).encode


def write_generation(generation: Generation, request_id: str, order_key: OrderKey | None) -> bytes:
    """Encode what an engine is to generate, and the key by which the request waits there."""
    key = None if order_key is None else write_order_key(order_key)
    settings = asdict(generation) | {"token_ids": ()}
    tokens = np.asarray(generation.token_ids, dtype=_TOKENS).tobytes()
    return join_json([settings, request_id, key], tokens)


def read_generation(content: bytes) -> tuple[Generation, str, str | None]:
    """Decode what `write_generation` wrote; anything else is a ValueError."""
    (settings, request_id, key), tokens = split_json(content)
    generation = _GENERATION.validate_python(settings)
    generation.token_ids = np.frombuffer(tokens, dtype=_TOKENS).tolist()
    return generation, request_id, key


def write_status(status: EngineStatus) -> bytes:
    """Encode the state of an engine as the value of a header."""
    return to_json({name: getattr(status, name) for name in _STATUS})


def read_status(value: bytes) -> EngineStatus:
    """Decode what `write_status` wrote."""
    return EngineStatus(**json.loads(value))


def join_json(head: Any, rest: bytes) -> bytes:
    """Encode a JSON value, followed by bytes."""
    text = to_json(head)
    return b"".join((len(text).to_bytes(4, "little"), text, rest))


def split_json(payload: bytes) -> tuple[Any, bytes]:
    """Decode what `join_json` wrote."""
    start = 4 + int.from_bytes(payload[:4], "little")
    return json.loads(payload[4:start]), payload[start:]


def to_json(value: Any) -> bytes:
    """Write a value as JSON without blanks."""
    return _encode(value).encode()
