"""The slim learners compute what RLlib's compute: losses, gradients, steps, metrics."""

import logging
from dataclasses import asdict, replace

import gymnasium
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.dqn.torch.dqn_torch_learner import DQNTorchLearner
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from unit.rl_builders import a_rollout, fragments

from tokenyard.allocation.observation import ALLOWED
from tokenyard.rl.allocation.modules import PLANNER_SCALE, AllocationActorCritic
from tokenyard.rl.columnar.a2c import A2CConfig, A2CTorchLearner
from tokenyard.rl.columnar.actions import actions_of
from tokenyard.rl.columnar.columns import Transitions
from tokenyard.rl.columnar.learners import (
    A2CColumnarLearner,
    DQNColumnarLearner,
    PPOColumnarLearner,
)
from tokenyard.rl.modules import NORMALISE, ActorCritic, QNetwork, UpdateNormaliser

NUM_ACTIONS = 3
OBSERVATIONS = gymnasium.spaces.Box(-20.0, 20.0, (4,), np.float32)
ACTIONS = gymnasium.spaces.Discrete(NUM_ACTIONS)
SEEN_BY_ALLOCATORS = gymnasium.spaces.Box(-5.0, 5.0, (20,), np.float32)
SPACES = {
    "choice": (OBSERVATIONS, ACTIONS),
    "box": (OBSERVATIONS, gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)),
    "masked": (SEEN_BY_ALLOCATORS, gymnasium.spaces.Discrete(4)),
}
"""What is seen and done: by routers, between regions, by allocators."""
KEPT = {kind: actions_of(actions) for kind, (_, actions) in SPACES.items()}

CONFIGS = {"ppo": PPOConfig, "a2c": A2CConfig, "dqn": DQNConfig}
STOCK = {"ppo": PPOTorchLearner, "a2c": A2CTorchLearner, "dqn": DQNTorchLearner}
OURS = {"ppo": PPOColumnarLearner, "a2c": A2CColumnarLearner, "dqn": DQNColumnarLearner}
"""Learners by algorithm."""


def a_learner(algorithm, learner_class, normalise=False, kind="choice", **training):
    """A built learner; equal arguments give equal weights."""
    defaults = {"grad_clip": 0.5, "grad_clip_by": "global_norm", "lr": 1e-2}
    if algorithm == "dqn":
        defaults |= {"num_atoms": 1, "dueling": False, "double_q": True}
    model = DefaultModelConfig(
        fcnet_hiddens=[16, 16], fcnet_activation="relu", vf_share_layers=False
    )
    seen, actions = SPACES[kind]
    module = AllocationActorCritic if kind == "masked" else ActorCritic
    module = QNetwork if algorithm == "dqn" else module
    config = (
        CONFIGS[algorithm]()
        .environment(observation_space=seen, action_space=actions)
        .training(**{**defaults, **training})
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=module,
                model_config={**asdict(model), NORMALISE: normalise, PLANNER_SCALE: 1.0},
            )
        )
        .learners(
            learner_class=learner_class,
            learner_connector=(lambda *_: UpdateNormaliser()) if normalise else None,
        )
        .debugging(seed=5)
    )
    torch.manual_seed(7)
    learner = config.build_learner()
    rng = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in learner.module[DEFAULT_MODULE_ID].parameters():
            parameter.normal_(0.0, 0.4, generator=rng)
    return learner


def observed(kind, *shape, generator):
    """What is seen; of a third of the allocators no change is allowed."""
    if kind != "masked":
        return torch.randn((*shape, 4), generator=generator)
    seen = torch.randn((*shape, 20), generator=generator).clamp(-5, 5)
    seen[..., ALLOWED] = (torch.rand(shape, generator=generator) > 0.3).float()
    in_force = torch.randint(0, 4, shape, generator=generator)
    seen[..., -8:-4] = torch.nn.functional.one_hot(in_force, 4).float()
    return seen


def allowed_inputs(kind, seen, generator):
    """Outputs of an older network, which chose nothing that was not allowed."""
    inputs = torch.randn((*seen.shape[:-1], KEPT[kind].num_inputs), generator=generator)
    if kind == "masked":
        forbidden = (seen[..., ALLOWED, None] == 0) & (seen[..., -8:-4] == 0)
        inputs.masked_fill_(forbidden, -torch.inf)
    return inputs


