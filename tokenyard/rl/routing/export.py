"""From a trained network to the artifact that numpy alone can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from tokenyard.rl import modules
from tokenyard.rl.routing.equivariant import EquivariantActorCritic, EquivariantQNetwork
from tokenyard.routing.artifact import PolicyArtifact, feature_scaling, length_predictor
from tokenyard.routing.metadata import ArtifactMetadata
from tokenyard.routing.observation import NUM_MARGINAL_FEATURES, NUM_SCORE_POWERS
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import StreamSource
from tokenyard.types import FloatArray

NO_COST = np.zeros((NUM_SCORE_POWERS, NUM_MARGINAL_FEATURES))
"""Weights of a rule that finds no cost anywhere: they take the plain delay off again."""
NO_COST[0, 1:5] = -1.0

Equivariant = EquivariantActorCritic | EquivariantQNetwork
RouterModule = modules.ActorCritic | modules.QNetwork | Equivariant
"""A module that can be exported."""


def export_policy(
    module: RouterModule,
    source: StreamSource,
    trainer: str,
    metrics: Mapping[str, float] | None = None,
    lineage: Mapping[str, str] | None = None,
    *,
    order: Sequence[float] = (),
) -> PolicyArtifact:
    """Export a greedy policy.

    A network over the paper's observation is of kind `mlp`, one that corrects a rule of kind
    `corrected`.
    """
    scenario = source.scenario
    of_the_kind: dict[str, Any]
    if isinstance(module, Equivariant):
        of_the_kind = {"kind": "corrected", "activation": "tanh"}
        arrays = _correction_arrays(module)
    else:
        of_the_kind = {"kind": "mlp", "expected_finish": False}
        arrays = _normaliser_arrays(module.normaliser, module.observation_space.shape[0])
        arrays |= modules.layer_arrays(modules.weights_of(module.policy_layers))
    if any(order):
        arrays["order"] = np.array(order, dtype=np.float64)
    metadata = ArtifactMetadata(
        scenario=scenario.name,
        trainer=trainer,
        num_replicas=None if server_model(scenario).refuses else scenario.num_servers,
        slo_response_s=scenario.slo_response_s,
        mean_total_tokens=source.mean_total_tokens,
        output_length=scenario.output_length,
        predictor=length_predictor(source.model),
        scaling=feature_scaling(source.scaler),
        metrics=metrics or {},
        lineage=lineage or {},
        **of_the_kind,
    )
    return PolicyArtifact(metadata, arrays)


def _correction_arrays(module: Equivariant) -> dict[str, FloatArray]:
    scorer = module.policy
    *hidden, (weight, bias) = modules.weights_of(modules.linear_layers(scorer.network))
    # A corrected policy takes the network's output off costs in SLOs, not off scaled ones.
    scale = module.residual_scale or 1.0
    last = (weight / scale, bias / scale)
    arrays = modules.moment_arrays(module.normaliser.request, "request_")
    arrays |= modules.moment_arrays(module.normaliser.replica, "replica_")
    arrays["weights"] = scorer.rule_weights.detach().cpu().numpy().astype(np.float64)
    if not module.residual_scale:
        arrays["weights"] = NO_COST.ravel()
    return arrays | modules.layer_arrays([*hidden, last])


def _normaliser_arrays(normaliser: nn.Module, size: int) -> dict[str, FloatArray]:
    if not isinstance(normaliser, modules.RunningNormaliser):
        return {"mean": np.zeros(size), "std": np.ones(size)}
    return modules.moment_arrays(normaliser)
