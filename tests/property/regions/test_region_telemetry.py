"""The law of telemetry: what cannot be seen decides nothing; docs/invariants.md lists it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled
from unit.region_builders import a_scenario, a_stream, an_oracle

from tokenyard.regions import telemetry
from tokenyard.regions.policies import REGION_BASELINES
from tokenyard.regions.problem import policy_maker
from tokenyard.regions.scenario import RegionFailure
from tokenyard.regions.simulator import RegionSim, world
from tokenyard.regions.telemetry import row_of

FIRST_HIDDEN_SLOT, NUM_SLOTS = 3, 9
POLICIES = list(REGION_BASELINES)
DECIDED = [world.TARGET, world.SERVER, world.STATUS]


def a_world(seed, extra_s, failures=()):
    """A simulator whose tasks from a slot on take longer than they look, by a mean time."""
    scenario = a_scenario(num_slots=NUM_SLOTS, demand={"load": 0.5}, failures=failures)
    stream = a_stream(scenario, seed)
    late = stream.numbers[:, world.ARRIVAL_S] >= FIRST_HIDDEN_SLOT * scenario.slot_s
    extra = np.random.default_rng(seed).uniform(0.8, 1.2, late.sum()) * extra_s
    stream.numbers[late, world.WORK_S] += extra
    return RegionSim(scenario, stream, an_oracle(scenario)), late


def first_finish_s(sim, hidden):
    """When the first task finishes whose work differs; infinite where none has begun."""
    placed = hidden & (sim.arrays.labels[:, world.STATUS] == world.PLACED)
    return sim.arrays.tasks[placed, world.FINISH_S].min(initial=np.inf)


def live(sims, policies):
    """One slot in each world; the decisions."""
    states = [sim.state() for sim in sims]
    decisions = [policy.decide(state) for policy, state in zip(policies, states, strict=True)]
    for sim, decision in zip(sims, decisions, strict=True):
        sim.step(decision)
    return decisions


def hidden_slots(name, seed, failures=()):
    """Compare two worlds until a completion tells them apart; how many slots that took."""
    (one, hidden), (other, _) = (a_world(seed, extra, failures) for extra in (400.0, 900.0))
    policies = [policy_maker(sim.scenario, name)[0](sim.scenario) for sim in (one, other)]
    compared = 0
    while not one.ended:
        decisions = live((one, other), policies)
        end_s = one.slot * one.scenario.slot_s
        if min(first_finish_s(one, hidden), first_finish_s(other, hidden)) <= end_s:
            break
        compared += one.slot > FIRST_HIDDEN_SLOT
        assert np.array_equal(decisions[0].shares, decisions[1].shares)
        assert np.array_equal(decisions[0].active, decisions[1].active)
        assert decisions[0].live == decisions[1].live
        for mine, theirs in zip(one.arrays.seen, other.arrays.seen, strict=True):
            assert mine.tobytes() == theirs.tobytes()
        assert np.array_equal(one.arrays.labels[:, DECIDED], other.arrays.labels[:, DECIDED])
    finish = [sim.arrays.tasks[hidden, world.FINISH_S] for sim in (one, other)]
    assert not np.array_equal(*finish)
    return compared


@pytest.mark.parametrize("name", POLICIES)
def test_worlds_that_differ_in_what_is_hidden_are_decided_alike_until_a_completion(name):
    assert hidden_slots(name, seed=1) >= 3


failures = st.builds(
    RegionFailure,
    kind=st.sampled_from(["region_down", "capacity_lost", "links_slow"]),
    start_slot=st.integers(2, 6),
    num_slots=st.integers(1, 3),
    region=st.integers(0, 3),
)


@settings(max_examples=scaled(25))
@given(st.sampled_from(POLICIES), st.integers(0, 2**31), st.lists(failures, max_size=2))
def test_that_holds_for_any_demand_and_whatever_fails(name, seed, some):
    hidden_slots(name, seed, tuple(some))


def test_a_completion_tells_them_apart():
    sims = [a_world(1, extra)[0] for extra in (0.0, 400.0)]
    policies = [policy_maker(sim.scenario, "least_loaded")[0](sim.scenario) for sim in sims]
    while not sims[0].ended:
        live(sims, policies)
    servers = [sim.arrays.labels[:, world.SERVER] for sim in sims]
    assert not np.array_equal(*servers)


def test_a_task_that_has_not_come_shows_nothing():
    sim, _ = a_world(1, 0.0)
    policy = policy_maker(sim.scenario, "skylb")[0](sim.scenario)
    for _ in range(2):
        live([sim], [policy])
    to_come = sim.arrays.labels[:, world.STATUS] == world.TO_COME
    assert to_come.any()
    assert not sim.arrays.seen.tasks[to_come].any()
    assert sim.arrays.seen.tasks[~to_come, telemetry.DEADLINE_S].all()


def test_a_report_is_known_elsewhere_when_it_has_arrived_and_at_home_at_once():
    sim, _ = a_world(1, 0.0)
    live([sim], [policy_maker(sim.scenario, "skylb")[0](sim.scenario)])
    t = sim.arrays.seen
    newest = int(t.clock[telemetry.NEWEST])
    made, travel = t.reported_s[newest], t.latency[1, 0]
    assert made < sim.scenario.slot_s
    assert travel > 0
    assert row_of(t, 0, 1, made + 0.9 * travel) not in (newest, telemetry.OWN)
    assert row_of(t, 0, 1, made + 1.001 * travel) == newest
    assert row_of(t, 0, 0, made) == telemetry.OWN
