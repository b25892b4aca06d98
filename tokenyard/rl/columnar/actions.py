"""What the outputs of a policy network mean: actions as columns, whatever they are made of.

An action of one kind is one of several (`DiscreteActions`) or some bounded numbers (`BoxActions`).
A hybrid one has independent parts of both kinds, whose columns and network outputs stand side by
side in the order of the parts' names, which is RLlib's order too. What may not be chosen has the
logit minus infinity.

Shapes: ... any leading axes, K alternatives, D numbers, I outputs of the network, C columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    Normal,
    kl_divergence,
    register_kl,
)

from tokenyard.types import BoolArray

Place = int | slice
"""Where a part of an action is: one column as a number each, or some side by side."""


@dataclass(frozen=True)
class DiscreteActions:
    """One of K alternatives, kept as int64 from 0."""

    num_inputs: int
    """Outputs of the network that an action is drawn from, I."""
    start: int = 0
    """What the environment calls the first."""
    num_columns: int = 1
    """Numbers that an action is kept as, C."""

    @property
    def num_noise(self) -> int:
        """One number for each alternative."""
        return self.num_inputs

    def distribution(self, inputs: Tensor) -> Categorical:
        """The softmax of the inputs."""
        return Categorical(logits=inputs, validate_args=False)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Gumbel noise: minus the logarithm of standard exponential noise."""
        return -torch.empty((*shape, self.num_inputs)).exponential_(generator=generator).log_()

    def draw(self, inputs: Tensor, noise: Tensor) -> Tensor:
        """Draw from the softmax of the inputs: the index of the largest sum with Gumbel noise.

        Args:
            inputs: Logits, shape (..., choices).
            noise: Of `noise`, the same shape.

        Returns:
            Indices from 0, shape (...).
        """
        return (inputs + noise).argmax(-1)

    def for_env(self, actions: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Count from `start`."""
        return np.asarray(actions, np.int64) + self.start

    def clipped(self, actions: npt.NDArray[Any]) -> BoolArray:
        """Nothing to clip."""
        return np.zeros(actions.shape, np.bool_)


@dataclass(frozen=True, eq=False)
class BoxActions:
    """D numbers within bounds; -1 stands for the lower one and 1 for the upper one."""

    low: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]
    """Both of shape (D,)."""

    @property
    def num_columns(self) -> int:
        """Numbers in one action, D."""
        return len(self.low)

    @property
    def num_inputs(self) -> int:
        """Means, then logarithms of standard deviations."""
        return 2 * len(self.low)

    @property
    def num_noise(self) -> int:
        """Noise that one action takes: a number for each of its own, D."""
        return len(self.low)

    def distribution(self, inputs: Tensor) -> Independent[Normal]:
        """Normal, and not cut at the bounds, as RLlib has it: beyond them lies the bound itself."""
        mean, log_std = inputs.chunk(2, -1)
        return Independent(Normal(mean, log_std.exp(), validate_args=False), 1, validate_args=False)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Standard normal noise."""
        return torch.randn((*shape, self.num_noise), generator=generator)

    def draw(self, inputs: Tensor, noise: Tensor) -> Tensor:
        """Means plus noise times standard deviations, shape (..., D)."""
        mean, log_std = inputs.chunk(2, -1)
        return mean + noise * log_std.exp()

    def for_env(self, actions: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Scale to the bounds and clip; what is not a number stays so, for the environment."""
        # Clipped before and after: the largest floats overflow, and rounding can pass a bound.
        within = np.clip(actions, np.float32(-1.0), np.float32(1.0))
        scaled = self.low + (within + np.float32(1.0)) * (self.high - self.low) / np.float32(2.0)
        return np.asarray(np.clip(scaled, self.low, self.high), np.float32)

    def clipped(self, actions: npt.NDArray[Any]) -> BoolArray:
        """Whether one of the numbers was beyond a bound."""
        return np.asarray((np.abs(actions) > 1.0).any(-1))


class Joint(Distribution):
    """Distribution of independent parts: all is a sum over them."""

    def __init__(self, parts: Sequence[Distribution], columns: Sequence[Place]) -> None:
        """Take the parts, and where the actions of each are."""
        super().__init__(validate_args=False)
        self.parts, self.columns = parts, columns

    def log_prob(self, value: Tensor) -> Tensor:
        """Of actions of shape (..., C)."""
        pairs = zip(self.parts, self.columns, strict=True)
        return torch.stack([part.log_prob(value[..., columns]) for part, columns in pairs]).sum(0)

    def entropy(self) -> Tensor:
        """Of all parts together."""
        return torch.stack([part.entropy() for part in self.parts]).sum(0)


@register_kl(Joint, Joint)
def _divergence(old: Joint, new: Joint) -> Tensor:
    pairs = zip(old.parts, new.parts, strict=True)
    return torch.stack([kl_divergence(before, after) for before, after in pairs]).sum(0)


class Hybrid:
    """Independent parts by name, kept side by side as float32: exact for choices below 2**24."""

    def __init__(self, parts: Mapping[str, Actions]) -> None:
        self.names = tuple(sorted(parts))
        self.parts = tuple(parts[name] for name in self.names)
        self.input_sizes = [part.num_inputs for part in self.parts]
        self.num_inputs: int = sum(self.input_sizes)
        self.num_columns: int = sum(part.num_columns for part in self.parts)
        self.noise_sizes = [part.num_noise for part in self.parts]
        self.num_noise: int = sum(self.noise_sizes)
        columns: list[Place] = []
        first = 0
        for part in self.parts:
            end = first + part.num_columns
            columns.append(first if isinstance(part, DiscreteActions) else slice(first, end))
            first = end
        self.columns = tuple(columns)

    def distribution(self, inputs: Tensor) -> Joint:
        """Every part's distribution given its own outputs of the network."""
        split = zip(self.parts, inputs.split(self.input_sizes, -1), strict=True)
        return Joint([part.distribution(own) for part, own in split], self.columns)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Every part's noise, side by side."""
        return torch.cat([part.noise(shape, generator) for part in self.parts], -1)

    def draw(self, inputs: Tensor, noise: Tensor) -> Tensor:
        """Draw every part, shape (..., C)."""
        own = inputs.split(self.input_sizes, -1), noise.split(self.noise_sizes, -1)
        drawn = [part.draw(*arguments) for part, *arguments in zip(self.parts, *own, strict=True)]
        rows = inputs.shape[:-1]
        return torch.cat([part.float().reshape(*rows, -1) for part in drawn], -1)

    def for_env(self, actions: npt.NDArray[Any]) -> dict[str, Any]:
        """Every part by its name."""
        return {
            name: part.for_env(actions[..., columns])
            for name, part, columns in zip(self.names, self.parts, self.columns, strict=True)
        }

    def clipped(self, actions: npt.NDArray[Any]) -> BoolArray:
        """Whether any part had to be moved."""
        pairs = zip(self.parts, self.columns, strict=True)
        moved = [part.clipped(actions[..., columns]) for part, columns in pairs]
        return np.asarray(np.any(moved, axis=0))


Actions = DiscreteActions | BoxActions | Hybrid
"""One kind of action: how it is drawn, how likely it was, what the environment gets."""


def actions_of(space: gymnasium.Space[Any]) -> Actions:
    """What the actions of a space are kept as.

    Raises:
        ValueError: A space that is not of alternatives and bounded float32 numbers.
    """
    if isinstance(space, gymnasium.spaces.Discrete):
        return DiscreteActions(int(space.n), int(space.start))
    if isinstance(space, gymnasium.spaces.Dict):
        return Hybrid({name: actions_of(part) for name, part in space.spaces.items()})
    if isinstance(space, gymnasium.spaces.Box) and space.is_bounded():
        if space.dtype == np.float32 and space.low.ndim == 1:
            return BoxActions(space.low, space.high)
    raise ValueError(
        f"actions of {space} are not kept as columns; take Discrete, a bounded Box of one axis and "
        "dtype float32, or a Dict of them, or the implementation 'rllib_stock'"
    )
