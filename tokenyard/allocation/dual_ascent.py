"""A promise kept as a constraint: the price of a missed request is found, not chosen.

Minimise a cost subject to a share of requests served as promised: the Lagrangian's multiplier is
what a missed request costs, raised while too many are missed and lowered while fewer are than need
be (dual ascent, in the logarithm of the multiplier; Boyd and Vandenberghe 2004, "Convex
Optimization", chapter 5). The planner is solved anew for every multiplier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenyard.allocation.demand import DemandStream, demand_source
from tokenyard.allocation.dynamics import MISSED, OFFERED
from tokenyard.allocation.planner import NUM_PARAMETERS, make_planner
from tokenyard.allocation.scenario import AllocationScenario, Objective
from tokenyard.allocation.simulator import AllocationOutcomes
from tokenyard.sim.allocation_run import StreamRunner

_STEP = 1.0
"""Change of the multiplier's logarithm per percent that is missed too much, at first; the k-th
step is smaller by the root of k."""


@dataclass(frozen=True)
class Constrained:
    """What dual ascent found on the training part."""

    objective: Objective
    """The cost, and the multiplier as the weight of a missed request."""
    attainment: float
    """Share of requests that were served as promised."""
    history: tuple[tuple[float, float], ...]
    """Multiplier and attainment of every step."""


def dual_ascent(
    scenario: AllocationScenario,
    cost: Objective | None = None,
    target: float = 0.99,
    num_steps: int = 20,
    seed: int = 0,
) -> Constrained:
    """Find the least of the multipliers tried that keeps the promise on the training part.

    Args:
        scenario: What is planned for.
        cost: What is to be small, without a weight on missed requests; None: dollars.
        target: Least share of requests served as promised, in (0, 1).
        num_steps: Multipliers tried.
        seed: Of the noise of demand.

    Raises:
        ValueError: None of them keeps it.
    """
    stream = demand_source(scenario).train(30_000 + seed)
    weights = cost or Objective(usd=1.0)
    multiplier = scenario.missed_usd
    history: list[tuple[float, float]] = []
    for step in range(num_steps):
        objective = weights.model_copy(update={"missed": multiplier})
        history.append((multiplier, attainment(run_planner(scenario, stream, objective))))
        percent_short = 100 * (target - history[-1][1])
        multiplier *= float(np.exp(np.clip(_STEP * percent_short / np.sqrt(step + 1), -1.0, 1.0)))
    kept = [one for one in history if one[1] >= target]
    if not kept:
        raise ValueError(
            f"no price of a missed request up to {max(history)[0]:.3g} keeps {target:.1%} of "
            f"requests in time: the best was {max(share for _, share in history):.2%}"
        )
    least, share = min(kept)
    return Constrained(weights.model_copy(update={"missed": least}), share, tuple(history))


def run_planner(
    scenario: AllocationScenario, stream: DemandStream, objective: Objective
) -> AllocationOutcomes:
    """Live through a stream with the planner of an objective."""
    runner = StreamRunner(scenario, stream, objective=objective)
    return runner.run_planner(make_planner(scenario, objective), np.zeros(NUM_PARAMETERS))


def attainment(outcomes: AllocationOutcomes) -> float:
    """Share of all requests that were served as promised."""
    return 1.0 - float(outcomes.column(MISSED).sum() / outcomes.column(OFFERED).sum())
