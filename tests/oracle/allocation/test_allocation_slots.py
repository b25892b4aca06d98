"""One slot worked out by hand, and the fluid against a clock of small steps."""

import numpy as np
import pytest

from tokenyard.allocation import dynamics
from tokenyard.allocation.plans import (
    ATTAINED,
    NUM_CURVES,
    POWER_W,
    UTILISATION,
    load_allocation,
    plan_table,
)
from tokenyard.allocation.scenario import Objective
from tokenyard.allocation.types import Plan

SCENARIO = load_allocation("a100x8_13b")


def toy_model(restart_s=90.0, during=((0, -1), (-1, 1))):
    """Two plans of 2 and 4 requests/s that attain 1 - u and draw 100 + 100 u watts."""
    plans = np.zeros((2, dynamics.NUM_PLAN_COLUMNS))
    plans[:, dynamics.CAPACITY_PER_S] = 2.0, 4.0
    plans[:, dynamics.USD_PER_SLOT] = 0.5, 1.0
    plans[:, dynamics.MEMORY_SHARE] = 0.25, 0.5
    plans[:, dynamics.IDLE_W] = 100.0, 100.0
    curves = np.zeros((2, len(UTILISATION), NUM_CURVES))
    curves[:, :, ATTAINED] = 1 - UTILISATION
    curves[:, :, POWER_W] = 100 + 100 * UTILISATION
    constants = np.zeros(dynamics.NUM_CONSTANTS)
    constants[:] = 300.0, restart_s, 30.0, 2.0, 20.0, 400.0, 100.0
    weights = np.array(Objective(usd=1, violations=0.002, goodput=0.5, power=0.25).values)
    return dynamics.Model(plans, curves, np.array(during, np.int64), constants, weights)


def test_the_reward_of_a_restart_is_the_one_worked_out_by_hand():
    """Demand 1/s, from plan 0 to plan 1 with all stopped for 90 s.

    90 arrive meanwhile and 30 are left to wait: 60 dropped. Then a queue of 30 drains at 3/s, late
    until it is 8: (30 - 8) / 3 s. The other 210 - 22/3 s bring 1/s, of which 1 - 1/4 attain.
    """
    out = np.zeros(dynamics.NUM_OUT)
    reward = dynamics.run_slot(toy_model(), 0, 1, 1.0, 0.0, out)
    on_time = (210 - 22 / 3) * 0.75
    served = 30 + 210
    energy_j = 90 * 100 + 210 * (100 + 100 * served / (4 * 210))
    assert out[dynamics.DROPPED] == pytest.approx(60, abs=1e-9)
    assert out[dynamics.VIOLATIONS] == pytest.approx(300 - on_time, abs=1e-9)
    assert out[dynamics.ENERGY_J] == pytest.approx(energy_j, abs=1e-6)
    expected = -1.0 - 0.002 * (300 - on_time)
    expected += 0.5 * on_time / 300 + 0.25 * (1 - energy_j / 300 / 400)
    # Curves are linear between points, and these are lines: nothing is lost by interpolation.
    assert reward == pytest.approx(expected, abs=1e-9)


def test_growing_by_equal_replicas_leaves_the_old_ones_at_work():
    model = toy_model(during=((0, 0), (1, 1)))
    out = np.zeros(dynamics.NUM_OUT)
    dynamics.run_slot(model, 0, 1, 1.0, 0.0, out)
    assert out[dynamics.DROPPED] == 0
    assert out[dynamics.VIOLATIONS] == pytest.approx(300 - 90 * 0.5 - 210 * 0.75, abs=1e-9)


@pytest.mark.parametrize("demand", [0.5, 1.9, 3.0, 5.0])
@pytest.mark.parametrize("backlog", [0.0, 25.0])
def test_queue_and_drops_are_those_of_a_queue_stepped_in_small_steps(demand, backlog):
    """A queue in order whose head leaves after 30 s, over a pause and a slot of plan 0."""
    model = toy_model()
    out = np.zeros(dynamics.NUM_OUT)
    dynamics.run_slot(model, 1, 0, demand, backlog, out)
    dt = 0.05
    steps = round(300 / dt)
    # A cohort per step; the backlog arrived evenly over the patience before the slot.
    waiting = np.zeros(steps + round(30 / dt))
    offset = round(30 / dt)
    waiting[:offset] = backlog / offset
    head, dropped, served = 0, 0.0, 0.0
    for step in range(steps):
        waiting[offset + step] = demand * dt
        while head < step:
            dropped += waiting[head]
            waiting[head] = 0.0
            head += 1
        left = (2.0 if step * dt >= 90 else 0.0) * dt
        while left > 0 and head <= offset + step:
            part = min(left, waiting[head])
            waiting[head] -= part
            served += part
            left -= part
            head += waiting[head] <= 0
    assert out[dynamics.DROPPED] == pytest.approx(dropped, rel=0.05, abs=1.0)
    assert out[dynamics.SERVED] == pytest.approx(served, rel=0.05, abs=1.0)


def test_dollars_of_a_slot_are_those_of_the_gpus():
    table = plan_table(SCENARIO)
    plan = table.find(Plan("data", 3, 0.9))
    out = np.zeros(dynamics.NUM_OUT)
    dynamics.run_slot(dynamics.make_model(SCENARIO), plan, plan, 0.1, 0.0, out)
    assert out[dynamics.USD] == pytest.approx(3 * 5.12 / 12, abs=1e-12)
