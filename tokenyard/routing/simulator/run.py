"""Run a policy over streams, each from empty servers until all is done.

Requests of a stream's warm-up are played, and are not in its run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.policies.tuned import TunedRules
from tokenyard.routing.scenario import NO_REWARD, Scenario
from tokenyard.routing.simulator import Decide, Simulator, make_simulator
from tokenyard.routing.simulator.batching_streams import Stream
from tokenyard.routing.simulator.constant_rate import Outcomes
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import StreamSet
from tokenyard.routing.types import (
    OrderingPolicy,
    OrderKey,
    ReplicaSnapshot,
    RoutingPolicy,
    counted_in,
)
from tokenyard.types import FloatArray, IntArray

PolicyFactory = Callable[[np.random.Generator], RoutingPolicy]
"""Makes a fresh policy for one stream; randomised rules draw from the generator."""

# Keeps the random choices of policies apart from those that draw streams.
_POLICY_RANDOMNESS = 1000


@dataclass(frozen=True)
class Run:
    """One stream under one policy."""

    outcomes: Outcomes
    rewards: FloatArray | None = None
    """Reward earned from each decision to the next, shape (num_requests,); None: the scenario pays
    none."""

    def after(self, warm_up: int) -> Run:
        """Without the first requests, which only filled the servers."""
        rewards = None if self.rewards is None else self.rewards[warm_up:]
        return Run(self.outcomes.after(warm_up), rewards)


Chooser = Callable[[Simulator, int], int]
"""Names the server for the request that waits in one copy of a simulator.

It may say there by which key the request is to wait (`order_next`).
"""


def choosing(policy: RoutingPolicy) -> Chooser:
    """Choose, and order, as a policy does, which is shown no more than it may know."""
    if isinstance(policy, OrderingPolicy):
        return partial(_place, policy)

    block_tokens = counted_in(policy)

    def choose(sim: Simulator, copy: int) -> int:
        seen = sim.view(copy)
        return seen.offered()[policy.route(seen.request(), seen.snapshots(block_tokens))]

    return choose


def _place(policy: OrderingPolicy, sim: Simulator, copy: int) -> int:
    seen = sim.view(copy)
    offered = seen.offered()
    snapshots: Sequence[ReplicaSnapshot] = seen.snapshots(counted_in(policy))
    if policy.sees_queues:
        pairs = zip(offered, snapshots, strict=True)
        snapshots = [replace(snapshot, queue=seen.queue(server)) for server, snapshot in pairs]
    decision = policy.place(seen.request(), snapshots)
    if decision.order_key is not None:
        sim.order_next(copy, decision.order_key)
    return offered[decision.replica]


def repeating(servers: IntArray, order_keys: FloatArray | None = None) -> Chooser:
    """Repeat decisions made elsewhere.

    Args:
        servers: Of the requests, shape (num_requests,).
        order_keys: By what they wait, on the stream's clock, shape (num_requests, 3); NaN: behind
            all that are there. None: all are served as they come.
    """
    left: Iterator[int] = iter(servers.tolist())
    if order_keys is None:
        return lambda sim, copy: next(left)
    keys = iter(order_keys.tolist())

    def choose(sim: Simulator, copy: int) -> int:
        sim.order_next(copy, OrderKey(*next(keys)))
        return next(left)

    return choose


def run_policy(
    scenario: Scenario,
    streams: StreamSet,
    factory: PolicyFactory,
    seed: int,
) -> list[Run]:
    """Let a policy decide on every stream.

    Returns:
        One run per stream, in the order of `streams`.
    """
    policies = [
        factory(np.random.default_rng([seed, _POLICY_RANDOMNESS, index]))
        for index in range(len(streams.requests))
    ]
    return run_each(scenario, streams, [choosing(policy) for policy in policies])


def run_compiled(scenario: Scenario, streams: StreamSet, decide: Decide) -> list[Run]:
    """Let a compiled policy decide on every stream; rewards are not computed.

    Returns:
        One run per stream, in the order of `streams`.
    """
    runs = []
    for stream in streams.requests:
        sim = make_simulator(scenario, 1, len(stream), NO_REWARD)
        sim.load(0, stream)
        decide(sim)
        runs.append(Run(sim.view().outcomes()))
    return _counted(runs, streams) if streams.warm_up else runs


def context_of(
    scenario: Scenario, rng: np.random.Generator, tuned: TunedRules | None = None
) -> PolicyContext:
    """What the rules of a scenario are built from; without `tuned`, those that ship for it."""
    return PolicyContext(scenario.name, scenario.slo, rng, scenario.num_servers, tuned)


def run_rule(
    name: str, scenario: Scenario, streams: StreamSet, seed: int = 0,
    tuned: TunedRules | None = None,
) -> list[Run]:  # fmt: skip
    """Let a rule decide on every stream, compiled where it can be and nothing is paid.

    Args:
        name: Of the rule.
        scenario: Whose servers and rewards they are.
        streams: What arrives.
        seed: Of the rule's own choices.
        tuned: Parameters and knobs; None: those that ship for the scenario.
    """
    if not scenario.pays:
        decide = server_model(scenario).compiled(name, tuned)
        if decide is not None:
            return run_compiled(scenario, streams, decide)

    def factory(rng: np.random.Generator) -> RoutingPolicy:
        return make_policy(name, context_of(scenario, rng, tuned))

    return run_policy(scenario, streams, factory, seed)


def run_each(
    scenario: Scenario,
    streams: StreamSet,
    choosers: Sequence[Chooser],
) -> list[Run]:
    """Let each decide on its own stream; streams of equal length are stepped together."""
    runs: dict[int, Run] = {}
    for length in {len(stream) for stream in streams.requests}:
        which = [i for i, stream in enumerate(streams.requests) if len(stream) == length]
        requests = [streams.requests[i] for i in which]
        together = _run_together(scenario, requests, [choosers[i] for i in which])
        runs.update(zip(which, together, strict=True))
    in_order = [runs[index] for index in range(len(streams.requests))]
    return _counted(in_order, streams) if streams.warm_up else in_order


def _counted(runs: Sequence[Run], streams: StreamSet) -> list[Run]:
    """Without the requests that only filled the servers."""
    return [run.after(num) for run, num in zip(runs, streams.warm_up, strict=True)]


def _run_together(
    scenario: Scenario, streams: Sequence[Stream], choosers: Sequence[Chooser]
) -> list[Run]:
    num_copies, num_requests = len(streams), len(streams[0])
    sim = make_simulator(scenario, num_copies, num_requests)
    for copy, stream in enumerate(streams):
        sim.load(copy, stream)
    rewards = np.zeros((num_copies, num_requests)) if scenario.pays else None
    actions = np.zeros(num_copies, dtype=np.int64)
    # A fleet may place a request more than once, so copies end at different times.
    deciding = list(range(num_copies))
    while deciding:
        for copy in deciding:
            actions[copy] = choosers[copy](sim, copy)
        if rewards is None:
            sim.step(actions)
        else:
            indices = [sim.view(copy).current() for copy in deciding]
            rewards[deciding, indices] += sim.step(actions)[deciding]
        deciding = [copy for copy in deciding if sim.view(copy).current() >= 0]
    earned = sim.drain()
    if rewards is None:
        return [Run(sim.view(copy).outcomes()) for copy in range(num_copies)]
    rewards[:, -1] += earned
    return [Run(sim.view(copy).outcomes(), rewards[copy]) for copy in range(num_copies)]
