"""What an artifact takes from what it was made from: the traffic's units, and short hashes."""

from __future__ import annotations

import hashlib

from tokenyard.artifact import FeatureScaling, LengthPredictor
from tokenyard.scenario import Scenario
from tokenyard.workload.features import RobustScaler
from tokenyard.workload.model import WorkloadModel, load_model


def lineage_of(scenario: Scenario) -> dict[str, str]:
    """Hashes of the traffic model, which is fitted to a trace, and of the replicas as calibrated.

    Returns:
        `trace_sha256` and `calibration_sha256`, 12 hex digits each.
    """
    speeds = []
    if scenario.fleet is None:
        speeds = [one.model_dump_json() for one in scenario.servers]
    else:
        # What the performance model makes of names changes with its calibration.
        for one in scenario.fleet.replicas:
            speeds += [one.model_dump_json(), repr(one.iteration.tolist())]
    return {
        "trace_sha256": _short(load_model(scenario.workload).model_dump_json()),
        "calibration_sha256": _short("\n".join(speeds)),
    }


def length_predictor(model: WorkloadModel) -> LengthPredictor:
    """Mean output by context length in the traffic of training."""
    lengths = model.lengths
    return LengthPredictor(
        bin_edges_tokens=lengths.bin_edges_tokens,
        mean_generated_tokens=lengths.mean_generated_tokens,
    )


def feature_scaling(scaler: RobustScaler) -> FeatureScaling:
    """Units of the request features in the traffic of training."""
    return FeatureScaling(
        medians=tuple(scaler.center.tolist()), scales=tuple(scaler.scale.tolist())
    )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
