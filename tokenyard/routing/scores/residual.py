"""Least added delay with searched weights, corrected by a network that scores every replica alike.

The rule (`scores.linear.marginal_scores`) holds what is known of replicas that batch; the network
(`equivariant`) adds what it cannot say, such as that a fast replica is worth more to those who
come next while traffic is high. One compiled function is the policy, in training and serving.

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


class Scratch(NamedTuple):
    """Where a decision is computed."""

    observation: npt.NDArray[np.float32]
    """Shape (LAYOUT.size(N),)."""
    hidden: FloatArray
    """Shape (3, H)."""


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


def make_scratch(correction: ResidualNetwork, num_replicas: int) -> Scratch:
    """Make room for decisions between so many replicas."""
    size = LAYOUT.size(num_replicas)
    hidden = np.empty((NUM_LAYERS, len(correction.first_bias)))
    return Scratch(np.empty(size, dtype=np.float32), hidden)


@compiled
def residual_scores(
    correction: ResidualNetwork,
    request_features: FloatArray,
    context_tokens: float,
    output_tokens: float,
    mean_total_tokens: float,
    slo_s: float,
    columns: FloatArray,
    scratch: Scratch,
    out: FloatArray,
) -> int:
    """Write the cost of every replica: what the rule says, less what the network says.

    Args:
        correction: The policy.
        request_features: `squash`ed features of the request, shape (NUM_REQUEST_FEATURES,).
        context_tokens: Prompt length, tokens.
        output_tokens: Output length as the router knows it, tokens.
        mean_total_tokens: Typical size of a request, tokens.
        slo_s: Response-time SLO, seconds.
        columns: The table, shape (N, NUM_COLUMNS), with ranks.
        scratch: `make_scratch` for N replicas; its observation is that of this decision after.
        out: Filled with the costs, in units of the SLO, shape (N,); infinite where not routable.

    Returns:
        Index of the cheapest replica, the first of equals; where none is routable, of all.
    """
    num = columns.shape[0]
    marginal_scores(
        correction.weights, context_tokens, output_tokens, mean_total_tokens, slo_s, columns, out
    )
    encode(
        request_features, context_tokens, context_tokens + output_tokens, columns, True,
        scratch.observation,
    )  # fmt: skip
    routable = 0
    for replica in range(num):
        routable += columns[replica, ROUTABLE] != 0.0
    if routable == 0:
        return 0
    _shared_part(correction, columns, routable, scratch)
    best = 0
    for replica in range(num):
        if columns[replica, ROUTABLE] != 0.0:
            out[replica] -= _residual_network_of(correction, replica, scratch)
        if out[replica] < out[best]:
            best = replica
    return best


@compiled
def _shared_part(
    correction: ResidualNetwork, columns: FloatArray, routable: int, scratch: Scratch
) -> None:
    """First layer over what all replicas share: the request, and the mean routable replica."""
    shared = scratch.hidden[0]
    observation = scratch.observation
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
def _residual_network_of(correction: ResidualNetwork, replica: int, scratch: Scratch) -> float:
    """What the network takes off the cost of one replica, in units of the SLO."""
    shared, first, second = scratch.hidden[0], scratch.hidden[1], scratch.hidden[2]
    at = NUM_REQUEST_FEATURES + replica * _STRIDE
    for unit in range(first.shape[0]):
        first[unit] = shared[unit]
    for feature in range(_NUM_FEATURES):
        value = scratch.observation[at + feature]
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
