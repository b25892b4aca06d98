"""Exact programmes against enumeration on small instances."""

import itertools

import numpy as np
import pytest

from tokenyard.allocation.bounds import (
    clairvoyant,
    clairvoyant_plans,
    free_switching,
    value_iteration,
)
from tokenyard.allocation.demand import DemandStream
from tokenyard.allocation.dynamics import NUM_OUT, REWARD, run_slot
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.simulator.run import StreamRunner

SCENARIO = load_allocation("a100x8_70b")


def test_value_iteration_agrees_with_brute_force_over_a_finite_horizon():
    """With discount 0.5, twelve slots leave out less than a 4000th of the largest cost."""
    rng = np.random.default_rng(0)
    costs = rng.uniform(0, 1, (2, 2, 2))
    transition = rng.dirichlet([1, 1], 2)
    values, best = value_iteration(costs, transition, discount=0.5)

    def brute(level, plan, left):
        if left == 0:
            return 0.0, 0
        options = [
            costs[level, plan, new]
            + 0.5 * sum(transition[level, n] * brute(n, new, left - 1)[0] for n in (0, 1))
            for new in (0, 1)
        ]
        return min(options), int(np.argmin(options))

    for level, plan in itertools.product((0, 1), (0, 1)):
        value, choice = brute(level, plan, 8)
        assert values[level, plan] == pytest.approx(value, abs=2 * 0.5**8)
        assert best[level, plan] == choice


def test_the_clairvoyant_is_the_best_of_all_sequences_of_plans():
    demand = np.array([0.4, 2.0, 4.5])
    runner = StreamRunner(SCENARIO, DemandStream(np.concatenate([[0.4], demand]), 1, 0))
    plans, value = clairvoyant_plans(runner)
    sim = runner.sim
    out = np.zeros(NUM_OUT)
    best = -np.inf
    for sequence in itertools.product(range(sim.table.num_plans), repeat=3):
        total, old = 0.0, sim.sufficient_plan(runner.stream)
        for plan, rate in zip(sequence, demand, strict=True):
            total += run_slot(sim.model, old, plan, rate, 0.0, out)
            old = plan
        best = max(best, total)
    assert value == pytest.approx(best, abs=1e-9)
    assert len(plans) == 3


def test_bounds_are_in_their_order():
    rng = np.random.default_rng(0)
    runner = StreamRunner(SCENARIO, DemandStream(rng.uniform(0.2, 5, 60), 1, 0))
    attained = clairvoyant(runner).column(REWARD).sum()
    bound = clairvoyant_plans(runner)[1]
    free = free_switching(runner).sum()
    static = runner.run_plans(np.full(59, 5)).column(REWARD).sum()
    assert static <= attained <= bound + 1e-9
    assert bound <= free + 1e-9
