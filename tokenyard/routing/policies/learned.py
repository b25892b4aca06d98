"""A trained policy as a routing policy, run with numpy.

Every class is made of an artifact's metadata and arrays, and the calendar time of second 0, where
training traffic had a calendar (`tokenyard.routing.artifact.KINDS`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import datetime

import numpy as np

from tokenyard.network import Arrays, Network, layers_of
from tokenyard.routing.metadata import ArtifactMetadata
from tokenyard.routing.observation import (
    TOKENS_PER_S,
    WAIT_S,
    encode,
    linear_scores,
    marginal_scores,
    observation_size,
    snapshot_columns,
    squash,
)
from tokenyard.routing.policies.order_spec import OrderSpec, spec_of_weights
from tokenyard.routing.scores.order import FIRST_COME, is_first_come, order_key
from tokenyard.routing.scores.residual import fold, make_scratch, residual_scores
from tokenyard.routing.types import (
    Decision,
    OrderKey,
    ReplicaSnapshot,
    Request,
    ScoringPolicy,
    SnapshotColumns,
)
from tokenyard.types import FloatArray
from tokenyard.workload.features import FeatureTracker


class _TablePolicy(ScoringPolicy):
    """Scores replicas by the table of what is seen of them."""

    def decide(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the cheapest replica and the cost of each, in units of the SLO or the cluster."""
        best, costs, _, _ = self._decide(request, snapshots)
        return Decision(best, costs)

    @abstractmethod
    def _decide(
        self, request: Request, snapshots: Sequence[ReplicaSnapshot]
    ) -> tuple[int, FloatArray, FloatArray, FloatArray]:
        """The choice, all costs, the table, and the weights of the order."""


