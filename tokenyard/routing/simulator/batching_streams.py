"""Requests, prefix chains and replica events of a fleet, as the rows that its simulator reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tokenyard.routing.fleet import Churn, Fleet, TrafficClass
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.types import FloatArray, IntArray
from tokenyard.workload.trace import SessionTurns, Trace


@dataclass(frozen=True)
class BatchingStream:
    """One stream of requests for a fleet, and what happens to its replicas meanwhile."""

    requests: FloatArray
    """Shape (num_requests, lay.NUM_REQUEST)."""
    chains: IntArray
    """Ids of all prefix blocks, from 1 on, shape (num_chained,)."""
    events: FloatArray
    """When replicas change, in order of time, shape (num_events, lay.NUM_EVENT)."""
    turns: FloatArray = field(default_factory=lambda: np.zeros((0, lay.NUM_TURN)))
    """How requests follow each other, shape (num_requests, lay.NUM_TURN); empty: no sessions."""
    num_clients: int = 0
    """Of a closed process: most requests in flight or thought of; 0: arrivals are open."""
    factors: FloatArray = field(default_factory=lambda: np.zeros((1, 0)))
    """Factors on the times of iterations, shape (num_replicas, num_factors); (1, 0): none."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.requests)

    @property
    def num_blocks(self) -> int:
        """Different prefix blocks."""
        return int(self.chains.max(initial=0))


Stream = FloatArray | BatchingStream
"""Requests as the simulator of a scenario steps through them: rows of shape (num_requests,
kernel.NUM_REQUEST) for the token-level cluster, or a `BatchingStream` for a fleet."""


NUM_FACTORS = 4096
"""Factors on iteration times; they are used in turn, and then again."""


def token_rows(stream: Stream) -> FloatArray:
    """Rows of a stream for the token-level cluster.

    Raises:
        ValueError: It is a stream for a fleet.
    """
    if isinstance(stream, BatchingStream):
        raise ValueError("this is for token-level servers; the scenario has a fleet of engines")
    return stream


def fleet_stream(stream: Stream) -> BatchingStream:
    """The stream, which is one for a fleet.

    Raises:
        ValueError: It is one for the token-level cluster.
    """
    if isinstance(stream, BatchingStream):
        return stream
    raise ValueError("this is for a fleet of engines; the scenario has token-level servers")


def dispatch_s(arrival_s: FloatArray, epoch_s: float | None) -> FloatArray:
    """When requests are decided: at their arrival, or at the next multiple of `epoch_s`."""
    return arrival_s if epoch_s is None else np.ceil(arrival_s / epoch_s) * epoch_s


def encode_for_fleet(
    fleet: Fleet,
    trace: Trace,
    predicted_output: FloatArray,
    features: FloatArray,
    slo_response_s: float,
    rng: np.random.Generator,
    decision_epoch_s: float | None = None,
) -> BatchingStream:
    """Lay a trace out for a fleet; classes, tenants, routers and failures are drawn from `rng`.

    Args:
        fleet: Whose classes, tenants, routers and churn apply.
        trace: Requests; prompts and outputs of no token count as one. Shared prefixes are told
            anew in the fleet's blocks.
        predicted_output: Output that the router is told of, tokens, shape (num_requests,).
        features: Scaled request features, shape (num_requests, NUM_REQUEST_FEATURES).
        slo_response_s: End-to-end SLO where a class has none of its own.
        rng: Source of all randomness.
        decision_epoch_s: Decide at multiples of this; None: at every arrival.
    """
    num = trace.num_requests
    if fleet.prefix_block_tokens:
        trace = trace.with_prefix_blocks(fleet.prefix_block_tokens)
    rows = np.empty((num, lay.NUM_REQUEST))
    rows[:, lay.ARRIVAL_S] = trace.arrival_s
    rows[:, lay.DISPATCH_S] = dispatch_s(trace.arrival_s, decision_epoch_s)
    rows[:, lay.CONTEXT] = np.maximum(trace.context_tokens, 1)
    rows[:, lay.OUTPUT] = np.maximum(trace.generated_tokens, 1)
    rows[:, lay.PREDICTED_OUTPUT] = np.maximum(predicted_output, 1.0)
    rows[:, lay.ROUTER] = rng.integers(fleet.num_routers, size=num)
    rows[:, lay.FEATURES :] = features
    _draw_classes(rows, fleet.classes, slo_response_s, rng)
    rows[:, lay.TENANT] = _draw(num, [tenant.share for tenant in fleet.tenants], rng)
    chains = _number_blocks(rows, trace if fleet.prefix_block_tokens else None)
    events = _no_events() if fleet.churn is None else _draw_events(fleet, fleet.churn, rows, rng)
    turns, num_clients = lay_turns(rows, trace.sessions)
    factors = _draw_factors(fleet, rng)
    return BatchingStream(rows, chains, events, turns, num_clients, factors)


