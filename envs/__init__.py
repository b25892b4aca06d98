"""Gymnasium environments: thin adapters over the simulators."""

from __future__ import annotations

from typing import Any

import gymnasium

from envs.routing import LoadBalancingEnv, LoadBalancingVectorEnv, RoutingEnvConfig

__all__ = [
    "LOAD_BALANCING_ENV",
    "LOAD_BALANCING_ID",
    "LoadBalancingEnv",
    "LoadBalancingVectorEnv",
    "RoutingEnvConfig",
    "make_load_balancing",
    "register",
]

LOAD_BALANCING_ID = "tokenyard/LoadBalancing-v0"
"""Name under which `gymnasium.make` and `gymnasium.make_vec` know the environment."""
LOAD_BALANCING_ENV = "LoadBalancingEnv"
"""Name under which RLlib knows it."""


def make_load_balancing(config: dict[str, Any]) -> LoadBalancingEnv | LoadBalancingVectorEnv:
    """Make what RLlib asks for: many copies where the config counts them, else a single one."""
    if "num_envs" in config:
        rest = {key: value for key, value in config.items() if key != "num_envs"}
        return LoadBalancingVectorEnv(config["num_envs"], rest)
    return LoadBalancingEnv(dict(config))


def register() -> None:
    """Make the environments known to Gymnasium and, where Ray is installed, to RLlib.

    Call it in the driver and in every process that builds an algorithm; again does no harm.
    """
    if LOAD_BALANCING_ID not in gymnasium.registry:
        gymnasium.register(
            LOAD_BALANCING_ID,
            entry_point="envs.routing:LoadBalancingEnv",
            vector_entry_point="envs.routing:LoadBalancingVectorEnv",
        )
    try:
        from ray import tune
    except ImportError:
        return
    tune.register_env(LOAD_BALANCING_ENV, make_load_balancing)
