"""Run a policy over streams, each from empty servers until all is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

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
) -> list[Run]:
    """Let a policy decide on every stream.

    Args:
        scenario: Servers, queue rule and reward.
        streams: What arrives.
        factory: Called once per stream.
        seed: Of the policies' own randomness.

    Returns:
        One run per stream, in the order of `streams`.
    """
    policies = [
        factory(np.random.default_rng([seed, _POLICY_RANDOMNESS, index]))
        for index in range(len(streams.requests))
    ]
    return run_each(scenario, streams, policies)


def run_each(
    scenario: Scenario,
    streams: StreamSet,
    policies: Sequence[RoutingPolicy],
) -> list[Run]:
    """Let each policy decide on its own stream; streams of equal length are stepped together."""
    runs: dict[int, Run] = {}
    for length in {len(stream) for stream in streams.requests}:
        which = [i for i, stream in enumerate(streams.requests) if len(stream) == length]
        requests = [streams.requests[i] for i in which]
        together = _run_together(scenario, requests, [policies[i] for i in which])
        runs.update(zip(which, together, strict=True))
    return [runs[index] for index in range(len(streams.requests))]


def _run_together(
    scenario: Scenario,
    requests: Sequence[FloatArray],
    policies: Sequence[RoutingPolicy],
) -> list[Run]:
    num_copies, num_requests = len(requests), len(requests[0])
    sim = ClusterSim(scenario, num_copies, num_requests)
    for copy, stream in enumerate(requests):
        sim.load(copy, stream)
    rewards = np.empty((num_copies, num_requests))
    actions = np.empty(num_copies, dtype=np.int64)
    for index in range(num_requests):
        for copy, policy in enumerate(policies):
            actions[copy] = policy.route(sim.request(copy), sim.snapshots(copy))
        rewards[:, index] = sim.step(actions)
    rewards[:, -1] += _drain(sim)
    return [Run(sim.outcomes(copy), rewards[copy]) for copy in range(num_copies)]


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
