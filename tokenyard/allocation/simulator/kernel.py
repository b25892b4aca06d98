"""The clock of a pool, what is seen of it and what is allowed, compiled.

What a plan does in a slot is `tokenyard.allocation.dynamics`. Arrays of N copies, T slots and F
columns of a stream:
- `streams`, shape (N, T, F): demand, then what is known before the slot (`stream_rows`).
- `numbers`, shape (N, NUM_NUMBERS), `counts`, shape (N, NUM_COUNTS): state of each copy.
- `outs`, shape (N, NUM_OUT): what happened in the last slot.
"""

from __future__ import annotations

import numpy as np

from tokenyard.allocation.dynamics import BACKLOG, run_slot
from tokenyard.allocation.observation import write_costs, write_observation
from tokenyard.allocation.planner import COSTS, best_next
from tokenyard.compiled import compiled

PLAN, SLOT, LAST, SINCE, LEFT, REFUSED, SATURATED, NUM_COUNTS = range(8)
PERIOD, BUDGET, HYSTERESIS = range(3)
"""Rules: slots of a budget's period, changes in it (-1: any number), slots a plan is kept."""
DEMAND, KNOWN = 0, 1
"""First columns of a stream: demand of the slot; what is known before it starts there."""


@compiled
def may_switch(counts, rules):
    """Whether budget and hysteresis allow another plan."""
    return counts[SINCE] >= rules[HYSTERESIS] and counts[LEFT] != 0


@compiled
def step_one(model, stream, rules, counts, numbers, action, out):
    """Let one copy live through its next slot; return the reward."""
    old = counts[PLAN]
    new = action
    if new < 0 or (new != old and not may_switch(counts, rules)):
        counts[REFUSED] += 1
        new = old
    reward = run_slot(model, old, new, stream[counts[SLOT], DEMAND], numbers[0], out)
    numbers[0] = out[BACKLOG]
    counts[SINCE] += 1
    if new != old:
        counts[SINCE] = 1
        if rules[BUDGET] >= 0:
            counts[LEFT] -= 1
    counts[PLAN] = new
    counts[SLOT] += 1
    if rules[BUDGET] >= 0 and counts[SLOT] % rules[PERIOD] == 0:
        counts[LEFT] = rules[BUDGET]
    return reward


@compiled
def observe_one(model, stream, rules, counts, out, shape_of, scale_per_s, row):
    """Write what one copy shows before its next slot into `row`."""
    plan = counts[PLAN]
    left = counts[LEFT] / rules[BUDGET] if rules[BUDGET] > 0 else 1.0
    counts[SATURATED] += write_observation(
        model, plan, counts[SINCE], left, may_switch(counts, rules), out,
        stream[counts[SLOT], KNOWN:], shape_of[plan], scale_per_s, row,
    )  # fmt: skip


@compiled
def step_all(model, streams, rules, counts, numbers, actions, outs, rewards):
    """Step every copy that has slots left; the others earn 0 and stay."""
    for i in range(len(actions)):
        rewards[i] = 0.0
        if counts[i, SLOT] < counts[i, LAST]:
            rewards[i] = step_one(
                model, streams[i], rules, counts[i], numbers[i], actions[i], outs[i]
            )


@compiled
def free_reward(model, demand, out):
    """Highest reward of a slot over all plans, were each in force already and nothing waiting."""
    best = -np.inf
    for plan in range(len(model.plans)):
        best = max(best, run_slot(model, plan, plan, demand, 0.0, out))
    return best


@compiled
def bound_all(model, streams, counts, stepped, out, bounds):
    """Best reward of the slot that each copy just stepped, were changes free; 0 for the others."""
    for i in range(len(bounds)):
        bounds[i] = 0.0
        if stepped[i]:
            bounds[i] = free_reward(model, streams[i, counts[i, SLOT] - 1, DEMAND], out)


@compiled
def observe_all(model, streams, rules, counts, outs, shape_of, scale_per_s, rows):
    """Write the observation of every copy."""
    for i in range(len(rows)):
        observe_one(model, streams[i], rules, counts[i], outs[i], shape_of, scale_per_s, rows[i])


@compiled
def show_costs(planner, unit, cases, spreads, counts, shape_of, scratch, rows):
    """Write what the planner expects of every shape into the end of every copy's observation."""
    for i in range(len(rows)):
        slot, shape = counts[i, SLOT], shape_of[counts[i, PLAN]]
        best_next(planner, cases[i, slot], spreads[i, slot], shape, scratch)
        write_costs(scratch[COSTS], unit, rows[i])
