"""Gymnasium environments: thin adapters over the simulators."""

from __future__ import annotations

from typing import Any

import gymnasium

from envs.regions import RegionEnv, RegionEnvConfig, RegionVectorEnv
from envs.routing import LoadBalancingEnv, LoadBalancingVectorEnv, RoutingEnvConfig

__all__ = [
    "LOAD_BALANCING_ENV",
    "LOAD_BALANCING_ID",
    "REGION_ENV",
    "REGION_ID",
    "LoadBalancingEnv",
    "LoadBalancingVectorEnv",
    "RegionEnv",
    "RegionEnvConfig",
    "RegionVectorEnv",
    "RoutingEnvConfig",
    "make_load_balancing",
    "make_regions",
    "register",
]

LOAD_BALANCING_ID = "tokenyard/LoadBalancing-v0"
"""Name under which `gymnasium.make` and `gymnasium.make_vec` know the environment."""
LOAD_BALANCING_ENV = "LoadBalancingEnv"
"""Name under which RLlib knows it."""

REGION_ID = "tokenyard/Regions-v0"
"""Name of the regional environment in Gymnasium."""
REGION_ENV = "RegionEnv"
"""Its name in RLlib."""


def make_load_balancing(config: dict[str, Any]) -> LoadBalancingEnv | LoadBalancingVectorEnv:
    """Make what RLlib asks for: many copies where the config counts them, else a single one."""
    if "num_envs" in config:
        rest = {key: value for key, value in config.items() if key != "num_envs"}
        return LoadBalancingVectorEnv(config["num_envs"], rest)
    return LoadBalancingEnv(dict(config))


def make_regions(config: dict[str, Any]) -> RegionEnv | RegionVectorEnv:
    """Make a regional environment: many copies where the config counts them."""
    rest = {key: value for key, value in config.items() if key != "num_envs"}
    if "num_envs" in config:
        return RegionVectorEnv(config["num_envs"], rest)
    return RegionEnv(rest)


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
        gymnasium.register(
            REGION_ID,
            entry_point="envs.regions:RegionEnv",
            vector_entry_point="envs.regions:RegionVectorEnv",
        )
    try:
        from ray import tune
    except ImportError:
        return
    tune.register_env(LOAD_BALANCING_ENV, make_load_balancing)
    tune.register_env(REGION_ENV, make_regions)
