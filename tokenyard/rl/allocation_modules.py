"""Networks of the allocation learners: RLlib's own, with a normaliser and a wish to stay.

Every change of plan costs a restart, so random exploration is destructive: a bonus on what is in
force makes a fresh network keep its plan, and the memory starts where most plans are good.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Dict
from ray.rllib.algorithms.dqn.default_dqn_rl_module import QF_PREDS
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.columns import Columns
from torch import Tensor, nn

from tokenyard.policies.allocation import MEMORY_OUTPUTS
from tokenyard.rl.modules import RunningNormaliser, linear_layers, shrink_last_layer

STAY_BONUS = "stay_bonus"
"""Key of a module's `model_config`: what is added for what is in force, in logits or in values."""
_MEMORY_START = (0.9, -3.5)
"""First mean and logarithm of the spread of the memory, from -1 for 0 to 1 for 1."""


class AllocationActorCritic(DefaultPPOTorchRLModule):
    """Actor and critic of PPO and A2C for actions of shape and memory."""

    def setup(self) -> None:
        """Build the networks that RLlib ships, then the normaliser."""
        super().setup()
        assert isinstance(self.action_space, Dict)
        assert list(self.action_space.spaces) == ["memory_fraction", "shape"]
        self.normaliser = RunningNormaliser(self.observation_space.shape[0])
        self.stay_bonus = float(self.model_config[STAY_BONUS])
        shrink_last_layer(self.pi)
        with torch.no_grad():
            self.policy_layers[-1].bias[:MEMORY_OUTPUTS] = torch.tensor(_MEMORY_START)

    @property
    def policy_layers(self) -> list[nn.Linear]:
        """Linear layers from observation to outputs; ReLU stands between them."""
        return [*linear_layers(self.encoder.actor_encoder), *linear_layers(self.pi)]

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
        inputs = output[Columns.ACTION_DIST_INPUTS]
        num_shapes = inputs.shape[-1] - MEMORY_OUTPUTS
        in_force = self.stay_bonus * batch[Columns.OBS][..., -num_shapes:]
        memory, preferences = inputs.split([MEMORY_OUTPUTS, num_shapes], dim=-1)
        inputs = torch.cat([memory, preferences + in_force], dim=-1)
        return {**output, Columns.ACTION_DIST_INPUTS: inputs}


class AllocationQNetwork(DefaultDQNTorchRLModule):
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

    def _qf_forward_helper(self, batch: dict[str, Any], encoder: Any, head: Any) -> dict[str, Any]:
        observations = batch[Columns.OBS]
        normalised = {**batch, Columns.OBS: self.normaliser(observations)}
        output = super()._qf_forward_helper(normalised, encoder, head)
        values = output[QF_PREDS]
        in_force = self.stay_bonus * observations[..., -values.shape[-1] :]
        return {**output, QF_PREDS: values + in_force}
