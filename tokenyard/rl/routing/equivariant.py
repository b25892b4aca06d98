"""Networks that route between any number of replicas (`tokenyard.routing.equivariant`), for RLlib.

One small network scores every replica from its features, those of the request and their mean over
all replicas; the critic is a sum over replicas of another such network. As in `modules`, the
normaliser lives in buffers and the network is a correction of a rule. What the rule's costs are
made from is in the observation; the rule's weights are not learned. What is exported is of kind
`corrected` (`tokenyard.routing.scores.residual`).

Shapes: B batch, N replicas, F features of a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.spaces import Discrete
from ray.rllib.algorithms.dqn.default_dqn_rl_module import QF_PREDS
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn

from tokenyard.rl import modules
from tokenyard.routing.equivariant import Layout, Observed, rule_costs, scorer_inputs
from tokenyard.routing.observation import NUM_REQUEST_FEATURES

LAYOUT = Layout(shows_rule=True)
"""What is observed in training; a server computes the rule's costs itself."""
RULE_WEIGHTS = "rule_weights"
"""Key of a module's `model_config`: the rule to begin with (`scores.linear.marginal_scores`)."""
EXPLORED_SLOS = 0.02
"""DQN explores replicas whose cost is above the least by at most so many SLOs; all without a rule.
"""
HIDDEN = "fcnet_hiddens"
"""Key of a module's `model_config`: widths of the hidden layers, as RLlib calls it."""


