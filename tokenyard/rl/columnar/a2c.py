"""A2C for RLlib, which ships none: advantage actor critic, synchronous and on-policy.

Mnih et al. 2016, "Asynchronous Methods for Deep Reinforcement Learning", without the asynchrony:
every update is one gradient step on one batch of short rollouts, each transition is used once.
"""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate, GeneralAdvantageEstimation
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.learner import ENTROPY_KEY, POLICY_LOSS_KEY, VF_LOSS_KEY
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.execution.rollout_ops import synchronous_parallel_sample
from ray.rllib.utils import metrics as keys
from torch import Tensor

from tokenyard.rl.columnar.rounds import LocalRounds


class A2CConfig(AlgorithmConfig):
    """What A2C adds to the settings of every algorithm."""

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        """Start from the settings of Mnih et al., section 5.1, with rollouts of 8 steps."""
        super().__init__(algo_class=algo_class or A2C)
        self.lr = 7e-4
        self.lambda_ = 1.0
        self.vf_loss_coeff = 0.5
        self.entropy_coeff = 0.01
        self.rmsprop_alpha = 0.99
        self.grad_clip = 0.5
        self.grad_clip_by = "global_norm"
        self.rounds_per_training_step = 1
        """Updates between two reports, where all is in one process (`rounds`)."""
        self.rollout_fragment_length = "auto"
        self.train_batch_size_per_learner = 512

    def training(
        self,
        *,
        lambda_: float = NotProvided,
        vf_loss_coeff: float = NotProvided,
        entropy_coeff: float = NotProvided,
        rmsprop_alpha: float = NotProvided,
        **kwargs: Any,
    ) -> A2CConfig:
        """Set what the update depends on.

        Args:
            lambda_: Weight of longer returns (Schulman et al. 2016, GAE); 1 is plain A2C.
            vf_loss_coeff: Weight of the squared value error.
            entropy_coeff: Weight of the policy's entropy.
            rmsprop_alpha: Decay of RMSprop's mean square.
            **kwargs: Settings of every algorithm, such as `lr` and `gamma`.
        """
        super().training(**kwargs)
        own = {
            "lambda_": lambda_,
            "vf_loss_coeff": vf_loss_coeff,
            "entropy_coeff": entropy_coeff,
            "rmsprop_alpha": rmsprop_alpha,
        }
        for name, value in own.items():
            if value is not NotProvided:
                setattr(self, name, value)
        return self

    def validate(self) -> None:
        """Refuse rollouts that do not add up to the batch."""
        super().validate()
        self.validate_train_batch_size_vs_rollout_fragment_length()

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Actor and critic with separate networks, as RLlib ships them."""
        return RLModuleSpec(module_class=DefaultPPOTorchRLModule)

    def get_default_learner_class(self) -> type[TorchLearner]:
        """The learner below."""
        return A2CTorchLearner

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        includes: dict[str, Any] = super()._model_config_auto_includes
        return includes | {"vf_share_layers": False}


class A2C(LocalRounds):
    """Sample one batch, make one step on it, hand out the weights."""

    @classmethod
    def get_default_config(cls) -> A2CConfig:
        """The configuration that this class understands."""
        return A2CConfig()

    def training_step(self) -> None:
        """One update, or several in one process; none while every env runner is down."""
        if self.trains_here:
            self.rounds_here()
            return
        with self.metrics.log_time((keys.TIMERS, keys.ENV_RUNNER_SAMPLING_TIMER)):
            episodes, results = synchronous_parallel_sample(
                worker_set=self.env_runner_group,
                max_env_steps=self.config.total_train_batch_size,
                sample_timeout_s=self.config.sample_timeout_s,
                _uses_new_env_runners=True,
                _return_metrics=True,
            )
        if not episodes:
            return
        self.metrics.aggregate(results, key=keys.ENV_RUNNER_RESULTS)
        num_env_steps = self.metrics.peek(
            (keys.ENV_RUNNER_RESULTS, keys.NUM_ENV_STEPS_SAMPLED_LIFETIME)
        )
        with self.metrics.log_time((keys.TIMERS, keys.LEARNER_UPDATE_TIMER)):
            learned = self.learner_group.update(
                episodes=episodes,
                timesteps={keys.NUM_ENV_STEPS_SAMPLED_LIFETIME: num_env_steps},
                num_epochs=1,
            )
        self.metrics.aggregate(learned, key=keys.LEARNER_RESULTS)
        with self.metrics.log_time((keys.TIMERS, keys.SYNCH_WORKER_WEIGHTS_TIMER)):
            self.env_runner_group.sync_weights(
                from_worker_or_learner_group=self.learner_group,
                policies=set(learned[0].keys()) - {keys.ALL_MODULES},
                inference_only=True,
            )


class A2CTorchLearner(TorchLearner):
    """Gradient of the policy, of the value error and of the entropy, in one step."""

    def build(self) -> None:
        """Add the connectors that bootstrap cut-off rollouts and make value targets."""
        super().build()
        self._learner_connector.prepend(AddOneTsToEpisodesAndTruncate())
        self._learner_connector.append(
            GeneralAdvantageEstimation(gamma=self.config.gamma, lambda_=self.config.lambda_)
        )

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """The module must have a critic."""
        return [ValueFunctionAPI]

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """One RMSprop over actor and critic."""
        params = self.get_parameters(self._module[module_id])
        optimizer = torch.optim.RMSprop(params, alpha=config.rmsprop_alpha, eps=1e-5, foreach=True)
        self.register_optimizer(
            module_id=module_id, optimizer=optimizer, params=params, lr_or_lr_schedule=config.lr
        )

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Loss whose gradient is the update of Mnih et al., averaged over the batch."""
        module = self.module[module_id].unwrapped()
        policy = module.get_train_action_dist_cls().from_logits(fwd_out[Columns.ACTION_DIST_INPUTS])
        values = module.compute_values(batch, embeddings=fwd_out.get(Columns.EMBEDDINGS))
        losses = a2c_losses(
            log_probs=policy.logp(batch[Columns.ACTIONS]),
            values=values,
            value_targets=batch[Postprocessing.VALUE_TARGETS],
            entropies=policy.entropy(),
            # The step that was added to each rollout for its bootstrap value is not learned from.
            mask=batch.get(Columns.LOSS_MASK, torch.ones_like(values, dtype=torch.bool)),
        )
        self.metrics.log_dict(losses, key=module_id, window=1)
        loss: Tensor = (
            losses[POLICY_LOSS_KEY]
            + config.vf_loss_coeff * losses[VF_LOSS_KEY]
            - config.entropy_coeff * losses[ENTROPY_KEY]
        )
        return loss


def a2c_losses(
    log_probs: Tensor, values: Tensor, value_targets: Tensor, entropies: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """The three terms of A2C, each the mean over the steps where `mask` is true.

    The advantage is value_targets - values as it stands. RLlib's connector offers it only
    standardised over the batch, which makes the step depend on the batch's spread; but the
    targets were made with the very weights that are updated here, so it can be taken back.

    Args:
        log_probs: Log-probability of the action taken, shape (num,).
        values: Critic's estimates, shape (num,).
        value_targets: Estimated returns (GAE advantage plus value), shape (num,).
        entropies: Entropy of the policy, shape (num,).
        mask: Steps that count, bool, shape (num,).
    """
    advantages = (value_targets - values).detach()
    return {
        POLICY_LOSS_KEY: -(advantages * log_probs)[mask].mean(),
        VF_LOSS_KEY: ((values - value_targets) ** 2)[mask].mean(),
        ENTROPY_KEY: entropies[mask].mean(),
    }
