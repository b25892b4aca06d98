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
from tokenyard.regions.observation import Action
from tokenyard.regions.state import Dispatch


class RegionMetadata(Frozen):
    """What a regional policy is and where it comes from."""

    format_version: Literal[2] = 2
    problem: Literal["regions"] = "regions"
    kind: Literal["mix", "network"] = "mix"
    """`mix`: parameters of `tokenyard.regions.mixing`, array `theta`, for any regions. `network`:
    layers `w0 b0 w1 ...` with ReLU between them, after `mean` and `std`, for its own regions."""
    action: Action = "mix"
    """What the outputs of a network mean."""
    dispatch: Dispatch = "live_cost"
    """How tasks are sent that a network decides about."""
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
        """Check that the parameters are there, fit together and are finite."""
        if self.metadata.kind == "mix":
            expected: dict[str, tuple[int, ...]] = {"theta": (NUM_PARAMETERS,)}
        else:
            expected = _network_shapes(self.arrays)
        if set(self.arrays) != set(expected):
            raise ValueError(f"arrays {sorted(self.arrays)} must be {sorted(expected)}")
        for name, shape in expected.items():
            if self.arrays[name].shape != shape:
                raise ValueError(f"array {name!r} has shape {self.arrays[name].shape}, not {shape}")
            if not np.isfinite(self.arrays[name]).all():
                raise ValueError(f"array {name!r} holds numbers that are not finite")

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


def _network_shapes(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, tuple[int, ...]]:
    """Shapes that layers must have to follow each other.

    Raises:
        ValueError: There is no layer at all.
    """
    depth = sum(name.startswith("w") for name in arrays)
    if not depth:
        raise ValueError(f"arrays {sorted(arrays)} hold no layer w0")
    sizes = [arrays[f"w{i}"].shape[0] for i in range(depth) if f"w{i}" in arrays]
    before = arrays["w0"].shape[-1] if "w0" in arrays else 0
    shapes: dict[str, tuple[int, ...]] = {"mean": (before,), "std": (before,)}
    for i, size in enumerate(sizes):
        shapes |= {f"w{i}": (size, before), f"b{i}": (size,)}
        before = size
    return shapes


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
