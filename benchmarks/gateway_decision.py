"""What one routing decision costs the live gateway, by number of replicas before it.

python benchmarks/gateway_decision.py

Everything is on: decision log, history, metrics, exploration, books of what is in flight and of
prefixes. `pick` is all from the arrival at the placement to the reservation, publications that came
since the last decision included; `close` are what ends with a request, its row of the log
included. CPU time is that of the deciding thread, without the thread that writes the log. Policies
take turns, so that a busy machine slows all of them down alike.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.table import Table

from serve_app.cluster import Cluster, EngineProfile, ExternalPool
from serve_app.engines.base import EngineStatus
from serve_app.gateway import interpreter
from serve_app.gateway.answer import Answer
from serve_app.gateway.attempts import ReplicaAttempt
from serve_app.gateway.decision_log import DecisionLog
from serve_app.gateway.decision_record import Pick
from serve_app.gateway.endpoint_speed import EndpointSpeed
from serve_app.gateway.exchange import Attempt, Call, Headers, InferenceRequest
from serve_app.gateway.gateway import Gateway
from serve_app.gateway.replicas import Prompt, ReplicaState, ReplicaTable, learn_speeds
from serve_app.policy.manager import PolicyManager
from tokenyard.perf.online import PoolEstimator
from tokenyard.problem import Row
from tokenyard.provenance import ResultFile, report
from tokenyard.routing.artifact import DEFAULT_RULE
from tokenyard.routing.fleet import AnyReplica
from tokenyard.routing.scenario import Scenario, load_scenario

PUBLISHED_PER_DECISION = 2
"""Replicas that publish four times a second and get two requests a second."""
IN_FLIGHT_PER_REPLICA = 4
LEARN_EVERY = 300
"""Decisions after which every replica has another equation and policies are told: those of a second
at 300 requests a second."""
SHARED_TOKENS = 160
"""Leading tokens that many prompts have in common."""
NUM_SHARED = 20
"""Different beginnings of prompts."""


@dataclass(frozen=True)
class Args:
    """Measure the gateway's time per decision."""

    scenario: str = "conversation_mixed_gpus"
    """Fleet that is repeated; whose champion, SLO and tuned rules apply."""
    policies: tuple[str, ...] = ("champion", "tuned_marginal_delay", DEFAULT_RULE)
    """Who decides."""
    num_replicas: tuple[int, ...] = (4, 64, 1_000)
    """Replicas before the gateway."""
    waiting: int = 0
    """Requests that wait at each replica, of the four that are in flight there."""
    decisions: int = 2_000
    """Measured decisions of each policy; a tenth as many come before, unmeasured."""
    pause_ms: float = 0.0
    """Between decisions. After a pause caches are cold, and the log's thread keeps up."""
    prompt_tokens: int = 500
    """Length of every prompt."""
    prefix_block_tokens: int = 16
    """Tokens of one block of the replicas' prefix caches; 0: they have none."""
    estimated: bool = False
    """Every policy decides a second time where speeds are estimated: see `LEARN_EVERY`."""
    explore_fraction: float = 0.01
    """Share of decisions that are drawn at random."""
    json: ResultFile | None = None
    """Write the result rows to this file."""


