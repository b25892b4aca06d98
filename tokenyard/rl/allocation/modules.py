"""Networks of the allocation learners: RLlib's own, with a normaliser, a mask and a wish to stay.

Every change of plan costs a restart, so random exploration is destructive: a bonus on what is in
force makes a fresh network keep its plan, and memory and limit of the batch start where most plans
are good. Shapes that no memory makes feasible are not among the actions; where budget or hysteresis
forbid a change, the mask leaves the shape in force.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Dict, Discrete
from ray.rllib.core.columns import Columns
from torch import Tensor

from tokenyard.allocation.observation import ALLOWED
from tokenyard.allocation.policies.learned import MEMORY_OUTPUTS
from tokenyard.rl import modules

STAY_BONUS = "stay_bonus"
"""Key of a module's `model_config`: what is added for what is in force, in logits or in values."""
_MEMORY_START = (0.9, -3.5)
"""First mean and logarithm of the spread of the memory, from -1 for 0 to 1 for 1."""


def with_stay(preferences: Tensor, observations: Tensor, bonus: float) -> Tensor:
    """Add the bonus to the shape in force; rule the others out where no change is allowed.

    Args:
        preferences: For every shape, (..., S).
        observations: Shape (..., observation size); the last S say which shape is in force.
        bonus: In units of the preferences.
    """
    in_force = observations[..., -preferences.shape[-1] :]
    fixed = observations[..., ALLOWED, None] == 0
    return (preferences + bonus * in_force).masked_fill(fixed & (in_force == 0), -torch.inf)


class AllocationActorCritic(modules.ActorCritic):
    """Actor and critic of PPO and A2C for actions of shape, memory and limit of the batch."""

    output_shift: Tensor
    output_scale: Tensor
    """What outputs of the network are times the scale, plus the shift."""

    def setup(self) -> None:
        """Add what the outputs are shifted and scaled by."""
        super().setup()
        assert isinstance(self.action_space, Dict)
        spaces = self.action_space.spaces
        limit, shape = spaces.get("max_batch"), spaces["shape"]
        assert isinstance(shape, Discrete)
        num_limits = int(limit.n) if isinstance(limit, Discrete) else 0
        self.output_sizes = [num_limits, MEMORY_OUTPUTS, int(shape.n)]
        """Outputs for the limit of the batch, for memory and for shapes, in this order."""
        self.stay_bonus = float(self.model_config[STAY_BONUS])
        shift, scale = torch.zeros(sum(self.output_sizes)), torch.ones(sum(self.output_sizes))
        limits, memory, _ = shift.split(self.output_sizes)
        # What is in force is not seen of the limit: a fresh network takes the highest.
        limits[-1:] = self.stay_bonus
        memory.copy_(torch.tensor(_MEMORY_START))
        # The network says by how many spreads the memory differs. Were it the memory itself, the
        # first step of the optimiser would move it by several of them, and no ratio would be left
        # for PPO to learn from.
        scale[num_limits] = torch.tensor(_MEMORY_START[1]).exp()
        self.register_buffer("output_shift", shift, persistent=False)
        self.register_buffer("output_scale", scale, persistent=False)

    @torch.no_grad()
    def exported_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases of a network without shift and scale of the outputs."""
        *hidden, (weight, bias) = modules.weights_of(self.policy_layers)
        scale = self.output_scale
        return [*hidden, (scale[:, None] * weight, scale * bias + self.output_shift)]

    def _adjusted(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        inputs = self.output_shift + self.output_scale * outputs
        *others, shapes = inputs.split(self.output_sizes, -1)
        shapes = with_stay(shapes, batch[Columns.OBS], self.stay_bonus)
        return torch.cat([*others, shapes], -1)


class AllocationQNetwork(modules.QNetwork):
    """Q-network of DQN over shapes."""

    def setup(self) -> None:
        """Add the bonus."""
        super().setup()
        self.stay_bonus = float(self.model_config[STAY_BONUS])

    def exported_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases of the network."""
        return modules.weights_of(self.policy_layers)

    def _adjusted(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        return with_stay(outputs, batch[Columns.OBS], self.stay_bonus)
