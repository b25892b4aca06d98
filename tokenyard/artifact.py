"""The exported policy: what leaves training, and all that serving needs.

One npz file holds a few small arrays and one JSON text. numpy alone reads it and runs it. What the
arrays mean is for the problem to say: each has a table `KINDS` beside its `Artifact`.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import stat
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from tokenyard.config import FrozenModel, sentence_of
from tokenyard.network import Layer, layers_of

MAX_FILE_BYTES = 32 << 20
"""Of a policy file, and of what it holds unpacked; those that ship have 64 KiB at most."""
_METADATA = "metadata"
_LONGEST_REASON = 400
"""Characters: a file may say what it likes."""
_MAX_DIRECTORY_BYTES = 64 << 10
"""Of a zip file's table of contents: some hundred arrays."""
_ZIP_END_BYTES = 22
"""What a zip file without a comment ends with: where its table of contents is."""

_NOT_IN_MODEL_NAMES = re.compile("[/:'\"%]")

MetadataT = TypeVar("MetadataT", bound=FrozenModel)
ArtifactT = TypeVar("ArtifactT", bound="Artifact[Any]")


class ArtifactError(ValueError):
    """A policy file that cannot be used; the text names the file and the reason."""


class NoChampionError(ArtifactError):
    """No trained policy is there for a scenario; the text has the command that makes one."""


@dataclass(frozen=True)
class Kind(Generic[ArtifactT]):
    """What there is to know of one kind of a problem's policies."""

    check: Callable[[ArtifactT], None]
    """Raises ValueError where the arrays do not fit the metadata."""
    policy: Callable[..., Any]
    """Makes the policy of an artifact, with what else the problem gives it."""


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
        """Raise ValueError where the arrays do not fit the metadata; here any do."""

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
        """Write what `encoded` gives, whose folder is created; equal policies are equal bytes."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(self.encoded())

    def encoded(self) -> bytes:
        """The npz file's bytes.

        Raises:
            ValueError: An array is called like the metadata.
        """
        if _METADATA in self.arrays:
            raise ValueError(f"no array may be called {_METADATA!r}")
        # np.savez stamps the time into the file, which would give every save another hash.
        whole = io.BytesIO()
        with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, array in [(_METADATA, np.array(self.text())), *sorted(self.arrays.items())]:
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, np.asanyarray(array), allow_pickle=False)
                archive.writestr(zipfile.ZipInfo(f"{name}.npy"), buffer.getvalue())
        return whole.getvalue()

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a policy file.

        Raises:
            ArtifactError: The file is missing, broken, too large, of another format or problem.
        """
        return cls.decoded(_file_bytes(path), str(path))

    @classmethod
    def decoded(cls, data: bytes, source: str, again: bool = True) -> Self:
        """Read a policy file's bytes; `source` names them in errors.

        Raises:
            ArtifactError: They are broken, or of another format or problem.
        """
        try:
            arrays = _arrays_in(data)
            if _METADATA not in arrays:
                raise ArtifactError("it is no policy file: it has no metadata")
            return cls(_parsed(cls.METADATA, str(arrays.pop(_METADATA))), arrays)
        except ArtifactError as error:
            reason = str(error)[:_LONGEST_REASON]
            raise ArtifactError(f"policy file {source}: {reason}") from None
        except SystemError as error:
            # numpy parses headers as Python, and Python 3.11 may trip over its own count of depth
            # where the garbage collector runs in between (python/cpython#106905). The file is well.
            if not again:
                raise ArtifactError(f"policy file {source} cannot be read: {error}") from None
            return cls.decoded(data, source, again=False)
        except Exception as error:
            # zipfile, zlib, numpy, json and pydantic raise whatever they come upon in bytes that
            # nobody has written on purpose.
            reason = (str(error) or type(error).__name__)[:_LONGEST_REASON]
            raise ArtifactError(f"policy file {source} is broken: {reason}") from None

    @classmethod
    def champion(
        cls,
        scenario: str,
        path: str | Path | None = None,
        registry: RegistryLookup | None = None,
    ) -> tuple[Self, str]:
        """Find the policy that `champion` means, and say where it was found.

        The order: an explicit path; the registry's `champion` alias, where a lookup is given; the
        artifact that ships for the scenario. After them comes a rule, which is no artifact, and for
        the caller to know.

        Raises:
            NoChampionError: None of these is there.
            ArtifactError: The first that is there cannot be used.
        """
        problem = cls.METADATA.model_fields["problem"].default
        if path is not None:
            return cls.load(path), f"file {path}"
        name = model_name(problem, scenario)
        if registry is not None and (registered := registry(name)) is not None:
            return cls.load(registered.path), f"registry {name}@{registered.alias}"
        file = resources.files("tokenyard") / "artifacts" / problem / f"{scenario}.npz"
        with resources.as_file(file) as local:
            if local.is_file():
                return cls.load(local), f"shipped {problem}/{scenario}"
        raise NoChampionError(
            f"no champion for {problem}/{scenario}: none is registered or shipped; train one with "
            f"python pipelines/sweep.py {problem}:default or name a policy file"
        )


