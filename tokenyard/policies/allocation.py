"""Allocation policies: every baseline by name, how to make one, and the learned planner.

A policy sees states, the plans of the scenario and the forecaster, never the simulator. To add one,
write its class and add its line to `ALLOCATION_BASELINES`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tokenyard.allocation.artifact import AllocationArtifact
from tokenyard.allocation.dynamics import (
    BACKLOG,
    BATCH,
    LOAD,
    MEAN_LATENCY_S,
    MISSED,
    NETWORK,
    NUM_OUT,
    OFFERED,
    PAUSED_S,
    make_model,
)
from tokenyard.allocation.forecast import Forecaster, scenario_forecaster
from tokenyard.allocation.observation import (
    NUM_RECENT_SHOWN,
    known_features,
    observation_size,
    shape_of,
    write_observation,
)
from tokenyard.allocation.planner import (
    HIGHEST_LEVEL,
    HORIZON,
    LOWEST_LEVEL,
    NUM_LEVELS,
    NUM_PARAMETERS,
    PlannerModel,
    best_next,
    make_planner,
)
from tokenyard.allocation.plans import PlanTable, plan_table
from tokenyard.allocation.scenario import AllocationScenario
from tokenyard.frozen import Frozen
from tokenyard.types import AllocationPolicy, AllocationState, FloatArray, IntArray, Plan

_TUNED = "scenarios/tuned/allocation"


class AutoscalerRule(Frozen):
    """Parameters of an autoscaler over replicas of one kind."""

    tensor_parallel: Annotated[int, Field(ge=1)]
    """GPUs per replica; replicas are added and taken away."""
    out_utilisation: Annotated[float, Field(gt=0)] = 0.7
    """GPUs are added above this share of what the plan serves in time."""
    in_utilisation: Annotated[float, Field(gt=0)] = 0.7
    """GPUs are given back where what is left stays below this share."""
    out_window: Annotated[int, Field(ge=1)] = 1
    """Slots of whose demand the highest counts for adding; ahead, where demand is forecast."""
    in_window: Annotated[int, Field(ge=1)] = 1
    """The same for giving back."""
    cooldown_slots: Annotated[int, Field(ge=0)] = 0
    """Slots between a change and the next return."""


class TunedAllocation(Frozen):
    """What was tuned for one scenario on its training part; `pipelines/tune_allocation.py`."""

    scenario: str
    static_plan: Plan
    """The best of all plans that never change."""
    autoscaler: AutoscalerRule
    forecast_autoscaler: AutoscalerRule
    train_usd_per_slot: dict[str, float]
    """Cost of each on the training part, missed requests included."""


def load_tuned_allocation(scenario: str) -> TunedAllocation:
    """Read what ships for a scenario.

    Raises:
        ValueError: Nothing does; names the command that makes it.
    """
    file = resources.files("tokenyard") / _TUNED / f"{scenario}.json"
    if not file.is_file():
        raise ValueError(
            f"no tuned allocation rules for scenario {scenario!r}; make them with "
            f"python pipelines/tune_allocation.py --scenario {scenario}"
        )
    return TunedAllocation.model_validate_json(file.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class AllocationContext:
    """What a policy may be built from."""

    scenario: AllocationScenario
    rng: np.random.Generator
    """Draws the choices of the random policy."""

    @cached_property
    def table(self) -> PlanTable:
        """Every plan of the scenario, with its costs."""
        return plan_table(self.scenario)

    @cached_property
    def tuned(self) -> TunedAllocation:
        """Tuned parameters that ship for the scenario."""
        return load_tuned_allocation(self.scenario.name)


class RandomPlan:
    """Any feasible plan, every slot: what random exploration does to a service."""

    def __init__(self, context: AllocationContext) -> None:
        """Draw from the context's generator."""
        self._plans, self._rng = context.table.plans, context.rng

    def allocate(self, state: AllocationState) -> Plan:
        """Draw a plan."""
        return self._plans[int(self._rng.integers(len(self._plans)))]


class StaticPlan:
    """One plan for ever."""

    def __init__(self, plan: Plan) -> None:
        """Keep to `plan`."""
        self._plan = plan

    def allocate(self, state: AllocationState) -> Plan:
        """Return the one plan, whatever the state."""
        return self._plan


