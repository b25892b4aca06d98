"""What a trained routing policy is, where it comes from, and how its inputs are made."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from tokenyard.config import FrozenModel
from tokenyard.network import Activation
from tokenyard.routing.observation import NUM_REQUEST_FEATURES
from tokenyard.routing.scenario import Visibility


class LengthPredictor(FrozenModel):
    """Mean output length by context length, learned from the training traffic."""

    bin_edges_tokens: tuple[float, ...]
    """Upper ends, inclusive, of all context bins but the last."""
    mean_generated_tokens: Annotated[tuple[float, ...], Field(min_length=1)]
    """One per bin."""

    def generated_tokens(self, context_tokens: float) -> float:
        """Predicted output of a request, tokens."""
        return self.mean_generated_tokens[bisect_left(self.bin_edges_tokens, context_tokens)]


class FeatureScaling(FrozenModel):
    """Medians and interquartile ranges of the request features, from training traffic."""

    medians: Annotated[tuple[float, ...], Field(min_length=NUM_REQUEST_FEATURES)]
    scales: Annotated[tuple[float, ...], Field(min_length=NUM_REQUEST_FEATURES)]


class ArtifactMetadata(FrozenModel):
    """What a policy is, where it comes from, and how its inputs are made."""

    format_version: Literal[1] = 1
    kind: Literal["marginal", "mlp", "corrected"]
    """`marginal`: a learned correction of the delay that a request adds
    (`tokenyard.routing.scores.linear`); `mlp`: a network over what the paper's agents see of
    servers; `corrected`: a `marginal` policy and a network that scores every replica alike and
    corrects it (`tokenyard.routing.scores.residual`)."""
    problem: Literal["routing"] = "routing"
    scenario: str
    trainer: str
    """Algorithm that made it: policy_search, ppo, a2c or dqn."""
    num_replicas: int | None
    """Servers it decides between, in the order it was trained on; None: any that batch."""
    expected_finish: bool = True
    """False of an `mlp`, which is not shown them; of other kinds it says nothing."""
    slo_response_s: Annotated[float, Field(gt=0)]
    mean_total_tokens: Annotated[float, Field(gt=0)]
    """Typical size of a request in training, tokens."""
    output_length: Visibility
    """What it was told of the output length in training."""
    predictor: LengthPredictor | None = None
    """Fills in `predicted_total_tokens` where the caller has no prediction."""
    scaling: FeatureScaling | None = None
    """Needed by networks."""
    activation: Activation = "relu"
    residual_scale: Annotated[float, Field(ge=0)] = 0.0
    """0: networks of earlier releases that corrected shortest expected delay are refused."""
    metrics: Mapping[str, float] = {}
    """What it scored when it was exported."""
    lineage: Mapping[str, str] = {}
    """Hashes and names of what it was made from."""
