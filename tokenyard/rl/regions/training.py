"""Learners of regions behind one interface: PPO and A2C on the environment.

`torta_faithful` is the TORTA paper's recipe (Du et al. 2025, arXiv 2507.10259v2, section V-B and
appendix B): networks of 256-512-256, free shares, PPO with the loss of Eq 5, whose weights grow
while its constraints are broken. Ours, as the paper gives no values: gamma0 1, delta0 0.1, growth
rates 1, eps0 and s0 the targets themselves, both weights at most 100; and the constraints are taken
on the mean of the policy's distribution, since sampled actions have no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.columns import Columns

from tokenyard.regions.artifact import RegionArtifact, RegionMetadata
from tokenyard.regions.demand import sample_stream, stream_rng
from tokenyard.regions.evaluation import measure
from tokenyard.regions.forecast import fit_seasonal
from tokenyard.regions.observation import LOGIT_SCALE, action_size
from tokenyard.regions.policies import make_region_policy
from tokenyard.regions.scenario import PAPER_REWARD, RegionReward, RegionScenario
from tokenyard.regions.servers import make_cluster
from tokenyard.regions.simulator.run import run_regions
from tokenyard.rl import modules
from tokenyard.rl.algorithms import CLIPPED, flat_numbers, hyperparameters, ppo_config
from tokenyard.rl.columnar.a2c import A2CConfig
from tokenyard.rl.columnar.sampling import Implementation, with_sampling
from tokenyard.rl.trainable import TrialConfig
from tokenyard.rl.training import RllibLearner, Training

NUM_ENVS = 10
"""Copies of the environment that one env runner steps at once."""
_EPISODES_PER_BATCH = 10
_PAPER_HIDDEN, _HIDDEN = (256, 512, 256), (128, 128)
_FIRST_LOG_STD = -2.0
"""Of a fresh policy; in logits a spread of 0.7."""
_EPS_TARGET, _S_TARGET = 0.15, 2.5
_GAMMA0, _DELTA0, _MOST = 1.0, 0.1, 100.0


class RegionActorCritic(modules.ActorCritic):
    """Actor and critic whose first actions are near their mean."""

    def setup(self) -> None:
        """Build the networks that RLlib ships, then narrow the first distribution."""
        super().setup()
        bias = self.policy_layers[-1].bias
        with torch.no_grad():
            bias[len(bias) // 2 :] = _FIRST_LOG_STD


class ConstrainedPPOLearner(PPOTorchLearner):
    """PPO with the two constraints of the paper's Eq 5; see the module."""

    def compute_loss_for_module(
        self, *, module_id: Any, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> torch.Tensor:
        """Add what distance from transport and lack of smoothness cost to the loss of PPO."""
        loss = super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )
        inputs = fwd_out[Columns.ACTION_DIST_INPUTS]
        distance, smoothness = constraint_values(
            inputs[..., : inputs.shape[-1] // 2],
            batch[Columns.OBS],
            float(config.learner_config_dict["reactive_step"]),
        )
        off, rough = torch.relu(distance - _EPS_TARGET), torch.relu(_S_TARGET - smoothness)
        gamma = (_GAMMA0 * off.detach().exp()).clamp_max(_MOST)
        delta = (_DELTA0 * rough.detach().exp()).clamp_max(_MOST)
        self.metrics.log_dict(
            {"transport_distance": distance.item(), "smoothness": smoothness.item()},
            key=module_id,
            window=1,
        )
        total: torch.Tensor = loss + gamma * off / _EPS_TARGET + delta * rough / _S_TARGET
        return total


def constraint_values(
    means: torch.Tensor, observations: torch.Tensor, reactive_step: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distance from transport and smoothness s of mean actions, means over a batch.

    Args:
        means: Of the actions, shape (num, R * R).
        observations: With the last shares and those of transport at their end.
        reactive_step: K0, mean squared step of what reacts without smoothing.
    """
    size = means.shape[-1]
    regions = int(size**0.5)
    logits = LOGIT_SCALE * means.clamp(-1.0, 1.0).reshape(-1, regions, regions)
    shares = logits.softmax(-1).reshape(-1, size)
    distance = (shares - observations[..., -size:]).norm(dim=-1).mean()
    step = (shares - observations[..., -2 * size : -size]).square().sum(-1).mean()
    return distance, reactive_step / step.clamp_min(1e-9)


class RegionRllib(RllibLearner[RegionScenario]):
    """PPO or A2C over the regional environment of one scenario."""

    def artifact(self, metrics: Mapping[str, float], lineage: Mapping[str, str]) -> RegionArtifact:
        """The mean of the present policy."""
        module, env_config = self.module, self._config.env_config
        # The second half of the outputs is the logarithm of the spread.
        size = action_size(make_cluster(self._trained_for).num_regions, env_config["action"])
        *hidden, (weight, bias) = modules.weights_of(module.policy_layers)
        layers = [*hidden, (weight[:size], bias[:size])]
        arrays = modules.moment_arrays(module.normaliser) | modules.layer_arrays(layers)
        metadata = RegionMetadata(
            kind="network",
            action=env_config["action"],
            dispatch=env_config["dispatch"],
            scenarios=(self._trained_for.name,),
            trainer=self._trainer,
            metrics=metrics,
            lineage=lineage,
        )
        return RegionArtifact(metadata, arrays)


def reactive_step(scenario: RegionScenario, seed: int) -> float:
    """K0: mean squared step of the shares of transport that goes by the last slot's arrivals."""
    stream = sample_stream(scenario, stream_rng(seed, "training", 0))
    policy = make_region_policy("ot_slack", scenario)
    outcomes = run_regions(scenario, stream, policy, fit_seasonal(scenario))
    return measure(outcomes)["shares_step"]


class RegionTrialConfig(TrialConfig):
    """What a regional trial is made from; its steps are intervals."""

    algorithm: Literal["ppo", "a2c", "torta_faithful"]
    env: str = "RegionEnv"
    """Name that the environment is registered under with RLlib."""
    implementation: Implementation = "rllib_stock"
    reward_weights: Literal["cost", "paper"] = "cost"
    """Dollars, or the paper's Eq 3."""

    def hyperparameters(self, scenario: RegionScenario) -> dict[str, float | str]:
        """Reward, learner and network."""
        rewarded = flat_numbers(self._reward, "reward.")
        return rewarded | hyperparameters(self.algorithm_config(scenario))

    def make_training(self, scenario: RegionScenario) -> Training[RegionArtifact]:
        """Build the learner that the fields name."""
        return RegionRllib(self.algorithm_config(scenario), scenario, self.algorithm)

    @property
    def _reward(self) -> RegionReward:
        named = RegionReward() if self.reward_weights == "cost" else PAPER_REWARD
        return RegionReward.model_validate(named.model_dump() | dict(self.weights))

    def algorithm_config(self, scenario: RegionScenario) -> AlgorithmConfig:
        """Configure the algorithm."""
        # The paper's policy sends by its shares, which are free, and by nothing else.
        faithful = self.algorithm == "torta_faithful"
        batch_size = _EPISODES_PER_BATCH * scenario.num_slots
        spec = modules.module_spec(
            RegionActorCritic, _PAPER_HIDDEN if faithful else _HIDDEN, **{modules.NORMALISE: True}
        )
        config = _base(self, scenario, batch_size).training(**self.training)
        config = config.rl_module(rl_module_spec=spec).environment(
            self.env,
            env_config={
                "scenario": scenario.model_dump(),
                "action": "shares" if faithful else "mix",
                "dispatch": "shares" if faithful else "live_cost",
                "reward": self._reward.model_dump(),
            },
        )
        return with_sampling(
            config,
            self.algorithm,
            self,
            num_envs=NUM_ENVS,
            fragment_steps=max(1, batch_size // NUM_ENVS // max(self.num_env_runners, 1)),
            normalise=True,
        )


def _base(trial: RegionTrialConfig, scenario: RegionScenario, batch_size: int) -> AlgorithmConfig:
    common: dict[str, Any] = {
        **CLIPPED,
        "gamma": 0.99,
        "lambda_": 0.95,
        "entropy_coeff": 0.0,
        "train_batch_size_per_learner": batch_size,
    }
    if trial.algorithm == "a2c":
        return A2CConfig().training(lr=3e-4, **common)
    # The learning rate of appendix B: 0.995 of it is left after every hundred episodes.
    left = 0.995 ** (trial.env_steps / (100 * scenario.num_slots))
    config = ppo_config(
        lr=[[0, 3e-4], [trial.env_steps, 3e-4 * left]],
        minibatch_size=480,
        num_epochs=10,
        **common,
    )
    if trial.algorithm == "torta_faithful":
        config = config.training(
            learner_class=ConstrainedPPOLearner,
            learner_config_dict={"reactive_step": reactive_step(scenario, trial.seed)},
        )
    return config