class Fleet:
    """A pool whose replicas publish in turn; it answers nothing."""

    max_model_tokens = 1_000_000
    takes_any = True

    def __init__(self, args: Args, scenario: Scenario, num_replicas: int, estimated: bool) -> None:
        self.name = "fleet"
        self._pool = PoolEstimator() if estimated else None
        self._speeds: list[tuple[ReplicaState, EndpointSpeed]] = []
        self._num_refreshed = 0
        kinds = scenario.required_fleet.replicas
        self._profiles = [_profile(kinds[i % len(kinds)]) for i in range(num_replicas)]
        self._block_tokens, self._waiting = args.prefix_block_tokens, args.waiting
        self._next, self._added = 0, False
        self._rng = np.random.default_rng(1)

    def refresh(self, table: ReplicaTable, now_s: float) -> None:
        """Publish what a few replicas would have published since the last decision."""
        if not self._added:
            for number, profile in enumerate(self._profiles):
                name = f"replica-{number}"
                state = table.add(name, self.name, profile, self._block_tokens, now_s)
                if self._pool is not None:
                    speed = EndpointSpeed.of_replica(name, self.name, profile, self._pool)
                    state.estimate_with(speed)
                    self._speeds.append((state, speed))
            self._added = True
        self._num_refreshed += 1
        if self._pool is not None and self._num_refreshed % LEARN_EVERY == 0:
            for state, speed in self._speeds:
                takes_s = 20 * state.profile.iteration_s * self._rng.uniform(0.8, 1.25)
                speed.meter.estimator.observe(takes_s, 20, 1000, 200, 100_000)
            learn_speeds(table.replicas.values(), self._pool)
        for _ in range(PUBLISHED_PER_DECISION):
            number = self._next % len(self._profiles)
            state = table.replicas[f"replica-{number}"]
            waiting = min(self._waiting, state.in_flight.count)
            running = state.in_flight.count - waiting
            state.publish(EngineStatus(waiting, running, min(running * 0.01, 1.0), now_s))
            self._next += 1

    def ray_replicas(self) -> tuple[Any, ...]:
        """None: Ray does not decide."""
        return ()

    def host_loads(self) -> dict[str, dict[str, float]]:
        """Nothing is known."""
        return {}

    def by_our_clock(self, replica_id: str, status: EngineStatus, now_s: float) -> EngineStatus:
        """As it is."""
        return status

    async def answer(self, replica_id: str, attempt: Attempt) -> None:
        """Answer nothing."""


def _profile(replica: AnyReplica) -> EngineProfile:
    a, b, c, d = replica.iteration.tolist()
    return EngineProfile(
        iteration_s=a, prefill_token_s=b, sequence_s=c, kv_token_s=d, max_batch=replica.max_batch,
        token_budget=replica.token_budget, kv_capacity_tokens=replica.kv_capacity_tokens,
    )  # fmt: skip


class Load:
    """A gateway before a fleet with requests in flight; every step places one and ends one."""

    def __init__(
        self, args: Args, policy: str, num_replicas: int, folder: Path, estimated: bool
    ) -> None:
        scenario = load_scenario(args.scenario)
        cluster = _cluster(args.scenario)
        rng = np.random.default_rng(0)
        manager = PolicyManager(args.scenario, cluster.baseline, cluster.circuit_breaker, rng)
        manager.switch(policy, args.explore_fraction)
        self.log = DecisionLog(folder)
        fleet = Fleet(args, scenario, num_replicas, estimated)
        self.gateway = Gateway(cluster, manager, {fleet.name: fleet}, log=self.log)
        self._prompts = _prompts(args)
        self._open: deque[tuple[Answer, Pick]] = deque()
        self._num = 0
        for _ in range(IN_FLIGHT_PER_REPLICA * num_replicas):
            self._place()

    def step(self) -> tuple[float, float, float]:
        """Return CPU seconds of a pick, its seconds by the clock, and CPU seconds of a close."""
        pick_s, clock_s = self._place()
        answer, pick = self._open.popleft()
        attempt = ReplicaAttempt(self.gateway._attempts, answer, pick.replica)
        attempt.take(1)
        attempt.take(100, "stop")
        started_ns = time.thread_time_ns()
        self.gateway._attempts.close(answer, pick, 0, "stop", attempt.num_sends)
        return pick_s, clock_s, (time.thread_time_ns() - started_ns) / 1e9

    def stop(self) -> None:
        """End the threads.

        Raises:
            RuntimeError: The policy did not decide.
        """
        counts = self.gateway.manager.picker.counts
        self.gateway.manager.stop()
        self.log.close()
        if counts.fallbacks.total() > counts.num_decisions / 100:
            raise RuntimeError(f"the baseline decided instead: {counts.fallbacks}")

    def _place(self) -> tuple[float, float]:
        gateway = self.gateway
        call = Call(b"", b"", b"", stream=False)
        request = InferenceRequest(f"request-{self._num}", next(self._prompts), 200, call)
        self._num += 1
        model = gateway._catalog.find(None)
        assert model is not None
        answer = Answer(
            request, gateway.cluster.classes[0], _Nobody(), Prompt(request.token_ids),
            time.time(),
            wait=asyncio.Timeout(None), model=model, grant=None, tenant_share=1.0,
            needed_tokens=len(request.token_ids) + request.max_tokens,
        )  # fmt: skip
        started_ns, started_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        pick = gateway._placement.pick(answer)
        ended_cpu_ns, ended_ns = time.thread_time_ns(), time.perf_counter_ns()
        assert pick is not None
        self._open.append((answer, pick))
        return (ended_cpu_ns - started_cpu_ns) / 1e9, (ended_ns - started_ns) / 1e9


