"""Many copies of a pool that serves one demand each, stepped by one compiled call.

What a plan does in a slot is `tokenyard.allocation.dynamics`; here are the clock, what is seen and
what is allowed. A plan that is infeasible (-1), or that budget or hysteresis forbid, is refused:
the pool keeps its plan, and the refusal is counted.

Arrays of N copies, T slots and F columns of a stream:
- `streams`, shape (N, T, F): demand, then what is known before the slot (`stream_rows`).
- `numbers`, shape (N, NUM_NUMBERS), `counts`, shape (N, NUM_COUNTS): state of each copy.
- `outs`, shape (N, NUM_OUT): what happened in the last slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenyard.allocation.demand import DemandStream
from tokenyard.allocation.dynamics import BACKLOG, NUM_OUT, Model, make_model, run_slot
from tokenyard.allocation.forecast import Forecaster
from tokenyard.allocation.observation import (
    NUM_KNOWN,
    NUM_RECENT_SHOWN,
    known_features,
    observation_size,
    shape_of,
    write_observation,
)
from tokenyard.allocation.plans import plan_table
from tokenyard.allocation.scenario import AllocationScenario, Objective
from tokenyard.compiled import compiled
from tokenyard.types import FloatArray, IntArray

PLAN, SLOT, LAST, SINCE, LEFT, REFUSED, SATURATED = range(7)
NUM_COUNTS = 7
PERIOD, BUDGET, HYSTERESIS = range(3)
"""Rules: slots of a budget's period, changes in it (-1: any number), slots a plan is kept."""
DEMAND, KNOWN = 0, 1
"""First columns of a stream: demand of the slot; what is known before it starts there."""
_FOREVER = 1_000_000

Observations = npt.NDArray[np.float32]


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


def stream_rows(
    stream: DemandStream, forecaster: Forecaster, scale_per_s: float, slots_per_day: int
) -> FloatArray:
    """Return demand and what is known before each slot, shape (slots + 1, 1 + NUM_KNOWN).

    Known are sine and cosine of the time of day, the demand of the last slots (latest first) and
    forecasts, both over `scale_per_s`. The last row shows what comes after the stream.
    """
    n = len(stream.per_s)
    # A last slot of unknown demand, so that the state after the stream can be shown.
    longer = DemandStream(
        np.append(stream.per_s, stream.per_s[-1]), stream.first, stream.start_slot
    )
    rows = np.zeros((n + 1, 1 + NUM_KNOWN))
    rows[:n, DEMAND] = stream.per_s
    before = np.arange(n + 1)[:, None] - 1 - np.arange(NUM_RECENT_SHOWN)
    rows[:, KNOWN:] = known_features(
        stream.start_slot + np.arange(n + 1),
        stream.per_s[np.maximum(before, 0)],
        forecaster.forecast_all(longer),
        scale_per_s,
        slots_per_day,
    )
    return rows


@dataclass(frozen=True, eq=False)
class AllocationOutcomes:
    """What happened slot by slot; arrays of shape (slots,), or (slots, NUM_OUT)."""

    plans: IntArray
    outs: FloatArray
    num_refused: int
    """Actions that were refused."""

    def column(self, which: int) -> FloatArray:
        """One column of `tokenyard.allocation.dynamics`, shape (slots,)."""
        values: FloatArray = self.outs[:, which]
        return values


