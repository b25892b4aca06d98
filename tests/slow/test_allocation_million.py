"""A million slots: nothing infeasible, no budget exceeded, by plan and blindly."""

import numpy as np
import pytest

from envs import ParallelismVectorEnv
from tokenyard.allocation.demand import DemandStream, demand_source
from tokenyard.allocation.plans import load_allocation
from tokenyard.allocation.simulator.run import StreamRunner

pytestmark = pytest.mark.slow

SCENARIO = load_allocation("a100x8_13b_budget")
DAY = SCENARIO.slots_per_day


def test_the_planner_names_nothing_infeasible_and_keeps_its_budget_for_a_million_slots():
    source = demand_source(SCENARIO)
    slots = 0
    while slots < 1_000_000:
        draws = [source.train(slots + i).per_s for i in range(20)]
        stream = DemandStream(np.concatenate(draws), 0, 0)
        runner = StreamRunner(SCENARIO, stream)
        start = runner.sim.plan(0)
        outcomes = runner.run_planner()
        assert outcomes.num_refused == 0
        changed = np.concatenate([[start], outcomes.plans[:-1]]) != outcomes.plans
        per_day = changed[: len(changed) // DAY * DAY].reshape(-1, DAY).sum(axis=1)
        assert per_day.max() <= SCENARIO.switch_budget.switches
        assert np.diff(np.flatnonzero(changed)).min() >= SCENARIO.hysteresis_slots
        slots += stream.num_slots


def test_blind_actions_change_nothing_that_is_not_allowed_for_a_million_slots():
    env = ParallelismVectorEnv(256, scenario=SCENARIO, episode_slots=DAY)
    env.action_space.seed(0)
    env.reset(seed=0)
    budget = SCENARIO.switch_budget.switches
    changes = np.zeros(256, np.int64)
    plans = np.array([env.sim.plan(copy) for copy in range(256)])
    for step in range(1_000_000 // 256 + 1):
        allowed = np.array([env.sim.may_switch(copy) for copy in range(256)])
        env.step(env.action_space.sample())
        now = np.array([env.sim.plan(copy) for copy in range(256)])
        assert ((now >= 0) & (now < env.sim.table.num_plans)).all()
        if step % (DAY + 1) == DAY:
            changes[:] = 0  # A new episode begins from a plan of its own.
        else:
            assert (allowed | (now == plans)).all()
            changes += now != plans
            assert changes.max() <= budget
        plans = now
