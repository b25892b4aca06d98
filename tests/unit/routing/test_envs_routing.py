import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from pydantic import ValidationError

import envs
from tokenyard.routing.fleet import Churn
from tokenyard.routing.observation import observation_size
from tokenyard.routing.scenario import Scenario, load_scenario, scenario_names
from tokenyard.routing.simulator import make_simulator
from tokenyard.routing.simulator.batching_kernel import layout as lay
from tokenyard.routing.simulator.streams import StreamSource, stream_rng

ORDER = (4.0, 1.0, 2.0, 1.0)
NOTHING = {"processing": 0.0, "queue": 0.0, "overload": 0.0, "balance": 0.0}
FLEETS = [name for name in scenario_names() if load_scenario(name).fleet is not None]
WORKING_REWARD = {"response": -1.0, "slo": -2.0, "accept": 0.0}


@pytest.mark.parametrize("scenario", scenario_names())
def test_every_scenario_is_a_valid_environment_without_a_warning(scenario):
    env = envs.LoadBalancingEnv(scenario=scenario, episode_requests=50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)


def test_gymnasium_makes_the_environment_and_its_vector_twin_by_name():
    envs.register()
    options = {"scenario": "nominal", "episode_requests": 5}
    single = gymnasium.make(envs.LOAD_BALANCING_ID, **options)
    many = gymnasium.make_vec(envs.LOAD_BALANCING_ID, num_envs=3, **options)
    assert single.observation_space == many.single_observation_space
    assert many.reset(seed=0)[0].shape == (3, 34)


def test_observations_of_servers_are_the_papers_unless_a_rule_is_shown():
    plain = envs.LoadBalancingEnv(scenario="poisson_085")
    shown = envs.LoadBalancingEnv(scenario="poisson_085", shows_rule=True)
    assert plain.observation_space.shape == (observation_size(3, whole=False),) == (34,)
    assert shown.observation_space.shape == (16 + (14 + 12) * 3,)


@pytest.mark.parametrize(
    "more", [{}, {"reward": WORKING_REWARD}, {"order": ORDER, "shows_rule": True}]
)
@pytest.mark.parametrize("scenario", ["bursty_serial", "high_load"])
def test_the_vector_twin_equals_single_environments_step_for_step(scenario, more):
    config = {"scenario": scenario, **more, "episode_requests": 30}
    many = envs.LoadBalancingVectorEnv(4, config)
    singles = [envs.LoadBalancingEnv(config) for _ in range(4)]
    observations, _ = many.reset(seed=11)
    first = [env.reset(seed=11 + i)[0] for i, env in enumerate(singles)]
    np.testing.assert_array_equal(observations, np.stack(first))
    rng = np.random.default_rng(0)
    over = [False] * 4
    for _ in range(100):
        actions = rng.integers(0, 3, 4)
        observations, rewards, terminated, truncated, _ = many.step(actions)
        assert not terminated.any()
        for i, env in enumerate(singles):
            if over[i]:
                observation, reward_i, over[i] = env.reset()[0], 0.0, False
            else:
                observation, reward_i, _, over[i], _ = env.step(actions[i])
            np.testing.assert_array_equal(observation, observations[i])
            assert (reward_i, over[i]) == (rewards[i], truncated[i])


def restless(name: str):
    """The scenario with replicas that come and go within an episode of a test."""
    scenario = load_scenario(name)
    churn = Churn(mean_up_s=4.0, mean_down_s=4.0, drained_share=0.5, drain_s=1.0, warm_up_s=1.0)
    fleet = scenario.fleet.model_copy(update={"churn": churn, "max_retries": 3})
    return scenario.model_copy(update={"fleet": fleet})


