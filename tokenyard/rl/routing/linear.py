"""The linear policy of servers at a constant rate, as an actor of RLlib.

What it learns are the weights of `observation.linear_scores`, those that policy search searches
too. Few numbers are learned from little experience, and what is exported is of kind `linear`. What
the costs are made from is read back from the observation. The critic is RLlib's own.

Shapes: B batch, N servers.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Discrete
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn

from tokenyard.rl.modules import RESIDUAL_SCALE, Observes, RunningNormaliser
from tokenyard.rl.routing.equivariant import HIDDEN, RULE_WEIGHTS, scalar_network
from tokenyard.routing.observation import (
    NUM_FINISH_FEATURES,
    NUM_REPLICA_FEATURES,
    NUM_REQUEST_FEATURES,
    NUM_SCORE_POWERS,
    observation_size,
)

UNITS = "units"
"""Key of a module's `model_config`: the SLO, seconds, and the mean size of requests, tokens."""
_PER_SERVER = NUM_REPLICA_FEATURES + NUM_FINISH_FEATURES
_SPEED, _WAIT, _FINISH = NUM_REPLICA_FEATURES - 1, NUM_REPLICA_FEATURES, NUM_REPLICA_FEATURES + 1
"""Places in the part of an observation that is about one server (`observation.encode`)."""


def linear_features(observations: Tensor, slo_s: float, mean_total_tokens: float) -> Tensor:
    """What the cost of every server is made from: f of `linear_scores`, then the speed rank.

    Args:
        observations: With finish times, shape (B, size).
        slo_s: Response-time SLO, seconds.
        mean_total_tokens: Typical size of a request, tokens.

    Returns:
        Shape (B, N, NUM_SCORE_FEATURES + 1).
    """
    rest = observations[..., NUM_REQUEST_FEATURES:]
    rows = torch.expm1(rest.reshape(*rest.shape[:-1], -1, _PER_SERVER))
    tokens_per_s, wait_s, finish_s = (
        rows[..., _SPEED] * 1000.0,
        rows[..., _WAIT],
        rows[..., _FINISH],
    )
    service_s = finish_s - wait_s
    excess = service_s * tokens_per_s / mean_total_tokens - 1.0
    wait, service = wait_s / slo_s, service_s / slo_s
    lateness = (wait + service - 1.0).clamp_min(0.0)
    places = torch.argsort(torch.argsort(tokens_per_s, dim=-1, stable=True), dim=-1, stable=True)
    num = tokens_per_s.shape[-1]
    rank = places * (2.0 / (num - 1)) - 1.0 if num > 1 else torch.zeros_like(wait)
    return torch.stack(
        [
            torch.ones_like(wait),
            wait,
            service,
            wait * excess,
            service * excess,
            (lateness > 0.0).to(wait.dtype),
            lateness,
            rank,
        ],
        dim=-1,
    )


def linear_costs(features: Tensor, weights: Tensor) -> Tensor:
    """What `observation.linear_scores` says that each server costs.

    Args:
        features: Of `linear_features`, shape (B, N, NUM_SCORE_FEATURES + 1).
        weights: Shape (NUM_SCORE_WEIGHTS,).

    Returns:
        Costs in units of the SLO, shape (B, N).
    """
    of_cost, rank = features[..., :-1], features[..., -1:]
    by_power = of_cost @ weights.reshape(NUM_SCORE_POWERS, -1).T
    powers = torch.cat([rank**power for power in range(NUM_SCORE_POWERS)], dim=-1)
    return of_cost[..., 1] + of_cost[..., 2] + (by_power * powers).sum(-1)


class LinearActorCritic(Observes, TorchRLModule, ValueFunctionAPI, InferenceOnlyAPI):
    """Actor and critic of PPO and A2C: costs of the linear policy, and a network."""

    observation_space: Any
    action_space: Any
    model_config: dict[str, Any]

    def setup(self) -> None:
        """Build both.

        Raises:
            ValueError: The observation is none of servers at a constant rate, with finish times.
        """
        assert isinstance(self.action_space, Discrete)
        (size,), num = self.observation_space.shape, int(self.action_space.n)
        expected = observation_size(num, expected_finish=True)
        if size != expected:
            raise ValueError(
                f"{size} numbers are not the {expected} that are seen of {num} servers at a "
                "constant rate with expected_finish"
            )
        given = self.model_config
        self.normaliser = RunningNormaliser(size)
        self.scale = float(given[RESIDUAL_SCALE])
        self.slo_s, self.mean_total_tokens = given[UNITS]
        self.weights = nn.Parameter(torch.tensor(given[RULE_WEIGHTS]))
        self.critic = scalar_network(size, given[HIDDEN])

    def get_non_inference_attributes(self) -> list[str]:
        """What env runners do without."""
        return ["critic"]

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features = linear_features(batch[Columns.OBS], self.slo_s, self.mean_total_tokens)
        return {Columns.ACTION_DIST_INPUTS: -self.scale * linear_costs(features, self.weights)}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """Value of each observation, shape (B,)."""
        values: Tensor = self.critic(self.normaliser(batch[Columns.OBS])).squeeze(-1)
        return values
