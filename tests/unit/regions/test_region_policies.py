import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled
from unit.region_builders import a_scenario, a_stream, an_oracle

from tokenyard.evaluation import compare, run_candidates
from tokenyard.regions.activation import ActivationRule
from tokenyard.regions.artifact import (
    RegionArtifact,
    RegionMetadata,
    learned_regions,
    resolve_region_champion,
)
from tokenyard.regions.evaluation import measure
from tokenyard.regions.mixing import NUM_PARAMETERS, START_LIVE, PlanCost, combine, live_of, mix
from tokenyard.regions.policies import REGION_BASELINES, make_region_policy
from tokenyard.regions.policies.learned import LearnedMix
from tokenyard.regions.policies.rules import ot_slack
from tokenyard.regions.problem import PROBLEM, episodes, policy_maker
from tokenyard.regions.scenario import Failure
from tokenyard.regions.simulator import RegionSim
from tokenyard.regions.simulator.run import run_regions
from tokenyard.regions.types import check_decision

SCENARIO = a_scenario(num_slots=12)
DOWN = a_scenario(num_slots=12, failures=(Failure(kind="region_down", start_slot=3, num_slots=5),))


def states(scenario=SCENARIO):
    sim = RegionSim(scenario, a_stream(scenario), an_oracle(scenario))
    policy = make_region_policy("prox_ot", scenario)
    found = []
    while not sim.ended:
        found.append(sim.state())
        sim.step(policy.decide(found[-1]))
    return found


@pytest.mark.parametrize("name", [*REGION_BASELINES, "torta"])
@pytest.mark.parametrize("scenario", [SCENARIO, DOWN], ids=["whole", "a region down"])
def test_every_policy_gives_shares_and_serves_or_counts_every_task(name, scenario):
    policy = policy_maker(scenario, name)[0](scenario)
    measured = measure(run_regions(scenario, a_stream(scenario), policy, an_oracle(scenario)))
    assert measured["unaccounted_tasks"] == 0
    assert measured["mean_response_s"] > 5
    parts = measured["network_s"] + measured["waiting_s"] + measured["inference_s"]
    assert parts == pytest.approx(measured["mean_response_s"], rel=1e-6)


@pytest.mark.parametrize("name", ["ot_slack", "prox_ot", "prox_ot_forecast_live_cost", "torta"])
def test_what_plans_sends_nothing_to_a_region_that_is_down(name):
    policy = policy_maker(DOWN, name)[0](DOWN)
    for state in states(DOWN):
        there = state.capacity > 0
        shares = policy.decide(state).shares
        if not there.all() and name in ("ot_slack", "torta"):
            assert shares[:, ~there] == pytest.approx(np.zeros((4, 1)), abs=1e-9)


thetas = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).normal(0, 2, NUM_PARAMETERS)
)
STATES = states() + states(DOWN)


@settings(max_examples=scaled(40))
@given(thetas, st.sampled_from(range(len(STATES))))
def test_the_mix_is_shares_whatever_its_parameters(theta, index):
    decision = LearnedMix(theta, ActivationRule()).decide(STATES[index])
    check_decision(decision, 4)


def test_the_mix_renames_with_the_regions():
    state, order = STATES[6], np.array([2, 0, 3, 1])
    from dataclasses import replace

    renamed = replace(
        state, latency_s=state.latency_s[np.ix_(order, order)], arrivals=state.arrivals[:, order],
        forecast=state.forecast[:, order], waiting=state.waiting[order], used=state.used[order],
        num_active=state.num_active[order], usd_per_kwh=state.usd_per_kwh[order],
        previous=state.previous[np.ix_(order, order)], server_tasks=state.server_tasks[order],
        server_kwh=state.server_kwh[order],
    )  # fmt: skip
    theta = np.random.default_rng(0).normal(0, 0.5, NUM_PARAMETERS)
    expected = mix(state, theta)[np.ix_(order, order)]
    assert mix(renamed, theta) == pytest.approx(expected, abs=1e-6)


def test_zero_parameters_stand_for_the_start_and_any_for_finite_positive_costs():
    assert live_of(np.zeros(NUM_PARAMETERS), 0.7) == START_LIVE
    wild = live_of(np.full(NUM_PARAMETERS, 50.0), 2.0)
    assert np.isfinite(wild.weights).all()
    assert min(wild.weights) > 0


def test_a_reserve_leaves_room_in_small_regions():
    state = STATES[6]
    demand = 0.5 * state.forecast[0]
    bound = state.capacity * (1 - 1 / np.sqrt(state.capacity))
    spared = PlanCost(cap=1.0, reserve=1.0).shares(state, demand)
    assert (demand @ spared <= bound + 1e-6).all()


def test_weights_that_choose_one_plan_give_that_plan():
    state = STATES[6]
    only = np.full((4, 4), -50.0)
    only[:, 1] = 50.0
    assert combine(state, PlanCost(), only) == pytest.approx(state.previous)


def test_cheaper_energy_draws_more_tasks_the_less_distance_counts():
    state = STATES[6]
    demand = 0.5 * state.forecast[0]
    paid = [
        float((demand @ PlanCost(latency=weight).shares(state, demand)) @ state.usd_per_kwh)
        for weight in (100.0, 0.0)
    ]
    assert paid[1] <= paid[0] + 1e-9
    assert ot_slack(state, state.forecast[0], 0.55).sum(axis=1) == pytest.approx(np.ones(4))


def test_artifacts_come_back_as_they_were_and_bad_ones_are_refused(tmp_path):
    metadata = RegionMetadata(scenarios=("tiny",), trainer="policy_search")
    artifact = RegionArtifact(metadata, {"theta": np.arange(NUM_PARAMETERS, dtype=float)})
    artifact.save(tmp_path / "a.npz")
    back = RegionArtifact.load(tmp_path / "a.npz")
    assert back.sha256 == artifact.sha256
    assert learned_regions(back, ActivationRule()).theta == pytest.approx(np.arange(NUM_PARAMETERS))
    with pytest.raises(ValueError, match="not finite"):
        RegionArtifact(metadata, {"theta": np.full(NUM_PARAMETERS, np.nan)})
    assert resolve_region_champion("no such scenario")[1] == "shipped regions/generic"


def test_unknown_names_are_refused_with_those_that_are():
    with pytest.raises(ValueError, match="did you mean 'prox_ot'"):
        make_region_policy("prox_to", SCENARIO)
    with pytest.raises(ValueError, match="torta"):
        PROBLEM.candidate(SCENARIO, "tora")


def test_comparisons_are_paired_over_streams_that_no_training_sees():
    names = ("skylb", "torta")
    candidates = [PROBLEM.candidate(SCENARIO, name) for name in names]
    streams = episodes(SCENARIO, "evaluation", 2, 7, an_oracle(SCENARIO))
    measured = run_candidates(candidates, SCENARIO, streams, 7)
    rows = {row["policy"]: row for row in compare(PROBLEM, SCENARIO, streams, measured, "skylb")}
    assert rows["skylb"]["delta_cost_fraction"] == 0
    ours = [one["total_cost"] for one in measured["torta"]]
    theirs = [one["total_cost"] for one in measured["skylb"]]
    expected = (np.mean(ours) - np.mean(theirs)) / np.mean(theirs)
    assert rows["torta"]["delta_cost_fraction"] == pytest.approx(expected)
    first, again = (PROBLEM.streams(SCENARIO, "evaluation", 1, 7).streams[0] for _ in range(2))
    assert np.array_equal(first.numbers, again.numbers)
    assert not np.array_equal(first.counts, a_stream(SCENARIO, 7).counts)
