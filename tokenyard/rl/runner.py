"""The env runner of all algorithms: RLlib's own, with seeds far apart and one thread."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

REWARD_PER_REQUEST = "reward_per_request"
"""Metric of the env runner: mean reward of the steps of one sampling round."""


_RLLIB_ENV_ID = "rllib-single-agent-env-v0"
"""Name under which RLlib registers whatever environment a runner steps."""


class RouterEnvRunner(SingleAgentEnvRunner):
    """Steps many copies of the environment at once.

    RLlib seeds runner i with seed + i, and a vectorised environment seeds copy j with that
    plus j: two runners, or two trials with seeds 1 and 2, would sample nearly the same traffic.
    Here every runner of every seed starts at a place of its own.
    """

    def make_env(self) -> None:
        """Make the environment, after settling the seed of its first reset."""
        # More threads than cores make small networks many times slower.
        torch.set_num_threads(1)
        if self.config.seed is not None:
            sequence = np.random.SeedSequence([self.config.seed, self.worker_index])
            self._seed = int(sequence.generate_state(1)[0] >> 1)
        # A process that builds a second algorithm would be warned about the first one's entry.
        gymnasium.registry.pop(_RLLIB_ENV_ID, None)
        super().make_env()

    def sample(self, **kwargs: Any) -> list[Any]:
        """Sample, and log the mean reward: an episode of traffic outlasts many iterations."""
        episodes: list[Any] = super().sample(**kwargs)
        rewards = np.concatenate([episode.get_rewards() for episode in episodes])
        self.metrics.log_value(REWARD_PER_REQUEST, float(rewards.mean()))
        return episodes
