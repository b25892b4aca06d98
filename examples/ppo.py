"""Train PPO of RLlib, as RLlib ships it, on the routing environment.

    python examples/ppo.py

Expect one line per iteration with the mean return of an episode of 200 requests, which rises from
about -760. It takes a minute, most of it Ray's start. `ITERATIONS = 20` shows more of the curve.
Policies are compared by response times, never by return: see docs/metrics.md.
"""

from __future__ import annotations

import ray
from ray.rllib.algorithms.ppo import PPOConfig

import envs

ITERATIONS = 2
EPISODE_REQUESTS = 200


def main() -> None:
    """Train for a few iterations."""
    envs.register()
    ray.init(num_cpus=2, include_dashboard=False, ignore_reinit_error=True)
    config = (
        PPOConfig()
        .environment(
            envs.LOAD_BALANCING_ENV,
            env_config={"scenario": "poisson_085", "episode_requests": EPISODE_REQUESTS},
        )
        .env_runners(num_env_runners=0, num_envs_per_env_runner=4, rollout_fragment_length=200)
        .training(train_batch_size=800, minibatch_size=200, num_epochs=2, lr=3e-4, gamma=0.99)
        .debugging(seed=0)
    )
    algorithm = config.build_algo()
    for iteration in range(ITERATIONS):
        result = algorithm.train()
        mean_return = result["env_runners"]["episode_return_mean"]
        print(f"iteration {iteration}: mean return {mean_return:.1f}")
    algorithm.stop()


if __name__ == "__main__":
    main()
