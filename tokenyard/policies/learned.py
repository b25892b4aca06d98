"""A trained policy as a routing policy, run with numpy."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np

from tokenyard.artifact import PolicyArtifact
from tokenyard.observation import (
    TOKENS_PER_S,
    WAIT_S,
    encode,
    linear_scores,
    marginal_scores,
    observation_size,
    snapshot_columns,
    squash,
)
from tokenyard.types import Decision, FloatArray, ReplicaSnapshot, Request
from tokenyard.workload.features import FeatureTracker


class LinearPolicy:
    """Least expected response time plus a learned correction (`observation.linear_scores`)."""

    def __init__(self, artifact: PolicyArtifact) -> None:
        """Take weights and units from a `linear` artifact."""
        self._metadata = artifact.metadata
        self._weights = np.ascontiguousarray(artifact.arrays["weights"], dtype=np.float64)

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the index of the cheapest replica."""
        return self.decide(request, snapshots).replica

    def decide(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the cheapest replica and the cost of each, in units of the SLO."""
        _check_count(self._metadata.num_replicas, snapshots)
        costs = np.empty(len(snapshots))
        best = linear_scores(
            self._weights,
            request.predicted_total_tokens,
            self._metadata.mean_total_tokens,
            self._metadata.slo_response_s,
            snapshot_columns(snapshots),
            costs,
        )
        return Decision(best, tuple(costs.tolist()))


class MarginalPolicy:
    """Least added delay plus a learned correction (`observation.marginal_scores`)."""

    def __init__(self, artifact: PolicyArtifact) -> None:
        """Take weights and units from a `marginal` artifact."""
        self._metadata = artifact.metadata
        self._weights = np.ascontiguousarray(artifact.arrays["weights"], dtype=np.float64)

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the index of the cheapest replica."""
        return self.decide(request, snapshots).replica

    def decide(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the cheapest replica and the cost of each, in units of the SLO.

        Raises:
            ValueError: A snapshot has no `engine`: its replica does not batch continuously.
        """
        _check_count(self._metadata.num_replicas, snapshots)
        if any(snapshot.engine is None for snapshot in snapshots):
            raise ValueError("this policy needs snapshots with `engine`, of batching replicas")
        costs = np.empty(len(snapshots))
        best = marginal_scores(
            self._weights,
            request.context_tokens,
            request.predicted_total_tokens - request.context_tokens,
            self._metadata.mean_total_tokens,
            self._metadata.slo_response_s,
            snapshot_columns(snapshots),
            costs,
        )
        return Decision(best, tuple(costs.tolist()))


class NetworkPolicy:
    """A trained network; it remembers the sizes of the last requests, as in training."""

    def __init__(self, artifact: PolicyArtifact, started_at: datetime | None = None) -> None:
        """Take the network from an `mlp` artifact.

        Args:
            artifact: The trained policy.
            started_at: Calendar time of second 0, where training traffic had a calendar.
        """
        metadata = artifact.metadata
        assert metadata.scaling is not None
        assert metadata.num_replicas is not None
        self._metadata = metadata
        self._medians = np.array(metadata.scaling.medians)
        self._scales = np.array(metadata.scaling.scales)
        self._mean = artifact.arrays["mean"]
        self._std = artifact.arrays["std"]
        self._layers = artifact.layers
        self._tracker = FeatureTracker(started_at)
        size = observation_size(metadata.num_replicas, metadata.expected_finish)
        self._observation = np.empty(size, dtype=np.float32)

    def route(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> int:
        """Return the index of the preferred replica."""
        return self.decide(request, snapshots).replica

    def decide(self, request: Request, snapshots: Sequence[ReplicaSnapshot]) -> Decision:
        """Return the preferred replica, and minus each one's preference as its cost."""
        _check_count(self._metadata.num_replicas, snapshots)
        columns = snapshot_columns(snapshots)
        features = squash((self._tracker.push(request) - self._medians) / self._scales)
        size_tokens = request.predicted_total_tokens
        encode(
            features, request.context_tokens, size_tokens, columns,
            self._metadata.expected_finish, self._observation,
        )  # fmt: skip
        preference = self._forward(self._observation)
        finish_s = columns[:, WAIT_S] + size_tokens / columns[:, TOKENS_PER_S]
        costs = self._metadata.residual_scale * finish_s - preference
        return Decision(int(np.argmin(costs)), tuple(costs.tolist()))

    def _forward(self, observation: np.ndarray[tuple[int], np.dtype[np.float32]]) -> FloatArray:
        x = (observation - self._mean) / self._std
        for weight, bias in self._layers[:-1]:
            x = weight @ x + bias
            x = np.maximum(x, 0.0) if self._metadata.activation == "relu" else np.tanh(x)
        weight, bias = self._layers[-1]
        result: FloatArray = weight @ x + bias
        return result


def learned_policy(
    artifact: PolicyArtifact, started_at: datetime | None = None
) -> LinearPolicy | MarginalPolicy | NetworkPolicy:
    """Make the policy of an artifact's kind, ready for one stream of requests."""
    if artifact.metadata.kind == "linear":
        return LinearPolicy(artifact)
    if artifact.metadata.kind == "marginal":
        return MarginalPolicy(artifact)
    return NetworkPolicy(artifact, started_at)


def _check_count(trained_on: int | None, snapshots: Sequence[ReplicaSnapshot]) -> None:
    if not snapshots:
        raise ValueError("no replica to choose from: snapshots is empty")
    if trained_on is not None and len(snapshots) != trained_on:
        raise ValueError(
            f"{len(snapshots)} replicas offered to a policy that was trained on {trained_on}"
        )
