"""The exported policy: what leaves training, and all that serving needs.

One npz file holds a few small arrays and one JSON text. numpy alone reads it and runs it.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from tokenyard import corrected
from tokenyard.equivariant import BASELINES, Layout
from tokenyard.frozen import Frozen
from tokenyard.generic import NUM_ENGINE_WEIGHTS, NUM_SERVER_WEIGHTS
from tokenyard.observation import (
    NUM_MARGINAL_WEIGHTS,
    NUM_PROMISING_WEIGHTS,
    NUM_REQUEST_FEATURES,
    NUM_SCORE_WEIGHTS,
    observation_size,
)
from tokenyard.scenario import Visibility
from tokenyard.types import FloatArray, Slo

FORMAT_VERSION = 1
_METADATA = "metadata"


class ArtifactError(ValueError):
    """A policy file that cannot be used; the text names the file and the reason."""


class LengthPredictor(Frozen):
    """Mean output length by context length, learned from the training traffic."""

    bin_edges_tokens: tuple[float, ...]
    """Upper ends, inclusive, of all context bins but the last."""
    mean_generated_tokens: Annotated[tuple[float, ...], Field(min_length=1)]
    """One per bin."""

    def generated_tokens(self, context_tokens: float) -> float:
        """Predicted output of a request, tokens."""
        return self.mean_generated_tokens[
            int(np.searchsorted(self.bin_edges_tokens, context_tokens))
        ]


class FeatureScaling(Frozen):
    """Medians and interquartile ranges of the request features, from training traffic."""

    medians: Annotated[tuple[float, ...], Field(min_length=NUM_REQUEST_FEATURES)]
    scales: Annotated[tuple[float, ...], Field(min_length=NUM_REQUEST_FEATURES)]


class ArtifactMetadata(Frozen):
    """What a policy is, where it comes from, and how its inputs are made."""

    format_version: Literal[1] = 1
    kind: Literal["linear", "marginal", "generic", "mlp", "equivariant", "corrected"]
    """`linear`: a learned correction of the expected response time
    (`tokenyard.observation.linear_scores`); `marginal`: one of the delay that a request adds, for
    replicas that batch continuously (`marginal_scores`); `generic`: one of either for any cluster
    (`tokenyard.generic`); `mlp`: a network over the flat observation; `equivariant`: one that
    scores every replica alike (`tokenyard.equivariant`); `corrected`: a `marginal` policy and a
    network of that kind that corrects it (`tokenyard.corrected`)."""
    problem: Literal["routing"] = "routing"
    scenario: str
    trainer: str
    """Algorithm that made it: policy_search, rollouts, ppo, a2c or dqn."""
    num_replicas: int | None
    """Replicas it decides between, in the order it was trained on; None: any."""
    expected_finish: bool = True
    """Whether its observation holds the expected finish times."""
    slo_response_s: Annotated[float, Field(gt=0)]
    mean_total_tokens: Annotated[float, Field(gt=0)]
    """Typical size of a request in training, tokens."""
    output_length: Visibility
    """What it was told of the output length in training."""
    predictor: LengthPredictor | None = None
    """Fills in `predicted_total_tokens` where the caller has no prediction."""
    scaling: FeatureScaling | None = None
    """Needed by networks."""
    activation: Literal["relu", "tanh"] = "relu"
    residual_scale: Annotated[float, Field(ge=0)] = 0.0
    """How much a second of expected response time, or of its baseline's cost, lowers a network's
    preference."""
    baseline: str | None = None
    """Rule that an `equivariant` network corrects, a key of `tokenyard.equivariant.BASELINES`; an
    `mlp` corrects shortest expected delay."""
    metrics: Mapping[str, float] = {}
    """What it scored when it was exported."""
    lineage: Mapping[str, str] = {}
    """Hashes and names of what it was made from."""

    @property
    def slo(self) -> Slo:
        """The promise it was trained on."""
        return Slo(self.slo_response_s)

    def to_json(self) -> str:
        """The text that is stored and hashed; kinds without a baseline keep their hash."""
        return self.model_dump_json(exclude={"baseline"} if self.baseline is None else None)


@dataclass(frozen=True, eq=False)
class PolicyArtifact:
    """A trained policy.

    Arrays of a `linear` policy: `weights`, shape (NUM_SCORE_WEIGHTS,); of a `marginal` one the
    same, shape (NUM_MARGINAL_WEIGHTS,) or (NUM_PROMISING_WEIGHTS,). Arrays of a `generic` one:
    `server_weights`, shape (NUM_SERVER_WEIGHTS,), and `engine_weights`, shape
    (NUM_ENGINE_WEIGHTS,). Arrays of an `mlp`: `mean` and `std` of the observation, then `w0`,
    `b0`, `w1`, `b1`, ... with `w` of shape (outputs, inputs); the network's outputs are one
    preference per replica, higher is better.
    An `equivariant` network has `request_mean`, `request_std`, `replica_mean` and `replica_std`,
    and layers from `Layout.num_inputs` numbers to the preference for one replica. A `corrected`
    policy has the `weights` of a `marginal` one and the arrays of such a network, of three layers.

    Raises:
        ValueError: The arrays do not fit the metadata.
    """

    metadata: ArtifactMetadata
    arrays: Mapping[str, FloatArray]

    def __post_init__(self) -> None:
        """Check that the arrays are those of the kind, that they fit and are finite."""
        for name, array in self.arrays.items():
            if not np.isfinite(array).all():
                raise ValueError(f"array {name!r} holds numbers that are not finite")
        if self.metadata.kind == "linear":
            _check_shape(self.arrays, "weights", (NUM_SCORE_WEIGHTS,))
        elif self.metadata.kind == "marginal":
            self._check_marginal_weights()
        elif self.metadata.kind == "generic":
            _check_shape(self.arrays, "server_weights", (NUM_SERVER_WEIGHTS,))
            _check_shape(self.arrays, "engine_weights", (NUM_ENGINE_WEIGHTS,))
        else:
            self._check_network()

    def _check_network(self) -> None:
        metadata = self.metadata
        if metadata.scaling is None:
            raise ValueError("a network needs scaling in its metadata")
        if metadata.residual_scale and not metadata.expected_finish:
            raise ValueError("residual_scale needs expected_finish in the observation")
        if metadata.kind == "equivariant":
            self._check_baseline()
            self._check_scorer()
            return
        if metadata.kind == "corrected":
            self._check_corrected()
            return
        if metadata.num_replicas is None:
            raise ValueError("a network needs num_replicas in its metadata")
        inputs = observation_size(metadata.num_replicas, metadata.expected_finish)
        _check_shape(self.arrays, "mean", (inputs,))
        _check_shape(self.arrays, "std", (inputs,))
        self._check_layers(inputs, metadata.num_replicas)

    def _check_baseline(self) -> None:
        baseline = self.metadata.baseline
        if baseline not in BASELINES:
            raise ValueError(f"unknown baseline {baseline!r}; choose one of {sorted(BASELINES)}")

    def _check_marginal_weights(self) -> None:
        promising = len(self.arrays.get("weights", ())) == NUM_PROMISING_WEIGHTS
        size = NUM_PROMISING_WEIGHTS if promising else NUM_MARGINAL_WEIGHTS
        _check_shape(self.arrays, "weights", (size,))

    def _check_corrected(self) -> None:
        self._check_marginal_weights()
        if self.layout != corrected.LAYOUT:
            raise ValueError(f"a corrected policy observes {corrected.LAYOUT}, not {self.layout}")
        self._check_scorer()
        if len(self.layers) != corrected.NUM_LAYERS or self.metadata.activation != "tanh":
            raise ValueError(f"a corrected policy has {corrected.NUM_LAYERS} layers with tanh")

    def _check_scorer(self) -> None:
        layout = self.layout
        for kind, size in (("request", NUM_REQUEST_FEATURES), ("replica", layout.num_features)):
            _check_shape(self.arrays, f"{kind}_mean", (size,))
            _check_shape(self.arrays, f"{kind}_std", (size,))
        self._check_layers(layout.num_inputs, 1)

    def _check_layers(self, inputs: int, outputs: int) -> None:
        if not self.layers:
            raise ValueError("a network needs at least one layer: w0 and b0")
        for index, (weight, _) in enumerate(self.layers):
            _check_shape(self.arrays, f"w{index}", (len(weight), inputs))
            _check_shape(self.arrays, f"b{index}", (len(weight),))
            inputs = len(weight)
        if inputs != outputs:
            raise ValueError(f"{inputs} outputs where there must be {outputs}")

    @property
    def needs_engine(self) -> bool | None:
        """Whether it decides between replicas that batch continuously; None: between any."""
        by_kind = {"linear": None, "generic": None, "mlp": False}
        by_kind |= {"marginal": True, "corrected": True}
        kind = self.metadata.kind
        return self.layout.batches if kind == "equivariant" else by_kind[kind]

    @cached_property
    def layout(self) -> Layout:
        """What an `equivariant` network is shown of every replica."""
        given = len(self.arrays.get("replica_mean", ()))
        for batches in (False, True):
            layout = Layout(self.metadata.expected_finish, batches)
            if layout.num_features == given:
                return layout
        raise ValueError(f"array 'replica_mean' is missing, or has a strange length: {given}")

    @cached_property
    def layers(self) -> list[tuple[FloatArray, FloatArray]]:
        """Weights and biases of a network, first layer first."""
        count = sum(name.startswith("w") and name[1:].isdigit() for name in self.arrays)
        try:
            return [(self.arrays[f"w{i}"], self.arrays[f"b{i}"]) for i in range(count)]
        except KeyError as missing:
            raise ValueError(f"array {missing} is missing") from None

    @cached_property
    def sha256(self) -> str:
        """First 12 hex digits of a hash over all that the policy is."""
        return content_hash(self.metadata.to_json(), self.arrays)

    def described(self, metrics: Mapping[str, float], lineage: Mapping[str, str]) -> PolicyArtifact:
        """The same policy with what it scored and what it was made from."""
        metadata = self.metadata.model_copy(update={"metrics": metrics, "lineage": lineage})
        return PolicyArtifact(metadata, self.arrays)

    def save(self, path: str | Path) -> None:
        """Write the npz file; equal policies give equal bytes.

        Raises:
            ValueError: An array is called like the metadata.
        """
        write_arrays(path, self.metadata.to_json(), self.arrays)

    @classmethod
    def load(cls, path: str | Path) -> PolicyArtifact:
        """Read a policy file.

        Raises:
            ArtifactError: The file is missing, broken, or of another format.
        """
        return read_arrays(path, lambda text, arrays: cls(_parse_metadata(text), arrays))


_Artifact = TypeVar("_Artifact")


def write_arrays(path: str | Path, text: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write metadata and arrays as one npz file; equal contents give equal bytes.

    Raises:
        ValueError: An array is called like the metadata.
    """
    if _METADATA in arrays:
        raise ValueError(f"no array may be called {_METADATA!r}")
    # np.savez stamps the time into the file, which would give every save another hash.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in [(_METADATA, np.array(text)), *sorted(arrays.items())]:
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.asanyarray(array), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), buffer.getvalue())


