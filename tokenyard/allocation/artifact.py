"""The exported allocation policy: what leaves training, and all that deciding live needs.

One npz file, as `tokenyard.artifact` writes it: the scenario (pool, model, promises), the
forecaster and what was learned. numpy reads it; the planner runs compiled, or as plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tokenyard.allocation.forecast import Forecaster
from tokenyard.allocation.planner import NUM_PARAMETERS
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.artifact import (
    RegistryLookup,
    content_hash,
    find_champion,
    read_arrays,
    write_arrays,
)
from tokenyard.frozen import Frozen

_DIMENSIONS = {"planner": {"theta": 1}, "table": {"edges_per_s": 1, "best": 4}}
"""Arrays of a policy, and how many dimensions each has; networks count their own layers."""


class AllocationMetadata(Frozen):
    """What an allocation policy is, where it comes from, and what it decides for."""

    format_version: Literal[1] = 1
    problem: Literal["allocation"] = "allocation"
    kind: Literal["planner", "table", "hybrid_network", "grid_network"]
    """`planner`: parameters of `tokenyard.allocation.planner`, array `theta`; `table`: a plan by
    backlog, part of the day, bin of demand and plan in force, arrays `edges_per_s` and `best`;
    networks from observations: layers `w0`, `b0` and so on, `mean` and `std` of observations. The
    hybrid one puts out the mean and the spread of memory, then a preference per shape; the other
    preferences alone, for shapes with the memory of `PlanTable.best_memory`."""
    scenario: AllocationScenario
    trainer: str
    """Algorithm that made it."""
    forecaster: Forecaster | None = None
    """Needed by planners and networks."""
    stay_bonus: float = 0.0
    """Networks: added to the preference for what is in force."""
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
        kind, arrays = self.metadata.kind, self.arrays
        wanted = _DIMENSIONS.get(kind) or {
            "mean": 1, "std": 1, **{name: 2 - name.startswith("b") for name in _layer_names(arrays)}
        }  # fmt: skip
        if set(arrays) != set(wanted):
            raise ValueError(f"arrays {sorted(arrays)} must be {sorted(wanted)}")
        for name, dimensions in wanted.items():
            if arrays[name].ndim != dimensions:
                raise ValueError(f"array {name!r} must have {dimensions} dimensions")
            if not np.isfinite(arrays[name]).all():
                raise ValueError(f"array {name!r} holds numbers that are not finite")
        if kind == "planner" and arrays["theta"].shape != (NUM_PARAMETERS,):
            raise ValueError(f"array 'theta' must have shape ({NUM_PARAMETERS},)")
        if kind != "table" and self.metadata.forecaster is None:
            raise ValueError(f"a {kind} needs a forecaster in its metadata")

    @property
    def layers(self) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Weights and biases of a network, first layer first."""
        count = len(_layer_names(self.arrays)) // 2
        return [(self.arrays[f"w{i}"], self.arrays[f"b{i}"]) for i in range(count)]

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


def _layer_names(arrays: Mapping[str, Any]) -> list[str]:
    count = max(1, sum(name.startswith("w") for name in arrays))
    return [f"{letter}{i}" for i in range(count) for letter in "wb"]


def resolve_allocation_champion(
    scenario: str, path: str | Path | None = None, registry: RegistryLookup | None = None
) -> tuple[AllocationArtifact, str]:
    """Find the policy that `champion` means: a path, the registry's, or the shipped one.

    Raises:
        ArtifactError: None of these is there, or the first that is there cannot be used.
    """
    trainer = f"python pipelines/tune_allocation.py --scenario {scenario}"
    return find_champion(
        "allocation", scenario, AllocationArtifact.load, trainer, path, registry, (scenario,)
    )
