"""Many copies of one environment, stepped together: seeds, spaces and how episodes begin anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from tokenyard.types import BoolArray, FloatArray

Observations = npt.NDArray[np.float32]
Stepped = tuple[Observations, FloatArray, BoolArray, BoolArray, dict[str, Any]]
"""Observations, rewards, terminated, truncated and info of all copies."""


class IndependentCopies(gymnasium.vector.VectorEnv[Observations, Any, npt.NDArray[Any]]):
    """Several independent environments.

    Copy i equals a single environment that was reset with seed + i. Autoreset is NEXT_STEP: the
    step after an episode's end ignores the action, earns 0 and returns the new episode's first
    observation. No state ends an episode.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": [],
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self,
        num_envs: int,
        observation_space: gymnasium.spaces.Box,
        action_space: gymnasium.spaces.Space[Any],
        copies_per_stream: int = 1,
    ) -> None:
        """Take the number of copies, and the spaces of one.

        Args:
            num_envs: Copies.
            observation_space: Of one copy.
            action_space: Of one copy.
            copies_per_stream: So many copies in a row have equal seeds, and so equal traffic.

        Raises:
            ValueError: The copies cannot be divided so.
        """
        if num_envs % copies_per_stream:
            raise ValueError(f"{num_envs} copies are no multiple of {copies_per_stream} per stream")
        self._copies_per_stream = copies_per_stream
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self._rngs: list[np.random.Generator] = []
        self._ended = np.zeros(num_envs, dtype=np.bool_)

    def start(self, copy: int, rng: np.random.Generator) -> None:
        """Begin an episode in one copy."""
        raise NotImplementedError

    def observe(self) -> Observations:
        """What all copies see now, an array of the caller's own."""
        raise NotImplementedError

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Observations, dict[str, Any]]:
        """Start an episode in every copy; one integer seeds stream i with seed + i.

        Raises:
            ValueError: The number of seeds is not the number of copies.
        """
        if seed is not None or not self._rngs:
            first = int(seed) if isinstance(seed, int | np.integer) else None
            if first is None and self._copies_per_stream > 1:
                first = int(np.random.SeedSequence().generate_state(1)[0])
            shared = self._copies_per_stream
            derived = [None if first is None else first + i // shared for i in range(self.num_envs)]
            seeds = derived if seed is None or isinstance(seed, int | np.integer) else list(seed)
            if len(seeds) != self.num_envs:
                raise ValueError(f"{len(seeds)} seeds for {self.num_envs} copies: give each one")
            self._rngs = [seeding.np_random(seed)[0] for seed in seeds]
        for copy, rng in enumerate(self._rngs):
            self.start(copy, rng)
        self._ended[:] = False
        return self.observe(), {}

    def begin_anew(self) -> list[int]:
        """Begin an episode in the copies whose last one ended; return which."""
        over: list[int] = np.flatnonzero(self._ended).tolist()
        for copy in over:
            self.start(copy, self._rngs[copy])
        return over

    def stepped(self, observations: Observations, rewards: FloatArray, ended: BoolArray) -> Stepped:
        """What `step` returns, after which the copies that `ended` will begin anew."""
        self._ended = ended
        never = np.zeros(self.num_envs, dtype=np.bool_)
        return observations, rewards, never, ended.copy(), {}
