"""What a policy in training is worth: its score on fixed streams that it never trains on.

The greedy policy is taken from the artifact, so the number is that of what would be served.
All streams are decided together, one matrix product per step, which makes it cheap enough to
run after every iteration.
"""

from __future__ import annotations

import numpy as np

from tokenyard import metrics
from tokenyard.artifact import PolicyArtifact
from tokenyard.policies.learned import equivariant_preferences
from tokenyard.rl.modules import finish_columns
from tokenyard.sim.cluster import Observations, Outcomes
from tokenyard.sim.simulator import Simulator, make_simulator
from tokenyard.sim.streams import StreamSource, synthetic_streams
from tokenyard.types import FloatArray


class Validation:
    """A fixed set of streams of one scenario."""

    def __init__(self, source: StreamSource, num_streams: int, seed: int = 0) -> None:
        """Draw the streams; equal arguments give equal streams in every trial."""
        self._source = source
        self._streams = synthetic_streams(source, num_streams, seed, "validation").requests

    def __call__(self, artifact: PolicyArtifact) -> dict[str, float]:
        """Run the greedy policy on every stream and average over streams.

        Returns:
            score (seconds, higher is better), mean_response_s, p99_response_s and
            slo_violation_fraction.
        """
        slo_s = self._source.scenario.slo_response_s
        rows = [
            (
                metrics.score(one.response_s, one.missed(slo_s)),
                metrics.mean_response_s(one.response_s),
                metrics.percentile_response_s(one.response_s, 99.0),
                metrics.slo_violation_fraction(one.missed(slo_s)),
            )
            for one in self._outcomes(artifact)
        ]
        names = ("score", "mean_response_s", "p99_response_s", "slo_violation_fraction")
        return dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))

    def _outcomes(self, artifact: PolicyArtifact) -> list[Outcomes]:
        metadata = artifact.metadata
        sim = make_simulator(
            self._source.scenario,
            len(self._streams),
            len(self._streams[0]),
            expected_finish=metadata.expected_finish,
        )
        for copy, requests in enumerate(self._streams):
            sim.load(copy, requests)
        if metadata.kind in ("linear", "marginal"):
            sim.run_linear(artifact.arrays["weights"], metadata.mean_total_tokens)
        else:
            _run_network(sim, artifact)
        return [sim.outcomes(copy) for copy in range(len(self._streams))]


def _run_network(sim: Simulator, artifact: PolicyArtifact) -> None:
    equivariant = artifact.metadata.kind == "equivariant"
    preferences = equivariant_preferences if equivariant else network_preferences
    observations = sim.observe()
    while sim.undecided():
        actions = preferences(artifact, observations).argmax(axis=1)
        observations, _rewards = sim.step_and_observe(actions)
    sim.drain()


def network_preferences(artifact: PolicyArtifact, observations: Observations) -> FloatArray:
    """Preferences of an exported network for many observations at once.

    Args:
        artifact: A policy of kind `mlp`.
        observations: Shape (num, size).

    Returns:
        Shape (num, num_replicas), higher is better.
    """
    metadata = artifact.metadata
    assert metadata.num_replicas is not None
    x = (observations - artifact.arrays["mean"]) / artifact.arrays["std"]
    *hidden, (last_weight, last_bias) = artifact.layers
    for weight, bias in hidden:
        x = x @ weight.T + bias
        x = np.maximum(x, 0.0) if metadata.activation == "relu" else np.tanh(x)
    preferences: FloatArray = x @ last_weight.T + last_bias
    if metadata.residual_scale:
        finish_s = np.expm1(observations[:, finish_columns(metadata.num_replicas)])
        preferences -= metadata.residual_scale * finish_s
    return preferences
