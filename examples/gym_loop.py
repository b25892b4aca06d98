"""Step the routing environment with a policy written by hand.

    python examples/gym_loop.py

Each step places one request on one of three servers of unequal speed. Expect the mean reward of a
request under three policies: random, the server with the fewest tokens per speed, and round robin.
It takes a few seconds; the first run on a machine compiles the simulator for about a minute.
"""

from __future__ import annotations

from collections.abc import Callable

import gymnasium
import numpy as np

import envs

REQUESTS = 2000
REQUEST_FEATURES, SERVER_FEATURES = 16, 6
"""Numbers of the observation about the request, and about each server."""
TOKENS_IN_FLIGHT, SPEED = 1, 5
"""Of a server's numbers: log(1 + thousands of tokens), and log(1 + thousands of tokens/s)."""

Policy = Callable[[np.ndarray, int], int]


def least_work(observation: np.ndarray, step: int) -> int:
    """Choose the server that would be done first with what it holds."""
    servers = observation[REQUEST_FEATURES:].reshape(-1, SERVER_FEATURES)
    tokens, speeds = np.expm1(servers[:, TOKENS_IN_FLIGHT]), np.expm1(servers[:, SPEED])
    return int(np.argmin((tokens + 1.0) / speeds))


def mean_reward(env: gymnasium.Env[np.ndarray, int], policy: Policy) -> float:
    """Play one episode; all policies get the same requests."""
    observation, _ = env.reset(seed=0)
    total, step, over = 0.0, 0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(policy(observation, step))
        total, step, over = total + float(reward), step + 1, terminated or truncated
    return total / step


def main() -> None:
    """Compare three policies."""
    envs.register()
    env = gymnasium.make(envs.LOAD_BALANCING_ID, scenario="poisson_085", episode_requests=REQUESTS)
    rng = np.random.default_rng(0)
    policies: dict[str, Policy] = {
        "random": lambda observation, step: int(rng.integers(3)),
        "round robin": lambda observation, step: step % 3,
        "least work": least_work,
    }
    for name, policy in policies.items():
        print(f"{name}: mean reward {mean_reward(env, policy):.2f}")


if __name__ == "__main__":
    main()
