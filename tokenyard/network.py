"""Multi-layer perceptrons as an artifact keeps them, run with numpy: the one forward pass.

A network's arrays are `mean` and `std` of its inputs, then `w0`, `b0`, `w1`, `b1`, ... with `w` of
shape (outputs, inputs). Leading axes of inputs are free: one observation, a batch of them, or one
row for every replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tokenyard.types import FloatArray

Activation = Literal["relu", "tanh"]
"""What stands between layers."""
Arrays = Mapping[str, npt.NDArray[Any]]
Layer = tuple[FloatArray, FloatArray]
"""Weights, shape (outputs, inputs), and biases, shape (outputs,)."""


def forward(
    layers: Sequence[Layer], inputs: npt.NDArray[Any], activation: Activation = "relu"
) -> FloatArray:
    """Outputs of shape (..., outputs) for inputs of shape (..., inputs)."""
    *hidden, (last_weight, last_bias) = layers
    x = inputs
    for weight, bias in hidden:
        x = x @ weight.T + bias
        x = np.maximum(x, 0.0) if activation == "relu" else np.tanh(x)
    return np.asarray(x @ last_weight.T + last_bias)


def layers_of(arrays: Arrays) -> list[Layer]:
    """Weights and biases among arrays, first layer first.

    Raises:
        ValueError: One of them is missing.
    """
    count = sum(name.startswith("w") and name[1:].isdigit() for name in arrays)
    try:
        return [(arrays[f"w{i}"], arrays[f"b{i}"]) for i in range(count)]
    except KeyError as missing:
        raise ValueError(f"array {missing} is missing") from None


@dataclass(frozen=True, eq=False)
class Network:
    """A network with the units of its inputs."""

    mean: FloatArray
    """Of the inputs, shape (inputs,)."""
    std: FloatArray
    """Of the inputs, shape (inputs,)."""
    layers: Sequence[Layer]
    activation: Activation = "relu"

    @classmethod
    def from_arrays(cls, arrays: Arrays, activation: Activation = "relu") -> Network:
        """Take it from the arrays of an artifact.

        Raises:
            ValueError: One of them is missing.
        """
        return cls(arrays["mean"], arrays["std"], layers_of(arrays), activation)

    def __call__(self, inputs: npt.NDArray[Any]) -> FloatArray:
        """Outputs of shape (..., outputs) for inputs of shape (..., inputs)."""
        return forward(self.layers, (inputs - self.mean) / self.std, self.activation)


def check_names(arrays: Arrays, names: Iterable[str]) -> None:
    """Check that arrays are these and no others.

    Raises:
        ValueError: They are not.
    """
    if set(arrays) != set(names):
        raise ValueError(f"arrays {sorted(arrays)} must be {sorted(names)}")


def check_shape(arrays: Arrays, name: str, shape: tuple[int, ...]) -> None:
    """Check one array.

    Raises:
        ValueError: It is missing or of another shape.
    """
    if name not in arrays:
        raise ValueError(f"array {name!r} is missing")
    if arrays[name].shape != shape:
        raise ValueError(f"array {name!r} has shape {arrays[name].shape}; it must be {shape}")


def check_layers(arrays: Arrays, inputs: int, outputs: int | None = None) -> None:
    """Check that layers lead from so many inputs to so many outputs; None: to any number.

    Raises:
        ValueError: They do not, or there is none.
    """
    layers = layers_of(arrays)
    if not layers:
        raise ValueError("a network needs at least one layer: w0 and b0")
    for index, (weight, _) in enumerate(layers):
        check_shape(arrays, f"w{index}", (len(weight), inputs))
        check_shape(arrays, f"b{index}", (len(weight),))
        inputs = len(weight)
    if outputs is not None and inputs != outputs:
        raise ValueError(f"{inputs} outputs where there must be {outputs}")


def check_network(arrays: Arrays, inputs: int | None = None, outputs: int | None = None) -> None:
    """Check the units and layers of a `Network`; None stands for any number.

    Raises:
        ValueError: They are missing or do not fit together.
    """
    if inputs is None:
        first = arrays.get("w0")
        inputs = 0 if first is None or not first.ndim else first.shape[-1]
    check_layers(arrays, inputs, outputs)
    check_shape(arrays, "mean", (inputs,))
    check_shape(arrays, "std", (inputs,))


def check_only_network(arrays: Arrays) -> None:
    """Check that arrays are those of a `Network` and no others.

    Raises:
        ValueError: They are not.
    """
    check_network(arrays)
    numbered = [f"{letter}{i}" for i in range(len(layers_of(arrays))) for letter in "wb"]
    check_names(arrays, ["mean", "std", *numbered])
