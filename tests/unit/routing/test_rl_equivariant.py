"""Networks that score every replica alike: what they are of, blind to, and exported as."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.utils import update_target_network
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer
from scipy.special import log_softmax

from tokenyard.rl.routing.equivariant import EXPLORED_SLOS, LAYOUT, EquivariantActorCritic
from tokenyard.rl.routing.export import export_policy
from tokenyard.rl.routing.training import build_config, equivariant
from tokenyard.routing.artifact import PolicyArtifact, learned_policy
from tokenyard.routing.equivariant import rule_costs, scorer_inputs
from tokenyard.routing.observation import (
    NUM_MARGINAL_WEIGHTS,
    NUM_REQUEST_FEATURES,
    NUM_RULE_FEATURES,
)
from tokenyard.routing.policies import PolicyContext, make_policy
from tokenyard.routing.scenario import load_scenario
from tokenyard.routing.scores.linear import marginal_scores
from tokenyard.routing.simulator import make_simulator
from tokenyard.routing.simulator.streams import StreamSource, stream_rng
from tokenyard.routing.validation import Validation

ALGORITHMS = ("ppo", "a2c", "dqn")
MIXED, CHURN, LOCAL, SERIAL = "azure_code_mixed_gpus", "churn", "local_cpu", "poisson_085"
TUNED = tuple(np.linspace(-0.2, 0.3, NUM_MARGINAL_WEIGHTS).tolist())


def spaces(num_replicas):
    return Box(-20, 20, (LAYOUT.size(num_replicas),), np.float32), Discrete(num_replicas)


def a_module(algorithm, num_replicas=4, recipe=None, rule_weights=TUNED):
    """The learner's module of an algorithm, built without starting anything."""
    recipe = recipe or equivariant()
    config = build_config(algorithm, recipe, "unused", {}, rule_weights=rule_weights)
    torch.manual_seed(0)
    spec = config.get_rl_module_spec(spaces={DEFAULT_MODULE_ID: spaces(num_replicas)})
    return spec.build()


