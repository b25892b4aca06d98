"""Gymnasium environments: thin adapters over the simulators."""

from __future__ import annotations

from typing import Any

import gymnasium

from envs.allocation import ParallelismEnv, ParallelismEnvConfig, ParallelismVectorEnv
from envs.allocation_paper import LiteralEnvConfig, LiteralParallelismEnv
from envs.regions import RegionEnv, RegionEnvConfig, RegionVectorEnv
from envs.routing import LoadBalancingEnv, LoadBalancingVectorEnv, RoutingEnvConfig

__all__ = [
    "LOAD_BALANCING_ENV",
    "LOAD_BALANCING_ID",
    "PARALLELISM_ENV",
    "PARALLELISM_ID",
    "REGION_ENV",
    "REGION_ID",
    "LiteralEnvConfig",
    "LiteralParallelismEnv",
    "LoadBalancingEnv",
    "LoadBalancingVectorEnv",
    "ParallelismEnv",
    "ParallelismEnvConfig",
    "ParallelismVectorEnv",
    "RegionEnv",
    "RegionEnvConfig",
    "RegionVectorEnv",
    "RoutingEnvConfig",
    "make_load_balancing",
    "make_parallelism",
    "make_regions",
    "register",
]

LOAD_BALANCING_ID = "tokenyard/LoadBalancing-v0"
"""Name under which `gymnasium.make` and `gymnasium.make_vec` know the environment."""
LOAD_BALANCING_ENV = "LoadBalancingEnv"
"""Name under which RLlib knows it."""

PARALLELISM_ID = "tokenyard/Parallelism-v0"
"""Name of the allocation environment in Gymnasium."""
PARALLELISM_ENV = "ParallelismEnv"
"""Its name in RLlib."""

REGION_ID = "tokenyard/Regions-v0"
"""Name of the regional environment in Gymnasium."""
REGION_ENV = "RegionEnv"
"""Its name in RLlib."""

_ENTRY_POINTS = (
    (
        LOAD_BALANCING_ID,
        "envs.routing:LoadBalancingEnv",
        "envs.routing:LoadBalancingVectorEnv",
    ),
    (PARALLELISM_ID, "envs.allocation:ParallelismEnv", "envs.allocation:ParallelismVectorEnv"),
    (REGION_ID, "envs.regions:RegionEnv", "envs.regions:RegionVectorEnv"),
)
"""Gymnasium's names, and where a single environment and many copies of it are."""


def make_load_balancing(config: dict[str, Any]) -> LoadBalancingEnv | LoadBalancingVectorEnv:
    """Make what RLlib asks for: many copies where the config counts them, else a single one."""
    if "num_envs" in config:
        rest = {key: value for key, value in config.items() if key != "num_envs"}
        return LoadBalancingVectorEnv(config["num_envs"], rest)
    return LoadBalancingEnv(dict(config))


def make_parallelism(
    config: dict[str, Any],
) -> ParallelismEnv | ParallelismVectorEnv | LiteralParallelismEnv:
    """Make an allocation environment: `variant` is `physical` (the default) or `literal`.

    Of the physical one, many copies where the config counts them.

    Raises:
        ValueError: Another variant.
    """
    rest = {key: value for key, value in config.items() if key not in ("num_envs", "variant")}
    variant = config.get("variant", "physical")
    if variant == "literal":
        return LiteralParallelismEnv(rest)
    if variant != "physical":
        raise ValueError(f"unknown variant {variant!r}; choose physical or literal")
    if "num_envs" in config:
        return ParallelismVectorEnv(config["num_envs"], rest)
    return ParallelismEnv(rest)


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
    for name, single, many in _ENTRY_POINTS:
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=single, vector_entry_point=many)
    try:
        from ray import tune
    except ImportError:
        return
    tune.register_env(LOAD_BALANCING_ENV, make_load_balancing)
    tune.register_env(PARALLELISM_ENV, make_parallelism)
    tune.register_env(REGION_ENV, make_regions)
