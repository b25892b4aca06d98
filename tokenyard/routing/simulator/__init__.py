"""The simulator of a scenario, whichever of the two it needs."""

from __future__ import annotations

from tokenyard.routing.scenario import RewardWeights, Scenario
from tokenyard.routing.simulator.server_models import Decide, Simulator, server_model

__all__ = ["Decide", "Simulator", "make_simulator"]


def make_simulator(
    scenario: Scenario,
    num_copies: int,
    stream_length: int,
    reward: RewardWeights | None = None,
) -> Simulator:
    """Make the simulator of a scenario's servers; see `ClusterSim` and `BatchingSim`."""
    simulator = server_model(scenario).simulator
    return simulator(scenario, num_copies, stream_length, reward)
