"""Where each kind of parallelism is cheapest, and what reward weights buy.

The cheapest kind of plan by load; the Pareto front of goodput and dollars over random weights of
the paper's terms beside that of plans that never change, and hypervolumes; and planners that attain
an SLO as a constraint at least dollars or least energy. Fronts are of the training part,
constraints are also run on tests.

Under a constraint the price of an SLO violation is found, not chosen: it is the Lagrangian's
multiplier, raised while there are too many violations and lowered while there are fewer than need
be (dual ascent, in the logarithm of the multiplier; Boyd and Vandenberghe 2004, "Convex
Optimization", chapter 5). The planner is solved anew for every multiplier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tokenyard.allocation import dynamics as dyn
from tokenyard.allocation.demand import DemandStream, demand_source
from tokenyard.allocation.plans import load_allocation, plan_table
from tokenyard.allocation.problem import PROBLEM
from tokenyard.allocation.scenario import AllocationScenario, Objective
from tokenyard.allocation.simulator import AllocationOutcomes
from tokenyard.allocation.simulator.run import StreamRunner
from tokenyard.problem import Row
from tokenyard.statistics.pareto import front, hypervolume
from tokenyard.types import FloatArray

POOLS = PROBLEM.suites["allocation"]
KINDS = {"data": "#3B7BA8", "model": "#E1812C", "hybrid": "#5B9F5B"}
LOADS: FloatArray = np.linspace(0.01, 1.0, 100)
"""Demand over the pool's goodput capacity."""
_STEP, _STEPS = 1.0, 20
"""Change of the multiplier's logarithm per percent of violations too many, at first; the k-th
step is smaller by the root of k."""
Rows = list[Row]


def cheapest_kinds(scenario: AllocationScenario) -> list[str]:
    """Kind of the plan of least cost at each of `LOADS`, SLO violations included."""
    table, model = plan_table(scenario), dyn.make_model(scenario)
    out = np.zeros(dyn.NUM_OUT)
    kinds = []
    for load in LOADS:
        demand = load * table.pool_goodput_capacity_per_s
        rewards = [dyn.run_slot(model, p, p, demand, 0.0, out) for p in range(table.num_plans)]
        kinds.append(table.plans[int(np.argmax(rewards))].parallelism.split("_")[0])
    return kinds


def region_rows() -> Rows:
    """Share of the range of load in which each kind is cheapest, by pool."""
    rows: Rows = []
    for name in POOLS:
        kinds = np.array(cheapest_kinds(load_allocation(name)))
        shares = {f"{kind}_fraction": float((kinds == kind).mean()) for kind in KINDS}
        rows.append({"table": "regions", "scenario": name, **shares})
    return rows


def measured(outcomes: AllocationOutcomes, scenario: AllocationScenario) -> dict[str, float]:
    """Goodput, dollars and joules of a run."""
    summary = PROBLEM.summary(scenario, [outcomes])
    keys = "goodput_fraction", "cost_per_hour", "cost_per_million_tokens", "energy_j_per_token"
    return {key: summary[key] for key in keys}


def front_rows(scenario: AllocationScenario, num_weightings: int, seed: int) -> tuple[Rows, Rows]:
    """Return the points of static plans and planners, and the hypervolumes of their fronts."""
    [stream] = PROBLEM.streams(scenario, "validation", 1, seed=0).streams
    runner = StreamRunner(scenario, stream)
    points: Rows = []
    for number, plan in enumerate(runner.sim.table.plans):
        outcomes = runner.run_plans(np.full(stream.num_slots, number))
        label = f"{plan.parallelism} {plan.num_gpus} at {plan.memory_fraction}"
        points.append({"family": "static", "weights": label, **measured(outcomes, scenario)})
    rng = np.random.default_rng(seed)
    names = ("goodput", "power", "latency", "memory", "load")
    for weights in rng.dirichlet(np.ones(len(names)), num_weightings):
        objective = Objective(**dict(zip(names, weights.tolist(), strict=True)))
        label = " ".join(f"{weight:.2f}" for weight in weights)
        outcomes = _planned(scenario, stream, objective)
        points.append({"family": "adaptive", "weights": label, **measured(outcomes, scenario)})
    most = float(runner.sim.table.usd_per_hour.max())
    volumes: Rows = []
    for families in (("static",), ("adaptive",), ("static", "adaptive")):
        pairs = goods(points, families)
        volume = hypervolume(pairs, np.array([0.0, -most])) / most
        volumes.append(
            {"table": "hypervolume", "family": " and ".join(families), "hypervolume": volume,
             "front_points": len(front(pairs))}
        )  # fmt: skip
    return [{"table": "points", **point} for point in points], volumes