def _file_bytes(path: str | Path) -> bytes:
    """Read a file whole, unless it is too large or none that ends."""
    try:
        # A pipe without a writer would be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ArtifactError(f"policy file {path} is no file")
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ArtifactError(f"policy file {path} does not exist") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"policy file {path} cannot be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ArtifactError(f"policy file {path} is larger than {MAX_FILE_BYTES} bytes")
    return data


def _arrays_in(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays of an npz file; what they take is known before any is read."""
    _check_directory(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > MAX_FILE_BYTES:
            raise ArtifactError(f"it holds more than {MAX_FILE_BYTES} bytes")
        arrays = {}
        for member in members:
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ArtifactError(f"{member.filename} is packed in a way that numpy never does")
            with archive.open(member) as file:
                # Without a number it would unpack everything before it looks how much that is.
                arrays[member.filename.removesuffix(".npy")] = _array_of(
                    file.read(member.file_size)
                )
        return arrays


def _check_directory(data: bytes) -> None:
    """Refuse a zip file whose table of contents is too long to be read at leisure.

    Raises:
        ArtifactError: It is, or does not stand where numpy writes it.
    """
    signature, size, start = struct.unpack_from("<4s8xII", data[-_ZIP_END_BYTES:].ljust(22, b" "))
    is_64 = data[-_ZIP_END_BYTES - 20 : -_ZIP_END_BYTES].startswith(b"PK\x06\x07")
    if signature != b"PK\x05\x06" or is_64 or start + size + _ZIP_END_BYTES != len(data):
        raise ArtifactError("it is no npz file")
    if size > _MAX_DIRECTORY_BYTES:
        raise ArtifactError(f"its table of contents is longer than {_MAX_DIRECTORY_BYTES} bytes")


def _array_of(data: bytes) -> npt.NDArray[Any]:
    """Read one npy file."""
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array is of another npy version than 1.0")
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
    left = len(data) - file.tell()
    # numpy would make room for what the header says.
    if dtype.hasobject or dtype.itemsize * math.prod(shape) != left:
        raise ValueError(f"an array of shape {shape} and type {dtype} does not have {left} bytes")
    flat = np.frombuffer(data, dtype, offset=file.tell())
    return flat.reshape(shape, order="F" if by_columns else "C").copy()


def _parsed(metadata: type[FrozenModel], text: str) -> Any:
    """Parse metadata of a class; an error is one sentence."""
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ArtifactError("its metadata are no JSON object")
    ours, version = (metadata.model_fields[k].default for k in ("problem", "format_version"))
    if fields.get("problem", ours) != ours:
        raise ArtifactError(f"a policy for {fields['problem']}, not for {ours}")
    if fields.get("format_version") != version:
        written = fields.get("format_version")
        raise ArtifactError(f"format version {written}; this release reads {version}")
    try:
        return metadata.model_validate_json(text)
    except ValidationError as error:
        raise ArtifactError(f"metadata field {sentence_of(error)}") from None


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


def model_name(problem: str, scenario: str) -> str:
    """Name the registered model; characters that MLflow refuses are percent-encoded."""
    name = _NOT_IN_MODEL_NAMES.sub(lambda match: quote(match[0], safe=""), scenario)
    return f"tokenyard-{problem}-{name}"
