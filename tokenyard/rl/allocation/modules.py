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
from ray.rllib.algorithms.dqn.default_dqn_rl_module import QF_PREDS
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.columns import Columns
from torch import Tensor, nn

from tokenyard.allocation.observation import ALLOWED
from tokenyard.allocation.policies.learned import MEMORY_OUTPUTS
from tokenyard.rl.modules import Observes, RunningNormaliser, linear_layers, shrink_last_layer

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


class AllocationActorCritic(Observes, DefaultPPOTorchRLModule):
    """Actor and critic of PPO and A2C for actions of shape, memory and limit of the batch."""

    output_shift: Tensor
    output_scale: Tensor
    """What outputs of the network are times the scale, plus the shift."""

    def setup(self) -> None:
        """Build the networks that RLlib ships, then the normaliser."""
        super().setup()
        assert isinstance(self.action_space, Dict)
        spaces = self.action_space.spaces
        limit, shape = spaces.get("max_batch"), spaces["shape"]
        assert isinstance(shape, Discrete)
        num_limits = int(limit.n) if isinstance(limit, Discrete) else 0
        self.output_sizes = [num_limits, MEMORY_OUTPUTS, int(shape.n)]
        """Outputs for the limit of the batch, for memory and for shapes, in this order."""
        self.normaliser = RunningNormaliser(self.observation_space.shape[0])
        self.stay_bonus = float(self.model_config[STAY_BONUS])
        shrink_last_layer(self.pi)
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

    @property
    def policy_layers(self) -> list[nn.Linear]:
        """Linear layers of the network; ReLU stands between them."""
        return [*linear_layers(self.encoder.actor_encoder), *linear_layers(self.pi)]

    @torch.no_grad()
    def exported_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and biases of a network without shift and scale of the outputs."""
        *hidden, (weight, bias) = [(layer.weight, layer.bias) for layer in self.policy_layers]
        scale = self.output_scale
        return [*hidden, (scale[:, None] * weight, scale * bias + self.output_shift)]

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._staying(super()._forward(self._normalised(batch), **kwargs), batch)

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._staying(super()._forward_train(self._normalised(batch), **kwargs), batch)

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """Value of each observation, shape (num,)."""
        values: Tensor = super().compute_values(self._normalised(batch), embeddings)
        return values

    def _normalised(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, Columns.OBS: self.normaliser(batch[Columns.OBS])}

    def _staying(self, output: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
        inputs = self.output_shift + self.output_scale * output[Columns.ACTION_DIST_INPUTS]
        *others, shapes = inputs.split(self.output_sizes, -1)
        shapes = with_stay(shapes, batch[Columns.OBS], self.stay_bonus)
        return {**output, Columns.ACTION_DIST_INPUTS: torch.cat([*others, shapes], -1)}


class AllocationQNetwork(Observes, DefaultDQNTorchRLModule):
    """Q-network of DQN over shapes."""

    def setup(self) -> None:
        """Build the networks that RLlib ships, then the normaliser."""
        super().setup()
        self.normaliser = RunningNormaliser(self.observation_space.shape[0])
        self.stay_bonus = float(self.model_config[STAY_BONUS])
        shrink_last_layer(self.af)

    @property
    def policy_layers(self) -> list[nn.Linear]:
        """Linear layers from observation to Q-values; ReLU stands between them."""
        return [*linear_layers(self.encoder), *linear_layers(self.af)]

    def exported_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Their weights and biases."""
        return [(layer.weight, layer.bias) for layer in self.policy_layers]

    def _qf_forward_helper(self, batch: dict[str, Any], encoder: Any, head: Any) -> dict[str, Any]:
        observations = batch[Columns.OBS]
        normalised = {**batch, Columns.OBS: self.normaliser(observations)}
        output = super()._qf_forward_helper(normalised, encoder, head)
        return {**output, QF_PREDS: with_stay(output[QF_PREDS], observations, self.stay_bonus)}
