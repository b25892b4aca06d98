"""Networks of the allocation learners: RLlib's own, which correct what the planner expects.

What the planner expects each shape to cost is part of the observation. Times a scale it is taken
off the network's preferences. A fresh network says nothing, so that a policy begins as the planner,
and explores where its plans are close. Shapes that no memory makes feasible are not among the
actions; where budget or hysteresis forbid a change, the mask leaves the shape in force.
"""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.core.columns import Columns
from torch import Tensor

from tokenyard.allocation.observation import ALLOWED
from tokenyard.rl import modules

PLANNER_SCALE = "planner_scale"
"""Key of a module's `model_config`: what the whole pool's price of a slot lowers a preference by,
in logits or in values."""


def planner_preferences(corrections: Tensor, observations: Tensor, scale: float) -> Tensor:
    """Take the planner's costs off, and rule shapes out where no change is allowed.

    Args:
        corrections: For every shape, (..., S).
        observations: Shape (..., observation size + S), which ends with the shape in force and the
            planner's costs.
        scale: Preference per unit of cost.
    """
    num = corrections.shape[-1]
    in_force, costs = observations[..., -2 * num : -num], observations[..., -num:]
    fixed = observations[..., ALLOWED, None] == 0
    return (corrections - scale * costs).masked_fill(fixed & (in_force == 0), -torch.inf)


class _CorrectsPlanner(modules.Observes):
    """Part of a module that corrects the planner; a fresh one says nothing."""

    output_gain = 0.0

    @property
    def planner_scale(self) -> float:
        """What the whole pool's price of a slot lowers a preference by."""
        return float(self.model_config[PLANNER_SCALE])

    def _adjusted(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        return planner_preferences(outputs, batch[Columns.OBS], self.planner_scale)


class AllocationActorCritic(_CorrectsPlanner, modules.ActorCritic):
    """Actor and critic of PPO and A2C over shapes."""


class AllocationQNetwork(_CorrectsPlanner, modules.QNetwork):
    """Q-network of DQN over shapes."""
