"""What learning makes of allocation: a planner over forecasts, a table, and networks.

They see states, the plans of the scenario and the forecaster; `tokenyard.allocation.artifact` makes
them of artifacts.
"""

from __future__ import annotations

from copy import copy
from typing import Self

import numpy as np
import numpy.typing as npt

from tokenyard.allocation import dynamics as dyn
from tokenyard.allocation import observation as ob
from tokenyard.allocation.demand import DemandStream
from tokenyard.allocation.forecast import Forecaster, StreamForecasts, scenario_forecaster
from tokenyard.allocation.markov import planner_on
from tokenyard.allocation.planner import COSTS, best_next, make_planner, make_scratch
from tokenyard.allocation.plans import plan_table
from tokenyard.allocation.policies.rules import candidate_index
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.allocation.types import AllocationState, Plan
from tokenyard.network import Network
from tokenyard.types import FloatArray, IntArray


class ForecastingPolicy:
    """Decides by forecasts."""

    _forecaster: Forecaster | StreamForecasts

    def on(self, stream: DemandStream) -> Self:
        """The same policy for a known stream, all of whose forecasts are made at once."""
        policy = copy(self)
        assert isinstance(self._forecaster, Forecaster)
        policy._forecaster = StreamForecasts(self._forecaster, stream)
        return policy


class ForecastPlanner(ForecastingPolicy):
    """Plans over forecasts by dynamic programming (`tokenyard.allocation.planner`)."""

    def __init__(self, scenario: AllocationScenario, forecaster: Forecaster | None = None) -> None:
        """Work out the costs.

        Args:
            scenario: Whose plans and prices.
            forecaster: Of demand; None: fitted to the scenario's training part.
        """
        self._forecaster = forecaster = forecaster or scenario_forecaster(scenario)
        self._table, self._planner = plan_table(scenario), planner_on(scenario, forecaster)
        self._slot_s = scenario.slot_s
        self._scratch = make_scratch(self._planner)

    def allocate(self, state: AllocationState) -> Plan:
        """Forecast, plan, and return the first step."""
        if not state.may_switch:
            return state.plan
        slot = round(state.time_s / self._slot_s)
        cases, spread = self._forecaster.cases(state.demand_per_s, slot)
        now = candidate_index(self._table, self._planner, state.plan)
        chosen = best_next(self._planner, cases, spread, now, self._scratch)
        return state.plan if chosen == now else self._table.plans[self._planner.candidates[chosen]]


class ValueTable:
    """Looks up the best plan by backlog, part of the day, bin of the last demand, plan in force."""

    def __init__(
        self, scenario: AllocationScenario, edges_per_s: FloatArray, best: IntArray
    ) -> None:
        """Keep the table.

        Args:
            scenario: Whose plans.
            edges_per_s: Upper ends of all bins but the last, shape (B - 1,).
            best: Candidate to take, shape (W, D, B, S): W is 2 where it matters whether requests
                wait, else 1; D equal parts of the day; S candidates of `make_planner`.
        """
        self._table, self._planner = plan_table(scenario), make_planner(scenario)
        self._edges, self._best, self._slot_s = edges_per_s, best, scenario.slot_s

    def allocate(self, state: AllocationState) -> Plan:
        """Look the plan up."""
        waits, parts, _, _ = self._best.shape
        wait = min(int(state.backlog_requests > 1.0), waits - 1)
        # The last demand's part of the day is what the table was learned with.
        part = int(max(state.time_s - self._slot_s, 0.0) % 86_400 / 86_400 * parts)
        level = int(np.searchsorted(self._edges, state.demand_per_s[-1], side="right"))
        now = candidate_index(self._table, self._planner, state.plan)
        chosen = int(self._best[wait, part, level, now])
        return state.plan if chosen == now else self._table.plans[self._planner.candidates[chosen]]


class NetworkPlan(ForecastingPolicy):
    """The planner with its expected costs corrected by a trained network."""

    def __init__(
        self,
        scenario: AllocationScenario,
        forecaster: Forecaster,
        network: Network,
        planner_scale: float,
    ) -> None:
        """Prepare the observation.

        Args:
            scenario: Whose plans.
            forecaster: Of demand.
            network: From observations to preferences for shapes.
            planner_scale: What the planner's costs lower a preference by, per `cost_unit`.
        """
        self._scenario, self._forecaster = scenario, forecaster
        self._network, self._planner_scale = network, planner_scale
        self._table, self._model = plan_table(scenario), dyn.make_model(scenario)
        self._planner = planner_on(scenario, forecaster)
        self._shapes, self._unit = ob.shape_of(self._table), ob.cost_unit(scenario, self._table)
        self._scratch = make_scratch(self._planner)
        size = ob.observation_size(self._table) + len(self._planner.candidates)
        self._row = np.zeros(size, np.float32)

    def observe(self, state: AllocationState) -> npt.NDArray[np.float32]:
        """Return the observation that the network trained on; the array is reused."""
        scenario, measured, table = self._scenario, state.measured, self._table
        plan, scale = table.find(state.plan), table.pool_goodput_capacity_per_s
        demand = state.demand_per_s
        slot = round(state.time_s / scenario.slot_s)
        before = np.maximum(len(demand) - 1 - np.arange(ob.NUM_RECENT_SHOWN), 0)
        shown = ob.known_features(
            np.array([slot]),
            np.array([[demand[slot] for slot in before]]),
            self._forecaster.forecast(demand, slot)[None],
            scale,
            scenario.slots_per_day,
        )[0]
        out = np.zeros(dyn.NUM_OUT)
        out[dyn.LOAD], out[dyn.BATCH], out[dyn.NETWORK] = (
            measured.load, measured.batch_share, measured.network_share,
        )  # fmt: skip
        out[dyn.MEAN_LATENCY_S], out[dyn.PAUSED_S] = measured.latency_s, measured.paused_s
        out[dyn.BACKLOG], out[dyn.OFFERED], out[dyn.VIOLATIONS] = (
            state.backlog_requests, 1.0, measured.violation_fraction,
        )  # fmt: skip
        ob.write_observation(
            self._model, plan, state.slots_since_switch, state.budget_left, state.may_switch, out,
            shown, self._shapes[plan], scale, self._row,
        )  # fmt: skip
        cases, spread = self._forecaster.cases(demand, slot)
        best_next(self._planner, cases, spread, int(self._shapes[plan]), self._scratch)
        ob.write_costs(self._scratch[COSTS], self._unit, self._row)
        return self._row

    def allocate(self, state: AllocationState) -> Plan:
        """Take the shape that planner and network together prefer."""
        if not state.may_switch:
            return state.plan
        row, table = self.observe(state), self._table
        corrections = self._network(row[None])[0]
        chosen = int((corrections - self._planner_scale * row[-len(corrections) :]).argmax())
        is_in_force = chosen == self._shapes[table.find(state.plan)]
        return state.plan if is_in_force else table.plans[self._planner.candidates[chosen]]
