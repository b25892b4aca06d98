"""The linear policy as an actor of RLlib's PPO, and who samples for it.

What it learns are the weights that policy search searches, of servers at a constant rate or of
replicas that batch. No environment is stepped: the policy plays streams in compiled code, and every
choice at its close decisions is tried to its end (`tokenyard.routing.simulator.branching`). The
learner gets the costs of all actions (`AllActionsPPOLearner`), so there is no critic.

Shapes: B batch, N servers, P weights that are learned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from torch import Tensor, nn

from tokenyard.rl.columnar.columns import TriedActions
from tokenyard.rl.columnar.env_runner import RouterEnvRunner
from tokenyard.rl.modules import RESIDUAL_SCALE
from tokenyard.rl.routing.equivariant import RULE_WEIGHTS
from tokenyard.routing.fleet import Randomisation
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.simulator.branching import BranchingConfig, concatenate
from tokenyard.routing.simulator.server_models import server_model
from tokenyard.routing.simulator.streams import StreamSource, stream_rng
from tokenyard.types import FloatArray

BRANCHING = "branching"
"""Key of `env_config`: fields of `BranchingConfig`."""
_FIRST_STREAM = 1_000_000
"""Streams of an env runner begin at this number times its own, counted from one. What policy search
sees before comes first."""


class LinearActor(TorchRLModule, InferenceOnlyAPI):
    """The actor: costs that are linear in its weights, of which a softmax is taken."""

    observation_space: Any
    action_space: Any
    model_config: dict[str, Any]

    def setup(self) -> None:
        """Begin at given weights; those beyond P are limits of SLO terms, and stay."""
        num_learned = self.observation_space.shape[-1] - 1
        weights = torch.tensor(self.model_config[RULE_WEIGHTS], dtype=torch.float32)
        self.scale = float(self.model_config[RESIDUAL_SCALE])
        self.weights = nn.Parameter(weights[:num_learned])
        self.register_buffer("limits", weights[num_learned:])

    def get_non_inference_attributes(self) -> list[str]:
        """Nothing: all of it decides."""
        return []

    @property
    def all_weights(self) -> FloatArray:
        """As an artifact has them."""
        every = torch.cat([self.weights.detach(), self.get_buffer("limits")])
        found: FloatArray = every.cpu().numpy().astype(np.float64)
        return found

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        costs_from: Tensor = batch[Columns.OBS]
        costs = costs_from[..., 0] + costs_from[..., 1:] @ self.weights
        return {Columns.ACTION_DIST_INPUTS: -self.scale * costs}

    def logit_gradients(self, costs_from: Tensor) -> Tensor:
        """Of every action's logit by the weights that are learned, shape (B, N, P)."""
        return -self.scale * costs_from[..., 1:]


class BranchingEnvRunner(RouterEnvRunner):
    """Plays streams with the greedy policy and tries out its close decisions."""

    def make_env(self) -> None:
        """Make the simulator in place of an environment."""
        torch.set_num_threads(1)
        given = self.config.env_config
        self._source = StreamSource(load_scenario(given["scenario"]))
        self._tried_out = BranchingConfig(**given[BRANCHING])
        self._randomisation = Randomisation.model_validate(given["randomisation"])
        scenario, mean_tokens = self._source.scenario, self._source.mean_total_tokens
        self._branching = server_model(scenario).branching(scenario, mean_tokens)
        self._next_stream: int | None = None
        size = (scenario.num_servers, 1 + self._branching.num_features)
        space: tuple[Any, Any] = Box(-np.inf, np.inf, size, np.float32), Discrete(size[0])
        keys = (INPUT_ENV_SPACES, INPUT_ENV_SINGLE_SPACES, DEFAULT_MODULE_ID)
        self.spaces = dict.fromkeys(keys, space)

    def assert_healthy(self) -> None:
        """There is no environment that could fail."""

    def sample(self, **kwargs: Any) -> list[TriedActions]:
        """Play as many streams as the configuration has copies of an environment."""
        assert self.module is not None
        weights, num_streams = self.module.all_weights, self.config.num_envs_per_env_runner
        if self._next_stream is None:
            # A restored trial goes on: no more streams than these have been played.
            steps = int(self.num_env_steps_sampled_lifetime)
            played = steps // self._source.scenario.requests_per_stream
            self._next_stream = _FIRST_STREAM * (1 + self.worker_index) + played
        first, self._next_stream = self._next_stream, self._next_stream + num_streams
        found = concatenate([self._play(weights, first + i) for i in range(num_streams)])
        self._increase_sampled_metrics(found.num_placed, num_streams)
        return [
            TriedActions(
                observations=found.costs_from,
                tried=found.tried,
                costs=found.costs_s.astype(np.float32),
                num_steps=found.num_placed,
                weights_seq_no=self._weights_seq_no,
            )
        ]

    def _play(self, weights: FloatArray, index: int) -> Any:
        rng = stream_rng(int(self.config.seed or 0), "training", index)
        load_factor = rng.uniform(*self._randomisation.load_factor)
        length = self._source.scenario.requests_per_stream
        stream = self._source.sample(length, rng, load_factor)
        return self._branching.sample(weights, stream, self._tried_out)
