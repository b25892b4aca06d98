"""Rules that admit, pause and place sessions, as numbers that compiled code reads.

A rule is `NAME`, or `NAME:KEY=VALUE:KEY=VALUE` with numbers changed, such as `index:hold_s=120`.
Remaining work is predicted: here, the truth times e^(0.7 N) with one normal N for each session,
which no gateway knows; results that use it say so.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields, replace

import numpy as np

from tokenyard.types import FloatArray

FCFS, BOOST, PROGRAM_FCFS, LEAST_ATTAINED, MOST_CACHED, LEAST_REMAINING = range(6)
"""Orders in which the turns at a replica wait."""

(
    ORDER, BOOST_S, PINNED, PAUSED_FIRST, STICKY, BY_RUNNING, KNOWS_ENDS, HOLD_S, MOST_ACTIVE,
    FULL_AT, LEASE_S, GROWTH_TOKENS, BACKFILL, WAITED, AGE, STARTED, CACHED_SHARE, REMAINING,
    CONTEXT, ATTAINED, MISS, PENDING, DECODE, FILL, OVERFLOW, TICK_S, SPARE, OWN_REPLICA,
    HALF_LIFE_S, PAUSE_S, UNCACHED, NUM_RULE,
) = range(32)  # fmt: skip
"""Places of the fields of `SessionRule`, in their order."""


LARGEST_SHARE = 0.98
"""A prompt that takes more of a replica's KV memory is not placed there."""


@dataclass(frozen=True)
class SessionRule:
    """One rule; all fields are numbers."""

    order: float = FCFS
    """Of the turns that wait at a replica: one of the orders above."""
    boost_s: float = 4.0
    """Prompts are short or long beside this, in the order BOOST."""
    pinned: float = 0.0
    """1: KV of a session with a lease is not evicted (the TTL of Continuum, arXiv 2511.02230)."""
    paused_first: float = 0.0
    """1: KV of sessions without a lease is evicted first; 0: what was used longest ago."""
    sticky: float = 0.0
    """1: a session that has been served stays on its replica."""
    by_running: float = 0.0
    """1: the cost of decoding counts only running and queued turns; 0: all active sessions."""
    knows_ends: float = 1.0
    """1: who routes is told that a session ends, and frees its KV."""
    hold_s: float = 60.0
    """Longest time that a turn is held; then it counts as admitted, whatever is full."""
    most_active: float = math.inf
    """Most active sessions per replica, on average."""
    full_at: float = math.inf
    """Share of KV memory that active sessions may fill; inf: nobody is held."""
    lease_s: float = math.inf
    """How long an idle session stays active; 0: every turn is placed anew."""
    growth_tokens: float = 0.0
    """Tokens by which every active session is expected to grow."""
    backfill: float = 0.0
    """Sessions that may be skipped because they fit nowhere."""
    waited: float = 0.0
    """Urgency per 100 seconds since the turn was ready."""
    age: float = 1.0
    """Urgency per 1,000 seconds since the session arrived."""
    started: float = 0.0
    """Urgency of a session that has been served."""
    cached_share: float = 0.0
    """Urgency of a session all of whose prompt is cached."""
    remaining: float = 0.0
    """Urgency lost per e-fold of the predicted remaining work."""
    context: float = 0.0
    """Urgency lost per 100,000 tokens of prompt."""
    attained: float = 0.0
    """Urgency lost per e-fold of the tokens computed so far, in thousands."""
    miss: float = 1.0
    """Cost of a second of prompt that is not cached."""
    pending: float = 1.0
    """Cost of a second of prompts that wait or run."""
    decode: float = 6.0
    """Cost of a second of decoding 100 tokens."""
    fill: float = 0.0
    """Cost of a replica that active sessions fill."""
    overflow: float = 0.0
    """Cost of tokens beyond KV memory, by the time to read them 100 times."""
    tick_s: float = 0.0
    """Above 0: ThunderAgent's rule (arXiv 2602.13692) decides, and sessions resume so often."""
    spare: float = 0.0
    """Share of KV memory that ThunderAgent keeps free when it resumes."""
    own_replica: float = 0.0
    """1: ThunderAgent resumes a session only where it was."""
    half_life_s: float = math.inf
    """In which half of a session's tokens no longer count while its tool runs, where ThunderAgent
    looks for room; inf: they all count."""
    pause_s: float = 0.0
    """How often ThunderAgent pauses sessions, at ticks; 0: at each."""
    uncached: float = 0.0
    """Seconds of remaining work that a second of prompt that is not cached adds to the key of the
    order LEAST_REMAINING."""

    @property
    def vector(self) -> FloatArray:
        """The numbers in their order, shape (NUM_RULE,)."""
        return np.array(astuple(self), dtype=np.float64)