def on_policy_rows(num=24, seed=0, kind="choice"):
    rng = torch.Generator().manual_seed(seed)
    kept, seen = KEPT[kind], observed(kind, num, generator=rng)
    inputs = allowed_inputs(kind, seen, rng)
    actions = kept.draw(inputs, kept.noise((num,), rng))
    return {
        Columns.OBS: seen,
        Columns.ACTIONS: actions,
        Columns.ACTION_DIST_INPUTS: inputs,
        Columns.ACTION_LOGP: kept.distribution(inputs).log_prob(actions),
        Postprocessing.ADVANTAGES: torch.randn(num, generator=rng),
        Postprocessing.VALUE_TARGETS: 3.0 * torch.randn(num, generator=rng),
    }


def replayed_rows(num=24, seed=0):
    rng = np.random.default_rng(seed)
    return {
        Columns.OBS: rng.normal(size=(num, 4)).astype(np.float32),
        Columns.NEXT_OBS: rng.normal(size=(num, 4)).astype(np.float32),
        Columns.ACTIONS: rng.integers(0, NUM_ACTIONS, num),
        Columns.REWARDS: rng.normal(size=num).astype(np.float32),
        Columns.TERMINATEDS: rng.random(num) < 0.3,
        Columns.TRUNCATEDS: np.zeros(num, bool),
    }


def stock_gradients(learner, rows):
    """Loss and gradients of RLlib's own code."""
    output = learner.module[DEFAULT_MODULE_ID].forward_train(rows)
    losses = learner.compute_losses(
        fwd_out={DEFAULT_MODULE_ID: output}, batch={DEFAULT_MODULE_ID: rows}
    )
    gradients = learner.compute_gradients(losses)
    found = [None if gradient is None else gradient.clone() for gradient in gradients.values()]
    return losses[DEFAULT_MODULE_ID], found


def slim_gradients(learner, rows):
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    loss, metrics = learner.gradients(rows, module, report=True)
    # In the order of the optimiser; target networks and a critic that is not used have none.
    found = [None if one.grad is None else one.grad.clone() for one in learner._params.values()]
    return loss, found, metrics


PPO_SETTINGS = [
    {"use_kl_loss": False, "vf_clip_param": float("inf")},
    {"use_kl_loss": True, "kl_coeff": 0.3, "vf_clip_param": 1.5, "entropy_coeff": 0.02},
    {"use_kl_loss": False, "use_critic": False, "entropy_coeff": 0.1, "clip_param": 0.05},
]


@pytest.mark.parametrize(
    ("algorithm", "kind", "training"),
    [
        *(("ppo", kind, settings) for settings in PPO_SETTINGS for kind in KEPT),
        *(("a2c", kind, {"entropy_coeff": 0.0}) for kind in KEPT),
        *(("a2c", kind, {"entropy_coeff": 0.05, "vf_loss_coeff": 0.7}) for kind in KEPT),
        ("dqn", "choice", {"td_error_loss_fn": "huber"}),
        ("dqn", "choice", {"td_error_loss_fn": "mse", "double_q": False, "gamma": 0.9}),
    ],
)
def test_losses_gradients_and_metrics_are_those_of_the_stock_learner(algorithm, kind, training):
    stock = a_learner(algorithm, STOCK[algorithm], kind=kind, **training)
    ours = a_learner(algorithm, OURS[algorithm], kind=kind, **training)
    if algorithm == "dqn":
        rows = {name: torch.from_numpy(column) for name, column in replayed_rows().items()}
        rows |= {"weights": torch.ones(24), "n_step": torch.ones(24)}
    else:
        rows = on_policy_rows(kind=kind)
    if algorithm == "a2c":
        values = stock.module[DEFAULT_MODULE_ID].compute_values(rows).detach()
        rows[Postprocessing.ADVANTAGES] = rows[Postprocessing.VALUE_TARGETS] - values

    expected_loss, expected = stock_gradients(stock, rows)
    loss, found, metrics = slim_gradients(ours, rows)

    torch.testing.assert_close(loss, expected_loss)
    assert any(gradient is not None for gradient in found)
    for one, other in zip(found, expected, strict=True):
        # Densities of narrow normal distributions are large numbers: gradients go up to 1e4.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    logged = {key: stock.metrics.peek((DEFAULT_MODULE_ID, key)) for key in metrics}
    logged = {key: float(torch.as_tensor(value).detach()) for key, value in logged.items()}
    assert {key: float(value) for key, value in metrics.items()} == pytest.approx(
        logged, rel=1e-4, abs=1e-6
    )


