"""The allocation paper's environment as printed: a trace walks by, whatever is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import gymnasium
import numpy as np
from pydantic import Field

from tokenyard.allocation.paper import simulator as paper
from tokenyard.config import FrozenModel


class LiteralEnvConfig(FrozenModel):
    """What `LiteralParallelismEnv` is made from."""

    reading: paper.Reading = "correlated"
    """How actions and CPU use change the features."""
    weights: paper.LiteralWeights = paper.LiteralWeights()
    bins: Literal["uniform", "quantile"] = "uniform"
    observation: Literal["bin", "features"] = "bin"
    """The bin of the average CPU use, or the five features of the last slot."""
    episode_slots: Annotated[int, Field(ge=1)] = 288
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the features that the paper simulated."""


class LiteralParallelismEnv(gymnasium.Env[Any, np.int64]):
    """Choose kind of parallelism and number of GPUs for a trace of CPU use.

    Observation:
        Discrete(10), the bin of the slot's average CPU use; or float32, shape (5,): normalised CPU
        use of the slot, and memory, latency, power and bandwidth of the last one, in [0, 1].

    Action:
        Index, decoded by `tokenyard.allocation.paper.simulator.decode_action`: data, model or
        hybrid parallelism on one to four GPUs.

    Reward:
        `LiteralWeights`. With those of section 3, features (CPU .2, memory .5, latency .4, power
        .3, bandwidth .6) earn .5 x .6 + .4 x .7 + .3 x .6 + .2 x .5 + .1 x .8 = .94.

    Episode end:
        Truncated after `episode_slots` steps, or at the end of the trace; never terminated.

    Source:
        As `tokenyard.allocation.paper.simulator`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Make the data set from the fields of `LiteralEnvConfig`."""
        self.config = LiteralEnvConfig.model_validate({**(config or {}), **options})
        own = self.config
        self.table = paper.literal_table(own.reading, own.weights, own.bins, own.seed)
        self.action_space = gymnasium.spaces.Discrete(paper.NUM_ACTIONS)
        self.observation_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(paper.NUM_STATES)
        if own.observation == "features":
            self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (5,), np.float32)
        self._slot = self._end = 0
        self._last = np.zeros(5)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start at a random slot; `seed` fixes it and all that follow."""
        super().reset(seed=seed)
        length = min(self.config.episode_slots, self.table.num_slots - 1)
        self._slot = int(self.np_random.integers(self.table.num_slots - length))
        self._end = self._slot + length
        self._last = self.table.features[self._slot, 0]
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Earn the reward of an action in this slot and see the next.

        Raises:
            ValueError: The action is none, or the episode is over.
        """
        if self._slot == self._end:
            raise ValueError("the episode is over: call reset first")
        if not 0 <= action < paper.NUM_ACTIONS:
            raise ValueError(f"action {action} must be in 0..{paper.NUM_ACTIONS - 1}")
        reward = float(self.table.rewards[self._slot, action])
        self._last = self.table.features[self._slot, action]
        kind, gpus = paper.decode_action(int(action))
        self._slot += 1
        info = {"parallelism": kind, "num_gpus": gpus}
        return self._observe(), reward, False, self._slot == self._end, info

    def _observe(self) -> Any:
        if self.config.observation == "bin":
            return np.int64(self.table.states[self._slot])
        shown = self._last.astype(np.float32)
        shown[0] = self.table.features[self._slot, 0, 0]
        return shown
