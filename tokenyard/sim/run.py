"""Run a policy over streams, each from empty servers until all is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenyard import observation
from tokenyard.scenario import Scenario
from tokenyard.sim.cluster import ClusterSim, Outcomes
from tokenyard.sim.streams import StreamSet
from tokenyard.types import FloatArray, IntArray, ReplicaSnapshot, Request, RoutingPolicy

PolicyFactory = Callable[[np.random.Generator], RoutingPolicy]
"""Makes a fresh policy for one stream; randomised rules draw from the generator."""

# Keeps the random choices of policies apart from those that draw streams.
_POLICY_RANDOMNESS = 1000


@dataclass(frozen=True)
class Run:
    """One stream under one policy."""

    outcomes: Outcomes
    rewards: FloatArray
    """Reward earned from each decision to the next, shape (num_requests,)."""
    load_tokens: FloatArray | None = None
    """Tokens in flight at every server before each decision, as the router knows them, shape
    (num_requests, num_servers); None unless it was asked for."""


class Replay:
    """Repeats decisions that were made elsewhere, so that they are paid and measured alike."""

    def __init__(self, servers: IntArray) -> None:
        """Take the server of every request, shape (num_requests,)."""
        self._servers = iter(servers)

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the next recorded decision."""
        return int(next(self._servers))


def run_policy(
    scenario: Scenario,
    streams: StreamSet,
    factory: PolicyFactory,
    seed: int,
    record_load: bool = False,
) -> list[Run]:
    """Let a policy decide on every stream.

    Args:
        scenario: Servers, queue rule and reward.
        streams: What arrives.
        factory: Called once per stream.
        seed: Of the policies' own randomness.
        record_load: Whether to keep the load of every server at every decision.

    Returns:
        One run per stream, in the order of `streams`.
    """
    policies = [
        factory(np.random.default_rng([seed, _POLICY_RANDOMNESS, index]))
        for index in range(len(streams.requests))
    ]
    return run_each(scenario, streams, policies, record_load)


def run_each(
    scenario: Scenario,
    streams: StreamSet,
    policies: Sequence[RoutingPolicy],
    record_load: bool = False,
) -> list[Run]:
    """Let each policy decide on its own stream; streams of equal length are stepped together."""
    runs: dict[int, Run] = {}
    for length in {len(stream) for stream in streams.requests}:
        which = [i for i, stream in enumerate(streams.requests) if len(stream) == length]
        requests = [streams.requests[i] for i in which]
        together = _run_together(scenario, requests, [policies[i] for i in which], record_load)
        runs.update(zip(which, together, strict=True))
    return [runs[index] for index in range(len(streams.requests))]


def _run_together(
    scenario: Scenario,
    requests: Sequence[FloatArray],
    policies: Sequence[RoutingPolicy],
    record_load: bool,
) -> list[Run]:
    num_copies, num_requests = len(requests), len(requests[0])
    sim = ClusterSim(scenario, num_copies, num_requests)
    for copy, stream in enumerate(requests):
        sim.load(copy, stream)
    rewards = np.empty((num_copies, num_requests))
    load = np.empty((num_copies, num_requests, scenario.num_servers)) if record_load else None
    actions = np.empty(num_copies, dtype=np.int64)
    for index in range(num_requests):
        if load is not None:
            load[:, index] = sim.tables[:, :, observation.TOKENS_IN_FLIGHT]
        for copy, policy in enumerate(policies):
            actions[copy] = policy.route(sim.request(copy), sim.snapshots(copy))
        rewards[:, index] = sim.step(actions)
    rewards[:, -1] += _drain(sim)
    return [
        Run(sim.outcomes(copy), rewards[copy], None if load is None else load[copy])
        for copy in range(num_copies)
    ]


def _drain(sim: ClusterSim) -> FloatArray:
    """Finish what is left and return what its completion earns, shape (num_copies,)."""
    num_copies = len(sim.rewards)
    unfinished = [np.isnan(sim.outcomes(copy).response_s) for copy in range(num_copies)]
    sim.drain()
    reward, slo_s = sim.scenario.reward, sim.scenario.slo_response_s
    earned = np.empty(num_copies)
    for copy in range(num_copies):
        response_s = sim.outcomes(copy).response_s[unfinished[copy]]
        completed = np.count_nonzero(~np.isnan(response_s))
        late = np.count_nonzero(response_s > slo_s)
        earned[copy] = reward.complete * completed + reward.slo_at_completion * late
    return earned
