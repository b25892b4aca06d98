"""The exported policy: what leaves training, and all that serving needs.

One npz file holds a few small arrays and one JSON text. numpy alone reads it and runs it. What the
arrays mean is for the problem to say: each has a table `KINDS` beside its `Artifact`.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from tokenyard.config import FrozenModel
from tokenyard.network import Layer, layers_of

_METADATA = "metadata"

_Made = TypeVar("_Made")
MetadataT = TypeVar("MetadataT", bound=FrozenModel)
ArtifactT = TypeVar("ArtifactT", bound="Artifact[Any]")


class ArtifactError(ValueError):
    """A policy file that cannot be used; the text names the file and the reason."""


class NoChampionError(ArtifactError):
    """No trained policy is there for a scenario."""

    def __init__(self, text: str, rule: str | None) -> None:
        """Say so.

        Args:
            text: What is missing, and the command that makes it.
            rule: The best tuned rule, which decides in its place; None: no rule was tuned.
        """
        super().__init__(text)
        self.rule = rule


@dataclass(frozen=True)
class Kind(Generic[ArtifactT]):
    """What there is to know of one kind of a problem's policies."""

    check: Callable[[ArtifactT], None]
    """Raises ValueError where the arrays do not fit the metadata."""
    policy: Callable[..., Any]
    """Makes the policy of an artifact, with what else the problem gives it."""
    is_finetuned: bool = False
    """Whether `pipelines/finetune.py` goes on from it."""


@dataclass(frozen=True, eq=False)
class Artifact(Generic[MetadataT]):
    """A trained policy.

    Raises:
        ValueError: The arrays do not fit the metadata, or are not finite.
    """

    METADATA: ClassVar[type[FrozenModel]]
    """Class of the metadata; it has `format_version`, `problem` and `kind`."""

    metadata: MetadataT
    arrays: Mapping[str, npt.NDArray[Any]]

    def __post_init__(self) -> None:
        """Check that the arrays are finite and those of the kind."""
        for name, array in self.arrays.items():
            if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
                raise ValueError(f"array {name!r} holds numbers that are not finite")
        self.check()

    def check(self) -> None:
        """Check that the arrays fit the metadata; here any do, and problems say more.

        Raises:
            ValueError: They do not.
        """

    def text(self) -> str:
        """The metadata as they are stored and hashed."""
        return self.metadata.model_dump_json()

    @cached_property
    def layers(self) -> list[Layer]:
        """Weights and biases of a network, first layer first."""
        return layers_of(self.arrays)

    @cached_property
    def sha256(self) -> str:
        """First 12 hex digits of a hash over all that the policy is."""
        digest = hashlib.sha256(self.text().encode())
        for name in sorted(self.arrays):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(self.arrays[name]).tobytes())
        return digest.hexdigest()[:12]

    def described(self, metrics: Mapping[str, float], lineage: Mapping[str, str]) -> Self:
        """The same policy with what it scored and what it was made from."""
        metadata = self.metadata.model_copy(update={"metrics": metrics, "lineage": lineage})
        return replace(self, metadata=metadata)

    def save(self, path: str | Path) -> None:
        """Write the npz file; equal policies give equal bytes.

        Raises:
            ValueError: An array is called like the metadata.
        """
        _write(path, self.text(), self.arrays)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a policy file.

        Raises:
            ArtifactError: The file is missing, broken, of another format or problem.
        """
        return _read(path, lambda text, arrays: cls(_parsed(cls.METADATA, text), arrays))


def _write(path: str | Path, text: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    if _METADATA in arrays:
        raise ValueError(f"no array may be called {_METADATA!r}")
    # np.savez stamps the time into the file, which would give every save another hash.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in [(_METADATA, np.array(text)), *sorted(arrays.items())]:
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.asanyarray(array), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), buffer.getvalue())


def _read(path: str | Path, make: Callable[[str, dict[str, npt.NDArray[Any]]], _Made]) -> _Made:
    try:
        # Opened here: numpy leaves a broken file open.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        text = str(arrays.pop(_METADATA))
        return make(text, arrays)
    except FileNotFoundError:
        raise ArtifactError(f"policy file {path} does not exist") from None
    except KeyError:
        raise ArtifactError(f"{path} is no policy file: it has no metadata") from None
    except ArtifactError as error:
        raise ArtifactError(f"policy file {path}: {error}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"policy file {path} is broken: {error}") from error


def _parsed(metadata: type[FrozenModel], text: str) -> Any:
    """Read metadata of one class, or refuse them in one sentence."""
    found = json.loads(text)
    ours, version = (metadata.model_fields[one].default for one in ("problem", "format_version"))
    if found.get("problem", ours) != ours:
        raise ArtifactError(f"a policy for {found['problem']}, not for {ours}")
    if found.get("format_version") != version:
        given = found.get("format_version")
        raise ArtifactError(f"format version {given}; this release reads {version}")
    try:
        return metadata.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"metadata field {field}: {first['msg']}") from None


class RegistryError(ArtifactError):
    """A registry that does not answer; the text names it and the reason."""


@dataclass(frozen=True)
class RegisteredPolicy:
    """A version of a registered model."""

    path: Path
    """The policy file, on this machine."""
    version: str
    alias: str
    """By which it was looked up."""
    run_id: str | None
    """MLflow run that logged it; None: it was registered without one."""


RegistryLookup = Callable[[str], RegisteredPolicy | None]
"""Finds a version of a registered model by the model's name; None: there is none."""
ANY_CLUSTER = "generic"
"""Name of the shipped artifact that works on any cluster."""


def model_name(problem: str, scenario: str) -> str:
    """Name of the registered model."""
    return f"tokenyard-{problem}-{scenario}"


def find_champion(
    problem: str,
    scenario: str,
    load: Callable[[str | Path], _Made],
    trainer: str,
    path: str | Path | None = None,
    registry: RegistryLookup | None = None,
    best_rule: Callable[[str], str | None] = lambda scenario: None,
) -> tuple[_Made, str]:
    """Find the policy that `champion` means, and say where it was found.

    The order: an explicit path; the registry's `champion` alias, where a lookup is given; the
    artifact that ships for the scenario; the one that works on any cluster. After them comes the
    best tuned rule, by name, which is no artifact and travels in the error.

    Args:
        problem: Folder of the shipped artifacts, and part of the registered model's name.
        scenario: Whose champion.
        load: Reads a file of the problem.
        trainer: Command that makes one, for the error.
        path: Counts before anything else.
        registry: Looks registered champions up; it counts before what ships.
        best_rule: Names a scenario's best tuned rule.

    Raises:
        NoChampionError: None of these is there.
        ArtifactError: The first that is there cannot be used.
    """
    if path is not None:
        return load(path), f"file {path}"
    if registry is not None:
        name = model_name(problem, scenario)
        registered = registry(name)
        if registered is not None:
            return load(registered.path), f"registry {name}@{registered.alias}"
    for shipped in (scenario, ANY_CLUSTER):
        file = resources.files("tokenyard") / "artifacts" / problem / f"{shipped}.npz"
        with resources.as_file(file) as local:
            if local.is_file():
                return load(local), f"shipped {problem}/{shipped}"
    raise NoChampionError(
        f"no champion for {problem}/{scenario}: none is registered or shipped; "
        f"train one with {trainer} or name a policy file",
        best_rule(scenario),
    )
