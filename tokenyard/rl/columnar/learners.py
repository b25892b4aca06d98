"""Learners of the columnar path: RLlib's, fed with arrays, their minibatch loop slimmed.

What is computed is what RLlib's learners compute: the same losses, gradients, clipping and
optimiser, minibatches cut in the same way, results under the same keys. What is left out is what
the result does not depend on: distribution objects, metrics of all minibatches but the last
(the only ones that RLlib reports), two passes of finiteness checks over every parameter where the
global norm already tells, and a loop over parameters in the optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.dqn import dqn_learner as dqn
from ray.rllib.algorithms.dqn.torch.dqn_torch_learner import DQNTorchLearner
from ray.rllib.algorithms.ppo.ppo import (
    LEARNER_RESULTS_KL_KEY,
    LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY,
    LEARNER_RESULTS_VF_LOSS_UNCLIPPED_KEY,
)
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.learner import ENTROPY_KEY, POLICY_LOSS_KEY, VF_LOSS_KEY
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils import metrics as keys
from ray.rllib.utils.torch_utils import explained_variance
from torch import Tensor, nn
from torch.distributions import kl_divergence

from tokenyard.rl.columnar.a2c import A2CTorchLearner
from tokenyard.rl.columnar.actions import actions_of
from tokenyard.rl.columnar.columns import (
    Rollout,
    Transitions,
    beyond_others,
    generalised_advantages,
    minibatches,
)

Batch = dict[str, Tensor]
"""Columns by RLlib's names, one row per step."""
Losses = tuple[Tensor, dict[str, Any]]
"""The loss, and what is told of it where that was asked for."""

COPIES_PER_STREAM = "copies_per_stream"
"""Key of an environment's configuration: copies in a row that have the same traffic."""
SHRINKAGE = "shrinkage"
"""Key of `learner_config_dict`: weight of the squared correction of a rule in DQN's loss, so that
the rule is corrected only where many transitions agree (ridge regression)."""
SMALLEST_SPREAD = 1e-4
"""Advantages that hardly differ are not blown up when they are standardised (as in RLlib)."""