def disturb(module):
    """Give every weight and buffer a value that no code path can hide."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3, generator=rng)
        for one in (module.normaliser.request, module.normaliser.replica):
            one.mean.normal_(0.0, 0.5, generator=rng)
            one.variance.uniform_(0.0, 2.0, generator=rng)
    return module


def preferences(module, observations):
    """Logits or Q-values, shape (num, num_replicas)."""
    batch = {Columns.OBS: torch.from_numpy(np.atleast_2d(observations))}
    with torch.no_grad():
        if isinstance(module, EquivariantActorCritic):
            return module.forward_inference(batch)[Columns.ACTION_DIST_INPUTS].numpy()
        return module.compute_q_values(batch)["qf_preds"].numpy()


def a_run(scenario, num_requests=300):
    """A cluster under load; a scenario or the name of one."""
    source = StreamSource(load_scenario(scenario) if isinstance(scenario, str) else scenario)
    sim = make_simulator(source.scenario, 1, num_requests)
    sim.show_rule(source.mean_total_tokens)
    sim.load(0, source.sample(num_requests, stream_rng(5, "validation")))
    return source, sim


def driven_at_random(sim, seed=0):
    """Observation after observation of a cluster that fills up, the request still to be placed."""
    rng = np.random.default_rng(seed)
    observations = sim.observe()
    while sim.undecided():
        yield observations[0].copy()
        action = rng.choice(sim.view().offered())
        observations, _ = sim.step_and_observe(np.array([action]))


def with_flags(num_replicas, routable, seed=0):
    """An observation with these flags, and everything else at random."""
    rng = np.random.default_rng(seed)
    observation = rng.uniform(0, 2, LAYOUT.size(num_replicas)).astype(np.float32)
    request, rows, rule = parts(observation)
    rows[:, -1] = routable
    return np.concatenate([request, rows.ravel(), rule.ravel()])


def parts(observation):
    """The request, and what is shown of every replica and of its costs."""
    rest = observation[NUM_REQUEST_FEATURES:]
    num = len(rest) // (LAYOUT.numbers_per_replica + NUM_RULE_FEATURES)
    end = num * LAYOUT.numbers_per_replica
    request, rows, rule = observation[:NUM_REQUEST_FEATURES], rest[:end], rest[end:]
    return request, rows.reshape(num, -1), rule.reshape(num, -1)


def of_replicas(observation, which):
    """An observation of these replicas alone, in this order."""
    request, rows, rule = parts(observation)
    return np.concatenate([request, rows[which].ravel(), rule[which].ravel()])


def below_best(preferences):
    """By how much each choice is worse than the best; what all share decides nothing."""
    return preferences - preferences.max()


@pytest.mark.parametrize("scenario", [MIXED, SERIAL])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_fresh_network_is_the_rule_that_it_begins_with(algorithm, scenario):
    source, sim = a_run(scenario)
    num = source.scenario.num_servers
    module = a_module(algorithm, num, rule_weights=(0.0,) * NUM_MARGINAL_WEIGHTS)
    context = PolicyContext(scenario, source.scenario.slo, np.random.default_rng(0), num)
    policy = make_policy("marginal_delay", context)
    agreed = [
        preferences(module, observation)[0].argmax()
        == policy.route(sim.view().request(), sim.view().snapshots())
        for observation in driven_at_random(sim)
    ]
    # Not always: the fresh network's small outputs decide between nearly equal replicas.
    assert np.mean(agreed) > 0.9


def test_costs_made_from_what_is_shown_are_those_of_the_rule():
    source, sim = a_run(MIXED)
    weights, costs = np.array(TUNED), np.empty(4)
    for observation in driven_at_random(sim):
        request = sim.view().request()
        context = request.context_tokens
        marginal_scores(
            weights, context, request.predicted_total_tokens - context, source.mean_total_tokens,
            source.scenario.slo_response_s, sim.arrays.tables[0], costs,
        )  # fmt: skip
        rule = LAYOUT.split_observation(observation, np).rule
        assert rule_costs(rule, weights, np) == pytest.approx(costs, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("scenario", "recipe"),
    [(MIXED, equivariant()), (LOCAL, equivariant()), (SERIAL, equivariant()),
     (LOCAL, equivariant().from_scratch()), (SERIAL, equivariant().from_scratch())],
    ids=["mixed", "local", "serial", "local_from_scratch", "serial_from_scratch"],
)  # fmt: skip
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_trainer_and_server_pick_the_same_replica_on_the_same_snapshots(
    algorithm, scenario, recipe, tmp_path
):
    source, sim = a_run(scenario)
    module = disturb(a_module(algorithm, source.scenario.num_servers, recipe))
    export_policy(module, source, algorithm).save(tmp_path / "policy.npz")
    artifact = PolicyArtifact.load(tmp_path / "policy.npz")
    assert artifact.needs_engine == (source.scenario.fleet is not None)
    policy = learned_policy(artifact)
    for observation in driven_at_random(sim):
        trained = below_best(preferences(module, observation)[0])
        decision = policy.decide(sim.view().request(), sim.view().snapshots())
        prefers = below_best(-(module.residual_scale or 1.0) * np.array(decision.scores))
        assert prefers == pytest.approx(trained, rel=1e-3, abs=1e-2)
        assert decision.replica == trained.argmax()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_replicas_that_take_no_requests_change_nothing_for_the_others(algorithm):
    scenario = load_scenario(CHURN)
    churn = scenario.fleet.churn.model_copy(update={"mean_up_s": 10.0, "mean_down_s": 5.0})
    unsteady = scenario.fleet.model_copy(update={"churn": churn})
    _, sim = a_run(scenario.model_copy(update={"fleet": unsteady}))
    module = disturb(a_module(algorithm, 5))
    partly = 0
    for observation in driven_at_random(sim):
        offered = sim.view().offered()
        seen = preferences(module, observation)[0]
        assert np.isfinite(seen[offered]).all()
        assert np.isneginf(np.delete(seen, offered)).all()
        alone = preferences(module, of_replicas(observation, offered))[0]
        np.testing.assert_allclose(alone, seen[offered], rtol=1e-3, atol=1e-3)
        partly += len(offered) < 5
    assert partly > 50


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_permuting_replicas_permutes_preferences_and_leaves_the_value(algorithm):
    module = disturb(a_module(algorithm, 6))
    observation = with_flags(6, [1, 1, 0, 1, 1, 1])
    order = np.random.default_rng(0).permutation(6)
    other = of_replicas(observation, order)
    one, two = preferences(module, observation)[0], preferences(module, other)[0]
    np.testing.assert_allclose(two, one[order], rtol=1e-4)
    if isinstance(module, EquivariantActorCritic):
        batch = {Columns.OBS: torch.from_numpy(np.stack([observation, other]))}
        first, second = module.compute_values(batch).tolist()
        assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.parametrize("num_replicas", [1, 2, 9])
def test_one_network_decides_between_any_number_of_replicas(num_replicas):
    source, sim = a_run(LOCAL)
    module = disturb(a_module("ppo", 3))
    artifact = export_policy(module, source, "ppo")
    which = np.arange(num_replicas) % 3
    for _ in range(100):
        sim.step(np.zeros(1, dtype=np.int64))
    trained = preferences(module, of_replicas(sim.observe()[0], which))[0]
    snapshots = sim.view().snapshots()
    decided = learned_policy(artifact).decide(sim.view().request(), [snapshots[i] for i in which])
    assert len(decided.scores) == len(trained) == num_replicas
    # Replicas in the same state are worth the same.
    assert trained == pytest.approx(trained[which], rel=1e-4)


def test_an_observation_without_what_rules_are_made_of_is_refused():
    config = build_config("ppo", equivariant(), "unused", {})
    short = Box(-20, 20, (LAYOUT.size(4) - 1,), np.float32), Discrete(4)
    with pytest.raises(ValueError, match="give the environment shows_rule"):
        config.get_rl_module_spec(spaces={DEFAULT_MODULE_ID: short}).build()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_exploration_never_leaves_the_routable_replicas(algorithm):
    recipe = equivariant()
    curious = replace(recipe.algorithms["dqn"], epsilon=(1.0, 1.0))
    recipe = replace(recipe, algorithms={**recipe.algorithms, "dqn": curious})
    module = disturb(a_module(algorithm, 4, recipe=recipe))
    batch = np.stack([with_flags(4, [0, 1, 0, 1], seed) for seed in range(200)])
    batch = {Columns.OBS: torch.from_numpy(batch)}
    if algorithm == "dqn":
        actions = module.forward_exploration(batch, t=0)[Columns.ACTIONS]
    else:
        logits = module.forward_exploration(batch)[Columns.ACTION_DIST_INPUTS]
        actions = module.get_exploration_action_dist_cls().from_logits(logits).sample()
    assert set(actions.tolist()) == {1, 3}


def test_dqn_explores_only_what_is_nearly_as_good_as_the_best(monkeypatch):
    dqn = replace(equivariant().algorithms["dqn"], epsilon=(1.0, 1.0))
    module = a_module("dqn", 4, recipe=replace(equivariant(), algorithms={"dqn": dqn}))
    near = EXPLORED_SLOS * module.residual_scale
    q = torch.tensor([-0.5 * near, 0.0, -2.0 * near, -torch.inf]).repeat(200, 1)
    monkeypatch.setattr(module, "compute_q_values", lambda batch: {"qf_preds": q})
    assert set(module.forward_exploration({}, t=0)[Columns.ACTIONS].tolist()) == {0, 1}


def test_dqn_without_a_correction_pays_nothing_for_it():
    module = a_module("dqn", 4)
    seen = torch.from_numpy(np.stack([with_flags(4, [1, 0, 1, 1], seed) for seed in range(9)]))
    batch = {Columns.OBS: seen}

    def corrections():
        return module.corrections(seen, module.compute_q_values(batch)["qf_preds"])

    added = module.af.network(
        scorer_inputs(module.normaliser(LAYOUT.split_observation(seen, torch)), torch)
    ).squeeze(-1)[:, [0, 2, 3]]
    torch.testing.assert_close(
        corrections()[:, [0, 2, 3]], added - added.mean(-1, keepdim=True), rtol=1e-4, atol=1e-5
    )
    assert (corrections()[:, 1] == 0.0).all()
    torch.nn.init.zeros_(module.af.network[-1].weight)
    torch.testing.assert_close(corrections(), torch.zeros(9, 4), rtol=0.0, atol=1e-5)


def test_where_no_replica_is_routable_all_are_chosen_from():
    module = disturb(a_module("ppo", 3))
    none, all_of_them = (preferences(module, with_flags(3, flag))[0] for flag in (0.0, 1.0))
    np.testing.assert_array_equal(none, all_of_them)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_update_with_replicas_that_are_not_routable_is_finite_and_moves_the_scorer(algorithm):
    config = build_config(algorithm, equivariant(), "unused", {})
    observations, actions = spaces(4)
    config = config.environment(observation_space=observations, action_space=actions)
    learner = config.build_learner()
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    update(learner, module, algorithm, observations, actions)
    after = module.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values())
    scorer = "af" if algorithm == "dqn" else "scorer"
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert f"{scorer}.network.0.weight" in moved
    assert f"{scorer}.rule_weights" not in moved
    # The same moments for every replica, of those that take requests.
    assert float(module.normaliser.replica.count) == 2 * float(module.normaliser.request.count)


def update(learner, module, algorithm, observation_space, action_space):
    num = 512
    rng = np.random.default_rng(0)
    seen = [with_flags(4, [0, 1, 0, 1], seed) for seed in range(num + 1)]
    logits = preferences(module, np.stack(seen[:-1]))
    taken = rng.choice([1, 3], num)
    episode = SingleAgentEpisode(
        observations=seen,
        actions=list(taken),
        rewards=list(-rng.exponential(size=num)),
        extra_model_outputs={
            Columns.ACTION_DIST_INPUTS: list(logits),
            Columns.ACTION_LOGP: list(log_softmax(logits, axis=1)[np.arange(num), taken]),
        },
        observation_space=observation_space,
        action_space=action_space,
        len_lookback_buffer=0,
    )
    if algorithm == "dqn":
        replay = EpisodeReplayBuffer(capacity=1000)
        replay.add([episode])
        learner.update(episodes=replay.sample(num_items=256, n_step=1, sample_episodes=True))
    elif algorithm == "a2c":
        learner.update(episodes=[episode.to_numpy()])
    else:
        learner.update(episodes=[episode.to_numpy()], minibatch_size=256, num_epochs=1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_env_runner_gets_all_it_decides_with_and_no_critic(algorithm):
    config = build_config(algorithm, equivariant(), "unused", {})
    observations, actions = spaces(4)
    spec = config.get_rl_module_spec(spaces={DEFAULT_MODULE_ID: (observations, actions)})
    learners = disturb(spec.build())
    spec.inference_only = True
    runners = spec.build()
    runners.set_state(learners.get_state(inference_only=True))
    assert not any("critic" in name or "target" in name for name in runners.state_dict())
    observation = with_flags(4, [1, 0, 1, 1])
    np.testing.assert_array_equal(
        preferences(runners, observation), preferences(learners, observation)
    )


def test_the_target_network_follows_the_scorer_when_it_is_told_to():
    module = a_module("dqn")
    module.make_target_networks()
    with torch.no_grad():
        module.af.network[0].weight.add_(1.0)
    observation = with_flags(4, 1.0)
    batch = {Columns.OBS: torch.from_numpy(observation[None])}
    main, target = (f(batch)["qf_preds"] for f in (module.compute_q_values, module.forward_target))
    assert not torch.allclose(main, target)
    for one, other in module.get_target_network_pairs():
        update_target_network(main_net=one, target_net=other, tau=1.0)
    torch.testing.assert_close(module.forward_target(batch)["qf_preds"], main)


@pytest.mark.parametrize("scenario", [MIXED, CHURN, SERIAL])
def test_validation_of_a_fresh_network_is_that_of_its_rule(scenario):
    source = StreamSource(load_scenario(scenario).model_copy(update={"requests_per_stream": 600}))
    module = a_module("ppo", source.scenario.num_servers, rule_weights=TUNED)
    network = export_policy(module, source, "ppo")
    metadata = network.metadata.model_copy(update={"kind": "marginal", "trainer": "policy_search"})
    validate = Validation(source, num_streams=2)
    ours, rule = validate(network), validate(PolicyArtifact(metadata, {"weights": np.array(TUNED)}))
    assert ours["mean_response_s"] == pytest.approx(rule["mean_response_s"], rel=0.05)
