"""Who samples and learns: our arrays, or RLlib's episodes; the same for every environment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from gymnasium import VectorizeMode
from pydantic import Field
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from tokenyard.config import FrozenModel
from tokenyard.rl.columnar.env_runner import ColumnarEnvRunner, RouterEnvRunner
from tokenyard.rl.columnar.learners import (
    A2CColumnarLearner,
    DQNColumnarLearner,
    PPOColumnarLearner,
)
from tokenyard.rl.modules import UpdateNormaliser

Implementation = Literal["tokenyard", "rllib_stock"]
"""Who samples and learns: our arrays, or RLlib's episodes."""

COLUMNAR_REPLAY = "tokenyard.rl.columnar.replay_buffer.ColumnarEpisodeReplayBuffer"
"""Import path, by which RLlib makes the buffer."""
REPLAY_CAPACITY = 50_000
"""Transitions that DQN keeps."""

_LEARNERS = {"ppo": PPOColumnarLearner, "a2c": A2CColumnarLearner, "dqn": DQNColumnarLearner}


class TrainingSettings(FrozenModel):
    """What every training is given, whatever its problem and its algorithm."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Of networks, exploration, replay and environments."""
    env_steps: Annotated[int, Field(ge=1)] = 100_000
    """Environment steps the training is planned for: schedules end with it."""
    iterations: Annotated[int, Field(ge=1)] = 10
    """Results until `env_steps`."""
    num_env_runners: Annotated[int, Field(ge=0)] = 0
    """Env-runner actors; 0 samples in the calling process (decision 0010)."""
    cpus_per_actor: Annotated[float, Field(gt=0)] = 0.5
    """CPUs that the training's own process and each env runner reserve."""
    implementation: Implementation = "tokenyard"
    """"tokenyard" samples, replays and learns from arrays; "rllib_stock" with RLlib's episodes,
    connectors and learners."""

    @property
    def steps_per_iteration(self) -> int:
        """Fewest environment steps between two results."""
        return max(1, self.env_steps // self.iterations)


DEFAULT_SETTINGS = TrainingSettings()


def with_sampling(
    config: AlgorithmConfig,
    algorithm: str,
    settings: TrainingSettings,
    *,
    num_envs: int,
    fragment_steps: int,
    normalise: bool,
) -> AlgorithmConfig:
    """Add how to sample, replay and learn to the configuration of an algorithm.

    Args:
        config: With what the algorithm is trained for; A2C's and DQN's have
            `rounds_per_training_step`.
        algorithm: "ppo", "a2c" or "dqn".
        settings: Who samples and learns, with how many env runners.
        num_envs: Copies of the environment that one env runner steps at once.
        fragment_steps: Steps of every copy per training batch (DQN: per sampling round).
        normalise: Whether the module has a normaliser, which has to see what was sampled.
    """
    columnar = settings.implementation == "tokenyard"
    steps_per_iteration = settings.steps_per_iteration
    if columnar:
        config = config.learners(learner_class=_LEARNERS[algorithm])
        if algorithm != "ppo":
            config.rounds_per_training_step = -(-steps_per_iteration // (num_envs * fragment_steps))
        if algorithm == "dqn":
            replay = {"type": COLUMNAR_REPLAY, "capacity": REPLAY_CAPACITY, "seed": settings.seed}
            config = config.training(replay_buffer_config=replay)
    elif normalise:
        config = config.learners(learner_connector=_update_normaliser)
    return (
        config.env_runners(
            env_runner_cls=ColumnarEnvRunner if columnar else RouterEnvRunner,
            num_env_runners=settings.num_env_runners,
            num_cpus_per_env_runner=settings.cpus_per_actor,
            num_envs_per_env_runner=num_envs,
            gym_env_vectorize_mode=VectorizeMode.VECTOR_ENTRY_POINT,
            rollout_fragment_length=fragment_steps,
        )
        .learners(num_learners=0)
        .fault_tolerance(restart_failed_env_runners=True)
        .reporting(
            min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=steps_per_iteration
        )
        .debugging(seed=settings.seed, log_level="ERROR")
    )


def _update_normaliser(*_: Any) -> UpdateNormaliser:
    return UpdateNormaliser()
