"""Closed traffic: clients that wait for an answer, think, and ask again (Schroeder et al. 2006).

B. Schroeder, A. Wierman, M. Harchol-Balter, "Open versus closed: a cautionary tale", NSDI 2006.
"""

from __future__ import annotations

import heapq

import numpy as np

from tokenyard.types import FloatArray, IntArray
from tokenyard.workload.model import WorkloadModel
from tokenyard.workload.sessions import Sessions, Turns
from tokenyard.workload.trace import SessionTurns, Trace


def draw_closed(
    sessions: Sessions,
    num_requests: int,
    num_clients: int,
    rng: np.random.Generator,
    model: WorkloadModel,
    block_tokens: int,
) -> Trace:
    """Draw the requests of clients that play one session after another.

    Each client begins in the middle of its first session. Sessions are cut off once every client
    has had its share of the requests, so that all clients are active from beginning to end.

    Raises:
        ValueError: There are fewer requests than clients.
    """
    if num_requests < num_clients:
        raise ValueError(f"{num_clients} clients need at least as many requests: {num_requests}")
    turns, bounds = _enough_turns(sessions, num_requests, num_clients, rng, model)
    took_s = turns.answer * sessions.answer_token_s + turns.think_s
    chosen, arrival_s, is_last = _play(bounds, took_s, num_clients, num_requests, rng)
    order = np.argsort(arrival_s, kind="stable")[:num_requests]
    place = np.full(len(chosen) + 1, -1)
    place[order] = np.arange(num_requests)
    following = np.where(is_last, -1, np.arange(len(chosen)) + 1)
    trace = sessions.trace(turns, chosen[order], arrival_s[order], block_tokens)
    own = SessionTurns(
        turns.session[chosen[order]], turns.turn[chosen[order]], place[following[order]],
        turns.think_s[chosen[order]], num_clients,
    )  # fmt: skip
    return Trace(
        trace.arrival_s, trace.context_tokens, trace.generated_tokens,
        prefix_hashes=trace.prefix_hashes, prefix_block_tokens=block_tokens, sessions=own,
    )  # fmt: skip


def _enough_turns(
    sessions: Sessions, num_requests: int, num_clients: int, rng: np.random.Generator,
    model: WorkloadModel,
) -> tuple[Turns, IntArray]:  # fmt: skip
    """Draw sessions whose played turns suffice; their first and last turns, shape (num, 2)."""
    most = max(num_requests // num_clients, 1)
    num_sessions = 2 * num_clients + 50
    while True:
        turns, _ = sessions.draw_turns(num_sessions, rng, model)
        first = np.flatnonzero(turns.turn == 0)
        last = np.append(first[1:], len(turns.turn))
        begun = min(num_clients, len(first))
        first[:begun] += (rng.random(begun) * (last - first)[:begun]).astype(np.int64)
        last = np.minimum(last, first + most)
        if (last - first).sum() >= num_requests + num_clients * most:
            return turns, np.stack([first, last], axis=1)
        num_sessions *= 2


def _play(
    bounds: IntArray, took_s: FloatArray, num_clients: int, num_requests: int,
    rng: np.random.Generator,
) -> tuple[IntArray, FloatArray, IntArray]:  # fmt: skip
    """Let clients play sessions as if nobody waited for others.

    Gives of every turn played, session by session: which it is, when it arrives, seconds, and
    whether it is the last of its session.
    """
    free_s = (rng.random(num_clients) * took_s.mean()).tolist()
    heapq.heapify(free_s)
    chosen: list[int] = []
    arrival_s: list[float] = []
    is_last: list[bool] = []
    # All arrivals before the last session's beginning are known then: more than are needed.
    needed = num_requests + num_clients * int((bounds[:, 1] - bounds[:, 0]).max())
    for first, last in bounds.tolist():
        if len(chosen) >= needed:
            break
        now = free_s[0]
        for turn in range(first, last):
            chosen.append(turn)
            arrival_s.append(now)
            is_last.append(turn == last - 1)
            now += float(took_s[turn])
        heapq.heapreplace(free_s, now)
    return np.array(chosen), np.array(arrival_s), np.array(is_last)