class FixedThresholds:
    """The allocation paper's Fixed policy: above 0.7 of the load hybrid parallelism on all GPUs.

    The paper gives this one rule; ours for the rest: above 0.4 model parallelism on two GPUs, else
    data parallelism on one. Where that is infeasible, the feasible plan of least GPUs that is
    no smaller. Load is demand over what the pool can serve in time.
    """

    def __init__(self, context: AllocationContext) -> None:
        """Choose the three plans."""
        table, num_gpus = context.table, context.scenario.num_gpus
        self._pool_per_s = table.pool_in_time_per_s
        wanted = (("hybrid_tp2", num_gpus), ("model", 2), ("data", 1))
        self._plans = [_like(table, kind, gpus) for kind, gpus in wanted]

    def allocate(self, state: AllocationState) -> Plan:
        """Compare the last slot's load with the thresholds."""
        load = state.demand_per_s[-1] / self._pool_per_s
        return self._plans[0 if load > 0.7 else 1 if load > 0.4 else 2]


def _like(table: PlanTable, kind: str, gpus: int) -> Plan:
    plans = [table.plans[i] for i in table.best_memory]
    same = [plan for plan in plans if plan.parallelism == kind and plan.num_gpus == gpus]
    enough = [plan for plan in plans if plan.num_gpus >= gpus]
    return same[0] if same else min(enough or plans, key=lambda plan: plan.num_gpus)


class Autoscaler:
    """Adds and removes equal replicas by the demand of the last slots, or by its forecast."""

    def __init__(
        self, table: PlanTable, rule: AutoscalerRule, forecaster: Forecaster | None = None,
        slot_s: float = 300.0,
    ) -> None:  # fmt: skip
        """Make the family of plans.

        Args:
            table: The plans.
            rule: Targets and windows.
            forecaster: Windows look ahead through its medians; None: back.
            slot_s: Length of a slot, seconds, where there is a forecaster.
        """
        self._table, self._rule, self._forecaster = table, rule, forecaster
        plans = family(table, rule.tensor_parallel)
        self._family: list[Plan] = [table.plans[i] for i in plans.tolist()]
        self._capacity = table.in_time_per_s[plans]
        self._slot_s = slot_s

    def allocate(self, state: AllocationState) -> Plan:
        """Grow at once, shrink when it is safe and the last change is long enough ago."""
        rule = self._rule
        wanted = self._highest(state, rule.out_window) / rule.out_utilisation
        returned = self._highest(state, rule.in_window) / rule.in_utilisation
        out = self._smallest(wanted)
        now = self._family.index(state.plan) if state.plan in self._family else -1
        if now < 0 or out > now:
            return self._family[out]
        smaller = self._smallest(max(wanted, returned))
        if smaller < now and state.slots_since_switch >= rule.cooldown_slots:
            return self._family[smaller]
        return state.plan

    def _highest(self, state: AllocationState, window: int) -> float:
        if self._forecaster is None:
            return max(state.demand_per_s[-window:])
        slot = round(state.time_s / self._slot_s)
        forecast = self._forecaster.forecast(np.array(state.demand_per_s), slot)
        return float(forecast[:window].max())

    def _smallest(self, wanted: float) -> int:
        enough = np.flatnonzero(self._capacity >= wanted)
        return int(enough[0]) if len(enough) else len(self._family) - 1


def family(table: PlanTable, tensor_parallel: int) -> IntArray:
    """Plans with replicas of so many GPUs, by capacity, one per number of replicas.

    Raises:
        ValueError: There is none that serves in time.
    """
    plans = [
        i
        for i in table.best_memory
        if table.plans[i].tensor_parallel == tensor_parallel and table.in_time_per_s[i] > 0
    ]
    if not plans:
        raise ValueError(f"no plan of this pool serves in time on replicas of {tensor_parallel}")
    # Equal memory and batch limit, so that replicas are equal and the others stay at work.
    largest = table.plans[max(plans, key=lambda i: table.plans[i].num_gpus)]
    alike = [
        i
        for i, plan in enumerate(table.plans)
        if plan.tensor_parallel == tensor_parallel
        and (plan.memory_fraction, plan.max_batch) == (largest.memory_fraction, largest.max_batch)
        and table.in_time_per_s[i] > 0
    ]
    return np.array(sorted(alike, key=lambda i: table.plans[i].num_gpus), np.int64)


def tensor_degrees(table: PlanTable) -> list[int]:
    """Sizes of replicas that some plan serves in time with."""
    found = {p.tensor_parallel for p, c in zip(table.plans, table.in_time_per_s, strict=True) if c}
    return sorted(found)