def goods(points: Sequence[Mapping[str, Any]], families: tuple[str, ...]) -> FloatArray:
    """Goodput and minus dollars per hour: both are better higher; shape (n, 2)."""
    return np.array(
        [
            (point["goodput_fraction"], -point["cost_per_hour"])
            for point in points
            if point["family"] in families
        ]
    )


def constraint_rows(scenario: AllocationScenario, attained: float, seed: int) -> Rows:
    """Measure planners that attain the SLO at least cost, in training and in tests."""
    rows: Rows = []
    test = demand_source(scenario).test(seed)
    for goal, cost in (("dollars", Objective(usd=1.0)), ("energy", Objective(energy=1.0))):
        objective, train_attainment = dual_ascent(scenario, cost, attained)
        outcomes = _planned(scenario, test, objective)
        rows.append(
            {
                "table": "constraint",
                "least": goal,
                "multiplier": objective.violations,
                "train_attainment": train_attainment,
                "test_attainment": _attainment(outcomes),
                **measured(outcomes, scenario),
            }
        )
    return rows


def dual_ascent(
    scenario: AllocationScenario, cost: Objective, target: float
) -> tuple[Objective, float]:
    """Return the cost with the smallest price tried that attains the SLO in training, and how far.

    Both `target` and what is attained are shares of requests.

    Raises:
        ValueError: No price attains the SLO.
    """
    stream = demand_source(scenario).train(30_000)
    multiplier = scenario.violation_usd
    history: list[tuple[float, float]] = []
    for step in range(_STEPS):
        objective = cost.model_copy(update={"violations": multiplier})
        history.append((multiplier, _attainment(_planned(scenario, stream, objective))))
        percent_short = 100 * (target - history[-1][1])
        multiplier *= float(np.exp(np.clip(_STEP * percent_short / np.sqrt(step + 1), -1.0, 1.0)))
    kept = [tried for tried in history if tried[1] >= target]
    if not kept:
        raise ValueError(
            f"no price of an SLO violation up to {max(history)[0]:.3g} keeps {target:.1%} of "
            f"requests within the SLO: the best was {max(share for _, share in history):.2%}"
        )
    least, share = min(kept)
    return cost.model_copy(update={"violations": least}), share


def _planned(
    scenario: AllocationScenario, stream: DemandStream, objective: Objective
) -> AllocationOutcomes:
    """Live through a stream with the planner of an objective."""
    return StreamRunner(scenario, stream, objective=objective).run_planner()


def _attainment(outcomes: AllocationOutcomes) -> float:
    """Share of all requests that attained the SLO."""
    violations, offered = outcomes.column(dyn.VIOLATIONS), outcomes.column(dyn.OFFERED)
    return 1.0 - float(violations.sum() / offered.sum())


def draw_regions() -> Figure:
    """Draw one bar per pool, coloured by the cheapest kind at each load."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    width = LOADS[1] - LOADS[0]
    for row, name in enumerate(POOLS):
        colours = [KINDS[kind] for kind in cheapest_kinds(load_allocation(name))]
        axes.barh(np.full(len(LOADS), row), width, left=LOADS - width, color=colours, height=0.75)
    axes.set_yticks(range(len(POOLS)), POOLS)
    axes.invert_yaxis()
    axes.set(xlabel="demand over the pool's goodput capacity", xlim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour, label=kind) for kind, colour in KINDS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=8)
    return figure


def draw_front(points: Rows, scenario: AllocationScenario) -> Figure:
    """Draw goodput over dollars and the front, for both families."""
    figure = Figure(figsize=(5.4, 3.6), layout="constrained", dpi=150)
    axes = figure.subplots()
    for family, colour in (("static", "0.55"), ("adaptive", "#3B7BA8")):
        pairs = goods(points, (family,))
        best = front(pairs)
        axes.plot(-pairs[:, 1], pairs[:, 0], "o", color=colour, markersize=3, alpha=0.6)
        axes.step(
            -best[:, 1], best[:, 0], where="pre", color=colour, label=f"{family}: front"
        )  # fmt: skip
    axes.set(xlabel="dollars per hour", ylabel="share of requests that attain the SLO")
    axes.set_title(scenario.name, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    return figure
