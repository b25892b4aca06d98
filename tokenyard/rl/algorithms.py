"""PPO and DQN as all problems train them; what differs is told by each."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig

from tokenyard.rl.columnar.rounds import RoundsDQNConfig
from tokenyard.rl.columnar.sampling import REPLAY_CAPACITY

CLIPPED: dict[str, Any] = {"grad_clip": 0.5, "grad_clip_by": "global_norm"}
"""Gradients of actors and critics."""


def ppo_config(**settings: Any) -> AlgorithmConfig:
    """Configure PPO, with further `settings` for `AlgorithmConfig.training`, or in their place."""
    common = {
        **CLIPPED,
        "clip_param": 0.2,
        "use_kl_loss": False,
        "vf_loss_coeff": 0.5,
        # RLlib clips the squared error of the value, which stops the critic at large returns.
        "vf_clip_param": float("inf"),
    }
    return PPOConfig().training(**{**common, **settings})


def dqn_config(**settings: Any) -> AlgorithmConfig:
    """Configure DQN, with further `settings` for `AlgorithmConfig.training`, or in their place."""
    common = {
        "replay_buffer_config": {"type": "EpisodeReplayBuffer", "capacity": REPLAY_CAPACITY},
        "dueling": False,
        "num_atoms": 1,
        "grad_clip": 10.0,
        "grad_clip_by": "global_norm",
    }
    return RoundsDQNConfig().training(**{**common, **settings})