@pytest.mark.parametrize("name", FLEETS)
def test_the_vector_twin_of_a_fleet_equals_single_ones_though_requests_come_again(name):
    config = {"scenario": restless(name), "episode_requests": 60, "order": ORDER}
    many = envs.LoadBalancingVectorEnv(3, config)
    singles = [envs.LoadBalancingEnv(config) for _ in range(3)]
    observations, _ = many.reset(seed=4)
    first = [env.reset(seed=4 + i)[0] for i, env in enumerate(singles)]
    np.testing.assert_array_equal(observations, np.stack(first))
    rng = np.random.default_rng(0)
    over, again = [False] * 3, 0
    for _ in range(150):
        actions = rng.integers(0, config["scenario"].num_servers, 3)
        observations, rewards, _, truncated, _ = many.step(actions)
        for i, env in enumerate(singles):
            if over[i]:
                observation, reward, over[i] = env.reset()[0], 0.0, False
            else:
                observation, reward, _, over[i], _ = env.step(actions[i])
            assert observation.tobytes() == observations[i].tobytes()
            assert (reward, over[i]) == (rewards[i], truncated[i])
            # The last observation shows a request that waits, whatever became of the others.
            assert env.sim.view().current() >= 0
            again += int((env.sim.view().outcomes().attempts > 1).sum())
    assert again > 0


@pytest.mark.parametrize("name", FLEETS)
def test_equal_seeds_give_equal_episodes_though_another_environment_runs_between(name):
    def episode(disturbed: bool) -> list[bytes]:
        env = envs.LoadBalancingEnv(scenario=name, episode_requests=30)
        other = envs.LoadBalancingEnv(scenario="churn", episode_requests=100)
        other.reset(seed=9)
        seen = [env.reset(seed=1)[0].tobytes()]
        for step in range(30):
            if disturbed:
                other.step(np.int64(step % 5))
            observation, reward, *_ = env.step(np.int64(step % env.action_space.n))
            seen.append(observation.tobytes() + np.float64(reward).tobytes())
        return seen

    assert episode(False) == episode(True)


def test_placing_on_a_replica_that_is_down_is_a_refused_attempt_and_a_step():
    env = envs.LoadBalancingEnv(scenario=restless("churn"), episode_requests=300)
    env.reset(seed=0)
    refused = 0
    for _ in range(300):
        index, state = env.sim.view().current(), env.sim.arrays.state[0]
        down = np.flatnonzero(state[:, lay.STATUS] == lay.DOWN)
        before = env.sim.view().outcomes().attempts[index]
        truncated = env.step(np.int64(down[0] if len(down) else 0))[3]
        assert env.sim.view().outcomes().attempts[index] == before + 1
        refused += len(down) > 0
        assert not state[state[:, lay.STATUS] == lay.DOWN, lay.WAITING].any()
    assert refused > 50
    assert truncated


def test_observations_of_a_fleet_have_the_documented_length():
    env = envs.LoadBalancingEnv(scenario="churn")
    assert env.observation_space.shape == (16 + 14 * 5,)


@pytest.mark.parametrize(
    ("scenario", "reward", "names"),
    [
        ("churn", {}, "processing.*queue.*overload.*balance"),
        ("churn", NOTHING | {"balance": 0.1}, "balance"),
        ("nominal", {"energy": -0.01}, "energy"),
    ],
)
def test_reward_terms_that_the_scenario_does_not_know_are_refused_by_name(scenario, reward, names):
    with pytest.raises(ValidationError, match=f"know no reward terms .*{names}.* set them to 0"):
        envs.RoutingEnvConfig(scenario=scenario, reward=reward)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("churn", {"reward": {"accept": 1}}, "fleets know no reward terms"),
        ("nominal", {"reward": {"energy": -1}}, "token-level servers know no reward terms"),
        ("churn", {"discipline": "parallel_full"}, "'discipline'.* of token-level servers"),
        ("churn", {"overflow": "drop", "queue_limit": 5}, "'queue_limit', 'overflow'"),
        ("nominal", {"sessions": {}}, "sessions need a fleet with prefix_block_tokens"),
        ("churn", {"sessions": {}}, "sessions need a fleet with prefix_block_tokens"),
    ],
)
def test_a_scenario_that_says_what_it_has_not_is_refused(name, change, reason):
    data = load_scenario(name).model_dump(exclude_unset=True) | change
    with pytest.raises(ValidationError, match=reason):
        Scenario.model_validate(data)


