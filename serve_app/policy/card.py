"""A policy, described for callers."""

from __future__ import annotations

from pydantic import BaseModel


class PolicyReference(BaseModel):
    """Which policy answered."""

    name: str
    sha256: str
    """First 12 hex digits of a hash over everything that the policy is."""
    source: str
    """Where it was found."""
    mlflow_run: str | None = None
    """Run that trained it; null: it ships, is a file, or is a rule."""


class PolicyCard(PolicyReference):
    """Describes the policy that is served."""

    kind: str
    """`linear`, `marginal`, `mlp` or `corrected` for a trained policy, `baseline` for a rule."""
    trainer: str | None
    """Algorithm that trained it; null for a rule."""
    scenario: str
    """The scenario that it was trained or tuned on."""
    registry_error: str | None = None
    """Why the registry could not be asked, so that what ships is served."""
    num_replicas: int | None
    """Candidates it must be given; null: any number."""
    needs_engine: bool | None = None
    """Whether snapshots must tell of an `engine` (true) or must not (false); null: as you like."""
    output_length: str
    """Where a missing predicted_total_tokens comes from: `by_context` or `none`."""
    slo_response_s: float
    startup_fallback: str | None = None
    """Why shortest expected delay is served in place of the policy that was asked for."""
    metrics: dict[str, float] = {}
    """Its results when it was exported."""
    lineage: dict[str, str] = {}

    @property
    def reference(self) -> PolicyReference:
        """The fields that tell it from others."""
        return PolicyReference.model_validate(self, from_attributes=True)