class Myopic:
    """The plan that is cheapest in the next slot if demand stays as it was."""

    def __init__(self, context: AllocationContext, counts_switching: bool) -> None:
        """Work out the costs.

        Args:
            context: Scenario.
            counts_switching: Whether the restart that a change takes is in the cost.
        """
        self._planner = make_planner(context.scenario)
        self._table, self._counts_switching = context.table, counts_switching

    def allocate(self, state: AllocationState) -> Plan:
        """Look the costs up."""
        costs = self._planner.costs[0, self._level(state.demand_per_s[-1])]
        now = candidate_index(self._table, self._planner, state.plan)
        row = costs[now] if self._counts_switching else np.diag(costs)
        return self._table.plans[int(self._planner.candidates[int(row.argmin())])]

    def _level(self, demand_per_s: float) -> int:
        share = max(demand_per_s / self._planner.pool_per_s, LOWEST_LEVEL)
        step = np.log(HIGHEST_LEVEL / LOWEST_LEVEL) / (NUM_LEVELS - 1)
        return min(round(float(np.log(share / LOWEST_LEVEL) / step)), NUM_LEVELS - 1)


def candidate_index(table: PlanTable, planner: PlannerModel, plan: Plan) -> int:
    """Candidate of the same shape as a plan."""
    for i, candidate in enumerate(planner.candidates.tolist()):
        one = table.plans[candidate]
        if one.num_gpus == plan.num_gpus and one.parallelism == plan.parallelism:
            return i
    raise ValueError(f"{plan} has the shape of no plan of this pool")


class ForecastPlanner:
    """Plans over forecasts by dynamic programming (`tokenyard.allocation.planner`).

    With parameters all zero it is the receding-horizon planner; the learned policy is the same
    class with parameters found by policy search.
    """

    def __init__(
        self,
        scenario: AllocationScenario,
        theta: FloatArray | None = None,
        forecaster: Forecaster | None = None,
    ) -> None:
        """Work out the costs.

        Args:
            scenario: Whose plans and prices.
            theta: Parameters, shape (NUM_PARAMETERS,); None: all zero.
            forecaster: Of demand; None: fitted to the scenario's training part.
        """
        self._table, self._planner = plan_table(scenario), make_planner(scenario)
        self._forecaster = forecaster or scenario_forecaster(scenario)
        self._theta = np.zeros(NUM_PARAMETERS) if theta is None else theta
        self._slot_s, self._slots_per_day = scenario.slot_s, scenario.slots_per_day
        self._scratch = np.zeros((2, len(self._planner.candidates)))

    def allocate(self, state: AllocationState) -> Plan:
        """Forecast, plan, and return the first step."""
        if not state.may_switch:
            return state.plan
        slot = round(state.time_s / self._slot_s)
        forecast, spread, weight = self._forecaster.outlook(np.array(state.demand_per_s), slot)
        last = max(state.demand_per_s[-1], 1e-9)
        surprise = float(np.log(last / max(forecast[0], 1e-9)))
        angle = 2 * np.pi * slot / self._slots_per_day
        now = candidate_index(self._table, self._planner, state.plan)
        chosen = best_next(
            self._planner, forecast[:HORIZON], spread, surprise, np.cos(angle), np.sin(angle),
            float(weight), self._theta, now, self._scratch,
        )  # fmt: skip
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


MEMORY_OUTPUTS = 2
"""Outputs of a hybrid network for the memory fraction: its mean and the logarithm of its spread,
from -1 for 0 to 1 for 1. Before them come preferences for the limits of the batch, where the
scenario has several, and after them those for shapes."""


class NetworkPlan:
    """The plan that a trained network prefers."""

    def __init__(self, artifact: AllocationArtifact) -> None:
        """Prepare the observation.

        Args:
            artifact: Of kind `hybrid_network` or `grid_network`.
        """
        metadata = artifact.metadata
        assert metadata.forecaster is not None
        scenario = metadata.scenario
        self._artifact, self._scenario, self._forecaster = artifact, scenario, metadata.forecaster
        self._table, self._model = plan_table(scenario), make_model(scenario)
        self._shapes = shape_of(self._table)
        self._row = np.zeros(observation_size(self._table), np.float32)
        self._memories = np.array(scenario.memory_fractions)

    def observe(self, state: AllocationState) -> npt.NDArray[np.float32]:
        """What the network was shown in training; the array is reused."""
        scenario, measured, table = self._scenario, state.measured, self._table
        plan, scale = table.find(state.plan), table.pool_in_time_per_s
        demand = np.array(state.demand_per_s)
        slot = round(state.time_s / scenario.slot_s)
        before = np.maximum(len(demand) - 1 - np.arange(NUM_RECENT_SHOWN), 0)
        known = known_features(
            np.array([slot]),
            demand[before][None],
            self._forecaster.forecast(demand, slot)[None],
            scale,
            scenario.slots_per_day,
        )[0]
        out = np.zeros(NUM_OUT)
        out[LOAD], out[BATCH], out[NETWORK] = (
            measured.load, measured.batch_share, measured.network_share,
        )  # fmt: skip
        out[MEAN_LATENCY_S], out[PAUSED_S] = measured.latency_s, measured.paused_s
        out[BACKLOG], out[OFFERED], out[MISSED] = (
            state.backlog_requests, 1.0, measured.missed_fraction,
        )  # fmt: skip
        write_observation(
            self._model, plan, state.slots_since_switch, state.budget_left, state.may_switch, out,
            known, self._shapes[plan], scale, self._row,
        )  # fmt: skip
        return self._row

    def allocate(self, state: AllocationState) -> Plan:
        """Take the best output; memory is the mean, in the scenario's steps."""
        if not state.may_switch:
            return state.plan
        table, metadata = self._table, self._artifact.metadata
        outputs = network_outputs(self._artifact, self.observe(state)[None])[0]
        preferences = outputs[-int(table.shape_mask.sum()) :]
        preferences[self._shapes[table.find(state.plan)]] += metadata.stay_bonus
        if metadata.kind == "grid_network":
            return table.plans[table.best_memory[int(preferences.argmax())]]
        kind, gpus = np.argwhere(table.shape_mask)[int(preferences.argmax())]
        *limits, mean, _ = outputs[: -len(preferences)]
        memory = float(np.clip((mean + 1.0) / 2.0, 0.0, 1.0))
        step = max(int(np.searchsorted(self._memories, memory + 1e-6, side="right")) - 1, 0)
        limit = int(np.argmax(limits)) if limits else 0
        return table.plans[int(table.index[kind, gpus, step, limit])]


