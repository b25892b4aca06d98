"""From a trained network to the artifact that numpy alone can run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn

from tokenyard.rl.modules import (
    RouterActorCritic,
    RouterQNetwork,
    RunningNormaliser,
    layer_arrays,
    moment_arrays,
    weights_of,
)
from tokenyard.rl.routing.equivariant import EquivariantActorCritic, EquivariantQNetwork
from tokenyard.routing.artifact import PolicyArtifact, feature_scaling, length_predictor
from tokenyard.routing.metadata import ArtifactMetadata
from tokenyard.routing.simulator.streams import StreamSource
from tokenyard.types import FloatArray

Equivariant = EquivariantActorCritic | EquivariantQNetwork
RouterModule = RouterActorCritic | RouterQNetwork | Equivariant
"""A module that can be exported."""


def export_network(
    module: RouterModule,
    source: StreamSource,
    trainer: str,
    expected_finish: bool,
    metrics: Mapping[str, float] | None = None,
    lineage: Mapping[str, str] | None = None,
) -> PolicyArtifact:
    """Export the greedy policy of a trained module.

    Args:
        module: The learner's module.
        source: Traffic it was trained on: gives the feature scaling and the length predictor.
        trainer: Algorithm that trained it.
        expected_finish: Whether its observation holds finish times.
        metrics: What it scored, for the record.
        lineage: What it was made from, for the record.
    """
    scenario = source.scenario
    metadata = ArtifactMetadata(
        kind="equivariant" if isinstance(module, Equivariant) else "mlp",
        scenario=scenario.name,
        trainer=trainer,
        num_replicas=None if isinstance(module, Equivariant) else scenario.num_servers,
        expected_finish=expected_finish,
        slo_response_s=scenario.slo_response_s,
        mean_total_tokens=source.mean_total_tokens,
        output_length=scenario.output_length,
        predictor=length_predictor(source.model),
        scaling=feature_scaling(source.scaler),
        residual_scale=module.residual_scale,
        baseline=module.baseline if isinstance(module, Equivariant) else None,
        metrics=metrics or {},
        lineage=lineage or {},
    )
    return PolicyArtifact(metadata, _arrays(module))


def _arrays(module: RouterModule) -> dict[str, FloatArray]:
    if isinstance(module, Equivariant):
        arrays = moment_arrays(module.normaliser.request, "request_")
        arrays |= moment_arrays(module.normaliser.replica, "replica_")
    else:
        arrays = _normaliser_arrays(module.normaliser, module.observation_space.shape[0])
    return arrays | layer_arrays(weights_of(module.policy_layers))


def _normaliser_arrays(normaliser: nn.Module, size: int) -> dict[str, FloatArray]:
    if not isinstance(normaliser, RunningNormaliser):
        return {"mean": np.zeros(size), "std": np.ones(size)}
    return moment_arrays(normaliser)
