"""The exported allocation policy: what leaves training, and all that deciding live needs.

One npz file, as `tokenyard.artifact` writes it: the scenario (pool, model, promises), the
forecaster and what was learned. numpy reads it; the planner runs compiled, or as plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tokenyard.allocation.forecast import Forecaster
from tokenyard.allocation.planner import NUM_PARAMETERS
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.artifact import (
    ArtifactError,
    RegistryLookup,
    content_hash,
    read_arrays,
    write_arrays,
)
from tokenyard.frozen import Frozen

_SHAPES = {"planner": {"theta": 1}, "table": {"edges_per_s": 1, "best": 4}}


class AllocationMetadata(Frozen):
    """What an allocation policy is, where it comes from, and what it decides for."""

    format_version: Literal[1] = 1
    problem: Literal["allocation"] = "allocation"
    kind: Literal["planner", "table"]
    """`planner`: parameters of `tokenyard.allocation.planner`, array `theta`; `table`: a plan by
    backlog, part of the day, bin of demand and plan in force, arrays `edges_per_s` and `best`."""
    scenario: AllocationScenario
    trainer: str
    """Algorithm that made it."""
    forecaster: Forecaster | None = None
    """Needed by planners."""
    metrics: Mapping[str, float] = {}
    """What it scored when it was exported."""
    lineage: Mapping[str, str] = {}
    """Hashes and names of what it was made from."""


@dataclass(frozen=True, eq=False)
class AllocationArtifact:
    """A trained allocation policy.

    Raises:
        ValueError: The arrays do not fit the metadata.
    """

    metadata: AllocationMetadata
    arrays: Mapping[str, npt.NDArray[Any]]

    def __post_init__(self) -> None:
        """Check that the arrays are those of the kind, and finite."""
        wanted = _SHAPES[self.metadata.kind]
        if set(self.arrays) != set(wanted):
            raise ValueError(f"arrays {sorted(self.arrays)} must be {sorted(wanted)}")
        for name, dimensions in wanted.items():
            if self.arrays[name].ndim != dimensions:
                raise ValueError(f"array {name!r} must have {dimensions} dimensions")
            if not np.isfinite(self.arrays[name]).all():
                raise ValueError(f"array {name!r} holds numbers that are not finite")
        if self.metadata.kind == "planner":
            if self.arrays["theta"].shape != (NUM_PARAMETERS,):
                raise ValueError(f"array 'theta' must have shape ({NUM_PARAMETERS},)")
            if self.metadata.forecaster is None:
                raise ValueError("a planner needs a forecaster in its metadata")

    @cached_property
    def sha256(self) -> str:
        """First 12 hex digits of a hash over all that the policy is."""
        return content_hash(self.metadata.model_dump_json(), self.arrays)

    def save(self, path: str | Path) -> None:
        """Write the npz file; equal policies give equal bytes."""
        write_arrays(path, self.metadata.model_dump_json(), self.arrays)

    @classmethod
    def load(cls, path: str | Path) -> AllocationArtifact:
        """Read a policy file.

        Raises:
            ArtifactError: The file is missing, broken, or of another problem.
        """
        return read_arrays(
            path,
            lambda text, arrays: cls(AllocationMetadata.model_validate_json(text), arrays),
        )


def resolve_allocation_champion(
    scenario: str, path: str | Path | None = None, registry: RegistryLookup | None = None
) -> tuple[AllocationArtifact, str]:
    """Find the policy that `champion` means: a path, the registry's, or the shipped one.

    Raises:
        ArtifactError: None of these is there, or the first that is there cannot be used.
    """
    if path is not None:
        return AllocationArtifact.load(path), f"file {path}"
    if registry is not None:
        name = f"tokenyard-allocation-{scenario}"
        registered = registry(name)
        if registered is not None:
            return AllocationArtifact.load(registered), f"registry {name}@champion"
    file = resources.files("tokenyard") / "artifacts" / "allocation" / f"{scenario}.npz"
    with resources.as_file(file) as local:
        if local.is_file():
            return AllocationArtifact.load(local), f"shipped allocation/{scenario}"
    raise ArtifactError(
        f"no champion for allocation/{scenario}: none is registered or shipped; train one with "
        f"python pipelines/tune_allocation.py --scenario {scenario}, or name a policy file"
    )
