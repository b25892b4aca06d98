"""A2C's update is what Mnih et al. define, through RLlib's whole learner."""

import gymnasium
import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.learner import VF_LOSS_KEY
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from tokenyard.rl.columnar.a2c import A2CConfig, A2CTorchLearner

OBSERVATIONS = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
ACTIONS = gymnasium.spaces.Discrete(2)


class RecordingLearner(A2CTorchLearner):
    """Keeps the gradients of the last update, before they are clipped."""

    def compute_gradients(self, loss_per_module, **kwargs):
        gradients = super().compute_gradients(loss_per_module, **kwargs)
        # Copies: clipping works in place.
        self.recorded = {ref: gradient.clone() for ref, gradient in gradients.items()}
        return gradients


def a_learner(**training):
    config = A2CConfig().environment(observation_space=OBSERVATIONS, action_space=ACTIONS)
    config = config.training(**training).learners(learner_class=RecordingLearner)
    learner = config.build_learner()
    return learner, learner.module[DEFAULT_MODULE_ID]


def a_rollout(module, rewards, seed=0):
    """Steps of the policy that is to be updated."""
    rng = np.random.default_rng(seed)
    num = len(rewards)
    observations = rng.uniform(-1, 1, (num + 1, 3)).astype(np.float32)
    actions = rng.integers(0, 2, num)
    with torch.no_grad():
        output = module.forward_train({"obs": torch.from_numpy(observations[:-1])})
    logits = output[Columns.ACTION_DIST_INPUTS]
    log_probs = torch.log_softmax(logits, dim=1)[torch.arange(num), torch.from_numpy(actions)]
    return SingleAgentEpisode(
        observations=list(observations),
        actions=list(actions),
        rewards=list(rewards),
        extra_model_outputs={
            Columns.ACTION_DIST_INPUTS: list(logits.numpy()),
            Columns.ACTION_LOGP: log_probs.tolist(),
        },
        observation_space=OBSERVATIONS,
        action_space=ACTIONS,
        len_lookback_buffer=0,
    ).to_numpy()


def definition(module, episodes, gamma, value_weight, entropy_weight):
    """The loss of one update, from n-step returns bootstrapped at the end of each rollout."""
    policy_terms, value_terms, entropies = [], [], []
    for episode in episodes:
        observations = torch.from_numpy(np.array(episode.get_observations()))
        values = module.compute_values({"obs": observations})
        logits = module.forward_train({"obs": observations[:-1]})["action_dist_inputs"]
        log_probs = torch.log_softmax(logits, dim=1)
        future = values[-1].detach()
        for t in reversed(range(len(episode))):
            future = float(episode.get_rewards(t)) + gamma * future
            advantage = (future - values[t]).detach()
            policy_terms.append(-advantage * log_probs[t, int(episode.get_actions(t))])
            value_terms.append((values[t] - future) ** 2)
            entropies.append(-(log_probs[t].exp() * log_probs[t]).sum())
    policy, value, entropy = (
        torch.stack(terms).mean() for terms in (policy_terms, value_terms, entropies)
    )
    return policy + value_weight * value - entropy_weight * entropy


def test_the_gradient_is_that_of_the_definition_on_a_fixed_batch():
    learner, module = a_learner(gamma=0.9, lambda_=1.0, vf_loss_coeff=0.7, entropy_coeff=0.05)
    episodes = [a_rollout(module, [1.0, -2.0, 0.5], 1), a_rollout(module, [3.0, 0.0], 2)]
    parameters = list(module.parameters())
    loss = definition(module, episodes, gamma=0.9, value_weight=0.7, entropy_weight=0.05)
    expected = torch.autograd.grad(loss, parameters)

    learner.update(episodes=episodes)

    found = [learner.recorded[learner.get_param_ref(parameter)] for parameter in parameters]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_value_targets_are_generalised_advantages_computed_by_hand():
    # V = 2 everywhere, rewards 1, 2, 3, gamma = lambda = 0.5: TD errors 0, 1, 2, advantages
    # 2, then 1 + 0.25 * 2 = 1.5, then 0 + 0.25 * 1.5 = 0.375; the critic's error is as large.
    learner, module = a_learner(gamma=0.5, lambda_=0.5)
    with torch.no_grad():
        head = [layer for layer in module.vf.modules() if isinstance(layer, torch.nn.Linear)][-1]
        head.weight.zero_()
        head.bias.fill_(2.0)

    results = learner.update(episodes=[a_rollout(module, [1.0, 2.0, 3.0])])

    value_loss = float(results[DEFAULT_MODULE_ID][VF_LOSS_KEY].peek())
    assert value_loss == pytest.approx((0.375**2 + 1.5**2 + 2.0**2) / 3)


def test_doubling_all_rewards_doubles_the_policy_gradient_of_a_blank_critic():
    """RLlib standardises advantages, which would hide the scale: A2C must not."""
    gradients = []
    for factor in (1.0, 2.0):
        learner, module = a_learner(gamma=0.9, lambda_=1.0, entropy_coeff=0.0)
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(0.0, 0.1)
            for parameter in module.vf.parameters():
                parameter.zero_()
        learner.update(episodes=[a_rollout(module, [factor, -factor, 3 * factor])])
        weight = next(module.pi.parameters())
        gradients.append(learner.recorded[learner.get_param_ref(weight)])
    torch.testing.assert_close(gradients[1], 2.0 * gradients[0])
