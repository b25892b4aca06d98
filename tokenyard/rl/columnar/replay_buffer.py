"""Replay of single steps in preallocated arrays, where RLlib keeps episode objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from ray.rllib.core.columns import Columns
from ray.rllib.utils import metrics as keys
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer

from tokenyard.rl.columnar.columns import Rollout, Transitions


class ColumnarEpisodeReplayBuffer(EpisodeReplayBuffer):
    """Uniform replay of the last `capacity` steps, with the interface of RLlib's buffer.

    A step is kept with the observation after it, so it does not matter which steps are still
    there: the oldest are overwritten one by one, not by whole episodes.
    """

    _num_timesteps: int
    _num_timesteps_added: int

    def __init__(self, capacity: int = 10_000, seed: int | None = None, **kwargs: Any) -> None:
        """Make an empty buffer; arrays are allocated when the first steps come."""
        super().__init__(capacity=capacity, **kwargs)
        self.rng = np.random.default_rng(seed)
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._next = 0

    def add(self, episodes: Sequence[Rollout] | Rollout) -> None:
        """Keep all steps of some rollouts, in the order in which they were made."""
        for rollout in [episodes] if isinstance(episodes, Rollout) else episodes:
            real = rollout.real
            self._write(
                {
                    Columns.OBS: rollout.observations[:-1][real],
                    # Past an episode's end this is its last observation, not the next one's first.
                    Columns.NEXT_OBS: rollout.observations[1:][real],
                    Columns.ACTIONS: rollout.actions[real],
                    Columns.REWARDS: rollout.rewards[real],
                    Columns.TERMINATEDS: rollout.terminated[real],
                    Columns.TRUNCATEDS: rollout.truncated[real],
                }
            )

    def _write(self, steps: dict[str, npt.NDArray[Any]]) -> None:
        num = len(steps[Columns.ACTIONS])
        if not self._columns:
            self._columns = {
                name: np.zeros((self.capacity, *column.shape[1:]), column.dtype)
                for name, column in steps.items()
            }
        kept = min(num, self.capacity)
        places = (self._next + np.arange(kept)) % self.capacity
        for name, column in steps.items():
            self._columns[name][places] = column[num - kept :]
        self._next = (self._next + kept) % self.capacity
        evicted = max(self._num_timesteps + num - self.capacity, 0)
        self._num_timesteps = min(self._num_timesteps + num, self.capacity)
        self._num_timesteps_added += num
        log = self.metrics.log_value
        log(keys.NUM_ENV_STEPS_ADDED, num, reduce="sum")
        log(keys.NUM_ENV_STEPS_ADDED_LIFETIME, num, reduce="lifetime_sum")
        log(keys.NUM_ENV_STEPS_EVICTED, evicted, reduce="sum")
        log(keys.NUM_ENV_STEPS_EVICTED_LIFETIME, evicted, reduce="lifetime_sum")
        log(keys.NUM_ENV_STEPS_STORED, self._num_timesteps, window=1)

    def sample(
        self, num_items: int | None = None, *, n_step: int = 1, **kwargs: Any
    ) -> list[Transitions]:
        """Draw steps with equal probability, with replacement.

        Args:
            num_items: Steps to draw.
            n_step: Must be 1.
            kwargs: Ignored: what RLlib passes for recurrent modules and priorities.

        Raises:
            ValueError: Nothing to draw from, or `n_step` is not 1.
        """
        if n_step != 1:
            raise ValueError(
                f"n_step={n_step}: steps are kept one by one; choose 1, or the implementation "
                "'rllib_stock'"
            )
        if self._num_timesteps == 0:
            raise ValueError("there is nothing in the buffer to sample from")
        num = num_items or self.batch_size_B
        rows = self.rng.integers(0, self._num_timesteps, num)
        self.sampled_timesteps += num
        self.metrics.log_value(keys.NUM_ENV_STEPS_SAMPLED, num, reduce="sum")
        self.metrics.log_value(keys.NUM_ENV_STEPS_SAMPLED_LIFETIME, num, reduce="lifetime_sum")
        return [Transitions({name: column[rows] for name, column in self._columns.items()})]

    def get_num_timesteps(self, module_id: str | None = None) -> int:
        """Steps in the buffer."""
        return int(self._num_timesteps)

    def get_state(self) -> dict[str, Any]:
        """What `set_state` needs to go on exactly as this buffer would."""
        kept = self._num_timesteps
        return {
            "columns": {name: column[:kept].copy() for name, column in self._columns.items()},
            "next": self._next,
            "num_timesteps": kept,
            "num_timesteps_added": self._num_timesteps_added,
            "sampled_timesteps": self.sampled_timesteps,
            "rng": self.rng.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Become the buffer that a state was taken from; capacities must be equal."""
        self._columns = {}
        kept = state["num_timesteps"]
        for name, column in state["columns"].items():
            self._columns[name] = np.zeros((self.capacity, *column.shape[1:]), column.dtype)
            self._columns[name][:kept] = column
        self._next = state["next"]
        self._num_timesteps = kept
        self._num_timesteps_added = state["num_timesteps_added"]
        self.sampled_timesteps = state["sampled_timesteps"]
        self.rng.bit_generator.state = state["rng"]
