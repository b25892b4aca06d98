"""Sessions: conversations and agents whose turns find in KV memory what was said before.

More sessions than fit into KV memory evict each other, and every turn computes its whole prompt
anew. So a session is active, on one replica, from its first turn until it has been idle for its
lease. Turns of other sessions are held until the footprints of active sessions leave them room; a
rule says how much, and who goes first (`tokenyard.routing.sessions`). Where memory is ample nobody
is held.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from serve_app.gateway.replicas import Prompt, ReplicaState, ReplicaTable
from tokenyard.routing.sessions import index
from tokenyard.routing.sessions.rules import LARGEST_SHARE, SessionRule
from tokenyard.routing.types import OrderKey
from tokenyard.types import IntArray

_MOST_SESSIONS = 20_000
"""Sessions of one tenant that are remembered; the least lately used is forgotten."""
_TAIL_TOKENS = 64
"""Block size by which the prompts of sessions without a name are compared."""
_MOST_SHOWN = 100
_urgency: Callable[..., float] = cast(Any, index.urgency).py_func
"""Plain Python: to call compiled code costs more than this takes."""


@dataclass(slots=True, eq=False)
class Session:
    """A session, as far as its turns were seen."""

    name: str
    tenant: str
    arrival_s: float
    is_named: bool
    """Whether callers name it; otherwise it is known by its prompts."""
    tokens: float = 0.0
    """Prompt and answer of its last turn."""
    computed_tokens: float = 0.0
    """Tokens computed for it so far, those found in a cache left out."""
    num_turns: int = 0
    """Turns that were answered."""
    replica_id: str | None = None
    """Where its last turn went."""
    num_running: int = 0
    lease_ends_s: float = -math.inf
    tail: int | None = None
    """Name of its last prompt's last block, where it has no other."""


@dataclass(slots=True, eq=False)
class Turn:
    """One request of a session, from its arrival on."""

    session: Session
    ready_s: float
    prompt: Prompt
    is_admitted: bool = False
    """Whether it was held as long as may be, and goes where there is room or not."""
    replica_id: str | None = None
    """Where it runs; None: it does not."""
    prompt_tokens: int = 0
    """Tokens of its prompt as the endpoint counts them; 0: it does not say."""
    missing_tokens: float = 0.0
    """Tokens of its prompt that were not expected to be cached there."""


