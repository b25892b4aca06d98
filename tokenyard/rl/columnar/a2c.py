"""A2C for RLlib, which ships none: advantage actor critic, synchronous and on-policy.

Mnih et al. 2016, "Asynchronous Methods for Deep Reinforcement Learning", without the asynchrony.
It is PPO with one step on the whole batch and nothing clipped, since the ratio of probabilities is
1 at that step (Huang et al. 2022, arXiv:2205.09123). What is left to say are RMSprop, and
advantages that are not standardised.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.evaluation.postprocessing import Postprocessing
from torch import Tensor

from tokenyard.rl.columnar.rounds import LocalRounds

_RMSPROP_ALPHA = 0.99


class A2CConfig(PPOConfig):
    """PPO's settings at the values that make it A2C."""

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        """Start from the settings of Mnih et al., section 5.1, with rollouts of 8 steps."""
        super().__init__(algo_class=algo_class or A2C)
        self.lr = 7e-4
        self.vf_loss_coeff = 0.5
        self.entropy_coeff = 0.01
        self.grad_clip = 0.5
        self.grad_clip_by = "global_norm"
        self.num_epochs, self.minibatch_size = 1, None
        self.shuffle_batch_per_epoch = self.use_kl_loss = False
        self.clip_param = self.vf_clip_param = math.inf
        self.rounds_per_training_step = 1
        """Updates between two reports, where all is in one process (`rounds`)."""
        self.train_batch_size_per_learner = 512

    def get_default_learner_class(self) -> type[TorchLearner]:
        """The learner below."""
        return A2CTorchLearner


class A2C(LocalRounds, PPO):
    """Sample one batch, make one step on it, hand out the weights."""

    @classmethod
    def get_default_config(cls) -> A2CConfig:
        """The configuration that this class understands."""
        return A2CConfig()


class A2CTorchLearner(PPOTorchLearner):
    """Gradient of the policy, of the value error and of the entropy, in one step of RMSprop."""

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """One RMSprop over actor and critic."""
        params = self.get_parameters(self._module[module_id])
        optimizer = torch.optim.RMSprop(params, alpha=_RMSPROP_ALPHA, eps=1e-5, foreach=True)
        self.register_optimizer(
            module_id=module_id, optimizer=optimizer, params=params, lr_or_lr_schedule=config.lr
        )

    def compute_loss_for_module(
        self, *, module_id: str, batch: dict[str, Any], **kwargs: Any
    ) -> Tensor:
        """PPO's loss with advantages as they are.

        RLlib's connector standardises them over the batch, which makes the step depend on the
        batch's spread. Value targets were made with the very weights that are updated here, so the
        advantages can be taken back.
        """
        with torch.no_grad():
            values = self.module[module_id].unwrapped().compute_values(batch)
        advantages = batch[Postprocessing.VALUE_TARGETS] - values
        batch = {**batch, Postprocessing.ADVANTAGES: advantages}
        loss: Tensor = super().compute_loss_for_module(module_id=module_id, batch=batch, **kwargs)
        return loss
