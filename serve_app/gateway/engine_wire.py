"""What the gateway and engines of ours tell each other beside OpenAI's bodies and answers.

- A request's body may begin with the tokens of its prompt, so that it is tokenised once.
- The head of an answer tells the state of the engine.
- An answer that is not streamed is preceded by a space for each token that has come so far: JSON
  may begin with spaces, and the gateway knows of the first token, and of the others now and then.
- Where an engine fails after its first token, the answer ends with OpenAI's error object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from serve_app.engines.base import EngineStatus
from serve_app.engines.waiting import write_order_key
from tokenyard.routing.types import OrderKey

NUM_TOKENS_HEADER = b"x-prompt-tokens"
"""How many tokens a body begins with."""
ORDER_KEY_HEADER = b"x-order-key"
"""Place among the requests that wait, lower first, Unix time, seconds: `write_order_key`."""
STATUS_HEADER = b"x-engine-status"
PROGRESS = b" "
_BYTES_PER_TOKEN = 4
_TOKENS = np.dtype("<u4")
_STATUS = tuple(field.name for field in fields(EngineStatus))
_encode = json.JSONEncoder(separators=(",", ":")).encode


def put_tokens_before(body: bytes, token_ids: Sequence[int]) -> bytes:
    """Return a body that begins with the tokens of its prompt."""
    return np.asarray(token_ids, dtype=_TOKENS).tobytes() + body


def room_for_tokens(num_tokens: int) -> int:
    """Bytes that so many tokens take before a body."""
    return num_tokens * _BYTES_PER_TOKEN


def split_tokens(content: bytes, num_tokens: int) -> tuple[list[int], bytes]:
    """Return the tokens that a body begins with, and the rest.

    Raises:
        ValueError: It is shorter.
    """
    end = room_for_tokens(num_tokens)
    if not 0 < end <= len(content):
        raise ValueError(f"a body of {len(content)} bytes does not begin with {num_tokens} tokens")
    ids: list[int] = np.frombuffer(content[:end], dtype=_TOKENS).tolist()
    return ids, content[end:]


def order_key_line(order_key: OrderKey | None) -> bytes:
    """Write the header with an order key; nothing where there is none."""
    if order_key is None:
        return b""
    return b"%b: %b\r\n" % (ORDER_KEY_HEADER, write_order_key(order_key).encode())


def write_status(status: EngineStatus) -> bytes:
    """Lay the state of an engine out as a header's value."""
    return _encode({name: getattr(status, name) for name in _STATUS}).encode()


def read_status(value: bytes) -> EngineStatus:
    """Read what `write_status` wrote."""
    return EngineStatus(**json.loads(value))
