"""Transport against theory and against the plain linear program."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from sizes import scaled

from tokenyard.regions import transport

few = settings(max_examples=scaled(40))
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(2, 12)


def drawn(seed, n, headroom=1.4):
    rng = np.random.default_rng(seed)
    demand = rng.dirichlet(np.ones(n)) * 100
    capacity = rng.dirichlet(np.full(n, 2.0)) * 100 * headroom
    price, latency = rng.uniform(0.1, 1, n), rng.uniform(0, 1, (n, n))
    return demand, capacity, price, (latency + latency.T) / 2


def within_by_linprog(demand, capacity, cost):
    """Least cost under capacities as the linear program that it is, for demand that fits."""
    n, m = cost.shape
    found = linprog(
        cost.ravel(),
        A_eq=np.kron(np.eye(n), np.ones((1, m))), b_eq=demand,
        A_ub=np.kron(np.ones((1, n)), np.eye(m)), b_ub=capacity,
        method="highs",
    )  # fmt: skip
    assert found.success, found.message
    return found.x.reshape(cost.shape)


@few
@given(seeds, sizes)
def test_prices_have_no_effect_on_the_balanced_plan_and_do_on_the_one_with_slack(seed, n):
    demand, capacity, price, latency = drawn(seed, n)
    plain = transport.balanced(demand, capacity, latency)
    priced = transport.balanced(demand, capacity, 100 * price + latency)
    assert (priced * latency).sum() == pytest.approx((plain * latency).sum(), abs=1e-9)
    # Every plan with these sums pays the same for energy.
    assert (priced @ price).sum() == pytest.approx((plain @ price).sum(), abs=1e-12)
    local = transport.within(demand, capacity, latency)
    cheap = transport.within(demand, capacity, 100 * price + latency)
    assert (cheap @ price).sum() <= (local @ price).sum() + 1e-9


def test_with_slack_the_costly_region_is_left_empty():
    demand, capacity = np.array([10.0, 10.0]), np.array([30.0, 30.0])
    plan = transport.within(demand, capacity, np.tile([1.0, 5.0], (2, 1)))
    assert plan == pytest.approx(np.array([[10.0, 0.0], [10.0, 0.0]]))


@few
@given(seeds, sizes)
def test_the_slack_form_is_the_linear_program_with_inequalities(seed, n):
    demand, capacity, price, latency = drawn(seed, n)
    cost = price + 0.1 * latency
    plan = transport.within(demand, capacity, cost)
    reference = within_by_linprog(demand, capacity, cost)
    assert (plan * cost).sum() == pytest.approx((reference * cost).sum(), rel=1e-6)
    assert plan.sum(axis=1) == pytest.approx(demand, rel=1e-6, abs=1e-8)
    assert (plan.sum(axis=0) <= capacity + 1e-6).all()


@few
@given(seeds, sizes)
def test_scipys_solver_stands_in_for_pot(seed, n):
    demand, capacity, price, latency = drawn(seed, n, headroom=1.0)
    cost = price + latency
    ours = transport._by_linprog(demand, capacity, cost)
    theirs = transport.exact(demand, capacity, cost)
    assert (ours * cost).sum() == pytest.approx((theirs * cost).sum(), rel=1e-6)


@few
@given(seeds, sizes, st.sampled_from([1e-9, 1e6, 1e9]), st.sampled_from([0.5, 1.4]))
@example(1749623, 7, 1e6, 0.5)  # Two plans cost the same.
def test_the_unit_of_tasks_has_no_effect_on_a_plan(seed, n, unit, headroom):
    demand, capacity, price, latency = drawn(seed, n, headroom)
    plan = transport.within(demand, capacity, price + latency)
    found = transport.within(unit * demand, unit * capacity, price + latency)
    assert found / unit == pytest.approx(plan, abs=1e-6)


@few
@given(seeds, sizes)
def test_demand_beyond_all_capacity_keeps_its_mass(seed, n):
    demand, capacity, price, latency = drawn(seed, n, headroom=0.7)
    plan = transport.within(demand, capacity, price + latency)
    assert plan.sum(axis=1) == pytest.approx(demand, rel=1e-6, abs=1e-8)


@few
@given(seeds, sizes)
def test_sinkhorn_keeps_rows_and_nears_the_exact_cost_as_the_entropy_fades(seed, n):
    demand, capacity, price, latency = drawn(seed, n)
    cost = price + 0.1 * latency
    exact = (transport.within(demand, capacity, cost) * cost).sum()
    plan = transport.sinkhorn(demand, capacity, cost, 0.01, 5000)
    assert plan.sum(axis=1) == pytest.approx(demand)
    assert (plan * cost).sum() <= 1.1 * exact


@few
@given(seeds, sizes, st.floats(0, 5))
def test_prox_is_the_optimum_of_the_first_two_reward_terms(seed, n, weight):
    rng = np.random.default_rng(seed)
    target, previous, other = (rng.dirichlet(np.ones(n), n) for _ in range(3))

    def reward(shares):
        return -((shares - target) ** 2).sum() - weight * ((shares - previous) ** 2).sum()

    best = transport.prox(target, previous, weight)
    assert best.sum(axis=1) == pytest.approx(np.ones(n))
    assert reward(best) >= reward(other)
    # The gradient vanishes.
    assert (best - target) + weight * (best - previous) == pytest.approx(np.zeros((n, n)))


@pytest.mark.parametrize("weight", [0.4, 1.0, 3.0])
def test_for_independent_targets_prox_takes_smaller_steps_by_the_closed_form(weight):
    rng = np.random.default_rng(0)
    targets = rng.dirichlet(np.ones(6), (20_000, 6))
    shares, steps = targets[0], []
    for target in targets:
        after = transport.prox(target, shares, weight)
        steps.append(((after - shares) ** 2).sum())
        shares = after
    raw = ((targets[1:] - targets[:-1]) ** 2).sum(axis=(1, 2)).mean()
    smoothing = raw / np.mean(steps[100:])
    assert smoothing == pytest.approx((1 + weight) * (1 + 2 * weight), rel=0.02)


def test_the_receding_horizon_moves_less_the_costlier_a_change_is():
    rng = np.random.default_rng(1)
    demand = rng.uniform(5, 10, (3, 4))
    cost = np.tile(rng.uniform(0, 1, (4, 4)), (3, 1, 1))
    before = np.full(4, demand[0].sum() / 4)
    moved = [
        np.abs(
            transport.receding_horizon(demand, np.full(4, 20.0), cost, before, price)[0].sum(axis=0)
            - before
        ).sum()
        for price in (0.0, 0.1, 100.0)
    ]
    assert moved[0] >= moved[1] >= moved[2]
    assert moved[2] == pytest.approx(0, abs=1e-6)


def test_between_64_regions_the_slack_form_is_that_linear_program_too():
    demand, capacity, price, latency = drawn(3, 64)
    cost = price + 0.1 * latency
    plan = transport.within(demand, capacity, cost)
    reference = within_by_linprog(demand, capacity, cost)
    assert (plan * cost).sum() == pytest.approx((reference * cost).sum(), rel=1e-6)
