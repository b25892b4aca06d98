"""PPO and DQN as all problems train them; what differs is told by each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from pydantic import BaseModel
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune.utils import flatten_dict

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


def hyperparameters(config: AlgorithmConfig) -> dict[str, float | str]:
    """What an algorithm learns with, for the record: plain numbers, and the network's widths.

    The learning rate is the first of its schedule. What an algorithm does not have is left out.
    """
    rate = config.lr
    spec: Any = config.rl_module_spec
    settings: dict[str, Any] = {
        "lr": rate[0][1] if isinstance(rate, list) else rate,
        "gamma": config.gamma,
        "train_batch_size": config.total_train_batch_size,
        "num_envs": config.num_envs_per_env_runner,
        "fragment_steps": config.rollout_fragment_length,
        "network": "x".join(str(width) for width in spec.model_config["fcnet_hiddens"]),
    }
    if not isinstance(config, RoundsDQNConfig):
        settings |= {"gae_lambda": config.lambda_, "entropy_coeff": config.entropy_coeff}
    if config.minibatch_size is not None:
        settings |= {key: getattr(config, key) for key in ("minibatch_size", "num_epochs")}
    return settings


def flat_numbers(settings: Any, prefix: str = "") -> dict[str, float | str]:
    """Numbers and texts of a dataclass or model by name, those of its parts with a dot between."""
    fields: Mapping[str, Any] = settings.model_dump() if isinstance(settings, BaseModel) else {}
    if is_dataclass(settings) and not isinstance(settings, type):
        fields = asdict(settings)
    flat = flatten_dict(dict(fields), delimiter=".")
    return {f"{prefix}{k}": v for k, v in flat.items() if isinstance(v, float | int | str)}
