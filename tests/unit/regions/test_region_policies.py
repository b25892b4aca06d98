from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled
from unit.region_builders import a_scenario, a_stream, an_oracle

from tokenyard.evaluation import compare, run_candidates
from tokenyard.regions.evaluation import measure
from tokenyard.regions.observation import PLANS, combine
from tokenyard.regions.policies import BEST_RULE, REGION_BASELINES, make_region_policy
from tokenyard.regions.policies.rules import ot_slack
from tokenyard.regions.problem import PROBLEM, episodes, policy_maker
from tokenyard.regions.scenario import RegionFailure
from tokenyard.regions.simulator import RegionSim, world
from tokenyard.regions.simulator.run import run_regions
from tokenyard.regions.types import RegionDecision, check_decision

SCENARIO = a_scenario(num_slots=12)
DOWN = a_scenario(
    num_slots=12, failures=(RegionFailure(kind="region_down", start_slot=3, num_slots=5),)
)


def states(scenario=SCENARIO):
    sim = RegionSim(scenario, a_stream(scenario), an_oracle(scenario))
    policy = make_region_policy("prox_ot", scenario)
    found = []
    while not sim.ended:
        found.append(sim.state())
        sim.step(policy.decide(found[-1]))
    return found


@pytest.mark.parametrize("name", REGION_BASELINES)
@pytest.mark.parametrize("scenario", [SCENARIO, DOWN], ids=["whole", "a region down"])
def test_every_policy_gives_shares_and_serves_or_counts_every_task(name, scenario):
    policy = policy_maker(scenario, name)[0](scenario)
    measured = measure(run_regions(scenario, a_stream(scenario), policy, an_oracle(scenario)))
    assert measured["unaccounted_tasks"] == 0
    assert measured["mean_response_s"] > 5
    parts = measured["network_s"] + measured["waiting_s"] + measured["inference_s"]
    assert parts == pytest.approx(measured["mean_response_s"], rel=1e-6)


def test_nobody_waits_longer_than_the_patience_when_the_episode_is_over_either():
    scenario = a_scenario(demand={"load": 1.5})
    policy = make_region_policy("prox_ot", scenario)
    outcomes = run_regions(scenario, a_stream(scenario), policy, an_oracle(scenario))
    is_placed = outcomes.labels[:, world.STATUS] == world.PLACED
    waited_s = (outcomes.tasks[:, world.BEGIN_S] - outcomes.tasks[:, world.ARRIVAL_S])[is_placed]
    micro = scenario.micro
    # Who waits is looked at once a slot, and may be given to a server that is soon free.
    assert waited_s.max() <= micro.patience_s + scenario.slot_s + 2 * micro.room_s
    assert measure(outcomes)["unaccounted_tasks"] == 0


@pytest.mark.parametrize("name", REGION_BASELINES)
@pytest.mark.parametrize("demand", [1.0, 0.0])
def test_what_plans_sends_nothing_to_a_region_that_is_down(name, demand):
    policy = policy_maker(DOWN, name)[0](DOWN)
    for state in states(DOWN):
        state = replace(state, arrivals=demand * state.arrivals, forecast=demand * state.forecast)
        there = state.capacity > 0
        shares = policy.decide(state).shares
        if not there.all():
            assert shares[:, ~there] == pytest.approx(np.zeros((4, 1)), abs=1e-9)


STATES = states() + states(DOWN)


@settings(max_examples=scaled(40))
@given(st.integers(0, 2**32 - 1), st.sampled_from(range(len(STATES))))
def test_the_mix_is_shares_whatever_its_weights_and_sends_nothing_to_what_is_down(seed, index):
    state = STATES[index]
    shares = combine(state, np.random.default_rng(seed).normal(0, 10, (4, len(PLANS))))
    check_decision(RegionDecision(shares, np.ones(4, dtype=int)), 4)
    assert shares[:, state.capacity == 0] == pytest.approx(0.0)


def test_weights_that_choose_one_plan_give_that_plan():
    state = STATES[6]
    only = np.full((4, 4), -50.0)
    only[:, 1] = 50.0
    assert combine(state, only) == pytest.approx(state.previous)


def test_transport_fills_regions_up_to_the_cap():
    state = STATES[6]
    demand = 0.3 * state.forecast[0]
    shares = ot_slack(state, demand, 0.5)
    assert shares.sum(axis=1) == pytest.approx(np.ones(4))
    assert (demand @ shares <= 0.5 * state.capacity + 1e-6).all()


def test_champion_means_the_best_rule_where_none_is_registered():
    candidate = PROBLEM.candidate(SCENARIO, "champion")
    assert candidate.source == f"best tuned rule, {BEST_RULE}"
    assert PROBLEM.best_tuned_rule(SCENARIO) == BEST_RULE
    streams = episodes(SCENARIO, "evaluation", 1, 7, an_oracle(SCENARIO))
    champion, rule = (PROBLEM.candidate(SCENARIO, name) for name in ("champion", BEST_RULE))
    costs = [one.run(SCENARIO, streams, 7)[0]["total_cost"] for one in (champion, rule)]
    assert costs[0] == costs[1]


def test_unknown_names_are_refused_with_those_that_are():
    with pytest.raises(ValueError, match="did you mean 'prox_ot'"):
        make_region_policy("prox_to", SCENARIO)
    with pytest.raises(ValueError, match="champion"):
        PROBLEM.candidate(SCENARIO, "champoin")


def test_comparisons_are_paired_over_streams_that_no_training_sees():
    names = ("skylb", "sdib")
    candidates = [PROBLEM.candidate(SCENARIO, name) for name in names]
    streams = episodes(SCENARIO, "evaluation", 2, 7, an_oracle(SCENARIO))
    measured = run_candidates(candidates, SCENARIO, streams, 7)
    rows = {row["policy"]: row for row in compare(PROBLEM, SCENARIO, streams, measured, "skylb")}
    assert rows["skylb"]["delta_cost_fraction"] == 0
    ours = [one["total_cost"] for one in measured["sdib"]]
    theirs = [one["total_cost"] for one in measured["skylb"]]
    expected = (np.mean(ours) - np.mean(theirs)) / np.mean(theirs)
    assert rows["sdib"]["delta_cost_fraction"] == pytest.approx(expected)
    first, again = (PROBLEM.streams(SCENARIO, "evaluation", 1, 7).streams[0] for _ in range(2))
    assert np.array_equal(first.numbers, again.numbers)
    assert not np.array_equal(first.counts, a_stream(SCENARIO, 7).counts)
