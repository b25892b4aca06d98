"""What the outputs of a policy network mean: actions as columns, whatever they are made of.

An action is one of several (`DiscreteActions`) or some bounded numbers (`BoxActions`). What may not
be chosen has the logit minus infinity.

Shapes: ... any leading axes, K alternatives, D numbers, I outputs of the network, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributions import (
    Categorical,
    Independent,
    Normal,
)

from tokenyard.types import BoolArray


@dataclass(frozen=True)
class DiscreteActions:
    """One of K alternatives, kept as int64 from 0."""

    num_inputs: int
    """Outputs of the network that an action is drawn from, I."""
    start: int = 0
    """What the environment calls the first."""

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
    def num_inputs(self) -> int:
        """Means, then logarithms of standard deviations."""
        return 2 * len(self.low)

    def distribution(self, inputs: Tensor) -> Independent[Normal]:
        """Normal, and not cut at the bounds, as RLlib has it: beyond them lies the bound itself."""
        mean, log_std = inputs.chunk(2, -1)
        return Independent(Normal(mean, log_std.exp(), validate_args=False), 1, validate_args=False)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Standard normal noise."""
        return torch.randn((*shape, len(self.low)), generator=generator)

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


Actions = DiscreteActions | BoxActions
"""One kind of action: how it is drawn, how likely it was, what the environment gets."""


def actions_of(space: gymnasium.Space[Any]) -> Actions:
    """What the actions of a space are kept as.

    Raises:
        ValueError: A space that is not of alternatives and bounded float32 numbers.
    """
    if isinstance(space, gymnasium.spaces.Discrete):
        return DiscreteActions(int(space.n), int(space.start))
    if isinstance(space, gymnasium.spaces.Box) and space.is_bounded():
        if space.dtype == np.float32 and space.low.ndim == 1:
            return BoxActions(space.low, space.high)
    raise ValueError(
        f"actions of {space} are not kept as columns; take Discrete, a bounded Box of one axis and "
        "dtype float32, or the implementation 'rllib_stock'"
    )
