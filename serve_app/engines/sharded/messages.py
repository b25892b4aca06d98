"""What ranks and their engine tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.engines.base import EngineStats


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What a loaded model can take."""

    kv_capacity_tokens: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Progress:
    """What an iteration did to one request."""

    request_id: str
    token_id: int | None
    """None: it failed."""
    finished: bool
    error: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """What rank 0 has to tell since it was last asked."""

    progress: list[Progress]
    stats: EngineStats | None
    """None before the first iteration."""


@dataclass(frozen=True, slots=True)
class Member:
    """Where a rank lives."""

    pid: int
    node_id: str
    visible_gpus: str
    """CUDA_VISIBLE_DEVICES; empty: none."""