class AllocationSim:
    """N independent copies of one pool."""

    def __init__(
        self,
        scenario: AllocationScenario,
        num_copies: int,
        num_slots: int,
        forecaster: Forecaster,
        objective: Objective | None = None,
    ) -> None:
        """Make empty copies.

        Args:
            scenario: Pool, plans, rules.
            num_copies: N.
            num_slots: Longest stream that is loaded, its history not counted.
            forecaster: Whose forecasts observations show.
            objective: What is rewarded, in place of the scenario's.
        """
        self.scenario = scenario
        self.table = plan_table(scenario)
        self.model: Model = make_model(scenario, objective)
        self.forecaster = forecaster
        self.rules = np.array(
            [
                scenario.switch_budget.period_slots if scenario.switch_budget else 1,
                scenario.switch_budget.switches if scenario.switch_budget else -1,
                scenario.hysteresis_slots,
            ],
            np.int64,
        )
        self.scale_per_s = self.table.pool_goodput_capacity_per_s
        self.shapes = shape_of(self.table)
        self._streams = np.zeros((num_copies, num_slots + 1, 1 + NUM_KNOWN))
        self.counts = np.zeros((num_copies, NUM_COUNTS), np.int64)
        self.numbers = np.zeros((num_copies, 1))
        self.outs = np.zeros((num_copies, NUM_OUT))
        self._rewards = np.zeros(num_copies)
        self._bounds = np.zeros(num_copies)
        self._stepped = np.zeros(num_copies, np.bool_)
        self._out = np.zeros(NUM_OUT)
        self._rows = np.zeros((num_copies, observation_size(self.table)), np.float32)

    @property
    def num_refused(self) -> int:
        """Actions refused so far, over all copies."""
        return int(self.counts[:, REFUSED].sum())

    @property
    def num_saturated(self) -> int:
        """Numbers of observations set to the limit so far."""
        return int(self.counts[:, SATURATED].sum())

    def stream(self, copy: int) -> FloatArray:
        """Rows of a copy's stream (`stream_rows`)."""
        rows: FloatArray = self._streams[copy]
        return rows

    def plan(self, copy: int) -> int:
        """Plan in force in a copy."""
        return int(self.counts[copy, PLAN])

    def may_switch(self, copy: int) -> bool:
        """Whether budget and hysteresis allow a copy another plan in the next slot."""
        return bool(may_switch(self.counts[copy], self.rules))

    def load(self, copy: int, stream: DemandStream, plan: int | None = None) -> None:
        """Start a copy on a stream.

        Args:
            copy: Which.
            stream: Its demand.
            plan: Plan in force at the start; None: the cheapest that is enough for the first slot
                known, or else the largest.
        """
        slots_per_day = self.scenario.slots_per_day
        rows = stream_rows(stream, self.forecaster, self.scale_per_s, slots_per_day)
        shown = rows[stream.first :]
        self._streams[copy, : len(shown)] = shown
        self.counts[copy, LAST] = stream.num_slots
        self.restart(copy, self.sufficient_plan(stream) if plan is None else plan)

    def restart(self, copy: int, plan: int) -> None:
        """Go back to the start of a copy's stream."""
        counts = self.counts[copy]
        counts[PLAN], counts[SLOT] = plan, 0
        counts[SINCE] = _FOREVER
        counts[LEFT] = self.rules[BUDGET]
        self.numbers[copy] = 0.0
        self.outs[copy] = 0.0

    def sufficient_plan(self, stream: DemandStream) -> int:
        """The cheapest plan for the demand before the first slot, with a fifth to spare."""
        table, before = self.table, stream.per_s[max(stream.first - 1, 0)] * 1.2
        enough = [i for i in table.best_memory if table.goodput_capacity_per_s[i] >= before]
        if not enough:
            return max(table.best_memory, key=lambda i: float(table.goodput_capacity_per_s[i]))
        return min(enough, key=lambda i: float(table.usd_per_hour[i]))

    def observe(self) -> Observations:
        """Return what every copy shows, shape (N, size); the array is reused."""
        observe_all(
            self.model, self._streams, self.rules, self.counts, self.outs, self.shapes,
            self.scale_per_s, self._rows,
        )  # fmt: skip
        return self._rows

    def step(self, actions: IntArray) -> FloatArray:
        """Give every copy a plan for its next slot (-1: none of the feasible ones).

        Raises:
            ValueError: An action is no plan.
        """
        actions = np.asarray(actions, np.int64)
        if actions.max() >= self.table.num_plans or actions.min() < -1:
            raise ValueError(f"actions {actions} must be plans below {self.table.num_plans}, or -1")
        self._stepped = ~self.ended()
        step_all(
            self.model, self._streams, self.rules, self.counts, self.numbers, actions, self.outs,
            self._rewards,
        )  # fmt: skip
        return self._rewards

    def bounds(self) -> FloatArray:
        """Best reward of the last slot of every copy that took the last step, else 0; shape (N,).

        As if changes were free and nothing waited: it depends on demand alone.
        """
        bound_all(self.model, self._streams, self.counts, self._stepped, self._out, self._bounds)
        return self._bounds

    def ended(self) -> npt.NDArray[np.bool_]:
        """Whether the stream of a copy is over, shape (N,)."""
        return np.asarray(self.counts[:, SLOT] >= self.counts[:, LAST])
