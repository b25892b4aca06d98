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
from tokenyard.routing import observation as ob
from tokenyard.routing.metadata import ArtifactMetadata
from tokenyard.routing.policies.order_spec import OrderSpec, spec_of_weights
from tokenyard.routing.policies.places import QueuePlaces, order_keys_s
from tokenyard.routing.scores.linear import looks_at_queues, marginal_scores
from tokenyard.routing.scores.order import (
    FIRST_COME,
    is_first_come,
    order_key,
)
from tokenyard.routing.scores.residual import Player, fold, make_player, residual_scores
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


class TablePolicy(ScoringPolicy):
    """Scores replicas by the table of what is seen of them."""

    def __init__(
        self, metadata: ArtifactMetadata, arrays: Arrays, started_at: datetime | None = None
    ) -> None:
        self._metadata = metadata
        self._set_up(arrays, started_at)

    @abstractmethod
    def _set_up(self, arrays: Arrays, started_at: datetime | None) -> None:
        """Take the arrays of an artifact, and the calendar time of second 0."""

    def decide(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the cheapest replica and the cost of each, in units of the SLO or the cluster."""
        self.check(snapshots)
        columns = ob.snapshot_columns(snapshots)
        columns[:, ob.OVERTAKEN_S :] = 0.0  # Of the places that another policy looked at.
        return Decision(*self.choose(request, columns))

    @abstractmethod
    def check(self, snapshots: Sequence[ReplicaSnapshot]) -> None:
        """Refuse replicas that it does not decide between, with a ValueError."""

    @abstractmethod
    def choose(self, request: Request, columns: FloatArray) -> tuple[int, FloatArray]:
        """The choice, and the cost of every replica of a table with ranks."""


class InOrder(ScoringPolicy):
    """A policy whose artifact has an order: it also says where a request waits."""

    def __init__(self, policy: TablePolicy, arrays: Arrays) -> None:
        self._policy, self._order = policy, order_weights(arrays)
        self._places = QueuePlaces()
        self.sees_queues = "weights" in arrays and looks_at_queues(
            np.ascontiguousarray(arrays["weights"])
        )

    @property
    def order_spec(self) -> OrderSpec | None:
        """By which rule requests wait; None: by none."""
        return spec_of_weights(self._order)

    def decide(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the cheapest replica and the cost of each, without an order key."""
        return self._policy.decide(request, snapshots)

    def place(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the cheapest replica, the cost of each, and the order key where there is one."""
        self._policy.check(snapshots)
        columns = ob.snapshot_columns(snapshots)
        if self.sees_queues:
            self._places.fill(snapshots, order_keys_s(self._order, request, columns), columns)
        best, costs = self._policy.choose(request, columns)
        if is_first_come(self._order):
            return Decision(best, costs)
        context = float(request.context_tokens)
        output = float(request.predicted_total_tokens) - context
        key = order_key(
            self._order, request.arrival_s, request.due_s, context, output, request.held_s,
            columns[best],
        )  # fmt: skip
        if self.sees_queues:
            self._places.note(request, snapshots, best, key[0])
        return Decision(best, costs, OrderKey(*key))


class MarginalPolicy(TablePolicy):
    """Least added delay plus a learned correction (`scores.linear.marginal_scores`).

    What is for any number of replicas learned on such as batch: others are a ValueError.
    """

    def _set_up(self, arrays: Arrays, started_at: datetime | None) -> None:
        self._weights = np.ascontiguousarray(arrays["weights"], dtype=np.float64)

    def check(self, snapshots: Sequence[ReplicaSnapshot]) -> None:
        """Refuse those that it did not learn between."""
        _check_count(self._metadata.num_replicas, snapshots)
        if self._metadata.num_replicas is None:
            _check_engines(True, snapshots)

    def choose(self, request: Request, columns: FloatArray) -> tuple[int, FloatArray]:
        """Return the cheapest replica and all costs."""
        costs = np.empty(len(columns))
        best = marginal_scores(
            self._weights,
            request.context_tokens,
            request.predicted_total_tokens - request.context_tokens,
            self._metadata.mean_total_tokens,
            self._metadata.slo_response_s,
            columns,
            costs,
        )
        return best, costs


def order_weights(arrays: Arrays) -> FloatArray:
    """Return the weights of an artifact's order; first come first served if it has none."""
    weights: FloatArray = np.ascontiguousarray(arrays.get("order", FIRST_COME))
    return weights


class _RemembersRequests(TablePolicy):
    """One with a network, which knows the sizes of the last requests, as in training.

    Other replicas than in training are a ValueError: of servers more or fewer or such as batch, of
    replicas that batch servers.
    """

    def _set_up(self, arrays: Arrays, started_at: datetime | None) -> None:
        self._features = _RequestFeatures(self._metadata, started_at)

    def check(self, snapshots: Sequence[ReplicaSnapshot]) -> None:
        """Refuse those that it did not learn between."""
        _check_count(self._metadata.num_replicas, snapshots)
        _check_engines(self._metadata.num_replicas is None, snapshots)


class NetworkPolicy(_RemembersRequests):
    """A trained network; its costs are minus its preferences."""

    def _set_up(self, arrays: Arrays, started_at: datetime | None) -> None:
        super()._set_up(arrays, started_at)
        metadata = self._metadata
        assert metadata.num_replicas is not None
        self._network = Network.from_arrays(arrays, metadata.activation)
        size = ob.observation_size(metadata.num_replicas, whole=False)
        self._observation = np.empty(size, dtype=np.float32)

    def choose(self, request: Request, columns: FloatArray) -> tuple[int, FloatArray]:
        """Return the replica that is preferred and all costs."""
        features = self._features.push(request)
        ob.encode(
            features, request.context_tokens, request.predicted_total_tokens, columns, False,
            self._observation,
        )  # fmt: skip
        costs = -self._network(self._observation)
        return int(np.argmin(costs)), costs


class ResidualPolicy(_RemembersRequests):
    """Least added delay, corrected by a network that scores every replica alike."""

    def _set_up(self, arrays: Arrays, started_at: datetime | None) -> None:
        super()._set_up(arrays, started_at)
        self._correction = fold(arrays, layers_of(arrays))
        self._player = self._made_for(0)

    def _made_for(self, num_replicas: int) -> Player:
        metadata = self._metadata
        units = metadata.mean_total_tokens, metadata.slo_response_s
        return make_player(self._correction, num_replicas, *units)

    def choose(self, request: Request, columns: FloatArray) -> tuple[int, FloatArray]:
        """Return the cheapest replica and all costs."""
        if len(self._player.scores) != len(columns):
            self._player = self._made_for(len(columns))
        best = residual_scores(
            self._player,
            self._features.push(request),
            request.context_tokens,
            request.predicted_total_tokens - request.context_tokens,
            columns,
        )
        return best, self._player.scores.copy()


class _RequestFeatures:
    """Scaled features of one request after the other, as training saw them."""

    def __init__(self, metadata: ArtifactMetadata, started_at: datetime | None) -> None:
        assert metadata.scaling is not None
        self._medians = np.array(metadata.scaling.medians)
        self._scales = np.array(metadata.scaling.scales)
        self._tracker = FeatureTracker(started_at)

    def push(self, request: Request) -> FloatArray:
        """Return the features of `request`, shape (NUM_REQUEST_FEATURES,)."""
        features = self._tracker.push(
            request.arrival_s, request.context_tokens, request.predicted_total_tokens
        )
        return ob.squash((features - self._medians) / self._scales)


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