class SessionGate:
    """Knows the sessions, what they take of KV memory, and which turns have to wait."""

    def __init__(
        self, rule: SessionRule, table: ReplicaTable, share_of: Callable[[str], float] | None = None
    ) -> None:
        """Take a rule; `share_of` is the share of the memory that a tenant is entitled to.

        None: as much as any other that has sessions.
        """
        self.rule = rule
        """May be replaced: what was let in by the one before stays."""
        self._table, self._share_of = table, share_of
        self._sessions: dict[str, OrderedDict[str, Session]] = {}
        """Sessions of each tenant by name, least lately used first."""
        self._names = itertools.count()
        self._tails: dict[tuple[str, int], Session] = {}
        self._idle: OrderedDict[Session, float] = OrderedDict()
        """Tokens of sessions with a lease, in the order in which leases end."""
        self._running: dict[Turn, float] = {}
        """Tokens of turns at replicas."""
        self._taken: defaultdict[str, float] = defaultdict(float)
        """Tokens of active sessions, by replica."""
        self._taken_by: defaultdict[str, float] = defaultdict(float)
        """The same by tenant."""

    def arrive(self, name: str | None, tenant: str, prompt: Prompt, now_s: float) -> Turn:
        """Return a turn of the session of that name, or of the one that its prompt continues."""
        sessions = self._sessions.setdefault(tenant, OrderedDict())
        session = sessions.get(name) if name else self._continued(tenant, prompt)
        if session is None:
            number = next(self._names)
            session = Session(name or f"unnamed-{number}", tenant, now_s, bool(name))
        # One that was forgotten while a turn of it ran is remembered again.
        sessions[session.name] = session
        sessions.move_to_end(session.name)
        if len(sessions) > _MOST_SESSIONS:
            self._forget(next(iter(sessions.values())))
        return Turn(session, now_s, prompt)

    def admitted(self, turn: Turn, rows: IntArray, now_s: float) -> IntArray:
        """Rows of those replicas that a turn may go to now, of some that can answer it.

        Of a session that is active it is the session's own, if that is among them.
        """
        self._end_leases(now_s)
        session = turn.session
        if session.num_running or session in self._idle:
            home = self._table.replicas.get(session.replica_id or "")
            if home is not None and home.row in rows:
                return np.array([home.row])
        if turn.is_admitted:
            return rows
        tokens = turn.prompt.num_tokens
        replicas = [self._table.at(row) for row in rows.tolist()]
        if all(tokens > LARGEST_SHARE * replica.kv_tokens for replica in replicas):
            return rows  # It has room nowhere, ever: that is for an engine to say.
        most_active = self.rule.most_active * len(self._table.replicas)
        if most_active < math.inf and sum(self.num_sessions().values()) >= most_active:
            return rows[:0]
        fits = [self._has_room(replica, tokens) for replica in replicas]
        if not any(fits):
            fits = self._take_back(session.tenant, replicas, tokens)
        return np.array([row for row, fit in zip(rows, fits, strict=True) if fit], dtype=np.int64)

    def order_key(self, turn: Turn) -> OrderKey:
        """Return the place of a turn among those that are held, by the rule's urgency."""
        session, tokens = turn.session, turn.prompt.num_tokens
        home = self._table.replicas.get(session.replica_id or "")
        cached = 0 if home is None else home.match_tokens(turn.prompt)
        # Urgency grows alike for all that wait, so their order is that of any one moment.
        urgency = _urgency(
            self.rule.vector, -turn.ready_s, -session.arrival_s, float(session.num_turns > 0),
            cached / max(tokens, 1), 0.0, tokens, math.log1p(session.computed_tokens / 1000.0),
        )  # fmt: skip
        return OrderKey(-urgency)

    def start(self, turn: Turn, replica: ReplicaState, match_tokens: float) -> None:
        """Count a turn that goes to a replica."""
        session = turn.session
        self._release(session)
        session.replica_id = turn.replica_id = replica.replica_id
        session.num_running += 1
        turn.missing_tokens = turn.prompt.num_tokens - match_tokens
        # Who was let in without room takes none of others': a full gate would only delay all.
        size = 0.0 if turn.is_admitted else turn.prompt.num_tokens + self.rule.growth_tokens
        self._running[turn] = size
        self._count(turn.replica_id, session.tenant, size)

    def end(self, turn: Turn, now_s: float, num_tokens: int | None) -> None:
        """Count it no more; `num_tokens` is the length of its answer, None: it has none."""
        replica_id, session = turn.replica_id, turn.session
        if replica_id is None:
            return
        self._count(replica_id, session.tenant, -self._running.pop(turn))
        turn.replica_id = None
        session.num_running -= 1
        if num_tokens is None:
            return
        session.tokens = (turn.prompt_tokens or turn.prompt.num_tokens) + num_tokens
        session.computed_tokens += turn.missing_tokens + num_tokens
        session.num_turns += 1
        if not session.is_named:
            self._note_tail(session, turn.prompt)
        # Nobody knows of a first prompt without a name whether it will ever be gone on from.
        if not session.num_running and (session.is_named or session.num_turns > 1):
            session.lease_ends_s = now_s + self.rule.lease_s
            self._idle[session] = size = session.tokens + self.rule.growth_tokens
            self._count(replica_id, session.tenant, size)

    def num_sessions(self) -> dict[str, int]:
        """Sessions with a turn at a replica, and idle ones with a lease."""
        running = {turn.session for turn in self._running}
        return {"running": len(running), "idle": len(self._idle)}

    def describe(self, now_s: float) -> dict[str, Any]:
        """Return how full replicas are of sessions, and some of these, as `/v1/sessions` does."""
        self._end_leases(now_s)
        where = Counter(turn.replica_id for turn in self._running)
        idle = Counter(session.replica_id for session in self._idle)
        in_turns = (turn.session for turn in self._running)
        active = dict.fromkeys(itertools.chain(in_turns, self._idle))
        numbers = {name: getattr(self.rule, name) for name in ("full_at", "lease_s", "hold_s")}
        return {
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
            **self.num_sessions(),
            "replicas": [
                {
                    "replica_id": name, "pool": replica.pool, "running": where[name],
                    "idle": idle[name], "session_tokens": max(self._taken[name], 0.0),
                    "kv_tokens": replica.kv_tokens if math.isfinite(replica.kv_tokens) else None,
                }
                for name, replica in self._table.replicas.items()
            ],
            "sessions": [
                {
                    "session": session.name, "tenant": session.tenant, "turns": session.num_turns,
                    "tokens": session.tokens, "replica_id": session.replica_id,
                    "running": session.num_running,
                    "lease_s": max(session.lease_ends_s - now_s, 0.0),
                }
                for session in itertools.islice(active, _MOST_SHOWN)
            ],
        }  # fmt: skip

    def _continued(self, tenant: str, prompt: Prompt) -> Session | None:
        """The session whose last prompt is the longest that a prompt begins with."""
        names = reversed(prompt.blocks(_TAIL_TOKENS).tolist())
        known = (self._tails.get((tenant, name)) for name in names)
        return next((session for session in known if session is not None), None)

    def _note_tail(self, session: Session, prompt: Prompt) -> None:
        self._forget_tail(session)
        if len(names := prompt.blocks(_TAIL_TOKENS)):
            session.tail = int(names[-1])
            self._tails[session.tenant, session.tail] = session

    def _forget_tail(self, session: Session) -> None:
        known = (session.tenant, session.tail or 0)
        if self._tails.get(known) is session:
            del self._tails[known]

    def _forget(self, session: Session) -> None:
        self._release(session)
        self._forget_tail(session)
        del self._sessions[session.tenant][session.name]

    def _count(self, replica_id: str, tenant: str, tokens: float) -> None:
        self._taken[replica_id] += tokens
        self._taken_by[tenant] += tokens

    def _has_room(self, replica: ReplicaState, tokens: float) -> bool:
        taken, kv_tokens = self._taken[replica.replica_id], replica.kv_tokens
        if math.isinf(kv_tokens):
            return True
        if tokens > LARGEST_SHARE * kv_tokens:
            return False
        # Others may use it, too: another gateway, or who asks it directly.
        taken = max(taken, replica.status.kv_used_fraction * kv_tokens)
        full = taken + tokens + self.rule.growth_tokens
        return taken <= 0 or full <= self.rule.full_at * kv_tokens

    def _take_back(self, tenant: str, replicas: list[ReplicaState], tokens: float) -> list[bool]:
        """End leases of tenants that have more than their share, oldest first, to make room."""
        wanted = {replica.replica_id: replica for replica in replicas}
        total = sum(replica.kv_tokens for replica in self._table.replicas.values())
        having = {name for name, taken in self._taken_by.items() if taken > 0} | {tenant}
        share_of = self._share_of or (lambda _: 1.0 / len(having))
        if self._taken_by[tenant] + tokens > share_of(tenant) * total:
            return [False] * len(replicas)
        for session in list(self._idle):
            replica = wanted.get(session.replica_id or "")
            most = share_of(session.tenant) * total
            if replica is None or self._taken_by[session.tenant] <= most:
                continue
            self._release(session)
            if self._has_room(replica, tokens):
                break
        return [self._has_room(replica, tokens) for replica in replicas]

    def _end_leases(self, now_s: float) -> None:
        for session in self._ended(now_s):
            self._release(session)

    def _ended(self, now_s: float) -> Iterator[Session]:
        while self._idle and (first := next(iter(self._idle))).lease_ends_s <= now_s:
            yield first

    def _release(self, session: Session) -> None:
        """End the lease of a session, if it has one."""
        size = self._idle.pop(session, None)
        if size is not None and session.replica_id is not None:
            self._count(session.replica_id, session.tenant, -size)