@pytest.mark.parametrize("grad_clip_by", ["global_norm", "norm", "value"])
@pytest.mark.parametrize(
    ("algorithm", "kind"), [("ppo", "choice"), ("ppo", "box"), ("ppo", "masked"), ("dqn", "choice")]
)
def test_a_whole_update_leaves_the_weights_of_the_stock_learners_update(
    algorithm, kind, grad_clip_by
):
    """Several epochs of several minibatches, in order: 24 rows in minibatches of 10."""
    training = {"grad_clip": 0.05, "grad_clip_by": grad_clip_by}
    if algorithm == "ppo":
        training |= {"use_kl_loss": True, "entropy_coeff": 0.01, "vf_clip_param": 2.0}
    stock = a_learner(algorithm, STOCK[algorithm], kind=kind, **training)
    ours = a_learner(algorithm, OURS[algorithm], kind=kind, **training)
    timesteps = {"num_env_steps_sampled_lifetime": 0}
    plan = {"num_epochs": 3, "minibatch_size": 10}
    if algorithm == "dqn":
        columns = replayed_rows()
        sampled = [Transitions(columns)]
        rows = {name: torch.from_numpy(column) for name, column in columns.items()}
        rows |= {"weights": torch.ones(24), "n_step": torch.ones(24)}
    else:
        rows = on_policy_rows(kind=kind)
        sampled = [a_rollout(np.random.default_rng(0), 2, 12, size=4, num_actions=NUM_ACTIONS)]
        ours.batch_of = lambda sampled, module: rows
    batch = MultiAgentBatch({DEFAULT_MODULE_ID: SampleBatch(rows)}, env_steps=24)

    theirs = stock.update(training_data=TrainingData(batch=batch), timesteps=timesteps, **plan)
    found = ours.update(training_data=TrainingData(episodes=sampled), timesteps=timesteps, **plan)

    for one, other in zip(
        ours.module[DEFAULT_MODULE_ID].parameters(),
        stock.module[DEFAULT_MODULE_ID].parameters(),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    missing = set(theirs[DEFAULT_MODULE_ID]) - set(found[DEFAULT_MODULE_ID])
    # Errors of single transitions are what priorities are made from; replay here is uniform.
    assert missing <= {"td_error", "weights_seq_no"}
    for key in set(theirs[DEFAULT_MODULE_ID]) - missing:
        theirs_value, value = theirs[DEFAULT_MODULE_ID][key], found[DEFAULT_MODULE_ID][key]
        if "throughput" not in key:
            assert float(value.peek()) == pytest.approx(
                float(theirs_value.peek()), rel=1e-3, abs=1e-5
            ), key


def a_sampled_rollout(kind, num_steps=7, num_copies=5):
    """Random steps with actions drawn from random outputs of a network."""
    rng, generator = np.random.default_rng(1), torch.Generator().manual_seed(1)
    kept, shape = KEPT[kind], (num_steps, num_copies)
    seen = observed(kind, num_steps + 1, num_copies, generator=generator)
    inputs = allowed_inputs(kind, seen[:-1], generator)
    actions = kept.draw(inputs, kept.noise(shape, generator))
    return replace(
        a_rollout(rng, *shape),
        observations=seen.numpy(),
        actions=actions.numpy(),
        action_inputs=inputs.numpy(),
    )


def episodes_of(rollout, kind):
    """The same steps as RLlib's episode objects."""
    kept = KEPT[kind]
    for copy in range(rollout.actions.shape[1]):
        for start, stop in fragments(rollout, copy):
            steps = slice(start, stop), copy
            inputs = torch.from_numpy(rollout.action_inputs[steps])
            actions = torch.from_numpy(rollout.actions[steps])
            yield SingleAgentEpisode(
                observations=list(rollout.observations[start : stop + 1, copy]),
                actions=list(actions.numpy()),
                rewards=rollout.rewards[steps].tolist(),
                terminated=bool(rollout.terminated[stop - 1, copy]),
                truncated=bool(rollout.truncated[stop - 1, copy]),
                extra_model_outputs={
                    Columns.ACTION_DIST_INPUTS: list(inputs.numpy()),
                    Columns.ACTION_LOGP: kept.distribution(inputs).log_prob(actions).tolist(),
                },
                observation_space=SPACES[kind][0],
                action_space=SPACES[kind][1],
                len_lookback_buffer=0,
            ).to_numpy()


@pytest.mark.parametrize("kind", KEPT)
def test_a_rollout_and_its_episodes_make_the_same_step_of_a2c(kind):
    """From what was sampled to the new weights, through all connectors of the stock path."""
    rollout = a_sampled_rollout(kind)
    settings = {"gamma": 0.9, "lambda_": 0.8, "entropy_coeff": 0.01, "kind": kind}
    stock = a_learner("a2c", A2CTorchLearner, **settings)
    ours = a_learner("a2c", A2CColumnarLearner, **settings)
    # A connector shows RLlib's episodes to a normaliser with one observation more for each.
    ours.module[DEFAULT_MODULE_ID].unwrapped().observe = lambda seen: None

    stock.update(episodes=list(episodes_of(rollout, kind)))
    ours.update(episodes=[rollout])

    for one, other in zip(
        ours.module[DEFAULT_MODULE_ID].parameters(),
        stock.module[DEFAULT_MODULE_ID].parameters(),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_advantages_of_ppo_are_standardised_over_all_rollouts():
    rng = np.random.default_rng(2)
    sampled = [a_rollout(rng, 6, copies, size=4, num_actions=NUM_ACTIONS) for copies in (3, 5)]
    learner = a_learner("ppo", PPOColumnarLearner, normalise=True)
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    batch = learner.batch_of(sampled, module)
    advantages = batch[Postprocessing.ADVANTAGES]
    assert len(advantages) == sum(len(rollout) for rollout in sampled)
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantages.std(correction=0)) == pytest.approx(1.0, rel=1e-5)
    seen = np.concatenate([one.observations[:-1][one.real] for one in sampled])
    np.testing.assert_allclose(module.normaliser.mean, seen.mean(0), atol=1e-5)


def test_a_gradient_that_is_not_a_number_is_left_to_rllib(caplog, monkeypatch):
    # Whoever has started Ray or migrated MLflow's store in this process has cut loggers off.
    told = logging.getLogger("ray.rllib.core.learner.torch.torch_learner")
    monkeypatch.setattr(told, "handlers", [caplog.handler])
    monkeypatch.setattr(told, "disabled", False)
    caplog.set_level(logging.WARNING, logger=told.name)
    learner = a_learner("ppo", PPOColumnarLearner)
    before = [p.clone() for p in learner.module[DEFAULT_MODULE_ID].parameters()]
    rows = on_policy_rows()
    rows[Postprocessing.VALUE_TARGETS][0] = torch.nan
    learner.batch_of = lambda sampled, module: rows
    rollout = a_rollout(np.random.default_rng(0), 2, 12, size=4, num_actions=NUM_ACTIONS)
    learner.update(episodes=[rollout])
    assert any("nan/inf" in record.getMessage() for record in caplog.records)
    assert all(torch.isfinite(p).all() for p in learner.module[DEFAULT_MODULE_ID].parameters())
    assert len(before) == len(list(learner.module[DEFAULT_MODULE_ID].parameters()))


def test_what_the_columnar_path_does_not_have_is_refused_in_words():
    with pytest.raises(ValueError, match="no distributions over returns"):
        a_learner("dqn", DQNColumnarLearner, num_atoms=5)
