"""Networks that route between any number of replicas (`tokenyard.routing.equivariant`), for RLlib.

One small network scores every replica from its features, those of the request and their mean over
all replicas; the critic sees the request, mean and maximum. As in `modules`, the normaliser lives
in buffers and the network is a correction of a rule, whose cost is read back from the observation.

Shapes: B batch, N replicas, F features of a replica.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Discrete
from ray.rllib.algorithms.dqn.default_dqn_rl_module import QF_PREDS
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn

from tokenyard.rl.modules import (
    RESIDUAL_SCALE,
    Observes,
    RunningNormaliser,
    linear_layers,
    shrink_last_layer,
)
from tokenyard.routing.equivariant import BASELINES, Layout, Observed, scorer_inputs
from tokenyard.routing.observation import NUM_REQUEST_FEATURES, observation_size

BASELINE = "baseline"
"""Key of a module's `model_config`: the rule that is corrected (`equivariant`)."""
HIDDEN = "fcnet_hiddens"
"""Key of a module's `model_config`: widths of the hidden layers, as RLlib calls it."""


class KindNormaliser(nn.Module):
    """Normalises features of requests, and those of all replicas in the same way."""

    def __init__(self, layout: Layout) -> None:
        """Start as the identity."""
        super().__init__()
        self._layout = layout
        self.request = RunningNormaliser(NUM_REQUEST_FEATURES)
        self.replica = RunningNormaliser(layout.num_features)

    def forward(self, observed: Observed) -> Observed:
        """Normalise what was observed."""
        return observed._replace(
            request=self.request(observed.request), replicas=self.replica(observed.replicas)
        )

    def update(self, observations: Tensor) -> None:
        """Take observations of shape (B, size) into account, of replicas that take requests."""
        observed = self._layout.split_observation(observations, torch)
        self.request.update(observed.request)
        self.replica.update(observed.replicas[observed.routable])


class _EquivariantParts(Observes):
    """Normaliser, scorer and residual, mixed into an RLModule of RLlib."""

    observation_space: Any
    action_space: Any
    model_config: dict[str, Any]

    def _add_parts(self) -> nn.Sequential:
        """Build all but the scorer, which is returned for the module to name."""
        assert isinstance(self.action_space, Discrete)
        self.layout = _layout(self.observation_space.shape[0], int(self.action_space.n))
        self.normaliser = KindNormaliser(self.layout)
        self.residual_scale = float(self.model_config.get(RESIDUAL_SCALE, 0.0))
        self.baseline: str = self.model_config[BASELINE]
        scorer = self._network()
        shrink_last_layer(scorer)
        return scorer

    def _network(self) -> nn.Sequential:
        return _network(self.layout.num_inputs, self.model_config[HIDDEN])

    def _preferences(self, batch: dict[str, Any], scorer: nn.Module) -> Tensor:
        """Preference for each replica, minus infinity where it is not routable, shape (B, N)."""
        observed = self.layout.split_observation(batch[Columns.OBS], torch)
        preferences = scorer(scorer_inputs(self.normaliser(observed), torch)).squeeze(-1)
        if self.residual_scale:
            costs_s = BASELINES[self.baseline](observed.replicas, torch)
            preferences = preferences - self.residual_scale * costs_s
        masked: Tensor = preferences.masked_fill(~observed.routable, -torch.inf)
        return masked


class EquivariantActorCritic(_EquivariantParts, TorchRLModule, ValueFunctionAPI, InferenceOnlyAPI):
    """Actor and critic of PPO and A2C."""

    def setup(self) -> None:
        """Build both networks."""
        self.scorer = self._add_parts()
        self.critic = self._network()

    @property
    def policy_layers(self) -> list[nn.Linear]:
        """Linear layers of the scorer; ReLU stands between them."""
        return linear_layers(self.scorer)

    def get_non_inference_attributes(self) -> list[str]:
        """What env runners do without."""
        return ["critic"]

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self._preferences(batch, self.scorer)}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """Value of each observation, shape (B,)."""
        observed = self.normaliser(self.layout.split_observation(batch[Columns.OBS], torch))
        values: Tensor = self.critic(_critic_inputs(observed)).squeeze(-1)
        return values


class EquivariantQNetwork(_EquivariantParts, DefaultDQNTorchRLModule):
    """Q-network of DQN: the target network shares the normaliser and the residual."""

    def setup(self) -> None:
        """Put the scorer in the place of RLlib's networks, so that it gets a target network."""
        super().setup()
        assert not self.uses_dueling, "scores of replicas are no advantages over a common value"
        self.encoder = nn.Identity()
        self.af = self._add_parts()

    @property
    def policy_layers(self) -> list[nn.Linear]:
        """Linear layers of the scorer; ReLU stands between them."""
        return linear_layers(self.af)

    def _qf_forward_helper(self, batch: dict[str, Any], encoder: Any, head: Any) -> dict[str, Any]:
        # Minus infinity is what RLlib's exploration and its targets know as "cannot be chosen".
        return {QF_PREDS: self._preferences(batch, head)}


def _layout(size: int, num_replicas: int) -> Layout:
    """The layout of observations of `size` numbers for so many replicas."""
    for batches in (False, True):
        for finish in (False, True):
            if observation_size(num_replicas, finish, batches) == size:
                return Layout(finish, batches)
    raise ValueError(f"{size} numbers are no observation of {num_replicas} replicas")


def _network(num_inputs: int, hidden: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(num_inputs, width), nn.ReLU()]
        num_inputs = width
    return nn.Sequential(*layers, nn.Linear(num_inputs, 1))


def _critic_inputs(observed: Observed) -> Tensor:
    """Features of the request, and mean and maximum over replicas, shape (B, inputs)."""
    request, replicas, routable = observed
    shown = routable[..., None]
    mean = (replicas * shown).sum(-2) / shown.sum(-2)
    largest = replicas.masked_fill(~shown, -torch.inf).amax(-2)
    return torch.cat([request, mean, largest], -1)
