"""Many small rounds of sampling and learning between two reports, where all is in one process.

RLlib reduces metrics, aggregates them and sends weights through its object store after every
`training_step`. Where a step learns from a few hundred transitions, that takes longer than the
learning. With the env runner and the learner in the trial's own process nothing has to be sent:
weights are copied tensor by tensor, and metrics are reduced once for all rounds of a step. With
remote env runners RLlib's way is the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.dqn import DQN, DQNConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils import metrics as keys


class LocalRounds(Algorithm):
    """Mixed in before an algorithm whose configuration has `rounds_per_training_step`."""

    def training_step(self) -> None:
        """Several rounds here, or one of RLlib's where env runners or learners are elsewhere."""
        if self.learner_group.is_local and not self.config.num_env_runners:
            self.rounds_here()
        else:
            super().training_step()

    def to_learn_from(self, sampled: list[Any], num_sampled: float) -> Sequence[Any]:
        """What is learned from after a round's sampling; nothing yet, where it is empty."""
        return sampled

    def rounds_here(self) -> None:
        """Sample, learn and hand on the weights, `rounds_per_training_step` times."""
        runner, learner = self.env_runner, self.learner_group._learner
        lifetime = (keys.ENV_RUNNER_RESULTS, keys.NUM_ENV_STEPS_SAMPLED_LIFETIME)
        num_sampled = self.metrics.peek(lifetime, default=0)
        learned = False
        for _ in range(self.config.rounds_per_training_step):
            # RLlib tells it after a report, and schedules of exploration would stand till then.
            runner.num_env_steps_sampled_lifetime = num_sampled
            with self.metrics.log_time((keys.TIMERS, keys.ENV_RUNNER_SAMPLING_TIMER)):
                sampled = runner.sample()
            num_sampled += sum(map(len, sampled))
            batch = self.to_learn_from(sampled, num_sampled)
            if not batch:
                continue
            learned = True
            with self.metrics.log_time((keys.TIMERS, keys.LEARNER_UPDATE_TIMER)):
                learner.update(
                    training_data=TrainingData(episodes=list(batch)),
                    timesteps={keys.NUM_ENV_STEPS_SAMPLED_LIFETIME: num_sampled},
                    _no_metrics_reduce=True,
                )
            copy_weights(learner, runner)
        self.metrics.aggregate([runner.get_metrics()], key=keys.ENV_RUNNER_RESULTS)
        if learned:
            self.metrics.aggregate([learner.metrics.reduce()], key=keys.LEARNER_RESULTS)


@torch.no_grad()
def copy_weights(learner: Any, runner: Any) -> None:
    """Hand the learner's newest weights to an env runner in the same process."""
    newest = learner.module[DEFAULT_MODULE_ID].unwrapped().state_dict()
    kept = runner.module.state_dict()
    torch._foreach_copy_(list(kept.values()), [newest[name] for name in kept])
    runner._weights_seq_no = learner._weights_seq_no


class RoundsDQNConfig(DQNConfig):
    """What DQN in rounds adds to RLlib's settings."""

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        super().__init__(algo_class=algo_class or RoundsDQN)
        self.rounds_per_training_step = 1


class RoundsDQN(LocalRounds, DQN):
    """RLlib's DQN, in rounds where all is in one process."""

    @classmethod
    def get_default_config(cls) -> RoundsDQNConfig:
        """The configuration that this class understands."""
        return RoundsDQNConfig()

    def rounds_here(self) -> None:
        """Several rounds, and what there is to say of the replay."""
        super().rounds_here()
        results = self.local_replay_buffer.get_metrics()
        self.metrics.aggregate([results], key=keys.REPLAY_BUFFER_RESULTS)

    def to_learn_from(self, sampled: list[Any], num_sampled: float) -> Sequence[Any]:
        """A batch from replay, once enough has been sampled."""
        self.local_replay_buffer.add(sampled)
        if num_sampled < self.config.num_steps_sampled_before_learning_starts:
            return []
        drawn: list[Any] = self.local_replay_buffer.sample(
            num_items=self.config.total_train_batch_size,
            n_step=self.config.n_step,
            sample_episodes=True,
        )
        return drawn