class _Nobody:
    """Reads no answer."""

    begun = False

    async def begin(self, status: int, headers: Headers) -> None:
        """Send nothing."""

    async def write(self, data: bytes) -> None:
        """Send nothing."""


def _pool(profile: EngineProfile) -> ExternalPool:
    return ExternalPool.model_validate(
        {
            "name": "fleet", "kind": "external", "model": "m", "profile": profile.model_dump(),
            "endpoints": [{"url": "http://localhost"}],
        }
    )  # fmt: skip


def _cluster(scenario: str) -> Cluster:
    pool = _pool(_profile(load_scenario(scenario).required_fleet.replicas[0]))
    return Cluster.model_validate(
        {
            "name": "b", "description": "b", "served_model": "m", "scenario": scenario,
            "classes": [{"name": "default", "response_s": 10.0}], "pools": [pool],
            "limits": {"max_in_flight": 4},
        # A busy machine that interrupts a decision must not end the run.
        "circuit_breaker": {"budget_s": 1.0},
        }
    )  # fmt: skip


def _prompts(args: Args) -> Iterator[tuple[int, ...]]:
    rng = np.random.default_rng(2)
    shared = rng.integers(0, 50_000, (NUM_SHARED, SHARED_TOKENS)).tolist()
    while True:
        own = rng.integers(0, 50_000, args.prompt_tokens).tolist()
        yield tuple((shared[int(rng.integers(NUM_SHARED))] + own)[: args.prompt_tokens])


def measure(args: Args, num_replicas: int) -> list[Row]:
    """Time decisions of all policies on a fleet of this size, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        loads = {
            policy + ", estimated" * estimated: Load(
                args, policy, num_replicas, Path(folder) / f"{policy}-{estimated}", estimated
            )
            for policy in args.policies
            for estimated in (False, True)[: 1 + args.estimated]
        }
        times: dict[str, list[tuple[float, float, float]]] = {policy: [] for policy in loads}
        interpreter.share()
        interpreter.settle()
        for number in range(args.decisions + args.decisions // 10):
            for policy, load in loads.items():
                if args.pause_ms:
                    time.sleep(args.pause_ms / 1e3)
                took = load.step()
                if number >= args.decisions // 10:
                    times[policy].append(took)
        for load in loads.values():
            load.stop()
    return [
        _row(policy, num_replicas, times[policy]) | {"rows_lost": load.log.num_lost}
        for policy, load in loads.items()
    ]


def _row(policy: str, num_replicas: int, times: list[tuple[float, float, float]]) -> Row:
    pick, clock, close = 1e6 * np.array(times).T
    return {
        "policy": policy,
        "num_replicas": num_replicas,
        "pick_cpu_mean_us": float(pick.mean()),
        "pick_cpu_p50_us": float(np.median(pick)),
        "pick_cpu_p99_us": float(np.percentile(pick, 99)),
        "pick_p99_us": float(np.percentile(clock, 99)),
        "close_cpu_p50_us": float(np.median(close)),
        "close_cpu_p99_us": float(np.percentile(close, 99)),
        "both_cpu_p50_us": float(np.median(pick + close)),
    }


def main(args: Args) -> None:
    """Measure, print a table and write the rows."""
    rows = [row for number in args.num_replicas for row in measure(args, number)]
    table = Table(title="one decision of the gateway, microseconds")
    for name in rows[0]:
        table.add_column(name.removesuffix("_us"), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.0f}" if isinstance(v, float) else str(v) for v in row.values()))
    report(table, rows, args.json, 0, width=120)


if __name__ == "__main__":
    main(tyro.cli(Args))
