"""An SLO as a constraint: the price of an SLO violation is found, not chosen.

Minimise a cost subject to a share of requests that attain the SLO: the Lagrangian's multiplier is
what an SLO violation costs, raised while there are too many and lowered while there are fewer than
need be (dual ascent, in the logarithm of the multiplier; Boyd and Vandenberghe 2004, "Convex
Optimization", chapter 5). The planner is solved anew for every multiplier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenyard.allocation.demand import DemandStream, demand_source
from tokenyard.allocation.dynamics import OFFERED, VIOLATIONS
from tokenyard.allocation.scenario import AllocationScenario, Objective
from tokenyard.allocation.simulator import AllocationOutcomes
from tokenyard.allocation.simulator.run import StreamRunner

_STEP, _STEPS = 1.0, 20
"""Change of the multiplier's logarithm per percent of violations too many, at first; the k-th
step is smaller by the root of k."""


@dataclass(frozen=True)
class Constrained:
    """What dual ascent found on the training part."""

    objective: Objective
    """The cost, and the multiplier as the weight of an SLO violation."""
    attainment: float
    """Share of requests that attained the SLO."""
    history: tuple[tuple[float, float], ...]
    """Multiplier and attainment of every step."""


def dual_ascent(
    scenario: AllocationScenario,
    cost: Objective | None = None,
    target: float = 0.99,
) -> Constrained:
    """Return the smallest multiplier tried that attains the SLO on the training part.

    Args:
        scenario: Scenario to plan for.
        cost: Objective to minimise, without a weight on SLO violations; None: dollars.
        target: Least share of requests that attain the SLO, in (0, 1).

    Raises:
        ValueError: No multiplier attains the SLO.
    """
    stream = demand_source(scenario).train(30_000)
    weights = cost or Objective(usd=1.0)
    multiplier = scenario.violation_usd
    history: list[tuple[float, float]] = []
    for step in range(_STEPS):
        objective = weights.model_copy(update={"violations": multiplier})
        history.append((multiplier, attainment(run_planner(scenario, stream, objective))))
        percent_short = 100 * (target - history[-1][1])
        multiplier *= float(np.exp(np.clip(_STEP * percent_short / np.sqrt(step + 1), -1.0, 1.0)))
    kept = [tried for tried in history if tried[1] >= target]
    if not kept:
        raise ValueError(
            f"no price of an SLO violation up to {max(history)[0]:.3g} keeps {target:.1%} of "
            f"requests within the SLO: the best was {max(share for _, share in history):.2%}"
        )
    least, share = min(kept)
    return Constrained(weights.model_copy(update={"violations": least}), share, tuple(history))


def run_planner(
    scenario: AllocationScenario, stream: DemandStream, objective: Objective
) -> AllocationOutcomes:
    """Live through a stream with the planner of an objective."""
    return StreamRunner(scenario, stream, objective=objective).run_planner()


def attainment(outcomes: AllocationOutcomes) -> float:
    """Share of all requests that attained the SLO."""
    return 1.0 - float(outcomes.column(VIOLATIONS).sum() / outcomes.column(OFFERED).sum())