def network_outputs(
    artifact: AllocationArtifact, observations: npt.NDArray[np.float32]
) -> FloatArray:
    """Outputs of an exported network, shape (num, outputs); ReLU stands between its layers."""
    arrays = artifact.arrays
    x = (observations - arrays["mean"]) / arrays["std"]
    *hidden, (weight, bias) = artifact.layers
    for w, b in hidden:
        x = np.maximum(x @ w.T + b, 0.0)
    return np.asarray(x @ weight.T + bias)


def learned_for(
    artifact: AllocationArtifact, scenario: AllocationScenario, source: str
) -> AllocationPolicy:
    """Make the policy of an artifact for a scenario that may not be the one it was trained on.

    Args:
        artifact: The trained policy.
        scenario: Whose pool it is to decide for.
        source: Where it was found, for the error.

    Raises:
        ValueError: It decides between other plans.
    """
    theirs = artifact.metadata.scenario
    if plan_table(theirs).plans != plan_table(scenario).plans:
        raise ValueError(
            f"{source} decides between the plans of scenario {theirs.name!r}, which are not those "
            f"of {scenario.name!r}"
        )
    return learned_allocation(artifact)


def learned_allocation(artifact: AllocationArtifact) -> AllocationPolicy:
    """Make the policy of an artifact."""
    scenario = artifact.metadata.scenario
    if artifact.metadata.kind.endswith("network"):
        return NetworkPlan(artifact)
    if artifact.metadata.kind == "table":
        return ValueTable(scenario, artifact.arrays["edges_per_s"], artifact.arrays["best"])
    return ForecastPlanner(scenario, artifact.arrays["theta"], artifact.metadata.forecaster)


def _reactive(context: AllocationContext) -> Autoscaler:
    rule = AutoscalerRule(tensor_parallel=tensor_degrees(context.table)[0])
    return Autoscaler(context.table, rule)


def _forecasting(context: AllocationContext) -> Autoscaler:
    forecaster = scenario_forecaster(context.scenario)
    rule = context.tuned.forecast_autoscaler
    return Autoscaler(context.table, rule, forecaster, context.scenario.slot_s)


ALLOCATION_BASELINES: dict[str, Callable[[AllocationContext], AllocationPolicy]] = {
    "random": RandomPlan,
    "fixed": FixedThresholds,
    "best_static": lambda context: StaticPlan(context.tuned.static_plan),
    "myopic_no_switching": lambda context: Myopic(context, counts_switching=False),
    "myopic": lambda context: Myopic(context, counts_switching=True),
    "autoscaler_70": _reactive,
    "autoscaler_tuned": lambda c: Autoscaler(c.table, c.tuned.autoscaler),
    "autoscaler_forecast": _forecasting,
    "planner": lambda context: ForecastPlanner(context.scenario),
}
"""Name of every baseline to what makes a fresh one."""


def make_allocation_policy(name: str, context: AllocationContext) -> AllocationPolicy:
    """Make a fresh baseline by name.

    Raises:
        ValueError: The name is unknown, or tuned parameters are missing.
    """
    if name not in ALLOCATION_BASELINES:
        close = difflib.get_close_matches(name, ALLOCATION_BASELINES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        known = sorted(ALLOCATION_BASELINES)
        raise ValueError(f"unknown allocation policy {name!r}; choose one of {known}{hint}")
    return ALLOCATION_BASELINES[name](context)
