"""What public routers measure, read from a snapshot.

They take replicas for equal and count tokens, blocks or requests. A server that takes requests at a
constant rate has no `engine`: it has no cache, and does not tell prompt from output. There the
nearest count stands in, which every function says.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenyard.routing.types import ReplicaSnapshot, Request


def match_tokens(request: Request, snapshot: ReplicaSnapshot) -> int:
    """Leading tokens of the request that are believed to be cached; 0 without `engine`."""
    engine = snapshot.engine
    return 0 if engine is None else min(engine.match_tokens, request.context_tokens)


def match_fraction(request: Request, snapshot: ReplicaSnapshot) -> float:
    """Share of the prompt that is believed to be cached; 0 without `engine`."""
    return match_tokens(request, snapshot) / max(1, request.context_tokens)


def longest_match(request: Request, snapshots: Sequence[ReplicaSnapshot]) -> list[int]:
    """Indices of the replicas that have most of the prompt cached, in order."""
    matches = [match_tokens(request, s) for s in snapshots]
    longest = max(matches)
    return [i for i, match in enumerate(matches) if match == longest]


def miss_tokens(request: Request, snapshot: ReplicaSnapshot) -> int:
    """Prompt tokens of the request that a replica would have to compute."""
    return request.context_tokens - match_tokens(request, snapshot)


def prefill_in_flight_tokens(snapshot: ReplicaSnapshot) -> float:
    """Prompt tokens in flight that are still to compute; without `engine` all tokens in flight."""
    engine = snapshot.engine
    return snapshot.tokens_in_flight if engine is None else engine.prefill_in_flight_tokens


def prefill_token_s(snapshot: ReplicaSnapshot) -> float:
    """Seconds of prefill per token; without `engine` those of any token."""
    engine = snapshot.engine
    return 1.0 / snapshot.tokens_per_s if engine is None else engine.prefill_token_s


def kv_used_fraction(snapshot: ReplicaSnapshot) -> float:
    """Share of KV memory in use; without `engine` requests over `max_concurrency`, at most 1."""
    if snapshot.engine is None:
        return min(1.0, snapshot.num_outstanding / snapshot.max_concurrency)
    return snapshot.engine.kv_used_fraction


def kv_tokens(snapshot: ReplicaSnapshot) -> float:
    """Tokens in KV memory; without `engine` the tokens in flight."""
    engine = snapshot.engine
    if engine is None:
        return snapshot.tokens_in_flight
    return engine.kv_used_fraction * engine.kv_capacity_tokens


def unit_of_load(snapshot: ReplicaSnapshot, by_speed: float) -> float:
    """What a token or request in flight counts: 1, or by speed the time of a token, seconds.

    The makers count 1. To count by speed is a knob of ours for fleets of unequal GPUs.
    """
    return 1.0 / snapshot.full_tokens_per_s if by_speed else 1.0
