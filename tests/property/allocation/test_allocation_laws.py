"""Laws of the allocation simulator (docs/invariants.md, A1 to A8)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import scaled

from tokenyard.allocation import dynamics
from tokenyard.allocation.demand import DemandStream, demand_source
from tokenyard.allocation.forecast import scenario_forecaster
from tokenyard.allocation.plans import ATTAINED, UTILISATION, load_allocation, plan_table
from tokenyard.allocation.scenario import SwitchBudget, allocation_names
from tokenyard.allocation.simulator import AllocationSim

SCENARIO = load_allocation("a100x8_13b")
SCENARIO = SCENARIO.model_copy(
    update={"demand": SCENARIO.demand.model_copy(update={"source": "generator"})}
)
TABLE = plan_table(SCENARIO)
MODEL = dynamics.make_model(SCENARIO)
PLANS = st.integers(0, TABLE.num_plans - 1)


@given(old=PLANS, new=PLANS, demand=st.floats(0, 60), backlog=st.floats(0, 2000))
def test_what_comes_is_served_dropped_or_waits_and_shares_are_shares(old, new, demand, backlog):
    out = np.zeros(dynamics.NUM_OUT)
    dynamics.run_slot(MODEL, old, new, demand, backlog, out)
    left = out[dynamics.OFFERED] + backlog - out[dynamics.SERVED] - out[dynamics.DROPPED]
    assert left == pytest.approx(out[dynamics.BACKLOG], abs=1e-6)
    assert -1e-9 <= out[dynamics.VIOLATIONS] <= out[dynamics.OFFERED] + 1e-9
    for column in (dynamics.SERVED, dynamics.DROPPED, dynamics.BACKLOG, dynamics.ENERGY_J):
        assert out[column] >= 0
    for column in (dynamics.LOAD, dynamics.BATCH, dynamics.NETWORK):
        assert 0 <= out[column] <= 1 + 1e-9
    assert out[dynamics.ENERGY_J] <= TABLE.pool_w * SCENARIO.slot_s * (1 + 1e-9)


@given(plan=PLANS, demand=st.floats(0, 60), more=st.floats(0, 20), backlog=st.floats(0, 500))
def test_more_demand_or_backlog_never_means_fewer_violations(plan, demand, more, backlog):
    one, two, three = (np.zeros(dynamics.NUM_OUT) for _ in range(3))
    dynamics.run_slot(MODEL, plan, plan, demand, 0.0, one)
    dynamics.run_slot(MODEL, plan, plan, demand + more, 0.0, two)
    dynamics.run_slot(MODEL, plan, plan, demand, backlog, three)
    assert two[dynamics.VIOLATIONS] >= one[dynamics.VIOLATIONS] - 1e-6
    assert three[dynamics.VIOLATIONS] >= one[dynamics.VIOLATIONS] - 1e-6


@pytest.mark.parametrize("name", allocation_names())
def test_attainment_falls_with_load_and_power_rises(name):
    table = plan_table(load_allocation(name))
    assert (np.diff(table.curves[:, :, ATTAINED], axis=1) <= 1e-9).all()
    assert UTILISATION[0] == 0
    assert UTILISATION[-1] == 1
    assert (table.goodput_capacity_per_s <= table.capacity_per_s).all()


@given(
    switches=st.integers(0, 3), period=st.integers(1, 12), keep=st.integers(0, 5),
    actions=st.lists(PLANS, min_size=40, max_size=40), seed=st.integers(0, 100),
)  # fmt: skip
@settings(max_examples=scaled(25))
def test_no_policy_can_exceed_the_budget_or_leave_a_plan_too_early(
    switches, period, keep, actions, seed
):
    budget = SwitchBudget(switches=switches, period_slots=period)
    scenario = SCENARIO.model_copy(update={"switch_budget": budget, "hysteresis_slots": keep})
    sim = AllocationSim(scenario, 1, 40, scenario_forecaster(SCENARIO))
    sim.load(0, demand_source(SCENARIO).episode(40, np.random.default_rng(seed)), plan=0)
    plans = [0]
    for action in actions:
        allowed = sim.may_switch(0)
        sim.step(np.array([action]))
        plans.append(sim.plan(0))
        assert allowed or plans[-1] == plans[-2]
    changed = np.flatnonzero(np.diff(plans))
    for start in range(0, 40, period):
        assert ((changed >= start) & (changed < start + period)).sum() <= switches
    assert (np.diff(changed) >= keep).all()


def test_a_forecast_made_live_is_the_one_that_training_saw():
    stream = demand_source(SCENARIO).episode(50, np.random.default_rng(0))
    forecaster = scenario_forecaster(SCENARIO)
    everything = forecaster.forecast_all(stream)
    for slot in (3, 200, stream.first, len(stream.per_s) - 1):
        live = forecaster.forecast(stream.per_s[:slot], stream.start_slot + slot)
        assert live == pytest.approx(everything[slot], rel=1e-12)
    outlooks = forecaster.outlook_all(stream)
    for slot in (3, 20, 200, stream.first, len(stream.per_s) - 1):
        live_outlook = forecaster.outlook(stream.per_s[:slot], stream.start_slot + slot)
        for one, all_of_it in zip(live_outlook, outlooks, strict=True):
            assert one == pytest.approx(all_of_it[slot], rel=1e-9)


def test_no_forecast_sees_the_demand_it_forecasts():
    stream = demand_source(SCENARIO).episode(50, np.random.default_rng(0))
    forecaster, slot = scenario_forecaster(SCENARIO), 600
    other = stream.per_s.copy()
    other[slot:] *= 7
    changed = DemandStream(other, stream.first, stream.start_slot)
    for look in (forecaster.forecast_all, lambda one: np.hstack(forecaster.outlook_all(one)[:2])):
        before, after = (look(one)[: slot + 1] for one in (stream, changed))
        assert np.array_equal(before, after)


def test_compiled_and_plain_slots_are_equal():
    rng = np.random.default_rng(0)
    plain = dynamics.run_slot.py_func
    for _ in range(200):
        old, new = rng.integers(TABLE.num_plans, size=2)
        demand, backlog = rng.uniform(0, 40), rng.uniform(0, 300)
        ours, theirs = np.zeros(dynamics.NUM_OUT), np.zeros(dynamics.NUM_OUT)
        dynamics.run_slot(MODEL, old, new, demand, backlog, ours)
        plain(MODEL, old, new, demand, backlog, theirs)
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12)
