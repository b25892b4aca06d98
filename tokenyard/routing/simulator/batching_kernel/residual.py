"""Whole runs under a corrected policy (`tokenyard.routing.scores.residual`).

Shapes: N replicas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokenyard.compiled import compiled
from tokenyard.routing.scores.residual import (
    ResidualNetwork,
    Scratch,
    make_scratch,
    residual_scores,
)
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.batching_kernel.fleet import clear, find_decision
from tokenyard.routing.simulator.batching_kernel.layout import FleetArrays
from tokenyard.routing.simulator.batching_kernel.step import drain, place
from tokenyard.routing.simulator.batching_kernel.view import fill_table
from tokenyard.types import FloatArray


class Player(NamedTuple):
    """A policy ready to decide."""

    correction: ResidualNetwork
    scratch: Scratch
    scores: FloatArray
    """Shape (N,)."""
    mean_total_tokens: float
    slo_s: float


def make_player(
    correction: ResidualNetwork, num_replicas: int, mean_total_tokens: float, slo_s: float
) -> Player:
    """Make room for decisions between so many replicas."""
    scratch = make_scratch(correction, num_replicas)
    return Player(correction, scratch, np.empty(num_replicas), mean_total_tokens, slo_s)


@compiled
def decide(fleet: FleetArrays, copy: int, player: Player) -> int:
    """Replica that the policy takes for the current request of a copy."""
    fill_table(fleet, copy)
    request = fleet.requests[copy, int(fleet.clock[copy, lay.CURRENT])]
    return residual_scores(
        player.correction, request[lay.FEATURES :], request[lay.CONTEXT],
        request[lay.PREDICTED_OUTPUT], player.mean_total_tokens, player.slo_s,
        fleet.tables[copy], player.scratch, player.scores,
    )  # fmt: skip


@compiled
def run_residual(fleet: FleetArrays, player: Player, rewards: FloatArray) -> None:
    """Run every copy's whole stream under the policy, from empty to drained."""
    for copy in range(fleet.state.shape[0]):
        clear(fleet, copy)
        while fleet.clock[copy, lay.CURRENT] >= 0.0:
            place(fleet, copy, decide(fleet, copy, player))
            find_decision(fleet, copy)
    drain(fleet, rewards)
