"""Failures that follow each other, or overlap."""

import itertools

import numpy as np
import pytest
from unit.region_builders import a_scenario, a_stream, an_oracle

from tokenyard.regions import telemetry
from tokenyard.regions.problem import PROBLEM
from tokenyard.regions.scenario import RegionFailure
from tokenyard.regions.simulator import RegionSim
from tokenyard.regions.types import RegionDecision

NUM_SLOTS = 12


def lived_through(*failures):
    """In every slot: servers of the first region that are down, and how slow its links are."""
    scenario = a_scenario(num_slots=NUM_SLOTS, failures=failures)
    sim = RegionSim(scenario, a_stream(scenario), an_oracle(scenario))
    plain, seen = sim.cluster.latency_s, sim.arrays.seen
    down, slow = [], []
    while not sim.ended:
        sim.step(RegionDecision(np.full((4, 4), 0.25), np.full(4, 10)))
        states = seen.servers[: seen.first[1], telemetry.STATE]
        down.append(int((states == telemetry.DOWN).sum()) / len(states))
        slow.append([round(float(seen.latency[0, i] / plain[0, i]), 6) for i in (1, 2)])
    return down, slow


def a_failure(kind, start_slot, num_slots, **fields):
    return RegionFailure(kind=kind, start_slot=start_slot, num_slots=num_slots, region=0, **fields)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_failures_that_follow_each_other_last_as_one_in_any_order(order):
    both = [a_failure("region_down", start, 3) for start in (2, 5)]
    down, _ = lived_through(*(both[i] for i in order))
    assert down == [float(2 <= slot < 8) for slot in range(NUM_SLOTS)]


def test_lost_capacity_stays_lost_when_a_shorter_failure_ends():
    lost = a_failure("capacity_lost", 1, 9, fraction=0.5)
    alone, _ = lived_through(lost)
    for failures in itertools.permutations([lost, a_failure("region_down", 3, 2)]):
        down, _ = lived_through(*failures)
        assert down == [1.0 if slot in (3, 4) else was for slot, was in enumerate(alone)]
    assert 0.0 < alone[1] == alone[9] < 1.0
    assert alone[0] == alone[10] == 0.0


def test_links_stay_slow_when_a_failure_of_others_ends():
    own = a_failure("links_slow", 1, 9, factor=5.0)
    other = RegionFailure(kind="links_slow", start_slot=3, num_slots=2, region=1, factor=2.0)
    for failures in itertools.permutations([own, other]):
        _, slow = lived_through(*failures)
        for slot, (to_other, to_third) in enumerate(slow):
            usual = 5.0 if 1 <= slot < 10 else 1.0
            assert to_third == usual
            assert to_other == usual * (2.0 if 3 <= slot < 5 else 1.0)


@pytest.mark.parametrize("kind", ["region_down", "links_slow"])
def test_a_region_that_is_not_there_cannot_fail(kind):
    failure = RegionFailure(kind=kind, start_slot=3, num_slots=2, region=4)
    scenario = a_scenario(num_slots=NUM_SLOTS, failures=(failure,))
    with pytest.raises(ValueError, match=r"no region 4 can fail: topology .* regions 0 to 3"):
        PROBLEM.streams(scenario, "evaluation", 1, 0)
