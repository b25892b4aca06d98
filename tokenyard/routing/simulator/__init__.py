"""The simulator of a scenario, whichever of the two it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.scenario import RewardWeights, Scenario
from tokenyard.routing.simulator.batching_streams import Stream
from tokenyard.routing.simulator.constant_rate import Actions, Observations, Outcomes
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.types import PolicyRunner, ReplicaSnapshot, Request
from tokenyard.types import FloatArray, IntArray


class Simulator(PolicyRunner, Protocol):
    """What environments, training and evaluation need of a simulator."""

    observations: Observations
    num_saturated: int
    num_weights: int

    def load(self, copy: int, stream: Stream) -> None:
        """Empty one copy and give it a stream."""
        ...

    def vary(self, copy: int, randomisation: Randomisation, rng: np.random.Generator) -> None:
        """Draw other hardware and staleness for one copy, which is emptied."""
        ...

    def skip_next(self, copy: int) -> None:
        """Ignore the next action of a copy that has just been loaded; it earns 0."""
        ...

    def step(self, actions: Actions) -> FloatArray:
        """Place every copy's waiting request and run to its next decision; return rewards."""
        ...

    def num_placed(self) -> IntArray:
        """Placements so far in every copy, shape (num_copies,)."""
        ...

    def sizes_seen(self) -> FloatArray:
        """Size of every request as the router knows it, tokens, shape (copies, stream_length)."""
        ...

    def current(self, copy: int = 0) -> int:
        """Index of the request that waits to be placed; -1: none is left."""
        ...

    def offered(self, copy: int = 0) -> Sequence[int]:
        """Servers that `snapshots` shows, in its order."""
        ...

    def request(self, copy: int = 0) -> Request:
        """The request that waits to be placed, as a policy may see it."""
        ...

    def snapshots(self, copy: int = 0) -> Sequence[ReplicaSnapshot]:
        """What a policy may know of one copy's servers now."""
        ...

    def outcomes(self, copy: int = 0) -> Outcomes:
        """What became of one copy's requests."""
        ...


Decide = Callable[[Simulator], None]
"""Runs all copies of a simulator to the end."""


def make_simulator(
    scenario: Scenario,
    num_copies: int,
    stream_length: int,
    reward: RewardWeights | None = None,
    expected_finish: bool = True,
) -> Simulator:
    """Make the simulator of a scenario's servers; see `ClusterSim` and `BatchingSim`."""
    simulator = server_model(scenario).simulator
    return simulator(scenario, num_copies, stream_length, reward, expected_finish)