class _InOrder(_TablePolicy):
    """Mixed into one whose artifact has an order: it also says where a request waits."""

    sees_queues = False
    _order: FloatArray

    @property
    def order_spec(self) -> OrderSpec | None:
        """By which rule requests wait; None: by none."""
        return spec_of_weights(self._order)

    def place(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the cheapest replica, the cost of each, and the order key where there is one."""
        best, costs, columns, order = self._decide(request, snapshots)
        if is_first_come(order):
            return Decision(best, costs)
        context = float(request.context_tokens)
        output = float(request.predicted_total_tokens) - context
        key = order_key(
            order, request.arrival_s, request.due_s, context, output, request.held_s, columns[best]
        )
        return Decision(best, costs, OrderKey(*key))


class LinearPolicy(_TablePolicy):
    """Least expected response time plus a learned correction (`observation.linear_scores`)."""

    def __init__(self, metadata: ArtifactMetadata, arrays: Arrays, *_: object) -> None:
        """Take units, weights and the order."""
        self._metadata = metadata
        self._weights = np.ascontiguousarray(arrays["weights"], dtype=np.float64)
        self._order = order_weights(arrays)

    def _decide(
        self, request: Request, snapshots: Sequence[ReplicaSnapshot]
    ) -> tuple[int, FloatArray, FloatArray, FloatArray]:
        _check_count(self._metadata.num_replicas, snapshots)
        columns, costs = snapshot_columns(snapshots), np.empty(len(snapshots))
        best = linear_scores(
            self._weights,
            request.predicted_total_tokens,
            self._metadata.mean_total_tokens,
            self._metadata.slo_response_s,
            columns,
            costs,
        )
        return best, costs, columns, self._order


class MarginalPolicy(LinearPolicy):
    """Least added delay plus a learned correction (`observation.marginal_scores`).

    A snapshot that is not of a replica that batches continuously is a ValueError.
    """

    def _decide(
        self, request: Request, snapshots: Sequence[ReplicaSnapshot]
    ) -> tuple[int, FloatArray, FloatArray, FloatArray]:
        _check_count(self._metadata.num_replicas, snapshots)
        _check_engines(True, snapshots)
        columns, costs = snapshot_columns(snapshots), np.empty(len(snapshots))
        best = marginal_scores(
            self._weights,
            request.context_tokens,
            request.predicted_total_tokens - request.context_tokens,
            self._metadata.mean_total_tokens,
            self._metadata.slo_response_s,
            columns,
            costs,
        )
        return best, costs, columns, self._order


class OrderedLinearPolicy(_InOrder, LinearPolicy):
    """A linear policy with an order."""


class OrderedMarginalPolicy(_InOrder, MarginalPolicy):
    """A marginal policy with an order."""


def order_weights(arrays: Arrays) -> FloatArray:
    """Weights of an artifact's order; without one, first come first served."""
    found: FloatArray = np.ascontiguousarray(arrays.get("order", FIRST_COME))
    return found


class NetworkPolicy(_TablePolicy):
    """A trained network; it remembers the sizes of the last requests, as in training.

    Its costs are minus its preferences. Other replicas than in training are a ValueError: more,
    fewer, or such as batch.
    """

    def __init__(
        self, metadata: ArtifactMetadata, arrays: Arrays, started_at: datetime | None
    ) -> None:
        """Take the network, from an observation to one preference per replica."""
        assert metadata.num_replicas is not None
        self._metadata = metadata
        self._features = _RequestFeatures(metadata, started_at)
        self._network = Network.from_arrays(arrays, metadata.activation)
        self._order = order_weights(arrays)
        size = observation_size(metadata.num_replicas, metadata.expected_finish)
        self._observation = np.empty(size, dtype=np.float32)

    def _decide(
        self, request: Request, snapshots: Sequence[ReplicaSnapshot]
    ) -> tuple[int, FloatArray, FloatArray, FloatArray]:
        _check_count(self._metadata.num_replicas, snapshots)
        _check_engines(False, snapshots)
        columns = snapshot_columns(snapshots)
        features = self._features.push(request)
        size_tokens = request.predicted_total_tokens
        encode(
            features, request.context_tokens, size_tokens, columns,
            self._metadata.expected_finish, self._observation,
        )  # fmt: skip
        preference = self._network(self._observation)
        finish_s = columns[:, WAIT_S] + size_tokens / columns[:, TOKENS_PER_S]
        costs = self._metadata.residual_scale * finish_s - preference
        return int(np.argmin(costs)), costs, columns, self._order


class ResidualPolicy(_TablePolicy):
    """Least added delay, corrected by a network; it remembers the sizes of the last requests.

    No replica, or a snapshot of one that does not batch continuously, is a ValueError.
    """

    def __init__(
        self, metadata: ArtifactMetadata, arrays: Arrays, started_at: datetime | None
    ) -> None:
        """Take weights, network and units."""
        self._metadata = metadata
        self._features = _RequestFeatures(metadata, started_at)
        self._correction = fold(arrays, layers_of(arrays))
        self._order = order_weights(arrays)
        self._scratch = make_scratch(self._correction, 0)

    def _decide(
        self, request: Request, snapshots: Sequence[ReplicaSnapshot]
    ) -> tuple[int, FloatArray, FloatArray, FloatArray]:
        _check_count(None, snapshots)
        _check_engines(True, snapshots)
        num = len(snapshots)
        if len(self._scratch.observation) != observation_size(num, True, True):
            self._scratch = make_scratch(self._correction, num)
        columns, costs = snapshot_columns(snapshots), np.empty(num)
        best = residual_scores(
            self._correction,
            self._features.push(request),
            request.context_tokens,
            request.predicted_total_tokens - request.context_tokens,
            self._metadata.mean_total_tokens,
            self._metadata.slo_response_s,
            columns,
            self._scratch,
            costs,
        )
        return best, costs, columns, self._order


class OrderedNetworkPolicy(_InOrder, NetworkPolicy):
    """A trained network with an order."""


class OrderedResidualPolicy(_InOrder, ResidualPolicy):
    """A corrected policy with an order."""


class _RequestFeatures:
    """Scaled features of one request after the other, as training saw them."""

    def __init__(self, metadata: ArtifactMetadata, started_at: datetime | None) -> None:
        assert metadata.scaling is not None
        self._medians = np.array(metadata.scaling.medians)
        self._scales = np.array(metadata.scaling.scales)
        self._tracker = FeatureTracker(started_at)

    def push(self, request: Request) -> FloatArray:
        """Return the features of `request`, shape (NUM_REQUEST_FEATURES,)."""
        return squash((self._tracker.push(request) - self._medians) / self._scales)


def _check_count(trained_on: int | None, snapshots: Sequence[ReplicaSnapshot]) -> None:
    if not snapshots:
        raise ValueError("no replica to choose from: snapshots is empty")
    if trained_on is not None and len(snapshots) != trained_on:
        raise ValueError(
            f"{len(snapshots)} replicas offered to a policy that was trained on {trained_on}"
        )


def _check_engines(batches: bool, snapshots: Sequence[ReplicaSnapshot]) -> None:
    if isinstance(snapshots, SnapshotColumns) and snapshots.batches == batches:
        return
    if any((snapshot.engine is not None) != batches for snapshot in snapshots):
        needed = "with" if batches else "without"
        raise ValueError(f"this policy needs snapshots {needed} `engine`: it was trained on such")
