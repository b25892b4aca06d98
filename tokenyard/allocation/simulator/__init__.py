"""Many copies of a pool that serves one demand each, stepped by one compiled call.

What a plan does in a slot is `tokenyard.allocation.dynamics`; the clock, what is seen and what is
allowed are in `kernel`. A plan that is infeasible (-1), or that budget or hysteresis forbid, is
refused: the pool keeps its plan, and the refusal is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenyard.allocation import observation as ob
from tokenyard.allocation.demand import DemandStream
from tokenyard.allocation.dynamics import NUM_OUT, Model, make_model
from tokenyard.allocation.forecast import Forecaster
from tokenyard.allocation.markov import planner_on
from tokenyard.allocation.planner import make_scratch
from tokenyard.allocation.plans import plan_table
from tokenyard.allocation.scenario import AllocationScenario, Objective
from tokenyard.allocation.simulator import kernel
from tokenyard.types import FloatArray, IntArray

_FOREVER = 1_000_000

Observations = npt.NDArray[np.float32]


def stream_rows(
    stream: DemandStream, forecaster: Forecaster, scale_per_s: float, slots_per_day: int
) -> FloatArray:
    """Return demand and what is known before each slot, shape (slots + 1, 1 + NUM_KNOWN).

    Known are sine and cosine of the time of day, the demand of the last slots (latest first) and
    forecasts, both over `scale_per_s`. The last row shows what comes after the stream.
    """
    n = len(stream.per_s)
    rows = np.zeros((n + 1, 1 + ob.NUM_KNOWN))
    rows[:n, kernel.DEMAND] = stream.per_s
    before = np.arange(n + 1)[:, None] - 1 - np.arange(ob.NUM_RECENT_SHOWN)
    rows[:, kernel.KNOWN :] = ob.known_features(
        stream.start_slot + np.arange(n + 1),
        stream.per_s[np.maximum(before, 0)],
        forecaster.forecast_all(_longer(stream)),
        scale_per_s,
        slots_per_day,
    )
    return rows


def _longer(stream: DemandStream) -> DemandStream:
    """With a last slot of unknown demand, so that the state after the stream can be shown."""
    return DemandStream(np.append(stream.per_s, stream.per_s[-1]), stream.first, stream.start_slot)


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
        shows_planner: bool = False,
    ) -> None:
        """Make empty copies.

        Args:
            scenario: Pool, plans, rules.
            num_copies: N.
            num_slots: Longest stream that is loaded, its history not counted.
            forecaster: Whose forecasts observations show.
            objective: What is rewarded, in place of the scenario's.
            shows_planner: Whether observations end with what the planner expects of every shape.
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
        self.shapes = ob.shape_of(self.table)
        self._streams = np.zeros((num_copies, num_slots + 1, 1 + ob.NUM_KNOWN))
        self.counts = np.zeros((num_copies, kernel.NUM_COUNTS), np.int64)
        self.numbers = np.zeros((num_copies, 1))
        self.outs = np.zeros((num_copies, NUM_OUT))
        self._rewards = np.zeros(num_copies)
        self._bounds = np.zeros(num_copies)
        self._stepped = np.zeros(num_copies, np.bool_)
        self._out = np.zeros(NUM_OUT)
        size = ob.observation_size(self.table)
        self._planner = planner_on(scenario, forecaster, objective) if shows_planner else None
        if self._planner is not None:
            size += len(self._planner.candidates)
            self._unit = ob.cost_unit(scenario, self.table)
            self._scratch = make_scratch(self._planner)
            self._cases, self._spreads = np.zeros((0, 0, 0, 0)), np.zeros((0, 0, 0))
        self._rows = np.zeros((num_copies, size), np.float32)

    @property
    def num_refused(self) -> int:
        """Actions refused so far, over all copies."""
        return int(self.counts[:, kernel.REFUSED].sum())

    @property
    def num_saturated(self) -> int:
        """Numbers of observations set to the limit so far."""
        return int(self.counts[:, kernel.SATURATED].sum())

    def stream(self, copy: int) -> FloatArray:
        """Rows of a copy's stream (`stream_rows`)."""
        rows: FloatArray = self._streams[copy]
        return rows

    def plan(self, copy: int) -> int:
        """Plan in force in a copy."""
        return int(self.counts[copy, kernel.PLAN])

    def may_switch(self, copy: int) -> bool:
        """Whether budget and hysteresis allow a copy another plan in the next slot."""
        return bool(kernel.may_switch(self.counts[copy], self.rules))

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
        if self._planner is not None:
            cases, spreads = self.forecaster.cases_all(_longer(stream))
            if not len(self._cases):
                copies, slots, _ = self._streams.shape
                self._cases = np.zeros((copies, slots, *cases.shape[1:]))
                self._spreads = np.zeros((copies, slots, *spreads.shape[1:]))
            self._cases[copy, : len(cases)], self._spreads[copy, : len(spreads)] = cases, spreads
        self.counts[copy, kernel.LAST] = stream.num_slots
        self.restart(copy, self.sufficient_plan(stream) if plan is None else plan)

    def restart(self, copy: int, plan: int) -> None:
        """Go back to the start of a copy's stream."""
        counts = self.counts[copy]
        counts[kernel.PLAN], counts[kernel.SLOT] = plan, 0
        counts[kernel.SINCE] = _FOREVER
        counts[kernel.LEFT] = self.rules[kernel.BUDGET]
        self.numbers[copy] = 0.0
        self.outs[copy] = 0.0

    def sufficient_plan(self, stream: DemandStream) -> int:
        """The cheapest plan for the demand before the first slot, with a fifth to spare."""
        return self.table.cheapest_for(stream.per_s[max(stream.first - 1, 0)] * 1.2)

    def observe(self) -> Observations:
        """Return what every copy shows, shape (N, size); the array is reused."""
        kernel.observe_all(
            self.model, self._streams, self.rules, self.counts, self.outs, self.shapes,
            self.scale_per_s, self._rows,
        )  # fmt: skip
        if self._planner is not None:
            kernel.show_costs(
                self._planner, self._unit, self._cases, self._spreads, self.counts, self.shapes,
                self._scratch, self._rows,
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
        kernel.step_all(
            self.model, self._streams, self.rules, self.counts, self.numbers, actions, self.outs,
            self._rewards,
        )  # fmt: skip
        return self._rewards

    def bounds(self) -> FloatArray:
        """Best reward of the last slot of every copy that took the last step, else 0; shape (N,).

        As if changes were free and nothing waited: it depends on demand alone.
        """
        kernel.bound_all(
            self.model, self._streams, self.counts, self._stepped, self._out, self._bounds
        )
        return self._bounds

    def ended(self) -> npt.NDArray[np.bool_]:
        """Whether the stream of a copy is over, shape (N,)."""
        return np.asarray(self.counts[:, kernel.SLOT] >= self.counts[:, kernel.LAST])