class KindNormaliser(nn.Module):
    """Normalises features of requests, and those of all replicas in the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.request = modules.RunningNormaliser(NUM_REQUEST_FEATURES)
        self.replica = modules.RunningNormaliser(LAYOUT.num_features)

    def forward(self, observed: Observed) -> Observed:
        """Normalise what was observed."""
        return observed._replace(
            request=self.request(observed.request), replicas=self.replica(observed.replicas)
        )

    def update(self, observations: Tensor) -> None:
        """Take observations of shape (B, size) into account, of replicas that take requests."""
        observed = LAYOUT.split_observation(observations, torch)
        self.request.update(observed.request)
        self.replica.update(observed.replicas[observed.routable])


class Scorer(nn.Module):
    """Preference for every replica: what a network adds, less the scaled cost of a rule."""

    rule_weights: Tensor

    def __init__(self, hidden: list[int], rule_weights: Sequence[float], scale: float) -> None:
        """Start at the rule of these weights, shape (NUM_MARGINAL_WEIGHTS,).

        Args:
            hidden: Widths of the network's hidden layers.
            rule_weights: Of the rule; they are not learned.
            scale: What an SLO of cost lowers a preference by; 0: the rule says nothing.
        """
        super().__init__()
        self._scale = scale
        self.network = scalar_network(LAYOUT.num_inputs, hidden)
        modules.shrink_last_layer(self.network)
        self.register_buffer("rule_weights", torch.tensor(rule_weights))

    def forward(self, observed: Observed, normalised: Observed) -> Tensor:
        """Shape (B, N), minus infinity where not routable."""
        preferences: Tensor = self.network(scorer_inputs(normalised, torch)).squeeze(-1)
        if self._scale:
            costs = rule_costs(observed.rule, self.rule_weights, torch)
            preferences = preferences - self._scale * costs
        return preferences.masked_fill(~observed.routable, -torch.inf)


class _EquivariantParts(modules.Observes):
    """Normaliser and scorer, mixed into an RLModule of RLlib."""

    action_space: Any

    def _add_parts(self) -> Scorer:
        """Build all but the scorer, which is returned for the module to name.

        Raises:
            ValueError: The observation lacks what rules are made of.
        """
        assert isinstance(self.action_space, Discrete)
        (size,), num = self.observation_space.shape, int(self.action_space.n)
        if size != LAYOUT.size(num):
            raise ValueError(
                f"{size} numbers are not the {LAYOUT.size(num)} that are seen of {num} replicas; "
                "give the environment shows_rule"
            )
        self.normaliser = KindNormaliser()
        self.residual_scale = float(self.model_config[modules.RESIDUAL_SCALE])
        given = self.model_config
        return Scorer(given[HIDDEN], given[RULE_WEIGHTS], self.residual_scale)


class EquivariantActorCritic(_EquivariantParts, TorchRLModule, ValueFunctionAPI, InferenceOnlyAPI):
    """Actor and critic of PPO and A2C."""

    def setup(self) -> None:
        """Build both networks."""
        self.scorer = self._add_parts()
        self.critic = scalar_network(LAYOUT.num_inputs, self.model_config[HIDDEN])

    @property
    def policy(self) -> Scorer:
        """What decides."""
        return self.scorer

    def get_non_inference_attributes(self) -> list[str]:
        """What env runners do without."""
        return ["critic"]

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        observed = LAYOUT.split_observation(batch[Columns.OBS], torch)
        return {Columns.ACTION_DIST_INPUTS: self.scorer(observed, self.normaliser(observed))}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """Value of each observation, shape (B,)."""
        observed = LAYOUT.split_observation(batch[Columns.OBS], torch)
        return _value(self.critic, self.normaliser(observed))


class EquivariantQNetwork(_EquivariantParts, DefaultDQNTorchRLModule):
    """Q-network of DQN, dueling: the target network shares the normaliser.

    Without a value of its own (Wang et al. 2016, arXiv:1511.06581) what the state is worth, which
    is most of a return, would be learned by what is to tell replicas apart.
    """

    def setup(self) -> None:
        """Put both networks in the place of RLlib's, so that they get target networks."""
        super().setup()
        assert self.uses_dueling, "the value of the state needs a network of its own"
        self.encoder = nn.Identity()
        self.af = self._add_parts()
        self.vf = scalar_network(LAYOUT.num_inputs, self.model_config[HIDDEN])

    @property
    def policy(self) -> Scorer:
        """What decides."""
        return self.af

    def corrections(self, observations: Tensor, q: Tensor) -> Tensor:
        """What the network adds to the rule's Q-values beyond its mean over replicas.

        Args:
            observations: Shape (B, size).
            q: Q-values that were found for them, shape (B, N).

        Returns:
            Shape (B, N); 0 where not routable.
        """
        observed = LAYOUT.split_observation(observations, torch)
        costs = rule_costs(observed.rule, self.policy.rule_weights, torch)
        added = (q + self.residual_scale * costs).masked_fill(~observed.routable, 0.0)
        mean = added.sum(-1, keepdim=True) / observed.routable.sum(-1, keepdim=True)
        corrections: Tensor = (added - mean).masked_fill(~observed.routable, 0.0)
        return corrections

    def _forward_exploration(self, batch: dict[str, Any], t: int) -> dict[str, Any]:
        """Epsilon-greedy; where there is a rule, among replicas nearly as good as the best."""
        q = self.compute_q_values(batch)[QF_PREDS]
        self.epsilon_schedule.update(t)
        epsilon = self.epsilon_schedule.get_current_value()
        best, greedy = q.max(-1, keepdim=True)
        margin = EXPLORED_SLOS * self.residual_scale or torch.inf
        near = (q >= best - margin) & q.isfinite()
        explored = torch.multinomial(near.float(), num_samples=1).squeeze(1)
        explores = torch.rand(len(q), device=q.device) < epsilon
        return {Columns.ACTIONS: torch.where(explores, explored, greedy.squeeze(1))}

    def _qf_forward_helper(self, batch: dict[str, Any], encoder: Any, head: Any) -> dict[str, Any]:
        observed = LAYOUT.split_observation(batch[Columns.OBS], torch)
        normalised = self.normaliser(observed)
        preferences = head["af"](observed, normalised)
        num = observed.routable.sum(-1, keepdim=True)
        mean = preferences.masked_fill(~observed.routable, 0.0).sum(-1, keepdim=True) / num
        value = _value(head["vf"], normalised)[..., None]
        # Minus infinity is what RLlib's exploration and its targets know as "cannot be chosen".
        return {QF_PREDS: value + preferences - mean}


def _value(critic: nn.Module, normalised: Observed) -> Tensor:
    """Value of each observation, shape (B,): every replica's part, added up."""
    parts = critic(scorer_inputs(normalised, torch)).squeeze(-1)
    total: Tensor = parts.masked_fill(~normalised.routable, 0.0).sum(-1)
    return total


def scalar_network(num_inputs: int, hidden: list[int]) -> nn.Sequential:
    """Network of tanh units from so many inputs to one number."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(num_inputs, width), nn.Tanh()]
        num_inputs = width
    return nn.Sequential(*layers, nn.Linear(num_inputs, 1))
