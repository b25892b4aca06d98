"""From a trained network to the artifact that numpy alone can run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from tokenyard.rl.modules import (
    RouterActorCritic,
    RouterQNetwork,
    RunningNormaliser,
    layer_arrays,
    linear_layers,
    moment_arrays,
    weights_of,
)
from tokenyard.rl.routing.equivariant import EquivariantActorCritic, EquivariantQNetwork
from tokenyard.rl.routing.linear import LinearActor
from tokenyard.routing.artifact import PolicyArtifact, feature_scaling, length_predictor
from tokenyard.routing.metadata import ArtifactMetadata
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import StreamSource
from tokenyard.types import FloatArray

Equivariant = EquivariantActorCritic | EquivariantQNetwork
RouterModule = RouterActorCritic | RouterQNetwork | Equivariant | LinearActor
"""A module that can be exported."""


def export_network(
    module: RouterActorCritic | RouterQNetwork,
    source: StreamSource,
    trainer: str,
    expected_finish: bool,
    metrics: Mapping[str, float] | None = None,
    lineage: Mapping[str, str] | None = None,
) -> PolicyArtifact:
    """Export the greedy policy of a network that reads the whole observation, kind `mlp`.

    Args:
        module: The learner's module.
        source: Traffic it was trained on: gives the feature scaling and the length predictor.
        trainer: Algorithm that trained it.
        expected_finish: Whether its observation holds finish times.
        metrics: What it scored, for the record.
        lineage: What it was made from, for the record.
    """
    metadata = _metadata(
        source, trainer, metrics, lineage, kind="mlp", num_replicas=source.scenario.num_servers,
        expected_finish=expected_finish, residual_scale=module.residual_scale,
    )  # fmt: skip
    arrays = _normaliser_arrays(module.normaliser, module.observation_space.shape[0])
    return PolicyArtifact(metadata, arrays | layer_arrays(weights_of(module.policy_layers)))


def export_correction(
    module: Equivariant,
    source: StreamSource,
    trainer: str,
    metrics: Mapping[str, float] | None = None,
    lineage: Mapping[str, str] | None = None,
) -> PolicyArtifact:
    """Export the greedy policy of a network that corrects a rule, kind `corrected`.

    Args:
        module: The learner's module.
        source: Traffic it was trained on.
        trainer: Algorithm that trained it.
        metrics: What it scored, for the record.
        lineage: What it was made from, for the record.
    """
    metadata = _metadata(
        source, trainer, metrics, lineage, kind="corrected", num_replicas=None, activation="tanh"
    )
    scorer = module.policy
    *hidden, (weight, bias) = weights_of(linear_layers(scorer.network))
    # A corrected policy takes the network's output off costs in SLOs, not off scaled ones.
    last = (weight / module.residual_scale, bias / module.residual_scale)
    arrays = moment_arrays(module.normaliser.request, "request_")
    arrays |= moment_arrays(module.normaliser.replica, "replica_")
    arrays["weights"] = scorer.rule_weights.detach().cpu().numpy().astype(np.float64)
    return PolicyArtifact(metadata, arrays | layer_arrays([*hidden, last]))


def export_linear(
    module: LinearActor,
    source: StreamSource,
    trainer: str,
    metrics: Mapping[str, float] | None = None,
    lineage: Mapping[str, str] | None = None,
) -> PolicyArtifact:
    """Export the greedy policy of an actor that has weights alone, as policy search does.

    Args:
        module: The learner's module.
        source: Traffic it was trained on.
        trainer: Algorithm that trained it.
        metrics: What it scored, for the record.
        lineage: What it was made from, for the record.
    """
    scenario, servers = source.scenario, server_model(source.scenario)
    metadata = _metadata(
        source, trainer, metrics, lineage, kind=servers.linear_kind,
        num_replicas=None if servers.refuses else scenario.num_servers,
    )  # fmt: skip
    return PolicyArtifact(metadata, {"weights": module.all_weights})


def _metadata(
    source: StreamSource,
    trainer: str,
    metrics: Mapping[str, float] | None,
    lineage: Mapping[str, str] | None,
    **of_the_kind: Any,
) -> ArtifactMetadata:
    scenario = source.scenario
    return ArtifactMetadata(
        scenario=scenario.name,
        trainer=trainer,
        slo_response_s=scenario.slo_response_s,
        mean_total_tokens=source.mean_total_tokens,
        output_length=scenario.output_length,
        predictor=length_predictor(source.model),
        scaling=feature_scaling(source.scaler),
        metrics=metrics or {},
        lineage=lineage or {},
        **of_the_kind,
    )


def _normaliser_arrays(normaliser: nn.Module, size: int) -> dict[str, FloatArray]:
    if not isinstance(normaliser, RunningNormaliser):
        return {"mean": np.zeros(size), "std": np.ones(size)}
    return moment_arrays(normaliser)