_BY_COST = SessionRule(by_running=1.0, decode=1.8, overflow=18.0)
_PER_TURN = replace(_BY_COST, lease_s=0.0)
_BY_FILL = SessionRule(decode=0.5, fill=2.0, pending=0.5)
_TTL = {"order": PROGRAM_FCFS, "lease_s": 20.0, "pinned": 1.0, "sticky": 1.0}
_LONG_BOOST = {"order": BOOST, "boost_s": 120.0}
_THUNDER = SessionRule(
    tick_s=5.0, full_at=1.0, growth_tokens=100.0, paused_first=1.0, hold_s=1800.0, decode=0.0,
    fill=1.0, pending=0.0,
)  # fmt: skip
_WORKING_SET = SessionRule(
    full_at=0.9, lease_s=20.0, paused_first=1.0, miss=1.0, pending=0.0, decode=0.0, fill=1.0
)
_INDEX_LAS = SessionRule(
    order=LEAST_ATTAINED, full_at=0.97, lease_s=20.0, growth_tokens=1000.0, backfill=6.0,
    pinned=1.0, paused_first=1.0, age=0.0, started=0.5, cached_share=0.5, attained=1.0,
    decode=0.5, fill=0.5, pending=0.5,
)  # fmt: skip
_INDEX = replace(
    _INDEX_LAS, order=LEAST_REMAINING, uncached=50.0, attained=0.0, remaining=0.8, hold_s=1.0,
    growth_tokens=200.0, decode=0.3, fill=0.7, pending=1.0,
)  # fmt: skip

RULES: dict[str, SessionRule] = {
    "per_turn_most_cached": replace(_PER_TURN, order=MOST_CACHED),
    "per_turn_ttl": replace(_PER_TURN, **_TTL | {"sticky": 0.0}),
    "sticky": _BY_COST,
    "sticky_most_cached": replace(_BY_COST, order=MOST_CACHED),
    "sticky_boost": replace(_BY_COST, **_LONG_BOOST),
    "sticky_las": replace(_BY_COST, order=LEAST_ATTAINED),
    "sticky_ttl": replace(_BY_COST, **_TTL),
    "fill": _BY_FILL,
    "fill_most_cached": replace(_BY_FILL, order=MOST_CACHED),
    "fill_boost": replace(_BY_FILL, **_LONG_BOOST),
    "fill_las": replace(_BY_FILL, order=LEAST_ATTAINED),
    "fill_ttl": replace(_BY_FILL, **_TTL),
    "fill_ttl_most_cached": replace(_BY_FILL, **_TTL | {"order": MOST_CACHED}),
    "fill_ttl_las": replace(_BY_FILL, **_TTL | {"order": LEAST_ATTAINED}),
    "fill_ttl_remaining": replace(_BY_FILL, **_TTL | {"order": LEAST_REMAINING}),
    "static_cap": replace(_BY_COST, most_active=8.0),
    "thunderagent": _THUNDER,
    "thunderagent_own_replica": replace(_THUNDER, own_replica=1.0),
    "working_set": _WORKING_SET,
    "working_set_las": replace(_WORKING_SET, age=0.0, attained=1.0),
    "index_las": _INDEX_LAS,
    "index": _INDEX,
}
"""By name. `sticky` chooses a session's home by cost, `fill` by how full KV memory is, `per_turn`
every time; `_ttl` is Continuum's program FCFS, `_las` Autellix's (arXiv 2502.13965). Only
`index` and `fill_ttl_remaining` are told predicted remaining work."""


def make_rule(name: str) -> SessionRule:
    """Find a rule by its name, with the numbers that follow it changed.

    Raises:
        ValueError: No rule or field has that name, or a value is no number.
    """
    base, *changes = name.split(":")
    if base not in RULES:
        raise ValueError(f"unknown session rule {base!r}; choose one of {list(RULES)}")
    numbers = [field.name for field in fields(SessionRule)]
    changed = {}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in numbers:
            raise ValueError(f"unknown number {key!r} of rule {base}; choose one of {numbers}")
        try:
            changed[key] = float(value)
        except ValueError:
            raise ValueError(f"{key} of rule {base} is no number: {value!r}") from None
        if math.isnan(changed[key]):
            raise ValueError(f"{key} of rule {base} is no number: {value!r}")
    if min(changed.get(key, 0.0) for key in ("hold_s", "tick_s", "half_life_s", "pause_s")) < 0.0:
        raise ValueError(f"times of rule {base} must not be negative")
    return replace(RULES[base], **changed)
