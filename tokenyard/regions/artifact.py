"""The exported regional policy: one npz file, read and run with numpy alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tokenyard.artifact import (
    RegistryLookup,
    content_hash,
    find_champion,
    read_arrays,
    write_arrays,
)
from tokenyard.frozen import Frozen
from tokenyard.regions.mixing import NUM_PARAMETERS


class RegionMetadata(Frozen):
    """What a regional policy is and where it comes from; it decides for any regions."""

    format_version: Literal[2] = 2
    problem: Literal["regions"] = "regions"
    kind: Literal["mix"] = "mix"
    """`mix`: parameters of `tokenyard.regions.mixing`, array `theta`."""
    scenarios: tuple[str, ...]
    """What it was trained on."""
    trainer: str
    """Algorithm that made it."""
    metrics: Mapping[str, float] = {}
    """What it scored when it was exported."""
    lineage: Mapping[str, str] = {}
    """Hashes and names of what it was made from."""


@dataclass(frozen=True, eq=False)
class RegionArtifact:
    """A trained regional policy.

    Raises:
        ValueError: The arrays do not fit the metadata.
    """

    metadata: RegionMetadata
    arrays: Mapping[str, npt.NDArray[Any]]

    def __post_init__(self) -> None:
        """Check that the parameters are there, and finite."""
        if set(self.arrays) != {"theta"}:
            raise ValueError(f"arrays {sorted(self.arrays)} must be ['theta']")
        theta = self.arrays["theta"]
        if theta.shape != (NUM_PARAMETERS,):
            raise ValueError(f"array 'theta' has shape {theta.shape}, not ({NUM_PARAMETERS},)")
        if not np.isfinite(theta).all():
            raise ValueError("array 'theta' holds numbers that are not finite")

    @cached_property
    def sha256(self) -> str:
        """First 12 hex digits of a hash over all that the policy is."""
        return content_hash(self.metadata.model_dump_json(), self.arrays)

    def save(self, path: str | Path) -> None:
        """Write the npz file; equal policies give equal bytes."""
        write_arrays(path, self.metadata.model_dump_json(), self.arrays)

    @classmethod
    def load(cls, path: str | Path) -> RegionArtifact:
        """Read a policy file.

        Raises:
            ArtifactError: The file is missing, broken, or of another problem.
        """
        return read_arrays(
            path, lambda text, arrays: cls(RegionMetadata.model_validate_json(text), arrays)
        )


def resolve_region_champion(
    scenario: str, path: str | Path | None = None, registry: RegistryLookup | None = None
) -> tuple[RegionArtifact, str]:
    """Find the policy that `torta` means: a path, the registry's, the shipped one, the generic one.

    Raises:
        ArtifactError: None of these is there, or the first that is there cannot be used.
    """
    return find_champion(
        "regions", scenario, RegionArtifact.load, "python pipelines/train_regions.py", path,
        registry, (scenario, "generic"),
    )  # fmt: skip
