"""How urgent a held session is, and what it costs to place it: an index of a few numbers."""

from __future__ import annotations

import math

from tokenyard.compiled import compiled_inline
from tokenyard.routing.sessions import rules as ru

_FINEST = 1000.0
"""The shortest prompt that a boost tells apart takes `boost_s` over this."""


@compiled_inline
def urgency(
    rule, waited_s, age_s, started, cached_share, log_remaining, context_tokens, log_attained
):
    """Which held session goes on first: the largest."""
    return (
        rule[ru.WAITED] * 0.01 * waited_s
        + rule[ru.AGE] * 0.001 * age_s
        + rule[ru.STARTED] * started
        + rule[ru.CACHED_SHARE] * cached_share
        - rule[ru.REMAINING] * log_remaining
        - rule[ru.CONTEXT] * 1e-5 * context_tokens
        - rule[ru.ATTAINED] * log_attained
    )


@compiled_inline
def placement_cost(
    rule, missing_tokens, pending_tokens, taken_tokens, placed_tokens, context_tokens, kv_tokens,
    iteration_s, prefill_token_s, kv_token_s,
):  # fmt: skip
    """What a turn costs on a replica, seconds; the least is chosen.

    `taken_tokens` are the footprint of all active sessions, `placed_tokens` that of running and
    queued turns alone. Decoding is told by 100 tokens.
    """
    held = taken_tokens
    if rule[ru.BY_RUNNING] > 0.0:
        held = placed_tokens
    over = max(0.0, placed_tokens + context_tokens - kv_tokens)
    return (
        rule[ru.MISS] * missing_tokens * prefill_token_s
        + rule[ru.PENDING] * max(pending_tokens, 0.0) * prefill_token_s
        + rule[ru.DECODE] * 100.0 * (iteration_s + kv_token_s * (held + context_tokens))
        + rule[ru.FILL] * (taken_tokens + context_tokens) / kv_tokens
        + rule[ru.OVERFLOW] * 100.0 * kv_token_s * over
    )


@compiled_inline
def waiting_key(rule, ready_s, arrival_s, uncached_s, attained_tokens, remaining_s):
    """Order of the turns that wait at a replica: the least goes first."""
    order = rule[ru.ORDER]
    if order == ru.PROGRAM_FCFS:
        return arrival_s
    if order == ru.LEAST_ATTAINED:
        return attained_tokens
    if order == ru.MOST_CACHED:
        return uncached_s * 1e6 + ready_s * 1e-3
    if order == ru.LEAST_REMAINING:
        return remaining_s + rule[ru.UNCACHED] * uncached_s
    if order == ru.BOOST:
        boost_s = rule[ru.BOOST_S]
        short = 1.0 - math.exp(-max(uncached_s, 1e-9) / boost_s)
        later = boost_s * math.log(short / (1.0 - math.exp(-1.0 / _FINEST)))
        return ready_s + max(0.0, later)
    return ready_s