def read_arrays(
    path: str | Path, make: Callable[[str, dict[str, npt.NDArray[Any]]], _Artifact]
) -> _Artifact:
    """Read what `write_arrays` wrote and make a policy of it.

    Raises:
        ArtifactError: The file is missing or broken, or `make` refuses it with a ValueError.
    """
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


def content_hash(text: str, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """First 12 hex digits of a hash over metadata and arrays."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()[:12]


def _parse_metadata(text: str) -> ArtifactMetadata:
    found = json.loads(text).get("format_version")
    if found != FORMAT_VERSION:
        raise ArtifactError(f"format version {found}; this release reads {FORMAT_VERSION}")
    try:
        return ArtifactMetadata.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"metadata field {field}: {first['msg']}") from None


def _check_shape(
    arrays: Mapping[str, npt.NDArray[np.float64]], name: str, shape: tuple[int, ...]
) -> None:
    if name not in arrays:
        raise ValueError(f"array {name!r} is missing")
    if arrays[name].shape != shape:
        raise ValueError(f"array {name!r} has shape {arrays[name].shape}; it must be {shape}")


RegistryLookup = Callable[[str], Path | None]
"""Gives the local path of a registered model's champion, by the model's name."""


def resolve_champion(
    problem: str,
    scenario: str,
    path: str | Path | None = None,
    registry: RegistryLookup | None = None,
) -> tuple[PolicyArtifact, str]:
    """Find the policy that `champion` means, and say where it was found.

    The order: an explicit path; the registry's `champion` alias, where a lookup is given; the
    artifact that ships for the scenario; the one that works on any cluster.

    Raises:
        ArtifactError: None of these is there, or the first that is there cannot be used.
    """
    return find_champion(
        problem, scenario, PolicyArtifact.load, "pipelines/sweep.py", path, registry,
        (scenario, "generic"),
    )  # fmt: skip


def find_champion(
    problem: str,
    scenario: str,
    load: Callable[[str | Path], _Artifact],
    trainer: str,
    path: str | Path | None = None,
    registry: RegistryLookup | None = None,
    shipped_names: Sequence[str] = (),
) -> tuple[_Artifact, str]:
    """Look for a champion of any problem, and say where it was found.

    Args:
        problem: Folder of the shipped artifacts, and part of the registered model's name.
        scenario: Whose champion.
        load: Reads a file of the problem's kind.
        trainer: Command that makes one, for the error.
        path: Counts before anything else.
        registry: Looks registered champions up; it counts before what ships.
        shipped_names: Shipped artifacts that will do, the best first.

    Raises:
        ArtifactError: None of these is there, or the first that is there cannot be used.
    """
    if path is not None:
        return load(path), f"file {path}"
    if registry is not None:
        name = f"tokenyard-{problem}-{scenario}"
        registered = registry(name)
        if registered is not None:
            return load(registered), f"registry {name}@champion"
    for shipped in shipped_names:
        file = resources.files("tokenyard") / "artifacts" / problem / f"{shipped}.npz"
        with resources.as_file(file) as local:
            if local.is_file():
                return load(local), f"shipped {problem}/{shipped}"
    raise ArtifactError(
        f"no champion for {problem}/{scenario}: none is registered or shipped; "
        f"train one with {trainer} or name a policy file"
    )