class ColumnarLearner(TorchLearner):
    """Mixed in before a learner of RLlib: takes what `columns` has in place of episodes."""

    _weights_seq_no: int

    def build(self) -> None:
        """Build as RLlib does, and seed the order of minibatches.

        Raises:
            ValueError: More than one learner, or actions that are no columns.
        """
        super().build()
        if self.config.num_learners > 1:
            raise ValueError(
                f"num_learners={self.config.num_learners}: gradients are not averaged over "
                "learners here; choose 0 or 1, or the implementation 'rllib_stock'"
            )
        self._shuffler = np.random.default_rng(self.config.seed)
        self._actions = actions_of(self.module[DEFAULT_MODULE_ID].unwrapped().action_space)

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Adam as in RLlib, computed for all parameters in one call."""
        params = self.get_parameters(self._module[module_id])
        self.register_optimizer(
            module_id=module_id,
            optimizer=torch.optim.Adam(params, fused=True),
            params=params,
            lr_or_lr_schedule=config.lr,
        )

    def batch_of(self, sampled: Sequence[Any], module: Any) -> Batch:
        """The training batch of what was sampled."""
        raise NotImplementedError

    def losses(self, batch: Batch, module: Any, report: bool) -> Losses:
        """The loss of a minibatch; with `report` also RLlib's metrics of it."""
        raise NotImplementedError

    def update(
        self,
        *args: Any,
        training_data: Any = None,
        episodes: Any = None,
        timesteps: dict[str, Any] | None = None,
        num_epochs: int = 1,
        minibatch_size: int | None = None,
        shuffle_batch_per_epoch: bool = False,
        _no_metrics_reduce: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run `num_epochs` epochs over what was sampled; RLlib's update for anything else."""
        sampled = episodes if training_data is None else training_data.episodes
        if not sampled or not isinstance(sampled[0], Rollout | Transitions):
            return super().update(
                *args,
                training_data=training_data,
                episodes=episodes,
                timesteps=timesteps,
                num_epochs=num_epochs,
                minibatch_size=minibatch_size,
                shuffle_batch_per_epoch=shuffle_batch_per_epoch,
                _no_metrics_reduce=_no_metrics_reduce,
                **kwargs,
            )
        self._check_is_built()
        self.before_gradient_based_update(timesteps=timesteps or {})
        self._weights_seq_no += 1
        module = self.module[DEFAULT_MODULE_ID].unwrapped()
        batch = self.batch_of(sampled, module)
        num_rows = len(batch[Columns.OBS])
        shuffler = self._shuffler if shuffle_batch_per_epoch and num_epochs > 1 else None
        cuts = list(minibatches(num_rows, minibatch_size, num_epochs, shuffler))
        module.train()
        for number, rows in enumerate(cuts, start=1):
            part = {name: column[rows] for name, column in batch.items()}
            self._one_step(part, module, report=number == len(cuts))
        self._log_trained(sampled, num_rows, len(cuts), minibatch_size or num_rows)
        self.after_gradient_based_update(timesteps=timesteps or {})
        return None if _no_metrics_reduce else self.metrics.reduce()

    def gradients(self, batch: Batch, module: Any, report: bool = False) -> Losses:
        """Leave the gradient of a minibatch's loss in the parameters; return `losses`."""
        for optimizer in self._optimizer_parameters:
            optimizer.zero_grad(set_to_none=True)
        loss, metrics = self.losses(batch, module, report)
        loss.backward()
        return loss, metrics

    def _one_step(self, batch: Batch, module: Any, report: bool) -> None:
        loss, metrics = self.gradients(batch, module, report)
        for name, optimizer in self.get_optimizers_for_module(DEFAULT_MODULE_ID):
            parameters = self._optimizer_parameters[optimizer]
            if self.config.grad_clip is not None and self.config.grad_clip_by != "global_norm":
                self._stock_step()
                continue
            norm = nn.utils.clip_grad_norm_(
                parameters, self.config.grad_clip or math.inf, foreach=True
            )
            if math.isfinite(norm):
                optimizer.step()
            else:
                # Not a number: RLlib decides what becomes of the step, and says so.
                self._stock_step()
            if self.config.grad_clip is not None:
                metrics[f"gradients_{name}_global_norm"] = norm
        if report:
            metrics[self.TOTAL_LOSS_KEY] = loss.detach()
            self.metrics.log_dict(metrics, key=DEFAULT_MODULE_ID, window=1)

    def _stock_step(self) -> None:
        gradients = {reference: parameter.grad for reference, parameter in self._params.items()}
        self.apply_gradients(self.postprocess_gradients(gradients))

    def _log_trained(self, sampled: Any, num_rows: int, num_steps: int, size: int) -> None:
        """Log what RLlib logs after every minibatch, once."""
        trained, log = num_steps * size, self.metrics.log_value
        own, every = DEFAULT_MODULE_ID, keys.ALL_MODULES
        log((own, keys.WEIGHTS_SEQ_NO), self._weights_seq_no, window=1)
        log((own, keys.MODULE_TRAIN_BATCH_SIZE_MEAN), size, reduce="mean")
        log((own, keys.NUM_MODULE_STEPS_TRAINED), trained, reduce="sum")
        sampler = getattr(sampled[0], "weights_seq_no", None)
        if sampler is not None:
            lag = self._weights_seq_no - sampler
            log((own, keys.DIFF_NUM_GRAD_UPDATES_VS_SAMPLER_POLICY), lag, window=1)
        lifetime = {"reduce": "lifetime_sum", "with_throughput": True}
        log((own, keys.NUM_MODULE_STEPS_TRAINED_LIFETIME), trained, **lifetime)
        log((every, keys.NUM_MODULE_STEPS_TRAINED), trained, reduce="sum", with_throughput=True)
        log((every, keys.NUM_MODULE_STEPS_TRAINED_LIFETIME), trained, **lifetime)
        # RLlib counts a batch once per minibatch that was made from it.
        steps = num_rows * num_steps
        log((every, keys.NUM_ENV_STEPS_TRAINED), steps, reduce="sum", with_throughput=True)
        log((every, keys.NUM_ENV_STEPS_TRAINED_LIFETIME), steps, **lifetime)


class _OnPolicyColumns(ColumnarLearner):
    """Rollouts to batches with advantages, for learners with a critic."""

    @property
    def _copies_per_stream(self) -> int:
        return int(self.config.env_config.get(COPIES_PER_STREAM, 1))

    @property
    def _standardises(self) -> bool:
        """Whether advantages are standardised over the batch."""
        return True

    def batch_of(self, sampled: Sequence[Rollout], module: Any) -> Batch:
        """Show the normaliser what was seen, then estimate advantages of all steps at once."""
        seen = [rollout.observations[:-1][rollout.real] for rollout in sampled]
        module.observe(torch.from_numpy(np.concatenate(seen)))
        parts = [self._rows(rollout, module) for rollout in sampled]
        batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if self._standardises:
            advantages = batch[Postprocessing.ADVANTAGES]
            spread = advantages.std(correction=0).clamp_min(SMALLEST_SPREAD)
            batch[Postprocessing.ADVANTAGES] = (advantages - advantages.mean()) / spread
        return batch

    def _rows(self, rollout: Rollout, module: Any) -> Batch:
        seen = _tensor(rollout.observations).to(self._device)
        with torch.no_grad():
            values = module.compute_values({Columns.OBS: seen.flatten(0, 1)})
            inputs = _tensor(rollout.action_inputs).to(self._device).flatten(0, 1)
            actions = _tensor(rollout.actions).to(self._device).flatten(0, 1)
            log_probs = self._actions.distribution(inputs).log_prob(actions)
        values_TN = values.reshape(seen.shape[:2])
        estimated = generalised_advantages(
            rollout, values_TN.cpu().numpy(), self.config.gamma, self.config.lambda_
        )
        advantages = torch.from_numpy(estimated).to(self._device)
        compared = torch.from_numpy(beyond_others(estimated, self._copies_per_stream))
        columns = {
            Columns.OBS: seen[:-1].flatten(0, 1),
            Columns.ACTIONS: actions,
            Columns.ACTION_DIST_INPUTS: inputs,
            Columns.ACTION_LOGP: log_probs,
            Postprocessing.ADVANTAGES: compared.to(self._device).flatten(),
            Postprocessing.VALUE_TARGETS: (advantages + values_TN[:-1]).flatten(),
        }
        if rollout.real.all():
            return columns
        real = _tensor(rollout.real).flatten().to(self._device)
        return {name: column[real] for name, column in columns.items()}


def _tensor(array: Any) -> Tensor:
    """A tensor over an array; over its copy where that lies in Ray's store, which is read-only."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class PPOColumnarLearner(_OnPolicyColumns, PPOTorchLearner):
    """PPO (Schulman et al. 2017, arXiv:1707.06347v2, equations 7 to 9), as RLlib computes it."""

    def losses(self, batch: Batch, module: Any, report: bool) -> Losses:
        """Clipped surrogate, clipped value error, entropy and, if configured, KL term."""
        config = self.config
        output = module._forward_train(batch)
        policy = self._actions.distribution(output[Columns.ACTION_DIST_INPUTS])
        taken = policy.log_prob(batch[Columns.ACTIONS])
        ratio = torch.exp(taken - batch[Columns.ACTION_LOGP])
        advantages = batch[Postprocessing.ADVANTAGES]
        clipped = ratio.clamp(1 - config.clip_param, 1 + config.clip_param)
        surrogate = torch.min(advantages * ratio, advantages * clipped)
        total = -surrogate
        if config.use_critic:
            values = module.compute_values(batch, embeddings=output.get(Columns.EMBEDDINGS))
            error = (values - batch[Postprocessing.VALUE_TARGETS]) ** 2
            kept = (
                error if math.isinf(config.vf_clip_param) else error.clamp(0, config.vf_clip_param)
            )
            total = total + config.vf_loss_coeff * kept
        coefficient = self.entropy_coeff_schedulers_per_module[
            DEFAULT_MODULE_ID
        ].get_current_value()
        entropy = None
        if coefficient != 0.0:
            entropy = policy.entropy()
            total = total - coefficient * entropy
        loss = total.mean()
        divergence = torch.zeros(())
        if config.use_kl_loss:
            old = self._actions.distribution(batch[Columns.ACTION_DIST_INPUTS])
            divergence = kl_divergence(old, policy).mean()
            loss = loss + self.curr_kl_coeffs_per_module[DEFAULT_MODULE_ID] * divergence
        if not report:
            return loss, {}
        with torch.no_grad():
            zero = torch.zeros(())
            return loss, {
                POLICY_LOSS_KEY: -surrogate.mean(),
                VF_LOSS_KEY: kept.mean() if config.use_critic else zero,
                LEARNER_RESULTS_VF_LOSS_UNCLIPPED_KEY: error.mean() if config.use_critic else zero,
                LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY: explained_variance(
                    batch[Postprocessing.VALUE_TARGETS], values
                )
                if config.use_critic
                else zero,
                ENTROPY_KEY: (policy.entropy() if entropy is None else entropy).mean(),
                LEARNER_RESULTS_KL_KEY: divergence.detach(),
            }


class A2CColumnarLearner(PPOColumnarLearner, A2CTorchLearner):
    """A2C as in `tokenyard.rl.columnar.a2c`: one step of RMSprop on one batch."""

    @property
    def _standardises(self) -> bool:
        # What tells copies of a stream apart is small beside what the critic has yet to learn.
        return self._copies_per_stream > 1

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """One RMSprop over actor and critic, computed for all parameters at once."""
        A2CTorchLearner.configure_optimizers_for_module(self, module_id, config)


class DQNColumnarLearner(ColumnarLearner, DQNTorchLearner):
    """DQN (Mnih et al. 2015) and double DQN (van Hasselt et al. 2016), as RLlib computes them."""

    def build(self) -> None:
        """Refuse what replay of single steps does not have.

        Raises:
            ValueError: A distribution over returns.
        """
        super().build()
        if self.config.num_atoms > 1:
            raise ValueError(
                f"num_atoms={self.config.num_atoms}: no distributions over returns here; choose 1, "
                "or the implementation 'rllib_stock'"
            )

    def batch_of(self, sampled: Sequence[Transitions], module: Any) -> Batch:
        """Put the columns on the device, and show the normaliser what was seen."""
        (drawn,) = sampled
        batch = {
            name: torch.from_numpy(column).to(self._device)
            for name, column in drawn.columns.items()
        }
        module.observe(batch[Columns.OBS])
        return batch

    def losses(self, batch: Batch, module: Any, report: bool) -> Losses:
        """Huber or squared error of the Q-value of the action taken."""
        config = self.config
        output = module._forward_train(batch)
        chosen = batch[Columns.ACTIONS][:, None]
        q = output[dqn.QF_PREDS].gather(1, chosen).nan_to_num(neginf=0.0).squeeze(1)
        with torch.no_grad():
            target = output[dqn.QF_TARGET_NEXT_PREDS]
            best = (output[dqn.QF_NEXT_PREDS] if config.double_q else target).argmax(
                1, keepdim=True
            )
            later = target.gather(1, best).nan_to_num(neginf=0.0).squeeze(1)
            goes_on = ~batch[Columns.TERMINATEDS]
            wanted = batch[Columns.REWARDS] + config.gamma * goes_on * later
        huber = config.td_error_loss_fn == "huber"
        error = nn.functional.huber_loss if huber else nn.functional.mse_loss
        loss = error(q, wanted)
        if shrinkage := config.learner_config_dict.get(SHRINKAGE, 0.0):
            corrections = module.corrections(batch[Columns.OBS], output[dqn.QF_PREDS])
            loss = loss + shrinkage * (corrections**2).sum(-1).mean()
        if not report:
            return loss, {}
        with torch.no_grad():
            return loss, {
                dqn.QF_LOSS_KEY: loss.detach(),
                dqn.QF_MEAN_KEY: q.mean(),
                dqn.QF_MAX_KEY: q.max(),
                dqn.QF_MIN_KEY: q.min(),
                dqn.TD_ERROR_MEAN_KEY: (q - wanted).abs().mean(),
            }
