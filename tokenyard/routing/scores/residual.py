"""Least added delay with searched weights, corrected by a network that scores every replica alike.

The rule (`scores.linear.marginal_scores`) holds what is known of replicas; the network
(`equivariant`) adds what it cannot say, such as that a fast replica is worth more to those who
come next while traffic is high. One compiled function is the policy, in training and serving. A
network without units leaves the rule alone, so simulators run both in one loop.

Shapes: N replicas, F features of a replica, H hidden units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenyard.compiled import compiled
from tokenyard.routing.equivariant import Layout
from tokenyard.routing.observation import NUM_REQUEST_FEATURES, ROUTABLE, encode
from tokenyard.routing.scores.linear import marginal_scores
from tokenyard.types import FloatArray

LAYOUT = Layout()
NUM_LAYERS = 3
"""Two hidden ones with tanh, and the sum that is the correction."""

_NUM_FEATURES = LAYOUT.num_features
_STRIDE = LAYOUT.numbers_per_replica


class ResidualNetwork(NamedTuple):
    """The arrays of the policy, with the units of its inputs folded into the first layer."""

    weights: FloatArray
    """Of the rule, shape (NUM_MARGINAL_WEIGHTS,) or (NUM_MARGINAL_SLO_WEIGHTS,)."""
    first: FloatArray
    """Shape (F + NUM_REQUEST_FEATURES + F, H): the replica, the request, the mean replica."""
    first_bias: FloatArray
    second: FloatArray
    """Shape (H, H)."""
    second_bias: FloatArray
    last: FloatArray
    """Shape (H,)."""


class Player(NamedTuple):
    """A policy ready to decide between N replicas, and where it computes."""

    correction: ResidualNetwork
    mean_total_tokens: float
    """Typical size of a request, tokens."""
    slo_s: float
    """Response-time SLO, seconds."""
    observation: npt.NDArray[np.float32]
    """Of the last decision, shape (LAYOUT.size(N),)."""
    hidden: FloatArray
    """Shape (3, H)."""
    scores: FloatArray
    """Costs of the last decision, in units of the SLO, shape (N,); infinite where not routable."""


def fold(
    arrays: Mapping[str, FloatArray], layers: Sequence[tuple[FloatArray, FloatArray]]
) -> ResidualNetwork:
    """Take a policy's arrays for the compiled function.

    Args:
        arrays: `weights`, and `request_mean`, `request_std`, `replica_mean`, `replica_std`.
        layers: Weights of shape (outputs, inputs) and biases of the three layers; the last bias,
            which all replicas share, decides nothing.
    """
    (first, first_bias), (second, second_bias), (last, _) = layers
    of_replica, of_request = (
        (arrays[f"{kind}_mean"], arrays[f"{kind}_std"]) for kind in ("replica", "request")
    )
    mean, std = map(np.concatenate, zip(of_replica, of_request, of_replica, strict=True))
    scaled = first / std
    return ResidualNetwork(
        np.ascontiguousarray(arrays["weights"], dtype=np.float64),
        np.ascontiguousarray(scaled.T),
        first_bias - scaled @ mean,
        np.ascontiguousarray(second.T),
        np.ascontiguousarray(second_bias),
        np.ascontiguousarray(last[0]),
    )


def rule_alone(weights: FloatArray) -> ResidualNetwork:
    """The rule of these weights, and a network without units."""
    none, nothing = np.empty((0, 0)), np.empty(0)
    return ResidualNetwork(
        np.ascontiguousarray(weights, dtype=np.float64), none, nothing, none, nothing, nothing
    )


def make_player(
    correction: ResidualNetwork, num_replicas: int, mean_total_tokens: float, slo_s: float
) -> Player:
    """Make room for decisions between so many replicas; units are those of `Player`."""
    return Player(
        correction,
        float(mean_total_tokens),
        float(slo_s),
        np.empty(LAYOUT.size(num_replicas), dtype=np.float32),
        np.empty((NUM_LAYERS, len(correction.first_bias))),
        np.empty(num_replicas),
    )


@compiled
def residual_scores(
    player: Player,
    request_features: FloatArray,
    context_tokens: float,
    output_tokens: float,
    columns: FloatArray,
) -> int:
    """Find the cost of every replica: what the rule says, less what the network says.

    Args:
        player: The policy; its scores are those of this decision after.
        request_features: `squash`ed features of the request, shape (NUM_REQUEST_FEATURES,).
        context_tokens: Prompt length, tokens.
        output_tokens: Output length as the router knows it, tokens.
        columns: The table, shape (N, NUM_COLUMNS), with ranks.

    Returns:
        Index of the cheapest replica, the first of equals; where none is routable, of all.
    """
    num, out = columns.shape[0], player.scores
    best = marginal_scores(
        player.correction.weights, context_tokens, output_tokens, player.mean_total_tokens,
        player.slo_s, columns, out,
    )  # fmt: skip
    if player.hidden.shape[1] == 0:
        return best
    encode(
        request_features, context_tokens, context_tokens + output_tokens, columns, True,
        player.observation,
    )  # fmt: skip
    routable = 0
    for replica in range(num):
        routable += columns[replica, ROUTABLE] != 0.0
    if routable == 0:
        return 0
    _shared_part(player, columns, routable)
    best = 0
    for replica in range(num):
        if columns[replica, ROUTABLE] != 0.0:
            out[replica] -= _residual_network_of(player, replica)
        if out[replica] < out[best]:
            best = replica
    return best


@compiled
def _shared_part(player: Player, columns: FloatArray, routable: int) -> None:
    """First layer over what all replicas share: the request, and the mean routable replica."""
    correction, observation, shared = player.correction, player.observation, player.hidden[0]
    for unit in range(shared.shape[0]):
        shared[unit] = correction.first_bias[unit]
    for feature in range(NUM_REQUEST_FEATURES):
        weights = correction.first[_NUM_FEATURES + feature]
        for unit in range(shared.shape[0]):
            shared[unit] += observation[feature] * weights[unit]
    for feature in range(_NUM_FEATURES):
        mean = 0.0
        for replica in range(columns.shape[0]):
            if columns[replica, ROUTABLE] != 0.0:
                mean += observation[NUM_REQUEST_FEATURES + replica * _STRIDE + feature]
        mean /= routable
        weights = correction.first[_NUM_FEATURES + NUM_REQUEST_FEATURES + feature]
        for unit in range(shared.shape[0]):
            shared[unit] += mean * weights[unit]


@compiled
def _residual_network_of(player: Player, replica: int) -> float:
    """What the network takes off the cost of one replica, in units of the SLO."""
    correction = player.correction
    shared, first, second = player.hidden[0], player.hidden[1], player.hidden[2]
    at = NUM_REQUEST_FEATURES + replica * _STRIDE
    for unit in range(first.shape[0]):
        first[unit] = shared[unit]
    for feature in range(_NUM_FEATURES):
        value = player.observation[at + feature]
        weights = correction.first[feature]
        for unit in range(first.shape[0]):
            first[unit] += value * weights[unit]
    for unit in range(second.shape[0]):
        second[unit] = correction.second_bias[unit]
    for below in range(first.shape[0]):
        value = math.tanh(first[below])
        weights = correction.second[below]
        for unit in range(second.shape[0]):
            second[unit] += value * weights[unit]
    total = 0.0
    for unit in range(second.shape[0]):
        total += math.tanh(second[unit]) * correction.last[unit]
    return total
