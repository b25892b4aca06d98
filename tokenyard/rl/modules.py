"""Networks of the RLlib algorithms: the stock ones, with a normaliser of the observation.

It lives in buffers of the module, so that it travels with the weights to the env runners, into
checkpoints and into the artifact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.dqn.default_dqn_rl_module import QF_PREDS
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from torch import Tensor, nn

from tokenyard.types import FloatArray

NORMALISE = "normalise"
"""Key of a module's `model_config`: whether observations are normalised (bool)."""
RESIDUAL_SCALE = "residual_scale"
"""Key of a module's `model_config`: what an SLO of the rule's cost lowers a preference by."""

SMALLEST_STD = 0.1
"""A number that hardly varied in training is divided by this: a rare value stays small."""
OUTPUT_GAIN = 0.01
"""Factor on the initial output weights: a fresh network hardly disturbs what it corrects."""


class RunningNormaliser(nn.Module):
    """Mean and standard deviation of all observations seen in training."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    @property
    def std(self) -> Tensor:
        """What the centred observation is divided by, shape (size,)."""
        return self.variance.sqrt().clamp_min(SMALLEST_STD)

    def forward(self, observations: Tensor) -> Tensor:
        """Normalise observations, shape (..., size)."""
        return (observations - self.mean) / self.std

    @torch.no_grad()
    def update(self, observations: Tensor) -> None:
        """Take observations of shape (num, size) into account.

        Moments of two samples are pooled as in Chan, Golub and LeVeque (1983), equation 2.1.
        """
        num = observations.shape[0]
        total = float(self.count) + num
        share = num / total
        delta = observations.mean(0) - self.mean
        variance = observations.var(0, unbiased=False)
        self.variance.mul_(1.0 - share).add_(share * variance + share * (1.0 - share) * delta**2)
        self.mean.add_(share * delta)
        self.count.fill_(total)


class UpdateNormaliser(ConnectorV2):
    """Learner connector: shows the module's normaliser every training batch once."""

    def __call__(self, *, rl_module: Any, episodes: list[Any], batch: Any, **_: Any) -> Any:
        """Update from the observations of `episodes`; the batch passes unchanged."""
        seen = np.concatenate([episode.get_observations() for episode in episodes])
        rl_module[DEFAULT_MODULE_ID].unwrapped().observe(torch.from_numpy(seen))
        return batch


class Observes:
    """Part of a module whose `normaliser` learns what observations look like."""

    normaliser: Any
    observation_space: Any
    model_config: dict[str, Any]
    output_gain = OUTPUT_GAIN
    """Factor on the initial output weights."""

    def observe(self, observations: Tensor) -> None:
        """Let the normaliser, if there is one, learn from observations of shape (num, size)."""
        buffers = list(self.normaliser.buffers())
        if buffers:
            self.normaliser.update(observations.to(buffers[0].device))

    def _add_normaliser(self) -> None:
        size = self.observation_space.shape[0]
        normalise = self.model_config.get(NORMALISE, False)
        self.normaliser = RunningNormaliser(size) if normalise else nn.Identity()

    def _normalised(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, Columns.OBS: self.normaliser(batch[Columns.OBS])}

    def _adjusted(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        """What outputs become, given the observations as they were: themselves."""
        return outputs


def linear_layers(network: nn.Module) -> list[nn.Linear]:
    """Linear layers of a network, first layer first."""
    return [layer for layer in network.modules() if isinstance(layer, nn.Linear)]


@torch.no_grad()
def shrink_last_layer(network: nn.Module, gain: float = OUTPUT_GAIN) -> None:
    """Make a fresh network nearly silent."""
    last = linear_layers(network)[-1]
    last.weight.mul_(gain)
    last.bias.zero_()


class ActorCritic(Observes, DefaultPPOTorchRLModule):
    """Actor and critic of PPO and A2C that look at normalised observations."""

    def setup(self) -> None:
        """Build the networks that RLlib ships, and a nearly silent output; then the normaliser."""
        super().setup()
        shrink_last_layer(self.pi, self.output_gain)
        self._add_normaliser()

    @property
    def policy_layers(self) -> list[nn.Linear]:
        """Linear layers from observation to outputs; ReLU stands between them."""
        return [*linear_layers(self.encoder.actor_encoder), *linear_layers(self.pi)]

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """Value of each observation, shape (num,)."""
        values: Tensor = super().compute_values(self._normalised(batch), embeddings)
        return values

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._with_adjusted(super()._forward(self._normalised(batch), **kwargs), batch)

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._with_adjusted(super()._forward_train(self._normalised(batch), **kwargs), batch)

    def _with_adjusted(self, output: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
        inputs = self._adjusted(output[Columns.ACTION_DIST_INPUTS], batch)
        return {**output, Columns.ACTION_DIST_INPUTS: inputs}


class QNetwork(Observes, DefaultDQNTorchRLModule):
    """Q-network of DQN: the target network shares the normaliser, and what adjusts the outputs."""

    def setup(self) -> None:
        """As of `ActorCritic`."""
        super().setup()
        shrink_last_layer(self.af, self.output_gain)
        self._add_normaliser()

    @property
    def policy_layers(self) -> list[nn.Linear]:
        """Linear layers from observation to Q-values; ReLU stands between them."""
        return [*linear_layers(self.encoder), *linear_layers(self.af)]

    def _qf_forward_helper(self, batch: dict[str, Any], encoder: Any, head: Any) -> dict[str, Any]:
        output = super()._qf_forward_helper(self._normalised(batch), encoder, head)
        return {**output, QF_PREDS: self._adjusted(output[QF_PREDS], batch)}


def module_spec(module: type[Any], hidden: Iterable[int], **extra: Any) -> RLModuleSpec:
    """What RLlib builds a module from; `hidden` are widths of layers, of actor and critic alike.

    `extra` are further keys of `model_config`.
    """
    networks = DefaultModelConfig(
        fcnet_hiddens=list(hidden), fcnet_activation="relu", vf_share_layers=False
    )
    return RLModuleSpec(module_class=module, model_config={**asdict(networks), **extra})


def moment_arrays(normaliser: RunningNormaliser, prefix: str = "") -> dict[str, FloatArray]:
    """Mean and standard deviation of observations, as an artifact keeps them."""
    return {
        f"{prefix}mean": _float64(normaliser.mean),
        f"{prefix}std": _float64(normaliser.std),
    }


def layer_arrays(layers: Iterable[tuple[Tensor, Tensor]]) -> dict[str, FloatArray]:
    """Weights and biases, first layer first, as an artifact keeps them."""
    arrays = {}
    for index, (weight, bias) in enumerate(layers):
        arrays[f"w{index}"], arrays[f"b{index}"] = _float64(weight), _float64(bias)
    return arrays


def weights_of(layers: Iterable[nn.Linear]) -> list[tuple[Tensor, Tensor]]:
    """Weights, shape (outputs, inputs), and biases of layers."""
    return [(layer.weight, layer.bias) for layer in layers]


def _float64(tensor: Tensor) -> FloatArray:
    array: FloatArray = tensor.detach().cpu().numpy().astype(np.float64)
    return array
