"""How many servers each region needs: Eq 6 of the TORTA paper, for servers that are not alike.

`N = min(S, ceil((Q + F + sigma sqrt(F)) / C))` takes the mean capacity C of a server. Servers go on
in a fixed order and differ, so here the first of them whose capacities together reach the same need
are taken; where all are alike this is Eq 6. F is what the plan in force sends to the region.

Source: Du et al. 2025, arXiv 2507.10259v2, Eq 6. Ours: the sum over servers, and F as the greatest
forecast within the time that a server takes to warm up, as the next slot alone comes too late.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenyard.regions.scenario import RegionScenario
from tokenyard.regions.types import RegionState
from tokenyard.types import FloatArray, IntArray


@dataclass(frozen=True)
class ActivationRule:
    """What Eq 6 leaves open."""

    sigma: float = 1.65
    """Standard deviations of a Poisson count kept in reserve."""
    utilisation: float = 0.8
    """Share of a server's time that is planned to be filled."""
    lead_slots: int = 3
    """Slots from off to ready, this one included."""

    @classmethod
    def from_scenario(cls, scenario: RegionScenario) -> ActivationRule:
        """Take the scenario's parameters and its mean warm-up time."""
        micro = scenario.micro
        lead = int(np.ceil(np.mean(micro.warmup_s) / scenario.slot_s)) + 1
        return cls(micro.sigma, micro.utilisation, min(lead, scenario.forecast_slots))


def targets(state: RegionState, shares: FloatArray, rule: ActivationRule) -> IntArray:
    """Return the servers that should be on, shape (R,); at least one where any is there."""
    return targets_for(state, inflows(state.forecast[: rule.lead_slots], shares).max(axis=0), rule)


def inflows(demand: FloatArray, shares: FloatArray) -> FloatArray:
    """Return what each region serves of demands of shape (H, R) under a plan, shape (H, R).

    Sums go from the first region to the last: a product of matrices would round as the processor
    has it, and a server more or less can hang on that.
    """
    return np.asarray((demand[:, :, None] * shares[None]).sum(axis=1))


def targets_for(state: RegionState, inflow: FloatArray, rule: ActivationRule) -> IntArray:
    """The same for tasks per slot that are expected in each region, shape (R,)."""
    inflow = np.maximum(inflow, 0.0)
    need = state.waiting + inflow + rule.sigma * np.sqrt(inflow)
    reached = np.cumsum(state.server_tasks, axis=1) * rule.utilisation >= need[:, None] - 1e-9
    there = state.server_tasks > 0
    # Servers before the first prefix that suffices, those that are down left out; all if none does.
    first = np.where(reached.any(axis=1), reached.argmax(axis=1), reached.shape[1] - 1)
    upto = np.arange(there.shape[1]) <= first[:, None]
    counts = (there & upto).sum(axis=1)
    return np.asarray(np.maximum(counts, np.minimum(1, there.sum(axis=1))))
