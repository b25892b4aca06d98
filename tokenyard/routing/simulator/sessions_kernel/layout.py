"""The arrays of a run of sessions, and what stands where in their rows.

Shapes: R replicas, S sessions, T turns, B the largest batch limit.

    replicas (R, NUM_REPLICA)   what a replica is, then what it does now
    running  (R, B, NUM_RUNNING) sequences that run, in the order of admission
    waiting  (R, S)             sessions whose turn waits at the replica
    sessions (S, NUM_SESSION)   what a session is, then where it stands
    kv       (R, S, NUM_KV)     tokens of a session that are idle on a replica, in its host tier
    turns    (T, NUM_TURN)      the workload, session after session
    rule     (NUM_RULE,)        who decides (`tokenyard.routing.sessions.rules`)
    outcomes (T, NUM_OUTCOME)   what became of each turn
    live     (S + 1,)           how many sessions are under way, and which, in order of arrival
    totals   (NUM_TOTALS,)      counts over the run
"""

from __future__ import annotations

from typing import NamedTuple

from tokenyard.types import FloatArray, IntArray

# replicas: constants, then state
(
    ITERATION_S, PREFILL_TOKEN_S, SEQUENCE_S, KV_TOKEN_S, KV_TOKENS, MAX_BATCH, TOKEN_BUDGET,
    HOST_TOKENS, HOST_TOKEN_S, BUSY, START_S, UNTIL_S, BASE_S, GROWTH_S, STEPS, TAKEN, STEP,
    RUNNING, DECODING, KV_SUM, WAITING, USED, IDLE, HOST_USED, PENDING, FOOTPRINT, PLACED,
    NUM_REPLICA,
) = range(28)  # fmt: skip

# a sequence: while it prefills, LENGTH tokens are taken and KV of them computed; while it decodes
# it holds BASE + STEP tokens and ends when STEP is FINISH
(
    R_SESSION, R_LENGTH, R_KV, R_TO_PREFILL, R_CHUNK, R_BASE, R_FINISH, NUM_RUNNING,
) = range(8)  # fmt: skip

# sessions: constants, then state; FORCED: its hold has reached the bound
(
    ARRIVAL_S, FIRST_TURN, NUM_TURNS, STATE, TURN, HOME, ACTIVE, DUE_S, TOOL_END_S, READY_S,
    TOKENS, GENERATED, ATTAINED, LOG_ATTAINED, STARTED, MARKED, FORCED, PREEMPTED, ASSUMED,
    SCORE, NUM_SESSION,
) = range(21)  # fmt: skip
"""TOKENS: of the prompt where a turn is ready, of all so far while the tool runs."""

FUTURE, HELD, QUEUED, RUNS, TOOL, ENDED = range(6)
"""States of a session."""

CACHED, LAST_S, HOST, NUM_KV = range(4)

CONTEXT, ANSWER, TOOL_S, REMAINING_S, LOG_REMAINING, KEPT, NUM_TURN = range(7)

OUT_READY_S, OUT_ADMITTED_S, OUT_FIRST_S, OUT_FINISH_S, OUT_HIT, OUT_PREFILLED, NUM_OUTCOME = range(
    7
)

(
    PREEMPTIONS, HELD_TURNS, MOST_KV, NUM_TOTALS,
) = range(4)  # fmt: skip
"""MOST_KV: largest share of a replica's KV memory that was ever taken."""


class World(NamedTuple):
    """All arrays of a run; see the head of this module."""

    replicas: FloatArray
    running: FloatArray
    waiting: IntArray
    sessions: FloatArray
    kv: FloatArray
    turns: FloatArray
    rule: FloatArray
    outcomes: FloatArray
    live: IntArray
    totals: FloatArray