def test_what_a_step_returned_is_not_changed_by_the_next_one():
    env = envs.LoadBalancingVectorEnv(2, scenario="nominal", episode_requests=20)
    observation, _ = env.reset(seed=0)
    kept = observation.copy()
    env.step(np.array([0, 1]))
    np.testing.assert_array_equal(observation, kept)


def test_a_four_thousand_token_request_on_an_idle_cluster_earns_the_documented_reward():
    env = envs.LoadBalancingEnv(
        scenario=load_scenario("nominal").model_copy(
            update={"workload": "azure_code", "reward": load_scenario("poisson_085").reward}
        ),
        episode_requests=1,
    )
    env.reset(seed=0)
    env.sim.arrays.requests[0, 0, 2] = 4000.0  # TRUE_TOTAL
    env.sim.arrays.requests[0, 1, 0] = env.sim.arrays.requests[
        0, 0, 0
    ]  # nothing completes before the next
    reward = env.step(np.int64(1))[1]
    assert reward == pytest.approx(0.951, abs=5e-4)


@pytest.mark.parametrize("order", [(0.0,) * 4, ORDER])
@pytest.mark.parametrize("name", ["nominal", "azure_code_mixed_gpus"])
def test_rewards_add_up_to_responses_violations_and_tail(name, order):
    no_other = {"processing": 0.0, "queue": 0.0, "overload": 0.0, "balance": 0.0, "accept": 0.0}
    paid = {"response": -1.0, "slo": -2.0, "tail": -4.0, "tail_after_s": 4.0}
    env = envs.LoadBalancingEnv(
        scenario=name, reward={**no_other, **paid}, episode_requests=300, order=order
    )
    env.reset(seed=3)
    total = sum(env.step(np.int64(i % 3))[1] for i in range(300))
    total += env.sim.drain()[0]
    response_s = env.sim.view().outcomes().response_s[:300]
    violations = response_s > env.config.scenario.slo_response_s
    assert 0 < violations.sum() < 300
    tail_s = np.maximum(response_s - 4.0, 0.0).sum()
    assert -total == pytest.approx(response_s.sum() + 2.0 * violations.sum() + 4.0 * tail_s)


@pytest.mark.parametrize("name", ["bursty_serial", "azure_code_mixed_gpus"])
def test_requests_wait_by_the_order_that_a_rule_would_give_them(name):
    scenario = load_scenario(name)
    source = StreamSource(scenario)
    stream = source.sample(400, stream_rng(0, "training"))
    run, stepped = (make_simulator(scenario, 1, 400) for _ in range(2))
    run.load(0, stream)
    run.run_linear(np.zeros(run.num_weights), source.mean_total_tokens, np.array(ORDER))
    outcomes = run.view().outcomes()
    for order, alike in ((np.array(ORDER), True), (np.zeros(4), False)):
        stepped.order_by(order)
        stepped.load(0, stream)
        for server in outcomes.server:
            stepped.step(np.array([server]))
        stepped.drain()
        assert np.array_equal(stepped.view().outcomes().response_s, outcomes.response_s) == alike


def test_an_order_that_lacks_a_weight_is_refused():
    with pytest.raises(ValidationError, match="3 weights of an order given; give 4"):
        envs.LoadBalancingEnv(scenario="nominal", order=(1.0, 0.0, 0.0))


