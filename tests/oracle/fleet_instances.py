"""Tiny fleets whose numbers can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from oracle.slow_engine import Change, Engine, Job, Loop

from tokenyard.routing.fleet import Fleet, ReplicaConfig
from tokenyard.routing.scenario import Arrivals, RewardWeights, Scenario
from tokenyard.routing.simulator.batching import BatchingSim
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_streams import BatchingStream, lay_turns
from tokenyard.routing.types import OrderKey
from tokenyard.workload.trace import SessionTurns

NO_REWARD = RewardWeights(processing=0, queue=0, overload=0, balance=0, accept=0, drop=0)
SECOND = Engine(
    a=1.0, b=0.0, c=0.0, d=0.0, max_batch=4, token_budget=64, page_tokens=4, num_pages=64,
    block_tokens=0, queue_limit=100,
)  # fmt: skip
"""Every iteration takes a second."""
STATUS = {"fail": lay.DOWN, "drain": lay.DRAINING, "join": lay.UP}


@dataclass(frozen=True)
class Ask(Job):
    """A request with what only a fleet knows of it."""

    router: int = 0
    traffic_class: int = 0
    tenant: int = 0
    predicted_output: float = 3.0
    slo_s: tuple[float, float, float] = (1e9, 1e9, 1e9)
    """On the response, the first token and the time per token."""


@cache
def _config(which: int, max_batch: int, token_budget: int) -> ReplicaConfig:
    """Fitting a performance model takes longer than a tiny run; its numbers are not used."""
    return ReplicaConfig(
        name=f"r{which}", gpu="h100_sxm", model="llama3_8b", max_batch=max_batch,
        token_budget=token_budget,
    )  # fmt: skip


def a_fleet(engines: list[Engine], reward: RewardWeights = NO_REWARD, **options) -> Scenario:
    """Make a scenario of such engines; options are fields of `Fleet`."""
    first = engines[0]
    fleet = Fleet(
        replicas=tuple(
            _config(which, first.max_batch, first.token_budget) for which in range(len(engines))
        ),
        page_tokens=first.page_tokens,
        prefix_block_tokens=first.block_tokens,
        queue_limit=first.queue_limit,
        **options,
    )
    return Scenario(
        name="tiny", description="", fleet=fleet, arrivals=Arrivals(rate_per_s=1.0), reward=reward
    )


def a_sim(
    scenario: Scenario,
    engines: list[Engine],
    num_requests: int,
    num_copies: int = 1,
    watts: float = 0.0,
    iteration_j: float = 0.0,
) -> BatchingSim:
    """Make its simulator, with the engines' own numbers in place of the performance model's."""
    sim = BatchingSim(scenario, num_copies, num_requests)
    for which, engine in enumerate(engines):
        row = sim._params[which]
        row[: lay.KV_TOKEN_S + 1] = engine.a, engine.b, engine.c, engine.d
        row[lay.NUM_PAGES] = engine.num_pages
        row[lay.WARM_UP_FACTOR] = engine.warm_up_factor
        row[lay.IDLE_W] = watts
        row[lay.ITERATION_J : lay.KV_TOKEN_J + 1] = iteration_j, 0.0, 0.0, 0.0
    sim.arrays.replica_params[:] = sim._params
    return sim


def a_stream(
    asks: list[Ask], changes: tuple[Change, ...] = (), loop: Loop | None = None
) -> BatchingStream:
    """Lay requests out as a stream, with what befalls the replicas and how clients ask."""
    numbers = {block: 1 + i for i, block in enumerate({b for ask in asks for b in ask.chain})}
    rows = np.zeros((len(asks), lay.NUM_REQUEST))
    chains: list[int] = []
    for row, ask in zip(rows, asks, strict=True):
        row[[lay.DISPATCH_S, lay.ARRIVAL_S]] = ask.submit_s
        row[lay.CONTEXT], row[lay.OUTPUT] = ask.context, ask.output
        row[lay.PREDICTED_OUTPUT], row[lay.ROUTER] = ask.predicted_output, ask.router
        row[lay.PRIORITY], row[lay.ABANDON_S] = ask.priority, ask.abandon_s
        row[lay.MAX_WAIT_S] = ask.max_wait_s
        row[lay.CHAIN_AT], row[lay.CHAIN_LENGTH] = len(chains), len(ask.chain)
        row[lay.SLO_RESPONSE_S : lay.SLO_TPOT_S + 1] = ask.slo_s
        row[lay.CLASS], row[lay.TENANT] = ask.traffic_class, ask.tenant
        chains += [numbers[block] for block in ask.chain]
    events = np.array([(c.at_s, c.replica, STATUS[c.kind]) for c in changes], dtype=np.float64)
    told = rows, np.array(chains, dtype=np.int64), events.reshape(-1, lay.NUM_EVENT)
    if loop is None:
        return BatchingStream(*told)
    following, num = np.array(loop.following), np.arange(len(asks))
    sessions = SessionTurns(num, num, following, np.array(loop.think_s), loop.num_clients)
    return BatchingStream(*told, *lay_turns(rows, sessions))


def step(sim: BatchingSim, ask: Job, replica: int) -> float:
    """Place the next request of a single copy, by its order key where it has one."""
    if ask.order_key_s is not None:
        sim.order_next(0, OrderKey(ask.order_key_s, ask.late_at_s, ask.late_key_s))
    return float(sim.step(np.array([replica]))[0])


def play(sim: BatchingSim, routes: list[list[int]]) -> None:
    """Run to the end; `routes` has the replicas of each request's attempts in turn."""
    left = [list(route) for route in routes]
    while sim.view().current() >= 0:
        sim.step(np.array([left[sim.view().current()].pop(0)]))
    sim.drain()
