"""Whole sessions on replicas that batch: the server model behind the problem `sessions`.

Sessions arrive by themselves; each next turn comes after the answer and its tool. KV of an idle
session stays on its replica until others need the room, and goes from its end. It is beside
`batching`, and not in it, because there a request is placed when it arrives and never held; both
have the same iteration times. `tests/oracle/routing/slow_sessions.py` is the slow form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tokenyard.routing.sessions.rules import LARGEST_SHARE, SessionRule
from tokenyard.routing.simulator.sessions_kernel import layout as lay
from tokenyard.routing.simulator.sessions_kernel.loop import play
from tokenyard.types import FloatArray, IntArray


@dataclass(frozen=True)
class SessionReplicas:
    """What replicas are; arrays of shape (num_replicas,) but for the first."""

    iteration: FloatArray
    """Seconds per iteration, prompt token, decoding sequence and KV token, (num_replicas, 4)."""
    kv_tokens: FloatArray
    max_batch: FloatArray
    token_budget: FloatArray
    host_tokens: FloatArray
    """Tokens of the host KV tier; 0: there is none."""
    host_token_s: FloatArray
    """Seconds to load a token from it; the iteration waits."""

    def __len__(self) -> int:
        """Number of replicas."""
        return len(self.kv_tokens)


@dataclass(frozen=True)
class SessionStream:
    """Sessions in order of arrival; turns stand session after session, shape (num_turns,)."""

    arrival_s: FloatArray
    """Of sessions."""
    first_turn: IntArray
    """Of sessions."""
    context: FloatArray
    """Tokens of the whole prompt."""
    answer: FloatArray
    tool_s: FloatArray
    """From the answer to the next turn."""
    remaining_s: FloatArray
    """Predicted work of this turn and all after it, seconds."""
    kept: FloatArray
    """Tokens at the beginning of the prompt that are those of the turn before and its answer."""

    def __len__(self) -> int:
        """Number of sessions."""
        return len(self.arrival_s)

    @property
    def num_turns(self) -> IntArray:
        """Turns of each session, shape (num_sessions,)."""
        return np.diff(self.first_turn, append=len(self.context))

    @property
    def session(self) -> IntArray:
        """Which session a turn belongs to, shape (num_turns,)."""
        return np.repeat(np.arange(len(self)), self.num_turns)


@dataclass(frozen=True)
class SessionRun:
    """What became of a stream."""

    stream: SessionStream
    outcomes: FloatArray
    """Shape (num_turns, NUM_OUTCOME), NaN where it did not come to that."""
    totals: FloatArray

    @property
    def ttft_s(self) -> FloatArray:
        """From a turn's readiness to its first token, held time included."""
        return np.asarray(self.outcomes[:, lay.OUT_FIRST_S] - self.outcomes[:, lay.OUT_READY_S])

    @property
    def hold_s(self) -> FloatArray:
        """How long a turn was held at the gateway."""
        return np.asarray(self.outcomes[:, lay.OUT_ADMITTED_S] - self.outcomes[:, lay.OUT_READY_S])

    @property
    def completion_s(self) -> FloatArray:
        """From a session's arrival to the end of its last answer, shape (num_sessions,)."""
        last = self.stream.first_turn + self.stream.num_turns - 1
        return np.asarray(self.outcomes[last, lay.OUT_FINISH_S] - self.stream.arrival_s)

    @property
    def hit_fraction(self) -> float:
        """Share of prompt tokens that were cached."""
        hit, computed = self.outcomes[:, lay.OUT_HIT : lay.OUT_PREFILLED + 1].sum(axis=0)
        return float(hit / (hit + computed))


def run_sessions(replicas: SessionReplicas, stream: SessionStream, rule: SessionRule) -> SessionRun:
    """Play a stream to its end.

    Raises:
        ValueError: A prompt fits into no replica, or more of it is kept than it has, or than was
            said before.
    """
    _check(replicas, stream)
    world = new_world(replicas, stream, rule)
    play(world)
    return SessionRun(stream, world.outcomes, world.totals)


def new_world(replicas: SessionReplicas, stream: SessionStream, rule: SessionRule) -> lay.World:
    """The arrays before the first event."""
    num_sessions, num_turns, num = len(stream), len(stream.context), len(replicas)
    rows = np.zeros((num, lay.NUM_REPLICA))
    rows[:, : lay.KV_TOKENS] = replicas.iteration
    rows[:, lay.KV_TOKENS] = replicas.kv_tokens
    rows[:, lay.MAX_BATCH] = replicas.max_batch
    rows[:, lay.TOKEN_BUDGET] = replicas.token_budget
    rows[:, lay.HOST_TOKENS] = replicas.host_tokens
    rows[:, lay.HOST_TOKEN_S] = replicas.host_token_s
    rows[:, lay.UNTIL_S] = math.inf
    sessions = np.zeros((num_sessions, lay.NUM_SESSION))
    sessions[:, lay.ARRIVAL_S] = stream.arrival_s
    sessions[:, lay.FIRST_TURN] = stream.first_turn
    sessions[:, lay.NUM_TURNS] = stream.num_turns
    sessions[:, lay.HOME] = -1.0
    turns = np.empty((num_turns, lay.NUM_TURN))
    turns[:, lay.CONTEXT], turns[:, lay.ANSWER] = stream.context, stream.answer
    turns[:, lay.TOOL_S], turns[:, lay.REMAINING_S] = stream.tool_s, stream.remaining_s
    turns[:, lay.LOG_REMAINING] = np.log(stream.remaining_s + 1.0)
    turns[:, lay.KEPT] = stream.kept
    outcomes = np.full((num_turns, lay.NUM_OUTCOME), np.nan)
    outcomes[:, lay.OUT_HIT :] = 0.0
    return lay.World(
        rows, np.zeros((num, int(replicas.max_batch.max()), lay.NUM_RUNNING)),
        np.zeros((num, num_sessions), dtype=np.int64), sessions,
        np.zeros((num, num_sessions, lay.NUM_KV)), turns, rule.vector, outcomes,
        np.zeros(num_sessions + 2, dtype=np.int64), np.zeros(lay.NUM_TOTALS),
    )  # fmt: skip


def _check(replicas: SessionReplicas, stream: SessionStream) -> None:
    longest = float((stream.context + stream.answer).max())
    if longest > LARGEST_SHARE * float(replicas.kv_tokens.min()):
        raise ValueError(
            f"a prompt and its answer have {longest:.0f} tokens; each must fit into the KV memory "
            f"of every replica, {replicas.kv_tokens.min():.0f} tokens"
        )
    if (stream.kept > said_before(stream.context, stream.answer, stream.first_turn)).any():
        raise ValueError("a prompt keeps more than was said in its session before")
    if (stream.kept >= stream.context).any():
        raise ValueError("a prompt must be longer than what it keeps")


def said_before(context: FloatArray, answer: FloatArray, first_turn: IntArray) -> FloatArray:
    """Tokens of the turn before and of its answer, 0 for a session's first; shape (num_turns,)."""
    before = np.append(0.0, context[:-1] + answer[:-1])
    before[first_turn] = 0.0
    return before
