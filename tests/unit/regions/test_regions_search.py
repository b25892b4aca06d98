from dataclasses import replace

import numpy as np
import pytest
from unit.region_builders import a_scenario, a_stream, an_oracle

from tokenyard.regions.mixing import FILL, NUM_PARAMETERS, cost_of
from tokenyard.regions.search import RegionSearch, RegionSearchConfig
from tokenyard.regions.simulator import RegionSim

SMALL = RegionSearchConfig(population=4, num_elites=2, slots=10, num_generations=2)
TINY = a_scenario(num_slots=12)


def test_a_search_that_is_resumed_goes_on_as_if_nothing_had_happened():
    whole, first, second = (RegionSearch([TINY], SMALL, seed=3) for _ in range(3))
    for _ in range(2):
        found = whole.step()
    first.step()
    second.restore(first.state())
    assert second.step() == found
    assert np.array_equal(second.mean, whole.mean)
    assert whole.env_steps == 2 * 6 * 10
    assert np.isfinite(whole.validate())


def test_a_margin_that_is_missed_costs_and_one_that_is_kept_does_not():
    search = RegionSearch([TINY], SMALL)
    start = {"total_cost": 100.0}
    rival = {
        "mean_response_s": 20.0, "energy_cost": 80.0, "overhead_fraction": 0.1, "load_balance": 0.6,
    }  # fmt: skip
    kept = {
        "total_cost": 90.0, "mean_response_s": 15.0, "energy_cost": 60.0,
        "overhead_fraction": 0.02, "load_balance": 0.7,
    }  # fmt: skip
    assert search.cost(kept, start, rival) == pytest.approx(0.9)
    short = search.cost({**kept, "load_balance": 0.6}, start, rival)
    assert short == pytest.approx(0.9 + SMALL.hinge * SMALL.margins["load_balance"])
    slow = search.cost({**kept, "mean_response_s": 20.0}, start, rival)
    assert slow == pytest.approx(0.9 - SMALL.hinge * SMALL.margins["mean_response_s"])


def test_tasks_that_wait_may_only_lower_the_fill():
    state = RegionSim(TINY, a_stream(TINY), an_oracle(TINY)).state()
    busy = replace(state, waiting=np.full(4, 20.0))
    theta = np.zeros(NUM_PARAMETERS)
    plain = cost_of(theta, busy).cap
    for weight, sign in ((2.0, 0), (-2.0, -1)):
        theta[4 + FILL.index("total_waiting")] = weight
        assert np.sign(cost_of(theta, busy).cap - plain) == sign