def test_copies_of_one_stream_have_equal_traffic_and_copies_of_another_do_not():
    given = {"scenario": "local_cpu", "copies_per_stream": 2, "episode_requests": 5}
    env = envs.LoadBalancingVectorEnv(4, given)
    env.reset(seed=3)
    for episode in range(2):
        first, twin, other, its_twin = env.sim.sizes_seen()
        np.testing.assert_array_equal(first, twin)
        np.testing.assert_array_equal(other, its_twin)
        assert (first != other).any(), episode
        for _ in range(6):
            env.step(np.array([0, 1, 2, 0]))


def test_copies_that_cannot_be_divided_into_streams_are_refused():
    with pytest.raises(ValueError, match="4 copies are no multiple of 3 per stream"):
        envs.LoadBalancingVectorEnv(4, scenario="local_cpu", copies_per_stream=3)


def test_every_copy_is_given_a_seed_or_all_are_given_one():
    many = envs.LoadBalancingVectorEnv(3, scenario="nominal", episode_requests=5)
    for seeds in ([1, 2], [1, 2, 3, 4], []):
        with pytest.raises(ValueError, match=f"{len(seeds)} seeds for 3 copies"):
            many.reset(seed=seeds)
    by_one = many.reset(seed=7)[0]
    np.testing.assert_array_equal(many.reset(seed=[7, 8, 9])[0], by_one)
    np.testing.assert_array_equal(many.reset(seed=np.int64(7))[0], by_one)


def test_an_action_that_names_no_server_is_refused_with_the_choices():
    env = envs.LoadBalancingEnv(scenario="nominal", episode_requests=5)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"action 3 .* choose 0\.\.2"):
        env.step(np.int64(3))


def test_stepping_past_the_end_of_an_episode_is_refused():
    env = envs.LoadBalancingEnv(scenario="nominal", episode_requests=1)
    env.reset(seed=0)
    assert env.step(np.int64(0))[3]
    with pytest.raises(ValueError, match="call reset first"):
        env.step(np.int64(0))


def test_a_misspelt_option_is_refused():
    with pytest.raises(ValidationError, match="expected_finnish"):
        envs.LoadBalancingEnv(scenario="nominal", expected_finnish=True)


def test_decision_epochs_hold_every_request_until_the_next_tick():
    epochs = load_scenario("nominal").model_copy(update={"decision_epoch_s": 0.1})
    env = envs.LoadBalancingEnv(scenario=epochs, episode_requests=200)
    env.reset(seed=0)
    now_s = []
    for _ in range(200):
        now_s.append(env.sim.view().now_s())
        assert 0 <= now_s[-1] - env.sim.view().request().arrival_s <= 0.1
        env.step(np.int64(0))
    ticks = np.array(now_s) / 0.1
    np.testing.assert_allclose(ticks, np.round(ticks), atol=1e-6)
    assert len(np.unique(np.round(ticks))) < 200  # some decisions share a tick: a batch


def test_a_hidden_output_length_reaches_neither_request_nor_observation():
    hidden = load_scenario("conversation").model_copy(update={"output_length": "none"})
    env = envs.LoadBalancingEnv(scenario=hidden, episode_requests=100)
    env.reset(seed=0)
    seen = []
    for doubled in (False, True):
        env.reset(seed=0)
        if doubled:  # every true output grows; nothing that the router sees before may change
            env.sim.arrays.requests[0, :, 2] += 500.0
        request = env.sim.view().request()
        assert request.predicted_total_tokens == request.context_tokens
        seen.append(env.sim.observe()[0].copy())
    np.testing.assert_array_equal(*seen)


def test_a_request_that_the_baseline_dropped_still_earns_a_number():
    dropping = load_scenario("bursty_serial").model_copy(update={"queue_limit": 1})
    env = envs.LoadBalancingEnv(scenario=dropping, reward=WORKING_REWARD, episode_requests=300)
    env.reset(seed=0)
    rewards = [env.step(np.int64(i % 3))[1] for i in range(300)]
    assert np.isfinite(rewards).all()