def lay_turns(rows: FloatArray, sessions: SessionTurns | None) -> tuple[FloatArray, int]:
    """Rows that say how requests follow each other, and the number of closed clients."""
    if sessions is None:
        return np.zeros((0, lay.NUM_TURN)), 0
    turns = np.empty((len(rows), lay.NUM_TURN))
    turns[:, lay.NEXT_TURN] = sessions.next_turn
    turns[:, lay.THINK_S] = sessions.think_s
    turns[:, lay.PATIENCE_S] = rows[:, lay.ABANDON_S] - rows[:, lay.ARRIVAL_S]
    turns[:, lay.BEGINS] = True
    turns[sessions.next_turn[sessions.next_turn >= 0], lay.BEGINS] = False
    turns[:, lay.START_S] = rows[:, lay.ARRIVAL_S]
    turns[:, lay.SESSION] = sessions.session
    turns[:, lay.TURN] = sessions.turn
    return turns, sessions.num_clients


def _draw_factors(fleet: Fleet, rng: np.random.Generator) -> FloatArray:
    """Factors of mean 1 on the times of iterations: each replica begins elsewhere in one table."""
    if fleet.iteration_jitter == 0.0:
        return np.zeros((1, 0))
    shape = fleet.iteration_jitter**-2
    num = len(fleet.replicas)
    return rng.gamma(shape, 1.0 / shape, size=(num, NUM_FACTORS))


def _draw(num: int, shares: list[float], rng: np.random.Generator) -> IntArray:
    total = np.cumsum(shares) / np.sum(shares)
    return np.searchsorted(total, rng.random(num), side="right")


def _draw_classes(
    rows: FloatArray,
    classes: tuple[TrafficClass, ...],
    slo_response_s: float,
    rng: np.random.Generator,
) -> None:
    which = _draw(len(rows), [service_class.share for service_class in classes], rng)
    patience = rng.exponential(size=len(rows))
    rows[:, lay.CLASS] = which
    for index, kind in enumerate(classes):
        mine = which == index
        rows[mine, lay.PRIORITY] = kind.priority
        rows[mine, lay.SLO_RESPONSE_S] = kind.response_s or slo_response_s
        rows[mine, lay.SLO_TTFT_S] = kind.ttft_s or np.inf
        rows[mine, lay.SLO_TPOT_S] = kind.tpot_s or np.inf
        patience_s = patience[mine] * kind.patience_s if kind.patience_s else np.inf
        waits_s = np.minimum(patience_s, kind.timeout_s or np.inf)
        rows[mine, lay.ABANDON_S] = rows[mine, lay.ARRIVAL_S] + waits_s
        rows[mine, lay.MAX_WAIT_S] = kind.max_wait_s or np.inf


def _number_blocks(rows: FloatArray, trace: Trace | None) -> IntArray:
    """Give prefix blocks consecutive numbers from 1 on, and note where each chain stands."""
    rows[:, [lay.CHAIN_AT, lay.CHAIN_LENGTH]] = 0.0
    if trace is None or trace.prefix_hashes is None:
        return np.zeros(0, dtype=np.int64)
    lengths = np.array([len(hashes) for hashes in trace.prefix_hashes])
    rows[:, lay.CHAIN_LENGTH] = lengths
    rows[:, lay.CHAIN_AT] = np.cumsum(lengths) - lengths
    flat = [block for hashes in trace.prefix_hashes for block in hashes]
    return np.unique(np.array(flat, dtype=np.int64), return_inverse=True)[1].reshape(-1) + 1


def _no_events() -> FloatArray:
    return np.zeros((0, lay.NUM_EVENT))


def _draw_events(
    fleet: Fleet, churn: Churn, rows: FloatArray, rng: np.random.Generator
) -> FloatArray:
    """Ends and returns of all replicas while requests arrive."""
    end_s = rows[-1, lay.ARRIVAL_S]
    events = []
    for replica in range(len(fleet.replicas)):
        now = rows[0, lay.ARRIVAL_S] + rng.exponential(churn.mean_up_s)
        while now < end_s:
            if rng.random() < churn.drained_share:
                events.append((now, replica, lay.DRAINING))
                now += churn.drain_s
            events.append((now, replica, lay.DOWN))
            now += rng.exponential(churn.mean_down_s)
            events.append((now, replica, lay.UP))
            now += rng.exponential(churn.mean_up_s)
    return np.array(sorted(events), dtype=np.float64).reshape(-1, lay.NUM_EVENT)
