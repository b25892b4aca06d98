from __future__ import annotations

import numpy as np
import pytest
import torch
from unit.region_builders import a_scenario, a_stream, an_oracle

import envs
from envs import RegionEnv
from tokenyard.evaluation import rank
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.artifact import RegionArtifact, RegionMetadata, learned_regions
from tokenyard.regions.observation import LIMIT, LOGIT_SCALE, encode, observation_size
from tokenyard.regions.problem import PROBLEM
from tokenyard.regions.simulator import RegionSim
from tokenyard.rl.regions.training import RegionRllib, RegionTrialConfig, constraint_values
from tune_configs.experiment import load_experiments

TINY = a_scenario(num_slots=12)


@pytest.mark.parametrize("name", ["default", "faithful", "smoke"])
def test_every_trial_of_every_experiment_can_be_built(name):
    experiment = load_experiments(f"regions:{name}")[0]
    assert experiment.problem is PROBLEM
    assert experiment.baseline in experiment.baselines
    for trial in experiment.designed_trials(seed=3):
        config = RegionTrialConfig.model_validate(trial)
        assert config.scenario == experiment.scenario
        told = config.algorithm_config(TINY).env_config
        RegionEnv(scenario=TINY, action=told["action"], reward=told["reward"])


def test_settings_of_a_trial_take_the_place_of_the_recipes():
    trial = load_experiments("regions:smoke")[0].trials[1]
    config = trial.model_copy(update={"training": {"lr": 5e-5}})
    assert config.hyperparameters(TINY)["lr"] == 5e-5


def test_reward_weights_that_are_unknown_are_refused():
    trial = load_experiments("regions:smoke")[0].designed_trials(0)[0]
    with pytest.raises(ValueError, match="should be 'cost' or 'paper'"):
        RegionTrialConfig.model_validate({**trial, "reward_weights": "beauty"})


def test_constraints_are_met_by_the_smoothed_transport_and_broken_by_uniform_shares():
    rng = np.random.default_rng(0)
    plan, before = (rng.dirichlet(np.full(4, 0.3), (6, 4)).reshape(6, -1) for _ in range(2))
    seen = torch.tensor(np.concatenate([before, plan], axis=1))
    k0 = float(((plan - before) ** 2).sum(axis=1).mean())
    near = torch.tensor(np.log(np.maximum(plan, 1e-3)) / LOGIT_SCALE)
    distance, smoothness = constraint_values(near, seen, k0)
    assert distance < 0.2
    assert smoothness == pytest.approx(1.0, rel=0.3)
    uniform, _ = constraint_values(torch.zeros_like(near), seen, k0)
    assert uniform > 3 * distance


def a_network(**changes):
    rng = np.random.default_rng(0)
    size = observation_size(4, "shares")
    arrays = {
        "mean": np.zeros(size), "std": np.ones(size), "w0": rng.normal(0, 0.1, (8, size)),
        "b0": np.zeros(8), "w1": rng.normal(0, 0.1, (16, 8)), "b1": np.zeros(16),
    }  # fmt: skip
    metadata = RegionMetadata(
        kind="network", action="shares", dispatch="shares", scenarios=("tiny",), trainer="ppo"
    )
    return RegionArtifact(metadata, arrays | changes)


def test_layers_that_do_not_follow_each_other_are_refused():
    with pytest.raises(ValueError, match=r"'w1' has shape \(16, 9\); it must be \(16, 8\)"):
        a_network(w1=np.zeros((16, 9)))
    with pytest.raises(ValueError, match=r"'theta'.* must be \['b0'"):
        a_network(theta=np.zeros(1))


def test_a_network_says_for_how_many_regions_it_is():
    other = a_scenario(num_slots=12, topology="synthetic/gabriel/5/1")
    state = RegionSim(other, a_stream(other), an_oracle(other)).state()
    with pytest.raises(ValueError, match="trained for"):
        learned_regions(a_network(), ActivationRule()).decide(state)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("algorithm", ["torta_faithful", "ppo"])
def test_what_is_trained_decides_alike_in_training_and_as_an_artifact(algorithm, tmp_path):
    envs.register()
    action = "shares" if algorithm == "torta_faithful" else "mix"
    trial = RegionTrialConfig(algorithm=algorithm, scenario="tiny", env_steps=240, iterations=240)
    config = trial.algorithm_config(TINY).training(minibatch_size=60, num_epochs=1)
    training = RegionRllib(config, TINY, algorithm)
    try:
        learned = training.step()
        assert training.env_steps >= 120
        assert np.isfinite(list(learned.values())).all()
        training.artifact({}, {}).save(tmp_path / "a.npz")
        artifact = RegionArtifact.load(tmp_path / "a.npz")
        state = RegionSim(TINY, a_stream(TINY), an_oracle(TINY)).state()
        seen = np.clip(encode(state, action), -LIMIT, LIMIT)
        module = training.module
        outputs = module.forward_inference({"obs": torch.tensor(seen[None]).float()})
        means = outputs["action_dist_inputs"].detach().numpy()[0]
        decision = learned_regions(artifact, ActivationRule.from_scenario(TINY)).decide(state)
        env = RegionEnv(scenario=TINY, action=action)
        env.reset(seed=0)
        env._copy.sim, env._copy.state = RegionSim(TINY, a_stream(TINY), an_oracle(TINY)), state
        env.step(means[: len(means) // 2].clip(-1, 1))
        assert env.sim.shares == pytest.approx(decision.shares, abs=1e-5)
    finally:
        training.stop()


def test_policies_are_ranked_by_cost_over_streams_of_the_comparison():
    scenario = PROBLEM.load_scenario("continents").model_copy(update={"num_slots": 20})
    names = ("round_robin", "prox_ot_forecast_live_cost")
    policies = {name: PROBLEM.candidate(scenario, name).run for name in names}
    streams = PROBLEM.streams(scenario, "evaluation", 2, seed=0)
    best, _ = rank(PROBLEM, scenario, policies, "round_robin", streams, seed=0).rows
    assert best["policy"] == "prox_ot_forecast_live_cost"
    assert best["score"] == -best["total_cost"]
    assert best["delta_cost_fraction"] < 0
    with pytest.raises(ValueError, match="unknown regional policy"):
        PROBLEM.candidate(scenario, "sdb")
